"""The conformance check names what goes wrong with shards outside of the all-gather: copies, casts, loading, steps."""

from __future__ import annotations

from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fsdp2.plan.trees import find_tensors, map_tensors
from tests.harness.extensions import is_in_place
from tests.unit.checked_wrapper import LooksAtItsValues, LosesItsClassOnClone, Wrapper, aten, errors_of_check


def test_clone_that_loses_the_class_is_reported() -> None:
    assert_expected_inline(
        errors_of_check(LosesItsClassOnClone),
        """\
ExtensionError: check_all_gather_extension: LosesItsClassOnClone fails 1 check.
- clone: clone of a LosesItsClassOnClone of shape (3, 3) gives a Tensor of shape (3, 3). The hooks
would be lost. Let the operation keep the class. (First seen with shape (5, 3) on 2 ranks.)""",
    )


class LosesItsClassOnEmptyLike(Wrapper):
    keeps_class = Wrapper.keeps_class - {aten.empty_like.default}


def test_empty_like_that_loses_the_class_is_reported() -> None:
    assert_expected_inline(
        errors_of_check(LosesItsClassOnEmptyLike),
        """\
ExtensionError: check_all_gather_extension: LosesItsClassOnEmptyLike fails 2 checks.
- empty_like: empty_like of a LosesItsClassOnEmptyLike of shape (3, 3) gives a Tensor of shape (3,
3). The hooks would be lost. Let the operation keep the class. (First seen with shape (5, 3) on 2
ranks.)
- meta: empty_like on the meta device of a LosesItsClassOnEmptyLike of shape (3, 3) gives a Tensor
of shape (3, 3). The hooks would be lost. Let the operation keep the class. (First seen with shape
(5, 3) on 2 ranks.)""",
    )


class LosesItsClassOnTo(Wrapper):
    keeps_class = Wrapper.keeps_class - {aten._to_copy.default}


def test_cast_that_loses_the_class_is_reported() -> None:
    assert_expected_inline(
        errors_of_check(LosesItsClassOnTo),
        """\
ExtensionError: check_all_gather_extension: LosesItsClassOnTo fails 1 check.
- to: to(torch.bfloat16) of a LosesItsClassOnTo of shape (3, 3) gives a Tensor of shape (3, 3). The
hooks would be lost. Let the operation keep the class. (First seen with shape (5, 3) on 2 ranks.)""",
    )


class ClonesNothing(Wrapper):
    def __deepcopy__(self, memo: Any) -> Any:
        return torch.nn.Parameter(self.detach())


def test_deep_copy_of_the_same_memory_is_reported() -> None:
    assert_expected_inline(
        errors_of_check(ClonesNothing),
        """\
ExtensionError: check_all_gather_extension: ClonesNothing fails 1 check.
- deepcopy: a deep copy differs from the original tensor, or changes when the original changes: 15
of 15 values differ, the first one at (0, 0): found 0.661352, expected 1.541. Let clone copy the
inner tensors. (First seen with shape (5, 3) on 2 ranks.)""",
    )


class ForgetsItsFactor(Wrapper):
    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], factor: int, size: Any, stride: Any) -> Wrapper:
        return cls(inner["inner"], 3)

    def fsdp_post_all_gather(self, outputs: Any, factor: int, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        return super().fsdp_post_all_gather(outputs, 2, param_dtype, out=out)


def test_flatten_that_loses_an_attribute_is_reported() -> None:
    assert_expected_inline(
        errors_of_check(ForgetsItsFactor),
        """\
ExtensionError: check_all_gather_extension: ForgetsItsFactor fails 1 check.
- flatten: a gather of the copies gives other values than a gather of the originals: 15 of 15 values
differ, the first one at (0, 0): found 2.31149, expected 1.541. Let the operation copy the inner
tensors and everything else that the hooks read. (First seen with shape (5, 3) on 2 ranks.)""",
    )


def test_class_that_cannot_be_made_on_the_meta_device_is_reported() -> None:
    assert_expected_inline(
        errors_of_check(LooksAtItsValues),
        """\
ExtensionError: check_all_gather_extension: LooksAtItsValues fails 1 check.
- meta: raised RuntimeError: Tensor.item() cannot be called on meta tensors. (First seen with shape
(5, 3) on 2 ranks.)""",
    )


class SendsWhatItSentFirst(Wrapper):
    sent: Any = None

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        self.sent = self.inner * self.factor if self.sent is None else self.sent
        return (self.sent,), self.factor


def test_payload_that_outlives_a_write_is_reported() -> None:
    assert_expected_inline(
        errors_of_check(SendsWhatItSentFirst),
        """\
ExtensionError: check_all_gather_extension: SendsWhatItSentFirst fails 5 checks.
- load: a gather after copy_ does not give the copied values: 15 of 15 values differ, the first one
at (0, 0): found 1.541, expected 0.661352. Let copy_ copy all that the hooks read. Keep no state in
the hooks. (First seen with shape (5, 3) on 2 ranks.)
- SGD(foreach=True), SGD(foreach=False), AdamW(foreach=True), AdamW(foreach=False): the step did not
change the gathered values. Let in-place operations write the inner tensors, also in operations on
lists. Keep no state in the hooks. (First seen with shape (5, 3) on 2 ranks.)""",
    )


class IsNotWrittenOnLists(Wrapper):
    @classmethod
    def before(cls, func: Any, args: Any, kwargs: Any) -> Any:
        if not func.__name__.startswith("_foreach_"):
            return args, kwargs
        return map_tensors(lambda tensor: tensor.clone() if isinstance(tensor, cls) else tensor, (args, kwargs))


def test_step_that_writes_a_copy_is_reported() -> None:
    assert_expected_inline(
        errors_of_check(IsNotWrittenOnLists),
        """\
ExtensionError: check_all_gather_extension: IsNotWrittenOnLists fails 2 checks.
- SGD(foreach=True), AdamW(foreach=True): the step did not change the gathered values. Let in-place
operations write the inner tensors, also in operations on lists. Keep no state in the hooks. (First
seen with shape (5, 3) on 2 ranks.)""",
    )


class RefusesToBeStepped(Wrapper):
    @classmethod
    def before(cls, func: Any, args: Any, kwargs: Any) -> Any:
        written = find_tensors(args[:1], []) if is_in_place(func) else []
        if func is not aten.copy_.default and any(isinstance(tensor, cls) for tensor in written):
            raise NotImplementedError("only copy_ writes this class")
        return args, kwargs


def test_step_that_raises_is_reported() -> None:
    assert_expected_inline(
        errors_of_check(RefusesToBeStepped),
        """\
ExtensionError: check_all_gather_extension: RefusesToBeStepped fails 4 checks.
- SGD(foreach=True), SGD(foreach=False), AdamW(foreach=True), AdamW(foreach=False): raised
NotImplementedError: only copy_ writes this class. (First seen with shape (5, 3) on 2 ranks.)""",
    )
