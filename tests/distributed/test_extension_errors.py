"""What goes wrong in all-gather hooks: each error as text, on every rank, and that the model works once it is mended.

One weight of ``Stack`` is ``Faulty``. Its hooks are right, but for a block in which one of them is replaced by a fault,
on all ranks or on one; leaving the block mends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2 import fully_shard
from fsdp2.nested import map_tensors
from tests.distributed.support import Stack, same_on_all_ranks, seeded, step
from tests.harness.distributed import RankContext
from tests.harness.extensions import Travelling
from tests.harness.messages import error_of
from tests.harness.pool import shared_pool

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
def _fault(hook: str, fault: object) -> Iterator[None]:
    """``Faulty`` has ``fault`` in the place of ``hook`` in this block."""
    right = getattr(Faulty, hook)
    setattr(Faulty, hook, fault)
    yield
    setattr(Faulty, hook, right)


def _stack(make: Callable[[Tensor], Tensor]) -> Any:
    model = seeded(Stack)
    linear = model.blocks[1].linear
    linear.weight = nn.Parameter(make(linear.weight.detach()))
    return model


def _sharded(model: Any, mesh: DeviceMesh) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _assert_trains_like_a_plain_one(model: Any) -> None:
    """Two steps, so that the second one goes through ``out``."""
    for _ in range(2):
        reference = seeded(Stack)
        model.zero_grad()
        assert torch.allclose(step(model), step(reference), atol=1e-6)
        for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert isinstance(parameter, DTensor), name
            assert parameter.grad is not None, name
            assert expected.grad is not None
            assert torch.allclose(parameter.grad.full_tensor(), expected.grad, atol=1e-6), name


def _refused(
    ctx: RankContext, hook: str, fault: object, on_rank: int | None = None, after: int = 0, replicas: int = 1
) -> str:
    """The error of a step with a fault, which comes ``after`` so many steps without."""
    mesh = ctx.mesh_1d() if replicas == 1 else ctx.mesh_2d(replicas, ctx.world_size // replicas)
    model = _sharded(_stack(Faulty), mesh)
    for _ in range(after):
        step(model)
    with _fault(hook, fault if on_rank in (None, ctx.rank) else getattr(Faulty, hook)):
        error = error_of(lambda: step(model))
    model.reset_iter_state()
    _assert_trains_like_a_plain_one(model)
    return error


def _error(hook: str, fault: object, **kwargs: Any) -> str:
    """What all ranks raise alike."""
    return same_on_all_ranks(_refused, hook=hook, fault=fault, **kwargs)


def _error_of_one(rank: int, hook: str, fault: object, world_size: int = 2, **kwargs: Any) -> str:
    """What ``rank`` raises; all others raise the same, and say where it happened."""
    errors = shared_pool(world_size).run(_refused, hook=hook, fault=fault, on_rank=rank, **kwargs)
    mine = errors.pop(rank)
    expected = f"ExtensionError: on rank {rank}: {mine.removeprefix('ExtensionError: ')}"
    for error in errors:
        assert error.split() == expected.split()
    return mine


# The pre-hook


def _returns_a_list(self: Faulty, mesh: DeviceMesh) -> Any:
    return [self.plain], None


def test_payload_in_a_list() -> None:
    assert_expected_inline(
        _error(PRE, _returns_a_list),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather returned a list of 1
with its metadata, expected a tuple of tensors.""",
    )


def _returns_no_pair(self: Faulty, mesh: DeviceMesh) -> Any:
    return self.plain


def test_payload_without_metadata() -> None:
    assert_expected_inline(
        _error(PRE, _returns_no_pair),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather returned a Tensor of
shape (16, 32), expected (tuple of tensors, metadata).""",
    )


def _returns_a_number(self: Faulty, mesh: DeviceMesh) -> Any:
    return (self.plain, 3), None


def test_payload_with_a_number() -> None:
    assert_expected_inline(
        _error(PRE, _returns_a_number),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather returned a int to be
gathered, expected plain tensors.""",
    )


def _returns_itself(self: Faulty, mesh: DeviceMesh) -> Any:
    return (self,), None


def test_payload_of_the_subclass_itself() -> None:
    assert_expected_inline(
        _error(PRE, _returns_itself),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather returned a Faulty of
shape (16, 32) to be gathered, expected plain tensors.""",
    )


def _returns_a_meta_tensor(self: Faulty, mesh: DeviceMesh) -> Any:
    return (self.plain.to("meta"),), None


def test_payload_on_another_device() -> None:
    assert_expected_inline(
        _error(PRE, _returns_a_meta_tensor),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather returned a tensor on
meta, expected cpu.""",
    )


def _returns_every_other_column(self: Faulty, mesh: DeviceMesh) -> Any:
    return (self.plain[:, ::2],), None


def test_payload_that_is_not_contiguous() -> None:
    assert_expected_inline(
        _error(PRE, _returns_every_other_column),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather returned a Tensor of
shape (16, 16) with strides (32, 2), expected contiguous tensors: call .contiguous().""",
    )


def _pre_raises(self: Faulty, mesh: DeviceMesh) -> Any:
    raise ValueError("this shard is not to my liking")


def test_pre_hook_that_raises() -> None:
    assert_expected_inline(
        _error(PRE, _pre_raises),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather raised ValueError:
this shard is not to my liking.""",
    )


def test_pre_hook_that_raises_on_one_rank() -> None:
    assert_expected_inline(
        _error_of_one(1, PRE, _pre_raises),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather raised ValueError:
this shard is not to my liking.""",
    )


def test_pre_hook_that_raises_on_one_replica() -> None:
    assert_expected_inline(
        _error_of_one(3, PRE, _pre_raises, world_size=4, replicas=2),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather raised ValueError:
this shard is not to my liking.""",
    )


def _returns_two(self: Faulty, mesh: DeviceMesh) -> Any:
    return (self.plain, self.plain), None


def test_more_tensors_on_one_rank() -> None:
    assert_expected_inline(
        _error(PRE, _returns_two, on_rank=1),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather returned tensors of
(torch.float32,) on the first rank, but of (torch.float32, torch.float32) on rank 1 of the shard
axis: all must send the same.""",
    )


def _returns_halves(self: Faulty, mesh: DeviceMesh) -> Any:
    return (self.plain.half(),), None


def test_another_dtype_on_one_rank() -> None:
    assert_expected_inline(
        _error(PRE, _returns_halves, on_rank=2, world_size=4),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather returned tensors of
(torch.float32,) on the first rank, but of (torch.float16,) on rank 2 of the shard axis: all must
send the same.""",
    )


def _returns_fewer_columns(self: Faulty, mesh: DeviceMesh) -> Any:
    return (self.plain[:, 1:].contiguous(),), None


def test_shape_on_one_rank_that_does_not_fit() -> None:
    assert_expected_inline(
        _error(PRE, _returns_fewer_columns, on_rank=2, world_size=4),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather returned tensors that
do not fit together on the ranks: shapes [(8, 31), (8, 32)] differ in more than dim 0.""",
    )


def test_other_payload_on_one_replica() -> None:
    assert_expected_inline(
        _error(PRE, _returns_halves, on_rank=3, world_size=4, replicas=2),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': the pre-hook returned torch.float32 (16, 32) on
one replica and torch.float16 (16, 32) on another, expected the same: replicas hold the same shards.""",
    )


def _wants_a_rank(self: Faulty, mesh: DeviceMesh, rank: int) -> Any:
    raise NotImplementedError


def test_pre_hook_with_another_signature() -> None:
    assert_expected_inline(
        _error(PRE, _wants_a_rank),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather has the signature
(mesh: 'DeviceMesh', rank: 'int') -> 'Any', expected (self, mesh) or (self, mesh, outer_size,
outer_stride, module, mp_policy).""",
    )


def test_missing_pre_hook() -> None:
    assert_expected_inline(
        _error(PRE, None),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather is not defined: it
defines fsdp_post_all_gather only. Define both hooks, or list it in ignored_params.""",
    )


def test_payload_that_changes_in_a_later_step() -> None:
    assert_expected_inline(
        _error(LATER_PRE, _returns_fewer_columns, after=2),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather returned (float32
(16, 31)), but (float32 (16, 32)) when its group was first gathered: shapes and dtypes must stay,
because the plan is made once.""",
    )


# The post-hook


def test_missing_post_hook() -> None:
    assert_expected_inline(
        _error(POST, None),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_post_all_gather is not defined: it
defines fsdp_pre_all_gather only. Define both hooks, or list it in ignored_params.""",
    )


def _post_raises(self: Faulty, outputs: Outputs, metadata: None, param_dtype: torch.dtype, *, out: Any = None) -> Any:
    raise ValueError("this tensor is not to my liking")


def test_post_hook_that_raises() -> None:
    assert_expected_inline(
        _error(POST, _post_raises),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_post_all_gather raised ValueError:
this tensor is not to my liking.""",
    )


def test_post_hook_that_raises_on_one_rank() -> None:
    assert_expected_inline(
        _error_of_one(1, POST, _post_raises),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_post_all_gather raised ValueError:
this tensor is not to my liking.""",
    )


def test_post_hook_that_raises_on_one_replica() -> None:
    assert_expected_inline(
        _error_of_one(2, POST, _post_raises, world_size=4, replicas=2),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_post_all_gather raised ValueError:
this tensor is not to my liking.""",
    )


def test_post_hook_that_raises_in_a_later_step() -> None:
    assert_expected_inline(
        _error(LATER_POST, _post_raises, after=1),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_post_all_gather (with out) raised
ValueError: this tensor is not to my liking.""",
    )


def _makes_one_tensor(self: Faulty, outputs: Outputs, metadata: None, param_dtype: Any, *, out: Any = None) -> Any:
    return outputs[0].clone()


def test_post_hook_that_returns_one_tensor() -> None:
    assert_expected_inline(
        _error(POST, _makes_one_tensor),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_post_all_gather returned a Tensor of
shape (32, 32), expected (unsharded tensor, tuple of inner tensors to free).""",
    )


def _makes_one_row(self: Faulty, outputs: Outputs, metadata: None, param_dtype: Any, *, out: Any = None) -> Any:
    made = outputs[0][:1].clone()
    return made, (made,)


def test_post_hook_that_returns_too_few_rows() -> None:
    assert_expected_inline(
        _error(POST, _makes_one_row),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_post_all_gather returned a Tensor of
shape (1, 32) with strides (32, 1), expected contiguous (32, 32), or more rows.""",
    )


def _makes_a_new_one(self: Faulty, outputs: Outputs, metadata: None, param_dtype: Any, *, out: Any = None) -> Any:
    made = outputs[0].clone()
    return made, (made,)


def test_post_hook_that_returns_a_new_object_for_out() -> None:
    assert_expected_inline(
        _error(POST, _makes_a_new_one),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_post_all_gather returned a tuple of
2 although out was given, expected None: fill out in place, because autograd has saved it.""",
    )


def test_post_hook_that_returns_a_new_object_for_out_in_a_later_step() -> None:
    assert_expected_inline(
        _error(LATER_POST, _makes_a_new_one, after=1),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_post_all_gather returned a tuple of
2 although out was given, expected None: fill out in place, because autograd has saved it.""",
    )


def _puts_other_memory_under_out(
    self: Faulty, outputs: Outputs, metadata: None, param_dtype: Any, *, out: Any = None
) -> Any:
    made = outputs[0].clone()
    if out is None:
        return made, (made,)
    out.data = made
    return None


def test_post_hook_that_puts_other_memory_under_out() -> None:
    assert_expected_inline(
        _error(POST, _puts_other_memory_under_out),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_post_all_gather put other memory
under out: write the tensors that it has, because autograd has saved them.""",
    )


def _frees_the_shard(self: Faulty, outputs: Outputs, metadata: None, param_dtype: Any, *, out: Any = None) -> Any:
    made = Right.fsdp_post_all_gather(self, outputs, metadata, param_dtype, out=out)
    return None if out is not None else (made[0], (made[0], self))


def test_shard_listed_to_be_freed() -> None:
    assert_expected_inline(
        _error(POST, _frees_the_shard),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_post_all_gather lists memory of the
shard itself to be freed: make a tensor of its own.""",
    )


def _makes_integers(self: Faulty, outputs: Outputs, metadata: None, param_dtype: Any, *, out: Any = None) -> Any:
    made = outputs[0].int()
    return made, (made,)


def test_integers_of_a_trainable_parameter() -> None:
    assert_expected_inline(
        _error(POST, _makes_integers),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_post_all_gather made a tensor of
torch.int32 of a trainable parameter.""",
    )


def _answers_one(self: Faulty) -> Any:
    return 1


def test_answer_that_is_no_bool() -> None:
    assert_expected_inline(
        _error(RELEASE, _answers_one),
        """\
ExtensionError: parameter 'blocks.1.linear.weight':
Faulty.fsdp_should_release_all_gather_outputs_after_post_all_gather returned a int, expected a bool.""",
    )


# Gradients


class Spreading(Travelling):
    """Whatever is computed with it becomes one of it; it takes no plain results apart."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        result = super().__torch_dispatch__(func, types, args, kwargs)
        return map_tensors(lambda tensor: tensor if isinstance(tensor, Travelling) else cls(tensor), result)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["itself"], None

    @property
    def itself(self) -> Tensor:
        return self.plain

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Spreading:
        return cls(inner["itself"])


def _spreads(self: Faulty, outputs: Outputs, metadata: None, param_dtype: Any, *, out: Any = None) -> Any:
    made = Right.fsdp_post_all_gather(self, outputs, metadata, param_dtype, out=None if out is None else out.plain)
    return None if out is not None else (Spreading(made[0]), made[1])


def _gradient_refused(ctx: RankContext) -> str:
    with _fault(POST, _spreads):
        model = _sharded(_stack(Faulty), ctx.mesh_1d())
        error = error_of(lambda: step(model))
    _assert_trains_like_a_plain_one(_sharded(_stack(Faulty), ctx.mesh_1d()))  # what was unsharded cannot be mended
    return error


def test_gradient_that_nothing_says_how_to_reduce() -> None:
    assert_expected_inline(
        same_on_all_ranks(_gradient_refused),
        """\
ExtensionError: parameter 'blocks.2.linear.weight': its gradient is a Spreading, expected a plain
tensor. A gradient may be of a subclass only if the unsharded parameter is a wrapper of the same
class, whose inner tensors all have its shape and dtype. Let the subclass compute plain gradients,
or take its activations apart.""",
    )


# fully_shard


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
    _assert_trains_like_a_plain_one(_sharded(model, ctx.mesh_1d()))
    return error


def test_class_that_is_lost_when_it_is_cut() -> None:
    assert_expected_inline(
        same_on_all_ranks(_refused_by_fully_shard, cls=LosesItsClass),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': new_zeros(16, 32) of a LosesItsClass returned a
Tensor of shape (16, 32); sharding would lose the class. Let its __torch_dispatch__ keep it.""",
    )


def test_class_that_cannot_be_cut() -> None:
    assert_expected_inline(
        same_on_all_ranks(_refused_by_fully_shard, cls=CannotBeCut),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': cutting a CannotBeCut into shards raised
NotImplementedError: this class has no split
Let its __torch_dispatch__ support new_zeros, split and copy_.""",
    )


def test_hooks_of_a_parameter_class() -> None:
    assert_expected_inline(
        same_on_all_ranks(_refused_by_fully_shard, cls=HookedParameter),
        """\
ExtensionError: fully_shard: parameter 'blocks.1.linear.weight' is a HookedParameter with all-gather
hooks, but its data is a Tensor without, and it is the data that is sharded: the hooks would be
ignored. Make them methods of the tensor that nn.Parameter wraps.""",
    )


class WithoutHooks(Right):
    fsdp_pre_all_gather = fsdp_post_all_gather = property()  # type: ignore[assignment]


def _without_hooks(ctx: RankContext) -> str:
    model = _sharded(_stack(WithoutHooks), ctx.mesh_1d())
    error = error_of(lambda: step(model))
    model.reset_iter_state()
    model.blocks[1].linear.weight._local_tensor.__class__ = Right
    _assert_trains_like_a_plain_one(model)
    return error


def test_subclass_without_hooks() -> None:
    assert_expected_inline(
        same_on_all_ranks(_without_hooks),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': WithoutHooks.fsdp_pre_all_gather is not defined:
sharding would lose what it adds. Define both hooks, or list it in ignored_params.""",
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
DTensor keeps no such class: sharding would lose it and ignore its hooks. Make it a wrapper
subclass, or the parameter a plain tensor.""",
    )


def _fails_on_one_rank_when_bound_again(ctx: RankContext) -> str:
    """The other rank sends what it sent before, and asks nobody: the failing one must not wait for it."""
    model = _sharded(_stack(Faulty), ctx.mesh_1d())
    step(model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    if ctx.rank == 0:
        return ""
    with _fault(LATER_PRE, lambda self, mesh: []):
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
        _error(LATER_POST, _decodes_in_place),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_post_all_gather wrote
all_gather_outputs: they are read again, so make a tensor of its own.""",
    )


class AliasesWhatItReleases(Right):
    def fsdp_post_all_gather(
        self, all_gather_outputs: Outputs, metadata: None, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        return (all_gather_outputs[0], ()) if out is None else None


def _released_and_aliased(ctx: RankContext) -> str:
    return error_of(lambda: step(_sharded(_stack(AliasesWhatItReleases), ctx.mesh_1d())))


def test_tensor_on_outputs_that_are_released() -> None:
    assert_expected_inline(
        same_on_all_ranks(_released_and_aliased),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': AliasesWhatItReleases.fsdp_post_all_gather made
a tensor on the memory of all_gather_outputs, which the class says may be freed.""",
    )
