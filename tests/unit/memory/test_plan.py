"""Whether more fits under a limit, what goes first, and what a step takes: plain numbers, no tensor.

What a ledger says behind each step is in ``golden/plan.txt``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fsdp2.memory.plan import Ledger, UnitBytes
from tests.harness.golden import texts_beside

TEXTS = texts_beside(__file__)
ROOT = UnitBytes(unsharded=10, gradients=10, copies=1, sent=11)
UNIT = UnitBytes(unsharded=100, arriving=5, post_forward=20, gradients=100, copies=7, sent=107)
KEPT, COPIES = ("kept storage is held before, between and in gathers", "backward holds what copies take beyond that")
LEDGERS = {KEPT: ([ROOT, replace(UNIT, kept=100)], 105), COPIES: ([ROOT, replace(UNIT, copies=130)], 400)}

Does = Callable[[Ledger], object]
GATHER: list[Does] = [lambda ledger: ledger.unshard(1), lambda ledger: ledger.wait(1)]
BACKWARD: Does = lambda ledger: ledger.run_backward(1, gathers=True, reshards=True)  # noqa: E731
RESHARD: Does = lambda ledger: ledger.reshard(1)  # noqa: E731
REST: Does = lambda ledger: ledger.reshard(1, post_forward=True)  # noqa: E731
REDUCE: Does = lambda ledger: ledger.reduce(1, 2)  # noqa: E731
CASES: dict[str, list[Does]] = {
    "staging is held until the parameters have arrived": [GATHER[0], *GATHER, RESHARD],  # to gather twice does nothing
    "resting shards are held beside the gather that replaces them": [GATHER[1], REST, *GATHER],
    KEPT: [*GATHER, REST, BACKWARD, RESHARD, REDUCE],
    "backward holds gradients": [BACKWARD],
    COPIES: [BACKWARD],
    "backward that does not reshard": [lambda ledger: ledger.run_backward(1, gathers=True, reshards=False)],
    "reductions land before gathers are dropped, the oldest first": [
        REDUCE,
        lambda ledger: ledger.reduce(2, 2),
        lambda ledger: ledger.unshard(3),
    ],
    "a reduction lands when there would be too many": [*[BACKWARD, RESHARD, REDUCE] * 3, lambda ledger: ledger.land()],
    "gradients kept unreduced are the user's": [BACKWARD, lambda ledger: ledger.keep(1), RESHARD],
}


def _said(ledger: Ledger) -> str:
    needs = [ledger.to_run_backward(1, gathers=True, reshards=reshards) for reshards in (True, False)]
    asked = [*((nbytes, 0) for nbytes in (5, 6, 81, 82, 189, 296, 401)), (296, 3)]  # the last one not beside itself
    rooms = [(nbytes, ledger.room_for(nbytes, unit)) for nbytes, unit in asked]
    free = (f"{nbytes} {room and (room.landings, room.dropped)}" for nbytes, room in rooms)
    return (
        f"held {ledger.held}, at most {ledger.peak}, reductions {ledger.num_reductions}; to gather "
        f"{ledger.to_unshard(1)}, to run backward {needs}; stays {ledger.stays(0)}, beside the last {ledger.stays(3)}\n"
        f"  room for {', '.join(free)}"
    )


@pytest.mark.parametrize("case", CASES)
def test_ledger_holds_what_the_steps_take(case: str) -> None:
    sizes, limit = LEDGERS.get(case, ([ROOT] + [UNIT] * 3, 400))
    ledger = Ledger(dict(enumerate(sizes)), limit)
    said = [_said(ledger)]
    for does in CASES[case]:
        does(ledger)
        said.append(_said(ledger))
    TEXTS.check(case, "\n".join(said), among=CASES)
