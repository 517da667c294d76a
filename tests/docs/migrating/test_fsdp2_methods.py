"""Every public method of torch's ``FSDPModule`` does here what the page says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from tests.docs.migrating.rows import (
    Rows,
    actions,
    backward,
    forward,
    gathers,
    gradients,
    raises,
    same,
    same_training,
    train,
    wrap,
)
from tests.docs.migrating.test_fsdp2_names import PlainAllGather
from tests.harness.distributed import RankContext
from tests.harness.models import MLP, Branches

METHODS = Rows("Methods of `FSDPModule`", omits_some=True)


@pytest.mark.parametrize("cell", METHODS)
def test_method(cell: str) -> None:
    METHODS.run(cell)


def test_every_row_is_tried() -> None:
    METHODS.check()


def _same_after(
    ctx: RankContext,
    configure: Callable[[Any], Any],
    *,
    step: Callable[[RankContext, nn.Module, int], Tensor] = backward,
    hybrid: bool = False,
    **options: Any,
) -> None:
    """Trains the same with both packages after ``configure(model)``."""
    mesh = ctx.mesh_2d(2, 1) if hybrid else ctx.mesh_1d()

    def configured(package: Any) -> MLP:
        wrapped = wrap(package, mesh, **options)
        configure(wrapped)
        return wrapped

    same_training(ctx, configured, step)


def _wrapped(ctx: RankContext, **options: Any) -> Any:
    """Ours, behind a first step."""
    wrapped = wrap(fsdp2, ctx.mesh_1d(), **options)
    backward(ctx, wrapped)
    return wrapped


@METHODS("`unshard(async_op)`")
def unshard(ctx: RankContext) -> None:
    def program(package: Any) -> Any:
        wrapped: Any = wrap(package, ctx.mesh_1d())
        assert wrapped.unshard() is None
        wrapped.blocks[0].unshard(async_op=True)  # the next forward waits
        loss = backward(ctx, wrapped)
        wrapped.blocks[0].unshard(async_op=True).wait()
        return loss, wrapped.blocks[0].up.weight.detach().clone()

    same(program)


@METHODS("`reshard()`")
def reshard(ctx: RankContext) -> None:
    def program(package: Any) -> Any:
        wrapped: Any = wrap(package, ctx.mesh_1d())
        wrapped.unshard()
        wrapped.reshard()
        return type(wrapped.entry.weight).__name__, wrapped.entry.weight.to_local().detach()

    same(program)


class _Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("once")


@METHODS("`reset_iter_state()`")
def reset_iter_state(ctx: RankContext) -> None:
    def program(package: Any) -> Any:
        wrapped: Any = wrap(package, ctx.mesh_1d())
        exit_ = wrapped.exit
        wrapped.exit = _Fails()
        raises(KeyError, lambda: forward(ctx, wrapped))
        wrapped.exit = exit_
        wrapped.reset_iter_state()
        return train(ctx, wrapped)

    same(program)


@METHODS("`set_is_last_backward(bool)`")
def set_is_last_backward(ctx: RankContext) -> None:
    def two_backwards(ctx: RankContext, module: Any, index: int) -> Tensor:
        losses = [forward(ctx, module, 10 * index + micro) for micro in range(2)]
        for micro, loss in enumerate(losses):
            module.set_is_last_backward(micro == 1)
            loss.backward()
        return torch.stack(losses).detach()

    _same_after(ctx, lambda module: None, step=two_backwards)


def accumulated(ctx: RankContext, module: Any, index: int) -> Tensor:
    """Two micro-batches, of which only the last communicates."""
    losses = []
    for micro in range(2):
        module.set_requires_gradient_sync(micro == 1)
        losses.append(backward(ctx, module, 10 * index + micro))
    return torch.stack(losses)


@METHODS("`set_requires_gradient_sync(bool, recurse)`")
def set_requires_gradient_sync(ctx: RankContext) -> None:
    _same_after(ctx, lambda module: None, step=accumulated)
    _same_after(ctx, lambda module: module.set_requires_gradient_sync(False, recurse=False))


@METHODS("`set_requires_all_reduce(bool, recurse)`")
def set_requires_all_reduce(ctx: RankContext) -> None:
    def reduced_at_last(ctx: RankContext, module: Any, index: int) -> Tensor:
        module.set_requires_all_reduce(False)
        backward(ctx, module, 10 * index)
        module.set_requires_all_reduce(True)
        return backward(ctx, module, 10 * index + 1)

    _same_after(ctx, lambda module: None, step=reduced_at_last, hybrid=True)


@METHODS("`set_reshard_after_forward(bool, recurse)`")
def set_reshard_after_forward(ctx: RankContext) -> None:
    _same_after(ctx, lambda module: module.set_reshard_after_forward(False))
    wrapped = _wrapped(ctx)
    wrapped.set_reshard_after_forward(False)
    assert gathers(wrapped, lambda: backward(ctx, wrapped)) == ["(root)", "blocks.0", "blocks.1"]
    raises(ValueError, lambda: wrapped.set_reshard_after_forward(2))


@METHODS("`set_reshard_after_backward(bool, recurse)`")
def set_reshard_after_backward(ctx: RankContext) -> None:
    def kept_between_micro_batches(ctx: RankContext, module: Any, index: int) -> Tensor:
        module.set_reshard_after_backward(False)
        backward(ctx, module, 10 * index)
        module.set_reshard_after_backward(True)
        return backward(ctx, module, 10 * index + 1)

    _same_after(ctx, lambda module: None, step=kept_between_micro_batches)
    wrapped = _wrapped(ctx)
    wrapped.set_reshard_after_backward(False)
    backward(ctx, wrapped)
    assert gathers(wrapped, lambda: forward(ctx, wrapped)) == []


def _prefetched_in(trace: list[str], unit: str) -> list[str]:
    """What is prefetched between the wait for ``unit`` and the next wait."""
    start = trace.index(f"wait {unit}") + 1
    end = next(index for index, action in enumerate(trace[start:], start) if not action.startswith("prefetch"))
    return [action.removeprefix("prefetch ") for action in trace[start:end]]


@METHODS("`set_modules_to_forward_prefetch(modules)`")
def set_modules_to_forward_prefetch(ctx: RankContext) -> None:
    def both(module: Any) -> None:
        module.set_modules_to_forward_prefetch([*module.blocks])

    _same_after(ctx, both)
    wrapped = _wrapped(ctx)
    both(wrapped)
    found = actions(wrapped, lambda: forward(ctx, wrapped))
    assert _prefetched_in(found, "(root)") == ["blocks.0", "blocks.1"]


@METHODS("`set_modules_to_backward_prefetch(modules)`")
def set_modules_to_backward_prefetch(ctx: RankContext) -> None:
    def nothing(module: Any) -> None:
        module.set_modules_to_backward_prefetch([])
        module.blocks[1].set_modules_to_backward_prefetch([module.blocks[0]])

    _same_after(ctx, nothing)
    wrapped = _wrapped(ctx)
    loss = forward(ctx, wrapped)
    wrapped.blocks[1].set_modules_to_backward_prefetch([wrapped.blocks[0]])
    assert _prefetched_in(actions(wrapped, loss.backward), "blocks.1") == ["blocks.0"]


class _ReduceScatter:
    """The collective itself, and what it was asked for; by torch's interface."""

    def __init__(self) -> None:
        self.ops: set[Any] = set()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self.ops.add(op)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


@METHODS("`set_custom_all_gather(comm)`")
def set_custom_all_gather(ctx: RankContext) -> None:
    def program(package: Any) -> Any:
        wrapped: Any = wrap(package, ctx.mesh_1d())
        comm = PlainAllGather()
        wrapped.blocks[0].set_custom_all_gather(comm)
        backward(ctx, wrapped)
        return comm.num_calls, train(ctx, wrapped)

    assert same(program)[0] == 2


@METHODS("`set_custom_reduce_scatter(comm)`")
def set_custom_reduce_scatter(ctx: RankContext) -> None:
    ops: dict[str, set[Any]] = {}

    def program(package: Any) -> Any:
        wrapped: Any = wrap(package, ctx.mesh_1d())
        comm = _ReduceScatter()
        ops[package.__name__] = comm.ops
        wrapped.blocks[0].set_custom_reduce_scatter(comm)
        return train(ctx, wrapped)

    same(program)
    assert {str(op) for op in ops["fsdp2"]} == {str(dist.ReduceOp.SUM)}


@METHODS("`set_all_reduce_hook(hook, stream)`")
def set_all_reduce_hook(ctx: RankContext) -> None:
    def clamp(reduced: Tensor) -> None:
        reduced.clamp_(-(2**-10), 2**-10)

    def on_every_unit(module: Any) -> None:
        for unit in (module, *module.blocks):
            unit.set_all_reduce_hook(clamp)

    _same_after(ctx, on_every_unit)
    hooked: Any = wrap(fsdp2, ctx.mesh_1d())
    on_every_unit(hooked)
    backward(ctx, hooked)
    assert max(gradient.abs().max().item() for gradient in gradients(hooked).values() if gradient is not None) <= 2**-10


@METHODS("`set_post_optim_event(event)`")
def set_post_optim_event(ctx: RankContext) -> None:
    def with_event(ctx: RankContext, module: Any, index: int) -> Tensor:
        if index == 1:
            module.set_post_optim_event(torch.cpu.current_stream().record_event())
        return backward(ctx, module, index)

    _same_after(ctx, lambda module: None, step=with_event)


def _sums_on_gloo(unit: Any) -> None:
    """torch divides inside the collective, which gloo cannot, unless it is told to sum."""
    if isinstance(unit, torch.distributed.fsdp.FSDPModule):
        unit.set_force_sum_reduction_for_comms(True)


@METHODS("`set_gradient_divide_factor(factor)`")
def set_gradient_divide_factor(ctx: RankContext) -> None:
    def by_8(module: Any) -> None:
        _sums_on_gloo(module.blocks[0])
        module.blocks[0].set_gradient_divide_factor(8.0)

    _same_after(ctx, by_8)


@METHODS("`set_reduce_scatter_divide_factor(factor)`")
def set_reduce_scatter_divide_factor(ctx: RankContext) -> None:
    def deprecated(module: Any) -> None:
        _sums_on_gloo(module.blocks[0])
        with pytest.deprecated_call():
            module.blocks[0].set_reduce_scatter_divide_factor(8.0)

    _same_after(ctx, deprecated)


@METHODS("`set_force_sum_reduction_for_comms(bool)`")
def set_force_sum_reduction_for_comms(ctx: RankContext) -> None:
    _same_after(ctx, lambda module: module.set_force_sum_reduction_for_comms(True))


class _Sometimes(Branches):
    """Rank 0 skips the last block."""

    def forward(self, x: Tensor, active: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        return super().forward(x, active[: 2 + dist.get_rank()])


@METHODS("`set_reduce_scatter_unused_params(bool, recurse)`")
def set_reduce_scatter_unused_params(ctx: RankContext) -> None:
    torch.manual_seed(0)
    wrapped: Any = wrap(fsdp2, ctx.mesh_1d(), _Sometimes(3), reshard_after_forward=False)
    wrapped.set_reduce_scatter_unused_params(True)
    for block in wrapped.blocks:  # gathers are collective as well
        block.unshard()
    backward(ctx, wrapped)
    torch.manual_seed(0)
    reference = _Sometimes(3)
    backward(ctx, reference)
    for name, gradient in gradients(wrapped).items():
        expected = reference.get_parameter(name).grad
        expected = torch.zeros_like(reference.get_parameter(name)) if expected is None else expected
        dist.all_reduce(expected)
        torch.testing.assert_close(gradient, expected / ctx.world_size)

    def on(module: Any) -> None:
        module.set_reduce_scatter_unused_params(True)

    _same_after(ctx, on)


@METHODS("`set_reduce_scatter_max_input_buffers(int, recurse)`")
def set_reduce_scatter_max_input_buffers(ctx: RankContext) -> None:
    _same_after(ctx, lambda module: module.set_reduce_scatter_max_input_buffers(3))
    for package in (fsdp2, torch.distributed.fsdp):
        wrapped: Any = wrap(package, ctx.mesh_1d())
        raises(ValueError, lambda wrapped=wrapped: wrapped.set_reduce_scatter_max_input_buffers(0))
        raises(TypeError, lambda wrapped=wrapped: wrapped.set_reduce_scatter_max_input_buffers(True))


@METHODS("`set_separate_reduce_scatter_group(bool, recurse)`")
def set_separate_reduce_scatter_group(ctx: RankContext) -> None:
    _same_after(ctx, lambda module: module.set_separate_reduce_scatter_group())


@METHODS("`set_unshard_in_backward(bool)`")
def set_unshard_in_backward(ctx: RankContext) -> None:
    def build(package: Any) -> Any:
        torch.manual_seed(0)
        whole = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 4))
        package.fully_shard(whole[0], mesh=ctx.mesh_1d())
        package.fully_shard(whole, mesh=ctx.mesh_1d())
        whole[0].set_unshard_in_backward(False)
        return whole

    tokens = torch.arange(4) + ctx.rank

    def program(package: Any) -> Any:
        whole = build(package)
        whole(tokens).square().mean().backward()
        return gradients(whole)

    same(program)
    whole = build(fsdp2)
    loss = whole(tokens).square().mean()
    assert "0" not in gathers(whole, loss.backward)


@METHODS("`set_allocate_memory_from_process_group_for_comm(bool)`")
def set_allocate_memory_from_process_group_for_comm(ctx: RankContext) -> None:
    """gloo has no allocator of its own: both take ordinary memory."""
    wrapped: Any = wrap(fsdp2, ctx.mesh_1d())
    wrapped.set_allocate_memory_from_process_group_for_comm(True)
    plain = wrap(fsdp2, ctx.mesh_1d())
    torch.testing.assert_close(train(ctx, wrapped), train(ctx, plain), rtol=0, atol=0)
    plain.set_custom_all_gather(PlainAllGather())
    raises(ValueError, lambda: plain.set_allocate_memory_from_process_group_for_comm(True))


@METHODS("`set_symm_mem_for_comm(backend)`")
def set_symm_mem_for_comm(ctx: RankContext) -> None:
    """Without CUDA, there is none."""
    wrapped: Any = wrap(fsdp2, ctx.mesh_1d())
    raises(ValueError, lambda: wrapped.set_symm_mem_for_comm("NVSHMEM"))
    assert "CUDA" in str(raises(ValueError, wrapped.set_symm_mem_for_comm))


@METHODS("`_set_unshard_async_op(bool)`")
def set_unshard_async_op(ctx: RankContext) -> None:
    _same_after(ctx, lambda module: module._set_unshard_async_op(True))
