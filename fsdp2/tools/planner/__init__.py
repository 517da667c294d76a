"""Plans how to shard a model: predicts what a step on N GPUs costs before it runs.

From the bottom up: ``machine`` models the cost of a collective, ``work`` what a unit computes, ``groups`` what a
compiled plan sends, ``queues`` when operations on streams run, ``memory`` what is held, ``simulate`` what the runtime
enqueues for each action of the schedule; ``scenario`` combines them. ``blocks`` finds the units of a model, ``observe``
what they compute; ``plan`` compares the ways to shard them, and ``code`` writes code for the chosen one.
"""

from fsdp2.tools.planner.machine import Contention, Link, Machine
from fsdp2.tools.planner.machines import MACHINES
from fsdp2.tools.planner.placement import placement_for
from fsdp2.tools.planner.plan import Candidate, Plan, Workload, plan
from fsdp2.tools.planner.recompute import recompute

__all__ = [
    "MACHINES",
    "Candidate",
    "Contention",
    "Link",
    "Machine",
    "Plan",
    "Workload",
    "placement_for",
    "plan",
    "recompute",
]
