"""``FSDPModule``, the methods that a sharded module gains, and the handles that these methods return."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal, cast, overload

import torch
import torch.distributed as dist
from torch import nn

from fsdp2.core import _torch, seams
from fsdp2.core.api.arguments import expect
from fsdp2.core.group.group import ParamGroup
from fsdp2.core.runtime import door
from fsdp2.core.runtime.unit import Unit, note_tree_change, unit_of, units_under
from fsdp2.core.runtime.unit_tree import UnitTree, tree_of
from fsdp2.core.schedule.schedule import AfterForward
from fsdp2.core.types import ScheduleError


@door.all_entries
class UnshardHandle:
    """A pending :meth:`FSDPModule.unshard`."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Bind the unsharded parameters. The current stream may then read them. If an optimizer has stepped since
        ``unshard``, gather again. Do not write shards in any other way before waiting. Later calls do nothing."""
        unit, self._unit = self._unit, None
        if unit is not None:
            tree_of(unit).finish_unshard(unit)


@door.all_entries
class GradientReductionHandle:
    """A pending :meth:`FSDPModule.finalize_backward`."""

    def __init__(self, tree: UnitTree) -> None:
        self._tree: UnitTree | None = tree
        self._num_resets = tree.num_resets

    def wait(self) -> None:
        """Put the gradients into ``.grad`` of the shards. The current stream may read them. Later calls do nothing.

        Raises:
            ScheduleError: the root was reset after ``finalize_backward``, so the gradients are lost.
        """
        if self._tree is None:
            return
        if self._tree.num_resets != self._num_resets:
            raise ScheduleError(
                f"GradientReductionHandle.wait(): the gradients of unit '{self._tree.root.name}' are lost, because the "
                "model was reset after finalize_backward. Run the iteration again."
            )
        self._tree.land()
        self._tree = None


@door.all_entries
class FSDPModule:
    """Mixed into the class of every module given to :func:`fsdp2.fully_shard`, in front of the original class.

    Methods act on the module's own unit unless they take ``recurse``.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build the original class, since a sliced container constructs ``type(self)``, but a slice is not sharded."""
        original = cls.__mro__[cls.__mro__.index(FSDPModule) + 1]
        return original(*args, **kwargs)

    def __deepcopy__(self, memo: dict[Any, Any]) -> nn.Module:
        """Return a sharded copy with the same values, options and hooks, but no gradients. All ranks must copy.

        Raises:
            ScheduleError: a forward or backward runs, or parameters are lent to ``unsharded``.
        """
        return seams.copy_module(cast(nn.Module, self), memo)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Apply ``to``, ``cuda``, ``to_empty`` and similar methods to the shards."""
        self.reshard()
        with seams.around_apply(cast(nn.Module, self)), torch.inference_mode(False):  # as fully_shard's commit
            result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        unit = self._unit()
        for group in unit.groups:
            group.take_materialised()
        unit.mark_stale()
        return result

    # Parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this module's parameters and bind them until :meth:`reshard` or the end of the next forward or
        backward. With ``async_op``, return a handle at once; the next forward waits even if the handle is not used."""
        unit = self._unit()
        tree_of(unit).unshard(unit)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Bind the shards and free the unsharded parameters, including any shards of them kept on a smaller mesh."""
        self._unit().reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are resharded after forward. Overrides the argument of ``fully_shard``, which may also be
        a number of ranks."""
        after_forward = AfterForward.RESHARD if reshard_after_forward else AfterForward.KEEP
        self._configure_units(recurse, after_forward=after_forward, stays_as_root=False, post_forward_size=None)

    def set_reshard_after_backward(self, reshard_after_backward: bool | int, *, recurse: bool = True) -> None:
        """If False, parameters stay unsharded after backward, and the next forward gathers nothing.

        If it is the int of ``reshard_after_forward``, the shards kept between forward and backward, over that many
        ranks, stay until the parameters change. So only one gather of a step, with all its micro-batches, crosses
        nodes.

        Raises:
            ValueError: a unit has another ``reshard_after_forward``, or one that is not a number of ranks.
        """
        size = None if isinstance(reshard_after_backward, bool) else reshard_after_backward
        units = self._units(recurse)
        for unit in units:
            if size is not None and unit.groups and unit.config.post_forward_size != size:
                raise ValueError(
                    f"set_reshard_after_backward({size}): unit '{unit.name}' has reshard_after_forward="
                    f"{unit.config.post_forward_size or 'True or False'}. Pass reshard_after_forward={size} to "
                    "fully_shard, or a bool here."
                )
        for unit in units:
            unit.configure(reshard_after_backward=bool(reshard_after_backward))
            for group in unit.groups:
                group.keep_post_forward(size is not None)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward gathers this unit. Pass False if backward does not read the unit's parameters, as with an
        embedding."""
        self._configure_units(False, unshard_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """In this module's forward, start gathering ``modules`` instead of the unit that came next in the last forward.
        Each gather in flight needs memory for its unsharded parameters."""
        self._unit().configure(forward_units=units_of(modules, "set_modules_to_forward_prefetch"))

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """In this module's backward, start gathering ``modules`` instead of the unit that preceded it in forward."""
        self._unit().configure(backward_units=units_of(modules, "set_modules_to_backward_prefetch"))

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Make the gathers of the next forward wait only for ``event``, which is recorded after the optimizer step. By
        default, gathers wait for all earlier work of the current stream. Call it on the root. No effect on the CPU."""
        tree_of(self._unit()).post_optim_event = event

    @door.entry
    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Whether unsharded parameters are allocated and filled on the caller's stream. Casts and copies around the
        collective then do not overlap with compute. Also acts on inner units, and reshards. No effect on the CPU."""
        for group in self._groups(True):
            group.gather_on_compute_stream(async_op)

    # Gradients

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last one over the forwards recorded so far. The last backward waits for the
        reductions in flight. The order of the forwards, which backward prefetch follows, is kept until then. If an
        optimizer steps earlier, the next forward raises ``ScheduleError``. Call it on the root."""
        tree_of(self._unit()).schedule.is_last_backward = is_last_backward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. If False, each rank accumulates unsharded ones in the reduce dtype."""
        self._configure_groups(recurse, requires_all_reduce=requires_gradient_sync)
        self._configure_units(recurse, reduces=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward also reduces over the replicate axis (HSDP). If False, sums over the shards accumulate."""
        self._configure_groups(recurse, requires_all_reduce=requires_all_reduce)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Whether a trainable parameter gets a gradient of zeros instead of ``None`` if this rank has none. With True,
        ranks may use different parameters of a unit."""
        self._configure_groups(recurse, fills_gradients=reduce_scatter_unused_params)

    def set_ranks_may_differ(self, ranks_may_differ: bool, *, recurse: bool = True) -> None:
        """Whether ranks may use different units, or different parameters of a unit, in the same pass: for example,
        experts without tokens, or batches without images. Default: False. A change takes effect with the next forward.

        All ranks end a step with the same mean gradients. A rank that skips a unit still gathers the unit and reduces
        zeros for it, even if no rank uses the unit; pass False for units that either all ranks use or all ranks skip.
        A small all-reduce at the end of a step finds which parameters had a gradient on some rank. A rank must not use
        a unit more often than the others do, nor use units in an order that contradicts the other ranks' order.

        Without it, ranks that diverge are detected: a rank that deviates from its previous step waits for the others to
        do the same. If they do not, a ``ScheduleError`` names the units or the parameters and the ranks.
        """
        self._configure_units(recurse, ranks_may_differ=ranks_may_differ)
        note_tree_change()  # the root must reschedule its units

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by ``factor`` instead of the number of ranks.

        Raises:
            TypeError: ``factor`` is not a number.
            ValueError: ``factor`` is not positive, or not finite.
        """
        self._configure_groups(False, gradient_divide_factor=factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Deprecated name of :meth:`set_gradient_divide_factor`."""
        warnings.warn(
            "set_reduce_scatter_divide_factor is deprecated. Call set_gradient_divide_factor instead.",
            DeprecationWarning,
            stacklevel=4,  # over the door
        )
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Make collectives sum, and divide gradients after the all-reduce hook, so that the hook gets the sum.

        Otherwise, a backend that supports it (NCCL) computes the mean itself, without a kernel that divides.
        """
        self._configure_groups(False, divides_behind_hook=enable)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None] | None, *, stream: torch.Stream | None = None
    ) -> None:
        """Call ``hook`` on this rank's reduced gradients in every backward that reduces.

        The hook gets one flat buffer of the reduce dtype and may change it in place. It holds the gradients of the
        unit's trainable parameters, with zeros between them, summed over all ranks. They are already divided, except
        after :meth:`set_force_sum_reduction_for_comms`, and except for the second division of float16. With HSDP, the
        hook is not called while :meth:`set_requires_all_reduce` is off. Scalars get a separate call.

        Args:
            hook: the function; None removes an earlier hook.
            stream: the accelerator stream that the hook runs on. With HSDP, and for scalars, it is that of reductions.

        Raises:
            TypeError: ``hook`` cannot be called.
            ValueError: ``stream`` is given with HSDP, or the unit has several groups.
        """
        seams.communicate_by("set_all_reduce_hook", self._unit(), (hook, stream))

    # The end of backward, and recovery

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Whether :meth:`finalize_backward` ends the backward pass, after any number of backwards;
        :meth:`set_is_last_backward` then has no effect. Call it on the root. In schedules with a separate reduction
        step, switch :meth:`set_requires_gradient_sync` off for the backwards, and on again before finalizing.

        Raises:
            ScheduleError: the module is not a root; or a backward is running, or waits to be finalized.
        """
        tree = tree_of(self._root_unit("set_manual_backward_finalization"))
        schedule = tree.schedule
        if enabled == schedule.finalizes_by_hand:
            return
        if schedule.awaits_finalization or tree.is_reducing or _torch.in_backward():
            found = "a backward is running" if _torch.in_backward() else "a backward waits to be finalized"
            raise ScheduleError(
                f"set_manual_backward_finalization({enabled}): {found}. Call set_manual_backward_finalization before "
                "backward, or after finalize_backward() or reset_iter_state()."
            )
        schedule.finalizes_by_hand = enabled

    @overload
    def finalize_backward(self, *, async_op: Literal[False] = False) -> None: ...
    @overload
    def finalize_backward(self, *, async_op: Literal[True]) -> GradientReductionHandle: ...
    @overload
    def finalize_backward(self, *, async_op: bool) -> GradientReductionHandle | None: ...
    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End all backwards since the last call: reduce their remaining gradients, reshard, and wait for the
        gradients. Call it on the root, after :meth:`set_manual_backward_finalization`.

        A unit with :meth:`set_requires_gradient_sync` off keeps its gradients; a unit with
        :meth:`set_reshard_after_backward` off keeps its parameters. With ``async_op``, return a handle at once; wait
        for the handle before the next forward.

        Raises:
            ScheduleError: not a root; manual finalization is off; a backward runs; an earlier handle is still pending;
                the backwards have lost gradients of parameters, because a unit was resharded.
        """
        tree = tree_of(self._root_unit("finalize_backward"))
        problem = None
        if not tree.schedule.finalizes_by_hand:
            problem = (
                "manual finalization is off, so each backward is finalized at its end. "
                "Call set_manual_backward_finalization(True) before backward"
            )
        elif _torch.in_backward():
            problem = "a backward is running. Call finalize_backward after backward() has returned"
        elif tree.passes.in_backward:
            problem = "the last backward has raised. Call reset_iter_state() and zero_grad(), and repeat the step"
        elif tree.is_reducing:
            problem = "the handle of the last call is still pending. Call wait() on that handle first"
        if problem is not None:
            raise ScheduleError(f"finalize_backward on {type(self).__name__}: {problem}.")
        tree.finalize_backward()
        handle = GradientReductionHandle(tree)
        if async_op:
            return handle
        handle.wait()
        return None

    def reset_iter_state(self, *, keep_unreduced: bool = False) -> None:
        """After an exception in forward or backward, reshard and reset the state, so that the next iteration can run.

        Gradients in ``.grad`` stay. Gradients of earlier micro-batches that are unreduced or in flight are dropped: a
        step that is repeated as a whole would count them twice. Call it on the root.

        Args:
            keep_unreduced: keep these gradients as well, to continue with the next micro-batch. Only allowed after an
                exception in *forward*.

        Raises:
            ScheduleError: ``keep_unreduced`` after an exception in backward, which has changed some of the gradients.
        """
        tree = tree_of(self._unit())
        if not keep_unreduced:
            tree.reset()
        elif tree.passes.in_backward:
            raise ScheduleError(
                "reset_iter_state(keep_unreduced=True): an exception in backward has left incomplete sums in unreduced "
                "gradients. Call reset_iter_state() and zero_grad(). Then repeat all micro-batches."
            )
        else:
            tree.abandon_forward()

    # Memory

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reductions may be in flight at a time; 1 by default. Each one holds the gradients that it reads.
        If units under one root have different limits, the largest applies. Takes effect with the next backward.

        Raises:
            TypeError: ``max_input_buffers`` is not an int.
            ValueError: ``max_input_buffers`` is less than 1.
        """
        self._configure_units(recurse, max_reductions=max_input_buffers)

    def set_temporary_memory_limit(self, nbytes: int | str | None) -> None:
        """Hold at most ``nbytes``, such as ``"2GiB"``, on each rank, not counting shards, their gradients and
        activations. Takes effect with the next forward; None, the default, sets no limit. Call it on the root, with the
        same limit on all ranks.

        The limit counts unsharded parameters, the staging memory of their gathers, gradients while their unit's
        backward runs, and what reductions in flight read and write (:func:`fsdp2.memory.memory_plan`). It does not
        count gradients that accumulate without communication, memory that custom communication or hooks allocate, or
        blocks that the allocator keeps. Near the limit, less work overlaps.

        Raises:
            ValueError: ``nbytes`` is not a size, or less than one byte.
            ScheduleError: the module is not a root.
            MemoryLimitError: raised later, by a forward or backward, if a unit does not fit at all.
        """
        if nbytes is not None:
            nbytes = seams.nbytes_of(nbytes, "set_temporary_memory_limit: nbytes", "2GiB")
        self._root_unit("set_temporary_memory_limit").configure(memory_limit=nbytes)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether resharding keeps the memory of unsharded parameters allocated, for example for CUDA graphs."""
        for group in self._groups(recurse):
            group.keeps_storage = keep

    # Custom communication

    def set_custom_all_gather(self, comm: Callable[..., dist.Work | None]) -> None:
        """All-gather this unit's parameters with ``comm``, an :class:`AllGather`, unless the shard axis has one rank.

        Raises:
            TypeError: ``comm`` is not an :class:`AllGather`.
            ValueError: the unit has several groups.
        """
        seams.communicate_by("set_custom_all_gather", self._unit(), comm)

    def set_custom_reduce_scatter(self, comm: Callable[..., dist.Work | None]) -> None:
        """Reduce-scatter this unit's gradients with ``comm``, a :class:`ReduceScatter`.

        Raises:
            TypeError: ``comm`` is not a :class:`ReduceScatter`.
            ValueError: the unit has several groups, or a ``reduce_wire``.
        """
        seams.communicate_by("set_custom_reduce_scatter", self._unit(), comm)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Whether messages are copied into memory from the backend's own allocator, if it has one, such as NCCL's
        registered memory.

        Raises:
            ValueError: the unit has a custom all-gather or reduce-scatter, or symmetric memory.
        """
        seams.communicate_by("set_allocate_memory_from_process_group_for_comm", self._unit(), enable)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """All-gather in symmetric memory, and after :meth:`set_force_sum_reduction_for_comms`, also reduce in it.
        All ranks must call this method.

        Raises:
            ValueError: the backend is not NCCL; the mesh is not on CUDA devices; the unit has a custom all-gather or
                reduce-scatter, or memory from the process group.
        """
        seams.communicate_by("set_symm_mem_for_comm", self._unit(), backend)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Whether reduce-scatters use a separate process group, so that they do not queue behind all-gathers in
        backward. All ranks must make the same call."""
        groups = self._groups(recurse)
        axes = [seams.separate_axis(group.mesh.shard, group.mesh.device) if enable else None for group in groups]
        for group, axis in zip(groups, axes, strict=True):
            group.configure(reduce_axis=axis)

    # The units and groups that the setters change

    def _unit(self) -> Unit:
        unit = unit_of(cast(nn.Module, self))
        assert unit is not None  # fully_shard swaps the class and sets the unit together
        return unit

    def _units(self, recurse: bool) -> list[Unit]:
        return [unit for _, unit in units_under(cast(nn.Module, self))] if recurse else [self._unit()]

    def _groups(self, recurse: bool) -> list[ParamGroup]:
        return [group for unit in self._units(recurse) for group in unit.groups]

    def _configure_groups(self, recurse: bool, **changes: Any) -> None:
        for group in self._groups(recurse):
            group.configure(**changes)

    def _configure_units(self, recurse: bool, **changes: Any) -> None:
        for unit in self._units(recurse):
            unit.configure(**changes)

    def _root_unit(self, caller: str) -> Unit:
        unit = self._unit()
        if not unit.is_root:
            raise ScheduleError(
                f"{caller}: unit '{unit.name}' is not the root. "
                f"Call {caller} on the root, the {tree_of(unit).class_name} around this unit."
            )
        return unit


def units_of(modules: list[FSDPModule], caller: str) -> tuple[Unit, ...]:
    """The units of ``modules``, which the user has passed to ``caller``."""
    for module in modules:
        is_sharded = isinstance(module, FSDPModule)
        expect(is_sharded, f"{caller}: a module", module, "one that fully_shard was called on", by_value=True)
    return tuple(module._unit() for module in modules)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots share communication streams. Roots on one device always do so: this call only checks.

    Raises:
        ValueError: an item of ``modules`` is not sharded, or ``modules`` are on several devices.
    """
    devices = dict.fromkeys(str(unit.mesh.device) for unit in units_of(modules, "share_comm_ctx"))
    if len(devices) > 1:
        raise ValueError(f"share_comm_ctx: expected modules on one device, got modules on {' and '.join(devices)}.")
