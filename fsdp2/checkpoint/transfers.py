"""Which entries of a tensor each rank sends to each other rank when the tensor's shards move to different ranks.

Integers in, integers out: no torch, no process group. Entries are those along the sharded dim. Rule: each rank of the
new cut gets each entry of its new shard exactly once, from itself if it had it, otherwise from a rank that had it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fsdp2.core import plans


@dataclass(frozen=True)
class Cut:
    """A tensor that is cut along one dim. ``ranks[i][j]`` is the rank that holds shard j in replica i."""

    layout: plans.Layout
    ranks: tuple[tuple[int, ...], ...]

    def interval_of(self, rank: int) -> tuple[int, int]:
        """The entries that ``rank`` holds; empty if it holds none."""
        shard = next((row.index(rank) for row in self.ranks if rank in row), None)
        return (0, 0) if shard is None else self.layout.interval(shard)


class Transfer(NamedTuple):
    """The entries from ``start`` to ``stop``, from ``source`` to ``target``, which may be the same rank."""

    source: int
    target: int
    start: int
    stop: int


def transfers(before: Cut, after: Cut) -> list[Transfer]:
    """The transfers that lead from ``before`` to ``after``, in the same order on all ranks."""
    return [each for i, row in enumerate(after.ranks) for j in range(len(row)) for each in _to(before, after, i, j)]


def _to(before: Cut, after: Cut, replica: int, shard: int) -> Iterator[Transfer]:
    """The transfers that shard ``shard`` in ``replica`` of ``after`` needs."""
    target, (start, stop) = after.ranks[replica][shard], after.layout.interval(shard)
    while start < stop:
        piece = start // before.layout.chunk_size
        end = min(stop, before.layout.interval(piece)[1])
        holders = [row[piece] for row in before.ranks]
        # Replicas of the old cut share the work.
        source = target if target in holders else holders[(replica * len(after.ranks[0]) + shard) % len(holders)]
        yield Transfer(source, target, start, end)
        start = end
