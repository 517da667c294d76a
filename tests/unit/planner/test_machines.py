"""Machines by name, and their sources."""

from __future__ import annotations

import pytest

from fsdp2.planner.machines import H100, MACHINES, fields_of, machine_by_name, machine_from


@pytest.mark.parametrize("name", MACHINES)
def test_machines_have_sources_and_are_found_by_name(name: str) -> None:
    machine = machine_by_name(name.lower())
    assert machine is MACHINES[name]
    assert all(source.startswith("https://") for source in machine.sources)
    assert machine.sources[0].split("/")[2] in ("www.nvidia.com", "nvdam.widen.net", "www.amd.com")  # the vendor's
    assert machine_from(fields_of(machine)) == machine


def test_fp8_is_faster_than_bf16() -> None:
    assert H100.peak_fp8() > H100.bf16_flops
