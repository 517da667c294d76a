"""What collectives take: hops and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fsdp2.planner.machine import Contention, Link, Machine, Ranks, Resource, Transfer, all_reduce, gather, ranks_of
from fsdp2.planner.machines import MACHINES
from fsdp2.planner.work import Attention, Product
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


TILED = replace(PLAIN, copy_bandwidth=1e30, reached=replace(PLAIN.reached, num_processors=4))


@pytest.mark.parametrize(
    ("machine", "product", "seconds"),
    [
        (TILED, Product(512, 256, 10), 2 * 512 * 256 * 10),  # four tiles on four processors
        (TILED, Product(512, 320, 10), 2 * 512 * 384 * 10),  # twelve of half the size, of which four are half empty
        (TILED, Product(512, 256, 10, times=0.5), 512 * 256 * 10),  # four of the smaller ones
        (TILED, Product(128, 256, 10), 2 * 2 * 128 * 256 * 10),  # two: half of the processors are idle
        (TILED, Product(512, 256, 10, times=8), 8 * 2 * 512 * 256 * 10),
        (replace(TILED, copy_bandwidth=1), Product(512, 256, 1), 2 * (512 * 256 + 768)),  # its bytes
    ],
)
def test_a_product_takes_rounds_of_its_tiles_or_its_bytes(machine: Machine, product: Product, seconds: float) -> None:
    assert machine.product_seconds(product, "bf16") == pytest.approx(seconds)


def test_less_power_slows_down_products_alone() -> None:
    full, product = MACHINES["H100"], Product(8192, 8192, 8192)
    limited = full.limited_to(500)
    for dtype in ("bf16", "fp8", "fp32"):
        assert 0.7 < full.product_seconds(product, dtype) / limited.product_seconds(product, dtype) < 0.8
    assert limited == replace(full, name=limited.name, watts=500, reached=limited.reached)
    assert limited.attention_seconds(Attention(1e12, 8192), "bf16") == full.attention_seconds(
        Attention(1e12, 8192), "bf16"
    )


WRONG: dict[str, Callable[[], object]] = {
    "link without bandwidth": lambda: Link(0, 0),
    "latency below zero": lambda: Link(1, -1),
    "contention of all": lambda: Contention(1),
    "figure that is not known": lambda: MACHINES["A100-80"].product_seconds(Product(1, 1, 1), "fp8"),
    "power that is not known": lambda: PLAIN.limited_to(1),
    "products of no rate": lambda: replace(PLAIN.reached, bf16=0.0),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named_with_what_is_expected(case: str) -> None:
    TEXTS.check(case, error_of(WRONG[case]), among=WRONG)
