"""Wherever a step raises, ``reset_iter_state`` leaves a usable model with the gradients that it had accumulated.

Those in ``.grad``, always; those of earlier micro-batches that are still on their way, after a forward if asked to.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import fsdp2
from fsdp2 import Observer
from fsdp2.schedule.states import Pass
from fsdp2.tools import trace
from tests.distributed.support import (
    InjectedError,
    Stack,
    UnshardedStorages,
    assert_gradients,
    seeded,
    shard,
    sharded,
    step,
)
from tests.harness.distributed import RankContext, distributed
from tests.harness.selection import long


class _RaiseAt(Observer):
    """Raises at the event or action number ``position`` of what it sees."""

    def __init__(self, position: int) -> None:
        self.left = position

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise InjectedError

    def on_event(self, event: str, unit: str) -> None:
        self._count()

    def on_action(self, action: str, unit: str, nbytes: int) -> None:
        self._count()

    def on_transition(self, unit: str, before: str, after: str) -> None:
        self._count()


def _gradients(model: Any) -> list[Tensor]:
    return [parameter.grad.to_local() for parameter in model.parameters()]


def _fails_at(model: Any, position: int) -> bool:
    with trace.observe(model, _RaiseAt(position)):
        try:
            step(model, seed=2)
        except InjectedError:
            return True
    return False


SETTINGS: dict[str, dict[str, Any]] = {"reshard": {}, "keep": {"reshard_after_forward": False}}


@pytest.mark.parametrize("setting", ["reshard", *long("keep")])
@distributed(2)
def test_a_model_is_usable_and_keeps_its_gradients(ctx: RankContext, setting: str) -> None:
    references = [seeded(Stack) for _ in range(2)]
    for seed, reference in enumerate(references, start=1):
        step(reference, seed)
    first, second = (
        [parameter.grad.chunk(ctx.world_size)[ctx.rank] for parameter in reference.parameters()]
        for reference in references
    )
    model = sharded(ctx, **SETTINGS[setting])
    unsharded = UnshardedStorages(model)
    step(model, seed=1)  # the order is recorded: exceptions find prefetches in flight
    model.zero_grad()
    position = 0
    while True:
        step(model, seed=1)
        for found, one in zip(_gradients(model), first, strict=True):
            assert torch.allclose(found, one, atol=1e-6), position
        if not _fails_at(model, position):
            break
        model.reset_iter_state()
        assert unsharded.nbytes == 0, position
        for found, one, other in zip(_gradients(model), first, second, strict=True):
            has_landed = torch.allclose(found, one + other, atol=1e-6)
            assert has_landed or torch.allclose(found, one, atol=1e-6), position
        model.zero_grad()
        position += 1
    assert position > 40


def _no_sync(model: Any, enabled: bool) -> None:
    model.set_requires_gradient_sync(not enabled)


def _no_all_reduce(model: Any, enabled: bool) -> None:
    model.set_requires_all_reduce(not enabled)


def _no_landing(model: Any, enabled: bool) -> None:
    model.set_reduce_scatter_max_input_buffers(8)
    model.set_is_last_backward(not enabled)


def _no_finalization(model: Any, enabled: bool) -> None:
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(not enabled)


def _on_their_way(model: Any, leave: Any, seed: int) -> None:
    """A micro-batch whose gradients are not in ``.grad`` when it ends."""
    leave(model, True)
    step(model, seed)
    leave(model, False)


def _go_on(model: Any, leave: Any, seed: int) -> None:
    step(model, seed)
    if leave is _no_finalization:
        model.finalize_backward()


@pytest.mark.ci
@pytest.mark.parametrize("resets", [True, False], ids=["reset", "no reset"])
@pytest.mark.parametrize("leave", [_no_all_reduce, *long(_no_sync, _no_landing, _no_finalization)])
@distributed(4)
def test_gradients_on_their_way_stay_after_a_forward_that_raises(ctx: RankContext, leave: Any, resets: bool) -> None:
    reference = seeded(lambda: Stack(1))
    for seed in (1, 3):
        step(reference, seed)
    model = shard(ctx, seeded(lambda: Stack(1)), mesh=ctx.mesh_2d(2, 2))
    for position in itertools.count():
        _on_their_way(model, leave, seed=1)
        assert _fails_at(model, position)
        if model.blocks[0]._unit().running is Pass.BACKWARD:
            break
        if resets:
            model.reset_iter_state(keep_unreduced=True)
        _go_on(model, leave, seed=3)
        assert_gradients(model, reference)
        model.zero_grad()
    assert position > 8
    with pytest.raises(fsdp2.ScheduleError, match="an exception in backward"):
        model.reset_iter_state(keep_unreduced=True)
    model.reset_iter_state()
    model.zero_grad()
    _go_on(model, leave, seed=3)
