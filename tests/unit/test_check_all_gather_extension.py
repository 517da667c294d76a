"""The conformance check passes classes that keep the protocol, and names what is wrong with those that do not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fsdp2 import MixedPrecisionPolicy
from fsdp2.nested import find_tensors, map_tensors
from fsdp2.tensors import BFloat16AllGatherTensor, Float8AllGatherTensor, Float8Scaling, Int8AllGatherTensor
from fsdp2.tensors.float8 import magnitude, scale_from
from fsdp2.tensors.nf4 import NF4Tensor
from fsdp2.tensors.two_tensor import TwoTensor
from fsdp2.testing import SHAPES, check_all_gather_extension
from tests.harness import extensions
from tests.harness.messages import error_of

aten = torch.ops.aten
MATRICES = [shape for shape in SHAPES if len(shape) > 1]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def _is_in_place(func: Any) -> bool:
    return func.__name__.partition(".")[0].endswith("_")


class Wrapper(torch.Tensor):
    """A wrapper of one plain tensor, sent multiplied by ``factor``. Broken classes differ in one thing each."""

    inner: Tensor
    factor: int
    keeps_class = frozenset(
        {
            aten.detach.default,
            aten.alias.default,
            aten.clone.default,
            aten._to_copy.default,
            aten.new_zeros.default,
            aten.empty_like.default,
        }
    )

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, plain: Tensor, factor: int = 2) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(
            cls, plain.shape, strides=plain.stride(), dtype=plain.dtype, device=plain.device
        )
        made.inner, made.factor = plain, factor
        return made

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["inner"], self.factor

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], factor: int, size: Any, stride: Any) -> Wrapper:
        return cls(inner["inner"], factor)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = cls.before(func, args, kwargs or {})
        result = func(*map_tensors(_inner, args), **map_tensors(_inner, kwargs))
        if func in cls.keeps_class:
            return cls(result, args[0].factor)
        return args[0] if _is_in_place(func) and isinstance(result, Tensor) else result

    @classmethod
    def before(cls, func: Any, args: Any, kwargs: Any) -> Any:
        return args, kwargs

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        return (self.inner * self.factor,), self.factor

    def fsdp_post_all_gather(self, outputs: Any, factor: int, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is not None:
            return out.copy_(outputs[0]).div_(factor)
        made = outputs[0].to(param_dtype, copy=True).div_(factor)
        return made, (made,)

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True


def _inner(tensor: Tensor) -> Tensor:
    return tensor.inner if isinstance(tensor, Wrapper) else tensor


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


def _errors(make: Callable[[Tensor], Tensor], **options: Any) -> str:
    """The report on a class that is wrong on one shape, on two ranks."""
    return error_of(lambda: check_all_gather_extension(make, **{"shapes": [(5, 3)], "world_sizes": (2,)} | options))


def test_shape_without_the_dim_to_cut_is_refused() -> None:
    assert_expected_inline(
        _errors(Wrapper, shapes=[(5, 3), (7,)], dim=1),
        """ValueError: check_all_gather_extension: shape (7,) has no dim 1 to cut; leave it out of shapes.""",
    )


def test_plain_tensor_is_reported() -> None:
    assert_expected_inline(
        _errors(lambda full: full),
        """\
ExtensionError: check_all_gather_extension: Tensor fails 1 check.
- make: make returned a plain tensor without hooks, expected a tensor subclass with them. (First
seen with shape (5, 3).)""",
    )


def test_make_that_changes_the_shape_is_reported() -> None:
    assert_expected_inline(
        _errors(lambda full: Wrapper(full.t().contiguous())),
        """\
ExtensionError: check_all_gather_extension: Wrapper fails 1 check.
- make: make returned a Wrapper of shape (3, 5), expected a tensor of shape (5, 3). (First seen with
shape (5, 3).)""",
    )


class LosesItsClassOnDetach(Wrapper):
    keeps_class = Wrapper.keeps_class - {aten.detach.default}


def test_detach_that_loses_the_class_is_reported() -> None:
    assert_expected_inline(
        _errors(LosesItsClassOnDetach),
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
        _errors(CannotBeCut),
        """\
ExtensionError: check_all_gather_extension: CannotBeCut fails 1 check.
- cut: new_zeros(5, 3) of a CannotBeCut returned a Tensor of shape (5, 3); sharding would lose the
class. Let its __torch_dispatch__ keep it. (First seen with shape (5, 3) on 1 rank, and 1 other
case.)""",
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
        _errors(lambda full: full.as_subclass(Subclass)),
        """\
ExtensionError: check_all_gather_extension: Subclass fails 1 check.
- cut: parameter 'tested' is a Subclass without __torch_dispatch__. A DTensor keeps no such class:
sharding would lose it and ignore its hooks. Make it a wrapper subclass, or the parameter a plain
tensor. (First seen with shape (5, 3) on 1 rank, and 1 other case.)""",
    )


class HasNoPostHook(Wrapper):
    fsdp_post_all_gather = None  # type: ignore[assignment]


def test_missing_hook_is_reported() -> None:
    assert_expected_inline(
        _errors(HasNoPostHook),
        """\
ExtensionError: check_all_gather_extension: HasNoPostHook fails 1 check.
- hooks: HasNoPostHook.fsdp_post_all_gather is not defined: it defines fsdp_pre_all_gather only.
Define both hooks, or list it in ignored_params. (First seen with shape (5, 3) on 1 rank, and 1
other case.)""",
    )


class AsksForMore(Wrapper):
    def fsdp_pre_all_gather(self, mesh: Any, rank: int) -> Any:  # type: ignore[override]
        raise NotImplementedError


def test_wrong_signature_is_reported() -> None:
    assert_expected_inline(
        _errors(AsksForMore),
        """\
ExtensionError: check_all_gather_extension: AsksForMore fails 1 check.
- hooks: AsksForMore.fsdp_pre_all_gather has the signature (mesh: 'Any', rank: 'int') -> 'Any',
expected (self, mesh) or (self, mesh, outer_size, outer_stride, module, mp_policy). (First seen with
shape (5, 3) on 1 rank, and 1 other case.)""",
    )


class ReturnsAList(Wrapper):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return [self.inner], None


def test_payload_that_is_no_tuple_is_reported() -> None:
    assert_expected_inline(
        _errors(ReturnsAList),
        """\
ExtensionError: check_all_gather_extension: ReturnsAList fails 1 check.
- payload: ReturnsAList.fsdp_pre_all_gather returned a list of 1 with its metadata, expected a tuple
of tensors. (First seen with shape (5, 3) on 1 rank, and 1 other case.)""",
    )


class SendsWhatRanksCannotJoin(Wrapper):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return (self.inner[:, mesh.get_local_rank() :].contiguous(),), 1


def test_payloads_that_do_not_fit_together_are_reported() -> None:
    assert_expected_inline(
        _errors(SendsWhatRanksCannotJoin),
        """\
ExtensionError: check_all_gather_extension: SendsWhatRanksCannotJoin fails 1 check.
- payload: SendsWhatRanksCannotJoin.fsdp_pre_all_gather returned tensors that do not fit together on
the ranks: shapes [(2, 2), (3, 3)] differ in more than dim 0. (First seen with shape (5, 3) on 2
ranks.)""",
    )


class SendsAnotherDtypeFromTheSecondRank(Wrapper):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return (self.inner.to(torch.float64 if mesh.get_rank() else torch.float32),), 1


def test_payloads_of_different_dtypes_are_reported() -> None:
    assert_expected_inline(
        _errors(SendsAnotherDtypeFromTheSecondRank),
        """\
ExtensionError: check_all_gather_extension: SendsAnotherDtypeFromTheSecondRank fails 1 check.
- payload: SendsAnotherDtypeFromTheSecondRank.fsdp_pre_all_gather returned tensors of
(torch.float32,) on rank 0, but of (torch.float64,) on rank 1: all must send the same. (First seen
with shape (5, 3) on 2 ranks.)""",
    )


class Communicates(Wrapper):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        torch.distributed.all_reduce(self.inner, group=mesh.get_group())
        raise NotImplementedError


def test_hook_that_communicates_is_told_to_prepare() -> None:
    assert_expected_inline(
        _errors(Communicates),
        """\
ExtensionError: check_all_gather_extension: Communicates fails 1 check.
- payload: Communicates.fsdp_pre_all_gather raised AttributeError: the ranks of this check share one
process, and their mesh has no 'get_group'. A hook that communicates must be able to do without:
have prepare(shards) hand to every shard what the ranks would agree on. (First seen with shape (5,
3) on 1 rank, and 1 other case.)""",
    )


class ReturnsOneTensor(Wrapper):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return outputs[0]


def test_post_hook_that_returns_one_tensor_is_reported() -> None:
    assert_expected_inline(
        _errors(ReturnsOneTensor),
        """\
ExtensionError: check_all_gather_extension: ReturnsOneTensor fails 1 check.
- unsharded: ReturnsOneTensor.fsdp_post_all_gather returned a Tensor of shape (5, 3), expected
(unsharded tensor, tuple of inner tensors to free). (First seen with shape (5, 3) on 1 rank, and 1
other case.)""",
    )


class DropsARow(Wrapper):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return super().fsdp_post_all_gather((outputs[0][1:],), metadata, param_dtype, out=out)


def test_too_few_rows_are_reported() -> None:
    assert_expected_inline(
        _errors(DropsARow),
        """\
ExtensionError: check_all_gather_extension: DropsARow fails 1 check.
- unsharded: DropsARow.fsdp_post_all_gather returned a Tensor of shape (4, 3) with strides (3, 1),
expected contiguous (5, 3), or more rows. (First seen with shape (5, 3) on 1 rank, and 1 other
case.)""",
    )


class FreesTheShard(Wrapper):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        made = super().fsdp_post_all_gather(outputs, metadata, param_dtype, out=out)
        return None if out is not None else (made[0], (made[0], self.inner))


def test_shard_listed_to_be_freed_is_reported() -> None:
    assert_expected_inline(
        _errors(FreesTheShard),
        """\
ExtensionError: check_all_gather_extension: FreesTheShard fails 1 check.
- unsharded: FreesTheShard.fsdp_post_all_gather lists memory of the shard itself to be freed: make a
tensor of its own. (First seen with shape (5, 3) on 1 rank, and 1 other case.)""",
    )


class ReleasesWhatItNeeds(Wrapper):
    def fsdp_post_all_gather(self, outputs: Any, factor: int, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        return (outputs[0].div_(factor), ()) if out is None else None


def test_outputs_that_are_released_and_needed_are_reported() -> None:
    assert_expected_inline(
        _errors(ReleasesWhatItNeeds, world_sizes=(1,)),
        """\
ExtensionError: check_all_gather_extension: ReleasesWhatItNeeds fails 1 check.
- release: the unsharded parameter changes when the outputs are freed, which the class says they may
be: 15 of 15 values differ, the first one at (0, 0): found 3.39615e+38, expected 1.541. Copy from
them, or return False from fsdp_should_release_all_gather_outputs_after_post_all_gather. (First seen
with shape (5, 3) on 1 rank.)""",
    )


class DependsOnTheNumberOfRanks(Wrapper):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return (self.inner * mesh.size(),), 1


def test_values_that_depend_on_the_number_of_ranks_are_reported() -> None:
    assert_expected_inline(
        _errors(DependsOnTheNumberOfRanks),
        """\
ExtensionError: check_all_gather_extension: DependsOnTheNumberOfRanks fails 1 check.
- values: the unsharded parameter does not have the expected values: 15 of 15 values differ, the
first one at (0, 0): found 3.08199, expected 1.541. The outputs are the ranks' payloads one after
the other: let what is sent not depend on where the tensor was cut, or allow for a tolerance. (First
seen with shape (5, 3) on 2 ranks.)""",
    )


class DependsOnTheRank(Wrapper):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return (self.inner * 1,), 1 + mesh.get_rank()


def test_values_that_differ_on_the_ranks_are_reported() -> None:
    assert_expected_inline(
        _errors(DependsOnTheRank),
        """\
ExtensionError: check_all_gather_extension: DependsOnTheRank fails 1 check.
- values: the unsharded parameter on rank 1 is not that of rank 0: 15 of 15 values differ, the first
one at (0, 0): found 0.770498, expected 1.541. Make it of the outputs, and of metadata that is the
same on all ranks. (First seen with shape (5, 3) on 2 ranks.)""",
    )


def test_values_other_than_the_expected_ones_are_reported() -> None:
    assert_expected_inline(
        _errors(Wrapper, value=lambda full: full + 1, tolerance=0.5),
        """\
ExtensionError: check_all_gather_extension: Wrapper fails 1 check.
- values: the unsharded parameter does not have the expected values: 15 of 15 values differ, the
first one at (0, 0): found 1.541, expected 2.541. The outputs are the ranks' payloads one after the
other: let what is sent not depend on where the tensor was cut, or allow for a tolerance. (First
seen with shape (5, 3) on 1 rank, and 1 other case.)""",
    )


class Leaks(Wrapper):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        made = super().fsdp_post_all_gather(outputs, metadata, param_dtype, out=out)
        return None if out is not None else (made[0], ())


def test_memory_that_nobody_frees_is_reported() -> None:
    assert_expected_inline(
        _errors(Leaks),
        """\
ExtensionError: check_all_gather_extension: Leaks fails 1 check.
- memory: Leaks.fsdp_post_all_gather made an unsharded parameter with 60 bytes that are neither an
output nor among the tensors listed to be freed: they would stay allocated when it is resharded.
Return them as the second value. (First seen with shape (5, 3) on 1 rank, and 1 other case.)""",
    )


class IgnoresOut(Wrapper):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else super().fsdp_post_all_gather(outputs, metadata, param_dtype)


def test_out_that_is_not_filled_is_reported() -> None:
    assert_expected_inline(
        _errors(IgnoresOut),
        """\
ExtensionError: check_all_gather_extension: IgnoresOut fails 1 check.
- refill: out is not filled with what the first call made of the same shards: 15 of 15 values
differ, the first one at (0, 0): found 3.39615e+38, expected 1.541. Its memory and that of the
outputs is new whenever out is given: write all of it, from the outputs. (First seen with shape (5,
3) on 1 rank, and 1 other case.)""",
    )


class ReturnsAnother(Wrapper):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return super().fsdp_post_all_gather(outputs, metadata, param_dtype)


def test_new_object_in_place_of_out_is_reported() -> None:
    assert_expected_inline(
        _errors(ReturnsAnother),
        """\
ExtensionError: check_all_gather_extension: ReturnsAnother fails 1 check.
- unsharded: ReturnsAnother.fsdp_post_all_gather returned a tuple of 2 although out was given,
expected None: fill out in place, because autograd has saved it. (First seen with shape (5, 3) on 1
rank, and 1 other case.)""",
    )


class PutsOtherMemoryUnderOut(Wrapper):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        made = super().fsdp_post_all_gather(outputs, metadata, param_dtype)
        if out is not None:
            out.data = made[0]
        return made if out is None else None


def test_other_memory_under_out_is_reported() -> None:
    assert_expected_inline(
        _errors(PutsOtherMemoryUnderOut),
        """\
ExtensionError: check_all_gather_extension: PutsOtherMemoryUnderOut fails 1 check.
- unsharded: PutsOtherMemoryUnderOut.fsdp_post_all_gather put other memory under out: write the
tensors that it has, because autograd has saved them. (First seen with shape (5, 3) on 1 rank, and 1
other case.)""",
    )


class Spreading(Wrapper):
    """Whatever is computed with it becomes one of it."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        return map_tensors(lambda tensor: tensor if isinstance(tensor, Wrapper) else cls(tensor), result)


class SpreadsToItsGradient(Wrapper):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        made = super().fsdp_post_all_gather(outputs, metadata, param_dtype, out=None if out is None else out.inner)
        return None if out is not None else (Spreading(made[0]), made[1])

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["itself"], self.factor

    @property
    def itself(self) -> Tensor:
        return self.inner

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], factor: int, size: Any, stride: Any) -> Wrapper:
        return cls(inner["itself"], factor)


def test_gradient_of_a_class_that_cannot_be_reduced_is_reported() -> None:
    assert_expected_inline(
        _errors(SpreadsToItsGradient),
        """\
ExtensionError: check_all_gather_extension: SpreadsToItsGradient fails 1 check.
- autograd: the gradient of the unsharded Spreading is a Spreading, expected a plain tensor. It may
be of a subclass only if shard and unsharded parameter are wrappers with the same inner tensors,
each of the parameter's shape and dtype. (First seen with shape (5, 3) on 1 rank, and 1 other case.)""",
    )


class LosesItsClassOnClone(Wrapper):
    keeps_class = Wrapper.keeps_class - {aten.clone.default}


def test_clone_that_loses_the_class_is_reported() -> None:
    assert_expected_inline(
        _errors(LosesItsClassOnClone),
        """\
ExtensionError: check_all_gather_extension: LosesItsClassOnClone fails 1 check.
- clone: clone of a LosesItsClassOnClone of shape (3, 3) gives a Tensor of shape (3, 3): its hooks
would be lost. Let the operation keep the class. (First seen with shape (5, 3) on 2 ranks.)""",
    )


class LosesItsClassOnEmptyLike(Wrapper):
    keeps_class = Wrapper.keeps_class - {aten.empty_like.default}


def test_empty_like_that_loses_the_class_is_reported() -> None:
    assert_expected_inline(
        _errors(LosesItsClassOnEmptyLike),
        """\
ExtensionError: check_all_gather_extension: LosesItsClassOnEmptyLike fails 2 checks.
- empty_like: empty_like of a LosesItsClassOnEmptyLike of shape (3, 3) gives a Tensor of shape (3,
3): its hooks would be lost. Let the operation keep the class. (First seen with shape (5, 3) on 2
ranks.)
- meta: empty_like on the meta device of a LosesItsClassOnEmptyLike of shape (3, 3) gives a Tensor
of shape (3, 3): its hooks would be lost. Let the operation keep the class. (First seen with shape
(5, 3) on 2 ranks.)""",
    )


class LosesItsClassOnTo(Wrapper):
    keeps_class = Wrapper.keeps_class - {aten._to_copy.default}


def test_cast_that_loses_the_class_is_reported() -> None:
    assert_expected_inline(
        _errors(LosesItsClassOnTo),
        """\
ExtensionError: check_all_gather_extension: LosesItsClassOnTo fails 1 check.
- to: to(torch.bfloat16) of a LosesItsClassOnTo of shape (3, 3) gives a Tensor of shape (3, 3): its
hooks would be lost. Let the operation keep the class. (First seen with shape (5, 3) on 2 ranks.)""",
    )


class ClonesNothing(Wrapper):
    def __deepcopy__(self, memo: Any) -> Any:
        return torch.nn.Parameter(self.detach())


def test_deep_copy_of_the_same_memory_is_reported() -> None:
    assert_expected_inline(
        _errors(ClonesNothing),
        """\
ExtensionError: check_all_gather_extension: ClonesNothing fails 1 check.
- deepcopy: a deep copy never equalled the tensor it was made of, or changed with it: 15 of 15
values differ, the first one at (0, 0): found 0.661352, expected 1.541. Let clone copy the inner
tensors. (First seen with shape (5, 3) on 2 ranks.)""",
    )


class ForgetsItsFactor(Wrapper):
    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], factor: int, size: Any, stride: Any) -> Wrapper:
        return cls(inner["inner"], 3)

    def fsdp_post_all_gather(self, outputs: Any, factor: int, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        return super().fsdp_post_all_gather(outputs, 2, param_dtype, out=out)


def test_flatten_that_loses_an_attribute_is_reported() -> None:
    assert_expected_inline(
        _errors(ForgetsItsFactor),
        """\
ExtensionError: check_all_gather_extension: ForgetsItsFactor fails 1 check.
- flatten: what is gathered of the copies is not what was gathered before: 15 of 15 values differ,
the first one at (0, 0): found 2.31149, expected 1.541. Let it copy the inner tensors and everything
else that the hooks read. (First seen with shape (5, 3) on 2 ranks.)""",
    )


class LooksAtItsValues(Wrapper):
    def __new__(cls, plain: Tensor, factor: int = 2) -> Wrapper:
        assert plain.sum().item() is not None
        return super().__new__(cls, plain, factor)


def test_class_that_cannot_be_made_on_the_meta_device_is_reported() -> None:
    assert_expected_inline(
        _errors(LooksAtItsValues),
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
        _errors(SendsWhatItSentFirst),
        """\
ExtensionError: check_all_gather_extension: SendsWhatItSentFirst fails 5 checks.
- load: what is gathered after copy_ is not what was copied in: 15 of 15 values differ, the first
one at (0, 0): found 1.541, expected 0.661352. Let copy_ copy all that the hooks read, and hooks
keep nothing. (First seen with shape (5, 3) on 2 ranks.)
- SGD(foreach=True), SGD(foreach=False), AdamW(foreach=True), AdamW(foreach=False): the step did not
change what is gathered. Let in-place operations write the inner tensors, also on lists, and hooks
keep nothing. (First seen with shape (5, 3) on 2 ranks.)""",
    )


class IsNotWrittenOnLists(Wrapper):
    @classmethod
    def before(cls, func: Any, args: Any, kwargs: Any) -> Any:
        if not func.__name__.startswith("_foreach_"):
            return args, kwargs
        return map_tensors(lambda tensor: tensor.clone() if isinstance(tensor, cls) else tensor, (args, kwargs))


def test_step_that_writes_a_copy_is_reported() -> None:
    assert_expected_inline(
        _errors(IsNotWrittenOnLists),
        """\
ExtensionError: check_all_gather_extension: IsNotWrittenOnLists fails 2 checks.
- SGD(foreach=True), AdamW(foreach=True): the step did not change what is gathered. Let in-place
operations write the inner tensors, also on lists, and hooks keep nothing. (First seen with shape
(5, 3) on 2 ranks.)""",
    )


class RefusesToBeStepped(Wrapper):
    @classmethod
    def before(cls, func: Any, args: Any, kwargs: Any) -> Any:
        written = find_tensors(args[:1], []) if _is_in_place(func) else []
        if func is not aten.copy_.default and any(isinstance(tensor, cls) for tensor in written):
            raise NotImplementedError("only copy_ writes this class")
        return args, kwargs


def test_step_that_raises_is_reported() -> None:
    assert_expected_inline(
        _errors(RefusesToBeStepped),
        """\
ExtensionError: check_all_gather_extension: RefusesToBeStepped fails 4 checks.
- SGD(foreach=True), SGD(foreach=False), AdamW(foreach=True), AdamW(foreach=False): raised
NotImplementedError: only copy_ writes this class. (First seen with shape (5, 3) on 2 ranks.)""",
    )


class FailsOnEmptyShards(Wrapper):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return (self.inner / self.inner.amax(),), 1


def test_hook_that_fails_on_empty_shards_is_reported() -> None:
    assert_expected_inline(
        _errors(FailsOnEmptyShards, shapes=[(1, 3)]),
        """\
ExtensionError: check_all_gather_extension: FailsOnEmptyShards fails 1 check.
- payload: FailsOnEmptyShards.fsdp_pre_all_gather raised RuntimeError: amax(): Expected reduction
dim to be specified for input.numel() == 0. Specify the reduction dim with the 'dim' argument. It
did so on rank 1, whose shard has shape (0, 3). (First seen with shape (1, 3) on 2 ranks.)""",
    )


class ChangesItsPayload(Wrapper):
    num_calls = 0

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        self.num_calls += 1
        return (self.inner.repeat(self.num_calls, 1),), 1


def test_payload_that_changes_its_shape_is_reported() -> None:
    assert_expected_inline(
        _errors(ChangesItsPayload),
        """\
ExtensionError: check_all_gather_extension: ChangesItsPayload fails 1 check.
- refill: ChangesItsPayload.fsdp_pre_all_gather returned (float32 (10, 3)), but (float32 (5, 3))
when its group was first gathered: shapes and dtypes must stay, because the plan is made once.
(First seen with shape (5, 3) on 1 rank, and 1 other case.)""",
    )


class AnswersOne(Wrapper):
    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> Any:
        return 1


def test_answer_that_is_no_bool_is_reported() -> None:
    assert_expected_inline(
        _errors(AnswersOne),
        """\
ExtensionError: check_all_gather_extension: AnswersOne fails 1 check.
- payload: AnswersOne.fsdp_should_release_all_gather_outputs_after_post_all_gather returned a int,
expected a bool. (First seen with shape (5, 3) on 1 rank, and 1 other case.)""",
    )


def test_failures_of_several_shapes_are_one_line() -> None:
    assert_expected_inline(
        _errors(Leaks, shapes=[(5, 3), (2, 2)], world_sizes=(1, 2, 4)),
        """\
ExtensionError: check_all_gather_extension: Leaks fails 1 check.
- memory: Leaks.fsdp_post_all_gather made an unsharded parameter with 60 bytes that are neither an
output nor among the tensors listed to be freed: they would stay allocated when it is resharded.
Return them as the second value. (First seen with shape (5, 3) on 1 rank, and 5 other cases.)""",
    )


def test_failures_of_several_kinds_are_a_line_each() -> None:
    class Twice(LosesItsClassOnClone, LooksAtItsValues):
        pass

    assert_expected_inline(
        _errors(Twice),
        """\
ExtensionError: check_all_gather_extension: Twice fails 2 checks.
- clone: clone of a Twice of shape (3, 3) gives a Tensor of shape (3, 3): its hooks would be lost.
Let the operation keep the class. (First seen with shape (5, 3) on 2 ranks.)
- meta: raised RuntimeError: Tensor.item() cannot be called on meta tensors. (First seen with shape
(5, 3) on 2 ranks.)""",
    )
