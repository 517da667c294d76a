"""The door between the user's code and the runtime.

The runtime is entered through hooks of modules and tensors, callbacks of autograd's engine, and methods of sharded
modules. ``entry`` marks them; the five events of ``UnitTree`` check inline. What surrounds the user's code may
record, transform, keep or replace operations, but the runtime's own must always run: if selective checkpointing skipped
a copy, a gather would lack its values. So the door leaves all of the following on entry, and restores it afterwards:

- graphs that ``torch.compile`` records, even if the compiled step calls ``backward``: the graph breaks at each
  function that ``runs_between_graphs`` marks;
- dispatch modes that keep or replace results: those of selective checkpointing, fake tensors around real ones and
  ``allow_mutation_on_saved_tensors``, and modes whose class sets ``replaces_results = True``;
- modes that replace torch's Python functions, except a default device (``torch.device``), which hooks may rely on;
- transforms of ``torch.func``, and inference mode.

Tools that only watch still see the runtime: ``CommDebugMode``, profilers, memory trackers. Saved-tensor hooks can stay,
because the runtime saves nothing for backward. Autocast can stay, too, except around all-gather hooks (``Gather``).

The hooks themselves work on the user's tensors, so gradients, transforms and function modes treat them as part of the
user's computation. They leave dispatch modes only to make views, which a checkpoint's recomputation does not repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from operator import methodcaller
from types import FunctionType
from typing import ParamSpec, TypeVar

import torch

from fsdp2.core import _torch, seams

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Entries that every unit passes in each step check inline, and in C: ``any(map(ask, SURROUNDINGS)) and must_leave()``.
ask = methodcaller("__call__")
SURROUNDINGS = _torch.SURROUNDINGS


def must_leave() -> bool:
    """Whether this call is inside anything other than modes that only watch."""
    others = any(map(ask, SURROUNDINGS[2:]))
    return others or _torch.DISPATCH_MODES.has_any() or _torch.FUNCTION_MODES.has_any()


def outside(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call ``function`` outside of all modes around the user's code, and return its result."""
    with _left():
        return function(*args, **kwargs)


def entry(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Mark ``function`` as an entry of the runtime."""

    @wraps(function)
    def enter(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return outside(function, *args, **kwargs) if must_leave() else function(*args, **kwargs)

    return _torch.runs_between_graphs(enter)


def all_entries(cls: type[_T]) -> type[_T]:
    """Mark every public method of ``cls`` as an entry of the runtime, which first checks its arguments."""
    for name, each in list(vars(cls).items()):
        if isinstance(each, FunctionType) and not name.startswith("_"):
            setattr(cls, name, entry(_checked(each)))
    return cls


def _checked(method: Callable[_P, _T]) -> Callable[_P, _T]:
    @wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        seams.check_call(method, args, kwargs)
        return method(*args, **kwargs)

    return call


@contextmanager
def _left() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(_torch.FUNCTION_MODES.left())
        stack.enter_context(_torch.DISPATCH_MODES.left())
        stack.enter_context(_torch.without_transforms())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())  # as in inference mode
        yield
