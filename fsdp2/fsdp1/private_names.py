"""Private names of torch's ``FullyShardedDataParallel`` that clients read. They show the runtime."""

from __future__ import annotations

from fsdp2.core import tree_of
from fsdp2.extras.torch_view.handle import ExecutionOrder, Handle
from fsdp2.fsdp1.has_params import HasParams
from fsdp2.fsdp1.search import Wrapper, wrappers_in


class HasPrivateNames(HasParams):
    """The private names that the wrapper provides."""

    _all_fsdp_states = property(wrappers_in)  # in torch, each wrapper is its own state
    _exec_order_data = property(lambda self: ExecutionOrder(_wrapper=self))

    @property
    def _has_params(self) -> bool:
        """Whether the unit has parameters."""
        return bool(self._unit.groups)

    @property
    def _handle(self) -> Handle | None:
        """The handle with which torch's wrapper moves its parameters; None if it has none."""
        return Handle(_wrapper=self) if self._has_params else None

    @property
    def _all_handles(self) -> list[Handle]:
        """The handles of all wrappers inside."""
        return [each._handle for each in wrappers_in(self) if each._has_params]

    @property
    def _is_root(self) -> bool | None:
        """Whether no other wrapper encloses this one. None until the first use, as in torch."""
        return None if self._unit.tree is None else self._unit.is_root

    @_is_root.setter
    def _is_root(self, value: bool | None) -> None:
        """Ignored. Clients set it to read a single wrapper of a tree; here, ``summon_full_params`` needs no root."""

    def _init_tree(self) -> Wrapper:
        """Do what torch's ``_lazy_init`` does: the first wrapper that is used becomes the root. Returns the wrapper."""
        tree_of(self._unit)
        return self
