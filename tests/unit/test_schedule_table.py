"""Every cell of the schedule's machine: what each event does to a unit in each phase.

Unit 0 is the root, 2 the one looked at; 1 and 3 take no part. It is brought into its phase by the events that lead
there in a real step, the first one, so that nothing is predicted.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fsdp2.schedule.schedule import Actions, AfterForward, Phase, Schedule, UnitRules
from fsdp2.schedule.states import Pass

UNIT = 2


def text(actions: Actions) -> str:
    return ", ".join(f"{action.value} {unit}" for action, unit in actions)


def _idle(schedule: Schedule) -> None:
    _pre_forward(schedule, 0)


def _in_forward(schedule: Schedule) -> None:
    _idle(schedule)
    _pre_forward(schedule, UNIT)


def _in_recompute(schedule: Schedule) -> None:
    _in_forward(schedule)
    for unit in (UNIT, 0):
        schedule.post_forward(unit)
    schedule.pre_backward(0)
    _recompute(schedule, UNIT)


def _in_backward(schedule: Schedule) -> None:
    _in_forward(schedule)
    for unit in (UNIT, 0):
        schedule.post_forward(unit)
    for unit in (0, UNIT):
        schedule.pre_backward(unit)


def _reduced(schedule: Schedule) -> None:
    _in_backward(schedule)
    schedule.post_backward(UNIT)


def _pre_forward(schedule: Schedule, unit: int = UNIT) -> Actions:
    return schedule.pre_forward(unit, in_backward=False, grad_enabled=True)


def _recompute(schedule: Schedule, unit: int = UNIT) -> Actions:
    return schedule.pre_forward(unit, in_backward=True, grad_enabled=True)


PHASES: dict[Phase, Callable[[Schedule], None]] = {
    Phase.IDLE: _idle,
    Phase.FORWARD: _in_forward,
    Phase.RECOMPUTE: _in_recompute,
    Phase.BACKWARD: _in_backward,
    Phase.REDUCED: _reduced,
}
EVENTS: dict[str, Callable[[Schedule], Actions]] = {
    "pre_forward": _pre_forward,
    "pre_forward in backward": _recompute,
    "post_forward": lambda schedule: schedule.post_forward(UNIT),
    "pre_backward": lambda schedule: schedule.pre_backward(UNIT),
    "post_backward": lambda schedule: schedule.post_backward(UNIT),
    "end_backward": lambda schedule: schedule.end_backward(),
    "reset": lambda schedule: schedule.reset() or (),
}
EVERYTHING_REDUCED = "reshard 3, reduce 3, reshard 2, reduce 2, reshard 1, reduce 1, reduce 0, land 0"
# Where an event finds a unit in a phase that its pass does not lead to, an exception has cut that pass short, or a
# forward runs a backward inside it: the unit is treated as if it came fresh.
CELLS: dict[tuple[Phase, str], tuple[str, Phase]] = {
    (Phase.IDLE, "pre_forward"): ("use 2", Phase.FORWARD),
    (Phase.IDLE, "pre_forward in backward"): ("use 2", Phase.RECOMPUTE),
    (Phase.IDLE, "post_forward"): ("reshard 2", Phase.IDLE),
    (Phase.IDLE, "pre_backward"): ("use 2", Phase.BACKWARD),
    (Phase.IDLE, "post_backward"): ("reshard 2, reduce 2", Phase.REDUCED),
    (Phase.IDLE, "end_backward"): (EVERYTHING_REDUCED, Phase.IDLE),
    (Phase.IDLE, "reset"): ("", Phase.IDLE),
    (Phase.FORWARD, "pre_forward"): ("use 2", Phase.FORWARD),
    (Phase.FORWARD, "pre_forward in backward"): ("use 2", Phase.RECOMPUTE),
    (Phase.FORWARD, "post_forward"): ("reshard 2", Phase.IDLE),
    (Phase.FORWARD, "pre_backward"): ("use 2", Phase.BACKWARD),
    (Phase.FORWARD, "post_backward"): ("reshard 2, reduce 2", Phase.REDUCED),
    (Phase.FORWARD, "end_backward"): (EVERYTHING_REDUCED, Phase.IDLE),
    (Phase.FORWARD, "reset"): ("", Phase.IDLE),
    (Phase.RECOMPUTE, "pre_forward"): ("use 2", Phase.FORWARD),
    (Phase.RECOMPUTE, "pre_forward in backward"): ("use 2", Phase.RECOMPUTE),
    (Phase.RECOMPUTE, "post_forward"): ("", Phase.IDLE),
    (Phase.RECOMPUTE, "pre_backward"): ("use 2", Phase.BACKWARD),
    (Phase.RECOMPUTE, "post_backward"): ("reshard 2, reduce 2", Phase.REDUCED),
    (Phase.RECOMPUTE, "end_backward"): (EVERYTHING_REDUCED, Phase.IDLE),
    (Phase.RECOMPUTE, "reset"): ("", Phase.IDLE),
    (Phase.BACKWARD, "pre_forward"): ("use 2", Phase.BACKWARD),
    (Phase.BACKWARD, "pre_forward in backward"): ("use 2", Phase.BACKWARD),
    (Phase.BACKWARD, "post_forward"): ("", Phase.BACKWARD),
    (Phase.BACKWARD, "pre_backward"): ("", Phase.BACKWARD),
    (Phase.BACKWARD, "post_backward"): ("reshard 2, reduce 2", Phase.REDUCED),
    (Phase.BACKWARD, "end_backward"): (EVERYTHING_REDUCED, Phase.IDLE),
    (Phase.BACKWARD, "reset"): ("", Phase.IDLE),
    (Phase.REDUCED, "pre_forward"): ("use 2", Phase.FORWARD),
    (Phase.REDUCED, "pre_forward in backward"): ("use 2", Phase.RECOMPUTE),
    (Phase.REDUCED, "post_forward"): ("reshard 2", Phase.IDLE),
    (Phase.REDUCED, "pre_backward"): ("use 2", Phase.BACKWARD),
    (Phase.REDUCED, "post_backward"): ("reshard 2, reduce 2", Phase.REDUCED),
    (Phase.REDUCED, "end_backward"): ("reshard 3, reduce 3, reshard 1, reduce 1, reduce 0, land 0", Phase.IDLE),
    (Phase.REDUCED, "reset"): ("", Phase.IDLE),
}


def _schedule() -> Schedule:
    root = UnitRules(after_forward=AfterForward.KEEP, reshard_after_backward=False)
    return Schedule([root, UnitRules(), UnitRules(), UnitRules()])


def test_the_table_has_every_cell() -> None:
    assert set(CELLS) == {(phase, event) for phase in Phase for event in EVENTS}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.value)
def test_cell(phase: Phase, event: str) -> None:
    schedule = _schedule()
    PHASES[phase](schedule)
    assert schedule.passes.phases[UNIT] is phase
    actions = EVENTS[event](schedule)
    assert (text(actions), schedule.passes.phases[UNIT]) == CELLS[phase, event]


@pytest.mark.parametrize(
    ("phase", "running"),
    [
        (Phase.IDLE, Pass.FORWARD),  # the root is in its forward
        (Phase.FORWARD, Pass.FORWARD),
        (Phase.RECOMPUTE, Pass.RECOMPUTE),
        (Phase.BACKWARD, Pass.BACKWARD),
        (Phase.REDUCED, Pass.BACKWARD),
    ],
)
def test_pass_follows_from_where_units_stand(phase: Phase, running: Pass) -> None:
    schedule = _schedule()
    assert schedule.passes.running is Pass.IDLE
    PHASES[phase](schedule)
    assert schedule.passes.running is running
    schedule.reset()
    assert schedule.passes.running is Pass.IDLE


@pytest.mark.parametrize(
    ("after_forward", "actions"),
    [
        (AfterForward.KEEP, ""),
        (AfterForward.RESHARD, "reshard 0"),
        (AfterForward.RESHARD_TO_SMALLER_MESH, "reshard_post_forward 0"),
    ],
)
def test_what_becomes_of_parameters_after_forward(after_forward: AfterForward, actions: str) -> None:
    schedule = Schedule([UnitRules(after_forward=after_forward)])
    _pre_forward(schedule, 0)
    assert text(schedule.post_forward(0)) == actions


def test_unit_kept_after_backward_is_reduced_and_not_resharded() -> None:
    schedule = Schedule([UnitRules(reshard_after_backward=False)])
    _pre_forward(schedule, 0)
    schedule.post_forward(0)
    schedule.pre_backward(0)
    assert text(schedule.post_backward(0)) == "reduce 0"


def test_rules_replaced_between_passes_hold_from_then_on() -> None:
    schedule = Schedule([UnitRules()])
    _pre_forward(schedule, 0)
    assert text(schedule.post_forward(0)) == "reshard 0"
    schedule.rules[0] = UnitRules(after_forward=AfterForward.KEEP)
    _pre_forward(schedule, 0)
    assert text(schedule.post_forward(0)) == ""
