"""Makes construction of a wrapper all or nothing: if it raises, the model is unchanged.

Policies, ``param_init_fn``, ``reset_parameters``, extensions and collectives may raise after inner modules have been
wrapped. So the original parameters, which units replace by shards, are kept until the outermost wrapper is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp2.core import _torch
from fsdp2.core.marks import is_plain
from fsdp2.core.runtime.unit import unit_of


@contextmanager
def undone_on_error(module: nn.Module) -> Iterator[None]:
    """If the block raises, restore the parameters, buffers, children, hooks and other attributes of all modules in
    ``module``. In-place writes, such as the values that ``sync_module_states`` copies from the first rank, are not
    undone."""
    modules = [_ModuleBefore.of(each) for each in module.modules()]
    params = [_ParamBefore.of(each) for each in module.parameters()]
    try:
        yield
    except BaseException:
        for each in modules:
            each.restore()
        for param in params:
            param.restore()
        raise


@dataclass(frozen=True)
class _ModuleBefore:
    """Attributes of a module. ``contents`` copies those that are dicts, such as its parameters and hooks; the dicts
    themselves stay the same objects, since handles of hooks refer to them."""

    module: nn.Module
    attributes: dict[str, Any]
    contents: Sequence[tuple[dict[Any, Any], dict[Any, Any]]]

    @staticmethod
    def of(module: nn.Module) -> _ModuleBefore:
        attributes = dict(vars(module))
        contents = [(value, dict(value)) for value in attributes.values() if isinstance(value, dict)]
        return _ModuleBefore(module, attributes, contents)

    def restore(self) -> None:
        unit = unit_of(self.module)
        _refill(self.module.__dict__, self.attributes)
        for place, content in self.contents:
            _refill(place, content)
        if unit is not None and unit is not unit_of(self.module):
            for group in unit.groups:
                group.forget()


@dataclass(frozen=True)
class _ParamBefore:
    """A parameter. ``data`` is its memory, if it is plain, since ``to_empty`` replaces it."""

    param: nn.Parameter
    kind: type
    attributes: dict[str, Any]
    data: torch.Tensor | None
    grad_dtype: torch.dtype | None

    @staticmethod
    def of(param: nn.Parameter) -> _ParamBefore:
        grad_dtype = getattr(param, "grad_dtype", None)
        return _ParamBefore(param, type(param), dict(vars(param)), param.data if is_plain(param) else None, grad_dtype)

    def restore(self) -> None:
        self.param.__class__ = self.kind
        _refill(self.param.__dict__, self.attributes)
        if self.data is not None:
            self.param.data = self.data
        _torch.set_grad_dtype(self.param, self.grad_dtype)


def _refill(place: dict[Any, Any], content: dict[Any, Any]) -> None:
    place.clear()
    place.update(content)
