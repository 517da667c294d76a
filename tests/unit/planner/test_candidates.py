"""``fsdp2.planner.plan``: what it compares, what it prefers, and what it says about bad input, which is in
``golden/candidates.txt``."""

from __future__ import annotations

import functools
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2.core.schedule.schedule import AfterForward, UnitRules
from fsdp2.extras.sizes import text_of
from fsdp2.planner import scenario
from fsdp2.planner.candidates import ABOUT_AS_FAST, Workload
from fsdp2.planner.groups import Wire
from fsdp2.planner.machines import H100
from fsdp2.planner.observe import ModelWork
from fsdp2.planner.scenario import Scenario
from fsdp2.planner.work import Checkpointing, UnitWork
from tests.harness.golden import texts_beside
from tests.harness.messages import error_of
from tests.harness.terminal import on_a_terminal
from tests.unit.planner.models import LanguageModel
from tests.unit.planner.plans import LARGE, WORKLOAD, choice_named, on_meta, plan_of

TEXTS = texts_beside(__file__)


def test_choices_cover_what_can_be_set() -> None:
    choices = [each.choice for each in plan_of().choices]
    assert {choice.shard_size for choice in choices} == {None, 8}
    assert {choice.after_forward for choice in choices} == set(AfterForward)
    assert {choice.checkpointing for choice in choices} == set(Checkpointing)
    assert {choice.wire for choice in choices} == set(Wire)
    # Rows whose time is not known are behind those whose time is.
    fitting = [each.choice.offloads for each in plan_of().choices if each.fits]
    assert fitting == sorted(fitting)
    assert set(fitting) == {True, False}


def test_shards_of_no_whole_nodes_are_not_resharded_to_a_node() -> None:
    found = fsdp2.planner.plan(LanguageModel, replace(H100, node_size=6), WORKLOAD, num_gpus=192)
    sizes = [(each.choice.after_forward, each.choice.shard_size) for each in found.choices]
    assert {size for _, size in sizes} == {None, 6, 64}
    assert {size for after, size in sizes if after is AfterForward.RESHARD_TO_SMALLER_MESH} == {None}  # 6 divides no 64


def test_what_fits_comes_first_and_a_smaller_budget_asks_for_more_checkpointing() -> None:
    found, roomy = plan_of(budget="6 MiB"), plan_of().recommended
    fits = [each.fits for each in found.choices]
    assert fits == sorted(fits, reverse=True)
    assert {True, False} == set(fits)
    assert found.recommended is not None
    assert roomy is not None
    assert found.recommended.fits
    assert roomy.choice.checkpointing is Checkpointing.NONE
    assert found.recommended.choice.checkpointing is not Checkpointing.NONE


@pytest.mark.ci
def test_where_room_is_left_the_last_blocks_may_stay_unsharded_and_such_rows_fit() -> None:
    largest = 2 * sum(param.numel() for param in LanguageModel().layers[0].parameters())
    for num_blocks, room in ((4, 2.0), (4, 2.5), (16, 12.1)):
        plan = functools.partial(
            fsdp2.planner.plan, functools.partial(LanguageModel, num_blocks=num_blocks), "H100", WORKLOAD
        )
        resharded = choice_named(plan(num_gpus=16), "FSDP, reshard").result
        found = plan(num_gpus=16, budget=int(resharded.reserved_nbytes + room * largest))
        kept = [each for each in found.choices if each.choice.num_kept]
        assert kept
        assert all(each.fits for each in kept)
        # At the peak, the last block is there anyway, and nothing is in flight any more.
        assert {2.0: 3, 2.5: 4, 12.1: 12}[room] in [each.choice.num_kept for each in kept]


@pytest.mark.ci
@pytest.mark.parametrize("num_tokens", [1024, 4096])  # communication takes longer than compute, and less long
def test_prefetch_lists_of_two_units_would_gain_little(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = scenario._rules

    def two_ahead(given: Scenario) -> list[UnitRules]:
        rules = usual(given)
        after, before = range(1, len(rules)), range(len(rules) - 1, 0, -1)
        for unit in after:
            lists = tuple(after[unit : unit + 2]), tuple(before[len(rules) - unit :][:2])
            rules[unit] = replace(rules[unit], forward_prefetch=lists[0], backward_prefetch=lists[1])
        return rules

    large = on_meta(functools.partial(LanguageModel, width=4096, num_blocks=16, vocabulary=32768))
    steps = []
    for rules in (usual, two_ahead):
        monkeypatch.setattr(scenario, "_rules", rules)
        found = fsdp2.planner.plan(large, "H100", Workload(batch=1, sequence=num_tokens), num_gpus=64)
        steps.append(choice_named(found, "FSDP, reshard").result)
    assert steps[0].time.step < steps[1].time.step * ABOUT_AS_FAST
    assert steps[0].reserved_nbytes < steps[1].reserved_nbytes


@pytest.mark.parametrize("num_gpus", [8, 512])
def test_two_blocks_per_unit_would_not_be_faster(num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = ModelWork.units

    def both(one: UnitWork, other: UnitWork) -> UnitWork:
        names = ("params", "forward", "backward", "saved_nbytes")
        return replace(one, **{name: getattr(one, name) + getattr(other, name) for name in names})

    def in_pairs(self: ModelWork, checkpointing: Checkpointing) -> tuple[UnitWork, ...]:
        units = usual(self, checkpointing)
        blocks = [unit for unit in units if unit.is_block]
        first = units.index(blocks[0])
        return (*units[:first], *map(both, blocks[::2], blocks[1::2]), *units[first + len(blocks) :])

    found = []
    monkeypatch.setattr(ModelWork, "members", ())  # units are those of the calls
    for units in (usual, in_pairs):
        monkeypatch.setattr(ModelWork, "units", units)
        compared = fsdp2.planner.plan(LARGE, "H100", Workload(batch=1, sequence=2048), num_gpus=num_gpus)
        found.append(compared.choices[0].result)  # the fastest
    assert found[0].time.compute == pytest.approx(found[1].time.compute, rel=0.01)
    assert found[0].time.step < found[1].time.step


@pytest.mark.ci
def test_what_only_fp8_would_fit_does_not_fit() -> None:
    """On as many GPUs as make sharded gradients small: else the peak is at the end of backward, where the block that is
    reduced last is not unsharded anymore."""
    machine, workload = replace(H100, host_bandwidth=None), Workload(batch=1, sequence=8)
    plan = functools.partial(fsdp2.planner.plan, LARGE, machine, workload, num_gpus=64)
    fp8 = choice_named(plan(), "FSDP, reshard, full checkpointing, fp8 gathers").result
    found = plan(budget=int(fp8.peak_nbytes) + 1)
    assert found.recommended is None
    assert found.smallest.missing_nbytes > 0


@pytest.mark.ci
def test_optimizer_precision_and_what_is_frozen_change_what_is_held() -> None:
    """Master weights are of what is trained; a frozen base stays as it is, without optimizer."""

    def frozen(dtype: torch.dtype) -> nn.Module:
        model = LanguageModel().to(dtype)
        model.layers.requires_grad_(False)
        return model

    def held(build: Callable[[], nn.Module], **options: Any) -> Any:
        plan = fsdp2.planner.plan(build, "H100", replace(WORKLOAD, **options), num_gpus=8)
        return choice_named(plan, "FSDP, reshard").result

    adamw, sgd, fp32 = (held(LanguageModel, **each) for each in ({}, {"optimizer": "sgd"}, {"precision": "fp32"}))
    assert (adamw.optimizer_nbytes, sgd.optimizer_nbytes) == (2 * adamw.params_nbytes, 0)
    part = held(lambda: frozen(torch.float32))
    assert fp32.params_nbytes == part.params_nbytes == adamw.params_nbytes  # shards are in fp32 in any case
    assert part.optimizer_nbytes < adamw.optimizer_nbytes / 1.5
    in_bf16 = held(LanguageModel, master_dtype="bf16")
    in_fp32 = held(lambda: LanguageModel().bfloat16(), master_dtype="fp32")
    mixed = held(lambda: frozen(torch.bfloat16), master_dtype="fp32")
    assert in_fp32.params_nbytes == 2 * in_bf16.params_nbytes
    assert in_bf16.params_nbytes < mixed.params_nbytes < in_fp32.params_nbytes


def _wrong(model: Any = LanguageModel, machine: Any = "H100", workload: Any = WORKLOAD, num_gpus: Any = 8) -> Any:
    return lambda: fsdp2.planner.plan(model, machine, workload, num_gpus=num_gpus)


WRONG: dict[str, Callable[[], object]] = {
    "batch that is text": lambda: Workload("2", 64),  # type: ignore[arg-type]
    "batch of a half": lambda: Workload(1.5, 64),  # type: ignore[arg-type]
    "GPUs that are text": _wrong(num_gpus="8"),
    "model that is text": _wrong("x"),
    "no machine": _wrong(machine=None),
    "workload that is a tuple": _wrong(workload=(1, 64)),
    "master weights in fp8": lambda: Workload(1, 1, master_dtype="fp8"),
    "inputs that are no function": lambda: replace(WORKLOAD, inputs=torch.ones(2)),  # type: ignore[arg-type]
    "loss that is no function": lambda: replace(WORKLOAD, loss=torch.ones(2)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named_with_what_is_expected(case: str) -> None:
    TEXTS.check(case, error_of(WRONG[case]), among=WRONG)


@pytest.mark.ci
def test_what_offloading_puts_into_the_hosts_memory_is_counted_and_limited() -> None:
    """16 bytes for each parameter in the shards of the node's GPUs, with AdamW in fp32."""
    offload = choice_named(plan_of(), "FSDP, reshard, offload")
    num_params = sum(param.numel() for param in LanguageModel().parameters())
    assert offload.result.host_nbytes == pytest.approx(16 * num_params * 8 / 16, rel=0.01)  # 8 of 16 GPUs per node
    assert choice_named(plan_of(), "FSDP, reshard").result.host_nbytes == 0
    said = f"; it takes {text_of(offload.result.host_nbytes)} of the host's memory of a node, "
    shown = str(replace(plan_of(), recommended=offload)).splitlines()[-1]
    assert shown == f"recommended: FSDP, reshard, offload{said}of which 1769.5 GiB may be used"
    small = replace(H100, host_memory_nbytes=offload.result.host_nbytes)  # of which 95% may be used
    full = fsdp2.planner.plan(LanguageModel, small, WORKLOAD, num_gpus=16)
    assert not choice_named(full, "FSDP, reshard, offload").fits
    tight_choice = choice_named(full, "FSDP, reshard, full checkpointing, offload").result
    tight = int(tight_choice.peak_nbytes) + 1
    nothing = fsdp2.planner.plan(LanguageModel, small, WORKLOAD, num_gpus=16, budget=tight)
    assert not nothing.smallest.choice.offloads
    said = r"full checkpointing, offload holds .*, but .* of the host's memory of a node, .* too much\."
    assert re.search(said, nothing.why_nothing_fits())
    unknown = fsdp2.planner.plan(
        LanguageModel, replace(H100, host_memory_nbytes=None), WORKLOAD, num_gpus=16, budget=tight
    )
    assert unknown.recommended is not None
    assert "whose size is not known: pass --host-memory, or Machine(host_memory_nbytes=...)" in str(unknown)
    assert str(unknown).endswith(f"the allocator would reserve {text_of(tight_choice.reserved_nbytes)} if it could")


def test_a_plan_shows_where_it_is_and_that_a_slow_builder_runs() -> None:
    seen, workload = [], fsdp2.planner.Workload(batch=1, sequence=16)
    found = on_a_terminal(lambda: fsdp2.planner.plan(LanguageModel, "H100", workload, num_gpus=2))
    assert "compare ways to shard: 100%" in found

    def build() -> nn.Module:
        ends = time.monotonic() + 60
        while not seen and time.monotonic() < ends:
            seen.extend(re.findall(r"compare ways to shard: +0%", sys.stderr.getvalue()))  # type: ignore[attr-defined]
        raise ValueError("slow")

    def plan() -> None:
        with pytest.raises(ValueError, match="slow"):
            fsdp2.planner.plan(build, "H100", workload, num_gpus=2)

    assert on_a_terminal(plan).endswith("\n")  # what is printed next has a line of its own
    assert seen
