"""The conformance check names what is wrong with the hooks of a class: what they send, make, fill and free."""

from __future__ import annotations

from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fsdp2.plan.trees import map_tensors
from tests.unit.checked_wrapper import Leaks, Wrapper, errors_of_check


class HasNoPostHook(Wrapper):
    fsdp_post_all_gather = None  # type: ignore[assignment]


def test_missing_hook_is_reported() -> None:
    assert_expected_inline(
        errors_of_check(HasNoPostHook),
        """\
ExtensionError: check_all_gather_extension: HasNoPostHook fails 1 check.
- hooks: HasNoPostHook.fsdp_post_all_gather is not defined: the class defines only
fsdp_pre_all_gather. Define both hooks, or list the parameter in ignored_params. (First seen with
shape (5, 3) on 1 rank, and 1 other case.)""",
    )


class AsksForMore(Wrapper):
    def fsdp_pre_all_gather(self, mesh: Any, rank: int) -> Any:  # type: ignore[override]
        raise NotImplementedError


def test_wrong_signature_is_reported() -> None:
    assert_expected_inline(
        errors_of_check(AsksForMore),
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
        errors_of_check(ReturnsAList),
        """\
ExtensionError: check_all_gather_extension: ReturnsAList fails 1 check.
- payload: ReturnsAList.fsdp_pre_all_gather returned a list of 1 as the tensors, expected a tuple of
tensors. (First seen with shape (5, 3) on 1 rank, and 1 other case.)""",
    )


class SendsWhatRanksCannotJoin(Wrapper):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return (self.inner[:, mesh.get_local_rank() :].contiguous(),), 1


def test_payloads_that_do_not_fit_together_are_reported() -> None:
    assert_expected_inline(
        errors_of_check(SendsWhatRanksCannotJoin),
        """\
ExtensionError: check_all_gather_extension: SendsWhatRanksCannotJoin fails 1 check.
- payload: SendsWhatRanksCannotJoin.fsdp_pre_all_gather returned tensors that cannot be joined over
the ranks: shapes [(2, 2), (3, 3)] differ in more than dim 0. Return equal other dims. (First seen
with shape (5, 3) on 2 ranks.)""",
    )


class SendsAnotherDtypeFromTheSecondRank(Wrapper):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return (self.inner.to(torch.float64 if mesh.get_rank() else torch.float32),), 1


def test_payloads_of_different_dtypes_are_reported() -> None:
    assert_expected_inline(
        errors_of_check(SendsAnotherDtypeFromTheSecondRank),
        """\
ExtensionError: check_all_gather_extension: SendsAnotherDtypeFromTheSecondRank fails 1 check.
- payload: SendsAnotherDtypeFromTheSecondRank.fsdp_pre_all_gather returned tensors of
(torch.float32,) on rank 0, but of (torch.float64,) on rank 1. Return the same dtypes on all ranks.
(First seen with shape (5, 3) on 2 ranks.)""",
    )


class Communicates(Wrapper):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        torch.distributed.all_reduce(self.inner, group=mesh.get_group())
        raise NotImplementedError


def test_hook_that_communicates_is_told_to_prepare() -> None:
    assert_expected_inline(
        errors_of_check(Communicates),
        """\
ExtensionError: check_all_gather_extension: Communicates fails 1 check.
- payload: Communicates.fsdp_pre_all_gather raised AttributeError: the ranks of this check share one
process, and their mesh has no 'get_group'. For a hook that communicates, pass prepare(shards),
which gives every shard the values that the ranks would agree on. (First seen with shape (5, 3) on 1
rank, and 1 other case.)""",
    )


class ReturnsOneTensor(Wrapper):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return outputs[0]


def test_post_hook_that_returns_one_tensor_is_reported() -> None:
    assert_expected_inline(
        errors_of_check(ReturnsOneTensor),
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
        errors_of_check(DropsARow),
        """\
ExtensionError: check_all_gather_extension: DropsARow fails 1 check.
- unsharded: DropsARow.fsdp_post_all_gather returned a Tensor of shape (4, 3) with strides (3, 1),
expected a contiguous tensor of shape (5, 3), or with more rows. (First seen with shape (5, 3) on 1
rank, and 1 other case.)""",
    )


class FreesTheShard(Wrapper):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        made = super().fsdp_post_all_gather(outputs, metadata, param_dtype, out=out)
        return None if out is not None else (made[0], (made[0], self.inner))


def test_shard_listed_to_be_freed_is_reported() -> None:
    assert_expected_inline(
        errors_of_check(FreesTheShard),
        """\
ExtensionError: check_all_gather_extension: FreesTheShard fails 1 check.
- unsharded: FreesTheShard.fsdp_post_all_gather listed memory of the shard among the tensors to
free. List a tensor with its own memory. (First seen with shape (5, 3) on 1 rank, and 1 other case.)""",
    )


class ReleasesWhatItNeeds(Wrapper):
    def fsdp_post_all_gather(self, outputs: Any, factor: int, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        return (outputs[0].div_(factor), ()) if out is None else None


def test_outputs_that_are_released_and_needed_are_reported() -> None:
    assert_expected_inline(
        errors_of_check(ReleasesWhatItNeeds, world_sizes=(1,)),
        """\
ExtensionError: check_all_gather_extension: ReleasesWhatItNeeds fails 1 check.
- release: the unsharded parameter changes when the outputs are freed, but the class says that they
may be freed: 15 of 15 values differ, the first one at (0, 0): found 3.39615e+38, expected 1.541.
Copy the outputs, or return False from fsdp_should_release_all_gather_outputs_after_post_all_gather.
(First seen with shape (5, 3) on 1 rank.)""",
    )


class DependsOnTheNumberOfRanks(Wrapper):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return (self.inner * mesh.size(),), 1


def test_values_that_depend_on_the_number_of_ranks_are_reported() -> None:
    assert_expected_inline(
        errors_of_check(DependsOnTheNumberOfRanks),
        """\
ExtensionError: check_all_gather_extension: DependsOnTheNumberOfRanks fails 1 check.
- values: the unsharded parameter does not have the expected values: 15 of 15 values differ, the
first one at (0, 0): found 3.08199, expected 1.541. The outputs are the payloads of all ranks in
rank order. Send payloads that do not depend on the cut, or pass a tolerance. (First seen with shape
(5, 3) on 2 ranks.)""",
    )


class DependsOnTheRank(Wrapper):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return (self.inner * 1,), 1 + mesh.get_rank()


def test_values_that_differ_on_the_ranks_are_reported() -> None:
    assert_expected_inline(
        errors_of_check(DependsOnTheRank),
        """\
ExtensionError: check_all_gather_extension: DependsOnTheRank fails 1 check.
- values: the unsharded parameter on rank 1 differs from the unsharded parameter on rank 0: 15 of 15
values differ, the first one at (0, 0): found 0.770498, expected 1.541. Make the parameter only from
the outputs, and from metadata that is the same on all ranks. (First seen with shape (5, 3) on 2
ranks.)""",
    )


def test_values_other_than_the_expected_ones_are_reported() -> None:
    assert_expected_inline(
        errors_of_check(Wrapper, value=lambda full: full + 1, tolerance=0.5),
        """\
ExtensionError: check_all_gather_extension: Wrapper fails 1 check.
- values: the unsharded parameter does not have the expected values: 15 of 15 values differ, the
first one at (0, 0): found 1.541, expected 2.541. The outputs are the payloads of all ranks in rank
order. Send payloads that do not depend on the cut, or pass a tolerance. (First seen with shape (5,
3) on 1 rank, and 1 other case.)""",
    )


def test_memory_that_nobody_frees_is_reported() -> None:
    assert_expected_inline(
        errors_of_check(Leaks),
        """\
ExtensionError: check_all_gather_extension: Leaks fails 1 check.
- memory: Leaks.fsdp_post_all_gather made an unsharded parameter with 60 bytes that belong neither
to an output nor to a tensor listed to be freed. This memory would stay allocated after a reshard.
Return the tensor in the second value. (First seen with shape (5, 3) on 1 rank, and 1 other case.)""",
    )


class IgnoresOut(Wrapper):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else super().fsdp_post_all_gather(outputs, metadata, param_dtype)


def test_out_that_is_not_filled_is_reported() -> None:
    assert_expected_inline(
        errors_of_check(IgnoresOut),
        """\
ExtensionError: check_all_gather_extension: IgnoresOut fails 1 check.
- refill: out differs from the result of the first call for the same shards: 15 of 15 values differ,
the first one at (0, 0): found 3.39615e+38, expected 1.541. Whenever out is given, out and the
outputs have new memory. Write all of out, from the outputs. (First seen with shape (5, 3) on 1
rank, and 1 other case.)""",
    )


class ReturnsAnother(Wrapper):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return super().fsdp_post_all_gather(outputs, metadata, param_dtype)


def test_new_object_in_place_of_out_is_reported() -> None:
    assert_expected_inline(
        errors_of_check(ReturnsAnother),
        """\
ExtensionError: check_all_gather_extension: ReturnsAnother fails 1 check.
- unsharded: ReturnsAnother.fsdp_post_all_gather returned a tuple of 2 in new memory although out
was given. fsdp2 ignores this result. Fill out in place, because autograd has saved out. (First seen
with shape (5, 3) on 1 rank, and 1 other case.)""",
    )


class PutsOtherMemoryUnderOut(Wrapper):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        made = super().fsdp_post_all_gather(outputs, metadata, param_dtype)
        if out is not None:
            out.data = made[0]
        return made if out is None else None


def test_other_memory_under_out_is_reported() -> None:
    assert_expected_inline(
        errors_of_check(PutsOtherMemoryUnderOut),
        """\
ExtensionError: check_all_gather_extension: PutsOtherMemoryUnderOut fails 1 check.
- unsharded: PutsOtherMemoryUnderOut.fsdp_post_all_gather put other memory under out. Write into the
memory of out, because autograd has saved out. (First seen with shape (5, 3) on 1 rank, and 1 other
case.)""",
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
        errors_of_check(SpreadsToItsGradient),
        """\
ExtensionError: check_all_gather_extension: SpreadsToItsGradient fails 1 check.
- autograd: the gradient of the unsharded Spreading is a Spreading, expected a plain tensor. A
gradient may be of a subclass only if shard and unsharded parameter are wrappers with the same inner
tensors, each of the parameter's shape and dtype. (First seen with shape (5, 3) on 1 rank, and 1
other case.)""",
    )


class FailsOnEmptyShards(Wrapper):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return (self.inner / self.inner.amax(),), 1


def test_hook_that_fails_on_empty_shards_is_reported() -> None:
    assert_expected_inline(
        errors_of_check(FailsOnEmptyShards, shapes=[(1, 3)]),
        """\
ExtensionError: check_all_gather_extension: FailsOnEmptyShards fails 1 check.
- payload: FailsOnEmptyShards.fsdp_pre_all_gather raised RuntimeError: amax(): Expected reduction
dim to be specified for input.numel() == 0. Specify the reduction dim with the 'dim' argument. This
happened on rank 1, whose shard has shape (0, 3). (First seen with shape (1, 3) on 2 ranks.)""",
    )


class ChangesItsPayload(Wrapper):
    num_calls = 0

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        self.num_calls += 1
        return (self.inner.repeat(self.num_calls, 1),), 1


def test_payload_that_changes_its_shape_is_reported() -> None:
    assert_expected_inline(
        errors_of_check(ChangesItsPayload),
        """\
ExtensionError: check_all_gather_extension: ChangesItsPayload fails 1 check.
- refill: ChangesItsPayload.fsdp_pre_all_gather returned (float32 (10, 3)), expected (float32 (5,
3)) as in the first gather of the group. Return the same shapes and dtypes each time, because the
plan is made once. (First seen with shape (5, 3) on 1 rank, and 1 other case.)""",
    )


class AnswersOne(Wrapper):
    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> Any:
        return 1


def test_answer_that_is_no_bool_is_reported() -> None:
    assert_expected_inline(
        errors_of_check(AnswersOne),
        """\
ExtensionError: check_all_gather_extension: AnswersOne fails 1 check.
- payload: AnswersOne.fsdp_should_release_all_gather_outputs_after_post_all_gather returned a int,
expected a bool. (First seen with shape (5, 3) on 1 rank, and 1 other case.)""",
    )
