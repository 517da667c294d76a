"""The norm of all gradients, and clipping by it, for parameters on any mix of meshes.

torch's function stacks the norms of all gradients, so it wants them on one mesh. Here, parameters that are cut over the
same axes form a class: one local norm, summed over these axes. Axes that hold copies do not count twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.mesh import mesh_device


@dataclass
class _Class:
    """Gradients of parameters that are cut over the same process groups. ``device``: where these communicate."""

    device: torch.device
    grads: list[torch.Tensor] = field(default_factory=list)


_Groups = tuple[dist.ProcessGroup, ...]


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
    classes = _classes(params)
    norms = [_norm(groups, found, order, foreach) for groups, found in classes.items()]
    if not norms:
        return torch.zeros(())
    total = _root(_joined(torch.stack([_power(norm.to(norms[0].device), order) for norm in norms]), order), order)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {order} of all gradients is {total.item()}. Find the loss "
            "that is not finite, or pass error_if_nonfinite=False to scale the gradients by it anyway."
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch: no division by zero, no branch on the value
    for found in classes.values():
        for tensors in _alike(found.grads).values():
            _torch.foreach_mul(tensors, factor.to(tensors[0].device))
    is_double = any(grad.dtype is torch.float64 for found in classes.values() for grad in found.grads)
    return total if is_double else total.float()


def _classes(params: list[torch.Tensor]) -> dict[_Groups, _Class]:
    """By the groups that parameters are cut over, whether or not they have a gradient here: all ranks find the same."""
    classes: dict[_Groups, _Class] = {}
    for param in params:
        groups: _Groups = ()
        device = param.device
        if isinstance(param, DTensor):
            mesh = param.device_mesh
            cut = [axis for axis, placement in enumerate(param.placements) if not placement.is_replicate()]
            groups = tuple(mesh.get_group(axis) for axis in cut if mesh.size(axis) > 1)
            device = mesh_device(mesh)
        found = classes.setdefault(groups, _Class(device))
        if param.grad is not None:
            found.grads.append(_local(param.grad))
    return classes


def _local(grad: torch.Tensor) -> torch.Tensor:
    if not isinstance(grad, DTensor):
        return grad
    if any(placement.is_partial() for placement in grad.placements):
        raise ValueError(
            f"clip_grad_norm_: a gradient of shape {tuple(grad.shape)} is placed {grad.placements}: its sum is still "
            "pending. Clip after backward has reduced it."
        )
    return _torch.local_of(grad)


def _alike(grads: list[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """What one launch takes."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        found.setdefault((grad.device, grad.dtype), []).append(grad)
    return found


def _norm(groups: _Groups, found: _Class, order: float, foreach: bool | None) -> torch.Tensor:
    """The norm of one class over all its ranks, fp64. That of half precision gradients would overflow in theirs."""
    norms: list[torch.Tensor] = []
    for (_, dtype), grads in _alike([grad for grad in found.grads if grad.numel() > 0]).items():
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        if foreach is False:
            norms += [torch.linalg.vector_norm(grad, order, dtype=wide) for grad in grads]
        else:
            norms += _torch.foreach_norm(grads, order, wide)
    local = torch.stack([norm.to(found.device) for norm in norms]) if norms else torch.zeros(1, device=found.device)
    value = _joined(_power(local.double(), order), order)
    for group in groups:
        dist.all_reduce(value, dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM, group=group)
    return _root(value, order)


# A norm of infinite order is joined as it is, by the maximum; any other as a power, by the sum.


def _power(norm: torch.Tensor, order: float) -> torch.Tensor:
    return norm if math.isinf(order) else norm**order


def _joined(powers: torch.Tensor, order: float) -> torch.Tensor:
    return powers.max() if math.isinf(order) else powers.sum()


def _root(power: torch.Tensor, order: float) -> torch.Tensor:
    return power if math.isinf(order) else power ** (1 / order)
