"""Private names of torch's ``FullyShardedDataParallel`` that clients read. They return views of the runtime, whose
module is loaded at first use."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from fsdp2.core.runtime.unit import Unit
from fsdp2.core.runtime.unit_tree import tree_of
from fsdp2.fsdp1.search import Wrapper, wrappers_in

if TYPE_CHECKING:
    from fsdp2.extras.torch_view.handle import ExecutionOrder, Handle


class HasPrivateNames(nn.Module):
    """The private names that the wrapper provides."""

    if TYPE_CHECKING:

        @property
        def _unit(self) -> Unit: ...

    @property
    def _has_params(self) -> bool:
        """Whether the unit has parameters."""
        return bool(self._unit.groups)

    @property
    def _handle(self) -> Handle | None:
        """The handle with which torch's wrapper moves its parameters; None if it has none."""
        return cast("Handle", _view("Handle")(_wrapper=self)) if self._unit.groups else None

    @property
    def _all_handles(self) -> list[Handle]:
        """The handles of all wrappers inside."""
        return [each._handle for each in wrappers_in(self) if each._handle is not None]

    @property
    def _all_fsdp_states(self) -> list[Wrapper]:
        """All wrappers inside. In torch, each wrapper is its own state."""
        return wrappers_in(self)

    @property
    def _exec_order_data(self) -> ExecutionOrder:
        return cast("ExecutionOrder", _view("ExecutionOrder")(_wrapper=self))

    @property
    def _is_root(self) -> bool | None:
        """Whether no other wrapper encloses this one. None until the first use, as in torch."""
        return None if self._unit.tree is None else self._unit.is_root

    @_is_root.setter
    def _is_root(self, value: bool | None) -> None:
        """Ignored. Clients set it to read a single wrapper of a tree; here, ``summon_full_params`` needs no root."""

    def _init_tree(self) -> HasPrivateNames:
        """Do what torch's ``_lazy_init`` does: the first wrapper that is used becomes the root. Returns the wrapper."""
        tree_of(self._unit)
        return self


def _view(name: str) -> Callable[..., Any]:
    return cast(Callable[..., Any], getattr(import_module("fsdp2.extras.torch_view.handle"), name))
