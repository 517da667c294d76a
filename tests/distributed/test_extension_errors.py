"""Subclasses that ``fully_shard`` refuses, and hooks that fail when they are bound again or lie about memory."""

from __future__ import annotations

from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2 import fully_shard
from tests.distributed.faulty import (
    LATER_POST,
    LATER_PRE,
    Faulty,
    Outputs,
    Right,
    assert_trains_like_a_plain_one,
    error_on_all,
    fault_in,
    sharded,
    stack_of,
)
from tests.distributed.support import Stack, same_on_all_ranks, seeded, step
from tests.harness.distributed import RankContext
from tests.harness.messages import error_of
from tests.harness.pool import shared_pool


class LosesItsClass(Right):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        result = super().__torch_dispatch__(func, types, args, kwargs)
        return result.plain if func is torch.ops.aten.new_zeros.default else result


class CannotBeCut(Right):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.split.Tensor:
            raise NotImplementedError("this class has no split")
        return super().__torch_dispatch__(func, types, args, kwargs)


class HookedParameter(nn.Parameter):
    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:
        raise NotImplementedError

    def fsdp_post_all_gather(self, *args: Any, out: Any = None) -> Any:
        raise NotImplementedError


def _refused_by_fully_shard(ctx: RankContext, cls: type) -> str:
    """Nothing has changed then: the same parameters are bound, and with a plain one in its place the model works."""
    model = seeded(Stack)
    linear = model.blocks[1].linear
    weight = linear.weight
    linear.weight = cls(weight.detach()) if issubclass(cls, nn.Parameter) else nn.Parameter(cls(weight.detach()))
    before = list(model.parameters())
    error = error_of(lambda: fully_shard(model, mesh=ctx.mesh_1d()))
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert type(model) is Stack
    linear.weight = weight
    assert_trains_like_a_plain_one(sharded(model, ctx.mesh_1d()))
    return error


def test_class_that_is_lost_when_it_is_cut() -> None:
    assert_expected_inline(
        same_on_all_ranks(_refused_by_fully_shard, cls=LosesItsClass),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': new_zeros(16, 32) of a LosesItsClass returned a
Tensor of shape (16, 32). Sharding would lose the class. Let LosesItsClass.__torch_dispatch__ keep
the class.""",
    )


def test_class_that_cannot_be_cut() -> None:
    assert_expected_inline(
        same_on_all_ranks(_refused_by_fully_shard, cls=CannotBeCut),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': cutting a CannotBeCut into shards raised
NotImplementedError: this class has no split
Let CannotBeCut.__torch_dispatch__ support new_zeros, split and copy_.""",
    )


def test_hooks_of_a_parameter_class() -> None:
    assert_expected_inline(
        same_on_all_ranks(_refused_by_fully_shard, cls=HookedParameter),
        """\
ExtensionError: fully_shard: parameter 'blocks.1.linear.weight' is a HookedParameter with all-gather
hooks, but its data is a Tensor without hooks. fully_shard shards the data and would ignore the
hooks. Define the hooks on the tensor that nn.Parameter wraps.""",
    )


class WithoutHooks(Right):
    fsdp_pre_all_gather = fsdp_post_all_gather = property()  # type: ignore[assignment]


def _without_hooks(ctx: RankContext) -> str:
    model = sharded(stack_of(WithoutHooks), ctx.mesh_1d())
    error = error_of(lambda: step(model))
    model.reset_iter_state()
    model.blocks[1].linear.weight._local_tensor.__class__ = Right
    assert_trains_like_a_plain_one(model)
    return error


def test_subclass_without_hooks() -> None:
    assert_expected_inline(
        same_on_all_ranks(_without_hooks),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': WithoutHooks.fsdp_pre_all_gather is not defined:
sharding would lose what the class adds. Define both hooks, or list the parameter in ignored_params.""",
    )


class PythonOnly(Tensor):
    """Hooks, and nothing that would keep the class inside a DTensor."""

    def __new__(cls, data: Tensor) -> PythonOnly:
        return data.as_subclass(cls)

    fsdp_pre_all_gather = Right.fsdp_pre_all_gather
    fsdp_post_all_gather = Right.fsdp_post_all_gather


def test_class_that_dtensors_do_not_keep() -> None:
    assert_expected_inline(
        same_on_all_ranks(_refused_by_fully_shard, cls=PythonOnly),
        """\
ExtensionError: parameter 'blocks.1.linear.weight' is a PythonOnly without __torch_dispatch__. A
DTensor would lose this class and ignore its hooks. Make PythonOnly a wrapper subclass, or make the
parameter a plain tensor.""",
    )


def _fails_on_one_rank_when_bound_again(ctx: RankContext) -> str:
    """The other rank sends what it sent before, and asks nobody: the failing one must not wait for it."""
    model = sharded(stack_of(Faulty), ctx.mesh_1d())
    step(model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    if ctx.rank == 0:
        return ""
    with fault_in(LATER_PRE, lambda self, mesh: []):
        return error_of(lambda: model.blocks[1].unshard())


def test_failure_on_one_rank_when_hooks_are_bound_again() -> None:
    _, error = shared_pool(2).run(_fails_on_one_rank_when_bound_again)
    assert_expected_inline(
        error,
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather returned a list of 0,
expected (tuple of tensors, metadata).""",
    )


def _decodes_in_place(
    self: Faulty, outputs: Outputs, metadata: None, param_dtype: torch.dtype, *, out: Any = None
) -> Any:
    return outputs[0].mul_(1.0), ()


def test_post_hook_that_writes_its_outputs() -> None:
    assert_expected_inline(
        error_on_all(LATER_POST, _decodes_in_place),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_post_all_gather wrote into
all_gather_outputs, but the outputs are read again. Make a new tensor instead.""",
    )


class AliasesWhatItReleases(Right):
    def fsdp_post_all_gather(
        self, all_gather_outputs: Outputs, metadata: None, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        return (all_gather_outputs[0], ()) if out is None else None


def _released_and_aliased(ctx: RankContext) -> str:
    return error_of(lambda: step(sharded(stack_of(AliasesWhatItReleases), ctx.mesh_1d())))


def test_tensor_on_outputs_that_are_released() -> None:
    assert_expected_inline(
        same_on_all_ranks(_released_and_aliased),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': AliasesWhatItReleases.fsdp_post_all_gather made
a tensor on the memory of all_gather_outputs, but
fsdp_should_release_all_gather_outputs_after_post_all_gather returned True, so this memory may be
freed. Copy the outputs, or return False from
fsdp_should_release_all_gather_outputs_after_post_all_gather.""",
    )
