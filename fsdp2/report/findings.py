"""What to change first, and how much shorter the step may become: rules applied to measurements.

Plain values in, plain values out; times in milliseconds, sizes in bytes. Rule: a gain is a part of the time that the
step has lost, and no two findings gain the same part. Changes that are known to help come first; what remains of a
kind of loss becomes a separate finding.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fsdp2.extras.output import listed
from fsdp2.report.figures import ms_text
from fsdp2.report.lost import Cell, Lost

MAX_CHANGES = 5
MIN_SAMPLES = 5  # to tell a slow rank from chance: of two equal ranks, one is slowest in all once in 16 times
_MIN_GAIN = 0.005  # of the step; less is noise
_MIN_LOSS = 0.001  # of the step; less is not reported
_LARGE = 2.0  # times the median unit
_MIB = 2**20


@dataclass(frozen=True)
class UnitInfo:
    """What plans say about one unit, in bytes. ``gather`` and ``reduce`` count all ranks' parts, by how they are sent.

    Attributes:
        largest_module_nbytes: unsharded parameters of the module that holds most, which cannot be split.
        is_small: its shard is sent in one bucket.
        bucket_nbytes: unsharded parameters of fewer bytes are sent in one bucket.
        keeps_after_forward: its parameters stay unsharded after forward.
        dtype: the dtype, or dtypes, that it computes in.
    """

    name: str
    shard_nbytes: int = 0
    unsharded_nbytes: int = 0
    held_nbytes: int = 0
    gather_direct_nbytes: int = 0
    gather_bucket_nbytes: int = 0
    reduce_direct_nbytes: int = 0
    reduce_bucket_nbytes: int = 0
    largest_module_nbytes: int = 0
    is_small: bool = False
    bucket_nbytes: int = 0
    keeps_after_forward: bool = False
    replicas: int = 1
    dtype: str = ""


@dataclass(frozen=True)
class UnitFacts(UnitInfo):
    """One unit in the measured step. Lost times are the least of all ranks, which is the cost of the unit itself,
    without waiting for a late rank.

    Attributes:
        is_root: the other units are inside it.
        forward_late, backward_late: how long compute waited for its gathers.
        forward_idle, backward_idle: how long nothing was gathered before a gather that was not prefetched started; 0
            for the first one of a pass.
        reduce_late: how long compute waited for its reduction inside backward.
        tail_late: the same, after the last compute of backward.
        per_use: the thread time that all its collectives take, late or not.
    """

    is_root: bool = False
    gather: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    forward_late: float = 0.0
    backward_late: float = 0.0
    forward_idle: float = 0.0
    backward_idle: float = 0.0
    reduce_late: float = 0.0
    tail_late: float = 0.0
    per_use: float = 0.0


@dataclass(frozen=True)
class StepFacts:
    """The measured step. ``units`` are in forward order. ``rank_compute`` has each rank's compute time in each recorded
    step, ``rank_waits`` each rank's wait for all collectives. ``reduce_idle`` is how long no gradients were reduced
    during backward. ``host_late`` is how long no operation ran in forward and backward, if torch.profiler ran.
    ``free_nbytes`` is the device memory that nothing used; None if unknown. ``lost`` divides the time in which
    ``loser``, the rank that loses most, did not compute. ``is_first_use``: the first recorded step is not among the
    steps, since it made plans. ``ranks`` are the names of the ranks; ``latest`` is the one whose late starts of
    collectives took others the most time. Times are known to so many ``digits``."""

    step: float
    units: Sequence[UnitFacts]
    rank_compute: Sequence[Sequence[float]] = ()
    rank_waits: Sequence[float] = ()
    reduce_idle: float = 0.0
    host_late: float = 0.0
    free_nbytes: int | None = None
    lost: Mapping[Cell, float] = field(default_factory=dict)
    is_first_use: bool = False
    ranks: Sequence[int] = ()
    loser: int = 0
    latest: int | None = None
    digits: int = 3

    def ms(self, value: float) -> str:
        """A time in a text."""
        return ms_text(value, self.digits)


@dataclass(frozen=True)
class Finding:
    """``gain_ms`` is the most that the step gets shorter; ``of`` the parts of the lost time that the gain is from."""

    rule: str
    units: tuple[str, ...]
    text: str
    gain_ms: float
    of: tuple[Cell, ...] = ()


def findings(facts: StepFacts) -> list[Finding]:
    """The five changes with the largest gains, and the remaining losses. The sum of all gains is at most the lost
    time."""
    left = dict(facts.lost)
    rules = (alone, split, keep, prefetch, join, reduce, tail, late_rank, late_host)
    proposed = sorted((each for rule in rules for each in rule(facts)), key=lambda each: -each.gain_ms)
    found: list[Finding] = []
    for each in proposed:
        gain = min(each.gain_ms, sum(left.get(cell, 0.0) for cell in each.of))
        if gain >= max(_MIN_GAIN * facts.step, 0.001) and len(found) < MAX_CHANGES:
            _take(left, each.of, gain)
            found.append(replace(each, gain_ms=gain))
    rest = [each for each in losses(facts, left) if each.gain_ms >= max(_MIN_LOSS * facts.step, 0.001)]
    return sorted([*found, *rest], key=lambda each: -each.gain_ms)


def _take(left: dict[Cell, float], cells: Sequence[Cell], gain: float) -> None:
    """Subtract ``gain``, which is explained, from ``cells``: the same share from each."""
    share = gain / sum(left.get(cell, 0.0) for cell in cells)
    for cell in cells:
        left[cell] = left.get(cell, 0.0) * (1 - share)


def _cells(lost: Lost, units: Sequence[UnitFacts], *passes: bool) -> tuple[Cell, ...]:
    return tuple(Cell(lost, unit.name, each) for unit in units for each in passes)


def alone(facts: StepFacts) -> list[Finding]:
    """One unit holds all parameters: nothing computes while they are gathered, and little while they are reduced."""
    unit = _alone(facts)
    if unit is None:
        return []
    parts = _max_parts(unit)
    reduced = min(unit.tail_late, unit.backward) * (1 - 1 / parts)
    text = (
        f"{_quoted(unit.name)} holds all parameters: each rank waits {facts.ms(unit.forward_late)} or more until they "
        f"are gathered, and {facts.ms(unit.tail_late)} or more until they are reduced. Call fully_shard on its blocks "
        "first, then on the whole."
    )
    cells = (*_cells(Lost.GATHERS, [unit], False), *_cells(Lost.REDUCTIONS, [unit], False))
    return [Finding("alone", (unit.name,), text, _split_gain(unit, parts) + reduced, cells)]


def _alone(facts: StepFacts) -> UnitFacts | None:
    """The only unit with parameters, if it can be split."""
    holders = [unit for unit in facts.units if unit.unsharded_nbytes]
    return holders[0] if len(holders) == 1 and _max_parts(holders[0]) > 1 else None


def split(facts: StepFacts) -> list[Finding]:
    """Units that are larger than the others and whose gathers are late."""
    found = []
    for unit in (each for each in facts.units if each.forward_late):
        others = [each.unsharded_nbytes for each in facts.units if each is not unit and each.unsharded_nbytes]
        ratio = unit.unsharded_nbytes / statistics.median(others) if others else 0.0
        parts = min(round(ratio), _max_parts(unit))
        gain = _split_gain(unit, parts) if ratio >= _LARGE and parts > 1 else 0.0
        if gain > 0:
            text = (
                f"{_quoted(unit.name)} is gathered {facts.ms(unit.forward_late)} late on each rank: it holds "
                f"{ratio:.1f} times the parameters of the median of the others. Split it into {parts}: call "
                "fully_shard on modules inside it."
            )
            found.append(Finding("split", (unit.name,), text, gain, _cells(Lost.GATHERS, [unit], False)))
    found.sort(key=lambda each: -each.gain_ms)
    return [_joined(found)] if len(found) > 1 else found


def _joined(found: Sequence[Finding]) -> Finding:
    """One finding for all of ``found``, in the words of the first."""
    names = tuple(name for each in found for name in each.units)
    text = f"{found[0].text} The same holds for {_listed(names[1:])}."
    cells = tuple(cell for each in found for cell in each.of)
    return Finding(found[0].rule, names, text, sum(each.gain_ms for each in found), cells)


def _max_parts(unit: UnitFacts) -> int:
    """The number of roughly equal parts that ``unit`` can be split into: more than one if its largest module holds at
    most two thirds. A bias makes one of two equal layers larger than half."""
    return round(unit.unsharded_nbytes / unit.largest_module_nbytes) if unit.largest_module_nbytes else 1


def _split_gain(unit: UnitFacts, parts: int) -> float:
    """The gain with ``parts`` equal parts. The first part's gather overlaps with the same compute as the whole unit's
    did; each other part's gather overlaps with the compute of the part before it."""
    gather, late = max(unit.gather, unit.forward_late), unit.forward_late
    first = max(gather / parts - (gather - late), 0.0)
    rest = max(gather / parts - unit.forward / parts, 0.0) * (parts - 1)
    return late - first - rest


def keep(facts: StepFacts) -> list[Finding]:
    """Units that are gathered again for backward too late. They can stay unsharded, as far as memory allows."""
    late = [unit for unit in facts.units if not unit.keeps_after_forward and unit.unsharded_nbytes]
    late = [unit for unit in late if unit.backward_late > 0 and unit.backward_late >= _MIN_GAIN * facts.step / 5]
    free = math.inf if facts.free_nbytes is None else facts.free_nbytes
    chosen: list[UnitFacts] = []
    for unit in sorted(late, key=lambda unit: unit.unsharded_nbytes / unit.backward_late):
        if unit.unsharded_nbytes <= free:
            free -= unit.unsharded_nbytes
            chosen.append(unit)
    if not chosen:
        return []
    gain, cost = sum(unit.backward_late for unit in chosen), sum(unit.unsharded_nbytes for unit in chosen)
    names = tuple(unit.name for unit in chosen)
    are, them = ("is", "it") if len(chosen) == 1 else ("are", "them")
    memory = "" if facts.free_nbytes is None else f" of {facts.free_nbytes / _MIB:.1f} MiB that are free"
    text = (
        f"{_listed(names)} {are} gathered again for backward, {facts.ms(gain)} late on each rank. Shard {them} with "
        f"reshard_after_forward=False; this takes {cost / _MIB:.1f} MiB more per rank{memory}."
    )
    return [Finding("keep", names, text, gain, _cells(Lost.GATHERS, chosen, True))]


def prefetch(facts: StepFacts) -> list[Finding]:
    """Gathers that start when compute needs them, although nothing was gathered before."""
    pairs = list(zip(facts.units, facts.units[1:], strict=False))
    forward = [(unit, before, unit.forward_late, unit.forward_idle) for before, unit in pairs]
    backward = [(unit, after, unit.backward_late, unit.backward_idle) for unit, after in pairs]  # the other way round
    return [*_prefetch(facts, "forward", forward), *_prefetch(facts, "backward", backward)]


def _prefetch(facts: StepFacts, of: str, gathers: Sequence[tuple[UnitFacts, UnitFacts, float, float]]) -> list[Finding]:
    """``gathers`` of one pass: a unit, the one that computes before it, how late it is, how long nothing was
    gathered."""
    found = sorted((each for each in gathers if min(each[2:]) > 0), key=lambda each: -min(each[2:]))
    if not found:
        return []
    names, late = tuple(unit.name for unit, *_ in found), facts.ms(sum(each[2] for each in found))
    setter = f"set_modules_to_{of}_prefetch"
    if len(found) == 1:
        text = (
            f"{_quoted(names[0])} is gathered {late} late on each rank in {of}, since it was not prefetched. Put it "
            f"into {_quoted(found[0][1].name)}'s list: {setter}."
        )
    else:
        text = (
            f"{_listed(names)} are gathered {late} late on each rank in {of}, since they were not prefetched. If you "
            f"gave empty lists to {setter}, remove them; otherwise put each unit into the list of the one that "
            "computes before it."
        )
    cells = _cells(Lost.GATHERS, [unit for unit, *_ in found], of == "backward")
    return [Finding("prefetch", names, text, sum(min(each[2:]) for each in found), cells)]


def join(facts: StepFacts) -> list[Finding]:
    """Consecutive small units. Each costs at least as much as the cheapest of all units, whatever its size."""
    runs = _small_runs(facts.units)
    cost = min((unit.per_use for unit in facts.units if unit.unsharded_nbytes and unit.per_use > 0), default=0.0)
    names = tuple(unit.name for run in runs for unit in run)
    gain = (len(names) - len(runs)) * cost
    if not gain > 0:
        return []
    change = f"one call fully_shard([...]) for all {len(names)}"
    if len(runs) > 1:
        first, last = runs[0][0].name, runs[0][-1].name
        change = f"{len(runs)} calls fully_shard([...]), the first for {_quoted(first)} to {_quoted(last)}"
    text = (
        f"{_listed(names)} are small and run one after the other. Join them: {change}. The collectives of each take at "
        f"least {facts.ms(cost)}."
    )
    small = [unit for run in runs for unit in run]
    kinds = (Lost.LAUNCHES, Lost.COPIES, Lost.GATHERS, Lost.REDUCTIONS)
    cells = tuple(cell for lost in kinds for cell in _cells(lost, small, False, True))
    return [Finding("join", names, text, gain, cells)]


def _small_runs(units: Sequence[UnitFacts]) -> list[list[UnitFacts]]:
    """Neighbours that are small. Together, they are no larger than the largest unit, or travel in one bucket as each of
    them does: where the backend takes a bucket, a launch costs more than its bytes. The record cannot tell where that
    ends if all units are equal: then it has one size only."""
    largest = max([unit.unsharded_nbytes for unit in units], default=0)
    runs: list[list[UnitFacts]] = [[]]
    for unit in units:
        if not unit.is_small or unit.is_root or not unit.unsharded_nbytes:
            runs.append([])
            continue
        together = [*runs[-1], unit]
        limit = max(largest, min(each.bucket_nbytes for each in together) - 1)
        if sum(each.unsharded_nbytes for each in together) > limit:
            runs.append([])
        runs[-1].append(unit)
    return [run for run in runs if len(run) > 1]


def reduce(facts: StepFacts) -> list[Finding]:
    """Backward waits for one reduction before it starts the next, although reductions leave gaps."""
    late = [unit for unit in facts.units if unit.reduce_late > 0]
    gain = min(sum(unit.reduce_late for unit in late), facts.reduce_idle)
    if not gain > 0:
        return []
    names = tuple(unit.name for unit in sorted(late, key=lambda unit: -unit.reduce_late))
    text = (
        f"Backward waits {facts.ms(sum(unit.reduce_late for unit in late))} or more on each rank for the reductions of "
        f"{_listed(names)}. Let two be in flight: set_reduce_scatter_max_input_buffers(2); this holds one more unit's "
        "gradients."
    )
    return [Finding("reduce", names, text, gain, _cells(Lost.REDUCTIONS, late, True))]


def tail(facts: StepFacts) -> list[Finding]:
    """The last reductions of backward overlap with no compute, but one half of a split unit overlaps with the other."""
    found = []
    for unit in facts.units if _alone(facts) is None else ():
        gain = min(unit.tail_late, unit.backward) / 2
        if gain > 0 and _max_parts(unit) > 1:
            text = (
                f"On each rank, the step ends with {facts.ms(unit.tail_late)} of waiting for the reduction of "
                f"{_quoted(unit.name)}. Split it into two, so that one half is reduced while the other computes."
            )
            found.append(Finding("tail", (unit.name,), text, gain, _cells(Lost.REDUCTIONS, [unit], False)))
    return found


def late_rank(facts: StepFacts) -> list[Finding]:
    """One rank computes longer than all others, which wait for it: in every step, and by more than compute varies from
    step to step. On a busy machine, different ranks are the slowest at different times."""
    steps, waits = facts.rank_compute, facts.rank_waits
    if len(steps) < MIN_SAMPLES or len(waits) < 2:
        return []
    slowest = {max(range(len(step)), key=step.__getitem__) for step in steps}
    leads = [max(step) - sorted(step)[-2] for step in steps]
    if len(slowest) > 1 or min(leads) <= max(leads) - min(leads):
        return []
    index = slowest.pop()
    rank = facts.ranks[index]
    gain = min(min(leads), *(wait for i, wait in enumerate(waits) if i != index))
    if not gain > 0:
        return []
    text = (
        f"Rank {rank} computes longer than all others in each of {len(steps)} steps, by {facts.ms(min(leads))} or "
        "more, and they wait for it. If its batches are larger, give it less work; otherwise look at what else its "
        "host runs."
    )
    return [Finding("late rank", (), text, gain, (Cell(Lost.RANKS),))]


def late_host(facts: StepFacts) -> list[Finding]:
    """Nothing computes between operations: Python is slower than the work it launches."""
    text = (
        f"In forward and backward, no operation runs for {facts.ms(facts.host_late)} or more on each rank: Python "
        "starts them too late. Compile the blocks or, if memory allows, give each rank larger batches."
    )
    cells = tuple(cell for cell in facts.lost if cell.lost is Lost.IDLE and cell.unit)
    return [Finding("late host", (), text, facts.host_late, cells)] if facts.host_late > 0 else []


def losses(facts: StepFacts, left: Mapping[Cell, float]) -> list[Finding]:
    """One finding for each kind of loss, for what is ``left`` of it."""
    units: dict[Lost, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for cell, value in left.items():
        units[cell.lost][cell.unit] += value
    found = []
    for lost, by_unit in units.items():
        named = (name for name, value in by_unit.items() if name and value > 0)
        names = tuple(sorted(named, key=by_unit.__getitem__, reverse=True))
        gain = sum(by_unit.values())
        found.append(Finding(lost.value, names, _loss_text(lost, names, gain, facts), gain))
    return found


_LOSSES = {  # what is lost, and what to do
    Lost.GATHERS: (
        "Compute on rank {rank} waits {ms} for gathers",
        "If memory allows, larger batches per rank hide more; a param_dtype of fewer bytes, or formats of "
        "fsdp2.tensors, gather less.",
    ),
    Lost.REDUCTIONS: (
        "Compute on rank {rank} waits {ms} for reductions",
        "If memory allows, larger batches per rank hide more; several micro-batches with fsdp2.no_sync reduce less "
        "often, and a reduce_dtype of fewer bytes reduces less.",
    ),
    Lost.OPTIMIZER: (
        "The optimizer on rank {rank} waits {ms} for its own collectives",
        "Nothing hides these. If convergence allows, step less often, on larger batches.",
    ),
    Lost.LAUNCHES: (
        "Launching collectives takes {ms} of the thread of rank {rank}",
        "If memory allows, use fewer and larger units: call fully_shard on larger modules, or on several small ones "
        "together.",
    ),
    Lost.COPIES: (
        "Copies from and to buckets take {ms} on rank {rank}",
        "A parameter needs none if it is sharded on dim 0, of a size that the ranks divide, in one dtype for compute "
        "and reduction, and large enough to travel alone.",
    ),
    Lost.IDLE: (
        "No operation runs on rank {rank} for {ms}",
        "If the program waits for data, load it earlier; otherwise the host starts operations too late.",
    ),
}


def _loss_text(lost: Lost, names: Sequence[str], gain: float, facts: StepFacts) -> str:
    """What is lost, on which units, and what to do."""
    if lost is Lost.RANKS:
        whom = "" if facts.latest in (None, facts.loser) else f", most of it for rank {facts.latest}"
        waits = f"Rank {facts.loser} waits {facts.ms(gain)} for ranks that come later to collectives{whom}."
        return f"{waits} {_who_is_late(facts)}"
    what, remedy = _LOSSES[lost]
    several = f"{len(names)} units, most for " if len(names) > 1 else ""
    whose = f", for {several}{_quoted(names[0])}" if names else ""
    return f"{what.format(rank=facts.loser, ms=facts.ms(gain))}{whose}. {remedy}"


def _who_is_late(facts: StepFacts) -> str:
    num_steps = len(facts.rank_compute)
    if num_steps < MIN_SAMPLES:
        return (
            f"{num_steps} {'step does' if num_steps == 1 else 'steps do'} not tell whether one rank is always slower: "
            f"record {MIN_SAMPLES}, with steps={MIN_SAMPLES + facts.is_first_use}."
        )
    if late_rank(facts):
        return "That is more than the slowest rank explains: others come late at times."
    return f"No rank is clearly the slowest in all of {num_steps} steps. If batches differ in size, make them equal."


def _quoted(name: str) -> str:
    return f"`{name}`"


def _listed(names: Sequence[str]) -> str:
    return listed(map(_quoted, names), 3)
