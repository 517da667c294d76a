"""Plans for models of Hugging Face, from configs alone; and the code of one, pasted, which trains."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2.__main__ import main
from fsdp2.core.runtime.unit import units_under
from fsdp2.extras.sizes import text_of
from fsdp2.planner.blocks import find_units
from fsdp2.planner.observe import observe
from fsdp2.planner.plans import Plan
from fsdp2.planner.work import Checkpointing
from tests.docs.markdown import ROOT, table
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import texts_beside

pytest.importorskip("transformers")
pytestmark = pytest.mark.long
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers")
_SIZES += ("num_attention_heads", "num_key_value_heads", "vocab_size")


def llama(*sizes: int) -> dict[str, Any]:
    return {"model_type": "llama", **dict(zip(_SIZES, sizes, strict=True))}


LLAMA_8B = llama(4096, 14336, 32, 32, 8, 128256)
LLAMA_405B = llama(16384, 53248, 126, 128, 8, 128256)
MASTERS = fsdp2.planner.Workload(batch=2, sequence=8192, master_dtype="fp32")
SCALED_DOWN = llama(64, 128, 2, 4, 2, 512)
# By name in ``golden/plans.txt``: a config, GPUs, a batch and the length of its sequences.
PLANS: dict[str, tuple[dict[str, Any], str, int, int, int]] = {
    "llama 8b": (LLAMA_8B, "H100", 64, 2, 8192),
    "llama 8b, one sequence": (LLAMA_8B, "H100", 64, 1, 8192),
    "llama 70b": (llama(8192, 28672, 80, 64, 8, 128256), "H100", 256, 1, 8192),
    "llama 405b": (LLAMA_405B, "H200", 512, 1, 8192),
    "llama 405b on H100s": (LLAMA_405B, "H100", 512, 1, 8192),
    "mixtral": ({"model_type": "mixtral"}, "H100", 64, 2, 4096),  # its defaults are those of 8x7B
}


def builder(config: dict[str, Any]) -> Callable[[], nn.Module]:
    from transformers import AutoConfig, AutoModelForCausalLM

    def build() -> nn.Module:
        made = AutoConfig.for_model(**{"use_cache": False, **config})
        return AutoModelForCausalLM.from_config(made)

    return build


def main_lines(plan: Plan) -> str:
    """What the model is, and the recommended row."""
    lines = str(plan).splitlines()
    marks = ("*", "recommended", "nothing fits")
    shown = [lines[0].partition("; all else")[0], *(line for line in lines if line.startswith(marks))]
    return "\n".join(" ".join(line.split()) for line in shown)


def planned(name: str) -> Plan:
    config, gpu, num_gpus, batch, sequence = PLANS[name]
    return fsdp2.planner.plan(builder(config), gpu, fsdp2.planner.Workload(batch, sequence), num_gpus=num_gpus)


@pytest.mark.parametrize("name", PLANS)
def test_plan(name: str) -> None:
    found = planned(name)
    texts_beside(__file__).check(name, main_lines(found))
    if found.recommended is not None:
        assert ("placement_for" in found.code) == (name == "mixtral")  # eight experts on 64 GPUs


# By the page's row: the plan, and the recipe of torchtitan; no GPU is needed for what is read of it.
ROWS = {
    "Llama 3 8B, 64 GPUs": ("llama 8b, one sequence", "llama3", "llama3_8b"),
    "Llama 3 70B, 256 GPUs": ("llama 70b", "llama3", "llama3_70b"),
    "Llama 3 405B, 512 GPUs": ("llama 405b on H100s", "llama3", None),  # float8 asks for a GPU
    "Mixtral 8x7B, 64 GPUs": ("mixtral", "qwen3", "qwen3_30b_a3b"),
}


@pytest.mark.parametrize("row", ROWS)
def test_the_page_says_what_torchtitan_and_the_planner_choose(row: str) -> None:
    pytest.importorskip("torchtitan")
    on_page = table(ROOT / "docs/guide/planning.md", "Compared with torchtitan's recipes")
    rows = {cells[0]: cells[1:] for cells in on_page}
    assert rows.keys() == ROWS.keys()
    per_gpu, theirs, ours = rows[row]
    name, model, recipe = ROWS[row]
    found = planned(name)
    assert per_gpu.startswith(f"{found.workload.batch} x {found.workload.sequence} tokens")
    if found.recommended is None:
        assert ours == f"nothing fits: {text_of(found.smallest.missing_nbytes)} too much"
        assert "Tensor and context parallelism cut more" in found.why_nothing_fits()
    else:
        shown = f"{found.recommended.choice.name}: {text_of(found.recommended.result.reserved_nbytes)}"
        assert ours == shown
    if recipe is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of its imports
        config = getattr(importlib.import_module(f"torchtitan.models.{model}.config_registry"), recipe)()
    size, training = config.parallelism.tensor_parallel_degree, config.training
    assert found.workload.batch * size == training.local_batch_size
    assert found.workload.sequence == training.seq_len
    checkpointing = type(config.activation_checkpoint).__qualname__.partition("AC")[0].lower()
    assert theirs.endswith(f"FSDP{f' and TP {size}' if size > 1 else ''}, {checkpointing} checkpointing")
    dtypes = [training.dtype, training.mixed_precision_param, training.mixed_precision_reduce]
    assert dtypes == ["float32", "bfloat16", "float32"]


def test_no_cache_is_planned_unless_inputs_ask_for_one() -> None:
    """``use_cache=True`` is the default of configs. A cache that inputs ask for is empty first, and counts."""
    batch, length, heads, dim = 2, 512, SCALED_DOWN["num_attention_heads"], 16
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    asked = {"inputs": lambda: {"input_ids": tokens, "use_cache": True}}
    works = []
    for use_cache, options in ((False, {}), (True, {}), (True, asked)):
        model = builder({**SCALED_DOWN, "use_cache": use_cache})()
        works.append(observe(model, find_units(model), fsdp2.planner.Workload(batch, length, **options)))
        assert model.config.use_cache == use_cache
    assert works[0] == works[1]
    attention = [work.kinds[0][Checkpointing.NONE].forward.other for work in works]
    assert attention == pytest.approx([batch * heads * length**2 * 2 * (dim + dim) / 2] * 3, rel=0.01)  # and rotations
    left = [sum(unit.left_nbytes for unit in work.units(Checkpointing.FULL)) for work in works]
    cache = 2 * batch * length * SCALED_DOWN["num_key_value_heads"] * dim * 2 * SCALED_DOWN["num_hidden_layers"]
    assert left == [0, 0, cache]


def _adapted(model: Any) -> Any:
    peft: Any = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated names of transformers
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))


@pytest.mark.parametrize("wrap", [lambda model: model, _adapted])
def test_an_encoder_and_a_decoder_with_one_embedding_have_each_parameter_once(wrap: Callable[[Any], Any]) -> None:
    """Planned as built: functional calls leave every one of the embedding's names with its own parameter."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    config = AutoConfig.for_model("t5", d_model=64, d_ff=128, d_kv=16, num_layers=3, num_heads=4, vocab_size=512)
    model = wrap(AutoModelForSeq2SeqLM.from_config(config))
    before = {name: id(param) for name, param in model.named_parameters(remove_duplicate=False)}
    inputs = lambda: {name: torch.zeros(2, 16, dtype=torch.int64) for name in ("input_ids", "decoder_input_ids")}  # noqa: E731
    work = observe(model, find_units(model), fsdp2.planner.Workload(2, 16, inputs=inputs))
    assert {name: id(param) for name, param in model.named_parameters(remove_duplicate=False)} == before
    assert len(work.params) == 1 + 2 * 3  # the root with what is tied, and blocks
    numels = [param.numel for params in work.params.values() for param in params]
    assert sum(numels) == sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("is_file", [True, False])
def test_the_command_reads_a_config_or_its_folder(
    is_file: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SCALED_DOWN, "torch_dtype": "bfloat16"}))
    path = tmp_path / "config.json" if is_file else tmp_path
    main(["plan", "--hf", str(path), "--gpus", "8", "--sequence", "64"])
    printed = capsys.readouterr().out
    assert printed.startswith("LlamaForCausalLM: ")
    assert "    model.config.use_cache = False" in printed
    assert "fsdp2.fully_shard(model, **options)" in printed
    assert "shards, gradients and optimizer in fp32; the model is built in bf16" in printed
    assert "param.data = param.data.float()  # master weights" in printed


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "t5"}, "--hf takes only causal language models, "),
        ({**SCALED_DOWN, "hidden_size": 65}, "is no Hugging Face config (Class validation error"),
        ({**SCALED_DOWN, "hidden_size": "big"}, "is no Hugging Face config (Validation error for field"),
    ],
)
def test_configs_that_make_no_language_model_get_one_line(
    config: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--hf", str(tmp_path), "--gpus", "8", "--sequence", "64"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@distributed(2)
def test_the_pasted_code_of_the_8b_plan_loads_and_trains_a_scaled_down_model(ctx: RankContext, tmp_path: Path) -> None:
    """A checkpoint in bf16, as it is published, into master weights in fp32; buffers that it lacks are filled."""
    in_bf16 = builder({**SCALED_DOWN, "use_cache": True, "dtype": "bfloat16"})  # use_cache: the config's default
    torch.manual_seed(0)
    whole: Any = in_bf16()
    whole.save_pretrained(tmp_path)  # the first rank does
    dist.barrier()
    pasted: dict[str, Any] = {}
    exec(fsdp2.planner.plan(builder({**LLAMA_8B, "dtype": "bfloat16"}), "H100", MASTERS, num_gpus=64).code, pasted)
    with torch.device("meta"):
        model = pasted["shard"](in_bf16(), device_type="cpu")
    pasted["load"](model, str(tmp_path), device_type="cpu")
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), whole.get_parameter(name).float()), name
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, whole.model.rotary_emb.inv_freq)
    names = [name for name, _ in units_under(model)]
    assert names == ["", "model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(512, (2, 16), generator=torch.Generator().manual_seed(ctx.rank))
    losses = []
    for _ in range(5):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
