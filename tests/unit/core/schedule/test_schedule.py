"""The schedule's machine: what each event does to a unit in each phase, prefetches along the recorded order, rules of
single units, and passes cut short. Orders of whole steps of the runtime are in ``tests/distributed/test_traces.py``.

What is done, and what follows, is in ``golden/schedule.txt``. A step is written as words: ``+f1`` and ``-f1`` begin and
end the forward of unit 1, ``+e1`` begins one without gradients; ``+b1`` and ``-b1``
begin and end its backward; ``end`` ends the whole backward. Others of ``WORDS`` are settings. Unit 0 is the
root; its forward surrounds the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from fsdp2.core.schedule.schedule import Action, Actions, AfterForward, Phase, Schedule, UnitRules
from fsdp2.core.schedule.states import Outcome
from tests.harness.golden import Check, texts_beside

TEXTS = texts_beside(__file__)


def _set_rules(schedule: Schedule, rules: UnitRules) -> None:
    schedule.rules = [rules] * len(schedule.rules)


def _has(**rule: Any) -> Callable[[Schedule, int], None]:
    return lambda schedule, unit: schedule.rules.__setitem__(unit, UnitRules(**rule))


WORDS: dict[str, Callable[[Schedule, int], Actions | None]] = {
    "+f": lambda schedule, unit: schedule.pre_forward(unit, grad_enabled=True),
    "+e": lambda schedule, unit: schedule.pre_forward(unit, grad_enabled=False),
    "-f": lambda schedule, unit: schedule.post_forward(unit),
    "+b": lambda schedule, unit: schedule.pre_backward(unit),
    "-b": lambda schedule, unit: schedule.post_backward(unit),
    "end": lambda schedule, _: schedule.end_backward(),
    "finalize": lambda schedule, _: schedule.finalize(),
    "reset": lambda schedule, _: schedule.reset(),
    "unshard": lambda schedule, unit: schedule.by_hand(Action.UNSHARD, unit),
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
PHASES[Phase.RECOMPUTE] = PHASES[Phase.FORWARD] + " -f2 -f0 +b0 +f2"
PHASES[Phase.BACKWARD] = PHASES[Phase.FORWARD] + " -f2 -f0 +b0 +b2"
PHASES[Phase.REDUCED] = PHASES[Phase.BACKWARD] + " -b2"
# Where an event finds a unit in a phase that its pass does not lead to, an exception has cut that pass short, or a
# forward runs a backward inside it: the unit is treated as if it came fresh.


@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.value)
def test_cells(phase: Phase, golden: Check) -> None:
    """Behind nothing, and behind each event: its actions, the phase, and in which pass the whole model is."""
    said = []
    for word in ("", "+f2", "-f2", "+b2", "-b2", "end", "reset"):
        schedule = schedule_of(reshard_after_backward=False)
        perform(schedule, PHASES[phase])
        passes = schedule.passes
        assert passes.phases[2] is phase
        actions = perform(schedule, word)
        where = f"{passes.running or 'idle'} of {passes.root}{', in backward' * passes.in_backward}"
        said.append(f"{word or 'here'}: {actions or 'nothing'}; {passes.phases[2].value}; {where}")
    golden("\n".join(said))


# The order of a pass. "behind" is what runs before; each other line is a word, and the actions that it leads to.

CASES = [name for name in TEXTS.names() if not name.startswith("test_")]


@pytest.mark.parametrize("case", CASES)
def test_actions(case: str) -> None:
    schedule, said = schedule_of(), []
    for line in TEXTS.of(case).splitlines():
        word, _, words = line.partition(":")
        if word == "behind":
            perform(schedule, words)
        said.append(line if line.startswith(("behind", "#")) else f"{word}: {perform(schedule, word)}".strip())
    TEXTS.check(case, "\n".join(said))


def test_a_forward_inside_a_backward_is_over_when_it_ends() -> None:
    schedule = schedule_of()
    perform(schedule, f"{forward(1)} +b0 +f1 -f1")
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


def test_a_forward_that_no_backward_follows_leaves_nothing_on_the_tape() -> None:
    """Else the tape would grow under a frozen model, and backward would prefetch its units."""
    schedule = schedule_of()
    perform(schedule, "+f0 +f1")
    schedule.post_forward(1, Outcome.NOTHING)
    perform(schedule, "+f2 -f2 -f0")
    assert schedule.tape.ended == [2, 0]
