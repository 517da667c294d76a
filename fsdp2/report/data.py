"""The report as data: the records of all ranks, combined on rank 0. Plain values that JSON can hold.

Times are in microseconds from the start of the step (``_us``), or in milliseconds (``_ms``). Ranks on one host share a
clock; the clocks of hosts are aligned at the point where all ranks left one collective.

docs/debugging.md lists the fields.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from fsdp2.planner.machine import Machine
from fsdp2.report.figures import Prediction, StepFigures, Work, compared, digits_of, speed
from fsdp2.report.findings import Finding, StepFacts, UnitFacts, UnitInfo, findings
from fsdp2.report.lost import Cell, Lost, least_waits, lost_time, sums
from fsdp2.report.memory import Memory
from fsdp2.report.operators import Operators
from fsdp2.report.timeline import (
    ALL_GATHER,
    ALL_REDUCE,
    COMPUTING,
    OF_HOST,
    REDUCE_SCATTER,
    Does,
    Span,
    Transfer,
    joined,
    phases,
)

VERSION = 3
_REDUCTIONS = (REDUCE_SCATTER, ALL_REDUCE)
KINDS = (ALL_GATHER, *_REDUCTIONS, *OF_HOST)
_MAX_ENTRIES = 50_000  # in all timelines; beyond that, only some ranks have one
_MAX_OWNERS = 150  # of memory, on each rank
_RESOLUTION = 2_000  # parts of a step in a timeline: anything shorter than one part cannot be seen
_COMPUTE = (Does.FORWARD, Does.BACKWARD)
_WAITS = (Does.GATHER_WAIT, Does.REDUCE_WAIT, Does.OTHER_WAIT)


@dataclass(frozen=True)
class RankStep:
    """One step of one rank; see ``timeline``."""

    start: float
    stop: float
    spans: list[Span]
    transfers: list[Transfer]
    memory: Memory
    operators: Operators = field(default_factory=dict)


@dataclass(frozen=True)
class RankRecord:
    """The record of one rank. ``synced`` is its clock when all ranks left a collective. ``is_first_use``: the model had
    run no forward before. ``allocated_nbytes`` and ``reserved_nbytes`` are the peaks of what tensors took and of what
    the allocator took for them; ``free_nbytes`` was free at the end; None if the device has no statistics.
    ``knows_activations``: the memory of the steps includes activations."""

    rank: int
    host: str
    synced: float
    is_first_use: bool
    steps: list[RankStep]
    allocated_nbytes: int | None = None
    reserved_nbytes: int | None = None
    free_nbytes: int | None = None
    knows_activations: bool = True
    work: Work = field(default_factory=Work)
    inputs: Sequence[str] = ()


def report_data(
    model: str,
    device: str,
    units: Sequence[UnitInfo],
    records: Sequence[RankRecord],
    prediction: Prediction | None = None,
    machine: Machine | None = None,
    mesh: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """The whole report. ``model`` and ``device`` are names; ``units`` are in the order of the modules, the root first;
    ``records`` in the order of ranks; steps count that all have. ``machine``: that of the device, if known. ``mesh``:
    by default, no rank is a replica."""
    num_steps = min(len(record.steps) for record in records)
    durations = [max(r.steps[i].stop - r.steps[i].start for r in records) for i in range(num_steps)]
    usual = range(len(durations))  # the steps that are representative of others
    if len(durations) > 1 and any(record.is_first_use for record in records):
        usual = usual[1:]  # the first step of a model prefetches little and makes plans
    chosen = sorted(usual, key=durations.__getitem__)[(len(usual) - 1) // 2]  # the median
    ranks = _ranks(records, chosen)
    known = [does for does in Does if does is not Does.IDLE or any(rank.of(does) for rank in ranks)]
    least = least_waits([rank.sums for rank in ranks])
    lost = [lost_time(rank.step.spans, least) for rank in ranks]
    most = max(range(len(lost)), key=lambda i: sum(lost[i].values()))
    index = {unit.name: i for i, unit in enumerate(units)} | {"": -1}
    places = _places(ranks)
    shown = _shown(ranks)
    collectives = _collectives(ranks, index, shown)
    digits = digits_of([1e3 * durations[i] for i in usual])
    facts = replace(
        _facts(units, ranks, usual, durations[chosen] * 1e3, {k: 1e3 * v for k, v in lost[most].items()}),
        loser=ranks[most].record.rank,
        latest=_latest(collectives["rows"]),
        digits=digits,
    )
    found = findings(facts)
    by_memory = sorted(ranks, key=lambda rank: -rank.step.memory.peak)
    return {
        "version": VERSION,
        "model": model,
        "device": device,
        "ranks": [record.rank for record in records],
        "mesh": list(mesh or (1, len(records))),
        "inputs": list(records[0].inputs),
        "steps_ms": [_ms(duration) for duration in durations],
        "step": chosen,
        "first_step": usual[0],
        "digits": digits,
        "does": [does.value for does in known],
        "kinds": list(KINDS),
        "findings": [
            {"rule": each.rule, "units": list(each.units), "text": each.text, "gain_ms": round(each.gain_ms, 3)}
            for each in found
        ],
        "lost": _lost(ranks[most], facts.lost, found),
        "speed": speed([record.work for record in records], durations[chosen], machine, device.split(" (")[0]),
        "prediction": None if prediction is None else compared(prediction, _figures(ranks, by_memory[0])),
        "units": [_unit_row(unit, ranks, known) for unit in units],
        "rank_totals": [_totals(rank, its) for rank, its in zip(ranks, lost, strict=True)],
        "compute": [_compute_row(place, name, ranks) for place, name in places.items()],
        "places": list(places.values()),
        "timelines": [_timeline(rank, index, places) for rank in shown],
        "operators": _operators(max(ranks, key=_compute_of), places),
        "memory": [_memory(rank) for rank in by_memory if rank in shown or rank is by_memory[0]],
        "collectives": {"ranks": [rank.record.rank for rank in shown], **collectives},
    }


class _Rank:
    """One rank's part of the report, with sums over ``step`` in seconds.

    Attributes:
        step: the step that the report is about, on the report's axis.
        computed: by unit and module, and by what it computes.
        gathers, gather: how often each unit was gathered, and how long its first gather was in flight.
        idle: how long nothing was gathered before a gather that was not prefetched, by unit and pass. The first gather
            of a pass has no entry, since nothing could start it earlier.
        reduce_idle: how long nothing was reduced in backward between the first reduction and the last.
    """

    def __init__(self, record: RankRecord, step: RankStep) -> None:
        self.record, self.step, self.lasted = record, step, step.stop - step.start
        self.drawn = joined(step.spans, self.lasted / _RESOLUTION)
        self.sums = sums(step.spans)
        self.computed: dict[tuple[str, str], dict[Does, float]] = {}
        for span in step.spans:
            if span.does in COMPUTING:
                of = self.computed.setdefault((span.unit, span.module), dict.fromkeys(COMPUTING, 0.0))
                of[span.does] += span.stop - span.start
        gathers = [each for each in step.transfers if each.kind == ALL_GATHER]
        self.gathers = Counter(each.unit for each in gathers)
        self.gather = {each.unit: each.stop - each.start for each in reversed(gathers)}
        self.idle: dict[tuple[str, bool], float] = {}
        for in_backward in (False, True):
            for transfer, gap in _gaps(each for each in gathers if each.in_backward is in_backward):
                if not transfer.early:
                    self.idle.setdefault((transfer.unit, in_backward), gap)
        reductions = (each for each in step.transfers if each.kind in _REDUCTIONS and each.in_backward)
        self.reduce_idle = sum(gap for _, gap in _gaps(reductions))

    def of(self, does: Does, unit: str | None = None, in_backward: bool | None = None) -> float:
        """The time of ``does`` on ``unit``, in one pass; None means all."""
        if unit is None:
            return sum(seconds for (kind, _, _), seconds in self.sums.items() if kind is does)
        passes = (False, True) if in_backward is None else (in_backward,)
        return sum(self.sums.get((does, unit, each), 0.0) for each in passes)


def _ranks(records: Sequence[RankRecord], chosen: int) -> list[_Rank]:
    """Each rank's step ``chosen``, with times relative to the earliest start on any rank."""
    one_clock = len({record.host for record in records}) == 1
    offsets = [0.0 if one_clock else record.synced for record in records]
    first = min(record.steps[chosen].start - offset for record, offset in zip(records, offsets, strict=True))
    found = []
    for record, offset in zip(records, offsets, strict=True):
        found.append(_Rank(record, _moved(record.steps[chosen], -(offset + first))))
    return found


def _moved(step: RankStep, by: float) -> RankStep:
    """``step``, ``by`` seconds later."""
    return replace(
        step,
        start=step.start + by,
        stop=step.stop + by,
        spans=[each._replace(start=each.start + by, stop=each.stop + by) for each in step.spans],
        transfers=[each._replace(start=each.start + by, stop=each.stop + by) for each in step.transfers],
        memory=replace(step.memory, times=[time + by for time in step.memory.times]),
    )


def _gaps(transfers: Iterable[Transfer]) -> Iterator[tuple[Transfer, float]]:
    """All ``transfers`` but the first, with how long nothing was in flight before."""
    end: float | None = None
    for transfer in transfers:
        if end is not None:
            yield transfer, max(transfer.start - end, 0.0)
        end = max(transfer.stop, end or 0.0)


# What findings are drawn from


def _facts(
    units: Sequence[UnitInfo], ranks: Sequence[_Rank], usual: range, step: float, lost: Mapping[Cell, float]
) -> StepFacts:
    records = [rank.record for rank in ranks]
    position = {name: i for i, name in enumerate(ranks[0].gathers)}  # in the order of their first gathers
    ordered = sorted(units, key=lambda unit: position.get(unit.name, len(position)))
    return StepFacts(
        step=step,
        units=[_unit_facts(unit, ranks, is_root=unit is units[0]) for unit in ordered],
        rank_compute=[[1e3 * _computed(record.steps[i]) for record in records] for i in usual],
        rank_waits=[1e3 * sum(map(rank.of, _WAITS)) for rank in ranks],
        ranks=[record.rank for record in records],
        reduce_idle=1e3 * min(rank.reduce_idle for rank in ranks),
        host_late=1e3 * min(rank.of(Does.IDLE) - rank.of(Does.IDLE, "") for rank in ranks),
        free_nbytes=min((r.free_nbytes for r in records if r.free_nbytes is not None), default=None),
        lost=lost,
        is_first_use=any(record.is_first_use for record in records),
    )


def _computed(step: RankStep) -> float:
    return sum(span.stop - span.start for span in step.spans if span.does in _COMPUTE)


def _unit_facts(unit: UnitInfo, ranks: Sequence[_Rank], *, is_root: bool) -> UnitFacts:
    name = unit.name

    def least(value: Callable[[_Rank], float]) -> float:
        return 1e3 * min(map(value, ranks))

    thread = least(lambda rank: rank.of(Does.LAUNCH, name) + rank.of(Does.COPY, name))
    late: dict[str, Any] = {
        "forward_late": least(lambda rank: rank.of(Does.GATHER_WAIT, name, False)),
        "backward_late": least(lambda rank: rank.of(Does.GATHER_WAIT, name, True)),
        "reduce_late": least(lambda rank: rank.of(Does.REDUCE_WAIT, name, True)),
        "tail_late": least(lambda rank: rank.of(Does.REDUCE_WAIT, name, False)),
    }
    return UnitFacts(
        **vars(unit),
        **late,
        is_root=is_root,
        gather=least(lambda rank: rank.gather.get(name, 0.0)),
        forward=least(lambda rank: rank.of(Does.FORWARD, name)),
        backward=least(lambda rank: rank.of(Does.BACKWARD, name)),
        forward_idle=least(lambda rank: rank.idle.get((name, False), 0.0)),
        backward_idle=least(lambda rank: rank.idle.get((name, True), 0.0)),
        per_use=thread + sum(late.values()),
    )


def _latest(rows: Sequence[Sequence[int]]) -> int | None:
    """The rank whose late starts of collectives took others the most time; None if no rank was late."""
    late: Counter[int] = Counter()
    for _, _, by, last, *_ in rows:
        late[last] += by
    return max(late, key=late.__getitem__) if late.total() else None


# The parts of the report


def _totals(rank: _Rank, lost: Mapping[Cell, float]) -> dict[str, Any]:
    """What ``rank`` computes, and what it loses by kind. Together, they are its step."""
    computed = {_field(does): _ms(rank.of(does)) for does in COMPUTING}
    return {"rank": rank.record.rank} | computed | {_field(kind): _ms(_sum_of(lost, kind)) for kind in Lost}


def _sum_of(lost: Mapping[Cell, float], kind: Lost) -> float:
    return sum(value for cell, value in lost.items() if cell.lost is kind)


def _lost(rank: _Rank, lost: Mapping[Cell, float], found: Sequence[Finding]) -> dict[str, Any]:
    """The time that the rank which loses most has lost, and how much of it the findings explain."""
    total = sum(lost.values())
    kinds = {kind: _sum_of(lost, kind) for kind in Lost}
    return {
        "rank": rank.record.rank,
        "step_ms": _ms(rank.lasted),
        "compute_ms": round(1e3 * rank.lasted - total, 3),
        "lost_ms": round(total, 3),
        "explained_ms": round(sum(each.gain_ms for each in found), 3),
        "kinds": [{"kind": kind.value, "lost_ms": round(value, 3)} for kind, value in kinds.items() if value > 0],
    }


def _figures(ranks: Sequence[_Rank], fullest: _Rank) -> StepFigures:
    """The times of the rank whose step is longest, and the memory of the rank that holds most."""
    longest = max(ranks, key=lambda rank: rank.lasted)
    compute = sum(map(longest.of, COMPUTING))
    return StepFigures(
        step_ms=_ms(longest.lasted),
        compute_ms=_ms(compute),
        exposed_ms=_ms(longest.lasted - compute - longest.of(Does.IDLE)),
        temporary_nbytes=fullest.step.memory.temporary,
        allocated_nbytes=fullest.record.allocated_nbytes,
        reserved_nbytes=fullest.record.reserved_nbytes,
    )


def _unit_row(unit: UnitInfo, ranks: Sequence[_Rank], known: Sequence[Does]) -> dict[str, Any]:
    """What plans say about ``unit``, and its times for each of ``known``: the most of all ranks. For waits also the
    least, which is their cost without waiting for a late rank."""
    of_units = [does for does in known if does not in (Does.OTHER, Does.OTHER_WAIT)]
    return {
        **vars(unit),
        "gathers": max(rank.gathers[unit.name] for rank in ranks),
        **{_field(does): _ms(max(rank.of(does, unit.name) for rank in ranks)) for does in of_units},
        "gather_exposed_ms": _ms(min(rank.of(Does.GATHER_WAIT, unit.name) for rank in ranks)),
        "reduce_exposed_ms": _ms(min(rank.of(Does.REDUCE_WAIT, unit.name) for rank in ranks)),
    }


def _field(does: Does | Lost) -> str:
    return f"{does.value.replace(' ', '_')}_ms"


def _places(ranks: Sequence[_Rank]) -> dict[tuple[str, str], str]:
    """The names that users know for the places where ranks compute, by unit and module; most time first."""
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for rank in ranks:
        for place, by in rank.computed.items():
            seconds[place] = max(seconds[place], sum(by.values()))
    in_parts = {unit for unit, module in seconds if module}
    ordered = sorted(seconds, key=lambda place: -seconds[place])
    return {(u, m): m or (f"{u}: code outside of its modules" if u in in_parts else u) for u, m in ordered}


def _compute_row(place: tuple[str, str], name: str, ranks: Sequence[_Rank]) -> dict[str, Any]:
    computed = [rank.computed[place] for rank in ranks if place in rank.computed]
    unit, module = place
    return {"name": name, "unit": unit, "module": module} | {
        _field(does): _ms(max(each[does] for each in computed)) for does in COMPUTING
    }


def _operators(rank: _Rank, places: Mapping[tuple[str, str], str]) -> dict[str, Any] | None:
    """What ran on ``rank``, most time first; None if torch.profiler did not run."""
    if not rank.step.operators:
        return None
    position = {place: i for i, place in enumerate(places)}
    rows: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for (unit, module, does, name), (calls, seconds) in rank.step.operators.items():
        row = rows[name, position[unit, module]]
        row[0] += calls
        row[1 + COMPUTING.index(does)] += _us(seconds)
    ordered = sorted(rows.items(), key=lambda row: -sum(row[1][1:]))
    return {"rank": rank.record.rank, "rows": [[*key, *row] for key, row in ordered]}


def _memory(rank: _Rank) -> dict[str, Any]:
    memory, record = rank.step.memory, rank.record
    kept = _drawn_times(rank)
    owners, rest = list(memory.owners[:_MAX_OWNERS]), memory.owners[_MAX_OWNERS:]
    if rest:
        owners.append(("", f"{len(rest)} smaller ones", sum(nbytes for _, _, nbytes in rest)))
    return {
        "rank": record.rank,
        "peak_nbytes": memory.peak,
        "temporary_nbytes": memory.temporary,
        "allocated_nbytes": record.allocated_nbytes,
        "reserved_nbytes": record.reserved_nbytes,
        "owners": [{"unit": unit, "what": what, "nbytes": nbytes} for unit, what, nbytes in owners],
        "times_us": [_us(memory.times[i]) for i in kept],
        "series": [{"what": what, "nbytes": [values[i] for i in kept]} for what, values in memory.series.items()],
        "notes": [] if record.knows_activations else ["Activations were not counted."],
    }


def _drawn_times(rank: _Rank) -> list[int]:
    """The times to draw: of those that cannot be told apart, only the one at which most was held."""
    memory, shortest = rank.step.memory, rank.lasted / _RESOLUTION
    totals = [sum(values) for values in zip(*memory.series.values(), strict=True)]
    if len(totals) <= _RESOLUTION:
        return list(range(len(totals)))
    most: dict[int, int] = {}
    for i, (time, total) in enumerate(zip(memory.times, totals, strict=True)):
        slot = int(time / shortest)
        if total > totals[most.setdefault(slot, i)]:
            most[slot] = i
    return list(most.values())


def _shown(ranks: Sequence[_Rank]) -> list[_Rank]:
    """The ranks with a timeline: all, if there are few; else the one that computes longest, the one that computes
    shortest, and the first of the others."""
    entries = max(len(rank.drawn) + 2 * len(rank.step.transfers) + len(_drawn_times(rank)) for rank in ranks)
    limit = max(_MAX_ENTRIES // max(entries, 1), 1)
    if len(ranks) <= limit:
        return list(ranks)
    by_compute = sorted(ranks, key=_compute_of)
    chosen = list(dict.fromkeys([by_compute[-1], by_compute[0], *ranks]))[:limit]
    return [rank for rank in ranks if rank in chosen]


def _compute_of(rank: _Rank) -> float:
    return sum(map(rank.of, _COMPUTE))


def _timeline(rank: _Rank, index: dict[str, int], places: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    does, place = list(Does), {key: i for i, key in enumerate(places)}
    spans = []
    for each in rank.drawn:
        computes = place[each.unit, each.module] if each.does in COMPUTING else -1
        spans.append([does.index(each.does), index.get(each.unit, -1), *_drawn(each), computes])
    transfers = [
        [KINDS.index(each.kind), index.get(each.unit, -1), *_drawn(each), int(each.early)]
        for each in rank.step.transfers
    ]
    return {
        "rank": rank.record.rank,
        "start_us": _us(rank.step.start),
        "stop_us": _us(rank.step.stop),
        "phases": [[name, _us(start), _us(stop) - _us(start)] for name, start, stop in phases(rank.step.spans)],
        "spans": [span for span in spans if span[3] > 0],
        "transfers": transfers,
    }


def _drawn(each: Span | Transfer) -> tuple[int, int]:
    """Its start and its duration."""
    return _us(each.start), _us(each.stop) - _us(each.start)


def _collectives(ranks: Sequence[_Rank], index: dict[str, int], shown: Sequence[_Rank]) -> dict[str, Any]:
    """Rows of kind, unit, how much later the last of all ranks started than the first, that last rank, and when each
    of the ranks ``shown`` started; up to the first collective that is not the same on all ranks."""
    rows: list[list[int]] = []
    difference = None
    collectives = ([each for each in rank.step.transfers if each.kind not in OF_HOST] for rank in ranks)
    for position, same in enumerate(zip_longest(*collectives)):
        names = ["none" if each is None else f"{each.kind} {each.unit}" for each in same]
        if len(set(names)) > 1:
            ours = {str(rank.record.rank): name for rank, name in zip(ranks, names, strict=True)}
            difference = {"position": position, "by_rank": ours}
            break
        starts = {rank.record.rank: _us(each.start) for rank, each in zip(ranks, same, strict=True)}
        last = max(starts, key=starts.__getitem__)
        late = starts[last] - min(starts.values())
        unit = index.get(same[0].unit, -1)
        rows.append([KINDS.index(same[0].kind), unit, late, last, *(starts[rank.record.rank] for rank in shown)])
    return {"rows": rows, "first_difference": difference}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
