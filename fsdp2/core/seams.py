"""The seams: everything that the core calls without defining it.

A seam is a variable of this module. ``extras/wiring.py`` sets all of them when the package is imported, from a table
that says which function each one calls and when that function is loaded. The core calls them as ``seams.name(...)``.
Each comment says when a seam is called. A feature that is switched on later adds itself to a list, or wraps a seam.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard

    from fsdp2.core.api.resolve import ResolvedGroup
    from fsdp2.core.comm.custom import ReduceMaker
    from fsdp2.core.comm.offload import Home
    from fsdp2.core.group.group import ParamGroup
    from fsdp2.core.group.param import ShardedParam, Slot
    from fsdp2.core.group.shards import GroupShards
    from fsdp2.core.plan.layout import Layout
    from fsdp2.core.plan.mesh import Axis, ParallelMesh
    from fsdp2.core.plan.placements import ParamSpec
    from fsdp2.core.plan.plan import PlanInput
    from fsdp2.core.runtime.executor import Decorator
    from fsdp2.core.runtime.unit import Unit
    from fsdp2.core.runtime.unit_tree import TreeChecks, UnitTree
    from fsdp2.core.schedule.schedule import Schedule
    from fsdp2.core.types import DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy


@dataclass(frozen=True)
class Found:
    """A parameter in the tree: its first name, and every slot that binds it."""

    name: str
    param: nn.Parameter
    slots: dict[Slot, None] = field(default_factory=dict)  # in the order in which they were found


class Codec(Protocol):
    """Runs all-gather hooks: decides what is sent in place of shards that have them, and makes unsharded tensors of
    what arrives. Plain shards need no codec: they are sent as they are, cast to the compute dtype.

    Attributes:
        storages: memory that ``arrive`` fills and that is freed together with the group's unsharded storage.
    """

    storages: list[tuple[torch.UntypedStorage, int]]

    def inputs(self, first_key: int, *, keeps_consumed: bool) -> dict[int, PlanInput]:
        """The plan's input for each tensor to send, with keys from ``first_key`` on. ``keeps_consumed``: even tensors
        that may be freed on arrival are kept while the group is unsharded. If this raises, all ranks raise."""

    def bind_outputs(self, outputs: Mapping[int, torch.Tensor], first_key: int) -> None:
        """Bind the ``outputs`` of the gather whose plan was made from ``inputs(first_key)``."""

    def payloads(self) -> list[torch.Tensor]:
        """This rank's part of each tensor to send, in the order of the keys, without empty parts."""

    def arrive(self) -> None:
        """Everything has been gathered: fill the unsharded tensors. Staging memory is freed afterwards."""


class Adapted(NamedTuple):
    """The result of an adapter for a parameter. Nothing has changed yet.

    Attributes:
        tensor: has all-gather hooks, and is sharded in place of the parameter.
        commit: called once when the parameter is sharded; may change the modules that hold the parameter.
    """

    tensor: torch.Tensor
    commit: Callable[[], None]


# The attributes of a module, and what replaces its call while its parameters are shards.
Guard = tuple[dict[str, Any], Callable[..., Any]]


# In a call of fully_shard, before it changes anything.

# Checks a mesh, dp_mesh_dims, policies, a placement function and ignored parameters; returns policies of our classes.
read_arguments: Callable[..., tuple[MixedPrecisionPolicy, OffloadPolicy]]
# Reads a mesh with all axes of a model, of which the arguments name the data-parallel ones.
data_parallel_part: Callable[[DeviceMesh, DataParallelMeshDims], ParallelMesh]
# Refuses modules that cannot be roots of a unit.
check_roots: Callable[[Sequence[nn.Module]], None]
# Refuses a module; gets a prefix for its name, and the module.
check_module: Callable[[str, nn.Module], None]
# Refuses a parameter that cannot be sharded on a device.
check_param: Callable[[Found, torch.device], None]
# Reads what shard_placement_fn has returned for a parameter of a name, if that is neither a placement nor None: the
# placement, and the mesh for this parameter.
read_placement: Callable[[str, object, ParallelMesh], tuple[Shard | Replicate | None, ParallelMesh]]
# Calls the given function, which resolves all parameters of the call on a mesh. If it raises on one rank, all may.
resolve_on_ranks: Callable[[ParallelMesh, Callable[[], list[ResolvedGroup]]], list[ResolvedGroup]]
# Returns which parameters the call manages, the slots of tied ones that it leaves to an outer call, and a function that
# makes inner units give up the parameters that move to this call.
divide_ties: Callable[[Sequence[Found], Sequence[nn.Module]], tuple[list[Found], list[Slot], Callable[[], None]]]
# By the qualified name of a class without all-gather hooks: makes a subclass with hooks of a parameter. Gets the name
# of the parameter, the parameter, and its slots. Raises ValueError if it cannot be sharded.
adapters: dict[str, Callable[[str, nn.Parameter, Sequence[Slot]], Adapted]] = {}
# Return how a parameter lies on a mesh that cuts it along a dim, if a library has recorded that on the plain tensor;
# else None. The first that knows a parameter answers. Raise ValueError if the record contradicts the mesh.
spec_readers: list[Callable[[str, torch.Tensor, int, ParallelMesh], ParamSpec | None]] = []
# Cuts a rank's shard out of a subclass, in memory of its own: name, tensor, layout, rank, where the shard is to live.
cut_subclass: Callable[[str, torch.Tensor, Layout, int, Home], torch.Tensor]
# Warns of gradient hooks of ShardedParams that are never called; is_sharded says whether they are on shards, or on the
# parameters before them. Also called whenever a gather is bound.
warn_of_hooks: Callable[..., None]

# In a method of a sharded module.

# Checks the arguments of a method of FSDPModule: the method, its positional and its keyword arguments.
check_call: Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], None]
# Reads a size such as "70GiB": the size, what has it, and a valid text for errors.
nbytes_of: Callable[[str | int | float, str, str], int]
# Lets a unit communicate by a user's comm, or in other memory: the setter that was called, the unit, its argument.
communicate_by: Callable[[str, Unit, object], None]

# For process groups that no mesh has.

# Makes the mesh for shards over a number of ranks between forward and backward.
post_forward_mesh: Callable[[ParallelMesh, int], ParallelMesh]
# Returns an axis of the same ranks, on a device, with a process group of its own.
separate_axis: Callable[[Axis, torch.device], Axis]
# Makes an axis with a process group of its own, once per use: the ranks, a description, the axes over which this rank
# can agree with them, and the device.
own_axis: Callable[[list[int], str, Sequence[Axis], torch.device], Axis]

# When a group gathers for the first time.

# Returns what makes the comm that sends gradients by a policy's ``reduce_wire``.
reduces_by_wire: Callable[[Any], ReduceMaker]
# Makes the codec for those parameters of a group whose shards are not plain. If it raises, all ranks raise.
make_codec: Callable[[Sequence[ShardedParam], ParallelMesh, Home], Codec]

# When the user has replaced, moved, cast or loaded parameters.

# Maps each parameter of a group that was replaced by another one of the group to that other one.
ties_inside: Callable[[ParamGroup], dict[ShardedParam, ShardedParam]]
# Says why an object that a user has bound cannot replace a sharded parameter.
why_not_adopted: Callable[[ShardedParam, object], str]
# Refuses a shard on the wrong device: the name of its parameter, its device, and where the group lives.
check_device: Callable[[str, torch.device, Home], None]
# Warns that a plain tensor has replaced a shard of the given class, which had all-gather hooks.
warn_of_plain: Callable[[ShardedParam, type], None]
# Returns the shard of a subclass in pinned memory, if it is to live there.
pin_subclass: Callable[[str, torch.Tensor, Home], torch.Tensor]
# Called before shards adopt parameters, with these and their local tensors. If the tensors are in another group's
# buffers, it may call ``lie_in``. Returns whether it did.
adopt_memory: Callable[[GroupShards, Sequence[nn.Parameter], Sequence[torch.Tensor]], bool]
# Cuts whole tensors that load_state_dict is to load, and refuses what it must not load: a module, the state dict, the
# prefix of its keys, and whether tensors are assigned.
prepare_loaded: Callable[[nn.Module, dict[str, Any], str, bool], None]
# Makes the hook that gives shards to state dicts made in another thread than that of the passes; gets a unit's hooks.
hook_of_saving: Callable[..., Callable[..., None]]
# A context around methods such as ``to`` that replace the tensors of a sharded module.
around_apply: Callable[[nn.Module], AbstractContextManager[None]]
# Copies a sharded module; also gets the memo of copy.deepcopy.
copy_module: Callable[[nn.Module, dict[Any, Any]], nn.Module]

# In a step.

# The checks of each tree, made when its root first runs.
tree_checks: list[Callable[[UnitTree], TreeChecks]] = []
# Makes the schedule and the checks of a tree where ranks may differ in some unit; gets its usual checks.
where_ranks_differ: Callable[[UnitTree, Sequence[TreeChecks]], tuple[Schedule, Sequence[TreeChecks]]]
# Decorates the actions of a tree with a memory limit in bytes.
limit_memory: Callable[[int, UnitTree], Decorator]
# Decorates the actions of a tree that has a limit or a loop, from the start of one forward to that of the next.
decorated: Callable[[UnitTree], Decorator | None]
# Makes guards for those submodules of a unit that compute with parameters of the given modules.
guards_of: Callable[[Unit, Iterable[nn.Module]], list[Guard]]
# Refuses a tensor that the forward of a unit returns if its memory is about to be freed.
check_handed_out: Callable[[Unit, torch.Tensor], None]
# Raises an ExtensionError, because a gradient is a subclass that cannot be reduced.
refuse_gradient: Callable[[ShardedParam, torch.Tensor], None]
# Called before an optimizer steps parameters that stand for shards, or that shards have replaced.
take_over_optimizer: Callable[[torch.optim.Optimizer], None]
# Called after an optimizer has stepped parameters that are not shards: these, and the number of ranks over which the
# gradients of its shards are reduced (0 if it has no shards).
warn_of_plain_step: Callable[[torch.optim.Optimizer, list[torch.Tensor], int], None]

# For names in errors, traces and files.

# The name of a module or parameter under a module, without wrappers.
plain_name: Callable[[nn.Module, str], str]
# Whether such names leave out a child of a module, given by its name.
is_left_out: Callable[[nn.Module, str], bool]


def adapter_of(param: nn.Parameter) -> Callable[[str, nn.Parameter, Sequence[Slot]], Adapted] | None:
    """The adapter for the class of ``param`` or one of its base classes."""
    names = (f"{cls.__module__}.{cls.__qualname__}" for cls in type(param).__mro__)
    return next((adapters[name] for name in names if name in adapters), None)
