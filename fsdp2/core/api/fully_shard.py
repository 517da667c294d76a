"""``fully_shard``: collect, resolve, commit. Every refusal comes before commit changes the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, overload
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.core import _torch, seams
from fsdp2.core.api.arguments import expect
from fsdp2.core.api.module import FSDPModule
from fsdp2.core.api.resolve import (
    ResolvedGroup,
    ShardPlacementFn,
    read_reshard_after_forward,
    resolve_groups,
)
from fsdp2.core.comm.offload import Home, home_for
from fsdp2.core.group.group import ParamGroup
from fsdp2.core.group.param import Slot
from fsdp2.core.marks import SHARDED_AS, leave_alone
from fsdp2.core.plan.mesh import ParallelMesh, default_mesh, parallel_mesh
from fsdp2.core.runtime.hooks import ModuleHooks
from fsdp2.core.runtime.unit import Unit, unit_of
from fsdp2.core.schedule.schedule import AfterForward
from fsdp2.core.types import DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy


@overload
def fully_shard(module: list[nn.Module], **options: Any) -> list[FSDPModule]: ...
@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy | None = ...,
    ignored_params: Collection[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> FSDPModule: ...
def fully_shard(  # type: ignore[misc]  # options of a list of modules are those of one
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy | None = OffloadPolicy(),  # noqa: B008 (frozen)
    ignored_params: Collection[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Shard the parameters of ``module``, their gradients and optimizer states over the ranks of ``mesh``.

    All parameters under ``module`` that no earlier call has taken form one unit: its parameters are gathered together,
    and its gradients are reduced together. Call it bottom-up, on every block and then on the root. Parameters become
    ``DTensor`` shards in place; build the optimizer after this call. Parameters may already be DTensors, sharded over
    model axes (TP, EP) of the same mesh. A parameter that an inner unit holds and that is also used outside that unit
    moves to this one. The module's class gains :class:`FSDPModule`.

    Args:
        module: the module, or several modules that are unsharded and reduced as one unit.
        mesh: 1D for FSDP; 2D (replicate, shard) for HSDP. Its device type decides where parameters live.
            Default: all ranks, on the accelerator if there is one. On a rank that is not in ``mesh``, shards are empty
            and the model cannot run until :func:`reshard_to` brings the rank in.
        reshard_after_forward: True frees unsharded parameters between forward and backward; False keeps them; an int
            reshards them over groups of that many ranks. Default: True, but False for the root.
        shard_placement_fn: returns for each parameter ``Shard(dim)`` to shard a dimension other than 0,
            ``Replicate()`` to keep it whole on each rank and all-reduce its gradient, a :class:`ParamPlacement` to
            shard it over other ranks (experts), or None.
        mp_policy: dtypes of compute, reduction and output. This and ``offload_policy`` may be torch's own.
        offload_policy: ``CPUOffloadPolicy`` keeps shards, gradients and optimizer states on the host.
            None, which some clients pass, offloads nothing.
        ignored_params: parameters that are not sharded, moved or reduced; a set, list or tuple.
        dp_mesh_dims: the data-parallel axes of ``mesh``, if ``mesh`` has all axes of the model and every parameter is a
            DTensor on ``mesh``, or has types of the spmd_types library. Without a shard axis, parameters stay whole
            and gradients are averaged (DDP).

    Returns:
        ``module`` itself, changed in place.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: the mesh, a placement, a dtype or a parameter does not allow the sharding; or ``module`` was given
            to ``fully_shard`` before. The model is then unchanged.
        ExtensionError: a parameter is a tensor subclass that cannot be cut into shards.

    Source: Zhao et al., "PyTorch FSDP", VLDB 2023; per-parameter sharding as in ``torch.distributed.fsdp``.
    """
    roots = _root_modules(module)
    policies = seams.read_arguments(mesh, dp_mesh_dims, mp_policy, offload_policy, shard_placement_fn, ignored_params)
    prepared = prepare_unit(
        roots,
        parallel_mesh(default_mesh() if mesh is None else mesh, dp_mesh_dims),
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
        mp_policy=policies[0],
        offload_policy=policies[1],
        ignored_params=set(ignored_params or ()),
    )
    _change_classes(roots)
    prepared.commit()
    return module


# Collect and check


def _root_modules(module: object) -> tuple[nn.Module, ...]:
    given = tuple(module) if isinstance(module, (list, tuple)) else (module,)
    expect(bool(given), "fully_shard: module", module, "at least one module", by_value=True)
    for item in given:
        expect(isinstance(item, nn.Module), "fully_shard: module", item, "an nn.Module or a list of them")
    modules = tuple(dict.fromkeys(given))
    inner = {child for item in modules for child in item.modules() if child is not item}
    roots = tuple(item for item in modules if item not in inner)
    seams.check_roots(roots)
    return roots


def _collect(
    roots: Sequence[nn.Module], ignored: Set[nn.Parameter]
) -> tuple[list[seams.Found], list[nn.Module], list[Slot]]:
    """The parameters to manage with all their slots, the modules outside other units (whose buffers move to the mesh's
    device), and the slots of ignored parameters."""
    found: dict[nn.Parameter, seams.Found] = {}
    managed: dict[nn.Module, None] = {}
    left_alone: list[Slot] = []
    for i, root in enumerate(roots):
        for prefix, module in _modules_outside_units(root, "" if len(roots) == 1 else f"[{i}].", set()):
            seams.check_module(prefix, module)
            if "replicate" in _torch.composable_apis(module):  # torch's DDP reduces the gradients of this whole subtree
                left_alone += _slots_under(module)
                continue
            managed[module] = None
            for name, param in _torch.parameters_dict(module).items():
                if param is None:
                    continue
                if param in ignored:
                    left_alone.append(Slot(module, name))
                    continue
                found.setdefault(param, seams.Found(f"{prefix}{name}", param)).slots[Slot(module, name)] = None
    return list(found.values()), list(managed), left_alone


def _modules_outside_units(module: nn.Module, prefix: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The module tree of ``module`` without the subtrees of other units, each module once. Nothing below a module that
    torch's ``replicate`` was applied to is included."""
    seen.add(module)
    yield prefix, module
    if "replicate" in _torch.composable_apis(module):
        return
    for name, child in module.named_children():
        if child not in seen and unit_of(child) is None:
            inside = prefix if seams.is_left_out(module, name) else f"{prefix}{name}."
            yield from _modules_outside_units(child, inside, seen)


def _slots_under(module: nn.Module) -> list[Slot]:
    return [Slot(inner, name) for inner in module.modules() for name in _torch.parameters_dict(inner)]


# Commit


@dataclass(frozen=True)
class PreparedUnit:
    """A unit that is ready to be created: everything that may be refused has been checked; nothing has changed yet.

    Attributes:
        resolved: the groups of the unit.
        commit: shards the parameters in place.
    """

    resolved: Sequence[ResolvedGroup]
    commit: Callable[[], Unit]


def prepare_unit(
    roots: tuple[nn.Module, ...],
    parallel: ParallelMesh,
    *,
    reshard_after_forward: bool | int | None,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    ignored_params: Set[nn.Parameter],
    shard_placement_fn: ShardPlacementFn | None = None,
) -> PreparedUnit:
    """Check that the parameters under ``roots`` that belong to no unit yet can form one. For :func:`fully_shard`, and
    for front ends that do not change the classes of modules.

    Raises:
        ValueError, TypeError, ExtensionError: for the same reasons as in ``fully_shard``.
    """
    found, managed, left_alone = _collect(roots, ignored_params)
    found, left_out, take_over = seams.divide_ties(found, roots)
    config = read_reshard_after_forward(reshard_after_forward, parallel)
    size = config.post_forward_size
    home = home_for(offload_policy, parallel.device)
    resolve = partial(resolve_groups, found, parallel, shard_placement_fn, mp_policy, home, size)
    resolved = seams.resolve_on_ranks(parallel, resolve)
    if size is not None and all(group.mesh.shard.size <= size for group in resolved):
        config = replace(config, after_forward=AfterForward.RESHARD)

    @torch.inference_mode(False)  # tensors made in inference mode cannot be trained and do not count writes
    def commit() -> Unit:
        leave_alone(ignored_params)
        leave_alone(getattr(slot.module, slot.name) for slot in left_alone)
        take_over()
        for module in managed:
            for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                if not buffer.is_meta:
                    setattr(module, name, buffer.to(parallel.device))
            _torch.mark_as_managed(module)
        unit = Unit(roots, tuple(_groups(resolved, home)), parallel, mp_policy, config)
        unit.left_alone.update(left_alone)
        unit.left_out = left_out
        unit.hooks = ModuleHooks(unit)
        return unit

    return PreparedUnit(resolved, commit)


def _groups(resolved: Sequence[ResolvedGroup], home: Home) -> Iterator[ParamGroup]:
    """Create the groups, which turns the parameters into shards."""
    for item in resolved:
        seams.warn_of_hooks(item.params, is_sharded=False)
        for param in item.params:
            setattr(param.sharded, SHARDED_AS, param.name)
        group = ParamGroup(item.params, item.mesh, home)
        wire = item.params[0].policy.reduce_wire
        if wire is not None:
            group.configure(reduces_by=seams.reduces_by_wire(wire))
        for commit in item.on_commit:
            commit()
        group.unsharded.post_forward_mesh = item.post_forward
        for param in group.params:
            setattr(param.sharded, SHARDED_AS, param.name)
        yield group


def _change_classes(roots: Sequence[nn.Module]) -> None:
    """Give all ``roots`` their sharded class, or none. This is the first change, as Python or the class may refuse it.

    Raises:
        TypeError: a class cannot be subclassed, or its instances cannot change their class.
    """
    originals = [type(root) for root in roots]
    try:
        for root in roots:
            root.__class__ = _sharded_class(type(root))
    except BaseException:
        for root, original in zip(roots, originals, strict=True):
            root.__class__ = original
        raise


_sharded: WeakValueDictionary[type[nn.Module], type[nn.Module]] = WeakValueDictionary()  # a notebook redefines classes


def _sharded_class(original: type[nn.Module]) -> type[nn.Module]:
    """``original`` with ``FSDPModule`` in front. One result per class, so that ``type(a) is type(b)`` still holds."""
    attributes = {"__module__": original.__module__, "__qualname__": f"FSDP{original.__qualname__}"}
    bases = (FSDPModule, original)
    return _sharded.get(original) or _sharded.setdefault(original, type(f"FSDP{original.__name__}", bases, attributes))
