"""Every public name of torch's FSDP2, and every argument and field, does here what it does there."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_api
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fsdp2
from tests.docs.migrating.rows import Rows, backward, batch, forward, model, raises, same, same_training, train, wrap
from tests.harness.distributed import RankContext
from tests.harness.models import MLP

NAMES = Rows("Names", omits_some=True)
ARGUMENTS = Rows("Arguments", omits_some=True)


@pytest.mark.parametrize("cell", NAMES)
def test_name(cell: str) -> None:
    NAMES.run(cell)


@pytest.mark.parametrize("cell", ARGUMENTS)
def test_argument(cell: str) -> None:
    ARGUMENTS.run(cell)


@pytest.mark.parametrize("rows", [NAMES, ARGUMENTS], ids=lambda rows: rows.title)
def test_every_row_is_tried(rows: Rows) -> None:
    rows.check()


@NAMES("`fully_shard`")
def fully_shard(ctx: RankContext) -> None:
    same_training(ctx, lambda package: wrap(package, ctx.mesh_1d()))


@NAMES("`FSDPModule`")
def fsdp_module(ctx: RankContext) -> None:
    def program(package: Any) -> Any:
        wrapped = wrap(package, ctx.mesh_1d())
        return isinstance(wrapped, package.FSDPModule), isinstance(wrapped, MLP), type(wrapped).__name__

    assert same(program) == (True, True, "FSDPMLP")


@NAMES("`UnshardHandle`")
def unshard_handle(ctx: RankContext) -> None:
    def program(package: Any) -> Any:
        wrapped = wrap(package, ctx.mesh_1d())
        handle = wrapped.unshard(async_op=True)
        assert isinstance(handle, package.UnshardHandle)
        handle.wait()
        return {name: parameter.detach().clone() for name, parameter in wrapped.entry.named_parameters()}

    assert same(program)["weight"].shape == (16, 16)


def _policy(name: str, ctx: RankContext) -> None:
    """The same fields with the same defaults, refused by the other package."""

    def program(package: Any) -> Any:
        policy = getattr(package, name)()
        ours_alone = {"param_dtype_override_fn"}
        return {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy) if f.name not in ours_alone}

    same(program)
    argument = "mp_policy" if name == "MixedPrecisionPolicy" else "offload_policy"
    theirs = getattr(torch.distributed.fsdp, name)()
    raises(TypeError, lambda: wrap(fsdp2, ctx.mesh_1d(), **{argument: theirs}))


@NAMES("`MixedPrecisionPolicy`")
def mixed_precision_policy(ctx: RankContext) -> None:
    _policy("MixedPrecisionPolicy", ctx)


@NAMES("`OffloadPolicy`")
def offload_policy(ctx: RankContext) -> None:
    _policy("OffloadPolicy", ctx)


@NAMES("`CPUOffloadPolicy`")
def cpu_offload_policy(ctx: RankContext) -> None:
    _policy("CPUOffloadPolicy", ctx)


def _on_full_mesh(package: Any, mesh: DeviceMesh, dims: Any) -> MLP:
    """All parameters are DTensors on all axes of ``mesh``; ``dims`` of them are data-parallel."""
    whole = model()
    for module in whole.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(parameter.detach(), mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
            setattr(module, name, nn.Parameter(placed))
    return wrap(package, mesh, whole, dp_mesh_dims=dims)


def _same_on_full_mesh(ctx: RankContext, mesh: DeviceMesh, **dims: Any) -> None:
    def program(package: Any) -> Any:
        wrapped = _on_full_mesh(package, mesh, package.DataParallelMeshDims(**dims))
        placed = distribute_tensor(batch(ctx), mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
        wrapped(placed).square().mean().backward()
        weight = wrapped.entry.weight
        assert isinstance(weight.grad, torch.distributed.tensor.DTensor)
        return [str(weight.placements), weight.grad.to_local(), weight.to_local().detach()]

    same(program)


@NAMES("`DataParallelMeshDims`")
def data_parallel_mesh_dims(ctx: RankContext) -> None:
    mesh = ctx.mesh(dp=2)
    _same_on_full_mesh(ctx, mesh, shard="dp")
    theirs = torch.distributed.fsdp.DataParallelMeshDims(shard="dp")
    assert isinstance(_on_full_mesh(fsdp2, mesh, theirs), fsdp2.FSDPModule)


@NAMES("`register_fsdp_forward_method`")
def register_fsdp_forward_method(ctx: RankContext) -> None:
    class WithMethod(nn.Linear):
        def scaled(self, x: Tensor) -> Tensor:
            return 2 * self(x) + x @ self.weight

    def program(package: Any) -> Any:
        torch.manual_seed(0)
        wrapped = package.fully_shard(WithMethod(16, 16), mesh=ctx.mesh_1d())
        package.register_fsdp_forward_method(wrapped, "scaled")
        wrapped.scaled(batch(ctx)).square().mean().backward()
        return wrapped.weight.grad.to_local()

    same(program)


@NAMES("`share_comm_ctx`")
def share_comm_ctx(ctx: RankContext) -> None:
    def program(package: Any) -> Any:
        stages = [wrap(package, ctx.mesh_1d()) for _ in range(2)]
        package.share_comm_ctx(stages)
        return [train(ctx, stage) for stage in stages]

    same(program)


class PlainAllGather(_fsdp_api.AllGather):
    """The collective itself, on torch's interface."""

    num_calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.num_calls += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


@NAMES("`_fsdp_api.Comm`, `AllGather`, `ReduceScatter`")
def comm_interfaces(ctx: RankContext) -> None:
    for name in ("Comm", "AllGather", "ReduceScatter"):
        ours, theirs = getattr(fsdp2, name), getattr(_fsdp_api, name)
        assert ours.__abstractmethods__ == theirs.__abstractmethods__

    def program(package: Any) -> Any:
        wrapped, comm = wrap(package, ctx.mesh_1d()), PlainAllGather()
        wrapped.set_custom_all_gather(comm)
        return train(ctx, wrapped), comm.num_calls > 0

    same(program)


# Arguments


@ARGUMENTS("`module`: a module, or a list of modules")
def module(ctx: RankContext) -> None:
    same_training(ctx, lambda package: package.fully_shard(model(), mesh=ctx.mesh_1d()))

    def one_unit_of_two(package: Any) -> MLP:
        whole = model()
        wrapped = package.fully_shard([*whole.blocks], mesh=ctx.mesh_1d())
        assert wrapped == [*whole.blocks]
        return package.fully_shard(whole, mesh=ctx.mesh_1d())

    same_training(ctx, one_unit_of_two)
    container = nn.ModuleList([nn.Linear(2, 2)])
    raises(ValueError, lambda: fsdp2.fully_shard(container, mesh=ctx.mesh_1d()))


@ARGUMENTS("`mesh`")
def mesh(ctx: RankContext) -> None:
    same_training(ctx, lambda package: wrap(package, ctx.mesh_2d(1, 2)))
    same_training(ctx, lambda package: wrap(package, ctx.mesh_2d(2, 1)))
    same_training(ctx, lambda package: wrap(package, None))


@ARGUMENTS("`reshard_after_forward`")
def reshard_after_forward(ctx: RankContext) -> None:
    def program(package: Any, value: bool | int | None) -> Any:
        wrapped = wrap(package, ctx.mesh_1d(), reshard_after_forward=value)
        loss = forward(ctx, wrapped)
        between = {name: type(parameter).__name__ for name, parameter in wrapped.named_parameters()}
        loss.backward()
        return between, train(ctx, wrapped)

    for value in (None, True, False, 2):
        same(lambda package, value=value: program(package, value))


@ARGUMENTS("`shard_placement_fn`")
def shard_placement_fn(ctx: RankContext) -> None:
    def last_dim(parameter: nn.Parameter) -> Shard:
        return Shard(parameter.dim() - 1)

    same_training(ctx, lambda package: wrap(package, ctx.mesh_1d(), shard_placement_fn=last_dim))
    uneven = nn.Linear(7, 3)
    fsdp2.fully_shard(uneven, mesh=ctx.mesh_1d(), shard_placement_fn=last_dim)
    assert uneven.weight.to_local().shape == (3, 4 if ctx.rank == 0 else 3)


@ARGUMENTS("`mp_policy`")
def mp_policy(ctx: RankContext) -> None:
    def wrapped(package: Any) -> MLP:
        policy = package.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return wrap(package, ctx.mesh_1d(), mp_policy=policy)

    same_training(ctx, wrapped)


def _same_with(ctx: RankContext, **fields: Any) -> torch.dtype:
    """One unit trains the same under a policy with ``fields``; the dtype of outputs."""

    def program(package: Any) -> Any:
        wrapped = package.fully_shard(model(), mesh=ctx.mesh_1d(), mp_policy=package.MixedPrecisionPolicy(**fields))
        dtypes: list[torch.dtype] = []
        wrapped.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
        return train(ctx, wrapped), dtypes

    dtype: torch.dtype = same(program)[1][-1]
    return dtype


@ARGUMENTS("`MixedPrecisionPolicy.param_dtype`")
def param_dtype(ctx: RankContext) -> None:
    assert _same_with(ctx, param_dtype=torch.bfloat16) is torch.bfloat16


@ARGUMENTS("`MixedPrecisionPolicy.reduce_dtype`")
def reduce_dtype(ctx: RankContext) -> None:
    assert _same_with(ctx, reduce_dtype=torch.bfloat16) is torch.float32


@ARGUMENTS("`MixedPrecisionPolicy.output_dtype`")
def output_dtype(ctx: RankContext) -> None:
    assert _same_with(ctx, output_dtype=torch.float64) is torch.float64


@ARGUMENTS("`MixedPrecisionPolicy.cast_forward_inputs`")
def cast_forward_inputs(ctx: RankContext) -> None:
    def program(package: Any, cast: bool) -> Any:
        policy = package.MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=cast)
        wrapped = package.fully_shard(nn.Identity(), mesh=ctx.mesh_1d(), mp_policy=policy)
        return wrapped(batch(ctx)).dtype

    assert same(lambda package: program(package, True)) is torch.bfloat16
    assert same(lambda package: program(package, False)) is torch.float32


@ARGUMENTS("`offload_policy`")
def offload_policy_argument(ctx: RankContext) -> None:
    same_training(ctx, lambda package: wrap(package, ctx.mesh_1d(), offload_policy=package.OffloadPolicy()))


@ARGUMENTS("`CPUOffloadPolicy.pin_memory`")
def pin_memory(ctx: RankContext) -> None:
    def wrapped(package: Any) -> MLP:
        return wrap(package, ctx.mesh_1d(), offload_policy=package.CPUOffloadPolicy(pin_memory=False))

    same_training(ctx, wrapped)
    pinned = wrap(fsdp2, ctx.mesh_1d(), offload_policy=fsdp2.CPUOffloadPolicy())  # nothing to pin for on the CPU
    backward(ctx, pinned)
    assert not any(parameter.to_local().is_pinned() for parameter in pinned.parameters())


@ARGUMENTS("`ignored_params`")
def ignored_params(ctx: RankContext) -> None:
    def wrapped(package: Any) -> MLP:
        whole = model()
        return wrap(package, ctx.mesh_1d(), whole, ignored_params={whole.exit.weight, whole.blocks[0].up.bias})

    same_training(ctx, wrapped)
    assert not isinstance(wrapped(fsdp2).exit.weight, torch.distributed.tensor.DTensor)


@ARGUMENTS("`dp_mesh_dims`", world_size=4)
def dp_mesh_dims(ctx: RankContext) -> None:
    _same_on_full_mesh(ctx, ctx.mesh(dp=2, tp=2), shard="dp")


@ARGUMENTS("`DataParallelMeshDims.shard`", world_size=4)
def dims_shard(ctx: RankContext) -> None:
    mesh = ctx.mesh(outer=2, inner=2)
    wrapped = _on_full_mesh(fsdp2, mesh, fsdp2.DataParallelMeshDims(shard=("outer", "inner")))
    assert wrapped.entry.weight.to_local().shape == (4, 16)
    _same_on_full_mesh(ctx, mesh, shard="inner")


@ARGUMENTS("`DataParallelMeshDims.replicate`", world_size=4)
def dims_replicate(ctx: RankContext) -> None:
    mesh = ctx.mesh(outer=2, inner=2)
    _same_on_full_mesh(ctx, mesh, shard="inner", replicate="outer")
    whole = _on_full_mesh(fsdp2, mesh, fsdp2.DataParallelMeshDims(replicate="outer"))
    assert whole.entry.weight.to_local().shape == (16, 16)
