"""Modules, optimizers and the compiler: what they call, and where they keep what they have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn

from fsdp2._torch.autograd import GradientHook


def remove_hooks(module: torch.nn.Module, functions: Sequence[Callable[..., Any]]) -> None:
    """Take ``functions`` off ``module``, where copying it has brought them. The copy has no handles, and nothing public
    lists hooks."""
    of_forward, of_state = ("forward_pre_hooks", "forward_hooks"), ("state_dict_pre_hooks", "load_state_dict_pre_hooks")
    for name in (*of_forward, *of_state, "load_state_dict_post_hooks"):
        hooks = getattr(module, f"_{name}")
        for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) in functions]:
            del hooks[key]


def watch_calls(
    module: nn.Module, hook: GradientHook, find_tensors: Callable[[Any, list[torch.Tensor]], list[torch.Tensor]]
) -> None:
    """Add ``hook`` to what each call of ``module`` returns, for good. ``find_tensors`` lists the tensors in it.

    With a forward hook, public as that is, torch calls modules on a way that takes 11 thousand instructions more. This
    is the attribute that ``Module.compile`` sets, with the same meaning. Copies and pickles of the module leave it
    behind, and the compiler does not look at it where it traces through the module.
    """
    call: Callable[..., Any] = module._compiled_call_impl or module._call_impl
    owner = hook.owner

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        if type(output) is not torch.Tensor:
            for tensor in find_tensors(output, []):
                if tensor.requires_grad:
                    hook.add_to(tensor)
        elif output.requires_grad:
            node = output.grad_fn
            if node is None or output.output_nr:
                hook.add_to(output)
            else:  # most: as add_to does, without a call more
                node._register_hook_dict(owner)
        return output

    module.__dict__["_compiled_call_impl"] = watched


_Step = TypeVar("_Step", bound=Callable[..., Any])


def hooked_step(step: _Step) -> _Step:
    """``step`` of an optimizer's class, with the hooks of the optimizer and the profiler's label around it. torch does
    that to the class of each optimizer that is constructed."""
    hooked = torch.optim.Optimizer.profile_hook_step(step)
    hooked.hooked = True  # type: ignore[attr-defined]  # or torch hooks it once more
    return cast(_Step, hooked)


def unhooked_step(cls: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], Any]:
    """The step of an optimizer's class without its hooks."""
    step: Any = cls.step
    return cast(Callable[[torch.optim.Optimizer], Any], step.__wrapped__ if getattr(step, "hooked", False) else step)


def sets_attributes_plainly(module: nn.Module) -> bool:
    """Whether parameters of ``module`` may be bound through ``_parameters``, skipping ``nn.Module.__setattr__``.

    Modules that override it (``nn.LSTM`` keeps a list of its weights) must see the assignment.
    """
    return type(module).__setattr__ is nn.Module.__setattr__


def parameters_dict(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dict that holds a module's own parameters."""
    return module._parameters


def buffers_dict(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The dict that holds a module's own buffers."""
    return module._buffers
