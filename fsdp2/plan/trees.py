"""The tensors inside what modules take and return: tensors, and dicts, lists, tuples and dataclasses of such.

Sets and other iterables are left alone, as torch's pytree does.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with ``fn`` applied to each tensor. Containers in which nothing changed are returned as they are, so
    that the identity costs no copy and keeps the caller's objects."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, dict):
        mapped = {key: map_tensors(fn, item) for key, item in value.items()}
        return value if _same(mapped.values(), value.values()) else _rebuilt_dict(value, mapped)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(fn, item) for item in value]
        if _same(items, value):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _mapped_dataclass(fn, value)
    return value


def find_tensors(value: Any, found: list[torch.Tensor]) -> list[torch.Tensor]:
    """Append every tensor in ``value`` to ``found``, in the order in which ``map_tensors`` visits them."""
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, dict):
        for item in value.values():
            find_tensors(item, found)
    elif isinstance(value, (list, tuple)):
        for item in value:
            find_tensors(item, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            find_tensors(getattr(value, field.name), found)
    return found


def _same(new: Any, old: Any) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))


def _rebuilt_dict(original: dict[Any, Any], mapped: dict[Any, Any]) -> dict[Any, Any]:
    if type(original) is dict:
        return mapped
    cls = type(original)
    if hasattr(cls, "__copy__"):  # defaultdict
        rebuilt = copy.copy(original)
    else:  # keeps the subclass and its attributes without guessing its __init__
        rebuilt = cls.__new__(cls)
        vars(rebuilt).update(vars(original))
    for key, item in mapped.items():  # some subclasses mirror items as attributes, and forbid update()
        rebuilt[key] = item
    return rebuilt


def _mapped_dataclass(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    old = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    new = {name: map_tensors(fn, item) for name, item in old.items()}
    if _same(new.values(), old.values()):
        return value
    rebuilt = copy.copy(value)  # no __init__, no __post_init__: they may validate, or have side effects
    for name, item in new.items():
        object.__setattr__(rebuilt, name, item)
    return rebuilt
