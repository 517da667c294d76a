"""Wherever a step raises, ``reset_iter_state`` leaves a usable model with the gradients that it had accumulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2 import Observer, trace
from tests.distributed.support import InjectedError, Stack, UnshardedStorages, seeded, sharded, step
from tests.harness.distributed import RankContext, distributed


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


@pytest.mark.parametrize("setting", SETTINGS)
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
