"""The tensors in the arguments and results of modules: in dicts, lists, tuples and dataclasses, but not in sets."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from operator import is_
from typing import Any

import torch

# Most arguments of models other than tensors; checked first, since the other tests cost more.
_LEAVES = frozenset({type(None), bool, int, float, str})


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with ``fn`` applied to each tensor. Containers in which nothing changed are returned as they are."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if type(value) in _LEAVES:
        return value
    if isinstance(value, (list, tuple)):
        items = [item if type(item) in _LEAVES else map_tensors(fn, item) for item in value]
        if all(map(is_, items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    parts = _named_parts(value)
    mapped = {name: item if type(item) in _LEAVES else map_tensors(fn, item) for name, item in parts.items()}
    return value if all(map(is_, mapped.values(), parts.values())) else _rebuilt(value, mapped)


def find_tensors(value: Any, found: list[torch.Tensor]) -> list[torch.Tensor]:
    """Append every tensor in ``value`` to ``found``, in the order in which ``map_tensors`` visits them."""
    if isinstance(value, torch.Tensor):
        found.append(value)
        return found
    for item in value if isinstance(value, (list, tuple)) else _named_parts(value).values():
        kind = type(item)
        if kind is torch.Tensor:  # most items are tensors or leaves, and need no call
            found.append(item)
        elif kind not in _LEAVES:
            find_tensors(item, found)
    return found


def _named_parts(value: Any) -> dict[Any, Any]:
    """The items of a dict, or the fields of a dataclass; empty for anything else."""
    if isinstance(value, dict):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {}


def _rebuilt(original: Any, parts: dict[Any, Any]) -> Any:
    """A copy of the dict or dataclass ``original`` with other parts. No ``__init__`` or ``__post_init__`` runs: they
    may validate, or have side effects."""
    if type(original) is dict:
        return parts
    if not isinstance(original, dict):
        rebuilt = copy.copy(original)
        for name, item in parts.items():
            object.__setattr__(rebuilt, name, item)  # it may be frozen
        return rebuilt
    if hasattr(type(original), "__copy__"):  # defaultdict
        rebuilt = copy.copy(original)
    else:  # copy() of an OrderedDict would call the subclass
        rebuilt = type(original).__new__(type(original))
        vars(rebuilt).update(vars(original))
    for key, item in parts.items():  # some subclasses mirror items as attributes and forbid update()
        rebuilt[key] = item
    return rebuilt
