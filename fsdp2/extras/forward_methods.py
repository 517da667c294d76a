"""Methods that run like the forward of their unit, such as ``generate``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp2.core import Unit, _torch, unit_of

FORWARD_METHOD = "_fsdp2_forward_method"  # the attribute of a registered method's wrapper that holds the method itself


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Treat the method ``method_name`` of ``module`` like its ``forward``: parameters are unsharded before it runs, and
    the post-forward steps run after it.

    Calls inside the method to the same unit, including ``forward``, count as part of it: the unit stays unsharded until
    the outermost call returns. After such calls, even a root is resharded, although a forward would leave it
    unsharded. Nothing happens if ``module`` is not sharded, or if the method is already registered.

    Raises:
        ValueError: ``module`` has no such method.
    """
    unit = unit_of(module)
    if unit is None:
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        found = "no such attribute" if method is None else f"a {type(method).__name__}"
        raise ValueError(
            f"register_fsdp_forward_method: expected a method '{method_name}' of {type(module).__name__}, "
            f"found {found}. Pass the name of a method."
        )
    if not hasattr(method, FORWARD_METHOD):
        setattr(module, method_name, like_forward(unit, module, method))


def like_forward(unit: Unit, module: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` of ``module``, run like its forward. Calls inside it to the same ``unit`` count as part of it."""
    hooks = unit.hooks
    assert hooks is not None

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if unit.is_whole is not None and hooks.runs_plainly():
            return method(*args, **kwargs)
        if _is_running(unit):
            args, kwargs = hooks.resume(args, kwargs)
            return hooks.hand_out(method(*args, **kwargs))
        args, kwargs = hooks.pre_forward(module, args, kwargs)
        hooks.runs_method, hooks.is_resumed = True, False
        try:
            output = method(*args, **kwargs)
        except BaseException:
            hooks.note_raised()
            raise
        finally:
            hooks.runs_method = False
        output = hooks.post_forward(module, args, output)
        if hooks.is_resumed:
            _reshard_between_passes(unit)
        return output

    setattr(run, FORWARD_METHOD, method)
    return torch.compiler.disable(run, recursive=False)  # the method itself may be compiled


@_torch.runs_between_graphs
def _is_running(unit: Unit) -> bool:
    """Whether a method is called from inside the unit's own forward, or from another method."""
    assert unit.hooks is not None
    if unit.hooks.runs_method or len(unit.modules) > 1:
        return unit.hooks.runs_method
    return unit.is_computing


@_torch.runs_between_graphs
def _reshard_between_passes(unit: Unit) -> None:
    """After a method like ``generate``, reshard as torch does: an optimizer built afterwards must find shards."""
    if unit.tree is not None and unit.tree.passes.root is None:
        unit.reshard()
