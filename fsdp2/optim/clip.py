"""The norm of all gradients, and clipping by it, for parameters on any mix of meshes.

Parameters that are sharded over the same axes form a class. Gradients that are adjacent in memory are joined into one
tensor. So there is one norm per parameter group and one all-reduce per mesh axis. Replicas are counted once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp2.core import CommunicationError, ParamGroup, _torch, comms, door, groups_by_slot, marks, plans
from fsdp2.extras import torch_names
from fsdp2.extras.checked import POSITIVE_OR_INF, Limit, checked

# A sum of squares in fp32 loses digits as it grows, so longer tensors are split.
_MAX_NUMEL = 1 << 20


class _Class(NamedTuple):
    """Parameters that are sharded over the same process ``groups``, which communicate on ``device``. ``pieces`` are the
    gradients on this rank, by device and dtype, in as few tensors as their memory layout allows."""

    groups: tuple[dist.ProcessGroup, ...]
    device: torch.device
    pieces: list[list[torch.Tensor]]


@door.entry
@checked(max_norm=Limit(0, or_inf=True), norm_type=POSITIVE_OR_INF)
@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float | torch.Tensor,
    norm_type: float | Literal["inf"] = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale all gradients in place so that their norm, taken over all ranks, is at most ``max_norm``.

    It works like ``torch.nn.utils.clip_grad_norm_``, but parameters may be DTensors on different meshes, mixed with
    plain tensors. A plain tensor is taken to be equal on all ranks. A flat parameter of ``FullyShardedDataParallel``
    counts as the shards that it represents. All ranks must pass the same parameters, in any order, but may have
    gradients for different ones.

    Args:
        parameters: the parameters whose gradients are clipped.
        max_norm: gradients whose norm is at most this are left unchanged: at least 0, or infinite to get the norm only.
        norm_type: any positive number, ``float("inf")`` or ``"inf"``.
        error_if_nonfinite: raise on all ranks if the norm is not finite.
        foreach: whether to use one launch for many tensors; ``None`` decides by device.

    Returns:
        The norm before clipping, a 0-dim fp32 tensor (fp64 for fp64 gradients), complete and equal on all ranks.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set. The gradients are unchanged.
        ValueError: ``max_norm`` is negative or NaN; ``norm_type`` is not positive; a gradient is a pending sum over
            some axis.
        CommunicationError: a rank is lost, or the process group was destroyed.
    """
    order = float(norm_type)
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if any(hasattr(cls, "_is_flat_param") for cls in set(map(type, params))):
        params = [shard for param in params for shard in _shards_of(param)]
    if any(marks.STANDS_FOR in attributes for attributes in filter(None, map(vars, params))):
        params = [vars(param).get(marks.STANDS_FOR, param) for param in params]  # the parameter that has the gradient
    if not params:
        return torch.zeros(())
    classes = _classes(params)
    total = _total(classes, order, foreach)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {order} of all gradients is {total.item()}. Find the loss "
            "that is not finite, or pass error_if_nonfinite=False to scale the gradients anyway."
        )
    factor = factor_of(total, max_norm)
    pieces = [tensors for each in classes for tensors in each.pieces]
    for tensors in pieces:
        torch_names.foreach_mul(tensors, factor.to(tensors[0].device))
    wide = torch.float64, torch.complex128
    return total if any(tensors[0].dtype in wide for tensors in pieces) else total.float()


def norm_of_gradients(params: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of the gradients of ``params`` over all ranks, as a 0-dim fp64 tensor on the gradients' device.
    Collective, like ``clip_grad_norm_``."""
    return _total(_classes(params), 2.0, None)


def factor_of(total: torch.Tensor, max_norm: float | torch.Tensor) -> torch.Tensor:
    """The factor by which to scale gradients with the norm ``total``. As in torch, there is no division by zero and no
    branch on the value."""
    return (max_norm / (total + 1e-6)).clamp(max=1.0)


def _total(classes: list[_Class], order: float, foreach: bool | None) -> torch.Tensor:
    powers = _summed_over_ranks(classes, [_power_here(each, order, foreach) for each in classes], order)
    power = _joined(torch.stack([power.to(powers[0].device) for power in powers]), order)
    return power if math.isinf(order) else power ** (1 / order)


def _shards_of(param: torch.Tensor) -> list[torch.Tensor]:
    """The shards that a ``FlatParameter`` represents, whose gradients share its gradient's memory; else ``param``."""
    group = vars(param).get("_group")
    return [each.sharded for each in group.params] if isinstance(group, ParamGroup) else [param]


def _classes(params: Sequence[torch.Tensor]) -> list[_Class]:
    """The classes of ``params``. They are the same on all ranks, since parameters without a gradient count, too."""
    grads = torch_names.grads_of(params)
    locals_ = torch_names.locals_placed_like(params, grads)
    # If DTensor has placed a gradient differently from its parameter, the gradient's own placement counts.
    placed = [
        grad if local is None and isinstance(grad, DTensor) else param
        for param, grad, local in zip(params, grads, locals_, strict=True)
    ]
    apart = _apart_over()
    by_groups: dict[tuple[tuple[dist.ProcessGroup, ...], torch.device], list[torch.Tensor]] = {}
    by_spec: dict[object, list[torch.Tensor]] = {}  # parameters that fully_shard cuts in the same way share one spec
    specs = torch_names.specs_of(placed)
    for param, like, spec, grad, local in zip(params, placed, specs, grads, locals_, strict=True):
        apart_over = apart.get(id(param))
        key = like.device if spec is None else id(spec), apart_over
        if key not in by_spec:
            by_spec[key] = by_groups.setdefault(_groups_of(like, apart_over), [])
        if grad is not None:
            by_spec[key].append(_local(grad) if local is None else local)
    keys = by_groups if len(by_groups) == 1 else sorted(by_groups, key=_agreed_order)
    return [_Class(*key, _alike(joined_neighbours(by_groups[key]))) for key in keys]


def _agreed_order(key: tuple[tuple[dist.ProcessGroup, ...], torch.device]) -> tuple[object, ...]:
    """A sort key that orders classes identically on all ranks, whatever the order of parameters (I4). Ranks that share
    one process group of a class may differ in another, but its description, which names the mesh axis, is the same."""
    groups, device = key
    return [_order_of_group(group) for group in groups], device.type


def _order_of_group(group: dist.ProcessGroup) -> tuple[str, int, str]:
    name = group.group_name
    return group.group_desc, len(name), name  # group names are increasing numbers


def _apart_over() -> dict[int, dist.ProcessGroup]:
    """Maps the id of a sharded parameter to the group whose ranks hold different values of it. See ``GroupOptions``."""
    options = ((group.params[i].sharded, group.options) for group, i in groups_by_slot().values())
    return {id(sharded): each.apart_over for sharded, each in options if each.apart_over is not None}


def _groups_of(
    tensor: torch.Tensor, apart: dist.ProcessGroup | None
) -> tuple[tuple[dist.ProcessGroup, ...], torch.device]:
    """The process groups that ``tensor`` is sharded over, and the device that they communicate on. ``apart`` is one
    more group, whose ranks hold different values of the tensor."""
    if not isinstance(tensor, DTensor):
        return (), tensor.device
    mesh = tensor.device_mesh
    cut = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    cut = [axis for axis in cut if mesh.size(axis) > 1]
    if cut:
        torch_names.check_not_destroyed("clip_grad_norm_: ")
    groups = [mesh.get_group(axis) for axis in cut]
    return (*groups, *(() if apart is None else (apart,))), plans.mesh_device(mesh)


def _local(grad: torch.Tensor) -> torch.Tensor:
    if not isinstance(grad, DTensor):
        return grad
    if any(placement.is_partial() for placement in grad.placements):
        raise ValueError(
            f"clip_grad_norm_: a gradient of shape {tuple(grad.shape)} has placements {grad.placements}, so its sum is "
            "still pending. Clip after backward has reduced the gradient."
        )
    return _torch.local_of(grad)


def joined_neighbours(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The elements of ``tensors``. Adjacent tensors of one dtype in one storage become one 1-D view."""
    firsts: list[torch.Tensor] = []
    sizes: list[int] = []
    end, left, dtype = 0, 0, None  # of the last tensor; ``left``: bytes that follow it in its storage
    for tensor in sorted(tensors, key=torch.Tensor.data_ptr):
        start, nbytes = tensor.data_ptr(), tensor.nbytes
        if nbytes == 0:
            continue
        if start == end and nbytes <= left and tensor.dtype is dtype and tensor.is_contiguous():
            sizes[-1] += nbytes
        else:
            firsts.append(tensor)
            sizes.append(nbytes)
            offset_nbytes = int(tensor.storage_offset()) * tensor.itemsize
            left = tensor.untyped_storage().nbytes() - offset_nbytes if tensor.is_contiguous() else 0
        end, left, dtype = start + nbytes, left - nbytes, tensor.dtype
    return [
        first if first.nbytes == nbytes else first.as_strided((nbytes // first.itemsize,), (1,), first.storage_offset())
        for first, nbytes in zip(firsts, sizes, strict=True)
    ]


def _alike(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """``tensors`` grouped by device and dtype, so that one launch can process each group."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(found.values())


def _joined(powers: torch.Tensor, order: float) -> torch.Tensor:
    """Combine norms of infinite order by their maximum, and powers of other norms by their sum."""
    return powers.max() if math.isinf(order) else powers.sum()


def _power_here(of: _Class, order: float, foreach: bool | None) -> torch.Tensor:
    """The norm of one class on this rank, raised to the power ``order`` so that ranks can sum it; in fp64, since it
    would overflow in half precision."""
    norms: list[torch.Tensor] = []
    for tensors in of.pieces:
        dtype = tensors[0].dtype
        wide = dtype if dtype.is_complex or dtype is torch.float64 else torch.float32
        cut = [part for tensor in tensors for part in (tensor.split(_MAX_NUMEL) if tensor.dim() == 1 else (tensor,))]
        if foreach is False or dtype.is_complex:
            norms += [torch.linalg.vector_norm(tensor, order, dtype=wide) for tensor in cut]
        else:
            norms += torch_names.foreach_norm(cut, order, wide)
    local = torch.stack([norm.to(of.device) for norm in norms]) if norms else torch.zeros(1, device=of.device)
    return _joined(local.double() if math.isinf(order) else local.double() ** order, order)


def _summed_over_ranks(classes: list[_Class], powers: list[torch.Tensor], order: float) -> list[torch.Tensor]:
    """The powers of all classes, summed over their ranks: one all-reduce per process group, for all its classes."""
    takes_maximum = math.isinf(order)
    op = dist.ReduceOp.MAX if takes_maximum else dist.ReduceOp.SUM
    found = dict.fromkeys(group for each in classes for group in each.groups)
    for group in found if len(found) < 2 else sorted(found, key=_order_of_group):  # the same order on all ranks
        cut = [i for i, each in enumerate(classes) if group in each.groups]
        joint = torch.stack([powers[i] for i in cut])
        if takes_maximum:  # a backend's maximum may be a number although a rank has NaN
            joint = torch.cat([joint, joint.isnan()])
        try:
            comms.wait_for(comms.launched(comms.all_reduce, group, joint, op))
        except CommunicationError as error:
            raise comms.lost("clip_grad_norm_", error, "sum the norms of gradients", [group]) from error.__cause__
        if takes_maximum:
            norms, are_nan = joint.chunk(2)
            joint = norms.masked_fill(are_nan > 0, math.nan)
        for i, power in zip(cut, joint.unbind(), strict=True):
            powers[i] = power
    return powers
