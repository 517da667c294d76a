"""What goes wrong in pre-hooks: each error as text, on every rank, and that the model works once it is mended."""

from __future__ import annotations

from typing import Any

from expecttest import assert_expected_inline
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2.tensors.wrapper import WrapperTensor
from tests.distributed.faulty import (
    LATER_PRE,
    PRE,
    Faulty,
    error_of_one,
    error_on_all,
)


def _returns_a_list(self: Faulty, mesh: DeviceMesh) -> Any:
    return [self.plain], None


def test_payload_in_a_list() -> None:
    assert_expected_inline(
        error_on_all(PRE, _returns_a_list),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather returned a list of 1
as the tensors, expected a tuple of tensors.""",
    )


def _returns_no_pair(self: Faulty, mesh: DeviceMesh) -> Any:
    return self.plain


def test_payload_without_metadata() -> None:
    assert_expected_inline(
        error_on_all(PRE, _returns_no_pair),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather returned a Tensor of
shape (16, 32), expected (tuple of tensors, metadata).""",
    )


def _returns_a_number(self: Faulty, mesh: DeviceMesh) -> Any:
    return (self.plain, 3), None


def test_payload_with_a_number() -> None:
    assert_expected_inline(
        error_on_all(PRE, _returns_a_number),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather returned a int to be
gathered, expected tensors of this rank.""",
    )


def _returns_a_dtensor(self: Faulty, mesh: DeviceMesh) -> Any:
    return (DTensor.from_local(self.plain, mesh),), None


def test_payload_of_a_tensor_of_all_ranks() -> None:
    assert_expected_inline(
        error_on_all(PRE, _returns_a_dtensor),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather returned a DTensor of
shape (16, 32) to be gathered, expected tensors of this rank.""",
    )


class Packed(WrapperTensor):
    """Half as many inner elements as it shows."""

    plain: Tensor
    _INNER = ("plain",)

    def __new__(cls, plain: Tensor) -> Packed:
        return cls._of(plain, shape=(plain.size(0), 2 * plain.size(1)))


def _returns_a_packed_tensor(self: Faulty, mesh: DeviceMesh) -> Any:
    return (Packed(self.plain),), None


def test_payload_of_a_wrapper_around_another_shape() -> None:
    assert_expected_inline(
        error_on_all(PRE, _returns_a_packed_tensor),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather returned a Packed of
shape (16, 64), which has inner tensors of other shapes. Return the inner tensors, and wrap them in
fsdp_post_all_gather.""",
    )


def _returns_a_meta_tensor(self: Faulty, mesh: DeviceMesh) -> Any:
    return (self.plain.to("meta"),), None


def test_payload_on_another_device() -> None:
    assert_expected_inline(
        error_on_all(PRE, _returns_a_meta_tensor),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather returned a tensor on
meta, expected cpu.""",
    )


def _returns_every_other_column(self: Faulty, mesh: DeviceMesh) -> Any:
    return (self.plain[:, ::2],), None


def test_payload_that_is_not_contiguous() -> None:
    assert_expected_inline(
        error_on_all(PRE, _returns_every_other_column),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather returned a Tensor of
shape (16, 16) with strides (32, 2), expected contiguous tensors. Call .contiguous().""",
    )


def _pre_raises(self: Faulty, mesh: DeviceMesh) -> Any:
    raise ValueError("this shard is not to my liking")


def test_pre_hook_that_raises() -> None:
    assert_expected_inline(
        error_on_all(PRE, _pre_raises),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather raised ValueError:
this shard is not to my liking.""",
    )


def test_pre_hook_that_raises_on_one_rank() -> None:
    assert_expected_inline(
        error_of_one(1, PRE, _pre_raises),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather raised ValueError:
this shard is not to my liking.""",
    )


def test_pre_hook_that_raises_on_one_replica() -> None:
    assert_expected_inline(
        error_of_one(3, PRE, _pre_raises, world_size=4, replicas=2),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather raised ValueError:
this shard is not to my liking.""",
    )


def _returns_two(self: Faulty, mesh: DeviceMesh) -> Any:
    return (self.plain, self.plain), None


def test_more_tensors_on_one_rank() -> None:
    assert_expected_inline(
        error_on_all(PRE, _returns_two, on_rank=1),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather returned tensors of
(torch.float32,) on the first rank, but of (torch.float32, torch.float32) on rank 1 of the shard
axis. Return the same dtypes on all ranks.""",
    )


def _returns_halves(self: Faulty, mesh: DeviceMesh) -> Any:
    return (self.plain.half(),), None


def test_another_dtype_on_one_rank() -> None:
    assert_expected_inline(
        error_on_all(PRE, _returns_halves, on_rank=2, world_size=4),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather returned tensors of
(torch.float32,) on the first rank, but of (torch.float16,) on rank 2 of the shard axis. Return the
same dtypes on all ranks.""",
    )


def _returns_fewer_columns(self: Faulty, mesh: DeviceMesh) -> Any:
    return (self.plain[:, 1:].contiguous(),), None


def test_shape_on_one_rank_that_does_not_fit() -> None:
    assert_expected_inline(
        error_on_all(PRE, _returns_fewer_columns, on_rank=2, world_size=4),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather returned tensors that
cannot be joined over the ranks: shapes [(8, 31), (8, 32)] differ in more than dim 0. Return equal
other dims.""",
    )


def test_other_payload_on_one_replica() -> None:
    assert_expected_inline(
        error_on_all(PRE, _returns_halves, on_rank=3, world_size=4, replicas=2),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': fsdp_pre_all_gather returned torch.float32 (16,
32) on one replica and torch.float16 (16, 32) on another replica. Replicas hold the same shards.
Return the same shapes and dtypes on all replicas.""",
    )


def _wants_a_rank(self: Faulty, mesh: DeviceMesh, rank: int) -> Any:
    raise NotImplementedError


def test_pre_hook_with_another_signature() -> None:
    assert_expected_inline(
        error_on_all(PRE, _wants_a_rank),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather has the signature
(mesh: 'DeviceMesh', rank: 'int') -> 'Any', expected (self, mesh) or (self, mesh, outer_size,
outer_stride, module, mp_policy).""",
    )


def test_missing_pre_hook() -> None:
    assert_expected_inline(
        error_on_all(PRE, None),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather is not defined: the
class defines only fsdp_post_all_gather. Define both hooks, or list the parameter in ignored_params.""",
    )


def test_payload_that_changes_in_a_later_step() -> None:
    assert_expected_inline(
        error_on_all(LATER_PRE, _returns_fewer_columns, after=2),
        """\
ExtensionError: parameter 'blocks.1.linear.weight': Faulty.fsdp_pre_all_gather returned (float32
(16, 31)), expected (float32 (16, 32)) as in the first gather of the group. Return the same shapes
and dtypes each time, because the plan is made once.""",
    )
