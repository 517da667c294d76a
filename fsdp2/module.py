"""``FSDPModule``: what a sharded module can do beyond its own class, and ``UnshardHandle``.

Each setter is one line on ``_configure``. Methods act on the module's own unit unless they take ``recurse``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal, NoReturn, cast

import torch
from torch import nn

from fsdp2.api import AllGather, ReduceScatter
from fsdp2.custom_comm import BackendAllGather, BackendMemory, BackendReduceScatter, SymmetricMemory
from fsdp2.group import ParamGroup
from fsdp2.mesh import separate_axis
from fsdp2.reduce_scatter import AllReduceHook
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

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Deprecated name of :meth:`set_gradient_divide_factor`."""
        warnings.warn(
            "set_reduce_scatter_divide_factor is deprecated, use set_gradient_divide_factor",
            DeprecationWarning,
            stacklevel=2,
        )
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Divide gradients behind the all-reduce hook, so that it gets their sum; not recursive.

        Collectives only ever sum here, so nothing else changes.
        """
        self._configure(False, divides_behind_hook=enable)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None] | None, *, stream: torch.Stream | None = None
    ) -> None:
        """Call ``hook`` on this rank's reduced gradients in every backward that reduces; not recursive.

        It gets one flat buffer of reduce dtype, and may change it in place: the gradients of all trainable parameters
        of the unit, zeros between them, summed over the shard axis and, on HSDP, over the replicate axis. They are
        divided already, except after :meth:`set_force_sum_reduction_for_comms`, and except for the second division of
        float16. On HSDP it is not called where :meth:`set_requires_all_reduce` is off.

        Args:
            hook: None takes an earlier one away.
            stream: the accelerator's stream that the hook runs on, in order with the reduction. Not on HSDP, whose
                hooks run on the stream of reductions. The CPU has no streams.

        Raises:
            TypeError: ``hook`` cannot be called.
            ValueError: ``stream`` on HSDP, or a unit of several groups.
        """
        caller = "set_all_reduce_hook"
        groups = self._only_group(caller)
        if hook is not None and not callable(hook):
            raise TypeError(f"{caller}: expected a function of a tensor, or None, got a {type(hook).__name__}.")
        if stream is not None and any(group.mesh.replicate.group is not None for group in groups):
            raise ValueError(
                f"{caller}: this unit's mesh has a replicate axis (HSDP). Its all-reduce has a stream already, and the "
                "hook runs on it. Leave stream out."
            )
        self._configure(False, all_reduce_hook=None if hook is None else AllReduceHook(hook, stream))

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """All-gather this unit's parameters by ``comm`` from the next time on; not recursive. See :class:`AllGather`.

        One rank on the shard axis gathers nothing, and does not call it.

        Raises:
            TypeError: ``comm`` is no :class:`AllGather`.
            ValueError: a unit of several groups.
        """
        self._only_group("set_custom_all_gather")
        _check_comm("set_custom_all_gather", comm, "AllGather")
        self._configure(False, all_gather=comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce-scatter this unit's gradients by ``comm``; not recursive. See :class:`ReduceScatter`.

        Raises:
            TypeError: ``comm`` is no :class:`ReduceScatter`.
            ValueError: a unit of several groups.
        """
        self._only_group("set_custom_reduce_scatter")
        _check_comm("set_custom_reduce_scatter", comm, "ReduceScatter")
        self._configure(False, reduce_scatter=comm)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Whether messages travel in memory from the backend's own allocator, such as NCCL's registered memory, if it
        has one; not recursive. What travels is then copied into it and out of it.

        Raises:
            ValueError: the unit has a custom all-gather or reduce-scatter, or symmetric memory.
        """
        groups = self._groups_without_custom_comm("set_allocate_memory_from_process_group_for_comm", BackendMemory)
        for group in groups:
            shard = group.mesh.shard.group
            memory = BackendMemory(shard) if enable and shard is not None else None
            group.configure(
                all_gather=None if memory is None else BackendAllGather(memory),
                reduce_scatter=None if memory is None else BackendReduceScatter(memory),
            )

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """All-gather in symmetric memory, which NCCL has faster ways for; after
        :meth:`set_force_sum_reduction_for_comms` reduce in it as well. Not recursive, and collective.

        Raises:
            ValueError: another backend than NCCL; a mesh that is not on CUDA devices; the unit has a custom all-gather
                or reduce-scatter, or memory from the process group.
        """
        caller = "set_symm_mem_for_comm"
        groups = self._groups_without_custom_comm(caller, SymmetricMemory)
        if backend != "NCCL":
            raise ValueError(f"{caller}: backend={backend!r}, expected 'NCCL', the only one that is supported.")
        for group in groups:
            if group.mesh.device.type != "cuda":
                raise ValueError(
                    f"{caller}: the mesh is on {group.mesh.device.type} devices, and only CUDA has symmetric memory "
                    "here. Leave the call out on other devices."
                )
        for group in groups:
            shard = group.mesh.shard.group
            if shard is not None:
                memory = SymmetricMemory(shard, backend)
                reduces = group.options.divides_behind_hook
                group.configure(
                    all_gather=BackendAllGather(memory),
                    reduce_scatter=BackendReduceScatter(memory) if reduces else None,
                )

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Whether gradients are reduce-scattered over a process group of their own, so that they need not queue behind
        all-gathers in backward. One is made for each set of shard ranks, at first use, and kept.

        All ranks must call it alike.
        """
        groups = [group for unit in self._units(recurse) for group in unit.groups]
        axes = [separate_axis(group.mesh.shard) if enable else None for group in groups]
        for group, axis in zip(groups, axes, strict=True):
            group.configure(reduce_axis=axis)

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
                group.configure(**changes)

    def _only_group(self, caller: str) -> tuple[ParamGroup, ...]:
        """The unit's group, if it has one."""
        groups = self._unit().groups
        if len(groups) > 1:
            raise ValueError(
                f"{caller}: this unit has {len(groups)} parameter groups, on meshes of their own, and one comm would "
                "have to serve them all. Call fully_shard on the modules of each mesh separately."
            )
        return groups

    def _groups_without_custom_comm(self, caller: str, memory: type) -> tuple[ParamGroup, ...]:
        """The unit's groups, if they have no comm but those that ``caller`` itself sets, with ``memory``."""
        groups = self._unit().groups
        for comm in (comm for group in groups for comm in (group.options.all_gather, group.options.reduce_scatter)):
            if comm is not None and not isinstance(getattr(comm, "memory", None), memory):
                raise ValueError(
                    f"{caller}: this unit communicates by a {type(comm).__name__} already, which allocates its own "
                    "memory. Choose one of set_custom_all_gather and set_custom_reduce_scatter, "
                    "set_allocate_memory_from_process_group_for_comm, and set_symm_mem_for_comm."
                )
        return groups

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


def _check_comm(caller: str, comm: object, expected: str) -> None:
    """Whatever has the two methods will do: comms may be subclasses of torch's own interface."""
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise TypeError(f"{caller}: expected an fsdp2.{expected}, with allocate() and __call__(), got {comm!r}.")


def _units_of(modules: list[FSDPModule], caller: str) -> list[Unit]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"{caller}: expected modules that fully_shard was called on, got a {type(module).__name__}."
            )
    return [module._unit() for module in modules]
