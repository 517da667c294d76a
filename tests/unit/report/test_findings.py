"""What a report proposes to change, and by how much the step may become shorter: each rule on plain facts.

What is said is in ``golden/findings.txt``. A case whose name has "not" finds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from fsdp2.report import findings as rules
from fsdp2.report.findings import Finding, StepFacts, UnitFacts, findings
from fsdp2.report.lost import Cell, Lost
from tests.harness.golden import texts_beside
from tests.harness.messages import wrapped

MIB = 2**20
TEXTS = texts_beside(__file__)


def _unit(name: str, mib: float = 1, **facts: float) -> UnitFacts:
    nbytes = int(mib * MIB)
    return replace(UnitFacts(name, unsharded_nbytes=nbytes, largest_module_nbytes=nbytes // 16), **facts)  # type: ignore[arg-type]


def _step(*units: UnitFacts, **facts: object) -> StepFacts:
    return replace(StepFacts(100.0, units, lost=_lost(units), ranks=(0, 2, 4)), **facts)  # type: ignore[arg-type]


def _lost(units: Sequence[UnitFacts], ranks: float = 20.0) -> dict[Cell, float]:
    """What is lost to the collectives of ``units``, and to other ranks."""
    found = {Cell(Lost.RANKS): ranks}
    for unit in units:
        found[Cell(Lost.GATHERS, unit.name, False)] = unit.forward_late
        found[Cell(Lost.GATHERS, unit.name, True)] = unit.backward_late
        found[Cell(Lost.REDUCTIONS, unit.name, True)] = unit.reduce_late
        found[Cell(Lost.REDUCTIONS, unit.name, False)] = unit.tail_late
        found[Cell(Lost.LAUNCHES, unit.name, True)] = unit.per_use / 2
        found[Cell(Lost.COPIES, unit.name, False)] = unit.per_use / 4
    return {cell: value for cell, value in found.items() if value}


FIVE = _step(
    _unit("embed", keeps_after_forward=True, forward_late=0.2, per_use=0.9),
    _unit("layers.0", forward=4, backward=8, per_use=0.9),
    _unit("layers.1", forward=4, forward_late=3, forward_idle=2.5, backward_late=0.7, per_use=0.9),
    _unit("layers.2", forward=4, backward=8, reduce_late=4, per_use=0.9),
    _unit("layers.3", 6, gather=6, forward=24, backward=48, forward_late=1.2, backward_late=2, per_use=2),
    *(_unit(f"norm.{i}", 0.1, is_small=True, per_use=0.6) for i in range(3)),
    _unit("head", backward=5, tail_late=4, per_use=0.9),
    reduce_idle=3.5,
    rank_compute=[(50, 58), (51, 60)] * 3,
    rank_waits=(9, 0.5),
    latest=2,
)
FAST = [_unit("a", forward=5, backward=9, gather=4), _unit("b", 9, forward=5, backward=9, gather=4)]
LITTLE = _step(_unit("a"), rank_compute=[(50.4, 50)] * 5, rank_waits=(0, 9), lost={Cell(Lost.RANKS): 0.05})
A, C = _unit("a"), _unit("c")
LATE = {"gather": 6.0, "forward": 24.0, "forward_late": 1.2}
LARGE = _unit("b", 6, **LATE)
# Two layers, of which one has a bias: it holds a little more than half.
TWO = replace(
    LARGE, unsharded_nbytes=6 * MIB + 2**14, largest_module_nbytes=3 * MIB + 2**13 + 2**10, backward=9.0, tail_late=4.0
)
ONE = _unit("(root)", 32, is_root=True, gather=32, forward=40, forward_late=32, backward=80, tail_late=16)
AGAIN = [
    _unit("a", 4, backward_late=2),
    _unit("b", 1, backward_late=3),
    _unit("c", 1, keeps_after_forward=True, backward_late=9),
]
UNLISTED = [_unit(str(i), forward_late=i, forward_idle=9, backward_late=2, backward_idle=1) for i in range(6)]
SMALL, SMALLER = ([_unit(name, 0.1, is_small=True, per_use=use) for name in "abc"] for use in (0.5, 1))
SIXTY = [_unit(str(i), 1 / 64, is_small=True, per_use=0.5, bucket_nbytes=2 * MIB) for i in range(60)]
ENDS = _unit("a", backward=3, tail_late=4)


def _in_buckets(nbytes: int) -> StepFacts:
    return _step(*(replace(unit, bucket_nbytes=nbytes) for unit in SIXTY))


CASES: dict[str, tuple[Callable[[StepFacts], list[Finding]], StepFacts]] = {
    "five things with the largest gains": (findings, FIVE),
    "not where nothing was lost": (findings, _step(*FAST, rank_compute=[(10, 10)] * 5, rank_waits=(1, 1), lost={})),
    "what gains less than a 200th of the step": (rules.late_rank, LITTLE),
    "not what gains less than a 200th of the step": (findings, LITTLE),
    # Of six parts, each takes 1 ms: the first has the 4.8 ms that the whole had, the others hide behind compute.
    "split gains what parts can hide": (rules.split, _step(A, LARGE, C)),
    "not split with nothing to hide behind": (rules.split, _step(A, replace(LARGE, forward=0), C)),
    "not split, since it is hardly larger": (rules.split, _step(A, _unit("b", 1.5, **LATE), C)),
    "not split of one module": (rules.split, _step(A, replace(LARGE, largest_module_nbytes=6 * MIB), C)),
    "not split of the only unit": (rules.split, _step(LARGE)),
    "split of two layers, one with a bias": (rules.split, _step(A, TWO, C)),
    "tail of two layers, one with a bias": (rules.tail, _step(A, TWO, C)),
    "not split of one large layer": (rules.split, _step(A, replace(TWO, largest_module_nbytes=5 * MIB), C)),
    "split of several units": (
        rules.split,
        _step(*UNLISTED[:3], replace(LARGE, forward_late=1.0), replace(LARGE, name="c")),
    ),
    # Of 16 parts, one gather stays; the others hide behind forward.
    "alone, with all parameters": (findings, _step(ONE, _unit("empty", 0))),
    "alone, with a fast forward": (rules.alone, _step(replace(ONE, forward=16, tail_late=0))),
    "not alone with one module": (rules.alone, _step(replace(ONE, largest_module_nbytes=32 * MIB))),
    "not alone beside another unit": (rules.alone, _step(ONE, A)),
    "keep takes what gains most per byte": (rules.keep, _step(*AGAIN)),
    "keep as much as is free": (rules.keep, _step(*AGAIN, free_nbytes=2 * MIB)),
    "not keep where nothing is free": (rules.keep, _step(*AGAIN, free_nbytes=0)),
    # No more than the time in which nothing was gathered.
    "prefetch in forward": (rules.prefetch, _step(A, _unit("b", forward_late=3, forward_idle=2))),
    "prefetch in backward": (rules.prefetch, _step(_unit("a", backward_late=1, backward_idle=4), _unit("b"))),
    "not prefetch of what was prefetched": (rules.prefetch, _step(A, _unit("b", forward_late=3))),
    "prefetch is one finding per pass": (rules.prefetch, _step(*UNLISTED)),
    "join saves what the cheapest costs, but for one": (rules.join, _step(*SMALL, _unit("d", per_use=0.4))),
    "not join of units that are no neighbours": (rules.join, _step(SMALLER[0], _unit("l"), SMALLER[1])),
    "not join of the root": (rules.join, _step(replace(SMALLER[0], is_root=True), SMALLER[1], _unit("l"))),
    "join of neighbours": (rules.join, _step(*SMALLER[:2], _unit("l"))),
    "joined units are no larger than the largest": (
        rules.join,
        _step(*(_unit(str(i), 0.4, is_small=True, per_use=1) for i in range(6)), _unit("l")),
    ),
    "join of as many equal units as travel in one bucket": (rules.join, _step(*SIXTY)),
    "join of half as many": (rules.join, _in_buckets(MIB // 2)),
    "not join where a bucket holds one": (rules.join, _in_buckets(MIB // 64 + 1)),
    # No more than the gaps between reductions.
    "reduce": (rules.reduce, _step(_unit("a", reduce_late=4), _unit("b", reduce_late=2), reduce_idle=3.0)),
    "not reduce without gaps": (rules.reduce, _step(_unit("a", reduce_late=4), _unit("b", reduce_late=2))),
    "tail hides behind the other half of its unit": (rules.tail, _step(ENDS, _unit("b"))),
    "not tail of one module": (rules.tail, _step(replace(ENDS, largest_module_nbytes=MIB), _unit("b"))),
    # No more than every other rank waits.
    "late rank": (rules.late_rank, _step(rank_compute=[(50, 60, 52), (50, 61, 52)] * 3, rank_waits=(12, 0, 5))),
    "not late rank if nobody waits": (rules.late_rank, _step(rank_compute=[(50, 60)] * 5, rank_waits=(0, 0))),
    "not late rank without others": (rules.late_rank, _step(rank_compute=[(50,)] * 5, rank_waits=(3,))),
    "not late rank in four steps": (rules.late_rank, _step(rank_compute=[(50, 60)] * 4, rank_waits=(9, 9))),
    "not late rank by turns": (
        rules.late_rank,
        _step(rank_compute=[(50, 60), (60, 50), (50, 60)] * 2, rank_waits=(9, 9)),
    ),
    "not late rank if the lead differs by more than it is": (
        rules.late_rank,
        _step(rank_compute=[(50, 52), (50, 60), (50, 54)] * 2, rank_waits=(9, 9)),
    ),
    "every kind of loss, where no change is known to help": (
        findings,
        _step(rank_compute=[(50, 60)] * 2, is_first_use=True, lost={Cell(lost, "a"): 3.0 for lost in Lost}),
    ),
    "other ranks, each late at times": (
        findings,
        _step(rank_compute=[(50, 60), (60, 50)] * 3, lost={Cell(Lost.RANKS): 4.0}),
    ),
    "late host": (rules.late_host, _step(host_late=7.0)),
    "not late host": (rules.late_host, _step()),
}


@pytest.mark.parametrize("case", CASES)
def test_rule_finds_what_the_facts_say(case: str) -> None:
    rule, facts = CASES[case]
    found = rule(facts)
    assert (found == []) is ("not" in case.split())
    lines = (f"{each.rule} {', '.join(each.units)}, {each.gain_ms:.3f} ms: {each.text}" for each in found)
    TEXTS.check(case, wrapped("\n".join(lines)) or "nothing", among=CASES)


@pytest.mark.parametrize("case", [case for case, (rule, _) in CASES.items() if rule is findings])
def test_findings_explain_no_millisecond_twice(case: str) -> None:
    _, facts = CASES[case]
    lost, found = sum(facts.lost.values()), findings(facts)
    assert sum(each.gain_ms for each in found) <= lost + 1e-9
    # what no finding explains is too little of its kind
    assert lost - sum(each.gain_ms for each in found) < 0.001 * facts.step * len(Lost)
    assert all(each.gain_ms >= 0.1 for each in found)
