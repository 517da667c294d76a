"""On an accelerator, everything that touches the same memory is ordered by streams, whatever the user has asked for.

No accelerator is needed: streams are clocks (``tests/harness/simulated.py``), and an access that nothing orders is an
error even where, by luck, it would come late enough on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fsdp2
from fsdp2.comm.streams import AcceleratorStreams
from tests.distributed import stream_scenarios as scenarios
from tests.harness.models import Uneven
from tests.harness.selection import in_ci
from tests.harness.simulated import Simulation, simulated_accelerator

# Each leads to waits that the others do not.
_SHORT = [
    scenarios.plain,
    scenarios.uneven,
    scenarios.resting_and_gathered_in_vain,
    scenarios.kept_storage,
    scenarios.accumulated_partial,
    scenarios.hook_on_a_stream_of_its_own,
    scenarios.custom_communication,
    scenarios.saved_and_loaded,
]


@pytest.mark.filterwarnings("ignore:.*torch.distributed.*deprecated:FutureWarning")  # newer torch renames collectives
@pytest.mark.parametrize(
    "scenario",
    [*_SHORT, *in_ci(*(scenario for scenario in scenarios.SCENARIOS if scenario not in _SHORT))],
    ids=lambda scenario: scenario.__name__,
)
def test_all_accesses_are_ordered(scenario: Callable[[Simulation], None]) -> None:
    with simulated_accelerator() as simulation:
        scenario(simulation)
    assert simulation.races.num_accesses > 100
    assert not simulation.races.found, _listed(simulation)


@pytest.mark.parametrize("name", ["bfloat16", *in_ci("int8", "int8 kept", "float8", "float8 per row")])
def test_all_accesses_of_hooks_are_ordered(name: str) -> None:
    with simulated_accelerator() as simulation:
        scenarios.hooked(scenarios.HOOKED[name])(simulation)
    assert not simulation.races.found, _listed(simulation)


def test_all_accesses_to_memory_of_the_host_are_ordered() -> None:
    with simulated_accelerator(shards_on_host=True) as simulation:
        scenarios.offloaded(simulation)
    assert not simulation.races.found, _listed(simulation)


# The tests above find what is missing: each wait is needed by one of them

_WAITS = [
    ("wait_here", "group.all_gather.wait", scenarios.direct),
    ("wait_here", "group.all_gather.drop", scenarios.resting_and_gathered_in_vain),
    ("gather_after_compute", "group.all_gather.release", scenarios.direct),
    ("gather_after_compute", "group.all_gather.release", scenarios.resting_on_a_smaller_mesh),
    ("gather_after_compute", "group.all_gather.release", scenarios.kept_storage),
    ("wait_here", "group.gradients.finish", scenarios.direct_cast),
    ("compute_after_reduce", "group.gradients.finish", scenarios.one_rank),
    ("compute_after_reduce", "runtime.executor.wait_for_landed", scenarios.plain),
    ("gather_after_compute", "runtime.root.order_gathers", scenarios.plain),
    ("reduce_after_compute", "group.reduce_scatter.launch", scenarios.direct),
    ("reduce_after_compute", "group.gradients._start_landing", scenarios.partial_sums_carried_on_alone),
    ("wait_on_cpu", "comm.offload.wait", scenarios.offloaded),
]


@pytest.mark.parametrize(
    ("method", "place", "scenario"), _WAITS, ids=[f"{place}-{scenario.__name__}" for _, place, scenario in _WAITS]
)
def test_a_wait_that_is_left_out_is_noticed(
    method: str, place: str, scenario: Callable[[Simulation], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = getattr(AcceleratorStreams, method)
    left_out = []

    def leave_out(streams: AcceleratorStreams, *args: Any) -> None:
        frame = sys._getframe(1)
        if f"{frame.f_globals['__name__']}.{frame.f_code.co_name}" == f"fsdp2.{place}":
            left_out.append(place)
        else:
            wait(streams, *args)

    monkeypatch.setattr(AcceleratorStreams, method, leave_out)
    with simulated_accelerator(shards_on_host=scenario is scenarios.offloaded) as simulation:
        scenario(simulation)
    assert left_out
    assert simulation.races.found


# What the CPU waits for


@pytest.mark.parametrize("options", [{}, scenarios.BF16, scenarios.BF16_FP32], ids=["fp32", "bf16", "bf16, fp32"])
@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=str)
def test_no_value_is_waited_for_in_a_step(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    with simulated_accelerator() as simulation:
        model = scenarios.sharded(Uneven(), scenarios.mesh_of(*shape), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            simulation.syncs.clear()
            scenarios.backward(model)
            fsdp2.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert simulation.syncs == []


def _listed(simulation: Simulation) -> str:
    return "\n".join(simulation.races.found)
