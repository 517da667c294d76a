"""The schedule's machine: what each event does to a unit in each phase, prefetches along the recorded order, rules of
single units, and passes cut short. Orders of whole steps of the runtime are in ``tests/distributed/test_traces.py``.

A step is written as words: ``+f1`` and ``-f1`` begin and end the forward of unit 1, ``+e1`` begins one without
gradients, ``+r1`` one that is computed again in backward; ``+b1`` and ``-b1`` begin and end its backward; ``end`` ends
the whole backward. Others of ``WORDS`` are settings. Unit 0 is the root; its forward surrounds the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from fsdp2.schedule.schedule import Actions, AfterForward, Phase, Schedule, UnitRules
from tests.harness.golden import texts_beside

TEXTS = texts_beside(__file__)


def _set_rules(schedule: Schedule, rules: UnitRules) -> None:
    schedule.rules = [rules] * len(schedule.rules)


def _has(**rule: Any) -> Callable[[Schedule, int], None]:
    return lambda schedule, unit: schedule.set_rules(unit, UnitRules(**rule))


WORDS: dict[str, Callable[[Schedule, int], Actions | None]] = {
    "+f": lambda schedule, unit: schedule.pre_forward(unit, in_backward=False, grad_enabled=True),
    "+e": lambda schedule, unit: schedule.pre_forward(unit, in_backward=False, grad_enabled=False),
    "+r": lambda schedule, unit: schedule.pre_forward(unit, in_backward=True, grad_enabled=True),
    "-f": lambda schedule, unit: schedule.post_forward(unit),
    "+b": lambda schedule, unit: schedule.pre_backward(unit),
    "-b": lambda schedule, unit: schedule.post_backward(unit),
    "end": lambda schedule, _: schedule.end_backward(),
    "finalize": lambda schedule, _: schedule.finalize(),
    "reset": lambda schedule, _: schedule.reset(),
    # Settings of the user
    "more": lambda schedule, _: setattr(schedule, "is_last_backward", False),
    "last": lambda schedule, _: setattr(schedule, "is_last_backward", True),
    "by-hand": lambda schedule, _: setattr(schedule, "finalizes_by_hand", True),
    "no-sync": lambda schedule, _: _set_rules(schedule, UnitRules(reduces=False)),
    "sync": lambda schedule, _: _set_rules(schedule, UnitRules()),
    "keep": lambda schedule, _: _set_rules(schedule, UnitRules(after_forward=AfterForward.KEEP)),
    # Rules of one unit
    "keeps": _has(after_forward=AfterForward.KEEP),
    "rests": _has(after_forward=AfterForward.RESHARD_TO_SMALLER_MESH),
    "keeps-alone": _has(keeps_alone=True),
    "stays": _has(reshard_after_backward=False),
    "unread": _has(unshard_in_backward=False),
    "keeps-gradients": _has(reduces=False),
    "lists-two": _has(forward_prefetch=(2, 3)),
    "lists-root": _has(forward_prefetch=(0,)),
    "lists-none": _has(forward_prefetch=()),
    "lists-back": _has(backward_prefetch=(2, 1)),
}


def perform(schedule: Schedule, words: str) -> str:
    """What ``words`` do. Returns the actions of the last one."""
    actions: Actions | None = ()
    for word in words.split():
        kind, unit = re.fullmatch(r"(\D+)(\d*)", word).groups()  # type: ignore[union-attr]
        actions = WORDS[kind](schedule, int(unit or 0))
    return ", ".join(f"{action.value} {unit}" for action, unit in actions or ())


def forward(*units: int, kind: str = "+f") -> str:
    return " ".join([f"{kind}0", *(f"{kind}{unit} -f{unit}" for unit in units), "-f0"])


def backward(*units: int) -> str:
    return " ".join(["+b0", *(f"+b{unit} -b{unit}" for unit in units), "end"])


def schedule_of(**of_the_root: Any) -> Schedule:
    root = UnitRules(after_forward=AfterForward.KEEP, **of_the_root)
    return Schedule([root, UnitRules(), UnitRules(), UnitRules()])


# Every cell. Unit 2 is looked at, in the first step, so that nothing is predicted.

PHASES = {Phase.IDLE: "+f0", Phase.FORWARD: "+f0 +f2"}
PHASES[Phase.RECOMPUTE] = PHASES[Phase.FORWARD] + " -f2 -f0 +b0 +r2"
PHASES[Phase.BACKWARD] = PHASES[Phase.FORWARD] + " -f2 -f0 +b0 +b2"
PHASES[Phase.REDUCED] = PHASES[Phase.BACKWARD] + " -b2"
# Where an event finds a unit in a phase that its pass does not lead to, an exception has cut that pass short, or a
# forward runs a backward inside it: the unit is treated as if it came fresh.
FRESH: dict[str, tuple[str, Phase]] = {
    "+f2": ("use 2", Phase.FORWARD),
    "+r2": ("use 2", Phase.RECOMPUTE),
    "-f2": ("reshard 2", Phase.IDLE),
    "+b2": ("use 2", Phase.BACKWARD),
    "-b2": ("reshard 2, reduce 2", Phase.REDUCED),
    "end": ("reshard 3, reduce 3, reshard 2, reduce 2, reshard 1, reduce 1, reduce 0, land 0", Phase.IDLE),
    "reset": ("", Phase.IDLE),
}
IN_BACKWARD = {"+f2": "use 2", "+r2": "use 2", "-f2": "", "+b2": ""}
CELLS: dict[Phase, dict[str, tuple[str, Phase]]] = {
    Phase.IDLE: FRESH,
    Phase.FORWARD: FRESH,
    Phase.RECOMPUTE: FRESH | {"-f2": ("", Phase.IDLE)},
    Phase.BACKWARD: FRESH | {word: (actions, Phase.BACKWARD) for word, actions in IN_BACKWARD.items()},
    Phase.REDUCED: FRESH | {"end": ("reshard 3, reduce 3, reshard 1, reduce 1, reduce 0, land 0", Phase.IDLE)},
}


@pytest.mark.parametrize("word", FRESH)
@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.value)
def test_cell(phase: Phase, word: str) -> None:
    schedule = schedule_of(reshard_after_backward=False)
    perform(schedule, PHASES[phase])
    is_forward = phase in (Phase.IDLE, Phase.FORWARD)  # the root is in its forward where 2 is idle
    assert schedule.passes.phases[2] is phase
    assert schedule.passes.running == ("forward" if is_forward else "backward")
    assert (perform(schedule, word), schedule.passes.phases[2]) == CELLS[phase][word]
    if word in ("end", "reset"):
        assert (schedule.passes.running, schedule.passes.root) == ("", None)
        assert not schedule.passes.in_backward


# The order of a pass

FORWARD, BACKWARD = forward(1, 2, 3), backward(3, 2, 1)
# What runs before, and what runs then, whose actions are in ``golden/schedule.txt``.
CASES: dict[str, tuple[str, str]] = {
    "forward prefetches along the order of the last one": (forward(2, 1, 3), forward(2, 1, 3)),
    "a unit used twice prefetches what followed that use": (forward(1, 2, 1, 3), forward(1, 2, 1, 3)),
    "forward that skips a unit goes on predicting behind the gap": (FORWARD, forward(2, 3)),
    "a unit that the recorded order lacks predicts nothing": (forward(1, 3), FORWARD),
    "a new order is followed from the next forward on": (f"{FORWARD} {forward(3, 2, 1)}", forward(3, 2, 1)),
    "a wrong prediction is freed at the end of the forward and not before, and forgotten": (
        FORWARD,
        f"{forward(1, 3)} {forward()}",
    ),
    "right predictions are not freed a second time": (f"keeps1 {forward(1, 2)}", forward(1, 2)),
    "a list of the user replaces the prediction": ("lists-two1 lists-none2", f"{FORWARD} {FORWARD}"),
    "a listed unit that was not used is freed at the end of the forward": ("lists-two1", forward(1, 3)),
    "a listed unit that is in its forward is not freed": ("lists-root1", forward(1)),
    "backward of a unit used twice prefetches what ran before each use": (forward(1, 2, 1, 3), backward(3, 1, 2, 1)),
    "forward without gradients is no part of the backward": (f"{FORWARD} {forward(3, 1, kind='+e')}", BACKWARD),
    "uses are forgotten at the end of the last backward": (f"{FORWARD} {BACKWARD}", BACKWARD),
    "uses stay, and nothing lands, while more backwards are to come": (
        f"{forward(1, 2)} {forward(3)}",
        f"more {backward(3)} {backward(2, 1)} last {backward()} {backward(2, 1)}",
    ),
    # Unit 1 runs before and after unit 2, the first time detached: unit 2 predicts a backward that never comes.
    "a wrong prediction in backward is freed at its end": (forward(1, 2, 1), backward(1, 2)),
    "units without an end of their backward are resharded and reduced at its end, innermost first": (
        FORWARD,
        "+b0 +b3 +b2 +b1 -b3 -b2 end",
    ),
    # Other ranks may have used them, and all ranks issue the same collectives.
    "units that took no part in the backward are reduced too": (forward(1), backward(1)),
    "reductions follow the backward": (FORWARD, backward(1, 3)),
    # A checkpoint over units 2 and 3 inside unit 1.
    "what is computed again is gathered, and not resharded before its backward": (
        FORWARD,
        "+b0 +b1 +r2 -f2 +r3 -f3 +b3 -b3",
    ),
    "what is computed again leaves the recorded orders alone": (
        FORWARD,
        f"+b0 +r3 -f3 +b3 -b3 +r2 -f2 +b2 -b2 +r1 -f1 +b1 -b1 end {FORWARD}",
    ),
    "a backward that raised leaves nothing behind a reset": (f"{FORWARD} +b0 +b3 reset", f"{FORWARD} {BACKWARD}"),
    "a reset keeps the order of the last complete forward": (f"{FORWARD} +f0 +f3 reset", FORWARD),
    "predictions of a forward that raised do not reach the next one": (f"{FORWARD} +f0 +f2 reset", forward()),
    # Rules of single units
    "resting on a smaller mesh": ("rests1", forward(1)),
    "a unit kept after backward is reduced and not resharded": (f"stays1 {forward(1)}", backward(1)),
    "rules replaced between passes hold from then on": (forward(1), f"keep {forward(1)}"),
    "a unit that backward does not read is neither gathered nor prefetched, but reduced": (
        f"unread1 {FORWARD}",
        BACKWARD,
    ),
    "a listed unit that backward does not read is left out": (f"unread1 lists-back3 {FORWARD}", "+b3"),
    "a unit that backward does not read prefetches what comes after it": (f"unread3 {FORWARD}", "+b0 +b3"),
    "what is computed again is gathered, even if backward does not read it": (f"unread1 {forward(1)}", "+b1 +r1"),
    "a unit of several modules stays unsharded after a forward on its own only": (
        "keeps-alone1",
        f"+f1 -f1 {forward(1)}",
    ),
    "a unit without sync keeps its gradients while others reduce": (
        f"keeps-gradients1 {forward(1, 2)}",
        backward(2, 1),
    ),
    # Backwards that the user finalizes
    "what a backward left is reduced when the user finalizes": (
        f"by-hand {FORWARD}",
        f"{backward(3, 1)} finalize finalize",
    ),
    # The root's end of the first forward comes before the second.
    "a backward to be finalized lands nothing and keeps the order for the next": (
        f"by-hand {forward(1, 2)} {forward(1, 2)}",
        f"{backward(2, 1)} {backward(2, 1)} finalize {backward(2, 1)}",
    ),
    "backwards without sync are reduced once by a finalization with sync": (
        f"by-hand no-sync {FORWARD} {BACKWARD}",
        f"{FORWARD} {BACKWARD} sync finalize",
    ),
    "a finalization without sync leaves gradients for the next one": (
        f"keeps-gradients1 by-hand {FORWARD} {BACKWARD}",
        "finalize sync finalize",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_actions(case: str) -> None:
    before, words = CASES[case]
    schedule = schedule_of()
    perform(schedule, before)
    TEXTS.check(case, "\n".join(f"{word}: {perform(schedule, word)}".strip() for word in words.split()), among=CASES)


def test_a_forward_inside_a_backward_is_over_when_it_ends() -> None:
    schedule = schedule_of()
    perform(schedule, f"{forward(1)} +b0 +r1 -f1")
    assert schedule.passes.running == "backward"


@pytest.mark.parametrize(
    ("ends", "awaits"),
    [("finalize", False), ("+f0 reset", True), ("+b0 reset", False)],
    ids=["finalized", "a forward that raises does not end it", "a backward that raises does"],
)
def test_a_backward_awaits_finalization(ends: str, awaits: bool) -> None:
    schedule = schedule_of()
    perform(schedule, f"by-hand {forward(1)} {backward(1)}")
    assert schedule.awaits_finalization
    perform(schedule, ends)
    assert schedule.awaits_finalization is awaits


def test_units_are_reduced_last_in_one_step_only() -> None:
    for ends in (["end"], ["by-hand end", "finalize"]):
        schedule = schedule_of()
        schedule.reduced_last.add(2)
        for words in ends:
            assert schedule.reduced_last == {2}
            perform(schedule, words)
        assert schedule.reduced_last == set()
