"""What collectives take: hops and bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fsdp2.planner.machine import Contention, Link, Ranks, Resource, Transfer, all_reduce, gather, ranks_of
from fsdp2.planner.machines import MACHINES
from tests.harness.golden import texts_beside
from tests.harness.messages import error_of
from tests.unit.planner.round_figures import PLAIN

TEXTS = texts_beside(__file__)


@pytest.mark.parametrize(
    ("found", "latency", "seconds", "resource"),
    [
        (gather(PLAIN, Ranks(8, 8), 800), 7 * 0.01, 700 / 400, Resource.IN_NODE),  # all parts but one's own
        # A hop leaves each node, the others stay in one; a node's adapters are shared.
        (gather(PLAIN, Ranks(32, 8), 3200), 4 * 1.0 + 27 * 0.01, 3100 / (8 * 25), Resource.NETWORK),
        (gather(PLAIN, ranks_of(4, stride=8, node_size=8), 400), 3 * 1.0, 300 / 25, Resource.NETWORK),  # one adapter
        # Everything twice, by a tree: log2(16) hops, and back.
        (all_reduce(PLAIN, Ranks(16, 1), 1600), 2 * 4 * 1.0, 2 * 1500 / 25, Resource.NETWORK),
        (gather(PLAIN, Ranks(8, 8), 800, 16), 7 * 0.01, 700 / 400, Resource.IN_NODE),
        (gather(PLAIN, Ranks(8, 8), 800, 17), 2 * 7 * 0.01, 700 / 400, Resource.IN_NODE),  # more than channels
    ],
)
def test_collectives_take_hops_and_bytes(found: Transfer, latency: float, seconds: float, resource: Resource) -> None:
    assert (found.latency, found.seconds) == (pytest.approx(latency), pytest.approx(seconds))
    assert found.resource is resource
    assert found.alone == found.latency + found.seconds


def test_a_node_that_is_filled_in_part_is_a_node() -> None:
    assert [ranks_of(size, 1, 8).num_nodes for size in (1, 8, 12, 16)] == [1, 1, 2, 2]


WRONG: dict[str, Callable[[], object]] = {
    "link without bandwidth": lambda: Link(0, 0),
    "latency below zero": lambda: Link(1, -1),
    "contention of all": lambda: Contention(1),
    "figure that is not known": lambda: MACHINES["A100-80"].peak_fp8(),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named_with_what_is_expected(case: str) -> None:
    TEXTS.check(case, error_of(WRONG[case]), among=WRONG)
