"""The setters of ``FSDPModule`` that say what carries the bytes, in which memory, and what is done with sums."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from fsdp2.api.controls import Controls
from fsdp2.comm.custom import BackendAllGather, BackendMemory, BackendReduceScatter, SymmetricMemory
from fsdp2.group.group import ParamGroup
from fsdp2.group.reduce_scatter import AllReduceHook
from fsdp2.plan.mesh import separate_axis
from fsdp2.types import AllGather, ReduceScatter


class CommunicationSetters(Controls):
    """Part of :class:`fsdp2.FSDPModule`."""

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
        float16. On HSDP it is not called where :meth:`set_requires_all_reduce` is off. Scalars, which are whole on all
        ranks, come in a buffer and a call of their own.

        Args:
            hook: None takes an earlier one away.
            stream: the accelerator's stream that the hook runs on, in order with the reduction. Not on HSDP, whose
                hooks run on the stream of reductions, and so do those on scalars. The CPU has no streams.

        Raises:
            TypeError: ``hook`` cannot be called.
            ValueError: ``stream`` on HSDP, or a unit of several groups.
        """
        caller = "set_all_reduce_hook"
        groups, scalars = self._only_group(caller)
        if hook is not None and not callable(hook):
            raise TypeError(f"{caller}: expected a function of a tensor, or None, got a {type(hook).__name__}.")
        if stream is not None and any(group.mesh.replicate.group is not None for group in groups):
            raise ValueError(
                f"{caller}: this unit's mesh has a replicate axis (HSDP). Its all-reduce has a stream already, and the "
                "hook runs on it. Leave stream out."
            )
        for of, on in ((groups, stream), (scalars, None)):
            for group in of:
                group.configure(all_reduce_hook=None if hook is None else AllReduceHook(hook, on))

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

    def _only_group(self, caller: str) -> tuple[Sequence[ParamGroup], Sequence[ParamGroup]]:
        """The unit's group, if it has one; and that of its scalars, which are not cut, so no comm moves them."""
        groups: list[ParamGroup] = []
        scalars: list[ParamGroup] = []
        for group in self._unit().groups:
            (groups if any(param.layout.shape for param in group.params) else scalars).append(group)
        if len(groups) > 1:
            raise ValueError(
                f"{caller}: this unit has {len(groups)} parameter groups, on meshes of their own, and one comm would "
                "have to serve them all. Call fully_shard on the modules of each mesh separately."
            )
        return groups, scalars

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


def _check_comm(caller: str, comm: object, expected: str) -> None:
    """Whatever has the two methods will do: comms may be subclasses of torch's own interface."""
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise TypeError(f"{caller}: expected an fsdp2.{expected}, with allocate() and __call__(), got {comm!r}.")
