"""Plans how to shard a model: predicts what a step on N GPUs costs before it runs.

From the bottom up: ``machine`` models the cost of a collective, ``work`` what a unit computes, ``groups`` what a
compiled plan sends, ``queues`` when operations on streams run, ``simulate`` what the runtime enqueues and holds for
each action of the schedule; ``scenario`` combines them. ``blocks`` finds the units of a model, ``observe`` what they
compute for a ``workload``; ``candidates`` compares the ways to shard them in one of ``plans``, ``code`` writes code for
the chosen one, and ``choose_units`` shards a model by it.
"""

from fsdp2.planner.candidates import plan
from fsdp2.planner.choose_units import AutoShard, auto_shard, recompute
from fsdp2.planner.groups import placement_for
from fsdp2.planner.machine import Contention, Link, Machine, Reached
from fsdp2.planner.machines import MACHINES
from fsdp2.planner.plans import Candidate, Plan
from fsdp2.planner.workload import Workload

__all__ = [
    "MACHINES",
    "AutoShard",
    "Candidate",
    "Contention",
    "Link",
    "Machine",
    "Plan",
    "Reached",
    "Workload",
    "auto_shard",
    "placement_for",
    "plan",
    "recompute",
]
