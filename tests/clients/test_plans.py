"""Plans for models of Hugging Face, from configs alone; and the code of one, pasted, which trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2.__main__ import main
from fsdp2.runtime.unit import units_under
from fsdp2.tools.planner.blocks import find_units
from fsdp2.tools.planner.plan import Plan, observed
from fsdp2.tools.planner.work import Checkpointing
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import texts_beside

pytest.importorskip("transformers")


_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers")
_SIZES += ("num_attention_heads", "num_key_value_heads", "vocab_size")


def llama(*sizes: int) -> dict[str, Any]:
    return {"model_type": "llama", **dict(zip(_SIZES, sizes, strict=True))}


LLAMA_8B = llama(4096, 14336, 32, 32, 8, 128256)
SCALED_DOWN = llama(64, 128, 2, 4, 2, 512)
# By name in ``golden/plans.txt``: a config, GPUs, a batch and the length of its sequences.
PLANS: dict[str, tuple[dict[str, Any], str, int, int, int]] = {
    "llama 8b": (LLAMA_8B, "H100", 64, 2, 8192),
    "llama 70b": (llama(8192, 28672, 80, 64, 8, 128256), "H100", 256, 1, 8192),
    "llama 405b": (llama(16384, 53248, 126, 128, 8, 128256), "H200", 512, 1, 8192),
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
    shown = [lines[0].partition("; all else")[0], *(line for line in lines if line.startswith(("*", "recommended")))]
    return "\n".join(" ".join(line.split()) for line in shown)


def planned(name: str) -> Plan:
    config, gpu, num_gpus, batch, sequence = PLANS[name]
    return fsdp2.plan(builder(config), gpu, fsdp2.Workload(batch, sequence), num_gpus=num_gpus)


@pytest.mark.long
@pytest.mark.parametrize("name", PLANS)
def test_plan(name: str) -> None:
    found = planned(name)
    texts_beside(__file__).check(name, main_lines(found))
    assert ("placement_for" in found.code) == (name == "mixtral")  # eight experts on 64 GPUs


@pytest.mark.long
def test_attention_is_causal_with_a_cache_and_without() -> None:
    workload = fsdp2.Workload(batch=1, sequence=512)
    attention = []
    for use_cache in (True, False):
        model = builder({**SCALED_DOWN, "use_cache": use_cache})()
        (block,) = observed(model, find_units(model), workload).kinds
        attention.append(block[Checkpointing.NONE].forward.other)
    heads, dim = SCALED_DOWN["num_attention_heads"], 16
    assert attention == pytest.approx([heads * 512**2 * 2 * (dim + dim) / 2] * 2, rel=0.01)  # and rotations


@pytest.mark.long
@pytest.mark.parametrize("is_file", [True, False])
def test_the_command_reads_a_config_or_its_folder(
    is_file: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SCALED_DOWN))
    path = tmp_path / "config.json" if is_file else tmp_path
    main(["plan", "--hf", str(path), "--gpus", "8", "--sequence", "64"])
    printed = capsys.readouterr().out
    assert printed.startswith("LlamaForCausalLM: ")
    assert "    model.config.use_cache = False" in printed
    assert "fsdp2.fully_shard(model, **options)" in printed


@pytest.mark.long
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


@pytest.mark.long
@distributed(2)
def test_the_pasted_code_of_the_8b_plan_trains_a_scaled_down_model(ctx: RankContext) -> None:
    pasted: dict[str, Any] = {}
    exec(planned("llama 8b").code, pasted)
    torch.manual_seed(0)
    model = pasted["shard"](builder({**SCALED_DOWN, "use_cache": True})(), device_type="cpu")  # the config's default
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
