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
from functools import cached_property
from itertools import groupby

from fsdp2.optim.matrices.planner import Bucket, GroupPlan, Matrix
from fsdp2.optim.matrices.rules import Box

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Slot:
    """A place in a message for the entries ``slices`` of a tensor of shape ``whole``: of this member's shard of the
    tensor at position ``of``; or of stack number ``of``, whose matrices have the shape of their box: ``[n, *box]``."""

    of: int
    whole: tuple[int, ...]
    slices: Slices
    offset: int = 0

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(each.stop - each.start for each in self.slices)

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_all(self) -> bool:
        """Whether the slot holds the whole tensor."""
        return self.shape == self.whole

    def joined(self, after: Slot) -> Slot | None:
        """One slot for both, if the entries of ``after``, the next slot, follow those of this one, such as the rows of
        a matrix, or experts."""
        if (self.of, self.whole) != (after.of, after.whole):
            return None
        differ = [dim for dim, mine in enumerate(self.slices) if mine != after.slices[dim]]
        if len(differ) != 1:
            return None
        (dim,) = differ
        mine, its = self.slices[dim], after.slices[dim]
        if mine.stop != its.start or math.prod(self.shape[:dim]) != 1:
            return None
        return replace(self, slices=(*self.slices[:dim], slice(mine.start, its.stop), *self.slices[dim + 1 :]))


@dataclass(frozen=True)
class MessageLayout:
    """The slots of a message, one after another, and how many elements go to or come from each member."""

    slots: tuple[Slot, ...]
    sizes: list[int]

    @property
    def is_one_tensor(self) -> bool:
        """Whether the message is laid out like a single tensor, so that nothing needs to be copied."""
        return len(self.slots) == 1 and self.slots[0].is_all


@dataclass(frozen=True)
class BucketMessages:
    """The messages of one bucket, as one member sees them: the shards that it gives to owners, the shards that arrive
    for its ``stacks``, the results of these that are returned, and the results for its shards. A stack has all matrices
    of one shape that the member owns."""

    stacks: tuple[tuple[Matrix, ...], ...]
    given: MessageLayout
    arriving: MessageLayout
    returned: MessageLayout
    results: MessageLayout


def messages_of(plan: GroupPlan, bucket: Bucket, me: int) -> BucketMessages:
    """The messages of ``bucket`` for the member ``me``."""
    owned_by = [[plan.matrices[index] for index in owned] for owned in bucket.of_owner]
    stacks = tuple(tuple(each) for _, each in groupby(owned_by[me], key=lambda matrix: (matrix.rows, matrix.columns)))

    def of_shards(*, of_all_copies: bool) -> MessageLayout:
        return _in_a_row(_shard_slots(owned, me, owner, of_all_copies) for owner, owned in enumerate(owned_by))

    def of_stacks(*, of_all_copies: bool) -> MessageLayout:
        return _in_a_row(_stack_slots(stacks, me, member, of_all_copies) for member in range(plan.num_members))

    return BucketMessages(
        stacks,
        given=of_shards(of_all_copies=False),
        arriving=of_stacks(of_all_copies=False),
        returned=of_stacks(of_all_copies=True),
        results=of_shards(of_all_copies=True),
    )


def _in_a_row(parts: Iterable[Iterable[Slot]]) -> MessageLayout:
    """Give slots their offsets, one after another, and merge them where possible. ``parts`` has the slots for each
    other member."""
    slots: list[Slot] = []
    sizes: list[int] = []
    end = 0
    for part in parts:
        start = end
        for slot in part:
            placed = replace(slot, offset=end)
            end += slot.numel
            while slots and (joined := slots[-1].joined(placed)) is not None:
                slots.pop()
                placed = joined
            slots.append(placed)
        sizes.append(end - start)
    return MessageLayout(tuple(slots), sizes)


def _shard_slots(owned: Iterable[Matrix], me: int, owner: int, of_all_copies: bool) -> Iterator[Slot]:
    """What ``me`` sends to ``owner``; with ``of_all_copies``, what ``owner`` sends back. Offsets are not known yet."""
    for matrix in owned:
        placed = matrix.placed
        if of_all_copies or placed.copy_of(me) == placed.copy_of(owner):
            for piece in placed.pieces(me, matrix.box):
                yield Slot(matrix.tensor, placed.local_shape(me), slices_of(piece.local))


def _stack_slots(stacks: Iterable[Sequence[Matrix]], me: int, member: int, of_all_copies: bool) -> Iterator[Slot]:
    """What ``me``, the owner, receives from ``member``; with ``of_all_copies``, what ``me`` returns to it."""
    for number, stack in enumerate(stacks):
        for index, matrix in enumerate(stack):
            placed = matrix.placed
            if of_all_copies or placed.copy_of(me) == placed.copy_of(member):
                whole = (len(stack), *(stop - start for start, stop in matrix.box))
                for piece in placed.pieces(member, matrix.box):
                    yield Slot(number, whole, (slice(index, index + 1), *slices_of(piece.inside)))


def slices_of(box: Box) -> Slices:
    return tuple(slice(*interval) for interval in box)
