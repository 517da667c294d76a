"""The door between the user's code and the runtime.

Entries are hooks of modules and tensors, callbacks of autograd's engine, and methods of sharded modules: ``entry``
marks them, and the five events of ``UnitTree`` ask in line. What surrounds the user's code there may record, transform,
keep or replace operations, but the runtime's own must run: a copy that selective checkpointing does not repeat leaves a
gather without its values. So the door leaves what surrounds the user's code, and returns to it afterwards:

- graphs that ``torch.compile`` records, also of a step that calls ``backward`` inside: they end where
  ``runs_between_graphs`` marks a function;
- dispatch modes that keep or replace results: those of selective checkpointing, fake tensors around real ones and
  ``allow_mutation_on_saved_tensors``, and modes whose class sets ``replaces_results = True``;
- modes that replace torch's Python functions, but for a default device (``torch.device``), which hooks may rely on;
- transforms of ``torch.func``, and inference mode.

What only watches still sees the runtime: ``CommDebugMode``, profilers, memory trackers. Saved-tensor hooks need no
care, since the runtime saves nothing for backward, nor does autocast but where all-gather hooks run (``Gather``).

The hooks themselves work on the user's tensors, so for gradients, transforms and function modes they are part of the
user's computation. They leave dispatch modes where they make a view, which no recomputation of a checkpoint repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from operator import methodcaller
from types import FunctionType
from typing import ParamSpec, TypeVar

import torch

from fsdp2 import _torch

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Entries that every unit passes in every step ask in line, and in C: ``any(map(ask, SURROUNDINGS)) and must_leave()``.
ask = methodcaller("__call__")
SURROUNDINGS = _torch.SURROUNDINGS


def must_leave() -> bool:
    """Whether anything but watching modes surrounds this call."""
    others = any(map(ask, SURROUNDINGS[2:]))
    return others or _torch.DISPATCH_MODES.has_any() or _torch.FUNCTION_MODES.has_any()


def outside(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """What ``function`` returns, called outside of all that surrounds the user's code."""
    with _left():
        return function(*args, **kwargs)


def entry(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """``function`` enters the runtime."""

    @wraps(function)
    def enter(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return outside(function, *args, **kwargs) if must_leave() else function(*args, **kwargs)

    return _torch.runs_between_graphs(enter)


def all_entries(cls: type[_T]) -> type[_T]:
    """Every public method of ``cls`` enters the runtime."""
    for name, each in list(vars(cls).items()):
        if isinstance(each, FunctionType) and not name.startswith("_"):
            setattr(cls, name, entry(each))
    return cls


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
