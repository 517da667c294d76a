"""A weight of ``Stack`` whose all-gather hooks go wrong for the length of a block, on all ranks or on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.distributed.changes import assert_step_is_that_of
from tests.distributed.support import Stack, seeded, shard_each, step
from tests.harness.distributed import RankContext
from tests.harness.extensions import Travelling
from tests.harness.messages import error_of

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
LATER_PRE, LATER_POST = "later_pre", "later_post"
RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"

Outputs = tuple[Tensor, ...]


class Right(Travelling):
    """Sends its values as they are, so that a model with it trains like a plain one."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:  # type: ignore[override]
        return (self.plain,), None

    def fsdp_post_all_gather(
        self, all_gather_outputs: Outputs, metadata: None, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        if out is not None:
            out.copy_(all_gather_outputs[0])
            return None
        made = all_gather_outputs[0].clone()
        return made, (made,)


class Faulty(Right):
    """Hooks are bound at first use; what these two call may be replaced later."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:  # type: ignore[override]
        return self.later_pre(mesh)

    def fsdp_post_all_gather(
        self, all_gather_outputs: Outputs, metadata: None, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        return self.later_post(all_gather_outputs, metadata, param_dtype, out=out)

    later_pre = Right.fsdp_pre_all_gather
    later_post = Right.fsdp_post_all_gather


@contextmanager
def fault_in(hook: str, fault: object) -> Iterator[None]:
    """``Faulty`` has ``fault`` in the place of ``hook`` in this block."""
    right = getattr(Faulty, hook)
    setattr(Faulty, hook, fault)
    yield
    setattr(Faulty, hook, right)


def stack_of(make: Callable[[Tensor], Tensor]) -> Any:
    model = seeded(Stack)
    linear = model.blocks[1].linear
    linear.weight = nn.Parameter(make(linear.weight.detach()))
    return model


def sharded(model: Any, mesh: DeviceMesh) -> Any:
    return shard_each(*model.blocks, model, mesh=mesh)


def assert_trains_like_a_plain_one(model: Any) -> None:
    """Two steps, so that the second one goes through ``out``."""
    model.zero_grad()
    for _ in range(2):
        assert_step_is_that_of(model, seeded(Stack))


def refused(
    ctx: RankContext, hook: str, fault: object, on_rank: int | None = None, after: int = 0, replicas: int = 1
) -> str:
    """The error of a step with a fault, which comes ``after`` so many steps without."""
    mesh = ctx.mesh_1d() if replicas == 1 else ctx.mesh_2d(replicas, ctx.world_size // replicas)
    model = sharded(stack_of(Faulty), mesh)
    for _ in range(after):
        step(model)
    with fault_in(hook, fault if on_rank in (None, ctx.rank) else getattr(Faulty, hook)):
        error = error_of(lambda: step(model))
    model.reset_iter_state()
    assert_trains_like_a_plain_one(model)
    return error
