"""What one member sends and receives for one bucket: offsets in flat messages, decided once.

Integers in, integers out: no torch. There are four messages: shards sent to owners and received there, results sent to
all holders and received there. Rule: elements sent to another member lie in the order in which that member reads them:
by owner, then by matrix in the order of the bucket, then by piece. Offsets and sizes are in elements. Each side merges
neighbouring slots on its own, which changes no byte of a message.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from fsdp2.optim.matrices.planner import Bucket, GroupPlan
from fsdp2.optim.matrices.regions import Piece
from fsdp2.optim.matrices.rules import Box

Slices = tuple[slice, ...]
_Part = tuple[int, tuple[Any, ...]]  # number of elements, or an offset; and the rest of a slot


@dataclass(frozen=True)
class ShardSlot:
    """A place in a message for entries of this member's shard of ``tensor``. ``is_all``: it holds the whole shard."""

    offset: int
    shape: tuple[int, ...]
    tensor: int
    slices: Slices
    is_all: bool


@dataclass(frozen=True)
class MatrixSlot:
    """A place in a message for entries of the matrix ``index`` of ``stack``, viewed as ``box_shape``; or for
    ``count`` whole matrices starting at ``index``, of shape ``[count, rows, columns]``."""

    offset: int
    shape: tuple[int, ...]
    stack: int
    index: int
    box_shape: tuple[int, ...]
    slices: Slices
    count: int = 1


@dataclass(frozen=True)
class Stack:
    """Matrices of equal shape that this member owns. ``matrices`` are their positions in the plan."""

    rows: int
    columns: int
    matrices: tuple[int, ...]


@dataclass(frozen=True)
class BucketMessages:
    """The messages of one bucket, as one member sees them. Sizes are listed per other member.

    With ``arrives_whole``, the received message is laid out like the stacks, one after another; with ``returns_whole``,
    the returned message is. Then nothing needs to be copied, as with a single matrix that is sharded by rows.
    """

    stacks: tuple[Stack, ...]
    given: tuple[ShardSlot, ...]
    given_sizes: list[int]
    arriving: tuple[MatrixSlot, ...]
    arriving_sizes: list[int]
    returned: tuple[MatrixSlot, ...]
    returned_sizes: list[int]
    results: tuple[ShardSlot, ...]
    results_sizes: list[int]
    arrives_whole: bool
    returns_whole: bool


def messages_of(plan: GroupPlan, bucket: Bucket, me: int) -> BucketMessages:
    """The messages of ``bucket`` for the member ``me``."""
    members = range(plan.num_members)
    owned = bucket.of_owner[me]
    stacks = tuple(
        Stack(rows, columns, tuple(group))
        for (rows, columns), group in groupby(owned, key=lambda i: (plan.matrices[i].rows, plan.matrices[i].columns))
    )
    given, results = (
        _Message(_shard_slots(plan, bucket, me, owner, of_all_copies=of_all) for owner in members)
        for of_all in (False, True)
    )
    arriving, returned = (
        _Message(_matrix_slots(plan, stacks, me, member, of_all_copies=of_all) for member in members)
        for of_all in (False, True)
    )
    arriving_slots, returned_slots = (
        _joined_matrices(stacks, [MatrixSlot(offset, *slot) for offset, slot in each.slots])
        for each in (arriving, returned)
    )
    return BucketMessages(
        stacks,
        _joined_shards(plan, me, [ShardSlot(offset, *slot) for offset, slot in given.slots]),
        given.sizes,
        arriving_slots,
        arriving.sizes,
        returned_slots,
        returned.sizes,
        _joined_shards(plan, me, [ShardSlot(offset, *slot) for offset, slot in results.slots]),
        results.sizes,
        arrives_whole=_lie_as_stacks(stacks, arriving_slots),
        returns_whole=_lie_as_stacks(stacks, returned_slots),
    )


def _lie_as_stacks(stacks: Sequence[Stack], slots: Sequence[MatrixSlot]) -> bool:
    """Whether each slot has the same place in the message as in the memory of ``stacks``, one after another."""
    sizes = [stack.rows * stack.columns for stack in stacks]
    totals = [size * len(stack.matrices) for size, stack in zip(sizes, stacks, strict=True)]
    starts = [sum(totals[:number]) for number in range(len(stacks))]
    covered = sum(math.prod(slot.shape) for slot in slots)
    return covered == sum(totals) and all(
        _is_contiguous(slot) and starts[slot.stack] + slot.index * sizes[slot.stack] + _start(slot) == slot.offset
        for slot in slots
    )


def _is_contiguous(slot: MatrixSlot) -> bool:
    """Whether the entries are contiguous in the matrix: only the first dim with several entries is cut."""
    if slot.count > 1:
        return True
    dims = [number for number, size in enumerate(slot.box_shape) if size > 1]
    return all(slot.shape[dim] == slot.box_shape[dim] for dim in dims[1:])


def _start(slot: MatrixSlot) -> int:
    """Where the first entry lies in the matrix."""
    start = 0
    for size, along in zip(slot.box_shape, slot.slices, strict=True):
        start = start * size + along.start
    return 0 if slot.count > 1 else start


def _joined_shards(plan: GroupPlan, me: int, slots: Sequence[ShardSlot]) -> tuple[ShardSlot, ...]:
    """Merge ``slots`` with consecutive rows of one shard, such as experts, into one slot."""
    found: list[ShardSlot] = []
    for slot in slots:
        last = found[-1] if found else None
        if last is not None and (last.tensor, last.slices[1:]) == (slot.tensor, slot.slices[1:]):
            first, second = last.slices[0], slot.slices[0]
            if first.stop == second.start and last.offset + math.prod(last.shape) == slot.offset:
                shape = (last.shape[0] + slot.shape[0], *slot.shape[1:])
                slices = (slice(first.start, second.stop), *slot.slices[1:])
                is_all = shape == plan.tensors[slot.tensor].placed.local_shape(me)
                found[-1] = ShardSlot(last.offset, shape, slot.tensor, slices, is_all)
                continue
        found.append(slot)
    return tuple(found)


def _joined_matrices(stacks: Sequence[Stack], slots: Sequence[MatrixSlot]) -> tuple[MatrixSlot, ...]:
    """Merge ``slots`` with consecutive whole matrices of one stack into one slot."""
    found: list[MatrixSlot] = []
    for slot in slots:
        stack = stacks[slot.stack]
        size = stack.rows * stack.columns
        last = found[-1] if found else None
        if last is not None and math.prod(slot.shape) == size and math.prod(last.shape) == last.count * size:
            is_next = last.stack == slot.stack and last.index + last.count == slot.index
            if is_next and last.offset + last.count * size == slot.offset:
                count = last.count + 1
                shape = (count, stack.rows, stack.columns)
                found[-1] = replace(last, shape=shape, count=count)
                continue
        found.append(slot)
    return tuple(found)


class _Message:
    """Consecutive slots. ``parts`` has, for each other member, the number of elements and the rest of each slot."""

    def __init__(self, parts: Iterable[Iterable[_Part]]) -> None:
        self.slots: list[_Part] = []
        self.sizes: list[int] = []
        end = 0
        for part in parts:
            start = end
            for numel, slot in part:
                self.slots.append((end, slot))
                end += numel
            self.sizes.append(end - start)


def _shard_slots(plan: GroupPlan, bucket: Bucket, me: int, owner: int, *, of_all_copies: bool) -> Iterator[_Part]:
    """What ``me`` sends to ``owner``; with ``of_all_copies``, what ``owner`` sends back."""
    for index in bucket.of_owner[owner]:
        tensor = plan.matrices[index].tensor
        placed = plan.tensors[tensor].placed
        if of_all_copies or placed.copy_of(me) == placed.copy_of(owner):
            local_shape = placed.local_shape(me)
            for piece in placed.pieces(me, plan.matrices[index].box):
                yield piece.numel, (piece.shape, tensor, _slices(piece.local), piece.shape == local_shape)


def _matrix_slots(
    plan: GroupPlan, stacks: tuple[Stack, ...], me: int, member: int, *, of_all_copies: bool
) -> Iterator[_Part]:
    """What ``me``, the owner, receives from ``member``; with ``of_all_copies``, what ``me`` returns to it."""
    for number, stack in enumerate(stacks):
        for position, index in enumerate(stack.matrices):
            matrix = plan.matrices[index]
            placed = plan.tensors[matrix.tensor].placed
            if of_all_copies or placed.copy_of(me) == placed.copy_of(member):
                box_shape = tuple(stop - start for start, stop in matrix.box)
                for piece in placed.pieces(member, matrix.box):
                    yield piece.numel, (piece.shape, number, position, box_shape, _slices(piece.inside))


def local_pieces(plan: GroupPlan, me: int, index: int) -> tuple[Piece, ...]:
    """What ``me`` has of the matrix ``index``."""
    matrix = plan.matrices[index]
    return plan.tensors[matrix.tensor].placed.pieces(me, matrix.box)


def _slices(box: Box) -> Slices:
    return tuple(slice(*interval) for interval in box)
