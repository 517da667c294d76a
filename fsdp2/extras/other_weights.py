"""Computes with other weights for a while: those of an EMA, of a reference policy, or of the last good step.

The values change places in memory, one shard at a time. The parameters stay the same objects, so optimizers, ties and
compiled graphs keep them, and the next gather notices that their values are new (I6).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.core import _torch, expect, marks, units_under
from fsdp2.extras.lending import params_under, take_shards
from fsdp2.extras.plain_names import plain_name

Weights = Mapping[str, torch.Tensor] | Sequence[torch.Tensor] | nn.Module


@contextmanager
def weights_of(model: nn.Module, others: Weights) -> Iterator[None]:
    """In the block, ``model`` has the values of ``others``; afterwards it has its own again, also after an exception.

    The values are exchanged in place, so meanwhile ``others`` hold those of ``model``. This needs the memory of one
    shard, and sends nothing; the next forward gathers as usual. What the block changes in the parameters stays in
    ``others``.

    Args:
        model: a model after :func:`fully_shard`.
        others: shards of the same layout: the parameters of a model that is sharded alike, by their names or in their
            order, or the model itself. Parameters without a counterpart in a mapping keep their values.

    Raises:
        ValueError: a tensor in ``others`` fits no parameter, or is laid out differently. Nothing has changed.
        ScheduleError: a forward or backward is running, or :func:`unsharded` has lent parameters.
    """
    groups = params_under(model, "weights_of")
    for group in groups:
        take_shards(group)
    pairs = _pairs(model, others)
    _exchange(pairs)
    try:
        yield
    finally:
        for tree in dict.fromkeys(unit.tree for _, unit in units_under(model)):
            if tree is not None and tree.passes.running:  # the block has raised in a forward or backward
                tree.reset()
        for group in groups:
            group.reshard()
        _exchange(pairs)


def _pairs(model: nn.Module, others: Weights) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The local tensors that change places."""
    mine = {plain_name(model, name): param for name, param in model.named_parameters(remove_duplicate=False)}
    if isinstance(others, nn.Module):
        others = {plain_name(others, name): param for name, param in others.named_parameters()}
    expect(isinstance(others, (Mapping, Sequence)), "weights_of: others", others, "a module, or a mapping or a list")
    if not isinstance(others, Mapping):
        names = [plain_name(model, name) for name, _ in model.named_parameters()]
        if len(others) != len(names):
            raise ValueError(f"weights_of: others has {len(others)} tensors, expected {len(names)}, one per parameter.")
        others = dict(zip(names, others, strict=True))
    unknown = [name for name in others if name not in mine]
    if unknown:
        raise ValueError(f"weights_of: the model has no parameter {unknown[0]!r}. Leave such names out of others.")
    pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # tied parameters change places once
    for name, other in others.items():
        if _layout(other) != _layout(mine[name]):
            raise ValueError(
                f"weights_of: others has {_layout(other)} for parameter '{name}', expected {_layout(mine[name])}. Pass "
                "shards that are laid out like the model's, such as those of a copy.deepcopy of it."
            )
        pairs[id(mine[name])] = _local(mine[name]), _local(other)
    return list(pairs.values())


def _layout(tensor: torch.Tensor) -> str:
    tensor = getattr(tensor, marks.STANDS_FOR, tensor)
    placed = f", {tensor.placements} on {tensor.device_mesh}" if isinstance(tensor, DTensor) else ""
    local = _local(tensor)
    return f"{type(local).__name__} {tuple(local.shape)}, {tensor.dtype}, {local.device}{placed}"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = getattr(tensor, marks.STANDS_FOR, tensor)  # what a root that stays unsharded has bound stands for a shard
    return (_torch.local_of(tensor) if isinstance(tensor, DTensor) else tensor).detach()


def _exchange(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for mine, other in pairs:
            kept = mine.clone()
            mine.copy_(other)
            other.copy_(kept)
