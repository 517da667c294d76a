"""nn.Module and autograd hooks turned into events. No decisions: what an event leads to is the schedule's business.

Hooks are kept out of compiled graphs (``torch.compiler.disable``): a compiled block calls them between its graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp2 import _torch
from fsdp2.group import GroupState
from fsdp2.nested import find_tensors, map_tensors
from fsdp2.precision import cast_floating
from fsdp2.runtime import Unit
from fsdp2.schedule import Phase


class _PostBackward(torch.autograd.Function):
    """Identity on a unit's inputs. Its backward runs when all their gradients are known: the unit has then computed
    the gradients of its parameters. An edge of its own, since the inputs may have other consumers."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.unit.context.post_backward(ctx.unit)
        return (None, *grads)


class ModuleHooks:
    """The hooks of one unit, installed on its modules once, by ``fully_shard``."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._input_dtype = unit.policy.param_dtype if unit.policy.cast_forward_inputs else None
        self._output_dtype = unit.policy.output_dtype
        self._moves_inputs = unit.mesh.device.type != "cpu"
        pre_forward = torch.compiler.disable(self.pre_forward)
        post_forward = torch.compiler.disable(self.post_forward)
        self._pre_backward = torch.compiler.disable(self._on_output_gradient)
        for module in unit.modules:
            module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(post_forward)
        for module in {slot.module: None for group in unit.groups for param in group.params for slot in param.slots}:
            _install_state_dict_hooks(module, unit)

    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        unit = self._unit
        context = unit.context
        context.recover(unit)
        recomputes = _torch.in_backward()  # then each of several modules is a forward of its own
        is_first = recomputes or not unit.missing_modules
        if is_first and not recomputes and len(unit.modules) > 1:
            unit.missing_modules = set(unit.modules)
        if self._moves_inputs and context.schedule.forward_root is None:
            device = unit.mesh.device
            args, kwargs = map_tensors(lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs))
        phase = context.pre_forward(unit) if is_first else context.resume_forward(unit)
        if self._input_dtype is not None:
            args, kwargs = cast_floating((args, kwargs), self._input_dtype)
        if phase is not Phase.BACKWARD and is_first and torch.is_grad_enabled():
            args, kwargs = self._mark_inputs(args, kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        unit = self._unit
        if unit.missing_modules and not _torch.in_backward():
            unit.missing_modules.discard(module)
            if unit.missing_modules:  # of several modules, the last one to run ends the unit's forward
                return self._cast_output(output)
        return self.end_forward(output)

    def end_forward(self, output: Any) -> Any:
        """The unit's forward is over; ``output`` leads to its backward."""
        unit = self._unit
        context = unit.context
        if context.schedule.phases[unit.index] is Phase.BACKWARD:
            return self._cast_output(output)
        if context.schedule.forward_root == unit.index:
            output = self._end_incomplete(output)
        context.post_forward(unit)
        if torch.is_grad_enabled():
            for tensor in find_tensors(output, []):
                if tensor.requires_grad:
                    tensor.register_hook(self._pre_backward)
        return self._cast_output(output)

    def _end_incomplete(self, output: Any) -> Any:
        """Units of several modules of which some did not run end with the root's forward."""
        for unit in reversed(self._unit.context.units):
            if unit.missing_modules and unit is not self._unit:
                unit.missing_modules.clear()
                assert unit.hooks is not None
                output = unit.hooks.end_forward(output)
        return output

    def _cast_output(self, output: Any) -> Any:
        return output if self._output_dtype is None else cast_floating(output, self._output_dtype)

    def _on_output_gradient(self, _: torch.Tensor) -> None:
        self._unit.context.pre_backward(self._unit)

    def _mark_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):  # most blocks, spared the search
            return (_PostBackward.apply(self._unit, *args) if args[0].requires_grad else args), kwargs
        tensors = [tensor for tensor in find_tensors((args, kwargs), []) if tensor.requires_grad]
        if not tensors:
            return args, kwargs
        marked = iter(_PostBackward.apply(self._unit, *tensors))
        return map_tensors(lambda tensor: next(marked) if tensor.requires_grad else tensor, (args, kwargs))


def _install_state_dict_hooks(module: nn.Module, unit: Unit) -> None:
    """State dicts see shards, and what was loaded is looked at before its next use."""

    def reshard(*_: Any, **__: Any) -> None:
        if any(group.state is not GroupState.SHARDED for group in unit.groups):
            unit.reshard()

    def mark_stale(*_: Any) -> None:
        unit.mark_stale()

    module.register_state_dict_pre_hook(reshard)
    module.register_load_state_dict_pre_hook(reshard)
    module.register_load_state_dict_post_hook(mark_stale)
