"""Unsharded parameters that tell which operations read them: a backward may enter a unit right there.

Python is shown each operation on a tensor whose class defines ``__torch_function__``. That takes 2 to 5 us, and
12 to 17 for functions that torch writes in Python. What such an operation returns gets the hook that the parameter
carries. Views read the same memory: operations on them are watched, too. Compiled graphs are not changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FunctionType
from typing import Any, SupportsIndex

import torch
from torch import nn

from fsdp2 import _torch
from fsdp2.plan.trees import find_tensors

_HOOK = "_fsdp2_hook"  # what a watched tensor carries: a GradientHook


class WatchedParameter(nn.Parameter):
    """An unsharded parameter as far as its user can tell."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Collection[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _watched_call(func, types, args, kwargs or {})

    def _plain(self) -> nn.Parameter:
        return nn.Parameter(self.data, requires_grad=self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return copy.deepcopy(self._plain(), memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self._plain().__reduce_ex__(protocol)


class WatchedView(torch.Tensor):
    """What an operation has made of a watched parameter without copying it."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Collection[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _watched_call(func, types, args, kwargs or {})


_PLAIN: dict[type, type] = {WatchedParameter: nn.Parameter, WatchedView: torch.Tensor}


def watch(param: nn.Parameter, hook: _torch.GradientHook) -> None:
    """From now on, add ``hook`` to what operations on ``param`` return. Left alone if it is of some other class."""
    if type(param) is nn.Parameter:
        setattr(param, _HOOK, hook)
        param.__class__ = WatchedParameter


def unwatch(param: nn.Parameter) -> None:
    """The reverse."""
    if type(param) is WatchedParameter:
        param.__class__ = nn.Parameter  # type: ignore[assignment]
        delattr(param, _HOOK)


def _watched_call(
    func: Callable[..., Any], types: Collection[type], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    is_traced = torch.compiler.is_dynamo_compiling()
    if is_traced or (type(func) is not FunctionType and (len(types) == 1 or set(types) <= _PLAIN.keys())):
        with _torch.plain_access():
            result = func(*args, **kwargs)
    else:
        result = _call_unwatched(func, args, kwargs)
    if not is_traced:
        for tensor in (result,) if type(result) is torch.Tensor else _tensors_in(result):
            if tensor.grad_fn is not None:
                _hook(tensor, _watched_in(args, kwargs))
    return result


def _tensors_in(result: Any) -> Sequence[torch.Tensor]:
    """What operations return in the way of several tensors."""
    return find_tensors(result, []) if isinstance(result, (tuple, list)) else ()


def _call_unwatched(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call what may run anything, or meets other classes that want to know: to these the parameters are plain, and
    nothing else is switched off."""
    watched = [(tensor, type(tensor)) for tensor in _watched_in(args, kwargs)]
    try:
        for tensor, cls in watched:
            tensor.__class__ = _PLAIN[cls]
        return func(*args, **kwargs)
    finally:
        for tensor, cls in watched:
            tensor.__class__ = cls


def _watched_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    return [tensor for tensor in find_tensors((args, kwargs), []) if type(tensor) in _PLAIN]


def _hook(made: torch.Tensor, sources: list[torch.Tensor]) -> None:
    with _torch.plain_access():
        for source in sources:
            hook = getattr(source, _HOOK, None)
            if hook is None:  # the user has made one by its class
                continue
            if type(made) is torch.Tensor and _torch.share_storage(made, source):
                setattr(made, _HOOK, hook)
                made.__class__ = WatchedView
            else:
                hook.add_to(made)
