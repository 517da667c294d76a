"""The memory of a sharded model: what a step holds, limits on it, and what to keep on the host."""

from fsdp2.memory.activations import ActivationOffload, UnitActivations, offload_activations
from fsdp2.memory.budget import OffloadChoice, offload_by_budget
from fsdp2.memory.plan import MemoryPlan, UnitBytes, UnitMemory, memory_plan

__all__ = [
    "ActivationOffload",
    "MemoryPlan",
    "OffloadChoice",
    "UnitActivations",
    "UnitBytes",
    "UnitMemory",
    "memory_plan",
    "offload_activations",
    "offload_by_budget",
]
