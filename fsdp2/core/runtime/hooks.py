"""Turns hooks of nn.Module and autograd into events. This file decides which calls count as events; the schedule
decides what follows.

The operations on inputs and outputs here are part of the user's computation. The tree's methods are entries of the
runtime: see ``door.py``.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import nn

from fsdp2.core import _torch, seams
from fsdp2.core.plan.dtypes import cast_floating, need_cast
from fsdp2.core.runtime import door
from fsdp2.core.runtime.unit import Unit, units_under
from fsdp2.core.runtime.unit_tree import tree_of
from fsdp2.core.schedule.schedule import COMPUTING, AfterForward, Phase
from fsdp2.core.schedule.states import GroupState, Outcome
from fsdp2.core.trees import find_tensors, map_tensors
from fsdp2.core.types import ScheduleError


class InputOfShardedModule(torch.autograd.Function):
    """Identity on a unit's inputs that calls ``reached`` when the gradients of all inputs are known. By then, the unit
    has computed the gradients of its parameters. It is a separate node, because the inputs may have other consumers.
    Users see this name in torch's error if they change one of several inputs in place."""

    generate_vmap_rule = True

    @staticmethod
    def forward(reached: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.reached = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.reached()
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if tangent is None else tangent.view_as(tangent) for tangent in tangents)


class OutputOfShardedModule(InputOfShardedModule):
    """The same for an output, whose gradient starts the unit's backward. Used only under transforms of ``torch.func``,
    where a hook on a tensor does not see the gradients of all levels."""


class ModuleHooks:
    """The hooks of one unit, installed on its modules once, by ``fully_shard``.

    Attributes:
        unit, modules: the unit, and the modules that have these hooks.
        thread: the thread that has made them, or has begun the last pass.
        guards: the guards of the unit's submodules.
        runs_method: a registered method of the unit is running (see ``extras/forward_methods.py``).
        is_resumed: that method has called the unit again, as generate() does.
    """

    input_function = InputOfShardedModule  # for tools that list functions of autograd

    def __init__(self, unit: Unit) -> None:
        self.unit, self.thread = unit, get_ident()
        self._input_dtype = unit.policy.param_dtype if unit.policy.cast_forward_inputs else None
        self._output_dtype = unit.policy.output_dtype
        self._moves_inputs = unit.mesh.device.type != "cpu"
        self.runs_method = self.is_resumed = self._enables_cache = False
        self._marked: weakref.ref[torch.Tensor] | None = None  # the input of the last forward that has a hook
        self._marked_version = 0  # its version then
        self._handled_at_entry = [0]  # of each running call, innermost last: the id of the exception then
        self.guards: list[seams.Guard] = []
        self._pre_backward = _torch.GradientHook(self._on_output_gradient)
        self._post_backward = _torch.GradientHook(self._on_input_gradient)
        for module in unit.modules:
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.post_forward, always_call=True)
        slots = [slot for group in unit.groups for param in group.params for slot in param.slots]
        self.modules = list(unit.modules)
        self.hold([*unit.modules, *(slot.module for slot in slots)])

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHooks:
        """``copy.deepcopy`` of a module copies its hooks. The copy keeps this object, so hooks can be found."""
        return self

    def hold(self, modules: Iterable[nn.Module]) -> None:
        """Install state dict hooks and guards on ``modules``: the unit's own, and those that hold its parameters."""
        holders = list(dict.fromkeys(modules))
        self.guards += seams.guards_of(self.unit, holders)
        for group in self.unit.groups:
            group.guard(self.guards)
        self.modules += holders
        for module in holders:
            module.register_state_dict_pre_hook(self.pre_state_dict)
            module.register_state_dict_post_hook(seams.hook_of_saving(self))
            module.register_load_state_dict_pre_hook(self.pre_load)
            module.register_load_state_dict_post_hook(self.post_load)

    @door.entry
    def pre_state_dict(self, *_: object) -> None:
        """Make sure that state dicts see shards, or what ``unsharded`` has bound."""
        if self.thread == get_ident():
            _reshard_if_needed(self.unit)

    @door.entry
    def pre_load(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: object
    ) -> None:
        for inner in dict.fromkeys((*(unit for _name, unit in units_under(module)), self.unit)):
            _reshard_if_needed(inner)
        seams.prepare_loaded(module, state, prefix, metadata.get("assign_to_params_buffers", False))

    @door.entry
    def post_load(self, *_: object) -> None:
        """Have the loaded parameters checked before their next use."""
        self.unit.mark_stale()

    @_torch.runs_between_graphs
    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        unit = self.unit
        seems_to_run = unit.tree is not None and unit.tree.passes.phases[unit.index] in COMPUTING
        is_nested = self.runs_method or (seems_to_run and _torch.is_called_inside_itself(module))
        if not is_nested:
            self._handled_at_entry.clear()  # torch calls no hook when a KeyboardInterrupt ends a forward
        self._handled_at_entry.append(id(sys.exc_info()[1]))
        if is_nested:
            return self.resume(args, kwargs)
        if unit.is_whole is not None and self.runs_plainly():
            return args, kwargs
        if not torch.is_grad_enabled() and torch.is_autocast_cache_enabled():
            self._enables_cache = True  # a cast that is cached without a node loses gradients of a later forward
            torch.set_autocast_cache_enabled(False)
        tree = unit.tree or tree_of(unit)
        phase, is_first = tree.pre_forward(unit, grad_enabled=torch.is_grad_enabled())
        if self._moves_inputs and tree.passes.root == unit.index:
            device = unit.mesh.device
            args, kwargs = map_tensors(lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs))
        found = None  # the tensors in args and kwargs, once they have been searched
        if self._input_dtype is not None:
            found = find_tensors(kwargs, find_tensors(args, []))
            if need_cast(found, self._input_dtype):  # most units get inputs that another unit has already cast
                (args, kwargs), found = cast_floating((args, kwargs), self._input_dtype), None
        if is_first and phase is not Phase.BACKWARD and torch.is_grad_enabled():
            return self._mark_inputs(args, kwargs, found)
        return args, kwargs

    @_torch.runs_between_graphs
    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        unit, has_raised, is_nested = self.unit, self._raised_since_entry(), len(self._handled_at_entry) > 1
        if is_nested:  # the unit or its method has called the unit: part of the outer forward
            self._handled_at_entry.pop()
            return None if has_raised else self.hand_out(output)
        if self._enables_cache:
            self._enables_cache = False
            torch.set_autocast_cache_enabled(True)
        if has_raised:
            self.note_raised()
            return None
        if unit.is_whole is not None and self.runs_plainly():
            return output
        tree = unit.tree
        assert tree is not None  # pre_forward has formed one
        if unit.missing_modules and not tree.passes.in_backward:
            unit.missing_modules.discard(module)
            if unit.missing_modules:  # the last of several modules to run ends the unit's forward
                return self.hand_out(output)
        if tree.passes.phases[unit.index] is Phase.BACKWARD:
            return output if self._output_dtype is None else cast_floating(output, self._output_dtype)
        is_freed = tree.schedule.rules[unit.index].after_forward is not AfterForward.KEEP
        output = self.hand_out(output, is_freed=is_freed)
        tree.post_forward(unit)
        return output

    def _raised_since_entry(self) -> bool:
        """Whether the innermost call of the unit has raised since it began, or a user's hook after it has."""
        return id(sys.exc_info()[1]) != self._handled_at_entry[-1]

    @_torch.runs_between_graphs
    def note_raised(self) -> None:
        """The unit's forward, or a method that runs like it, has raised."""
        if self.unit.tree is not None:
            self.unit.tree.passes.raise_from(self.unit.index)

    @_torch.runs_between_graphs
    def runs_plainly(self) -> bool:
        """Whether a forward of the unit, whose parameters are lent, runs without the runtime. Inside another pass it
        does not, and the state table refuses it later.

        Raises:
            ScheduleError: the forward needs parameters that are not whole on this rank, or it records gradients.
        """
        unit = self.unit
        if unit.running:
            return False
        if unit.is_whole and not torch.is_grad_enabled():
            return True
        problem = "some parameters of the unit are not whole on this rank. Leave the block first."
        if unit.is_whole:
            problem = "the gradients of whole parameters would be lost. Use torch.no_grad(), or leave the block first."
        raise ScheduleError(f"forward of unit '{unit.name}' inside fsdp2.unsharded(...): {problem}")

    @_torch.runs_between_graphs
    def resume(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        self.is_resumed = True
        if self.unit.tree is not None:
            self.unit.tree.resume_forward(self.unit)
        return (args, kwargs) if self._input_dtype is None else cast_floating((args, kwargs), self._input_dtype)

    @_torch.runs_between_graphs
    def hand_out(self, output: Any, *, is_freed: bool = False) -> Any:
        """Return ``output`` as the unit's caller gets it: cast, and with hooks whose gradients start the unit's
        backward. ``is_freed``: the memory of the unit's parameters is about to be freed."""
        if _torch.DISPATCH_MODES.size() and _torch.DISPATCH_MODES.has_any():
            with _torch.DISPATCH_MODES.left():
                output = self._mark_output(output, is_freed)
        else:
            output = self._mark_output(output, is_freed)
        return output if self._output_dtype is None else cast_floating(output, self._output_dtype)

    def _mark_output(self, output: Any, is_freed: bool) -> Any:
        unit = self.unit
        if _torch.in_func_transform():
            unit.leads_to, reached = Outcome.BACKWARD, self._on_output_gradient
            mark = OutputOfShardedModule.apply
            output = map_tensors(lambda each: mark(reached, each)[0] if _has_gradient(each) else each, output)
        elif torch.is_grad_enabled():
            found = (output,) if type(output) is torch.Tensor else find_tensors(output, [])
            if self._marked is not None and (view := self._marked()) is not None:
                if (num_writes := view._version - self._marked_version) > 0:
                    self._marked_version = view._version
                    _torch.before_in_place(view, num_writes, self._on_input_gradient)
                if id(view) in map(id, found):
                    # The unit returns its input unchanged. If both hooks were on one tensor, the one that ends the
                    # unit's backward would run before the one that begins it.
                    output = map_tensors(lambda each: each.view_as(each) if each is view else each, output)
                    found = find_tensors(output, [])
            for tensor in found:
                if is_freed and (base := tensor if tensor._base is None else tensor._base).is_leaf:
                    seams.check_handed_out(unit, base)
                if tensor.requires_grad:
                    self._pre_backward.add_to(tensor)
                    unit.leads_to = Outcome.BACKWARD
        else:
            unit.leads_to = Outcome.UNKNOWN
            for tensor in find_tensors(output, []) if is_freed else ():
                seams.check_handed_out(unit, tensor if tensor._base is None else tensor._base)
        return output

    @_torch.runs_between_graphs
    def _on_output_gradient(self, *_: torch.Tensor) -> None:
        unit = self.unit
        (unit.tree or tree_of(unit)).pre_backward(unit)

    @_torch.runs_between_graphs
    def _on_input_gradient(self, *_: torch.Tensor) -> None:
        unit = self.unit
        (unit.tree or tree_of(unit)).post_backward(unit)

    def _mark_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], found: Sequence[torch.Tensor] | None
    ) -> tuple[Any, Any]:
        """Mark the inputs, so that the unit learns when the gradients of all are known. ``found``: their tensors, if
        known. Most blocks have one input, where a hook on a view suffices, which is cheaper than an autograd Function.
        """
        if _torch.DISPATCH_MODES.size() and _torch.DISPATCH_MODES.has_any():
            with _torch.DISPATCH_MODES.left():
                return self._mark_inputs(args, kwargs, found)
        if found is None:
            is_one = len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor
            found = args if is_one else find_tensors(kwargs, find_tensors(args, []))
        in_transform = _torch.in_func_transform()
        tensors = [tensor for tensor in found if tensor.requires_grad or (in_transform and _has_gradient(tensor))]
        if not tensors:
            return args, kwargs
        if len(tensors) > 1 or in_transform:
            marks = InputOfShardedModule.apply(self._on_input_gradient, *tensors)
            marked = dict(zip(map(id, tensors), marks, strict=True))
            return map_tensors(lambda tensor: marked.get(id(tensor), tensor), (args, kwargs))
        (only,) = tensors
        view = only.view_as(only)
        self._post_backward.add_to(view)
        self._marked, self._marked_version = weakref.ref(view), view._version
        if args and args[0] is only:
            return (view, *args[1:]), kwargs
        return map_tensors(lambda tensor: view if tensor is only else tensor, (args, kwargs))


def _has_gradient(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` may have a gradient at some level of a transform."""
    return tensor.is_floating_point() or tensor.is_complex()


def _reshard_if_needed(unit: Unit) -> None:
    if any(group.state not in (GroupState.SHARDED, GroupState.LENT) for group in unit.groups):
        unit.reshard()
    for group in unit.groups:
        group.show_shards()
