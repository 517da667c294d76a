"""Checks the arguments of ``FullyShardedDataParallel`` and translates them to those of the runtime."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from fsdp2.core import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, ParallelMesh, plans, unit_of
from fsdp2.extras.arguments import check_computes
from fsdp2.fsdp1.torch_names import HYBRID, KEEPS_PARAMETERS

ProcessGroups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None
DeviceId = int | str | torch.device | None
_TYPES: dict[str, type] = {
    "sharding_strategy": ShardingStrategy,
    "cpu_offload": CPUOffload,
    "backward_prefetch": BackwardPrefetch,
    "mixed_precision": MixedPrecision,
}


@dataclass(frozen=True)
class Settings:
    """The arguments of one wrapper, with defaults filled in.

    Attributes:
        parallel: the ranks that parameters are sharded over and replicated on.
        device_mesh: the axes in use of the mesh that the user gave, if any. It decides whether sharded state dicts
            have DTensors.
        process_group: the ranks that parameters are sharded over, or copied to (``NO_SHARD``).
        full_precision_in_eval: see ``evaluation``.
    """

    parallel: ParallelMesh
    device_mesh: DeviceMesh | None
    process_group: dist.ProcessGroup
    strategy: ShardingStrategy
    mixed_precision: MixedPrecision
    cpu_offload: CPUOffload
    use_orig_params: bool
    full_precision_in_eval: bool

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """The dtypes of parameters and reductions. The wrapper casts inputs itself, since the root's rule differs."""
        given = self.mixed_precision
        return MixedPrecisionPolicy(
            param_dtype=given.param_dtype,
            reduce_dtype=given.reduce_dtype or given.param_dtype,
            cast_forward_inputs=False,
        )

    @property
    def offload_policy(self) -> OffloadPolicy:
        return CPUOffloadPolicy() if self.cpu_offload.offload_params else OffloadPolicy()

    @property
    def reshard_after_forward(self) -> bool | None:
        """None means True, except for the root, whose parameters backward needs first."""
        return False if self.strategy in KEEPS_PARAMETERS else None

    @property
    def groups(self) -> ProcessGroups:
        """The ``process_group`` argument that stands for the same ranks."""
        replicas = self.parallel.replicate.group
        if self.strategy in HYBRID and replicas is not None:
            return self.process_group, replicas
        return self.process_group


def checked_settings(module: nn.Module, options: Mapping[str, Any], *, has_policy: bool) -> Settings:
    """Check ``options``, the arguments of one wrapper of ``module``, and fill in defaults."""
    for name, value, cls in (("module", module, nn.Module), *((name, options[name], _TYPES[name]) for name in _TYPES)):
        if not isinstance(value, cls) and (value is not None or name == "module"):
            expected = "an nn.Module" if name == "module" else f"a {cls.__name__} or None"
            raise TypeError(wrong_type(name, value, expected, f"Pass {expected}."))
    process_group, device_mesh = options["process_group"], options["device_mesh"]
    mixed_precision: MixedPrecision | None = options["mixed_precision"]
    if unit_of(module) is not None and isinstance(module, FSDPModule):
        raise ValueError(
            f"FullyShardedDataParallel: fully_shard was called on this {type(module).__name__.removeprefix('FSDP')}, "
            "expected a module without shards, or a wrapper. Use fully_shard or wrappers for a module, not both."
        )
    for name in ("param_dtype", "reduce_dtype") if mixed_precision is not None else ():
        dtype = getattr(mixed_precision, name)
        check_computes(f"FullyShardedDataParallel: mixed_precision.{name}", dtype, is_reduced=name == "reduce_dtype")
    strategy = options["sharding_strategy"] or ShardingStrategy.FULL_SHARD
    device = _checked_device(options["device_id"])
    if process_group is not None and device_mesh is not None:
        raise ValueError(
            "FullyShardedDataParallel: got process_group and device_mesh, expected one of them. Pass device_mesh only."
        )
    if device_mesh is not None:
        mesh = device_mesh = _mesh_to_use(device_mesh, strategy)
    else:
        mesh = _mesh_of(process_group, strategy, _device_type(module, device), has_policy=has_policy)
    _check_device(device, mesh.device_type)
    parallel = plans.parallel_mesh(mesh)
    group = parallel.shard.group
    assert group is not None  # a mesh of one or two axes has one
    if strategy not in HYBRID and parallel.shard.size == 1:
        strategy = ShardingStrategy.NO_SHARD  # one rank: all strategies do the same
    if strategy is ShardingStrategy.NO_SHARD:
        parallel = plans.replicated(parallel)
    if options["backward_prefetch"] is BackwardPrefetch.BACKWARD_POST:
        _warn_of_late_prefetch()
    return Settings(
        parallel=parallel,
        device_mesh=device_mesh,
        process_group=group,
        strategy=strategy,
        mixed_precision=mixed_precision or MixedPrecision(),
        cpu_offload=options["cpu_offload"] or CPUOffload(),
        use_orig_params=options["use_orig_params"],
        full_precision_in_eval=os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1" and mixed_precision is not None,
    )


def wrong_type(name: str, value: object, expected: str, remedy: str) -> str:
    """The message of an error: the argument ``name`` has a ``value`` of the wrong type."""
    return f"FullyShardedDataParallel: {name} is a {type(value).__name__}, expected {expected}. {remedy}"


@cache
def _warn_of_late_prefetch() -> None:
    warnings.warn(
        "FullyShardedDataParallel: BACKWARD_POST does the same as BACKWARD_PRE here: the next unit is gathered while "
        "this unit's backward runs. Pass backward_prefetch=None to gather it afterwards, with less memory.",
        stacklevel=5,
    )


def _mesh_to_use(mesh: DeviceMesh, strategy: ShardingStrategy) -> DeviceMesh:
    """The axes of ``mesh`` that ``strategy`` uses: two for hybrid strategies, else the first one, as in torch."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            wrong_type("device_mesh", mesh, "a DeviceMesh", "Build one with init_device_mesh(device_type, shape).")
        )
    if strategy in HYBRID and mesh.ndim != 2:
        raise ValueError(
            f"FullyShardedDataParallel: device_mesh has {mesh.ndim} axes, {strategy.name} expects two axes (replicate, "
            "shard). Pass a mesh or submesh with these axes."
        )
    if strategy in HYBRID or mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names is not None:
        return mesh[mesh.mesh_dim_names[0]]
    return _mesh_of_groups((mesh.get_group(0),), mesh.device_type)


# Devices


def _checked_device(given: DeviceId) -> torch.device | None:
    """``device_id`` as a device."""
    remedy = 'Pass an index, or a device such as torch.device("cpu").'
    if given is None:
        return None
    if not isinstance(given, (int, str, torch.device)):
        raise TypeError(wrong_type("device_id", given, "an int, a str, a torch.device or None", remedy))
    try:
        return torch.device(given)
    except RuntimeError as error:
        if isinstance(given, int):
            raise ValueError(
                f"FullyShardedDataParallel: device_id={given}, but torch finds no accelerator. Pass "
                'device_id=torch.device("cpu"), or no device_id.'
            ) from error
        raise RuntimeError(f"FullyShardedDataParallel: device_id={given!r} is no device. {remedy}") from error


def _device_type(module: nn.Module, device: torch.device | None) -> str:
    """The device type of parameters: that of ``device``, else the module's, else the accelerator's, if any."""
    if device is not None:
        return device.type
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = {param.device.type for param in module.parameters()} - {"cpu", "meta"}
    if len(found) > 1:
        raise RuntimeError(
            f"FullyShardedDataParallel: parameters are on {' and '.join(sorted(found))}, expected one type of device. "
            "Move the module to one device first."
        )
    return found.pop() if found else accelerator.type if accelerator else "cpu"


def _check_device(device: torch.device | None, device_type: str) -> None:
    """Check that ``device`` is the device that the mesh stands for, which is this process's current one."""
    if device is None:
        return
    current = None if device_type == "cpu" else torch.get_device_module(device_type).current_device()
    if device.type != device_type or (current is not None and device.index not in (None, current)):
        found = device_type if current is None else f"{device_type}:{current}"
        raise ValueError(
            f"FullyShardedDataParallel: device_id is {device}, but this process shards on {found}. Call "
            f"torch.{device.type}.set_device(device_id) first, and pass a mesh or process group of that device."
        )


# Meshes

# Wrappers of one model share a mesh. I4: all ranks must make the same decision whether to communicate. So keys are
# plain values, and nothing is freed before the world's group is.
_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, ...], DeviceMesh]] = WeakKeyDictionary()


def _mesh_of(
    process_group: ProcessGroups, strategy: ShardingStrategy, device_type: str, *, has_policy: bool
) -> DeviceMesh:
    if not dist.is_initialized():
        plans.default_mesh()
    if process_group is None and strategy in HYBRID:
        if not has_policy:
            raise ValueError(
                f"FullyShardedDataParallel: {strategy.name} without auto_wrap_policy expects process_group, a pair of "
                "groups (shard, replicate), or device_mesh, so that all wrappers of a model use the same groups."
            )
        mesh = _mesh_of_nodes(strategy, device_type)
        _known_meshes()[device_type, mesh.get_group(1).group_name, mesh.get_group(0).group_name] = mesh
        return mesh
    groups: Any = dist.group.WORLD if process_group is None else process_group
    expected = "a tuple of two process groups: (shard, replicate)" if strategy in HYBRID else "one process group"
    if strategy not in HYBRID:
        groups = (groups,)
    is_complete = isinstance(groups, tuple) and len(groups) == (2 if strategy in HYBRID else 1)
    if not is_complete or not all(isinstance(group, dist.ProcessGroup) for group in groups):
        raise ValueError(
            f"FullyShardedDataParallel: process_group is a {type(process_group).__name__}, {strategy.name} expects "
            f"{expected}."
        )
    return _mesh_of_groups(groups, device_type)


def _known_meshes() -> dict[tuple[str, ...], DeviceMesh]:
    assert dist.group.WORLD is not None
    return _meshes.setdefault(dist.group.WORLD, {})


def _mesh_of_groups(groups: tuple[dist.ProcessGroup, ...], device_type: str) -> DeviceMesh:
    """The mesh of one group, or of a pair (shard, replicate). Collective for a new pair."""
    key = (device_type, *(group.group_name for group in groups))
    if key in _known_meshes():
        return _known_meshes()[key]
    if len(groups) == 1:
        mesh = DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=("shard",))
    else:
        shard, replicate = groups
        rows: list[list[int]] = [[] for _ in range(replicate.size())]
        dist.all_gather_object(rows, dist.get_process_group_ranks(shard), group=replicate)
        names = ("replicate", "shard")
        mesh = DeviceMesh.from_group([replicate, shard], device_type, torch.tensor(rows), mesh_dim_names=names)
    _known_meshes()[key] = mesh
    return mesh


def _mesh_of_nodes(strategy: ShardingStrategy, device_type: str) -> DeviceMesh:
    """Shard within each node and replicate across nodes."""
    given = os.environ.get("LOCAL_WORLD_SIZE")
    per_node = (
        int(given) if given else 0 if device_type == "cpu" else torch.get_device_module(device_type).device_count()
    )
    world_size = dist.get_world_size()
    if per_node < 1 or world_size % per_node:
        found = f"{per_node} ranks per node" if per_node else "no LOCAL_WORLD_SIZE"
        raise ValueError(
            f"FullyShardedDataParallel: {strategy.name} shards inside of each node, but found {found} for {world_size} "
            "ranks. Start the job with torchrun, or pass process_group, a pair of groups (shard, replicate), or "
            "device_mesh."
        )
    return init_device_mesh(device_type, (world_size // per_node, per_node), mesh_dim_names=("replicate", "shard"))


# What is ignored


@dataclass(frozen=True)
class Ignored:
    """What is left unchanged: parameters, and modules with all modules inside them."""

    params: frozenset[nn.Parameter]
    modules: frozenset[nn.Module]


def checked_ignored(
    module: nn.Module,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
    inside: Sequence[Ignored],
) -> Ignored:
    """What to leave unchanged in ``module``: what the user says, and what wrappers ``inside`` ignore. A parameter that
    is ignored in one place is also ignored where it is tied."""
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(
            "FullyShardedDataParallel: got ignored_modules and ignored_states, expected one of them. Pass "
            "ignored_states only."
        )
    takes_params = ignored_modules is None
    name, given = ("ignored_states", ignored_states) if takes_params else ("ignored_modules", ignored_modules)
    if given is not None and not isinstance(given, Iterable):
        raise TypeError(wrong_type(name, given, "an iterable", "Pass a list."))
    states: list[Any] = list(given or ())
    modules = [state for state in states if isinstance(state, nn.Module)]
    params = [state for state in states if isinstance(state, nn.Parameter) and takes_params]
    if len(states) not in (len(modules), len(params)):
        types = sorted({type(state).__name__ for state in states})
        raise (ValueError if takes_params or isinstance(given, (list, tuple, set)) else TypeError)(
            f"FullyShardedDataParallel: {name} has {' and '.join(types)}, expected modules only"
            + (", or parameters only." if takes_params else ". Pass parameters as ignored_states.")
        )
    for each in modules:
        if unit_of(each) is not None or getattr(each, "_fsdp_wrapped_module", None) is not None:
            raise ValueError(
                f"FullyShardedDataParallel: an ignored module, a {type(each).__name__}, is sharded already. Ignore "
                "modules before they are wrapped."
            )
    inner = frozenset(child for each in modules for child in each.modules())
    if module in inner:
        warnings.warn(
            f"FullyShardedDataParallel: the wrapped {type(module).__name__} itself is ignored, so nothing is sharded. "
            "Ignore modules inside it.",
            stacklevel=4,
        )
    all_params = {*params, *(param for each in inner for param in each.parameters())}
    return Ignored(
        frozenset(all_params.union(*(each.params for each in inside))), inner.union(*(each.modules for each in inside))
    )
