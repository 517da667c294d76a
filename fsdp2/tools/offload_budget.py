"""Whose optimizer states live on the host, so that the rest fits on the device: ``offload_by_budget``.

Sizes come from plans, and are those of the rank with the longest shards. So all ranks choose alike, and nothing is
communicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from fsdp2.api.module import sharded_unit
from fsdp2.runtime.root import form_root
from fsdp2.tools.memory_plan import memory_plan
from fsdp2.types import MemoryLimitError


@dataclass(frozen=True)
class OffloadChoice:
    """Where AdamW's states live.

    Attributes:
        on_host, on_device: names of units, in the order of the model's modules.
        nbytes: on the device: shards, their gradients, the states that stay, and the temporary memory of a step.
        host_params: trainable parameters for ``HostAdamW``.
        device_params: those for an AdamW on the device.
    """

    on_host: tuple[str, ...]
    on_device: tuple[str, ...]
    nbytes: int
    host_params: tuple[nn.Parameter, ...] = field(repr=False)
    device_params: tuple[nn.Parameter, ...] = field(repr=False)


def offload_by_budget(module: nn.Module, device_nbytes: int) -> OffloadChoice:
    """Choose the units whose AdamW states live on the host, as few as let a step fit into ``device_nbytes`` without
    activations. Units that run last come first: their gradients land first, so that backward hides their steps.

    ``module`` is the root of a sharded model. States take twice the bytes of trainable shards. Units with
    ``CPUOffloadPolicy`` take no memory between passes; their parameters are in ``host_params``.

    Raises:
        TypeError: ``device_nbytes`` is not an int.
        ValueError: ``module`` is not sharded.
        MemoryLimitError: shards, gradients and temporary memory alone take more.
    """
    if isinstance(device_nbytes, bool) or not isinstance(device_nbytes, int):
        raise TypeError(f"offload_by_budget: device_nbytes is a {type(device_nbytes).__name__}, expected an int.")
    units = form_root(sharded_unit(module, "fsdp2.offload_by_budget")).units
    names = [unit.name or "(root)" for unit in units]
    fixed, states = memory_plan(module).peak, [0] * len(units)
    is_away = [all(group.home.is_staged for group in unit.groups) for unit in units]
    for index, unit in enumerate(units):
        for param in [param for group in unit.groups if not group.home.is_staged for param in group.params]:
            nbytes = param.layout.chunk_numel * param.sharded.dtype.itemsize
            fixed += nbytes * (2 if param.sharded.requires_grad else 1)
            states[index] += 2 * nbytes if param.sharded.requires_grad else 0
    moved = units_on_host(states, device_nbytes - fixed)
    if moved is None:
        raise MemoryLimitError(
            f"offload_by_budget: with all states on the host, a step takes {fixed} bytes on the device without "
            f"activations, but device_nbytes is {device_nbytes}. Shard some units with CPUOffloadPolicy, or split "
            "large units."
        )
    on_host = [index in moved or is_away[index] for index in range(len(units))]
    params = [[p.sharded for g in unit.groups for p in g.params if p.sharded.requires_grad] for unit in units]
    return OffloadChoice(
        on_host=tuple(name for name, is_host in zip(names, on_host, strict=True) if is_host),
        on_device=tuple(name for name, is_host in zip(names, on_host, strict=True) if not is_host),
        nbytes=fixed + sum(nbytes for index, nbytes in enumerate(states) if index not in moved),
        host_params=tuple(p for mine, is_host in zip(params, on_host, strict=True) if is_host for p in mine),
        device_params=tuple(p for mine, is_host in zip(params, on_host, strict=True) if not is_host for p in mine),
    )


def units_on_host(states: Sequence[int], room: int) -> set[int] | None:
    """Which units' states have to leave, so that the rest takes at most ``room`` bytes; None if none may stay and that
    does not suffice. ``states``: bytes by unit, the root first."""
    moved: set[int] = set()
    rest = sum(states)
    for index in reversed(range(len(states))):
        if rest <= room:
            break
        if states[index]:
            moved.add(index)
            rest -= states[index]
    return moved if rest <= room else None
