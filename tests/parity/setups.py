"""Ways to shard a model that a feature must compose with, and what the tests of those features share.

A ``Setup`` is a model, the mesh it lies on and how it is sharded. Tests take them by name from ``SETUPS``; another kind
of model is one more entry.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.harness import selection
from tests.harness.distributed import RankContext
from tests.harness.models import MLP, ParityModel, Transformer, Uneven
from tests.harness.runtimes import Runtime
from tests.harness.training import Step, one_backward, shard_units_and_root, snapshot
from tests.parity.test_model_parallel import shard as tensor_parallel_and_sharded

ShardModel = Callable[[Runtime, Any, DeviceMesh], Any]


def flat_mesh(ctx: RankContext) -> DeviceMesh:
    """One shard axis."""
    return ctx.mesh_1d()


def hybrid_mesh(ctx: RankContext) -> DeviceMesh:
    """Two replicas; on 2 ranks nothing is left to shard over."""
    return ctx.mesh_2d(2, ctx.world_size // 2)


def model_parallel_mesh(ctx: RankContext) -> DeviceMesh:
    """Tensor parallelism of two ranks, and FSDP over the rest. Ranks of one model must draw the same data."""
    return ctx.mesh(dp=ctx.world_size // 2, tp=2)


@dataclass(frozen=True)
class Setup:
    build: Callable[[], ParityModel]
    mesh: Callable[[RankContext], DeviceMesh] = flat_mesh
    shard: ShardModel = shard_units_and_root

    def sharded(self, runtime: Runtime, ctx: RankContext, seed: int = 0) -> Any:
        """A new model with the values that ``seed`` gives, sharded."""
        torch.manual_seed(seed)
        model = self.build()
        self.shard(runtime, model, self.mesh(ctx))
        return model

    def on_meta(self, runtime: Runtime, ctx: RankContext) -> Any:
        """The same without values: built and sharded on the meta device."""
        with torch.device("meta"):
            model = self.build()
        self.shard(runtime, model, self.mesh(ctx))
        return model


def _resting_on_two_ranks(runtime: Runtime, model: ParityModel, mesh: DeviceMesh) -> None:
    shard_units_and_root(runtime, model, mesh, reshard_after_forward=2)


def _always_unsharded(runtime: Runtime, model: ParityModel, mesh: DeviceMesh) -> None:
    shard_units_and_root(runtime, model, mesh, reshard_after_forward=False)


SETUPS = {
    "fsdp": Setup(Transformer),
    "uneven": Setup(Uneven),
    "hsdp": Setup(Uneven, hybrid_mesh),
    "resting": Setup(MLP, shard=_resting_on_two_ranks),
    "kept": Setup(MLP, shard=_always_unsharded),
    "tied": Setup(functools.partial(Transformer, tied=True)),
    "tp": Setup(MLP, model_parallel_mesh, tensor_parallel_and_sharded),
}


def setups(*names: str, long: Iterable[str] = ()) -> pytest.MarkDecorator:
    """The argument ``setup``: one name in ``SETUPS`` after the other; all of them, if none is given."""
    return pytest.mark.parametrize("setup", [*(names or SETUPS), *selection.long(*long)])


def train_steps(
    ctx: RankContext, model: Any, optimizer: Any, steps: Iterable[int], alike: bool = False
) -> list[Tensor]:
    """Train on batches number ``steps``, and return the losses. ``alike``: all ranks draw the same data, so that the
    number of ranks does not matter."""
    losses = []
    for index in steps:
        losses += one_backward(Step(index, 0 if alike else ctx.rank, None), model)
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach() for loss in losses]


@torch.no_grad()
def evaluate(ctx: RankContext, model: Any) -> Tensor:
    """The loss of a forward without backward, after which the root's parameters stay unsharded."""
    return Step(99, ctx.rank, None).loss(model)


def recorded(state: Any) -> Any:
    """``state`` with tensors replaced by copies that can be compared; all ranks must call it."""
    if isinstance(state, dict):
        return {key: recorded(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [recorded(value) for value in state]
    return snapshot(state, with_full=True) if isinstance(state, Tensor) else state


def whole(state: Any) -> Any:
    """``state`` with DTensors replaced by whole copies; all ranks must call it."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [whole(value) for value in state]
    if isinstance(state, DTensor):
        return state.detach().full_tensor().clone()
    return state.detach().clone() if isinstance(state, Tensor) else state


def cut_like(full: Tensor, like: Tensor) -> Tensor:
    """``full`` laid out as ``like`` is."""
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
