"""accelerate's FSDP2 plugin: ``Accelerator.prepare`` and what training scripts do around it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.compare import files_in, whole
from tests.clients.hugging_face import accelerator, adamw, batch, hf_client, state, tiny, told_when_pinning, train


def prepared(name: str = "llama", *, changes: Any = None, model: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    """The engine, the model and its optimizer. ``dynamo``: arguments of the plugin."""
    from accelerate.utils import TorchDynamoPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy

    if options.get("cpu_offload") == "unpinned":  # there is nothing to pin for without an accelerator
        options["cpu_offload"] = CPUOffloadPolicy(pin_memory=False)
    if "dynamo" in options:
        options["dynamo_plugin"] = TorchDynamoPlugin(backend="aot_eager", **options.pop("dynamo"))
    engine = accelerator(**options)
    model = model or tiny(name, **(changes or {}))
    return engine, *engine.prepare(model, adamw(model.parameters()))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reshard_after_forward": False},
        {"cpu_ram_efficient_loading": False},
        {"cpu_ram_efficient_loading": True},
        {"activation_checkpointing": True},
        {"mixed_precision": "bf16"},
        {"gradient_accumulation_steps": 2},
        {"auto_wrap_policy": "no_wrap"},
        {"name": "vit", "transformer_cls_names_to_wrap": ["ViTLayer"]},
        {"changes": {"tie_word_embeddings": True}, "cpu_ram_efficient_loading": False},
        {"changes": {"tie_word_embeddings": True}, "cpu_ram_efficient_loading": True},
        {"cpu_offload": "unpinned"},
        {"dynamo": {"use_regional_compilation": False}},
        {"dynamo": {"use_regional_compilation": True}},
    ],
    ids=str,
)
@hf_client()
def test_a_loop_trains_the_same(rank: int, folder: Path, options: dict[str, Any]) -> Any:
    """Also what is tied: names of parameters that are others' are not among those compared."""
    return train(*prepared(**options), rank, range(4), name=options.get("name", "llama"))


# The model's default names ViTEmbeddings, too; accelerate shards this module, then a module inside it.
@hf_client(fails=("Invariant encountered", "'projection.weight' is already sharded"))
def test_a_vision_model_with_the_default_policy_is_refused(rank: int, folder: Path) -> None:
    prepared("vit")


@hf_client(fails=(told_when_pinning(), "no error"))
def test_pinned_offload_needs_an_accelerator_in_torch(rank: int, folder: Path) -> None:
    prepared(cpu_offload=True)


@hf_client()
def test_a_model_made_on_the_meta_device_trains_the_same(rank: int, folder: Path) -> Any:
    from accelerate import init_empty_weights

    if rank == 0:
        model = tiny()
    else:
        with init_empty_weights():
            model = tiny()
        for parameter in model.parameters():  # accelerate finds the optimizer's parameters by address
            empty = torch.full_like(parameter, torch.nan, device="cpu")
            torch.utils.swap_tensors(parameter, torch.nn.Parameter(empty))
    return train(*prepared(model=model, cpu_ram_efficient_loading=True), rank)


@hf_client(num_ranks=4)
def test_replicas_of_shards_train_the_same(rank: int, folder: Path) -> Any:
    from accelerate.parallelism_config import ParallelismConfig

    # The mesh of accelerate has the device of the state, which is the CPU here.
    return train(*prepared(parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)), rank)


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@hf_client()
def test_a_saved_state_goes_on_the_same(rank: int, folder: Path, kind: str) -> Any:
    engine, *trained = prepared(state_dict_type=kind)
    train(engine, *trained, rank, range(2))
    engine.save_state(str(folder / "state"))
    expected = train(engine, *trained, rank, range(2, 4))
    engine.load_state(str(folder / "state"))
    found = train(engine, *trained, rank, range(2, 4))
    assert all(map(torch.equal, found["losses"], expected["losses"])), "loading did not bring the state back"
    return {**found, "files": files_in(folder, contents=["pytorch_model_fsdp.bin", "*.json", "*.safetensors"])}


@hf_client()
def test_a_saved_model_is_the_same_file(rank: int, folder: Path) -> Any:
    engine, model, optimizer = prepared()
    train(engine, model, optimizer, rank, range(1))
    engine.save_model(model, str(folder / "model"))
    engine.unwrap_model(model).save_pretrained(
        folder / "pretrained", is_main_process=engine.is_main_process, state_dict=engine.get_state_dict(model)
    )
    engine.wait_for_everyone()
    config = json.loads((folder / "pretrained" / "config.json").read_text())
    return {"files": files_in(folder, contents=["*.safetensors"]), "architectures": config["architectures"]}


@hf_client()
def test_gathered_metrics_and_evaluation_are_the_same(rank: int, folder: Path) -> Any:
    engine, model, optimizer = prepared()
    train(engine, model, optimizer, rank, range(1))
    model.eval()
    with torch.no_grad():
        logits = [model(input_ids=batch("llama", rank, step)["input_ids"]).logits for step in range(2)]
    model.train()
    gathered = engine.gather_for_metrics(logits[0])
    return {"logits": logits, "gathered": gathered, **train(engine, model, optimizer, rank, range(1, 2))}


@hf_client()
def test_ignored_modules_stay_whole(rank: int, folder: Path) -> Any:
    model = tiny()
    ignored = [model.model.layers[0].mlp]
    engine, model, optimizer = prepared(model=model, ignored_modules=ignored, cpu_ram_efficient_loading=False)
    losses = []
    for step in range(2):
        loss = model(**batch("llama", rank, step)).loss
        engine.backward(loss)
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    assert whole(model.lm_head.weight).shape == (32, 16)
    return {"losses": losses, **state(model)}
