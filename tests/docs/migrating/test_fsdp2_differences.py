"""What the page says differs from torch's FSDP2 does differ, on both sides where torch does not hang."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal import two_tensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2.tensors import TwoTensor, wrap_parameters
from tests.docs.migrating.rows import Rows, backward, batch, close, forward, gradients, model, raises, wrap
from tests.harness import extensions
from tests.harness.distributed import RankContext
from tests.harness.models import MLP

ROWS = Rows("What differs", omits_some=True)
BOTH = (fsdp2, theirs)


@pytest.mark.parametrize("cell", ROWS)
def test_row(cell: str) -> None:
    ROWS.run(cell)


def test_every_row_is_tried() -> None:
    ROWS.check()


def _refused(package: Any, ctx: RankContext) -> tuple[type, str, bool]:
    """Sharding a dim that the last parameter lacks: the error, and whether any parameter was replaced."""
    layer = nn.Linear(4, 4)

    def dims(parameter: nn.Parameter) -> Shard:
        return Shard(0 if parameter is layer.weight else 3)

    with pytest.raises(Exception) as raised:  # noqa: PT011
        package.fully_shard(layer, mesh=ctx.mesh_1d(), shard_placement_fn=dims)
    return raised.type, str(raised.value), any(isinstance(parameter, DTensor) for parameter in layer.parameters())


@ROWS("first call refused")
def refused_call(ctx: RankContext) -> None:
    assert [_refused(package, ctx)[2] for package in BOTH] == [False, True]


@ROWS("errors about arguments")
def errors_about_arguments(ctx: RankContext) -> None:
    (ours, text, _), (other, _, _) = (_refused(package, ctx) for package in BOTH)
    assert (ours, other) == (ValueError, AssertionError)
    assert "'bias'" in text


@ROWS("errors about order")
def errors_about_order(ctx: RankContext) -> None:
    whole = model()
    fsdp2.fully_shard([*whole.blocks], mesh=ctx.mesh_1d())
    error = raises(fsdp2.ScheduleError, lambda: whole.blocks[0](batch(ctx)))
    assert isinstance(error, RuntimeError)


@ROWS("`copy.deepcopy` of a sharded module")
def deepcopy(ctx: RankContext) -> None:
    refused = wrap(theirs, ctx.mesh_1d())
    raises(AssertionError, lambda: copy.deepcopy(refused))
    wrapped = wrap(fsdp2, ctx.mesh_1d())
    copied: Any = copy.deepcopy(wrapped)
    close([backward(ctx, copied), gradients(copied)], [backward(ctx, wrapped), gradients(wrapped)])


@ROWS("`reset_iter_state()` on a module that is no root")
def reset_of_no_root(ctx: RankContext) -> None:
    for package in BOTH:
        wrapped: Any = wrap(package, ctx.mesh_1d())
        loss = forward(ctx, wrapped)
        if package is theirs:
            raises(RuntimeError, wrapped.blocks[0].reset_iter_state)
        else:
            wrapped.blocks[0].reset_iter_state()
            assert all(isinstance(parameter, DTensor) for parameter in wrapped.parameters())
        del loss


@ROWS("sharding along a dim other than 0")
def other_dims(ctx: RankContext) -> None:
    def shard(package: Any) -> Any:
        return package.fully_shard(
            nn.Linear(7, 4, bias=False), mesh=ctx.mesh_1d(), shard_placement_fn=lambda _: Shard(1)
        )

    raises(NotImplementedError, lambda: shard(theirs))
    assert shard(fsdp2).weight.to_local().shape == (4, 4 - ctx.rank)


@ROWS("scalars, parameters that are not contiguous")
def scalars_and_strides(ctx: RankContext) -> None:
    def shard(package: Any, parameter: Tensor) -> Tensor:
        layer = nn.Linear(4, 4)
        layer.weight = nn.Parameter(parameter)
        return package.fully_shard(layer, mesh=ctx.mesh_1d()).weight

    scalar, transposed = torch.tensor(1.0), torch.randn(4, 2).t()
    raises(ValueError, lambda: shard(theirs, scalar))
    raises(NotImplementedError, lambda: shard(theirs, transposed))
    whole: Any = shard(fsdp2, scalar)
    assert whole.to_local().shape == ()
    assert whole.placements == (Replicate(),)
    cut: Any = shard(fsdp2, transposed)
    assert cut.to_local().is_contiguous()


@ROWS("weights tied across units")
def tied_weights(ctx: RankContext) -> None:
    def tied(package: Any) -> Any:
        layers: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        layers[1].weight = layers[0].weight
        package.fully_shard(layers[0], mesh=ctx.mesh_1d())
        return package.fully_shard(layers, mesh=ctx.mesh_1d())

    ours, other = map(tied, BOTH)
    ours(torch.ones(2, 4)).sum().backward()
    assert ours[0].weight is ours[1].weight
    raises(ValueError, lambda: other(torch.ones(2, 4)))


@ROWS("a 2D mesh without `mesh_dim_names`")
def mesh_without_names(ctx: RankContext) -> None:
    mesh = DeviceMesh("cpu", torch.arange(ctx.world_size).view(ctx.world_size, 1))
    raises(AssertionError, lambda: theirs.fully_shard(nn.Linear(4, 4), mesh=mesh))
    layer: Any = fsdp2.fully_shard(nn.Linear(4, 4), mesh=mesh)
    assert layer.weight.placements == (Replicate(), Shard(0))


@ROWS("models that differ between ranks")
def differing_models(ctx: RankContext) -> None:
    whole = model(num_blocks=2 + ctx.rank)  # torch would hang
    wrapped = wrap(fsdp2, ctx.mesh_1d(), whole)
    error = raises(fsdp2.ScheduleError, lambda: forward(ctx, wrapped))
    assert "blocks.2" in str(error)


@ROWS("forward prefetch")
def forward_prefetch(ctx: RankContext) -> None:
    wrapped: Any = wrap(fsdp2, ctx.mesh_1d())
    backward(ctx, wrapped)
    with fsdp2.trace.record(wrapped) as recorded:
        forward(ctx, wrapped)
    found = recorded.actions()
    assert found.index("prefetch blocks.1") < found.index("reshard blocks.0")


@ROWS("shards written between two forwards, for example after a validation")
def written_shards(ctx: RankContext) -> None:
    def second_output(package: Any) -> Tensor:
        wrapped = wrap(package, ctx.mesh_1d())
        shards = [*wrapped.parameters()]
        with torch.no_grad():
            wrapped(batch(ctx))
            for shard in shards:
                shard.zero_()
            return wrapped(batch(ctx))

    assert bool((second_output(fsdp2) == 0).all())
    assert not bool((second_output(theirs) == 0).all())


@ROWS("parameters kept by `set_reshard_after_backward(False)`, optimizer stepping in backward")
def optimizer_in_backward(ctx: RankContext) -> None:
    def second_loss(package: Any) -> Tensor:
        wrapped: Any = wrap(package, ctx.mesh_1d())
        wrapped.set_reshard_after_backward(False)

        def step(shard: Tensor) -> None:
            with torch.no_grad():
                shard.zero_()

        for shard in wrapped.parameters():
            shard.register_post_accumulate_grad_hook(step)
        backward(ctx, wrapped)
        return forward(ctx, wrapped).detach()

    assert second_loss(fsdp2) == 0
    assert second_loss(theirs) > 0


@ROWS("casting the model after its first forward")
def casting(ctx: RankContext) -> None:
    def run(package: Any) -> torch.dtype:
        wrapped = wrap(package, ctx.mesh_1d())
        backward(ctx, wrapped)
        wrapped.zero_grad()
        wrapped.to(torch.float64)
        wrapped(batch(ctx).double()).square().mean().backward()
        dtype: torch.dtype = wrapped.exit.weight.grad.dtype
        return dtype

    assert run(fsdp2) is torch.float64
    with pytest.raises(Exception):  # noqa: B017, PT011
        run(theirs)


class _UsedTwice(MLP):
    """One block, run twice, both times under reentrant checkpointing."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for _ in range(2):
            x = checkpoint(self.blocks[0], x, use_reentrant=True)
        return self.exit(x)


@ROWS("reentrant checkpointing around a unit used twice in a backward")
def used_twice(ctx: RankContext) -> None:
    def found(package: Any) -> dict[str, Tensor | None]:
        torch.manual_seed(0)
        whole = _UsedTwice(1)
        if package is not None:
            wrap(package, ctx.mesh_1d(), whole)
        torch.manual_seed(0)
        whole(torch.randn(4, 16)).square().mean().backward()  # the same on every rank
        return gradients(whole)

    expected = found(None)
    close(found(fsdp2), expected)
    with pytest.raises(AssertionError):
        close(found(theirs), expected)


def _extended(make: Callable[[Tensor], Tensor], size: int = 8) -> nn.Linear:
    torch.manual_seed(0)
    return extensions.wrap(nn.Linear(4, size, bias=False), make)


@ROWS("all-gather hooks: payloads that differ in size between ranks")
def ragged_payloads(ctx: RankContext) -> None:
    layer = fsdp2.fully_shard(_extended(extensions.Ragged, 5), mesh=ctx.mesh_1d())
    torch.manual_seed(0)
    plain = nn.Linear(4, 5, bias=False)
    x = torch.ones(2, 4)
    close(layer(x), plain(x))


@ROWS("all-gather hooks with `reshard_after_forward=int`", world_size=4)
def hooks_on_smaller_mesh(ctx: RankContext) -> None:
    def run(package: Any) -> Tensor:
        layer = package.fully_shard(_extended(extensions.Halved), mesh=ctx.mesh_1d(), reshard_after_forward=2)
        output: Tensor = layer(torch.ones(2, 4))
        output.sum().backward()
        return layer.weight.grad.full_tensor()

    raises(NotImplementedError, lambda: run(theirs))
    close(run(fsdp2), torch.full((8, 4), 2.0))


@ROWS("DTensor parameters, or `dp_mesh_dims`, with `reshard_after_forward=int`", world_size=4)
def dtensors_on_smaller_mesh(ctx: RankContext) -> None:
    mesh = ctx.mesh(dp=4)

    def run(package: Any) -> Any:
        layer = nn.Linear(4, 8, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Replicate()]))
        dims = package.DataParallelMeshDims(shard="dp")
        package.fully_shard(layer, mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=2)
        output = layer(DTensor.from_local(torch.ones(2, 4), mesh, [Replicate()]))
        shape = layer.weight.to_local().shape
        output.sum().to_local().backward()
        return shape

    raises(NotImplementedError, lambda: run(theirs))
    assert run(fsdp2) == (2, 4)


@ROWS('`reshard_after_forward=int` on a part of the world, such as `mesh["dp"]`', world_size=4)
def smaller_mesh_on_a_part(ctx: RankContext) -> None:
    part = ctx.mesh(pp=2, dp=2)["dp"]
    wrapped = wrap(fsdp2, part, reshard_after_forward=2)
    assert backward(ctx, wrapped).isfinite()


@ROWS("parameters that are sharded over other ranks")
def other_ranks(ctx: RankContext) -> None:
    mesh = ctx.mesh(expert=2, dp=1)

    def wrapped(package: Any, result: Any) -> Any:
        whole = model()
        chosen = whole.blocks[0].down.weight
        return wrap(package, mesh._flatten("all"), whole, shard_placement_fn=lambda p: result if p is chosen else None)

    infos = FSDPMeshInfo(mesh["dp"], shard_mesh_dim=0)
    by_torch = ShardPlacementResult(Shard(0), infos)
    results = (fsdp2.ParamPlacement(Shard(0), mesh["dp"]), by_torch)
    found = [wrapped(fsdp2, result) for result in results]
    shapes = [module.blocks[0].down.weight.to_local().shape for module in (*found, wrapped(theirs, by_torch))]
    assert shapes == 3 * [(16, 32)]


@ROWS("all-gather hooks that fail on one rank at first use")
def failing_hook(ctx: RankContext) -> None:
    class Failing(extensions.Halved):
        @classmethod
        def encode(cls, shard: Tensor, rank: int, size: torch.Size, num_ranks: int) -> tuple[Tensor, ...]:
            if rank == 1:
                raise ValueError("on rank 1")
            return super().encode(shard, rank, size, num_ranks)

    layer = fsdp2.fully_shard(_extended(Failing), mesh=ctx.mesh_1d())
    error = raises(fsdp2.ExtensionError, lambda: layer(torch.ones(2, 4)))
    assert "on rank 1" in str(error)


@ROWS("gradients that are wrapper subclasses, such as `TwoTensor`")
def wrapper_gradients(ctx: RankContext) -> None:
    layer = nn.Linear(4, 8, bias=False)
    wrap_parameters(layer, lambda data: TwoTensor(data, 2 * data))
    fsdp2.fully_shard(layer, mesh=ctx.mesh_1d())
    layer(torch.ones(2, 4)).sum().backward()
    assert isinstance(layer.weight.grad, DTensor)
    assert isinstance(layer.weight.grad.to_local(), TwoTensor)


@ROWS("a parameter whose class sharding would lose (`as_subclass`)")
def lost_class(ctx: RankContext) -> None:
    class Hooked(torch.Tensor):
        def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:
            raise AssertionError("ignored")

        def fsdp_post_all_gather(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("ignored")

    def shard(package: Any) -> Any:
        layer = nn.Linear(4, 8, bias=False)
        layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Hooked))
        return package.fully_shard(layer, mesh=ctx.mesh_1d())

    raises(fsdp2.ExtensionError, lambda: shard(fsdp2))
    assert shard(theirs)(torch.ones(2, 4)).shape == (2, 8)


@ROWS("a unit that ran alone first")
def ran_alone_first(ctx: RankContext) -> None:
    def run(package: Any) -> Tensor:
        wrapped = wrap(package, ctx.mesh_1d())
        wrapped.blocks[0](batch(ctx)).sum().backward()
        return backward(ctx, wrapped)

    raises(RuntimeError, lambda: run(theirs))
    assert run(fsdp2).isfinite()


@ROWS("a pre-hook that sends a wrapper tensor")
def wrapper_payload(ctx: RankContext) -> None:
    def before(self: Any, *_: Any) -> Any:
        return (self,), None

    @torch.no_grad()
    def after(self: Any, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], outputs)

    results = []
    for package in BOTH:
        torch.manual_seed(0)
        layer = nn.Linear(4, 8, bias=False)
        data = layer.weight.detach()
        layer.weight = nn.Parameter(two_tensor.TwoTensor(data, 2 * data))
        package.fully_shard(layer, mesh=ctx.mesh_1d())
        local: Any = layer.weight._local_tensor  # to_local() makes another object
        local.fsdp_pre_all_gather = types.MethodType(before, local)
        local.fsdp_post_all_gather = types.MethodType(after, local)
        results.append(layer(torch.ones(2, 4)).detach())
    ours, other = results
    assert torch.equal(ours.b, 2 * ours.a)
    assert torch.equal(other, ours.b)


class _Forces(nn.Module):
    """Its forward takes a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return force * self.energy(x)


@ROWS("`torch.autograd.grad(create_graph=True)` inside a forward")
def gradients_inside_a_forward(ctx: RankContext) -> None:
    """On the CPU, both work. ``tests/accelerator`` runs our tests of such forwards on a simulated device."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), _Forces())
    models = [layers, *(copy.deepcopy(layers) for _ in BOTH)]
    for package, each in zip(BOTH, models[1:], strict=True):
        for unit in (each[1], each):
            package.fully_shard(unit, mesh=ctx.mesh_1d())
    for each in models:
        each(torch.ones(2, 4)).square().sum().backward()
    expected, *found = ([parameter.grad for parameter in each.parameters()] for each in models)
    for grads in found:
        for grad, other in zip(grads, expected, strict=True):
            assert isinstance(grad, DTensor)
            assert other is not None
            torch.testing.assert_close(grad.full_tensor(), other)


@ROWS("a model that the other's `fully_shard` was given")
def of_the_other_runtime(ctx: RankContext) -> None:
    layers = [nn.Linear(4, 4) for _ in BOTH]
    for package, layer in zip(BOTH, layers, strict=True):
        package.fully_shard(layer, mesh=ctx.mesh_1d())
    error = raises(AssertionError, lambda: theirs.fully_shard(layers[0], mesh=ctx.mesh_1d()))
    assert "has already been applied" in str(error)
    error = raises(ValueError, lambda: fsdp2.fully_shard(layers[1], mesh=ctx.mesh_1d()))
    assert "torch.distributed.fsdp.fully_shard" in str(error)
    assert "fsdp2.fully_shard" in str(error)
