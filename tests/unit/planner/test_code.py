"""The Python code of a choice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

import fsdp2
from tests.unit.planner.models import Caching, LanguageModel
from tests.unit.planner.plans import WORKLOAD, choice_named, plan_of


def test_every_config_inside_is_told_to_keep_no_cache() -> None:
    model = nn.Sequential(Caching(), nn.Identity())
    code = fsdp2.planner.plan(
        model, "H100", replace(WORKLOAD, loss=lambda output: output.logits.sum()), num_gpus=8
    ).code
    assert '    model.get_submodule("0").config.use_cache = False  # ' in code


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_code_passes_the_dtypes_of_the_plan(precision: str) -> None:
    param_dtype = {"bf16": "bfloat16", "fp32": "float32"}[precision]
    policy = f"policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.{param_dtype}, reduce_dtype=torch.float32)"
    assert policy in plan_of(precision=precision).code


def test_the_code_keeps_large_modules_where_all_are_and_names_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan_of()
    for name, argument in (("keep", "reshard_after_forward=False, "), ("reshard", "")):
        code = replace(found, recommended=choice_named(found, f"FSDP, {name}")).code
        assert f"fsdp2.fully_shard(block, {argument}**options)" in code
        assert f"fsdp2.fully_shard(model.head, {argument}**options)" in code
    names: dict[str, Any] = {}
    exec(replace(found, recommended=choice_named(found, "HSDP 8, reshard")).code, names)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="expected a multiple of 8 ranks: each replica is on 8"):
        names["shard"](LanguageModel())
