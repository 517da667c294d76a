"""Every cell of a parameter group's state machine, on real groups: four ranks, resting on two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from fsdp2 import ScheduleError
from fsdp2.core.group.group import ParamGroup
from fsdp2.core.runtime.unit import unit_of
from fsdp2.core.schedule.states import TRANSITIONS, GroupEvent, GroupState
from fsdp2.core.types import DOCS
from tests.distributed.support import InjectedError, Stack, seeded, sharded, step
from tests.harness.distributed import RankContext, distributed

S, E = GroupState, GroupEvent

PERFORM: dict[GroupEvent, Callable[[ParamGroup], Any]] = {
    E.UNSHARD: ParamGroup.unshard,
    E.WAIT: ParamGroup.wait,
    E.RESHARD: ParamGroup.reshard,
    E.RESHARD_POST_FORWARD: ParamGroup.reshard_post_forward,
    E.LEND: ParamGroup.lend,
    E.TAKE_BACK: ParamGroup.take_back,
}
WAY_TO: dict[GroupState, tuple[GroupEvent, ...]] = {
    S.SHARDED: (),
    S.UNSHARDING: (E.UNSHARD,),
    S.UNSHARDED: (E.UNSHARD, E.WAIT),
    S.SHARDED_POST_FORWARD: (E.UNSHARD, E.WAIT, E.RESHARD_POST_FORWARD),
    S.LENT: (E.LEND,),
}
ALLOWED: dict[GroupState, dict[GroupEvent, GroupState]] = {
    S.SHARDED: {E.UNSHARD: S.UNSHARDING, E.RESHARD: S.SHARDED, E.RESHARD_POST_FORWARD: S.SHARDED, E.LEND: S.LENT},
    S.UNSHARDING: {E.UNSHARD: S.UNSHARDING, E.WAIT: S.UNSHARDED, E.RESHARD: S.SHARDED},
    S.UNSHARDED: {
        E.UNSHARD: S.UNSHARDED,
        E.WAIT: S.UNSHARDED,
        E.RESHARD: S.SHARDED,
        E.RESHARD_POST_FORWARD: S.SHARDED_POST_FORWARD,
    },
    S.SHARDED_POST_FORWARD: {
        E.UNSHARD: S.UNSHARDING,
        E.RESHARD: S.SHARDED,
        E.RESHARD_POST_FORWARD: S.SHARDED_POST_FORWARD,
    },
    S.LENT: {E.TAKE_BACK: S.SHARDED},
}
STORY = (
    "post_forward blocks.1, pre_forward blocks.2, post_forward blocks.2, post_forward (root), pre_backward (root), "
    "pre_backward blocks.2, post_backward blocks.2, pre_backward blocks.1, post_backward blocks.1, "
    "pre_backward blocks.0, post_backward blocks.0, end_backward (root)"
)
# None: refused.
CELLS = {(state, event): after.get(event) for state, after in ALLOWED.items() for event in E}


def test_the_table_has_every_cell_and_is_that_of_the_groups() -> None:
    assert set(CELLS) == {(state, event) for state in GroupState for event in GroupEvent}
    assert {cell: state for cell, state in CELLS.items() if state is not None} == TRANSITIONS


def _group(ctx: RankContext, state: GroupState) -> tuple[Any, ParamGroup]:
    """A model that has trained one step, and the group of its second block in ``state``."""
    model = sharded(ctx, reshard_after_forward=2)
    step(model)
    unit = unit_of(model.blocks[1])
    assert unit is not None
    (group,) = unit.groups
    for event in WAY_TO[state]:
        PERFORM[event](group)
    assert group.state is state
    return model.blocks[1], group


def _form(block: Any) -> str:
    """Which form of its parameters ``block`` holds, checked against the values it should have."""
    expected = seeded(Stack).blocks[1].linear.weight.detach()
    weight = block.linear.weight
    if isinstance(weight, DTensor):
        assert torch.equal(weight.full_tensor(), expected)
        return f"DTensor on {weight.device_mesh.ndim}D mesh"
    assert torch.equal(weight, expected)
    return "unsharded"


def _assert_unshards(block: Any, group: ParamGroup) -> None:
    group.unshard()
    group.wait()
    assert _form(block) == "unsharded"
    group.reshard()


RESTS, RESTS_ON_TWO = "DTensor on 1D mesh", "DTensor on 2D mesh"
# While gathering, what was bound before stays bound; so does what is lent, until somebody writes to the slots.
FORMS: dict[GroupState, set[str]] = {
    S.SHARDED: {RESTS},
    S.UNSHARDING: {RESTS, RESTS_ON_TWO},
    S.UNSHARDED: {"unsharded"},
    S.SHARDED_POST_FORWARD: {RESTS_ON_TWO},
    S.LENT: {RESTS},
}


@pytest.mark.parametrize(("state", "event"), [cell for cell, after in CELLS.items() if after is not None])
@distributed(4)
def test_allowed_event_leads_to_its_state_and_binds_its_form(
    ctx: RankContext, state: GroupState, event: GroupEvent
) -> None:
    block, group = _group(ctx, state)
    transitions: list[tuple[GroupState, GroupState]] = []
    group.on_transition = lambda before, after: transitions.append((before, after))
    PERFORM[event](group)
    after = CELLS[state, event]
    assert group.state is after
    assert transitions == ([] if after is state else [(state, after)])
    assert _form(block) in FORMS[after]
    if state is S.SHARDED_POST_FORWARD and event is E.UNSHARD:
        group.wait()
        assert _form(block) == "unsharded"
    group.take_back() if after is S.LENT else group.reshard()
    assert _form(block) == RESTS


@pytest.mark.parametrize(("state", "event"), [cell for cell, after in CELLS.items() if after is None])
@distributed(4)
def test_illegal_event_tells_the_story_and_changes_nothing(
    ctx: RankContext, state: GroupState, event: GroupEvent
) -> None:
    block, group = _group(ctx, state)
    form = _form(block)
    transitions: list[Any] = []
    group.on_transition = lambda before, after: transitions.append((before, after))
    with pytest.raises(ScheduleError) as caught:
        PERFORM[event](group)
    hint = "Leave that block first." if state is S.LENT else f"See {DOCS}/guide/wrapping.md#roots."
    story = f"unit 'blocks.1' cannot {event.value} in state {state.value}. Last events: {STORY}.\n"
    assert str(caught.value).startswith(story)
    assert str(caught.value).endswith(hint)
    assert group.state is state
    assert transitions == []
    assert _form(block) == form
    group.take_back() if state is S.LENT else group.reshard()
    _assert_unshards(block, group)


@pytest.mark.parametrize("fails", ["issue", "wait"])
@distributed(4)
def test_observers_are_told_of_the_way_back_if_a_gather_fails(ctx: RankContext, fails: str) -> None:
    block, group = _group(ctx, S.SHARDED)
    told: list[tuple[GroupState, GroupState]] = []
    group.on_transition = lambda before, after: told.append((before, after))
    gather = group.unsharded.gather
    if fails == "wait":
        group.unshard()
    with mock.patch.object(gather, fails, side_effect=InjectedError), pytest.raises(InjectedError):
        group.unshard() if fails == "issue" else group.wait()
    assert told[-1][1] is group.state
    assert [before for before, _ in told[1:]] == [after for _, after in told[:-1]]
    _assert_unshards(block, group)
