"""Whole parameters of a sharded model, one after another: what an inference engine is given."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.extras.lending import gathered_together
from fsdp2.tools.progress import progress
from fsdp2.tools.weights import Weight, _plain, check_dtype, check_ready, weights_of


def stream_full_params(
    model: nn.Module, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over ``(name, whole parameter)``, for example to hand weights from a trainer to an inference engine.

    All ranks must iterate together, between steps: each unit is gathered in one launch when the turn comes to its first
    parameter. A rank holds one whole unit at a time, if the caller keeps nothing. Parameters come in the order of
    ``named_parameters``, under the names of the state dict, tied ones once. The tensors are plain, contiguous, detached
    copies; tensor subclasses give the values that compute reads. The caller may break off the loop, if all ranks do.
    The model must not train meanwhile.

    Args:
        model: the model, or a part of it.
        dtype: of floating-point parameters, cast before they travel. Default: the dtype of the shards.
        device: of the tensors. Default: the device of the mesh.

    Raises:
        TypeError: ``dtype`` is not a floating-point dtype.
        ScheduleError: a forward or backward runs, or parameters are lent to ``fsdp2.unsharded``.
        RuntimeError: a parameter is on the meta device.
        ValueError: a parameter is on a mesh without this rank.
    """
    check_dtype(dtype, "stream_full_params")
    weights = [each for each in weights_of(model, "stream_full_params") if isinstance(each.tensor, nn.Parameter)]
    check_ready(weights, "stream_full_params")
    return _stream(weights, dtype, device)


def _stream(
    weights: Sequence[Weight], dtype: torch.dtype | None, device: torch.device | str | None
) -> Iterator[tuple[str, torch.Tensor]]:
    with progress("stream", len(weights), "parameter") as advance:
        for _, neighbours in itertools.groupby(weights, key=lambda weight: id(weight.group or weight)):
            unit = list(neighbours)
            wholes = deque(_wholes(unit, dtype))
            for weight in unit:  # no variable holds a whole tensor: the caller alone keeps it alive
                yield weight.names[0], _handed_out(wholes.popleft(), weight, device)
                advance(1)


def _wholes(unit: Sequence[Weight], dtype: torch.dtype | None) -> list[torch.Tensor]:
    """The whole tensors of neighbours in one group, gathered in one launch; or of one tensor that no group manages."""
    group, params = unit[0].group, [weight.param for weight in unit if weight.param is not None]
    if group is None:
        return [weight.whole(dtype) for weight in unit]
    with torch.no_grad():
        parts = gathered_together(group, params, [_plain(weight.local, dtype) for weight in unit])
        owns = [param.spec.unsharded_tensor(part) for param, part in zip(params, parts, strict=True)]
        return [own.full_tensor() if isinstance(own, DTensor) else own for own in owns]


def _handed_out(whole: torch.Tensor, weight: Weight, device: torch.device | str | None) -> torch.Tensor:
    if whole.data_ptr() == weight.local.data_ptr():
        whole = whole.clone()  # else the caller could write the parameter
    return whole if device is None else whole.to(device)
