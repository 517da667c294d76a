"""What the page says differs from torch's FSDP2 does differ, on both sides where torch does not hang."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2.offload import StagedOffloadPolicy
from fsdp2.tensors import TwoTensor, wrap_parameters
from tests.docs.migrating.rows import Rows, backward, batch, close, forward, gradients, model, raises, wrap
from tests.harness import extensions
from tests.harness.distributed import RankContext
from tests.harness.models import MLP

ROWS = Rows("What differs")
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
    for package, error in zip(BOTH, (NotImplementedError, AssertionError), strict=True):
        wrapped = wrap(package, ctx.mesh_1d())
        raises(error, lambda wrapped=wrapped: copy.deepcopy(wrapped))  # type: ignore[misc]


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


@ROWS("forward prefetch")
def forward_prefetch(ctx: RankContext) -> None:
    wrapped: Any = wrap(fsdp2, ctx.mesh_1d())
    backward(ctx, wrapped)
    with fsdp2.trace.record(wrapped) as recorded:
        forward(ctx, wrapped)
    found = recorded.actions()
    assert found.index("prefetch blocks.1") < found.index("reshard blocks.0")


@ROWS("shards written between a forward and the next, after a validation forward for example")
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
    return extensions.wrap(nn.Linear(4, size, bias=False), make)  # type: ignore[no-any-return]


@ROWS("all-gather hooks: payloads that differ in size between ranks")
def ragged_payloads(ctx: RankContext) -> None:
    layer = fsdp2.fully_shard(_extended(extensions.Ragged, 5), mesh=ctx.mesh_1d())
    torch.manual_seed(0)
    plain = nn.Linear(4, 5, bias=False)
    x = torch.ones(2, 4)
    close(layer(x), plain(x))  # type: ignore[operator]


@ROWS("all-gather hooks with `reshard_after_forward=int`", world_size=4)
def hooks_on_smaller_mesh(ctx: RankContext) -> None:
    def run(package: Any) -> Tensor:
        layer = package.fully_shard(_extended(extensions.Halved), mesh=ctx.mesh_1d(), reshard_after_forward=2)
        output: Tensor = layer(torch.ones(2, 4))
        output.sum().backward()
        return layer.weight.grad.full_tensor()  # type: ignore[no-any-return]

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
        shape = layer.weight.to_local().shape  # type: ignore[operator]
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
    error = raises(fsdp2.ExtensionError, lambda: layer(torch.ones(2, 4)))  # type: ignore[operator]
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


class _Reduce:
    """The collective itself on torch's interface; notes what it is asked, and may reuse its memory."""

    def __init__(self, reuses: bool = False) -> None:
        self.asked: list[tuple[str, bool]] = []
        self._kept: dict[Any, Tensor] | None = {} if reuses else None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._kept is None:
            return torch.empty(*size, dtype=dtype, device=device)
        key = (tuple(size), dtype)
        if key not in self._kept:
            self._kept[key] = torch.empty(*size, dtype=dtype, device=device)
        return self._kept[key]

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        name = "SUM" if op == dist.ReduceOp.SUM else "another"
        self.asked.append((name, async_op))
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _reduced(package: Any, ctx: RankContext, comm: _Reduce) -> dict[str, Tensor | None]:
    wrapped: Any = wrap(package, ctx.mesh_1d())
    for block in wrapped.blocks:
        block.set_custom_reduce_scatter(comm)
    backward(ctx, wrapped)
    return gradients(wrapped)


@ROWS("`op` that a custom reduce-scatter is given")
def op_of_reduce(ctx: RankContext) -> None:
    comms = [_Reduce(), _Reduce()]
    for package, comm in zip(BOTH, comms, strict=True):
        _reduced(package, ctx, comm)
    assert {name for name, _ in comms[0].asked} == {"SUM"}
    assert {name for name, _ in comms[1].asked} == {"another"}


@ROWS("`async_op` that custom collectives are given")
def async_op(ctx: RankContext) -> None:
    comms = [_Reduce(), _Reduce()]
    for package, comm in zip(BOTH, comms, strict=True):
        _reduced(package, ctx, comm)
    assert {asynchronous for _, asynchronous in comms[0].asked} == {True}
    assert {asynchronous for _, asynchronous in comms[1].asked} == {False}


@ROWS("custom collectives that return the same memory every time")
def same_memory(ctx: RankContext) -> None:
    expected = _reduced(theirs, ctx, _Reduce())
    close(_reduced(fsdp2, ctx, _Reduce(reuses=True)), expected)
    with pytest.raises(AssertionError):
        close(_reduced(theirs, ctx, _Reduce(reuses=True)), expected)


@ROWS("what the all-reduce hook is given")
def hook_is_given(ctx: RankContext) -> None:
    def sizes(package: Any) -> int:
        class Partly(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return x @ self.weight

        seen: list[int] = []
        layer = package.fully_shard(Partly(64, 64), mesh=ctx.mesh_1d())
        layer.set_all_reduce_hook(lambda reduced: seen.append(reduced.numel()))
        layer(torch.ones(2, 64)).sum().backward()
        return seen[0]

    assert sizes(fsdp2) >= (64 * 64 + 64) // 2
    assert sizes(theirs) == 64 * 64 // 2


@ROWS("float64 gradients and the all-reduce hook", world_size=4)
def float64_hook(ctx: RankContext) -> None:
    def seen_by_hook(package: Any) -> float:
        seen: list[Tensor] = []
        layer = package.fully_shard(nn.Linear(4, 8, bias=False).double(), mesh=ctx.mesh_1d())
        layer.set_all_reduce_hook(lambda reduced: seen.append(reduced.clone()))
        layer(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        return float(seen[0].max())

    assert seen_by_hook(fsdp2) == 1.0
    assert seen_by_hook(theirs) == 2.0


@ROWS("a unit that ran alone first")
def ran_alone_first(ctx: RankContext) -> None:
    def run(package: Any) -> Tensor:
        wrapped = wrap(package, ctx.mesh_1d())
        wrapped.blocks[0](batch(ctx)).sum().backward()
        return backward(ctx, wrapped)

    raises(RuntimeError, lambda: run(theirs))
    assert run(fsdp2).isfinite()


@ROWS("`CPUOffloadPolicy()` on a CPU mesh")
def offload_on_cpu(ctx: RankContext) -> None:
    def run(package: Any) -> Tensor:
        return backward(ctx, wrap(package, ctx.mesh_1d(), offload_policy=package.CPUOffloadPolicy()))

    assert run(fsdp2).isfinite()
    if not torch.accelerator.is_available():
        raises(RuntimeError, lambda: run(theirs))


@ROWS("offloaded gradients in `.grad`, and hooks on them")
def offloaded_gradients(ctx: RankContext) -> None:
    """``StagedOffloadPolicy`` makes the copies that an accelerator would need."""

    def there_at_inputs(package: Any, policy: Any) -> int:
        wrapped: Any = wrap(package, ctx.mesh_1d(), offload_policy=policy)
        shards, there = list(wrapped.blocks.parameters()), []
        x = batch(ctx).requires_grad_()
        x.register_hook(lambda _: there.append(sum(shard.grad is not None for shard in shards)))
        wrapped(x).square().mean().backward()
        assert all(shard.grad is not None for shard in shards)
        return there[0]

    assert there_at_inputs(fsdp2, StagedOffloadPolicy()) == 0
    assert there_at_inputs(theirs, theirs.CPUOffloadPolicy(pin_memory=False)) > 0


class _CallsForward(nn.Linear):
    def more(self, x: Tensor) -> Tensor:
        return self(x) + x @ self.weight


@ROWS("a registered forward method that calls `forward` of its own module, with `reshard_after_forward=True`")
def method_that_calls_forward(ctx: RankContext) -> None:
    def run(package: Any) -> Tensor:
        torch.manual_seed(0)
        layer = package.fully_shard(_CallsForward(16, 16), mesh=ctx.mesh_1d(), reshard_after_forward=True)
        package.register_fsdp_forward_method(layer, "more")
        output: Tensor = layer.more(batch(ctx))
        return output.detach()

    torch.manual_seed(0)
    expected = _CallsForward(16, 16).more(batch(ctx)).detach()
    close(run(fsdp2), expected)
    raises(RuntimeError, lambda: run(theirs))


class _SkipsOnRank0(MLP):
    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x) if index == 0 or dist.get_rank() > 0 else x
        return self.exit(self.entry(x))


@ROWS("`set_reduce_scatter_unused_params` where a rank's backward skips whole units")
def skipped_units(ctx: RankContext) -> None:
    def build() -> Any:
        torch.manual_seed(0)
        return _SkipsOnRank0(3)

    wrapped = wrap(fsdp2, ctx.mesh_1d(), build(), reshard_after_forward=False)
    wrapped.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    for block in wrapped.blocks:  # gathers are collective as well
        block.unshard()
    reference = build()
    for module in (wrapped, reference):
        backward(ctx, module)
    for name, found in gradients(wrapped).items():
        parameter = reference.get_parameter(name)
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(expected)
        close(found, expected / ctx.world_size)


@ROWS("`share_comm_ctx` and a last backward per stage")
def last_backward_per_stage(ctx: RankContext) -> None:
    def run(package: Any) -> list[Tensor]:
        stages: list[Any] = [wrap(package, ctx.mesh_1d()) for _ in range(2)]
        package.share_comm_ctx(stages)
        losses = [forward(ctx, stage) for stage in stages]
        for stage, loss in zip(reversed(stages), reversed(losses), strict=True):
            stage.set_is_last_backward(True)
            loss.backward()
        return losses

    assert len(run(fsdp2)) == 2
    raises(IndexError, lambda: run(theirs))


@ROWS("`set_reduce_scatter_max_input_buffers` after the first forward")
def reductions_in_flight(ctx: RankContext) -> None:
    def landed_before_the_last_block(num: int) -> int:
        wrapped: Any = wrap(fsdp2, ctx.mesh_1d(), model(5))
        backward(ctx, wrapped)
        wrapped.zero_grad()
        wrapped.set_reduce_scatter_max_input_buffers(num)
        landed = []

        class Watch(fsdp2.Observer):
            def on_event(self, event: str, unit: str) -> None:
                if (event, unit) == ("pre_backward", "blocks.0"):
                    landed.append(sum(block.up.weight.grad is not None for block in wrapped.blocks))

        with fsdp2.trace.observe(wrapped, Watch()):
            backward(ctx, wrapped)
        return landed[0]

    assert [landed_before_the_last_block(num) for num in (1, 3)] == [3, 1]


@ROWS("finalizing partial sums on HSDP (torch 2.15's `finalize_backward`)")
def finalized_partial_sums(ctx: RankContext) -> None:
    mesh = ctx.mesh_2d(2, 1)
    wrapped: Any = wrap(fsdp2, mesh)
    wrapped.set_manual_backward_finalization(True)
    wrapped.set_requires_all_reduce(False)
    backward(ctx, wrapped)
    wrapped.set_requires_all_reduce(True)
    wrapped.finalize_backward()
    plain = wrap(fsdp2, mesh)
    backward(ctx, plain)
    close(gradients(wrapped), gradients(plain))
