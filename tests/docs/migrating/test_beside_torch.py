"""Where fsdp2 and torch's FSDP2 differ, or take what is the other's: both run. All else is in ``tests/parity``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_api
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.docs.migrating.programs import BOTH, batch, close, gradients, raises, train, wrap
from tests.harness.compare import compare_values
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP

# What is torch's


@distributed(2)
def test_offload_policies_of_torch_are_taken(ctx: RankContext) -> None:
    for policy in (theirs.OffloadPolicy(), theirs.CPUOffloadPolicy(pin_memory=False)):
        wrap(fsdp2, ctx.mesh_1d(), offload_policy=policy)


@distributed(2)
def test_names_of_axes_in_torchs_class_are_taken(ctx: RankContext) -> None:
    mesh = ctx.mesh(dp=2)
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Replicate()]))
    fsdp2.fully_shard(layer, mesh=mesh, dp_mesh_dims=theirs.DataParallelMeshDims(shard="dp"))
    assert layer.weight.to_local().shape == (2, 4)


class _Gather(_fsdp_api.AllGather):
    """The collective itself; notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.asked.append(async_op)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class _Reduce(_fsdp_api.ReduceScatter):
    """The collective itself; notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[bool, bool]] = []

    allocate = _Gather.allocate

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self.asked.append((op == dist.ReduceOp.SUM, async_op))
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


@distributed(2)
def test_collectives_of_torchs_classes_are_taken(ctx: RankContext) -> None:
    """fsdp2 always asks for sums; torch has gloo divide."""
    for name in ("Comm", "AllGather", "ReduceScatter"):
        assert getattr(fsdp2.core.comms, name).__abstractmethods__ == getattr(_fsdp_api, name).__abstractmethods__
    losses, asked = [], []
    for package in BOTH:
        gather, reduce = _Gather(), _Reduce()
        wrapped = wrap(package, ctx.mesh_1d())
        wrapped.set_custom_all_gather(gather)
        wrapped.set_custom_reduce_scatter(reduce)
        losses.append(train(ctx, wrapped))
        asked.append((set(gather.asked), set(reduce.asked)))
    compare_values("fsdp2 and torch", *losses)
    assert asked == [({False}, {(True, False)}), ({False}, {(False, False)})]


# What differs


@distributed(2)
def test_a_first_call_that_is_refused_leaves_the_model_as_it_was(ctx: RankContext) -> None:
    """torch has replaced the first parameter when the last one turns out to lack the dim."""
    were_replaced = []
    for package in BOTH:
        layer = nn.Linear(4, 4)
        place = {layer.weight: Shard(0), layer.bias: Shard(3)}.get
        with pytest.raises((ValueError, AssertionError)):
            package.fully_shard(layer, mesh=ctx.mesh_1d(), shard_placement_fn=place)
        were_replaced.append(any(isinstance(parameter, DTensor) for parameter in layer.parameters()))
    assert were_replaced == [False, True]


def _shard_one(package: Any, ctx: RankContext, parameter: Tensor, **options: Any) -> Any:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(parameter)
    return package.fully_shard(layer, mesh=ctx.mesh_1d(), **options).weight


def _shard_a_dim_that_does_not_divide(package: Any, ctx: RankContext) -> None:
    along = {2: Shard(1), 1: Shard(0)}
    weight = _shard_one(package, ctx, torch.randn(4, 7), shard_placement_fn=lambda param: along[param.ndim])
    assert weight.to_local().shape == (4, 4 - ctx.rank)


def _shard_a_scalar(package: Any, ctx: RankContext) -> None:
    assert _shard_one(package, ctx, torch.tensor(1.0)).placements == (Replicate(),)


def _shard_what_is_not_contiguous(package: Any, ctx: RankContext) -> None:
    assert _shard_one(package, ctx, torch.randn(4, 2).t()).to_local().is_contiguous()


def _tie_across_units(package: Any, ctx: RankContext) -> None:
    layers: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layers[1].weight = layers[0].weight
    package.fully_shard(layers[0], mesh=ctx.mesh_1d())
    package.fully_shard(layers, mesh=ctx.mesh_1d())
    layers(torch.ones(2, 4)).sum().backward()
    assert layers[0].weight is layers[1].weight


def _copy(package: Any, ctx: RankContext) -> None:
    wrapped = wrap(package, ctx.mesh_1d())
    compare_values("the copy", train(ctx, copy.deepcopy(wrapped)), train(ctx, wrapped))


def _reset_a_unit_that_is_no_root(package: Any, ctx: RankContext) -> None:
    wrapped = wrap(package, ctx.mesh_1d())
    _ = wrapped(batch(ctx)).sum()  # a backward would be possible
    wrapped.blocks[0].reset_iter_state()
    assert all(isinstance(parameter, DTensor) for parameter in wrapped.parameters())


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (_shard_a_dim_that_does_not_divide, NotImplementedError),
        (_shard_a_scalar, ValueError),
        (_shard_what_is_not_contiguous, NotImplementedError),
        (_tie_across_units, ValueError),
        (_copy, AssertionError),
        (_reset_a_unit_that_is_no_root, RuntimeError),
    ],
)
@distributed(2)
def test_torch_refuses(ctx: RankContext, program: Callable[..., None], error: type[Exception]) -> None:
    """What works with fsdp2."""
    program(fsdp2, ctx)
    raises(error, lambda: program(theirs, ctx))


class _WithoutBias(nn.Linear):
    """The bias is not used."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def _seen_by_the_hook(layer: Any, x: Tensor) -> Tensor:
    seen: list[Tensor] = []
    layer.set_all_reduce_hook(lambda reduced: seen.append(reduced.clone()))
    layer(x).sum().backward()
    (reduced,) = seen
    return reduced


@distributed(2)
def test_what_the_all_reduce_hook_is_given(ctx: RankContext) -> None:
    """torch's hook gets the gradients that there are."""
    layers = [package.fully_shard(_WithoutBias(64, 64), mesh=ctx.mesh_1d()) for package in BOTH]
    ours, theirs = (_seen_by_the_hook(layer, torch.ones(2, 64)).numel() for layer in layers)
    assert ours >= (64 * 64 + 64) // 2
    assert theirs == 64 * 64 // 2


@distributed(4)
def test_the_all_reduce_hook_is_given_the_average_in_float64(ctx: RankContext) -> None:
    """torch divides by the square root of the number of ranks ahead of the hook, and once more behind it."""
    layers = [package.fully_shard(nn.Linear(4, 8, bias=False).double(), mesh=ctx.mesh_1d()) for package in BOTH]
    seen = [_seen_by_the_hook(layer, torch.ones(1, 4, dtype=torch.float64)).max().item() for layer in layers]
    assert seen == [1.0, 2.0]


class _UsedTwice(MLP):
    """One block, run twice, both times under reentrant checkpointing."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for _ in range(2):
            x = checkpoint(self.blocks[0], x, use_reentrant=True)
        return self.exit(x)


@distributed(2)
def test_reentrant_checkpointing_around_a_unit_that_is_used_twice_in_a_backward(ctx: RankContext) -> None:
    """torch's gradients are wrong."""

    def found(package: Any) -> list[Tensor | None]:
        torch.manual_seed(0)
        whole = _UsedTwice(1)
        if package is not None:
            wrap(package, ctx.mesh_1d(), whole)
        whole(torch.randn(4, 16, generator=torch.Generator().manual_seed(0))).square().mean().backward()
        return gradients(whole)

    expected = found(None)
    close(found(fsdp2), expected)
    with pytest.raises(AssertionError):
        close(found(theirs), expected)
