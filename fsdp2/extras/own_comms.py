"""Setters of ``FSDPModule`` by which a unit communicates in the user's own way: a comm, a hook, or other memory.

Rule: what a unit communicates by is set once. A setter that would replace what another one has set is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdp2.core import ParamGroup, Unit, comms, expect
from fsdp2.extras.comm_memory import communicate_in_memory
from fsdp2.extras.gradient_wires import WireMaker
from fsdp2.extras.managed_groups import with_mean


def communicate_by(caller: str, unit: Unit, asked: Any) -> None:
    """Let ``unit`` communicate by what the setter ``caller`` of its module got."""
    if caller == "set_all_reduce_hook":
        _use_hook(caller, unit, *asked)
        return
    _check_no_wire(caller, unit)
    if caller == "set_custom_all_gather":
        _check_comm(caller, unit, asked, "AllGather")
        _configure(unit, gathers_by=comms.GathersBy(asked))
    elif caller == "set_custom_reduce_scatter":
        _check_comm(caller, unit, asked, "ReduceScatter")
        _configure(unit, reduces_by=comms.ReducesBy(asked))
    else:
        communicate_in_memory(caller, unit, asked)


def _check_no_wire(caller: str, unit: Unit) -> None:
    """A wire sends gradients by messages of its own, so nothing else can reduce them, or allocate their memory."""
    if caller == "set_custom_all_gather":
        return
    for by in (group.options.reduces_by for group in unit.groups):
        if isinstance(by, WireMaker):
            raise ValueError(
                f"{caller}: unit '{unit.name}' sends its gradients as {by.wire}, because of reduce_wire in its "
                f"MixedPrecisionPolicy. Leave out reduce_wire for this unit, or do not call {caller}."
            )


def _check_comm(caller: str, unit: Unit, comm: Any, expected: str) -> None:
    """Accept any object with the two methods: a comm may be a subclass of torch's interface."""
    _cut_groups(unit, caller)
    is_comm = not isinstance(comm, type) and callable(comm) and callable(getattr(comm, "allocate", None))
    expect(is_comm, f"{caller}: comm", comm, f"an fsdp2.core.comms.{expected}, with allocate() and __call__()")


def _use_hook(caller: str, unit: Unit, run: Any, stream: torch.Stream | None) -> None:
    cut = _cut_groups(unit, caller)
    expect(run is None or callable(run), f"{caller}: hook", run, "a function of a tensor, or None")
    if stream is not None and any(group.mesh.replicate.group is not None for group in cut):
        raise ValueError(
            f"{caller}: the mesh of unit '{unit.name}' has a replicate axis (HSDP). With HSDP, the hook "
            "runs on the stream of the all-reduce. Do not pass stream."
        )
    run = with_mean(unit, run)
    for group in unit.groups:
        on = stream if group in cut else None
        group.configure(all_reduce_hook=None if run is None else comms.AllReduceHook(run, on))


def _cut_groups(unit: Unit, caller: str) -> Sequence[ParamGroup]:
    """The group of ``unit``, if any. The group of scalars is left out, since no comm moves scalars.

    Raises:
        ValueError: there are several groups.
    """
    cut = [group for group in unit.groups if any(param.layout.shape for param in group.params)]
    if len(cut) > 1:
        raise ValueError(
            f"{caller}: unit '{unit.name}' has {len(cut)} parameter groups on different meshes, expected one group. "
            "Call fully_shard separately on the modules of each mesh."
        )
    return cut


def _configure(unit: Unit, **changes: object) -> None:
    for group in unit.groups:
        group.configure(**changes)
