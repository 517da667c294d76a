"""What a forward leads to, and the state machine of a parameter group, written as a table.

The group looks up each event in ``TRANSITIONS`` and raises a ScheduleError if there is no entry for it. A test
drives every cell.
"""

from __future__ import annotations

from enum import Enum


class Outcome(Enum):
    """What the end of a unit's forward leads to."""

    NOTHING = "nothing"  # its output needs no gradient
    BACKWARD = "backward"
    UNKNOWN = "unknown"  # gradients are off in this part of the forward, but a checkpoint may rerun it with them


class GroupState(Enum):
    """Which form of the parameters the modules have bound, and whether a gather is in flight."""

    __hash__ = object.__hash__  # Enum's own is Python; transitions are looked up in the hot path

    SHARDED = "SHARDED"
    UNSHARDING = "UNSHARDING"
    UNSHARDED = "UNSHARDED"
    SHARDED_POST_FORWARD = "SHARDED_POST_FORWARD"
    LENT = "LENT"


class GroupEvent(Enum):
    """What may happen to the parameters."""

    __hash__ = object.__hash__

    UNSHARD = "unshard"
    WAIT = "wait"
    RESHARD = "reshard"
    RESHARD_POST_FORWARD = "reshard to the post-forward mesh"
    LEND = "lend"
    TAKE_BACK = "take back"


_S, _E = GroupState, GroupEvent
# (state, event) -> state. If the state stays the same, the group does nothing.
TRANSITIONS: dict[tuple[GroupState, GroupEvent], GroupState] = {
    (_S.SHARDED, _E.UNSHARD): _S.UNSHARDING,
    (_S.SHARDED, _E.RESHARD): _S.SHARDED,
    (_S.SHARDED, _E.RESHARD_POST_FORWARD): _S.SHARDED,  # the user resharded inside the forward
    (_S.UNSHARDING, _E.UNSHARD): _S.UNSHARDING,
    (_S.UNSHARDING, _E.WAIT): _S.UNSHARDED,
    (_S.UNSHARDING, _E.RESHARD): _S.SHARDED,  # prefetched and not used
    (_S.UNSHARDED, _E.UNSHARD): _S.UNSHARDED,
    (_S.UNSHARDED, _E.WAIT): _S.UNSHARDED,
    (_S.UNSHARDED, _E.RESHARD): _S.SHARDED,
    (_S.UNSHARDED, _E.RESHARD_POST_FORWARD): _S.SHARDED_POST_FORWARD,
    (_S.SHARDED_POST_FORWARD, _E.UNSHARD): _S.UNSHARDING,
    (_S.SHARDED_POST_FORWARD, _E.RESHARD): _S.SHARDED,
    (_S.SHARDED_POST_FORWARD, _E.RESHARD_POST_FORWARD): _S.SHARDED_POST_FORWARD,
    (_S.SHARDED, _E.LEND): _S.LENT,
    (_S.LENT, _E.TAKE_BACK): _S.SHARDED,
}
