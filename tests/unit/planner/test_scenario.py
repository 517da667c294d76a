"""Exchanges of tensor parallelism: what they take, and what asynchronous ones hide."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp2.planner.machine import Link
from fsdp2.planner.scenario import Choice, Scenario, simulate
from fsdp2.planner.work import Exchange, UnitWork, Work
from tests.unit.planner.round_figures import PLAIN


def _exchanging(*exchanges: Exchange, async_tp: float | None = None) -> float:
    """Seconds that ``exchanges`` add to a forward: gathers take a second per 400 bytes, copies one per 100."""
    machine = replace(PLAIN, copy_bandwidth=100.0, in_node=Link(400.0, 0.0), bf16_flops=1.0, utilisation=1.0)
    second = Work(linear=1.0)
    unit = UnitWork("block", (), second, Work(), 0.0, 0.0, exchanges=(exchanges, ()), is_block=True)
    found = simulate(Scenario(machine, (unit,), 1, 64, Choice("fsdp"), tensor_parallel=8, async_tp=async_tp))
    return found.time.step - 1


TRAVELS = 1600 * 7 / 8 / 400
GATHERS, SUMS = (Exchange(800.0, gathers, product=TRAVELS - 1) for gathers in (True, False))
HIDDEN, ALONE = replace(GATHERS, product=2 * TRAVELS), Exchange(800.0, gathers=False)


@pytest.mark.parametrize(
    ("exchange", "async_tp", "expected"),
    [
        (Exchange(800.0, gathers=True), None, TRAVELS + 2 * 1600 / 100),  # a transfer and a copy
        (ALONE, 1.0, _exchanging(ALONE)),  # it belongs to no single product
        (GATHERS, 1.0, 1),  # all but what is longer than the product
        (HIDDEN, 1.0, 0),
        (SUMS, 1.0, 1 + 1600 * (1 + 1 / 8) / 100),  # in a kernel of its own
        (HIDDEN, 0.75, TRAVELS / 4),  # parts of a product are slower than the whole
        (GATHERS, 0.75, 1 + (TRAVELS - 1) / 4),
    ],
)
def test_async_tp_hides_a_share_of_a_transfer(exchange: Exchange, async_tp: float | None, expected: float) -> None:
    assert _exchanging(exchange, async_tp=async_tp) == pytest.approx(expected)
