"""What goes wrong in post-hooks and in the gradients of what they make: each error as text, on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fsdp2.plan.trees import map_tensors
from tests.distributed.faulty import (
    LATER_POST,
    POST,
    RELEASE,
    Faulty,
    Outputs,
    Right,
    assert_trains_like_a_plain_one,
    error_of_one,
    error_on_all,
    fault_in,
    sharded,
    stack_of,
)
from tests.distributed.support import same_on_all_ranks, step
from tests.harness.distributed import RankContext, distributed
from tests.harness.extensions import Travelling
from tests.harness.messages import error_of


def test_missing_post_hook() -> None:
    assert_expected_inline(
        error_on_all(POST, None),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_post_all_gather is not defined: the
class defines only fsdp_pre_all_gather. Define both hooks, or list the parameter in ignored_params.""",
    )


def _post_raises(self: Faulty, outputs: Outputs, metadata: None, param_dtype: torch.dtype, *, out: Any = None) -> Any:
    raise ValueError("this tensor is not to my liking")


def test_post_hook_that_raises() -> None:
    assert_expected_inline(
        error_on_all(POST, _post_raises),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_post_all_gather raised ValueError:
this tensor is not to my liking.""",
    )


def test_post_hook_that_raises_on_one_rank() -> None:
    assert_expected_inline(
        error_of_one(1, POST, _post_raises),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_post_all_gather raised ValueError:
this tensor is not to my liking.""",
    )


def test_post_hook_that_raises_on_one_replica() -> None:
    assert_expected_inline(
        error_of_one(2, POST, _post_raises, world_size=4, replicas=2),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_post_all_gather raised ValueError:
this tensor is not to my liking.""",
    )


def test_post_hook_that_raises_in_a_later_step() -> None:
    assert_expected_inline(
        error_on_all(LATER_POST, _post_raises, after=1),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_post_all_gather (with out) raised
ValueError: this tensor is not to my liking.""",
    )


def _makes_one_tensor(self: Faulty, outputs: Outputs, metadata: None, param_dtype: Any, *, out: Any = None) -> Any:
    return outputs[0].clone()


def test_post_hook_that_returns_one_tensor() -> None:
    assert_expected_inline(
        error_on_all(POST, _makes_one_tensor),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_post_all_gather returned a Tensor of
shape (32, 32), expected (unsharded tensor, tuple of inner tensors to free).""",
    )


def _makes_one_row(self: Faulty, outputs: Outputs, metadata: None, param_dtype: Any, *, out: Any = None) -> Any:
    made = outputs[0][:1].clone()
    return made, (made,)


def test_post_hook_that_returns_too_few_rows() -> None:
    assert_expected_inline(
        error_on_all(POST, _makes_one_row),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_post_all_gather returned a Tensor of
shape (1, 32) with strides (32, 1), expected a contiguous tensor of shape (32, 32), or with more
rows.""",
    )


def _makes_a_new_one(self: Faulty, outputs: Outputs, metadata: None, param_dtype: Any, *, out: Any = None) -> Any:
    made = outputs[0].clone()
    return made, (made,)


@distributed(2)
def test_post_hook_that_returns_a_new_object_for_out_is_warned_of_once(ctx: RankContext) -> None:
    """As in torch, the result is ignored."""

    def also_fills_out(self: Faulty, outputs: Outputs, metadata: None, param_dtype: Any, *, out: Any = None) -> Any:
        if out is not None:
            out.copy_(outputs[0])
        return _makes_a_new_one(self, outputs, metadata, param_dtype)

    model = sharded(stack_of(Faulty), ctx.mesh_1d())
    with fault_in(LATER_POST, also_fills_out), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_trains_like_a_plain_one(model)
    (warning,) = caught
    assert str(warning.message) == (
        "parameter 'blocks.1.linear.weight': Faulty.fsdp_post_all_gather returned a tuple of 2 in new memory although "
        "out was given. fsdp2 ignores this result. Fill out in place, because autograd has saved out."
    )


@distributed(2)
def test_post_hook_that_returns_aliases_of_the_outputs_whatever_out_is_trains(ctx: RankContext) -> None:
    def aliases(self: Faulty, outputs: Outputs, metadata: None, param_dtype: Any, *, out: Any = None) -> Any:
        made = outputs[0].view(32, 32)
        return made, (made,)

    with fault_in(LATER_POST, aliases), fault_in(RELEASE, lambda self: False):
        assert_trains_like_a_plain_one(sharded(stack_of(Faulty), ctx.mesh_1d()))


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
        error_on_all(POST, _puts_other_memory_under_out),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_post_all_gather put other memory
under out. Write into the memory of out, because autograd has saved out.""",
    )


def _frees_the_shard(self: Faulty, outputs: Outputs, metadata: None, param_dtype: Any, *, out: Any = None) -> Any:
    made = Right.fsdp_post_all_gather(self, outputs, metadata, param_dtype, out=out)
    return None if out is not None else (made[0], (made[0], self))


def test_shard_listed_to_be_freed() -> None:
    assert_expected_inline(
        error_on_all(POST, _frees_the_shard),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_post_all_gather listed memory of the
shard among the tensors to free. List a tensor with its own memory.""",
    )


def _makes_integers(self: Faulty, outputs: Outputs, metadata: None, param_dtype: Any, *, out: Any = None) -> Any:
    made = outputs[0].int()
    return made, (made,)


def test_integers_of_a_trainable_parameter() -> None:
    assert_expected_inline(
        error_on_all(POST, _makes_integers),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_post_all_gather made a tensor of
torch.int32 for a trainable parameter, expected a floating-point dtype.""",
    )


def _answers_one(self: Faulty) -> Any:
    return 1


def test_answer_that_is_no_bool() -> None:
    assert_expected_inline(
        error_on_all(RELEASE, _answers_one),
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
    with fault_in(POST, _spreads):
        model = sharded(stack_of(Faulty), ctx.mesh_1d())
        error = error_of(lambda: step(model))
    assert_trains_like_a_plain_one(sharded(stack_of(Faulty), ctx.mesh_1d()))  # what was unsharded cannot be mended
    return error


def test_gradient_that_nothing_says_how_to_reduce() -> None:
    assert_expected_inline(
        same_on_all_ranks(_gradient_refused),
        """\
ExtensionError: parameter 'blocks.2.linear.weight': the gradient is a Spreading, expected a plain
tensor. A gradient may be a subclass only if the unsharded parameter is a wrapper of the same class,
and all inner tensors have the shape and dtype of the parameter. Let the subclass compute plain
gradients, or use the inner tensors of its activations.""",
    )
