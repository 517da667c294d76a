"""Plans the owner and bucket of each matrix, and the cost of that: a pure function of shapes and placements.

Integers in, integers out: no torch, no process group. All members of a group compute the same plan, since it depends
on nothing that only one of them knows. Rule: each matrix has one owner and is in one bucket, and owners have similar
shares of each bucket.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from fsdp2.extras.checked import NOT_NEGATIVE, checked
from fsdp2.extras.sizes import text_of
from fsdp2.optim.matrices.regions import Placed
from fsdp2.optim.matrices.rules import Box, MatrixRule

Cost = Callable[[int, int], float]

_MOST_IMPROVEMENTS = 10_000  # each improves the assignment, so this only bounds the time


@checked(rows=NOT_NEGATIVE, columns=NOT_NEGATIVE)
def newton_schulz_cost(rows: int, columns: int) -> float:
    """Floating-point operations of five Newton-Schulz iterations on a matrix, which work on the shorter side."""
    short, long = sorted((rows, columns))
    return 5.0 * (4.0 * short * short * long + 2.0 * short**3)


@dataclass(frozen=True)
class PlannedTensor:
    """What the planner knows about a tensor. ``itemsize`` is the bytes of an element as it is sent."""

    name: str
    placed: Placed
    itemsize: int
    rule: MatrixRule


@dataclass(frozen=True)
class Matrix:
    """One matrix that is whole for a moment.

    Attributes:
        name: the name of its tensor, with an index if the tensor has several matrices.
        tensor: the position of its tensor among those that were given to ``whole_matrices``.
        box: its entries in the tensor.
        cost: the cost of the function, in any unit.
        placed: where its tensor lies.
        nbytes: its size as it is sent.
    """

    name: str
    tensor: int
    box: Box
    rows: int
    columns: int
    cost: float
    placed: Placed
    nbytes: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class Bucket:
    """Matrices that are sent together. ``of_owner`` lists positions by member; equal shapes are next to each other."""

    of_owner: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Traffic:
    """Bytes in one bucket, by member.

    Attributes:
        shards: bytes of shards that the member gives to owners, including itself.
        owned: bytes of the whole matrices that it owns.
        results: bytes of the results that come back to it.
        returned: bytes of the results that it gives to all holders, once for each copy of a tensor.
        sent: bytes that it sends to other members.
        across: bytes that it sends to members of other copies.
    """

    shards: tuple[int, ...]
    owned: tuple[int, ...]
    results: tuple[int, ...]
    returned: tuple[int, ...]
    sent: tuple[int, ...]
    across: tuple[int, ...]


@dataclass(frozen=True)
class GroupPlan:
    """Owners and buckets of the matrices on one process group of ``num_members``.

    Attributes:
        tensors: by position among all tensors, of which other groups have others.
        owners: by matrix, a member.
        before: the cost that each member has from plans of larger groups.
    """

    tensors: Mapping[int, PlannedTensor]
    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    num_members: int
    before: tuple[float, ...]

    @cached_property
    def loads(self) -> tuple[float, ...]:
        """The cost of what each member computes, with ``before``."""
        loads = list(self.before)
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            loads[owner] += matrix.cost
        return tuple(loads)

    @property
    def balance(self) -> float:
        """The largest load, divided by the mean; 1 is ideal, but a large matrix cannot be divided."""
        mean = sum(self.loads) / self.num_members
        return max(self.loads) / mean if mean else 1.0

    @property
    def distance_from_best(self) -> float:
        """The largest load, divided by a bound that no assignment of these matrices can be below."""
        bound = least_largest_load([matrix.cost for matrix in self.matrices], self.num_members, self.before)
        return max(self.loads) / bound if bound else 1.0

    @property
    def sent_nbytes(self) -> tuple[int, ...]:
        """Bytes that each member sends to others in a step: shards to owners, and results to holders."""
        return tuple(map(sum, zip(*(bucket.sent for bucket in self.traffic), strict=True)))

    @cached_property
    def traffic(self) -> tuple[Traffic, ...]:
        """The traffic of each bucket."""
        return tuple(map(self._traffic_of, self.buckets))

    def _traffic_of(self, bucket: Bucket) -> Traffic:
        shards, owned, results, returned, sent, across = ([0] * self.num_members for _ in range(6))
        for owner, matrices in enumerate(bucket.of_owner):
            for index in matrices:
                matrix = self.matrices[index]
                owned[owner] += matrix.nbytes
                copy = matrix.placed.copy_of(owner)
                for member, numel in matrix.placed.holders(matrix.box):
                    nbytes = numel * matrix.nbytes // matrix.numel
                    is_sender = matrix.placed.copy_of(member) == copy
                    results[member] += nbytes
                    returned[owner] += nbytes
                    shards[member] += nbytes if is_sender else 0
                    if member != owner:
                        sent[owner] += nbytes
                        sent[member] += nbytes if is_sender else 0
                        across[owner] += 0 if is_sender else nbytes
        return Traffic(*map(tuple, (shards, owned, results, returned, sent, across)))

    @property
    def temporary_nbytes(self) -> int:
        """Peak memory of messages and whole matrices on a member: received shards of the next bucket; those of this
        bucket, or its whole matrices and results; and results being sent back for this bucket or the previous one. Not
        counted are received results, which are kept to the end, and allocations of the function itself."""
        return max(map(self._temporary_nbytes_of, range(self.num_members)), default=0)

    def _temporary_nbytes_of(self, member: int) -> int:
        most = returned_before = 0
        for number, bucket in enumerate(self.traffic):
            after = self.traffic[number + 1] if number + 1 < len(self.traffic) else None
            arriving = after.shards[member] + after.owned[member] if after else 0
            owned, returned = bucket.owned[member], bucket.returned[member]
            held = max(max(bucket.shards[member], owned) + owned + returned_before, owned + returned)
            most, returned_before = max(most, arriving + held), returned
        return most

    @property
    def kept_nbytes(self) -> int:
        """The most bytes of results on any member. They are kept until all matrices have succeeded."""
        return max(map(sum, zip(*(each.results for each in self.traffic), strict=True)), default=0)

    def __str__(self) -> str:
        mean, most = sum(self.sent_nbytes) // self.num_members, max(self.sent_nbytes, default=0)
        return (
            f"{len(self.matrices)} matrices of {len(self.tensors)} tensors on {self.num_members} ranks, "
            f"{len(self.buckets)} bucket{'s' * (len(self.buckets) != 1)}\n"
            f"  largest share of the cost / mean: {self.balance:.3f} (best possible / this: "
            f"{1 / self.distance_from_best:.3f})\n"
            f"  sent per rank and step: mean {text_of(mean)}, most {text_of(most)}\n"
            f"  memory for a moment: {text_of(self.temporary_nbytes)}, and {text_of(self.kept_nbytes)} of results"
        )


def plan_matrices(
    tensors: Mapping[int, PlannedTensor],
    num_members: int,
    *,
    cost: Cost = newton_schulz_cost,
    bucket_nbytes: int,
    before: Sequence[float] = (),
    last_first: bool = False,
) -> GroupPlan:
    """Divide ``tensors`` into matrices, and assign an owner and a bucket to each matrix.

    The most expensive matrices come first. Each goes to the member with the least load; ties go to the member that has
    most of the matrix. A member that has at least half of a matrix gets it anyway, unless that would overload it. Then
    matrices of the busiest member are moved, or swapped with cheaper ones, as long as that helps.

    Args:
        cost: the cost of the function on a matrix of so many rows and columns.
        bucket_nbytes: the most memory that a bucket takes on a member, half of ``temporary_nbytes``. A matrix that
            takes more is alone on its owner.
        before: the load that each member has already.
        last_first: fill buckets with the last tensors first, in the order in which backward computes gradients; else
            with the most expensive matrices first, so that members' shares of a bucket match best.
    """
    matrices = matrices_of(tensors, cost)
    before = tuple(before) or (0.0,) * num_members
    bound = least_largest_load([matrix.cost for matrix in matrices], num_members, before)
    owners = _owners(matrices, before, bound)
    _improve(matrices, owners, before, bound)
    share_nbytes = bucket_nbytes * 2 // 5  # it exists as sent, received, stack, result and returned
    while True:
        buckets = _buckets(matrices, owners, num_members, share_nbytes, last_first)
        plan = GroupPlan(tensors, matrices, tuple(owners), buckets, num_members, before)
        are_single = all(len(share) <= 1 for bucket in buckets for share in bucket.of_owner)
        if are_single or plan.temporary_nbytes <= 2 * bucket_nbytes:
            return plan
        share_nbytes = share_nbytes * 2 // 3


def matrices_of(tensors: Mapping[int, PlannedTensor], cost: Cost) -> tuple[Matrix, ...]:
    """The matrices of all ``tensors``, in order, without empty ones."""
    found: list[Matrix] = []
    for position, tensor in tensors.items():
        for each in tensor.rule.boxes(tensor.placed.shape):
            rows, columns, name = each.rows, each.columns, f"{tensor.name}{each.label}"
            nbytes = rows * columns * tensor.itemsize
            if nbytes > 0:
                made = Matrix(name, position, each.box, rows, columns, cost(rows, columns), tensor.placed, nbytes)
                found.append(made)
    return tuple(found)


def least_largest_load(costs: Sequence[float], num_members: int, before: Sequence[float] = ()) -> float:
    """A lower bound on the load of the busiest of ``num_members``, for any assignment of matrices with ``costs``."""
    costs = sorted(costs, reverse=True)
    bounds = [(sum(costs) + sum(before)) / num_members, *before]
    for start in range(0, len(costs), num_members):  # some member has k + 1 of the first k * num_members + 1
        taken = start // num_members + 1
        bounds.append(sum(costs[start + 1 - taken : start + 1]))
    low, high = max(bounds), 2 * max(bounds)
    numbers = Counter(costs)
    for _ in range(40):  # a load that needs more members than there are is too low
        middle = (low + high) / 2
        if _least_members(numbers, middle) > num_members:
            low = middle
        else:
            high = middle
    return low


def _least_members(numbers: Counter[float], load: float) -> int:
    """The least number of members needed if no member's load exceeds ``load`` (bound L2 of Martello and Toth, 1990).
    ``numbers`` counts the matrices of each cost."""
    found = 0
    for smallest in [0.0, *(cost for cost in numbers if cost <= load / 2)]:
        alone = sum(number for cost, number in numbers.items() if cost > load - smallest)
        large = {cost: number for cost, number in numbers.items() if load / 2 < cost <= load - smallest}
        space = sum(number * (load - cost) for cost, number in large.items())
        small = sum(number * cost for cost, number in numbers.items() if smallest <= cost <= load / 2)
        more = math.ceil((small - space) / load - 1e-9) if load else 0
        found = max(found, alone + sum(large.values()) + max(more, 0))
    return found


def _owners(matrices: Sequence[Matrix], before: Sequence[float], bound: float) -> list[int]:
    owners = [0] * len(matrices)
    loads = list(before)
    for index in sorted(range(len(matrices)), key=lambda index: (-matrices[index].cost, index)):
        matrix = matrices[index]
        holders = matrix.placed.holders(matrix.box)
        most, owner = max((numel, -member) for member, numel in holders)
        owner = -owner
        if 2 * most < matrix.numel or loads[owner] + matrix.cost > bound:
            least = min(loads)
            near = [(numel, -member) for member, numel in holders if loads[member] == least]
            owner = -max(near)[1] if near else loads.index(least)
        owners[index] = owner
        loads[owner] += matrix.cost
    return owners


def _improve(matrices: Sequence[Matrix], owners: list[int], before: Sequence[float], bound: float) -> None:
    """Relieve the busiest member until the optimum is reached or no move of its matrices helps. Writes ``owners``."""
    loads = list(before)
    for matrix, owner in zip(matrices, owners, strict=True):
        loads[owner] += matrix.cost
    for _ in range(_MOST_IMPROVEMENTS):
        busiest = max(range(len(loads)), key=lambda member: (loads[member], -member))
        if loads[busiest] <= bound * 1.001 or not _relieve(busiest, matrices, owners, loads):
            return


def _relieve(busiest: int, matrices: Sequence[Matrix], owners: list[int], loads: list[float]) -> bool:
    """Move one matrix of ``busiest`` to another member, perhaps in exchange for a cheaper one, so that both end up with
    less load than ``busiest`` had. Returns whether there is such a matrix."""
    cheapest_first: dict[tuple[int, float], int] = {}  # one matrix per owner and cost
    for index, (matrix, owner) in enumerate(zip(matrices, owners, strict=True)):
        cheapest_first.setdefault((owner, matrix.cost), index)
    mine = [(cost, index) for (owner, cost), index in cheapest_first.items() if owner == busiest]
    others = [(owner, cost, index) for (owner, cost), index in cheapest_first.items() if owner != busiest]
    others += [(member, 0.0, -1) for member in range(len(loads)) if member != busiest]
    best: tuple[float, float, int, int, int] | None = None
    for cost, index in mine:
        for owner, other_cost, other in others:
            moved = cost - other_cost
            peak = max(loads[busiest] - moved, loads[owner] + moved)
            if peak < loads[busiest] * (1 - 1e-9) and moved > 0 and (best is None or peak < best[0]):
                best = peak, moved, index, owner, other
    if best is None:
        return False
    _, moved, index, owner, other = best
    owners[index] = owner
    if other >= 0:
        owners[other] = busiest
    loads[busiest] -= moved
    loads[owner] += moved
    return True


def _buckets(
    matrices: Sequence[Matrix], owners: Sequence[int], num_members: int, share_nbytes: int, last_first: bool
) -> tuple[Bucket, ...]:
    """Fill the buckets: each owner fills its share of one bucket, then that of the next."""

    def dearest_first(index: int) -> tuple[float, int, int, int]:
        matrix = matrices[index]
        return -matrix.cost, matrix.rows, matrix.columns, index

    shares: list[list[list[int]]] = [[] for _ in range(num_members)]
    left = [0] * num_members
    order = range(len(matrices))
    for index in reversed(order) if last_first else sorted(order, key=dearest_first):
        owner, nbytes = owners[index], matrices[index].nbytes
        if not shares[owner] or nbytes > left[owner]:
            shares[owner].append([])
            left[owner] = share_nbytes
        shares[owner][-1].append(index)
        left[owner] -= nbytes
    return tuple(
        Bucket(tuple(tuple(sorted(share, key=dearest_first)) for share in of_owner))
        for of_owner in zip_longest(*shares, fillvalue=[])
    )
