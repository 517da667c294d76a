"""``fully_shard``: collect, resolve, commit.

Everything that can be refused is refused while resolving, into frozen records; commit cannot fail on user input, so a
refused call leaves the model as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fsdp2 import _torch
from fsdp2.api import ExtensionError, MixedPrecisionPolicy, OffloadPolicy
from fsdp2.extensions import has_hooks, is_plain
from fsdp2.group import ParamGroup
from fsdp2.hooks import ModuleHooks
from fsdp2.layout import ShardLayout
from fsdp2.mesh import ParallelMesh, default_mesh, parallel_mesh, post_forward_mesh
from fsdp2.module import FSDPModule
from fsdp2.param import ParamRecord, Slot, check_uniform_dtypes, subclass_shard
from fsdp2.precision import param_dtypes
from fsdp2.runtime import Unit, unit_of
from fsdp2.schedule import AfterForward

ShardPlacementFn = Callable[[nn.Parameter], Shard | None]

# Set on the original parameter once it has been sharded, to recognise a tie that crosses units, and on the sharded
# one, to recognise an inner module that comes after an outer one.
_SHARDED_AS = "_fsdp2_sharded_as"


@dataclass(frozen=True)
class _Found:
    """A parameter in the tree: its first name, and every place where it is bound."""

    name: str
    param: nn.Parameter
    slots: list[Slot] = field(default_factory=list)


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (frozen)
    ignored_params: set[nn.Parameter] | None = None,
) -> FSDPModule | list[FSDPModule]:
    """Shard ``module``'s parameters, their gradients and so the optimizer's states over the ranks of ``mesh``.

    All parameters under ``module`` that no earlier call has taken form one unit: they are all-gathered together before
    the module's forward and backward, and their gradients are reduce-scattered together after it. Call it bottom-up, on
    every block and then on the root, so that few units are unsharded at a time.

    Parameters become ``DTensor`` shards in place; the optimizer is built after this call. The module's class gains
    :class:`FSDPModule`; ``isinstance`` with its original class still holds.

    Args:
        module: the module, or modules that are unsharded and reduced as one unit.
        mesh: 1D for FSDP; 2D (replicate, shard) for HSDP. Its device type says where parameters live. Default: all
            ranks, on the accelerator if there is one.
        reshard_after_forward: True frees unsharded parameters between forward and backward; False keeps them; an int
            reshards them over groups of that many ranks. Default: True, but False for the root.
        shard_placement_fn: per parameter, ``Shard(dim)`` to cut along another dimension than 0, or None.
        mp_policy: dtypes of compute, reduction and output.
        offload_policy: only the default, which keeps everything on the mesh's device, is supported so far.
        ignored_params: parameters to leave as they are: neither sharded, moved nor reduced.

    Returns:
        ``module`` itself, changed in place.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: the mesh, a placement, a dtype or a parameter cannot be sharded as asked; ``module`` was given to
            ``fully_shard`` before. Nothing has changed then.
        ExtensionError: a parameter is of a tensor subclass that cannot be cut into shards.
        NotImplementedError: DTensor parameters, CPU offload.

    Source: Zhao et al., "PyTorch FSDP", VLDB 2023; per-parameter sharding as in ``torch.distributed.fsdp``.
    """
    roots = _root_modules(module)
    _check_policies(mp_policy, offload_policy)
    ignored = _checked_ignored(ignored_params)
    parallel = parallel_mesh(default_mesh() if mesh is None else mesh)
    found, managed = _collect(roots, ignored)
    records = [_resolve(item, parallel, shard_placement_fn, mp_policy) for item in found]
    check_uniform_dtypes((record.name, record.dtypes.orig, record.param.requires_grad) for record in records)
    after_forward, resting = _resolve_after_forward(reshard_after_forward, parallel)
    _commit(roots, managed, records, parallel, mp_policy, after_forward, resting)
    return module  # type: ignore[return-value]


# Collect and check


def _root_modules(module: object) -> tuple[nn.Module, ...]:
    given = tuple(module) if isinstance(module, (list, tuple)) else (module,)
    if not given:
        raise ValueError("fully_shard: got an empty list of modules, expected at least one.")
    for item in given:
        if not isinstance(item, nn.Module):
            raise TypeError(f"fully_shard: expected an nn.Module or a list of them, found {type(item).__name__}.")
    modules = tuple(dict.fromkeys(given))
    inner = {child for item in modules for child in item.modules() if child is not item}
    roots = tuple(item for item in modules if item not in inner)
    for item in roots:
        if unit_of(item) is not None:
            raise ValueError(
                f"fully_shard: this {_original_name(item)} was given to fully_shard before. Call it once per module, "
                "on inner modules first."
            )
        if isinstance(item, (nn.ModuleList, nn.ModuleDict)) and type(item).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard: {type(item).__name__} has no forward, so its parameters would never be unsharded. "
                "Call fully_shard on each module in it, or pass list(...) of them as one unit."
            )
    return roots


def _check_policies(mp_policy: object, offload_policy: object) -> None:
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(f"fully_shard: mp_policy must be an fsdp2.MixedPrecisionPolicy, not {_described(mp_policy)}.")
    if not isinstance(offload_policy, OffloadPolicy):
        raise TypeError(
            f"fully_shard: offload_policy must be an fsdp2.OffloadPolicy, not {_described(offload_policy)}."
        )
    if type(offload_policy) is not OffloadPolicy:
        raise NotImplementedError(
            f"fully_shard: offload_policy={offload_policy!r}: offloading to the host is not built yet. "
            "Leave offload_policy out."
        )


def _checked_ignored(ignored_params: object) -> set[nn.Parameter]:
    if ignored_params is None:
        return set()
    if not isinstance(ignored_params, (set, frozenset)):
        raise TypeError(f"fully_shard: ignored_params must be a set of parameters, not {_described(ignored_params)}.")
    return set(ignored_params)


def _collect(roots: Sequence[nn.Module], ignored: set[nn.Parameter]) -> tuple[list[_Found], list[nn.Module]]:
    """The parameters to manage with all their slots, and the modules that they and their buffers are in."""
    found: dict[nn.Parameter, _Found] = {}
    managed: dict[nn.Module, None] = {}
    for i, root in enumerate(roots):
        for prefix, module in _named_modules_outside_units(root, "" if len(roots) == 1 else f"[{i}]."):
            managed[module] = None
            for name, param in _torch.parameters_dict(module).items():
                if param is None or param in ignored:
                    continue
                item = found.setdefault(param, _Found(f"{prefix}{name}", param))
                if (slot := Slot(module, name)) not in item.slots:
                    item.slots.append(slot)
    return list(found.values()), list(managed)


def _named_modules_outside_units(root: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """``root``'s tree without the subtrees of other units, each module once."""
    seen: set[nn.Module] = set()
    pending = [(prefix, root)]
    while pending:
        name, module = pending.pop()
        if module in seen or (module is not root and unit_of(module) is not None):
            continue
        seen.add(module)
        yield name, module
        children = [(f"{name}{child_name}.", child) for child_name, child in module.named_children()]
        pending += reversed(children)


# Resolve


def _resolve(
    item: _Found, parallel: ParallelMesh, placement_fn: ShardPlacementFn | None, policy: MixedPrecisionPolicy
) -> ParamRecord:
    name, param = item.name, item.param
    if isinstance(param, DTensor) and hasattr(param, _SHARDED_AS):
        raise ValueError(
            f"fully_shard: parameter '{name}' was sharded before, by a call on a module around this one. "
            "Call fully_shard on inner modules first."
        )
    if isinstance(param, DTensor):
        raise NotImplementedError(
            f"fully_shard: parameter '{name}' is a DTensor already. Sharding parameters of tensor-parallel modules is "
            "not built yet; list it in ignored_params, or shard before distributing."
        )
    if param.dim() == 0:
        raise ValueError(
            f"fully_shard: parameter '{name}' is a scalar and has no dimension to shard. "
            "Give it shape (1,), or list it in ignored_params."
        )
    if not param.is_contiguous():
        raise ValueError(
            f"fully_shard: parameter '{name}' of shape {tuple(param.shape)} has strides {param.stride()}: it is not "
            "contiguous, so its shards are no slices of its memory. "
            f"Replace it with nn.Parameter({name.rpartition('.')[2]}.detach().contiguous()) first."
        )
    if (sharded_as := getattr(param, _SHARDED_AS, None)) is not None:
        raise ValueError(
            f"fully_shard: parameter '{name}' is tied to '{sharded_as}' of a unit that was sharded before, and the tie "
            "would be lost. Call fully_shard([a, b]) on the modules that share it, as one unit."
        )
    dim = _resolve_dim(name, param, placement_fn)
    layout = ShardLayout(tuple(param.shape), dim, parallel.shard.size)
    return ParamRecord(
        name=name,
        param=param,
        slots=tuple(item.slots),
        layout=layout,
        placements=parallel.placements(dim),
        dtypes=param_dtypes(param.dtype, policy),
        local=_subclass_shard(name, param, layout, parallel),
    )


def _subclass_shard(name: str, param: nn.Parameter, layout: ShardLayout, parallel: ParallelMesh) -> torch.Tensor | None:
    full = param.detach()
    if has_hooks(param) and not has_hooks(full):
        raise ExtensionError(
            f"fully_shard: parameter '{name}' is a {type(param).__name__} with all-gather hooks, but its data is a "
            f"{type(full).__name__} without, and it is the data that is sharded: the hooks would be ignored. Make them "
            "methods of the tensor that nn.Parameter wraps."
        )
    if is_plain(full):
        return None
    with torch.no_grad():
        return subclass_shard(name, full, layout, parallel.shard.rank, parallel.device)


def _resolve_dim(name: str, param: nn.Parameter, placement_fn: ShardPlacementFn | None) -> int:
    placement = None if placement_fn is None else placement_fn(param)
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise TypeError(
            f"fully_shard: shard_placement_fn returned {placement!r} for parameter '{name}', "
            "expected Shard(dim) or None."
        )
    if not -param.dim() <= placement.dim < param.dim():
        raise ValueError(
            f"fully_shard: parameter '{name}' has shape {tuple(param.shape)}, so it cannot be sharded on dim "
            f"{placement.dim}. Return a dim in [{-param.dim()}, {param.dim() - 1}] from shard_placement_fn."
        )
    return placement.dim % param.dim()


def _resolve_after_forward(value: object, parallel: ParallelMesh) -> tuple[AfterForward | None, ParallelMesh | None]:
    if value is None:
        return None, None
    if isinstance(value, bool):
        return (AfterForward.RESHARD if value else AfterForward.KEEP), None
    if not isinstance(value, int):
        raise TypeError(f"fully_shard: reshard_after_forward must be a bool, an int or None, not {_described(value)}.")
    size = parallel.shard.size
    if value < 1 or size % value != 0:
        factors = [n for n in range(1, size + 1) if size % n == 0]
        raise ValueError(
            f"fully_shard: reshard_after_forward={value} does not divide the {size} ranks of the shard axis. "
            f"Pass one of {factors}, or a bool."
        )
    if value == 1:
        warnings.warn(
            "reshard_after_forward=1 means one rank per shard: parameters stay unsharded. Pass False to say so, or "
            "True to reshard over all ranks.",
            stacklevel=3,
        )
        return AfterForward.KEEP, None
    if value == size:
        return AfterForward.RESHARD, None
    return AfterForward.RESHARD_TO_SMALLER_MESH, post_forward_mesh(parallel, value)


# Commit


def _commit(
    roots: tuple[nn.Module, ...],
    managed: list[nn.Module],
    records: list[ParamRecord],
    parallel: ParallelMesh,
    policy: MixedPrecisionPolicy,
    after_forward: AfterForward | None,
    resting: ParallelMesh | None,
) -> None:
    for module in managed:
        buffers = _torch.buffers_dict(module)
        for name, buffer in buffers.items():
            if buffer is not None and buffer.device.type != "meta":
                buffers[name] = buffer.to(parallel.device)
    for record in records:
        setattr(record.param, _SHARDED_AS, record.name)
    groups = (ParamGroup(records, parallel, policy),) if records else ()
    for group in groups:
        group.rest_on(resting)
        for param in group.params:
            setattr(param.sharded, _SHARDED_AS, param.name)
    unit = Unit(roots, groups, parallel, policy, after_forward)
    unit.hooks = ModuleHooks(unit)
    for root in roots:
        root.__class__ = _sharded_class(type(root))


_sharded_classes: dict[type, type] = {}


def _sharded_class(original: type[nn.Module]) -> type[nn.Module]:
    """``original`` with ``FSDPModule`` in front, one per class so that ``type(a) is type(b)`` is kept."""
    if original not in _sharded_classes:
        attributes = {"__module__": original.__module__, "__qualname__": f"FSDP{original.__qualname__}"}
        _sharded_classes[original] = type(f"FSDP{original.__name__}", (FSDPModule, original), attributes)
    return _sharded_classes[original]


def _original_name(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")


def _described(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
