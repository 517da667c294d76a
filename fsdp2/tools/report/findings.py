"""What to change first, and how much shorter the step may become: rules on what was measured.

Plain values in, plain values out; times in milliseconds, sizes in bytes. Rule: a gain is never more than a time that
the step has lost on every rank. Where nothing was lost, a rule says nothing. Each gain holds for one change alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MAX_FINDINGS = 5
_MIN_GAIN = 0.005  # of the step; less is noise
_LARGE = 2.0  # times the median unit
_MIB = 2**20


@dataclass(frozen=True)
class UnitFacts:
    """One unit in the measured step. Times that were lost are the least of all ranks: what the unit itself costs,
    without waiting for a rank that is late.

    Attributes:
        largest_module_nbytes: unsharded parameters of the module that holds most: it cannot be split.
        is_small: its shard travels in one bucket.
        is_root: the other units are inside it.
        keeps: its parameters stay unsharded after forward.
        forward_late, backward_late: how long compute waited for its gathers.
        forward_idle, backward_idle: how long nothing was gathered before a gather that was not prefetched started; 0
            for the first one of a pass.
        reduce_late: how long compute waited for its reduction inside backward.
        tail_late: the same, after the last compute of backward.
        per_use: what all its collectives take of the thread, late or not.
    """

    name: str
    unsharded_nbytes: int = 0
    largest_module_nbytes: int = 0
    is_small: bool = False
    is_root: bool = False
    keeps: bool = False
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
    """The measured step. ``units``: in the order of their forwards. ``rank_compute``, ``rank_waits``: per rank, what
    compute took, and what it waited for all collectives. ``reduce_idle``: how long no gradients were reduced during
    backward. ``free_nbytes``: memory of the device that nothing used; None if that is not known."""

    step: float
    units: Sequence[UnitFacts]
    rank_compute: Sequence[float] = ()
    rank_waits: Sequence[float] = ()
    reduce_idle: float = 0.0
    free_nbytes: int | None = None


@dataclass(frozen=True)
class Finding:
    """``gain_ms``: at most so much shorter is the step."""

    rule: str
    units: tuple[str, ...]
    text: str
    gain_ms: float


def findings(facts: StepFacts) -> list[Finding]:
    """The changes with the largest gains, at most five."""
    found = [each for rule in (split, keep, prefetch, join, reduce, tail, late_rank) for each in rule(facts)]
    worthwhile = [each for each in found if each.gain_ms >= _MIN_GAIN * facts.step and each.gain_ms >= 0.001]
    return sorted(worthwhile, key=lambda each: -each.gain_ms)[:MAX_FINDINGS]


def split(facts: StepFacts) -> list[Finding]:
    """A unit that is larger than the others, and whose gather is late.

    Of ``parts`` equal parts, the first one's gather has the same time to hide in as the whole one's had. Each other
    part's gather hides behind the compute of the part before it.
    """
    found = []
    for unit in facts.units:
        others = [each.unsharded_nbytes for each in facts.units if each is not unit and each.unsharded_nbytes]
        if not others or not unit.forward_late or not unit.largest_module_nbytes:
            continue
        ratio = unit.unsharded_nbytes / statistics.median(others)
        parts = min(round(ratio), unit.unsharded_nbytes // unit.largest_module_nbytes)
        if ratio < _LARGE or parts < 2:
            continue
        gather, late = max(unit.gather, unit.forward_late), unit.forward_late
        first = max(gather / parts - (gather - late), 0.0)
        rest = max(gather / parts - unit.forward / parts, 0.0) * (parts - 1)
        text = (
            f"{_quoted(unit.name)} gathers {_ms(late)} late: its unit is {ratio:.1f} times the median of the others. "
            f"Split it into {parts}: call fully_shard on modules inside it."
        )
        found.append(Finding("split", (unit.name,), text, late - first - rest))
    return found


def keep(facts: StepFacts) -> list[Finding]:
    """Units that are gathered again for backward, too late: not if they stay unsharded, as far as memory allows."""
    free, chosen = facts.free_nbytes, []
    late = [unit for unit in facts.units if not unit.keeps and unit.backward_late > 0 and unit.unsharded_nbytes]
    for unit in sorted(late, key=lambda unit: unit.unsharded_nbytes / unit.backward_late):
        if unit.backward_late < _MIN_GAIN * facts.step / 5:
            continue
        if free is not None:
            if unit.unsharded_nbytes > free:
                continue
            free -= unit.unsharded_nbytes
        chosen.append(unit)
    if not chosen:
        return []
    gain, cost = sum(unit.backward_late for unit in chosen), sum(unit.unsharded_nbytes for unit in chosen)
    names = tuple(unit.name for unit in chosen)
    if len(chosen) == 1:
        wait, change = "is gathered again for backward, and is", "Shard it with"
    else:
        wait, change = "are gathered again for backward, and are", "Shard them with"
    memory = "" if facts.free_nbytes is None else f" of {facts.free_nbytes / _MIB:.1f} MiB that are free"
    text = (
        f"{_listed(names)} {wait} {_ms(gain)} late. {change} reshard_after_forward=False; this takes "
        f"{cost / _MIB:.1f} MiB more per rank{memory}."
    )
    return [Finding("keep", names, text, gain)]


def prefetch(facts: StepFacts) -> list[Finding]:
    """A gather that starts when compute needs it, although nothing was gathered before."""
    found = []
    for before, unit in zip(facts.units, facts.units[1:], strict=False):
        gain = min(unit.forward_late, unit.forward_idle)
        if gain > 0:
            text = (
                f"{_quoted(unit.name)} gathers {_ms(unit.forward_late)} late in forward, and was not prefetched. Put "
                f"it into {_quoted(before.name)}'s list: set_modules_to_forward_prefetch."
            )
            found.append(Finding("prefetch", (unit.name,), text, gain))
    for unit, after in zip(facts.units, facts.units[1:], strict=False):  # backward runs the other way round
        gain = min(unit.backward_late, unit.backward_idle)
        if gain > 0:
            text = (
                f"{_quoted(unit.name)} gathers {_ms(unit.backward_late)} late in backward, and was not prefetched. Put "
                f"it into {_quoted(after.name)}'s list: set_modules_to_backward_prefetch."
            )
            found.append(Finding("prefetch", (unit.name,), text, gain))
    return found


def join(facts: StepFacts) -> list[Finding]:
    """Small units in a row. Each costs at least what the cheapest one of all units costs, whatever its size."""
    costs = [unit.per_use for unit in facts.units if unit.unsharded_nbytes and unit.per_use > 0]
    found = []
    for run in _small_runs(facts.units):
        names = tuple(unit.name for unit in run)
        gain = (len(run) - 1) * min(costs, default=0.0)
        if gain > 0:
            text = (
                f"{_listed(names)} are small and run one after the other. Join them: one call "
                f"fully_shard([...]) for all {len(run)}. The collectives of each take at least {_ms(min(costs))}."
            )
            found.append(Finding("join", names, text, gain))
    return found


def _small_runs(units: Sequence[UnitFacts]) -> list[list[UnitFacts]]:
    """Neighbours that are small; together, no run is larger than the largest unit."""
    largest = max([unit.unsharded_nbytes for unit in units], default=0)
    runs: list[list[UnitFacts]] = [[]]
    for unit in units:
        if not unit.is_small or unit.is_root or not unit.unsharded_nbytes:
            runs.append([])
            continue
        if sum(each.unsharded_nbytes for each in runs[-1]) + unit.unsharded_nbytes > largest:
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
        f"Backward waits {_ms(sum(unit.reduce_late for unit in late))} for the reductions of {_listed(names)}. Let two "
        "be in flight: set_reduce_scatter_max_input_buffers(2); this holds one more unit's gradients."
    )
    return [Finding("reduce", names, text, gain)]


def tail(facts: StepFacts) -> list[Finding]:
    """The last reductions of backward have no compute to hide behind, but one half of a split unit has the other."""
    found = []
    for unit in facts.units:
        gain = min(unit.tail_late, unit.backward) / 2
        can_split = unit.largest_module_nbytes * 2 <= unit.unsharded_nbytes
        if gain > 0 and can_split:
            text = (
                f"The step ends with {_ms(unit.tail_late)} of waiting for the reduction of {_quoted(unit.name)}. Split "
                "it into two, so that one half is reduced while the other computes."
            )
            found.append(Finding("tail", (unit.name,), text, gain))
    return found


def late_rank(facts: StepFacts) -> list[Finding]:
    """One rank computes longer than all others, which wait for it."""
    compute = facts.rank_compute
    if len(compute) < 2:
        return []
    rank = max(range(len(compute)), key=compute.__getitem__)
    others = [i for i in range(len(compute)) if i != rank]
    gain = min(compute[rank] - max(compute[i] for i in others), min(facts.rank_waits[i] for i in others))
    if not gain > 0:
        return []
    text = (
        f"Rank {rank} computes {_ms(compute[rank])}, the others at most {_ms(max(compute[i] for i in others))}, and "
        "they wait for it. Give it less work, or look at its host."
    )
    return [Finding("late rank", (), text, gain)]


def _quoted(name: str) -> str:
    return f"`{name}`"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(_quoted, names[:3]))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _ms(value: float) -> str:
    return f"{value:.1f} ms" if value >= 0.1 else f"{value:.3f} ms"
