"""Ways to shard a model that a feature must compose with, and what the tests of those features share.

A ``Setup`` is a model, the mesh it lies on and how it is sharded. Tests take them by name from ``SETUPS``; another kind
of model is one more entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import _pytree as pytree

from tests.harness import selection
from tests.harness.compare import hsdp
from tests.harness.distributed import RankContext
from tests.harness.models import MLP, ParityModel, Transformer, Uneven
from tests.harness.runtimes import Runtime
from tests.harness.training import Step, one_backward, shard_units_and_root, sharded, snapshot
from tests.parity.test_model_parallel import shard as tensor_parallel_and_sharded

ShardModel = Callable[[Runtime, Any, DeviceMesh], Any]


def model_parallel_mesh(ctx: RankContext) -> DeviceMesh:
    """Tensor parallelism of two ranks, and FSDP over the rest. Ranks of one model must draw the same data."""
    return ctx.mesh(dp=ctx.world_size // 2, tp=2)


@dataclass(frozen=True)
class Setup:
    build: Callable[[], ParityModel]
    mesh: Callable[[RankContext], DeviceMesh] = RankContext.mesh_1d
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


SETUPS = {
    "fsdp": Setup(Transformer),
    "uneven": Setup(Uneven),
    "hsdp": Setup(Uneven, hsdp),
    "resting": Setup(MLP, shard=sharded(reshard_after_forward=2)),
    "kept": Setup(MLP, shard=sharded(reshard_after_forward=False)),
    "tied": Setup(partial(Transformer, tied=True)),
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
    return pytree.tree_map_only(Tensor, partial(snapshot, with_full=True), state)


def whole(state: Any) -> Any:
    """``state`` with tensors replaced by whole copies; all ranks must call it."""

    def copy(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()

    return pytree.tree_map_only(Tensor, copy, state)


def cut_like(full: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def states_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """What ``torch.distributed.checkpoint`` saves."""
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def load_states(model: Any, optimizer: Any, path: Path, **options: Any) -> None:
    states = states_of(model, optimizer)
    dcp.load(states, checkpoint_id=path, **options)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
