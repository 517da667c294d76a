"""``FSDPModule``: what a sharded module can do beyond its own class, and the handles that its methods return."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, cast, overload

import torch
from torch import nn

from fsdp2 import _torch
from fsdp2.api.copying import copied_module
from fsdp2.comm.custom import BackendAllGather, BackendMemory, BackendReduceScatter, SymmetricMemory
from fsdp2.group.group import ParamGroup
from fsdp2.group.reduce_scatter import AllReduceHook
from fsdp2.plan.mesh import separate_axis
from fsdp2.runtime.root import Root, Unit, unit_of, units_under
from fsdp2.schedule.schedule import AfterForward
from fsdp2.types import AllGather, ReduceScatter, ScheduleError


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


class GradientReductionHandle:
    """A pending :meth:`FSDPModule.finalize_backward`."""

    def __init__(self, root: Root) -> None:
        self._root: Root | None = root
        self._num_resets = root.num_resets

    def wait(self) -> None:
        """The gradients are in ``.grad`` of the shards; the current stream may read them. Later calls do nothing.

        Raises:
            ScheduleError: the root was reset meanwhile, and the gradients are lost.
        """
        if self._root is None:
            return
        if self._root.num_resets != self._num_resets:
            raise ScheduleError(
                f"wait() on the gradients of {self._root.unit.name}: the model was reset since finalize_backward, "
                "and they are lost. Run the iteration again."
            )
        self._root.land()
        self._root = None


class FSDPModule:
    """Mixed into the class of every module given to :func:`fsdp2.fully_shard`, in front of the original class.

    Methods act on the module's own unit unless they take ``recurse``.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build the original class: containers construct ``type(self)`` when sliced, and a slice is not sharded."""
        original = cls.__mro__[cls.__mro__.index(FSDPModule) + 1]
        return original(*args, **kwargs)

    def __deepcopy__(self, memo: dict[Any, Any]) -> nn.Module:
        """A sharded module of its own with the same values, options and hooks, but no gradients. All ranks copy alike.

        Raises:
            ScheduleError: a pass runs, or parameters are lent to ``unsharded``.
        """
        return copied_module(cast(nn.Module, self), memo)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``to``, ``cuda``, ``to_empty`` and their like work on the shards."""
        self.reshard()
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        self._unit().mark_stale()
        return result

    # Parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this module's parameters and bind them, until :meth:`reshard` or the end of the next forward or
        backward. With ``async_op``, returns a handle at once; the next forward waits by itself."""
        unit = self._unit()
        unit.unshard()
        handle = UnshardHandle(unit.groups)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Bind the shards and free the unsharded parameters."""
        self._unit().reshard()

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
        for unit in self._units(recurse):
            unit.auto_reshard = False
            unit.configure(after_forward=AfterForward.RESHARD if reshard_after_forward else AfterForward.KEEP)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether parameters are resharded after backward. Without, the next forward needs no all-gather."""
        self._set_rules(recurse, reshard_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether parameters are gathered for backward. Switch it off where none reads them, as of an embedding."""
        self._set_rules(False, unshard_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """In this module's forward, start gathering ``modules`` instead of the one that followed in the last forward.
        Each one in flight costs its unsharded parameters."""
        self._unit().forward_prefetch = _units_of(modules, "set_modules_to_forward_prefetch")
        self._unit().update_rules()

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """In this module's backward, start gathering ``modules`` instead of the one whose forward ran before."""
        self._unit().backward_prefetch = _units_of(modules, "set_modules_to_backward_prefetch")
        self._unit().update_rules()

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Have the next forward's gathers wait for ``event``, recorded after the optimizer's step, instead of all that
        the current stream was given before. For one forward; call it on the root. Without effect on the CPU."""
        self._unit().form_root().post_optim_event = event

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Whether unsharded parameters are allocated and filled on the stream of the caller. Casts and copies around
        the collective then do not overlap with compute. Recursive. Reshards. Without effect on the CPU."""
        for group in self._groups(True):
            group.gather_on_compute_stream(async_op)

    # Gradients

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last one over the forwards recorded so far: it waits for the reductions in
        flight. Their order, which backward prefetch follows, is kept until then. Call it on the root."""
        self._unit().form_root().schedule.is_last_backward = is_last_backward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. Without, they accumulate unsharded, in reduce dtype, on each rank."""
        self._configure(recurse, requires_all_reduce=requires_gradient_sync)
        self._set_rules(recurse, reduces=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces over the replicate axis, too (HSDP). Without, sums over the shards accumulate."""
        self._configure(recurse, requires_all_reduce=requires_all_reduce)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Whether trainable parameters that no rank has a gradient of get one of zeros; ``None`` by default. Ranks may
        use different parameters either way."""
        self._set_rules(recurse, reduces_unused=reduce_scatter_unused_params)

    def set_ranks_may_skip(self, ranks_may_skip: bool, *, recurse: bool = True) -> None:
        """Whether ranks may skip this module in a pass in which others use it; they may by default. From the next
        forward on.

        A rank that skips a unit (experts without tokens) gathers it all the same and reduces zeros for it. A unit that
        no rank uses still travels: switch that off for units that all ranks skip alike. Then a rank that skips one
        alone makes the others wait for the process group's timeout. A rank may not use a unit more often than others
        do, nor take units in an order that contradicts theirs.
        """
        self._set_rules(recurse, ranks_may_skip=ranks_may_skip)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by ``factor`` instead of the number of ranks."""
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
        """Have collectives sum, and divide gradients behind the all-reduce hook, so that it gets their sum.

        Otherwise a backend that can (NCCL) takes the mean itself, without a kernel that divides.
        """
        self._configure(False, divides_behind_hook=enable)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None] | None, *, stream: torch.Stream | None = None
    ) -> None:
        """Call ``hook`` on this rank's reduced gradients in every backward that reduces.

        It gets one flat buffer of reduce dtype, and may change it in place: the gradients of the unit's trainable
        parameters, zeros between them, summed over all ranks; divided already, except after
        :meth:`set_force_sum_reduction_for_comms`, and except for the second division of float16. On HSDP it is not
        called where :meth:`set_requires_all_reduce` is off. Scalars come in a call of their own.

        Args:
            hook: None takes an earlier one away.
            stream: the accelerator's stream that the hook runs on. On HSDP, and for scalars, that of reductions.

        Raises:
            TypeError: ``hook`` cannot be called.
            ValueError: ``stream`` on HSDP, or a unit of several groups.
        """
        caller = "set_all_reduce_hook"
        cut = self._cut_groups(caller)
        if hook is not None and not callable(hook):
            raise TypeError(f"{caller}: expected a function of a tensor, or None, got a {type(hook).__name__}.")
        if stream is not None and any(group.mesh.replicate.group is not None for group in cut):
            raise ValueError(
                f"{caller}: this unit's mesh has a replicate axis (HSDP). Its all-reduce has a stream already, and the "
                "hook runs on it. Leave stream out."
            )
        for group in self._groups(False):
            on = stream if group in cut else None
            group.configure(all_reduce_hook=None if hook is None else AllReduceHook(hook, on))

    # The end of backward, and recovery

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Whether the end of backward is left to :meth:`finalize_backward`, however many backwards come before it;
        :meth:`set_is_last_backward` then means nothing. Call it on the root. For schedules that reduce in a step of
        its own: switch :meth:`set_requires_gradient_sync` off for the backwards and on again before finalizing.

        Raises:
            ScheduleError: the module is no root; a backward is running, or waits to be finalized.
        """
        root = self._root("set_manual_backward_finalization").form_root()
        schedule = root.schedule
        if enabled == schedule.finalizes_by_hand:
            return
        if schedule.awaits_finalization or root.is_reducing or _torch.in_backward():
            found = "a backward is running" if _torch.in_backward() else "a backward waits to be finalized"
            raise ScheduleError(
                f"set_manual_backward_finalization({enabled}): {found}. Call it before backward, or after "
                "finalize_backward() or reset_iter_state()."
            )
        schedule.finalizes_by_hand = enabled

    @overload
    def finalize_backward(self, *, async_op: Literal[False] = False) -> None: ...
    @overload
    def finalize_backward(self, *, async_op: Literal[True]) -> GradientReductionHandle: ...
    @overload
    def finalize_backward(self, *, async_op: bool) -> GradientReductionHandle | None: ...
    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End the backwards that have run since the last call: reduce what they have left, reshard, and wait for the
        gradients. Call it on the root, after :meth:`set_manual_backward_finalization`.

        Units whose :meth:`set_requires_gradient_sync` or :meth:`set_reshard_after_backward` is off keep their gradients
        or parameters. With ``async_op``, returns a handle at once; wait for it before the next forward.

        Raises:
            ScheduleError: no root; manual finalization is off; a backward runs; an earlier handle was not waited for.
        """
        root = self._root("finalize_backward").form_root()
        problem = None
        if not root.schedule.finalizes_by_hand:
            problem = "backward is finalized when it ends. Call set_manual_backward_finalization(True) before it"
        elif _torch.in_backward():
            problem = "a backward is running. Call it when backward() has returned"
        elif root.is_reducing:
            problem = "the handle of the last call was not waited for. Call its wait() first"
        if problem is not None:
            raise ScheduleError(f"finalize_backward on {type(self).__name__}: {problem}.")
        root.finalize_backward()
        handle = GradientReductionHandle(root)
        if async_op:
            return handle
        handle.wait()
        return None

    def reset_iter_state(self, *, keep_unreduced: bool = False) -> None:
        """After an exception in forward or backward, reshard and return to rest, so that the next iteration can run.

        Gradients in ``.grad`` stay. Those of earlier micro-batches that were not reduced or are in flight are dropped:
        a step that is repeated as a whole would count them twice. Call it on the root.

        Args:
            keep_unreduced: keep those, too, to go on with the next micro-batch after an exception in *forward*.

        Raises:
            ScheduleError: ``keep_unreduced`` after an exception in backward, which has added to some of them.
        """
        root = self._unit().form_root()
        if not keep_unreduced:
            root.reset()
        elif root.schedule.in_backward:
            raise ScheduleError(
                "reset_iter_state(keep_unreduced=True): an exception in backward has left parts of its own on "
                "gradients that were not reduced yet. Call reset_iter_state() and zero_grad(), and repeat all "
                "micro-batches."
            )
        else:
            root.abandon_forward()

    # Memory

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reductions may be in flight at a time; 1 by default. Each holds the gradients that it reads. Of
        different numbers under one root, the largest counts, from the next backward on.

        Raises:
            TypeError: ``max_input_buffers`` is no int.
            ValueError: it is less than 1.
        """
        _check_at_least_one("set_reduce_scatter_max_input_buffers", max_input_buffers, "an int")
        for unit in self._units(recurse):
            unit.max_reductions = max_input_buffers

    def set_temporary_memory_limit(self, nbytes: int | None) -> None:
        """Hold no more than ``nbytes`` on each rank beside shards, their gradients and activations, from the next
        forward on; None, the default, sets no limit. Call it on the root, with the same limit on all ranks.

        Counted are unsharded parameters, the staging memory of their gathers, gradients while their unit's backward
        runs, and what reductions in flight read and write (:func:`fsdp2.memory_plan`); not gradients that accumulate
        without communication, what a user's own communication or hooks allocate, and blocks that the allocator keeps.
        Near the limit, less overlaps.

        Raises:
            TypeError: ``nbytes`` is no int.
            ValueError: it is less than 1.
            ScheduleError: the module is no root.
            MemoryLimitError: later, by a forward or backward, if a unit does not fit at all.
        """
        if nbytes is not None:
            _check_at_least_one("set_temporary_memory_limit", nbytes, "an int or None", " byte")
        self._root("set_temporary_memory_limit").memory_limit = nbytes

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether resharding leaves the memory of unsharded parameters allocated, for CUDA graphs for example."""
        for group in self._groups(recurse):
            group.keeps_storage = keep

    # What carries the bytes

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """All-gather this unit's parameters by ``comm``, unless the shard axis has one rank. See :class:`AllGather`.

        Raises:
            TypeError: ``comm`` is no :class:`AllGather`.
            ValueError: a unit of several groups.
        """
        self._check_comm("set_custom_all_gather", comm, "AllGather")
        self._configure(False, all_gather=comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce-scatter this unit's gradients by ``comm``. See :class:`ReduceScatter`.

        Raises:
            TypeError: ``comm`` is no :class:`ReduceScatter`.
            ValueError: a unit of several groups.
        """
        self._check_comm("set_custom_reduce_scatter", comm, "ReduceScatter")
        self._configure(False, reduce_scatter=comm)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Whether messages are copied into memory of the backend's own allocator, such as NCCL's registered memory, if
        it has one.

        Raises:
            ValueError: the unit has a custom all-gather or reduce-scatter, or symmetric memory.
        """
        self._check_no_other_comm("set_allocate_memory_from_process_group_for_comm", BackendMemory)
        for group in self._groups(False):
            shard = group.mesh.shard.group
            if not enable or shard is None:
                group.configure(all_gather=None, reduce_scatter=None)
            else:
                memory = BackendMemory(shard)
                group.configure(all_gather=BackendAllGather(memory), reduce_scatter=BackendReduceScatter(memory))

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """All-gather in symmetric memory; after :meth:`set_force_sum_reduction_for_comms` reduce in it as well.
        Collective.

        Raises:
            ValueError: another backend than NCCL; a mesh that is not on CUDA devices; the unit has a custom all-gather
                or reduce-scatter, or memory from the process group.
        """
        caller = "set_symm_mem_for_comm"
        self._check_no_other_comm(caller, SymmetricMemory)
        if backend != "NCCL":
            raise ValueError(f"{caller}: backend={backend!r}, expected 'NCCL', the only one that is supported.")
        device = self._unit().mesh.device
        if device.type != "cuda":
            raise ValueError(
                f"{caller}: the mesh is on {device.type} devices, and only CUDA has symmetric memory here. Leave the "
                "call out on other devices."
            )
        for group in self._groups(False):
            shard = group.mesh.shard.group
            if shard is not None:
                memory = SymmetricMemory(shard, backend)
                reduce_scatter = BackendReduceScatter(memory) if group.options.divides_behind_hook else None
                group.configure(all_gather=BackendAllGather(memory), reduce_scatter=reduce_scatter)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Whether gradients are reduce-scattered over a process group of their own, so that they need not queue behind
        all-gathers in backward. All ranks must call it alike."""
        groups = self._groups(recurse)
        axes = [separate_axis(group.mesh.shard) if enable else None for group in groups]
        for group, axis in zip(groups, axes, strict=True):
            group.configure(reduce_axis=axis)

    # The way to what the setters change

    def _unit(self) -> Unit:
        unit = unit_of(cast(nn.Module, self))
        assert unit is not None  # fully_shard swaps the class and sets the unit together
        return unit

    def _units(self, recurse: bool) -> list[Unit]:
        return [unit for _, unit in units_under(cast(nn.Module, self))] if recurse else [self._unit()]

    def _groups(self, recurse: bool) -> list[ParamGroup]:
        return [group for unit in self._units(recurse) for group in unit.groups]

    def _configure(self, recurse: bool, **changes: Any) -> None:
        for group in self._groups(recurse):
            group.configure(**changes)

    def _set_rules(self, recurse: bool, **changes: Any) -> None:
        for unit in self._units(recurse):
            unit.configure(**changes)

    def _root(self, caller: str) -> Unit:
        unit = self._unit()
        if not unit.is_root:
            raise ScheduleError(
                f"{caller} on '{unit.name}', which is no root. Call it on the {unit.form_root().class_name} around it."
            )
        return unit

    def _cut_groups(self, caller: str) -> Sequence[ParamGroup]:
        """The unit's group, if it has one, but not that of its scalars, which no comm moves."""
        cut = [group for group in self._groups(False) if any(param.layout.shape for param in group.params)]
        if len(cut) > 1:
            raise ValueError(
                f"{caller}: this unit has {len(cut)} parameter groups, on meshes of their own, and one comm would "
                "have to serve them all. Call fully_shard on the modules of each mesh separately."
            )
        return cut

    def _check_comm(self, caller: str, comm: object, expected: str) -> None:
        """Whatever has the two methods will do: comms may be subclasses of torch's own interface."""
        self._cut_groups(caller)
        if not callable(comm) or not callable(getattr(comm, "allocate", None)):
            raise TypeError(f"{caller}: expected an fsdp2.{expected}, with allocate() and __call__(), got {comm!r}.")

    def _check_no_other_comm(self, caller: str, memory: type) -> None:
        """The unit has no comm but those that ``caller`` itself sets, with ``memory``."""
        options = [group.options for group in self._groups(False)]
        for comm in (comm for each in options for comm in (each.all_gather, each.reduce_scatter)):
            if comm is not None and not isinstance(getattr(comm, "memory", None), memory):
                raise ValueError(
                    f"{caller}: this unit communicates by a {type(comm).__name__} already, which allocates its own "
                    "memory. Choose one of set_custom_all_gather and set_custom_reduce_scatter, "
                    "set_allocate_memory_from_process_group_for_comm, and set_symm_mem_for_comm."
                )


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Have several roots share streams for communication. All roots on one device do so anyway: this checks only.

    Raises:
        ValueError: ``modules`` has something that is not sharded, or are on several devices.
    """
    devices = dict.fromkeys(str(unit.mesh.device) for unit in _units_of(modules, "share_comm_ctx"))
    if len(devices) > 1:
        raise ValueError(f"share_comm_ctx: expected modules on one device, got modules on {' and '.join(devices)}.")


def sharded_unit(module: nn.Module, caller: str) -> Unit:
    """The unit of ``module``, for what looks at sharded models.

    Raises:
        ValueError: ``module`` is not sharded.
    """
    unit = unit_of(module)
    if unit is None:
        raise ValueError(
            f"{caller}: this {type(module).__name__} was not given to fully_shard. Pass the root of the sharded model."
        )
    return unit


def _units_of(modules: list[FSDPModule], caller: str) -> list[Unit]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"{caller}: expected modules that fully_shard was called on, got a {type(module).__name__}."
            )
    return [module._unit() for module in modules]


def _check_at_least_one(caller: str, value: object, expected: str, unit: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{caller}: expected {expected}, got a {type(value).__name__}.")
    if value < 1:
        raise ValueError(f"{caller}: expected at least 1{unit}, got {value}.")
