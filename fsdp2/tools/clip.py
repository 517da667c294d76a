"""The norm of all gradients, and clipping by it, for parameters on any mix of meshes.

torch's function asks DTensor for the norm of each gradient. Here, parameters that are cut over the same axes form a
class, and gradients that lie behind each other in memory, as the runtime lands them, are one tensor: one norm per group
of parameters, and one all-reduce per mesh axis. Axes that hold copies do not count twice.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.plan.mesh import mesh_device
from fsdp2.tools.neighbours import cuts_of, joined

_Groups = tuple[dist.ProcessGroup, ...]

_is_none = partial(is_, None)

# Sums of squares in fp32 lose digits as they grow; longer pieces are cut.
_MAX_NUMEL = 1 << 20


@dataclass(frozen=True)
class _Class:
    """Parameters, by position, that are cut over the same process groups. ``device``: where these communicate."""

    groups: _Groups
    device: torch.device
    positions: list[int]


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale all gradients in place so that their norm, taken over all ranks, is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``, but the parameters may be DTensors on different meshes (tensor parallelism,
    experts), next to plain tensors, which count as equal on all ranks. Every rank that holds a part of the parameters
    must call it, with the same parameters in the same order; which of them have gradients may differ.

    Args:
        parameters: what to clip the gradients of.
        max_norm: the largest norm that is left alone.
        norm_type: any positive number, or ``float("inf")``.
        error_if_nonfinite: raise, on all ranks alike, if the norm is not finite.
        foreach: whether to use one launch for many tensors; ``None`` decides by device.

    Returns:
        The norm before clipping, a 0-dim fp32 tensor (fp64 for fp64 gradients), complete and equal on all ranks.

    Raises:
        RuntimeError: the norm is not finite, if asked to check. Gradients are unchanged then.
        ValueError: ``norm_type`` is not positive; a gradient is a sum that is still pending on some axis.
    """
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f'clip_grad_norm_: norm_type={norm_type!r}, expected a positive number or float("inf").')
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if not params:
        return torch.zeros(())
    known = _known(params)
    pieces = known.gradients(params)
    here = [_norm_here(*each, order, foreach) for each in zip(known.classes, pieces, strict=True)]
    norms = _summed_over_ranks(here, order)
    total = _root(_joined(torch.stack([norm.to(norms[0].device) for norm in norms]), order), order)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {order} of all gradients is {total.item()}. Find the loss "
            "that is not finite, or pass error_if_nonfinite=False to scale the gradients by it anyway."
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch: no division by zero, no branch on the value
    alike = [tensors for of_class in pieces for tensors in of_class]
    for tensors in alike:
        _torch.foreach_mul(tensors, factor.to(tensors[0].device))
    return total if any(tensors[0].dtype is torch.float64 for tensors in alike) else total.float()


# Gradients


class _Known:
    """Parameters that were clipped before: their classes, and how their gradients lay in memory, as long as those are
    the same tensors. Holds no gradients, since those that somebody holds are not used again (I13)."""

    def __init__(self, params: Sequence[torch.Tensor], specs: list[object]) -> None:
        self.specs = specs
        found: dict[tuple[_Groups, torch.device], list[int]] = {}
        for position, param in enumerate(params):
            found.setdefault(_class_of(param), []).append(position)
        self.classes = [_Class(groups, device, positions) for (groups, device), positions in found.items()]
        self._locals: list[Callable[[], torch.Tensor | None]] = []
        self._missing: list[int] | None = None  # without a gradient; None before the first use
        self._cuts: list[list[tuple[int, int]]] = []

    def gradients(self, params: Sequence[torch.Tensor]) -> list[list[list[torch.Tensor]]]:
        """What each class has on this rank, in as few tensors as memory allows; those in a list are of one kind."""
        grads = _torch.grads_of(params)
        locals_ = _torch.locals_placed_like(params, grads)
        if any(map(_is_none, locals_)):
            pairs = zip(grads, locals_, strict=True)
            locals_ = [_local(grad) if local is None and grad is not None else local for grad, local in pairs]
            missing = [at for at, local in enumerate(locals_) if local is None]
        else:
            missing = []
        # A tensor that is gone leaves None, too: those without a gradient are told apart by their positions.
        were_seen = self._missing == missing and all(map(is_, locals_, [ref() for ref in self._locals]))
        if were_seen:
            found = [joined(cast(list[torch.Tensor], locals_), cuts) for cuts in self._cuts]
        if not were_seen or None in found:
            self._missing, found = missing, self._cut(locals_)
        return [_alike(tensors or []) for tensors in found]

    def _cut(self, locals_: Sequence[torch.Tensor | None]) -> list[list[torch.Tensor] | None]:
        self._cuts, found = [], []
        for each in self.classes:
            mine = {at: local for at in each.positions if (local := locals_[at]) is not None}
            tensors, positions = list(mine.values()), list(mine)
            cuts = cuts_of(tensors)
            self._cuts.append([(positions[first], numel) for first, numel in cuts])
            found.append(joined(tensors, cuts))
        self._locals = [_no_tensor if local is None else weakref.ref(local) for local in locals_]
        return found


# By the specs of the parameters, which never change: the same ones come in every step.
_recent: list[_Known] = []
_MAX_RECENT = 8


def _known(params: Sequence[torch.Tensor]) -> _Known:
    specs = _torch.specs_of(params)
    for known in _recent:
        if len(known.specs) == len(specs) and all(map(is_, known.specs, specs)):
            return known
    known = _Known(params, specs)
    if None not in specs:
        _recent.insert(0, known)
        del _recent[_MAX_RECENT:]
    return known


def _no_tensor() -> None:
    return None


def _class_of(param: torch.Tensor) -> tuple[_Groups, torch.device]:
    """By the groups that parameters are cut over, whether or not they have a gradient here: all ranks find the same."""
    if not isinstance(param, DTensor):
        return (), param.device
    mesh = param.device_mesh
    cut = [axis for axis, placement in enumerate(param.placements) if not placement.is_replicate()]
    return tuple(mesh.get_group(axis) for axis in cut if mesh.size(axis) > 1), mesh_device(mesh)


def _local(grad: torch.Tensor) -> torch.Tensor:
    if not isinstance(grad, DTensor):
        return grad
    if any(placement.is_partial() for placement in grad.placements):
        raise ValueError(
            f"clip_grad_norm_: a gradient of shape {tuple(grad.shape)} is placed {grad.placements}: its sum is still "
            "pending. Clip after backward has reduced it."
        )
    return _torch.local_of(grad)


def _alike(grads: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """What one launch takes."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        found.setdefault((grad.device, grad.dtype), []).append(grad)
    return list(found.values())


# Norms


def _norm_here(
    of: _Class, pieces: list[list[torch.Tensor]], order: float, foreach: bool | None
) -> tuple[_Class, torch.Tensor]:
    """The norm of one class on this rank, to the power that sums; fp64. That of half precision gradients would overflow
    in theirs."""
    norms: list[torch.Tensor] = []
    for tensors in pieces:
        dtype = tensors[0].dtype
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        cut = [part for tensor in tensors for part in _parts(tensor)]
        if foreach is False:
            norms += [torch.linalg.vector_norm(tensor, order, dtype=wide) for tensor in cut]
        else:
            norms += _torch.foreach_norm(cut, order, wide)
    local = torch.stack([norm.to(of.device) for norm in norms]) if norms else torch.zeros(1, device=of.device)
    return of, _joined(_power(local.double(), order), order)


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    is_long = tensor.dim() == 1 and tensor.numel() > _MAX_NUMEL
    return tensor.split(_MAX_NUMEL) if is_long else (tensor,)


def _summed_over_ranks(values: list[tuple[_Class, torch.Tensor]], order: float) -> list[torch.Tensor]:
    """The values of all classes over all their ranks: one all-reduce per process group, for all that it cuts."""
    found = [value for _, value in values]
    op = dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM
    for group in dict.fromkeys(group for each, _ in values for group in each.groups):
        cut = [i for i, (each, _) in enumerate(values) if group in each.groups]
        joint = torch.stack([found[i] for i in cut])
        dist.all_reduce(joint, op, group=group)
        for i, value in zip(cut, joint.unbind(), strict=True):
            found[i] = value
    return found


# A norm of infinite order is joined as it is, by the maximum; any other as a power, by the sum.


def _power(norm: torch.Tensor, order: float) -> torch.Tensor:
    return norm if math.isinf(order) else norm**order


def _joined(powers: torch.Tensor, order: float) -> torch.Tensor:
    return powers.max() if math.isinf(order) else powers.sum()


def _root(power: torch.Tensor, order: float) -> torch.Tensor:
    return power if math.isinf(order) else power ** (1 / order)
