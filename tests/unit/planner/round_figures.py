"""A machine and steps with round figures, whose times can be computed by hand."""

from __future__ import annotations

from fsdp2.core.schedule.schedule import AfterForward, UnitRules
from fsdp2.memory.plan import UnitBytes
from fsdp2.planner.groups import GroupCost
from fsdp2.planner.machine import Link, Machine, Reached, Resource, Transfer
from fsdp2.planner.scenario import Choice
from fsdp2.planner.simulate import Accelerator, CallCost

KEEP, SMALLER = AfterForward.KEEP, AfterForward.RESHARD_TO_SMALLER_MESH
# One operation per second.
REACHED = Reached(bf16=1.0, fp8=2.0, fp32=None, attention=1.0, attention_backward=1.0, num_processors=1)
# A second per byte sent, unless said otherwise.
PLAIN = Machine(
    name="round",
    bf16_flops=1e15,
    reached=REACHED,
    memory_nbytes=1e12,
    copy_bandwidth=float("inf"),
    node_size=8,
    in_node=Link(bandwidth=400.0, latency=0.01),
    network=Link(bandwidth=25.0, latency=1.0),
    launch_latency=0.0,
    channels=16,
)
FSDP = Choice()


def group_of(gather_seconds: float, reduce_seconds: float, *, regather: float | None = None) -> GroupCost:
    """A hundred bytes unsharded, a hundred of gradients, which are cast to two hundred."""
    gather, again, reduce = (
        Transfer(0.0, each or 0.0, Resource.NETWORK) for each in (gather_seconds, regather, reduce_seconds)
    )
    return GroupCost(
        gather=gather,
        regather=None if regather is None else again,
        reduce=(reduce,),
        nbytes=UnitBytes(100, 0, 0 if regather is None else 25, gradients=100, copies=210, sent=210),
        reduced_nbytes=10,
        shards_nbytes=40,
        trained_nbytes=40,
    )


def device_of(
    num_units: int,
    group: GroupCost,
    *,
    forward: float = 4.0,
    backward: float = 8.0,
    after_forward: AfterForward = AfterForward.RESHARD,
    kind: type[Accelerator] = Accelerator,
) -> Accelerator:
    calls = [CallCost(unit + 1, forward=forward, backward=backward) for unit in range(num_units)]
    rules = [UnitRules(after_forward=KEEP), *[UnitRules(after_forward=after_forward)] * num_units]
    return kind([None, *[group] * num_units], calls, rules)
