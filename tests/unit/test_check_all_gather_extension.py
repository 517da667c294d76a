"""The conformance check passes classes that keep the protocol, and names what is wrong with those that do not.

Here: those that pass, those that cannot be made or cut, and how failures are told. Hooks and shards have files of their
own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fsdp2 import MixedPrecisionPolicy
from fsdp2.tensors import BFloat16AllGatherTensor, Float8AllGatherTensor, Float8Scaling, Int8AllGatherTensor
from fsdp2.tensors.float8 import magnitude, scale_from
from fsdp2.tensors.nf4 import NF4Tensor
from fsdp2.tensors.two_tensor import TwoTensor
from fsdp2.testing import SHAPES, check_all_gather_extension
from tests.harness import extensions
from tests.unit.checked_wrapper import Leaks, LooksAtItsValues, LosesItsClassOnClone, Wrapper, aten, errors_of_check

MATRICES = [shape for shape in SHAPES if len(shape) > 1]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def _share_a_scale(shards: list[Any]) -> None:
    scale = scale_from(torch.stack([magnitude(shard._data) for shard in shards]).amax(0))
    for shard in shards:
        shard.precomputed(scale)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Wrapper, {"value": lambda full: full}),
        (Wrapper, {"value": lambda full: full, "dim": -1, "shapes": MATRICES}),
        (Wrapper, {"trainable": False, "mp_policy": BF16, "dtype": torch.float64}),
        (BFloat16AllGatherTensor, {"value": lambda full: full.bfloat16().float()}),
        (BFloat16AllGatherTensor, {"value": lambda full: full.bfloat16(), "mp_policy": BF16}),
        (partial(BFloat16AllGatherTensor, pad=True), {}),
        (partial(Float8AllGatherTensor, quantise_once=True), {"prepare": _share_a_scale}),
        (partial(Float8AllGatherTensor, scaling=Float8Scaling.PER_ROW), {"shapes": MATRICES}),
        (Int8AllGatherTensor, {"shapes": MATRICES, "value": lambda full: full, "tolerance": 0.02}),
        (partial(Int8AllGatherTensor, quantise_once=True), {"shapes": MATRICES}),
        (NF4Tensor.quantise, {"shapes": MATRICES, "trainable": False}),
        (lambda full: TwoTensor(full, full + 1), {"value": lambda full: TwoTensor(full, full + 1)}),
        (lambda full: TwoTensor(full, full + 1), {"mp_policy": BF16}),
        (extensions.Ragged, {"value": lambda full: full}),
        (extensions.Padded, {"value": lambda full: full}),
        (extensions.AliasingHalved, {"value": lambda full: full.bfloat16()}),
        (extensions.KeptHalved, {}),
        (extensions.Packed4, {"shapes": [(8, 4), (5, 6)], "value": lambda full: full, "tolerance": 0.5}),
    ],
)  # fmt: skip
def test_class_that_keeps_the_protocol_passes(make: Callable[[Tensor], Tensor], options: dict[str, Any]) -> None:
    check_all_gather_extension(make, **options)


def test_shape_without_the_dim_to_cut_is_refused() -> None:
    assert_expected_inline(
        errors_of_check(Wrapper, shapes=[(5, 3), (7,)], dim=1),
        """\
ValueError: check_all_gather_extension: shape (7,) has no dim 1 to cut. Leave this shape out of
shapes.""",
    )


def test_plain_tensor_is_reported() -> None:
    assert_expected_inline(
        errors_of_check(lambda full: full),
        """\
ExtensionError: check_all_gather_extension: Tensor fails 1 check.
- make: make returned a plain tensor without hooks, expected a tensor subclass with hooks. (First
seen with shape (5, 3).)""",
    )


def test_make_that_changes_the_shape_is_reported() -> None:
    assert_expected_inline(
        errors_of_check(lambda full: Wrapper(full.t().contiguous())),
        """\
ExtensionError: check_all_gather_extension: Wrapper fails 1 check.
- make: make returned a Wrapper of shape (3, 5), expected a tensor of shape (5, 3). (First seen with
shape (5, 3).)""",
    )


class LosesItsClassOnDetach(Wrapper):
    keeps_class = Wrapper.keeps_class - {aten.detach.default}


def test_detach_that_loses_the_class_is_reported() -> None:
    assert_expected_inline(
        errors_of_check(LosesItsClassOnDetach),
        """\
ExtensionError: check_all_gather_extension: LosesItsClassOnDetach fails 1 check.
- make: raised RuntimeError: Creating a Parameter from an instance of type LosesItsClassOnDetach
requires that detach() returns an instance of the same type, but return type Tensor was found
instead. To use the type as a Parameter, please correct the detach() semantics defined by its
__torch_dispatch__() implementation. (First seen with shape (5, 3).)""",
    )


class CannotBeCut(Wrapper):
    keeps_class = Wrapper.keeps_class - {aten.new_zeros.default}


def test_new_zeros_that_loses_the_class_is_reported() -> None:
    assert_expected_inline(
        errors_of_check(CannotBeCut),
        """\
ExtensionError: check_all_gather_extension: CannotBeCut fails 1 check.
- cut: new_zeros(5, 3) of a CannotBeCut returned a Tensor of shape (5, 3). Sharding would lose the
class. Let CannotBeCut.__torch_dispatch__ keep the class. (First seen with shape (5, 3) on 1 rank,
and 1 other case.)""",
    )


class Subclass(torch.Tensor):
    """A plain tensor's memory under another class."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.as_subclass(Tensor).bfloat16(),), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is not None:
            return out.copy_(outputs[0])
        made = outputs[0].to(param_dtype, copy=True)
        return made, (made,)


def test_class_that_dtensors_lose_is_reported() -> None:
    assert_expected_inline(
        errors_of_check(lambda full: full.as_subclass(Subclass)),
        """\
ExtensionError: check_all_gather_extension: Subclass fails 1 check.
- cut: parameter 'tested' is a Subclass without __torch_dispatch__. A DTensor would lose this class
and ignore its hooks. Make Subclass a wrapper subclass, or make the parameter a plain tensor. (First
seen with shape (5, 3) on 1 rank, and 1 other case.)""",
    )


def test_failures_of_several_shapes_are_one_line() -> None:
    assert_expected_inline(
        errors_of_check(Leaks, shapes=[(5, 3), (2, 2)], world_sizes=(1, 2, 4)),
        """\
ExtensionError: check_all_gather_extension: Leaks fails 1 check.
- memory: Leaks.fsdp_post_all_gather made an unsharded parameter with 60 bytes that belong neither
to an output nor to a tensor listed to be freed. This memory would stay allocated after a reshard.
Return the tensor in the second value. (First seen with shape (5, 3) on 1 rank, and 5 other cases.)""",
    )


class Twice(LosesItsClassOnClone, LooksAtItsValues):
    pass


def test_failures_of_several_kinds_are_a_line_each() -> None:
    assert_expected_inline(
        errors_of_check(Twice),
        """\
ExtensionError: check_all_gather_extension: Twice fails 2 checks.
- clone: clone of a Twice of shape (3, 3) gives a Tensor of shape (3, 3). The hooks would be lost.
Let the operation keep the class. (First seen with shape (5, 3) on 2 ranks.)
- meta: raised RuntimeError: Tensor.item() cannot be called on meta tensors. (First seen with shape
(5, 3) on 2 ranks.)""",
    )
