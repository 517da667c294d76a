"""Machines by name, and their sources."""

from __future__ import annotations

import pytest

from fsdp2.planner.machines import MACHINES, fields_of, machine_by_name, machine_from


@pytest.mark.parametrize("name", MACHINES)
def test_machines_have_sources_and_are_found_by_name(name: str) -> None:
    machine = machine_by_name(name.lower())
    assert machine is MACHINES[name]
    assert all(" https://" in f" {source}" for source in machine.sources)
    assert machine.sources[0].split("/")[2] in ("www.nvidia.com", "nvdam.widen.net", "www.amd.com")  # the vendor's
    assert machine_from(fields_of(machine)) == machine


@pytest.mark.parametrize("name", MACHINES)
def test_what_is_reached_is_less_than_the_peak_and_more_in_smaller_dtypes(name: str) -> None:
    machine = MACHINES[name]
    reached = machine.reached
    assert machine.bf16_flops > reached.bf16 > reached.attention > reached.attention_backward
    assert reached.fp8 is None or reached.fp8 > reached.bf16
    assert reached.fp32 is None or reached.fp32 < reached.bf16
