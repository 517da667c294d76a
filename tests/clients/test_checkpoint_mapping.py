"""transformers' own tables: what ``save_pretrained`` writes is loaded into shards, and the other way round.

Bit for bit.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from fsdp2.checkpoint.from_transformers import TransformersMapping, transformers_mapping
from fsdp2.checkpoint.pieces import resolved_to_load
from tests.clients.compare import whole
from tests.clients.hugging_face import VOCAB, model_class, tiny
from tests.harness.compare import compare_values
from tests.harness.distributed import RankContext, distributed
from tests.harness.messages import error_of, wrapped
from tests.harness.weight_files import ONE, assert_same, read, safetensors

pytest.importorskip("transformers.conversion_mapping")

_TEXT = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
_TEXT |= {"num_attention_heads": 2, "num_key_value_heads": 2}
_IMAGE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
# Fused projections that the model splits; tables by the name of a class, which fully_shard changes; tied embeddings.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "NomicBertModel": ("NomicBertConfig", _TEXT),
    "Dinov2WithRegistersModel": ("Dinov2WithRegistersConfig", _IMAGE),
    "Molmo2TextModel": ("Molmo2TextConfig", {**_TEXT, "head_dim": 8}),
    "PhimoeForCausalLM": ("PhimoeConfig", {**_TEXT, "num_local_experts": 4, "tie_word_embeddings": True}),
}


def _sharded(model: Any, ctx: RankContext) -> Any:
    for layer in next(module for module in model.modules() if isinstance(module, nn.ModuleList)):
        fsdp2.fully_shard(layer, mesh=ctx.mesh_1d())
    return fsdp2.fully_shard(model, mesh=ctx.mesh_1d())


def _whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "llama"])
@distributed(2)
def test_experts_go_in_and_out_as_transformers_stores_them(ctx: RankContext, name: str, tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    if ctx.rank == 0:
        tiny(name).save_pretrained(theirs, max_shard_size="20KB")
    dist.barrier()
    files = read(theirs)
    assert any(".experts.3." in key for key in files) is (name != "llama")
    expected = model_class(name).from_pretrained(theirs)
    with torch.device("meta"):
        model = _sharded(tiny(name), ctx)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.model.rotary_emb.inv_freq.copy_(expected.model.rotary_emb.inv_freq)
        model.model.rotary_emb.original_inv_freq.copy_(expected.model.rotary_emb.original_inv_freq)
    assert fsdp2.checkpoint.load_safetensors(model, theirs, mapping=transformers_mapping(model)) == ([], [])
    compare_values("loaded", _whole(model), expected.state_dict())

    fsdp2.checkpoint.save_safetensors(model, ours, max_shard_size="20KB", mapping=transformers_mapping(model))
    if ctx.rank == 0:
        model.config.save_pretrained(ours)
    dist.barrier()
    assert_same(read(ours), files)
    compare_values("from_pretrained", model_class(name).from_pretrained(ours).state_dict(), expected.state_dict())


def _other(name: str, seed: int) -> Any:
    transformers = importlib.import_module("transformers")
    config, values = OTHERS[name]
    torch.manual_seed(seed)
    return getattr(transformers, name)(getattr(transformers, config)(**values))


@pytest.mark.every_case
@pytest.mark.parametrize("name", OTHERS)
@distributed(2)
def test_tables_of_other_models_go_in_and_out(ctx: RankContext, name: str, tmp_path: Path) -> None:
    if ctx.rank == 0:
        _other(name, 0).save_pretrained(tmp_path / "theirs")
    dist.barrier()
    model = fsdp2.fully_shard(_other(name, 1), mesh=ctx.mesh_1d())
    assert fsdp2.checkpoint.load_safetensors(model, tmp_path / "theirs", mapping=transformers_mapping(model)) == (
        [],
        [],
    )
    compare_values("loaded", _whole(model), _other(name, 0).state_dict())
    fsdp2.checkpoint.save_safetensors(model, tmp_path / "ours", mapping=transformers_mapping(model))
    assert_same(read(tmp_path / "ours"), read(tmp_path / "theirs"))
    assert set(read(tmp_path / "theirs")) != set(_whole(model))


# Without a process group


@pytest.fixture(scope="module")
def core() -> Any:
    return importlib.import_module("transformers.core_model_loading")


def _load(mapping: Any, files: dict[str, tuple[int, ...]], model: dict[str, tuple[int, ...]]) -> Any:
    return resolved_to_load(mapping, files, model, "load_safetensors")


def test_an_expert_that_no_file_has_is_named(tmp_path: Path) -> None:
    model = tiny("mixtral")
    model.save_pretrained(tmp_path)
    files = read(tmp_path)
    del files["model.layers.1.block_sparse_moe.experts.3.w3.weight"]
    safetensors.save_file(files, tmp_path / ONE)
    assert error_of(
        lambda: fsdp2.checkpoint.load_safetensors(model, tmp_path, mapping=transformers_mapping(model))
    ) == wrapped(
        f"ValueError: load_safetensors: {tmp_path} does not fit this MixtralForCausalLM. Nothing was loaded.\n"
        "- 'model.layers.1.mlp.experts.gate_up_proj' would be made of 8 tensors, but no file has "
        "'model.layers.1.block_sparse_moe.experts.3.w3.weight'."
    )


def test_steps_that_look_at_shapes_are_done_only_where_they_differ(core: Any) -> None:
    converter = core.WeightConverter("old", "new", [core.Transpose(0, 1, check_dims=True)])
    mapping = _of(core, [converter])
    for shape, turned in (((2, 3), (0, 1)), ((3, 2), (1, 0))):
        (resolved,) = _load(mapping, {"a.old": shape}, {"a.new": (2, 3)})
        assert resolved.pieces[0].dims == turned
    with pytest.raises(ValueError, match=r"'a.new' by Transpose, which there is no rule for. Use from_pretrained"):
        mapping.rules_to_save({"a.new": (2, 3)})


def test_a_step_that_has_no_rule_is_named(core: Any) -> None:
    mapping = _of(core, [core.WeightConverter("old", "new", [core.Interleave(dim=0)])])
    said = r"transformers_mapping: transformers makes 'a.new' by Interleave\(dim=0\), which there is no rule for"
    with pytest.raises(ValueError, match=said):
        _load(mapping, {"a.old": (2, 3)}, {"a.new": (2, 3)})
    with pytest.raises(ValueError, match=said):
        mapping.rules_to_save({"a.new": (2, 3)})
    assert _load(mapping, {"a.other": (2, 3)}, {"a.other": (2, 3)}) == []  # nothing needs it
    split = _of(core, [core.WeightConverter("qkv", ["q", "k"], [core.Chunk(dim=0)])])
    with pytest.raises(ValueError, match=r"the model has nothing for 'k', of which 'a.qkv' of the files is made, too"):
        split.rules_to_save({"a.q": (2, 3)})


def test_models_that_have_no_tables_are_refused() -> None:
    with pytest.raises(TypeError, match=r"Linear is no model of transformers. Pass the model itself"):
        transformers_mapping(nn.Linear(2, 2))
    model = tiny()
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match=r"the model is quantised. Load it by from_pretrained"):
        transformers_mapping(model)


def _of(core: Any, transforms: list[Any]) -> Any:
    return TransformersMapping(core, transforms, transforms, "model")
