"""The runtime, and its face: the rooms above the core, and extensions of users, use only the names imported here.

A unit is one call of ``fully_shard``; the units under a root form a tree. A group is what a unit gathers and reduces
together. Six modules are about one subject each: ``plans`` says *where* bytes lie, ``schedules`` *when* actions run,
``comms`` *how* bytes are sent; ``seams`` is what the core calls without defining it, ``marks`` how it recognises
tensors, and ``door`` how runtime code is entered from user code.
docs/advanced/core.md says which name to use for what.
"""

from fsdp2.core import _torch, comms, marks, plans, schedules, seams
from fsdp2.core.api.arguments import expect
from fsdp2.core.api.fully_shard import PreparedUnit, fully_shard, prepare_unit
from fsdp2.core.api.module import FSDPModule, GradientReductionHandle, UnshardHandle, share_comm_ctx
from fsdp2.core.group.group import ParamGroup, groups_by_slot
from fsdp2.core.group.param import ShardedParam, Slot
from fsdp2.core.marks import is_plain
from fsdp2.core.plan.mesh import Axis, ParallelMesh
from fsdp2.core.runtime import door
from fsdp2.core.runtime.hooks import ModuleHooks
from fsdp2.core.runtime.unit import Unit, unit_of, units_under
from fsdp2.core.runtime.unit_tree import TreeChecks, UnitTree, tree_of
from fsdp2.core.schedule.schedule import AfterForward
from fsdp2.core.schedule.states import GroupState
from fsdp2.core.trees import find_tensors, map_tensors
from fsdp2.core.types import (
    DOCS,
    CommunicationError,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    ExtensionError,
    MemoryLimitError,
    MixedPrecisionPolicy,
    Observer,
    OffloadPolicy,
    ParamPlacement,
    ScheduleError,
)

__all__ = [
    "DOCS",
    "AfterForward",
    "Axis",
    "CPUOffloadPolicy",
    "CommunicationError",
    "DataParallelMeshDims",
    "ExtensionError",
    "FSDPModule",
    "GradientReductionHandle",
    "GroupState",
    "MemoryLimitError",
    "MixedPrecisionPolicy",
    "ModuleHooks",
    "Observer",
    "OffloadPolicy",
    "ParallelMesh",
    "ParamGroup",
    "ParamPlacement",
    "PreparedUnit",
    "ScheduleError",
    "ShardedParam",
    "Slot",
    "TreeChecks",
    "Unit",
    "UnitTree",
    "UnshardHandle",
    "_torch",
    "comms",
    "door",
    "expect",
    "find_tensors",
    "fully_shard",
    "groups_by_slot",
    "is_plain",
    "map_tensors",
    "marks",
    "plans",
    "prepare_unit",
    "schedules",
    "seams",
    "share_comm_ctx",
    "tree_of",
    "unit_of",
    "units_under",
]
