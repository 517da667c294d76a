"""``python -m fsdp2 measure`` with ranks."""

from __future__ import annotations

import pytest

from fsdp2.comm import backends
from fsdp2.tools.planner.machines import fields_of, machine_from
from fsdp2.tools.planner.measure import measure
from tests.harness.distributed import RankContext, distributed


@pytest.mark.long
@distributed(2)
def test_collectives_are_measured_by_size_alone_and_beside_products(ctx: RankContext) -> None:
    in_flight = set(backends._in_flight)
    found = measure((2**12, 2**20), width=64)
    assert [(each.name, each.nbytes) for each in found.collectives] == [
        ("all-gather", 2**12),
        ("all-gather", 2**20),
        ("reduce-scatter", 2**12),
        ("reduce-scatter", 2**20),
    ]
    assert backends._in_flight <= in_flight  # each was measured until it had arrived
    assert all(each.alone > 0 <= each.beside for each in found.collectives)
    machine = found.machine
    assert machine.in_node.bandwidth > 0
    assert 0 <= machine.contention.compute <= 0.95
    assert machine_from(fields_of(machine)) == machine
