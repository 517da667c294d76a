"""Operations on streams: their order, and how they slow each other down."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp2.planner.machine import Contention, Resource
from fsdp2.planner.queues import Op, Queues, Stream, run


def _run(queues: Queues, **contention: float) -> dict[str, tuple[float, float]]:
    run(queues.ops, Contention(**contention))
    return {op.label: (op.start, op.end) for op in queues.ops}


def test_streams_run_beside_each_other_in_order_and_wait_for_what_they_are_told_to() -> None:
    queues = Queues()
    queues.enqueue(Stream.GATHER, "gather", fixed=1, work=2, resource=Resource.NETWORK)
    queues.enqueue(Stream.COMPUTE, "early", work=1)
    queues.wait(Stream.COMPUTE, queues.last(Stream.GATHER))
    queues.enqueue(Stream.COMPUTE, "late", work=1)
    assert _run(queues) == {"gather": (0, 3), "early": (0, 1), "late": (3, 4)}
    queues.wait(Stream.COMPUTE, Op("elsewhere", Stream.GATHER, 0, 1, Resource.NETWORK, ()))
    queues.enqueue(Stream.COMPUTE, "never", work=1)
    with pytest.raises(ValueError, match=r"wait for what never ends: \['never'\]"):
        run(queues.ops, Contention())


@pytest.mark.parametrize(
    ("work", "link", "other", "contention", "expected"),
    [
        # alone for 1 s of latency, which is not shared, both at half for 2 s, alone for 1 s
        (2, Resource.NETWORK, {"fixed": 1, "work": 2, "resource": Resource.NETWORK}, {}, (3, 4)),
        (2, Resource.IN_NODE, {"work": 2, "resource": Resource.NETWORK}, {}, (2, 2)),  # links of different kinds
        (1, Resource.NETWORK, {"work": 4}, {"compute": 0.25, "transfer": 0.5}, (2, 4.5)),  # while both run
    ],
)
def test_what_shares_a_link_or_the_device_slows_each_other_down(
    work: float, link: Resource, other: dict[str, Any], contention: dict[str, float], expected: tuple[float, float]
) -> None:
    queues = Queues()
    queues.enqueue(Stream.GATHER, "gather", work=work, resource=link)
    queues.enqueue(Stream.REDUCE if "resource" in other else Stream.COMPUTE, "other", **other)
    assert _run(queues, **contention) == {"gather": (0, expected[0]), "other": (0, expected[1])}
