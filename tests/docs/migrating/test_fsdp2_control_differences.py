"""What the page says differs in control of steps and communication does differ, on both sides unless torch hangs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import Tensor, nn

import fsdp2
from fsdp2.comm.offload import StagedOffloadPolicy
from tests.docs.migrating.rows import Rows, backward, batch, close, forward, gradients, model, raises, wrap
from tests.harness.distributed import RankContext
from tests.harness.models import MLP

ROWS = Rows("What differs in control of steps and communication", omits_some=True)
BOTH = (fsdp2, theirs)


@pytest.mark.parametrize("cell", ROWS)
def test_row(cell: str) -> None:
    ROWS.run(cell)


def test_every_row_is_tried() -> None:
    ROWS.check()


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
    wrapped.set_reduce_scatter_unused_params(True)
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
