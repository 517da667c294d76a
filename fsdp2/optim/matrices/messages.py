"""What one member sends and receives for one bucket: offsets in flat messages, decided once.

Integers in, integers out: no torch. There are four messages: shards sent to owners and received there, results sent to
all holders and received there. Rule: elements sent to another member lie in the order in which that member reads them:
by owner, then by matrix in the order of the bucket, then by piece. Offsets and sizes are in elements. Each side merges
neighbouring slots on its own, which changes no byte of a message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TypeVar

from fsdp2.optim.matrices.planner import Bucket, GroupPlan
from fsdp2.optim.matrices.regions import Piece
from fsdp2.optim.matrices.rules import Box

Slices = tuple[slice, ...]


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


S = TypeVar("S", ShardSlot, MatrixSlot)


def messages_of(plan: GroupPlan, bucket: Bucket, me: int) -> BucketMessages:
    """The messages of ``bucket`` for the member ``me``."""
    members = range(plan.num_members)
    owned = bucket.of_owner[me]
    stacks = tuple(
        Stack(rows, columns, tuple(group))
        for (rows, columns), group in groupby(owned, key=lambda i: (plan.matrices[i].rows, plan.matrices[i].columns))
    )

    def shard_slots(*, of_all_copies: bool) -> tuple[tuple[ShardSlot, ...], list[int]]:
        each = (_shard_slots(plan, bucket, me, owner, of_all_copies=of_all_copies) for owner in members)
        return _in_a_row(each, partial(_joined_shards, plan, me))

    def matrix_slots(*, of_all_copies: bool) -> tuple[tuple[MatrixSlot, ...], list[int]]:
        each = (_matrix_slots(plan, stacks, me, member, of_all_copies=of_all_copies) for member in members)
        return _in_a_row(each, partial(_joined_matrices, stacks))

    arriving, arriving_sizes = matrix_slots(of_all_copies=False)
    returned, returned_sizes = matrix_slots(of_all_copies=True)
    return BucketMessages(
        stacks,
        *shard_slots(of_all_copies=False),
        arriving,
        arriving_sizes,
        returned,
        returned_sizes,
        *shard_slots(of_all_copies=True),
        arrives_whole=_lie_as_stacks(stacks, arriving),
        returns_whole=_lie_as_stacks(stacks, returned),
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


def _in_a_row(parts: Iterable[Iterable[S]], joined: Callable[[S, S], S | None]) -> tuple[tuple[S, ...], list[int]]:
    """Give slots their offsets, one after another, and merge neighbours where ``joined`` can. ``parts`` has the slots
    for each other member; also returns the number of elements for each."""
    slots: list[S] = []
    sizes: list[int] = []
    end = 0
    for part in parts:
        start = end
        for slot in part:
            placed = replace(slot, offset=end)
            end += math.prod(slot.shape)
            merged = joined(slots[-1], placed) if slots else None
            if merged is None:
                slots.append(placed)
            else:
                slots[-1] = merged
        sizes.append(end - start)
    return tuple(slots), sizes


def _joined_shards(plan: GroupPlan, me: int, last: ShardSlot, slot: ShardSlot) -> ShardSlot | None:
    """One slot for both if they have consecutive rows of one shard, such as experts."""
    first, second = last.slices[0], slot.slices[0]
    if first.stop != second.start or (last.tensor, last.slices[1:]) != (slot.tensor, slot.slices[1:]):
        return None
    shape = (last.shape[0] + slot.shape[0], *slot.shape[1:])
    slices = (slice(first.start, second.stop), *slot.slices[1:])
    return ShardSlot(last.offset, shape, slot.tensor, slices, shape == plan.tensors[slot.tensor].placed.local_shape(me))


def _joined_matrices(stacks: Sequence[Stack], last: MatrixSlot, slot: MatrixSlot) -> MatrixSlot | None:
    """One slot for both if they have consecutive whole matrices of one stack."""
    stack = stacks[slot.stack]
    size = stack.rows * stack.columns
    are_whole = math.prod(slot.shape) == size and math.prod(last.shape) == last.count * size
    if not are_whole or (last.stack, last.index + last.count) != (slot.stack, slot.index):
        return None
    count = last.count + 1
    return replace(last, shape=(count, stack.rows, stack.columns), count=count)


def _shard_slots(plan: GroupPlan, bucket: Bucket, me: int, owner: int, *, of_all_copies: bool) -> Iterator[ShardSlot]:
    """What ``me`` sends to ``owner``; with ``of_all_copies``, what ``owner`` sends back. Offsets are not known yet."""
    for index in bucket.of_owner[owner]:
        tensor = plan.matrices[index].tensor
        placed = plan.tensors[tensor].placed
        if of_all_copies or placed.copy_of(me) == placed.copy_of(owner):
            for piece in local_pieces(plan, me, index):
                is_all = piece.shape == placed.local_shape(me)
                yield ShardSlot(0, piece.shape, tensor, _slices(piece.local), is_all)


def _matrix_slots(
    plan: GroupPlan, stacks: Sequence[Stack], me: int, member: int, *, of_all_copies: bool
) -> Iterator[MatrixSlot]:
    """What ``me``, the owner, receives from ``member``; with ``of_all_copies``, what ``me`` returns to it."""
    for number, stack in enumerate(stacks):
        for position, index in enumerate(stack.matrices):
            matrix = plan.matrices[index]
            placed = plan.tensors[matrix.tensor].placed
            if of_all_copies or placed.copy_of(me) == placed.copy_of(member):
                box_shape = tuple(stop - start for start, stop in matrix.box)
                for piece in local_pieces(plan, member, index):
                    yield MatrixSlot(0, piece.shape, number, position, box_shape, _slices(piece.inside))


def local_pieces(plan: GroupPlan, me: int, index: int) -> tuple[Piece, ...]:
    """What ``me`` has of the matrix ``index``."""
    matrix = plan.matrices[index]
    return plan.tensors[matrix.tensor].placed.pieces(me, matrix.box)


def _slices(box: Box) -> Slices:
    return tuple(slice(*interval) for interval in box)
