"""Makes construction of a wrapper all or nothing: if it raises, the model is unchanged.

Policies, ``param_init_fn``, ``reset_parameters``, extensions and collectives may raise after inner modules have been
wrapped. So the original parameters, which units replace by shards, are kept until the outermost wrapper is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fsdp2.core import _torch, is_plain, unit_of


def restorer(module: nn.Module) -> Callable[[], None]:
    """A function that restores the parameters, buffers, children, hooks and other attributes of all modules in
    ``module``, as they are now. In-place writes, such as the values that ``sync_module_states`` copies from the first
    rank, are not undone."""
    restore = [*map(_restorer_of_module, module.modules()), *map(_restorer_of_param, module.parameters())]

    def restore_all() -> None:
        for each in restore:
            each()

    return restore_all


@contextmanager
def undone_on_error(module: nn.Module) -> Iterator[None]:
    """If the block raises, restore all modules in ``module``: see :func:`restorer`."""
    restore = restorer(module)
    try:
        yield
    except BaseException:
        restore()
        raise


def _restorer_of_module(module: nn.Module) -> Callable[[], None]:
    """Restores the attributes of ``module``, and the contents of those that are dicts, such as its parameters and
    hooks. The dicts themselves stay the same objects, since handles of hooks refer to them."""
    attributes = dict(vars(module))
    contents = [(value, dict(value)) for value in attributes.values() if isinstance(value, dict)]

    def restore() -> None:
        unit = unit_of(module)
        _refill(module.__dict__, attributes)
        for place, content in contents:
            _refill(place, content)
        if unit is not None and unit is not unit_of(module):
            for group in unit.groups:
                group.forget()

    return restore


def _restorer_of_param(param: nn.Parameter) -> Callable[[], None]:
    """Restores the class and the attributes of ``param``, and its memory if it is plain, since ``to_empty`` replaces
    that."""
    kind, attributes, grad_dtype = type(param), dict(vars(param)), getattr(param, "grad_dtype", None)
    data = param.data if is_plain(param) else None

    def restore() -> None:
        param.__class__ = kind
        _refill(param.__dict__, attributes)
        if data is not None:
            param.data = data
        _torch.set_grad_dtype(param, grad_dtype)

    return restore


def _refill(place: dict[Any, Any], content: dict[Any, Any]) -> None:
    place.clear()
    place.update(content)
