"""Plans for models of Hugging Face, from configs alone; and the code of one, pasted, which trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import fsdp2
from fsdp2.__main__ import main
from fsdp2.runtime.unit import units_under
from fsdp2.tools.planner.blocks import find_units
from fsdp2.tools.planner.plan import Plan, observed
from fsdp2.tools.planner.work import Checkpointing
from tests.harness.distributed import RankContext, distributed

pytest.importorskip("transformers")

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
LLAMA_405B = {
    **LLAMA_8B,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
}
MIXTRAL = {"model_type": "mixtral"}  # its defaults are those of 8x7B
SCALED_DOWN = {
    **LLAMA_8B,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
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


def planned(config: dict[str, Any], gpu: str, num_gpus: int, workload: fsdp2.Workload) -> Plan:
    return fsdp2.plan(builder(config), gpu, workload, num_gpus=num_gpus)


@pytest.mark.long
def test_plan_of_llama_8b() -> None:
    found = planned(LLAMA_8B, "H100", 64, fsdp2.Workload(batch=2, sequence=8192))
    assert_expected_inline(
        main_lines(found),
        """\
LlamaForCausalLM: 8.03B parameters; units: 32 blocks in model.layers, model.embed_tokens, lm_head
* FSDP reshard selective bf16 GPU 0.5 0.5 0.9 55.0 1.4 65.5 2.746 0.021 5965 yes
recommended: FSDP, reshard, selective checkpointing""",
    )


@pytest.mark.long
def test_plan_of_llama_70b() -> None:
    found = planned(LLAMA_70B, "H100", 256, fsdp2.Workload(batch=1, sequence=8192))
    assert_expected_inline(
        main_lines(found),
        """\
LlamaForCausalLM: 70.55B parameters; units: 80 blocks in model.layers, model.embed_tokens, lm_head
* FSDP reshard full bf16 GPU 1.0 1.0 2.1 22.2 3.6 33.6 12.064 0.055 679 yes
recommended: FSDP, reshard, full checkpointing""",
    )


@pytest.mark.long
def test_plan_of_llama_405b() -> None:
    found = planned(LLAMA_405B, "H200", 512, fsdp2.Workload(batch=1, sequence=8192))
    assert_expected_inline(
        main_lines(found),
        """\
LlamaForCausalLM: 405.85B parameters; units: 126 blocks in model.layers, model.embed_tokens, lm_head
* FSDP reshard full bf16 GPU 3.0 20.8 5.9 40.7 11.9 92.3 63.113 0.137 130 yes
recommended: FSDP, reshard, full checkpointing""",
    )


@pytest.mark.long
def test_plan_of_mixtral() -> None:
    found = planned(MIXTRAL, "H100", 64, fsdp2.Workload(batch=2, sequence=4096))
    assert_expected_inline(
        main_lines(found),
        """\
MixtralForCausalLM: 46.70B parameters; units: 32 blocks in model.layers
* FSDP reshard selective bf16 GPU 2.7 10.8 5.4 10.6 5.9 39.9 2.435 0.039 3364 yes
recommended: FSDP, reshard, selective checkpointing""",
    )
    assert "placement_for" in found.code  # eight experts on 64 GPUs


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
    code = planned(LLAMA_8B, "H100", 64, fsdp2.Workload(batch=2, sequence=8192)).code
    pasted: dict[str, Any] = {}
    exec(code, pasted)
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
