"""Explains why a call of a submodule raised because an operation got shards.

torch's error names only an operation: "mixed torch.Tensor and DTensor". The cause is that a module ran outside the
forward of its unit, or read parameters of an inner unit without calling it. Rule: otherwise, torch's error stays.

While parameters are unsharded, calls cost nothing: the group removes the guard when it binds unsharded parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import nn

from fsdp2.core import GroupState, ScheduleError, Unit, _torch, seams, units_under
from fsdp2.extras import torch_names
from fsdp2.extras.plain_names import plain_paths


def guards_of(unit: Unit, holders: Iterable[nn.Module]) -> list[seams.Guard]:
    """Guards for the submodules of ``unit`` that compute with parameters of the modules ``holders``. A submodule that
    contains units may read their shards during the forward of ``unit``, so its guard stays."""
    guards = []
    for module in called_with(unit.modules, holders):
        attributes, call = vars(module), torch_names.guarded_call(module, partial(_explain_shards, unit, module))
        if next(units_under(module), None) is None:
            guards.append((attributes, call))
        elif attributes.get(_torch.CALL) is None:
            attributes[_torch.CALL] = call
    return guards


def called_with(modules: tuple[nn.Module, ...], holders: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules below ``modules`` that compute with the parameters of ``holders``. A holder without a forward, such
    as a list of parameters, is replaced by the module around it."""
    around = {child: module for each in modules for module in each.modules() for child in module.children()}
    found: dict[nn.Module, None] = {}
    for holder in holders:
        module: nn.Module | None = holder
        while module is not None and module not in modules and type(module).forward is nn.Module.forward:
            module = around.get(module)
        if module is not None and module not in modules:
            found[module] = None
    return list(found)


def _explain_shards(unit: Unit, module: nn.Module, error: RuntimeError) -> None:
    """If the cause is known, explain ``error``, which a call of ``module`` inside ``unit`` has raised because an
    operation got shards."""
    kind, name = type(module).__name__, _name_of(module, unit)
    if _is_sharded(unit):
        raise ScheduleError(
            f"{kind} '{name}' was called outside the forward of its unit '{unit.name}', so its parameters are shards. "
            "Call the model or that unit instead. If a method other than forward calls it, register the method: "
            "fsdp2.register_fsdp_forward_method(unit, 'method'). Or call unit.unshard() before, and unit.reshard() "
            "after."
        ) from error
    inner = [each for _, each in units_under(module)]
    sharded = next(filter(_is_sharded, inner), None)
    if sharded is not None and not any(each.is_computing for each in inner):  # else the error may come from there
        inside = _name_of(sharded.modules[0], unit)
        raise ScheduleError(
            f"{kind} '{name}' read a parameter of unit '{inside}' without calling that unit, so the parameter is a "
            f"shard. Do not call fully_shard on '{inside}', so that the unit around it has the parameter. Or call the "
            "module in place of the operation on its parameter."
        ) from error


def _is_sharded(unit: Unit) -> bool:
    return any(group.state in (GroupState.SHARDED, GroupState.SHARDED_POST_FORWARD) for group in unit.groups)


def _name_of(module: nn.Module, unit: Unit) -> str:
    """The name of ``module`` relative to the root, or to ``unit`` if the root is not known yet."""
    around = unit if unit.tree is None else unit.tree.root
    return plain_paths(around.modules).get(module, type(module).__name__)
