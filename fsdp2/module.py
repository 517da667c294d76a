"""``FSDPModule``: what a sharded module can do beyond its own class, and ``UnshardHandle``.

Each setter is one line on ``_configure``. Methods act on the module's own unit unless they take ``recurse``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NoReturn, cast

from torch import nn

from fsdp2.group import ParamGroup
from fsdp2.runtime import Unit, unit_of, units_under
from fsdp2.schedule import AfterForward


class UnshardHandle:
    """A pending :meth:`FSDPModule.unshard`."""

    def __init__(self, groups: Iterable[ParamGroup]) -> None:
        self._groups = tuple(groups)

    def wait(self) -> None:
        """Bind the unsharded parameters; the current stream may read them. Later calls do nothing."""
        groups, self._groups = self._groups, ()
        for group in groups:
            group.wait_if_unsharding()
            group.note_writes()


class FSDPModule:
    """Mixed into the class of every module given to :func:`fsdp2.fully_shard`, in front of the original class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build the original class: containers construct ``type(self)`` when they are sliced, and a slice of a sharded
        container is no sharded module."""
        original = cls.__mro__[cls.__mro__.index(FSDPModule) + 1]
        return original(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise NotImplementedError(
            f"deepcopy of {type(self).__name__}: a sharded module holds process groups and memory shared with its "
            "group. Copy the module before fully_shard, or rebuild it and load its state_dict()."
        )

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this module's parameters and bind the unsharded ones; not recursive.

        With ``async_op``, returns at once with a handle; the next forward waits by itself. Nothing happens if they are
        unsharded already. The parameters stay until :meth:`reshard` or the end of the next forward or backward.
        """
        unit = self._unit()
        unit.unshard()
        handle = UnshardHandle(unit.groups)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Bind the shards and free the unsharded parameters, or the ones resting on a smaller mesh; not recursive."""
        self._unit().reshard()

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward, return to rest so that the next iteration can run.

        What is in flight is waited for, all parameters are resharded, and gradients that were not reduced yet are
        dropped. Call it on the root.
        """
        self._unit().context.reset()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last one over the forwards recorded so far; the order of those forwards,
        which backward prefetch follows, is kept until then."""
        self._unit().context.schedule.is_last_backward = is_last_backward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. Without, they accumulate unsharded, in reduce dtype, on each rank."""
        self._configure(
            recurse, requires_gradient_sync=requires_gradient_sync, requires_all_reduce=requires_gradient_sync
        )

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces over the replicate axis, too (HSDP). Without, sums over the shard axis accumulate
        on each rank."""
        self._configure(recurse, requires_all_reduce=requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by ``factor`` instead of the number of ranks; not recursive."""
        self._configure(False, gradient_divide_factor=factor)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are resharded after forward; overrides the argument of ``fully_shard``.

        Raises:
            ValueError: ``reshard_after_forward`` is no bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"set_reshard_after_forward: expected a bool, got {reshard_after_forward!r}. "
                "A smaller world size can be given to fully_shard only."
            )
        rule = AfterForward.RESHARD if reshard_after_forward else AfterForward.KEEP
        for unit in self._units(recurse):
            unit.auto_reshard = False
            unit.configure(after_forward=rule)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether parameters are resharded after backward. Without, the next forward needs no all-gather: memory for
        communication between microbatches whose parameters do not change."""
        for unit in self._units(recurse):
            unit.configure(reshard_after_backward=reshard_after_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """In this module's forward, start gathering ``modules`` instead of the one that followed in the last forward.

        Each further module in flight costs its unsharded parameters.
        """
        unit = self._unit()
        unit.forward_prefetch = _units_of(modules, "set_modules_to_forward_prefetch")
        unit.update_prefetch()

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """In this module's backward, start gathering ``modules`` instead of the one whose forward ran before."""
        unit = self._unit()
        unit.backward_prefetch = _units_of(modules, "set_modules_to_backward_prefetch")
        unit.update_prefetch()

    def _configure(self, recurse: bool, **changes: Any) -> None:
        for unit in self._units(recurse):
            for group in unit.groups:
                group.options = replace(group.options, **changes)

    def _units(self, recurse: bool) -> list[Unit]:
        if not recurse:
            return [self._unit()]
        return [unit for _, unit in units_under(cast(nn.Module, self))]

    def _unit(self) -> Unit:
        unit = unit_of(cast(nn.Module, self))
        assert unit is not None  # fully_shard swaps the class and sets the unit together
        return unit

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``to``, ``cuda``, ``to_empty`` and their like work on the shards."""
        self.reshard()
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        self._unit().mark_stale()
        return result


def _units_of(modules: list[FSDPModule], caller: str) -> list[Unit]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"{caller}: expected modules that fully_shard was called on, got a {type(module).__name__}."
            )
    return [module._unit() for module in modules]
