"""Units that run several times before a backward: how often they are gathered and reduced, and what is held meanwhile.
Units of several modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2.core import Observer
from fsdp2.report import trace
from tests.distributed.changes import assert_gradients
from tests.distributed.support import Block, Stack, batch, seeded, shard, shard_each, step
from tests.harness.comms import CountingAllGather
from tests.harness.compare import compare
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP
from tests.harness.training import Case, shard_units_and_root

BLOCKS = ("blocks.0", "blocks.1")


class TwoBlocks(Stack):
    """Runs the blocks ``num_times`` times. ``cuts``: a gradient reaches the last time only."""

    num_times, cuts = 1, False

    def __init__(self) -> None:
        super().__init__(num_blocks=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for _ in range(self.num_times):
            x = self.blocks[1](self.blocks[0](x.detach() if self.cuts else x))
        return self.exit(x)


class Repeated(TwoBlocks):
    num_times = 3


class EachRepeated(TwoBlocks):
    """Each block runs three times before the next one does."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            first = block(x) + block(x)
            x = block(x if self.cuts else first)
        return self.exit(x)


class Recycled(TwoBlocks):
    """The last time only with gradients."""

    def forward(self, x: Tensor) -> Tensor:
        entered = self.entry(x)
        x = torch.zeros_like(entered)
        for is_last in (False, False, True):
            with torch.set_grad_enabled(is_last):
                x = self.blocks[1](self.blocks[0](entered + x))
        return self.exit(x)


class CutOff(Repeated):
    cuts = True


class EachCutOff(EachRepeated):
    cuts = True


class Nested(Block):
    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        return super().forward(self(x, depth - 1) + x if depth else x)


class SelfConditioned(Repeated):
    """The root and a block first call themselves, without and with gradients, then compute."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Nested()

    def forward(self, x: Tensor, is_inner: bool = False) -> Tensor:
        if not is_inner:
            with torch.no_grad():
                x = x + self(x, is_inner=True)
        return super().forward(x)


class _Counts(Observer):
    """What was done in backwards, and how many units had begun a backward and were not reduced when the last one
    ended."""

    def __init__(self) -> None:
        self.actions: Counter[str] = Counter()
        self.reduced_at_the_end = 0
        self._is_backward = self._is_over = False

    def on_event(self, event: str, unit: str) -> None:
        self._is_backward = event not in ("pre_forward", "post_forward", "join_forward")
        self._is_over = event == "end_backward"

    def on_action(self, action: str, unit: str, nbytes: int) -> None:
        if self._is_backward and unit in BLOCKS:
            self.actions["gather" if action in ("unshard", "prefetch") else action] += 1
            self.reduced_at_the_end += action == "reduce" and self._is_over


def _counts(model: Any, step: Callable[[Any], None]) -> _Counts:
    """Of the second step."""
    step(model)
    counts = _Counts()
    with trace.observe(model, counts):
        step(model)
    return counts


def _one_forward(model: Any) -> None:
    model(batch()).sum().backward()


def _assert_gradients_of_two_steps(model: Any, reference: Any, step: Callable[[Any], None] = _one_forward) -> None:
    for _ in range(2):
        step(reference)
    assert_gradients(model, reference, atol=1e-5)


def _two_forwards(model: Any) -> None:
    (model(batch(0)).sum() + model(batch(1)).sum()).backward()


def _one_forward_without_backward(model: Any) -> None:
    model(batch(7))
    _one_forward(model)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("make", "step", "num_gathers"),
    [
        (Repeated, _one_forward, 6),
        (Repeated, _two_forwards, 12),
        (EachRepeated, _one_forward, 2),
        (EachRepeated, _two_forwards, 4),
        (Recycled, _one_forward, 3),  # one is a prefetch for the use before, which ran without gradients
        (TwoBlocks, _two_forwards, 4),
        (TwoBlocks, _one_forward_without_backward, 2),
    ],
    ids=[
        "repeated",
        "repeated-in-two-forwards",
        "each",
        "each-in-two-forwards",
        "recycled",
        "two-forwards",
        "forward-without-backward",
    ],
)
@pytest.mark.parametrize("ranks_may_differ", [False, True])
@distributed(2)
def test_unit_is_reduced_once_behind_its_last_use(
    ctx: RankContext, make: Callable[[], Stack], step: Callable[[Any], None], num_gathers: int, ranks_may_differ: bool
) -> None:
    """As in torch. While other units still compute: gradients of whole units do not pile up. Nothing is withheld, so
    the CPU does not wait for the device."""
    model = shard(ctx, seeded(make))
    model.set_ranks_may_differ(ranks_may_differ)
    counts = _counts(model, step)
    found = counts.actions
    assert (found["reduce"], found["gather"], counts.reduced_at_the_end) == (2, num_gathers, 0), found
    _assert_gradients_of_two_steps(model, seeded(make), step)


class Reuses(MLP):
    """Uses its last block as one of ``WAYS`` says."""

    def __init__(self, way: str) -> None:
        super().__init__(num_blocks=2)
        self.way, self.num_forwards = way, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        return self.exit(WAYS[self.way][0](self, self.blocks[0](self.entry(x))))


def _in_chunks(model: Reuses, x: Tensor, use: Callable[[Reuses, Tensor], Tensor]) -> Tensor:
    return torch.cat([use(model, chunk) for chunk in x.chunk(3)])


def _in_a_row(model: Reuses, x: Tensor) -> Tensor:
    for _ in range(3):
        x = model.blocks[1](x)
    return x


def _in_a_row_but_once(model: Reuses, x: Tensor) -> Tensor:
    return model.blocks[1](x) if model.num_forwards == 2 else _in_a_row(model, x)


def _first_without_gradients(model: Reuses, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = x + model.blocks[1](x)
    return model.blocks[1](x)


# What uses the block, and its gathers in three steps under fsdp2 and under torch. The first forward predicts nothing.
WAYS: dict[str, tuple[Callable[[Reuses, Tensor], Tensor], int, int]] = {
    "chunks": (partial(_in_chunks, use=lambda model, x: model.blocks[1](x)), 4 + 2 + 2, 3 * 6),
    "in a row": (_in_a_row, 4 + 2 + 2, 3 * 6),
    "checkpointed chunks": (
        partial(_in_chunks, use=lambda model, x: checkpoint(model.blocks[1], x, use_reentrant=False)),
        4 + 2 + 2,
        3 * 6,
    ),
    "the first without gradients": (_first_without_gradients, 3 + 2 + 2, 3 * 3),
    "once in the second step": (_in_a_row_but_once, 4 + 2 + 4, 6 + 2 + 6),
    "another unit in between": (partial(_in_chunks, use=lambda model, x: model.blocks[1](model.blocks[0](x))), 18, 18),
}


@pytest.mark.every_case
@pytest.mark.parametrize("way", WAYS)
@distributed(2)
def test_uses_that_follow_each_other_share_a_gather(ctx: RankContext, way: str) -> None:
    """Values are those of torch, bit for bit, which gathers for each use."""
    gathers: dict[str, CountingAllGather] = {}

    def shard(runtime: Any, model: Any, mesh: Any) -> None:
        shard_units_and_root(runtime, model, mesh)
        gathers[runtime.name] = CountingAllGather()
        model.blocks[1].set_custom_all_gather(gathers[runtime.name])

    compare(Case(partial(Reuses, way), shard, num_steps=3), ctx.mesh_1d())
    assert [len(each.messages) for each in gathers.values()] == [WAYS[way][2], WAYS[way][1]]


class _Held(Observer):
    """The most bytes of unsharded parameters that were held at a time."""

    now = peak = 0

    def on_action(self, action: str, unit: str, nbytes: int) -> None:
        self.now += {"unshard": nbytes, "prefetch": nbytes, "reshard": -nbytes}.get(action, 0)
        self.peak = max(self.peak, self.now)


@distributed(2)
def test_uses_that_follow_each_other_hold_what_one_use_holds(ctx: RankContext) -> None:
    """Also where fewer uses follow than in the last forward, and under the smallest limit."""
    found = []
    for make in (TwoBlocks, EachRepeated):
        model, held = shard(ctx, seeded(make)), _Held()
        step(model)
        step(model)
        plan = fsdp2.memory.memory_plan(model)
        model.set_temporary_memory_limit(plan.at_least)
        step(model)
        model.set_temporary_memory_limit(None)
        with trace.observe(model, held):
            step(model)
            if make is EachRepeated:
                with mock.patch.object(make, "forward", TwoBlocks.forward):
                    step(model)
        found.append((held.peak, plan.peak, plan.at_least))
    assert found[0] == found[1]


def _write(weight: Tensor, *_: object) -> None:
    weight.mul_(1.5)


@distributed(2)
def test_a_shard_that_is_written_between_two_uses_is_read_by_the_second(ctx: RankContext) -> None:
    found = []
    for model in (shard(ctx, seeded(EachRepeated)), seeded(EachRepeated)):
        weight = model.blocks[0].linear.weight
        with torch.no_grad():
            model(batch())
            model.blocks[0].register_forward_hook(partial(_write, weight))
            found.append(model(batch()).cpu())
    assert torch.allclose(*found, atol=1e-5)


@distributed(2)
def test_a_unit_that_calls_itself_keeps_its_parameters_until_the_outermost_call_returns(ctx: RankContext) -> None:
    """Also where a KeyboardInterrupt has ended an earlier forward: that one does not count as running."""
    model, reference = shard(ctx, seeded(SelfConditioned)), seeded(SelfConditioned)
    with mock.patch.object(model.blocks[0], "forward", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        model(batch())
    counts = _counts(model, _one_forward)
    assert (counts.actions["reduce"], counts.reduced_at_the_end) == (2, 0)
    _assert_gradients_of_two_steps(model, reference)
    with torch.no_grad():
        for each in (model, reference):
            for parameter in each.parameters():
                parameter.mul_(0.5)
    assert torch.allclose(model(batch()), reference(batch()), atol=1e-5)


@pytest.mark.parametrize("make", [CutOff, EachCutOff])
@distributed(2)
def test_uses_that_no_gradient_reaches_are_joined_at_the_end(ctx: RankContext, make: Any) -> None:
    """Other ranks may have a gradient there."""
    model = shard(ctx, seeded(make))
    assert _counts(model, _one_forward).actions["reduce"] == 2
    _assert_gradients_of_two_steps(model, seeded(make))


@pytest.mark.parametrize("make", [CutOff, EachCutOff])
@distributed(2)
def test_ranks_may_differ_in_which_uses_a_gradient_reaches(ctx: RankContext, make: Any) -> None:
    """On rank 0, a gradient reaches all uses of the blocks; on rank 1, the last one."""
    model, *references = shard(ctx, seeded(make)), seeded(make), seeded(make)
    model.set_ranks_may_differ(True)
    model.cuts, references[0].cuts = ctx.rank == 1, False
    for _ in range(3):
        for each in (model, *references):
            each.zero_grad()
            _one_forward(each)
        assert_gradients(model, *references, atol=1e-5)


# Several modules that are unsharded and reduced together: fully_shard([a, b])


def _as_one_unit(ctx: RankContext) -> Any:
    model = seeded(Stack)
    return shard_each(list(model.blocks[1:]), model, mesh=ctx.mesh_1d())


def _assert_gradients_are_right(model: Any) -> None:
    reference = seeded(Stack)
    for seed in range(2):
        assert torch.allclose(step(model, seed), step(reference, seed), atol=1e-6)
    assert_gradients(model, reference)


@distributed(2)
def test_reshard_between_the_modules_gathers_again_for_the_next(ctx: RankContext) -> None:
    model = _as_one_unit(ctx)
    model.blocks[2].register_forward_pre_hook(lambda module, _: module.reshard(), prepend=True)
    _assert_gradients_are_right(model)


@pytest.mark.parametrize("async_op", [False, True])
@distributed(2)
def test_unshard_before_the_root_has_run(ctx: RankContext, async_op: bool) -> None:
    model = _as_one_unit(ctx)
    model.blocks[1].unshard(async_op)
    assert torch.allclose(model(batch()), seeded(Stack)(batch()), atol=1e-6)
    model.reset_iter_state()
    _assert_gradients_are_right(model)
