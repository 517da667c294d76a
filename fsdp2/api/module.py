"""``FSDPModule``: what a sharded module can do beyond its own class, and ``UnshardHandle``.

A setter changes options of groups, rules of units, or what their root holds. Methods act on the module's own unit
unless they take ``recurse``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, cast, overload

import torch
from torch import nn

from fsdp2 import _torch
from fsdp2.api.communication import CommunicationSetters
from fsdp2.api.copying import copied_module
from fsdp2.group.group import ParamGroup
from fsdp2.runtime.root import Root, Unit
from fsdp2.schedule.schedule import AfterForward
from fsdp2.types import ScheduleError


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


class FSDPModule(CommunicationSetters):
    """Mixed into the class of every module given to :func:`fsdp2.fully_shard`, in front of the original class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build the original class: containers construct ``type(self)`` when they are sliced, and a slice of a sharded
        container is no sharded module."""
        original = next(base for base in cls.__mro__[cls.__mro__.index(FSDPModule) :] if base not in FSDPModule.__mro__)
        return original(*args, **kwargs)

    def __deepcopy__(self, memo: dict[Any, Any]) -> nn.Module:
        """A sharded module of its own, with the same values, options and hooks, on the same ranks, which have
        to copy alike. Gradients are not copied, as ``nn.Module`` does not.

        Raises:
            ScheduleError: a forward or backward runs, or parameters are lent to ``unsharded``.
        """
        return copied_module(cast(nn.Module, self), memo)

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

    def reset_iter_state(self, *, keep_unreduced: bool = False) -> None:
        """After an exception in forward or backward, return to rest so that the next iteration can run.

        All parameters are resharded. Gradients in ``.grad`` stay. Those of earlier micro-batches that are still on
        their way (not reduced, or in flight) are dropped, as torch does: a step that is repeated as a whole would count
        them twice. Call it on the root.

        Args:
            keep_unreduced: they stay, too, to go on with the next micro-batch after an exception in *forward*.

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

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last one over the forwards recorded so far. Call it on the root.

        The last backward waits for the reductions in flight. The order of those forwards, which backward prefetch
        follows, is kept until then.
        """
        self._unit().form_root().schedule.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Whether the end of backward is left to :meth:`finalize_backward`, however many backwards come before it;
        :meth:`set_is_last_backward` then means nothing. Call it on the root.

        For schedules in which reducing gradients is a step of its own: switch :meth:`set_requires_gradient_sync` off
        for the backwards and on again before finalizing.

        Raises:
            ScheduleError: the module is no root; a backward is running, or waits to be finalized.
        """
        self._check_root("set_manual_backward_finalization")
        root = self._unit().form_root()
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

        Units whose :meth:`set_requires_gradient_sync` or :meth:`set_reshard_after_backward` is off at this moment keep
        their gradients or parameters. With ``async_op``, returns a handle at once; wait for it before the next forward.
        Nothing happens if no backward has run.

        Raises:
            ScheduleError: the module is no root; manual finalization is off; a backward is running; an earlier handle
                was not waited for.
        """
        self._check_root("finalize_backward")
        root = self._unit().form_root()
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

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. Without, they accumulate unsharded, in reduce dtype, on each rank."""
        self._configure(recurse, requires_all_reduce=requires_gradient_sync)
        self._set_rules(recurse, reduces=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces over the replicate axis, too (HSDP). Without, sums over the shard axis accumulate
        on each rank."""
        self._configure(recurse, requires_all_reduce=requires_all_reduce)

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
        self._set_rules(recurse, reshard_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether parameters are gathered for backward. Switch it off where no backward reads them, as of an embedding;
        not recursive."""
        self._set_rules(False, unshard_in_backward=unshard_in_backward)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Whether trainable parameters that no rank has a gradient of get one of zeros; ``None`` by default.

        In torch this is what lets ranks use different parameters. Here they may anyway, and whole units: see
        ``set_ranks_may_skip``.
        """
        self._set_rules(recurse, reduces_unused=reduce_scatter_unused_params)

    def set_ranks_may_skip(self, ranks_may_skip: bool, *, recurse: bool = True) -> None:
        """Whether ranks may skip this module in a pass in which others use it; they may by default.

        Where the data decides which modules run (experts without tokens, batches without images), a rank that skips a
        unit gathers it all the same when it comes to what follows, lets go of it, and reduces zeros for it. So all
        ranks issue the same collectives, and each ends with the mean gradient. A unit that all ranks use costs nothing
        more; one that no rank uses in a pass still travels. Switch that off for units that all ranks skip alike, such
        as a head that only some stages of training use: then nothing is gathered or reduced for them, and a rank that
        skips one alone makes the others wait for the process group's timeout.

        From the next forward on. A rank may not use a unit more often than others do, nor take units in an order that
        contradicts theirs.
        """
        self._set_rules(recurse, ranks_may_skip=ranks_may_skip)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reductions may be in flight at a time; 1 by default. Each holds the gradients that it reads. More
        help where reductions take longer than the compute beside them. Of different numbers under one root, the largest
        counts, from the next backward on.

        Raises:
            TypeError: ``max_input_buffers`` is no int.
            ValueError: it is less than 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                f"set_reduce_scatter_max_input_buffers: expected an int, got a {type(max_input_buffers).__name__}."
            )
        if max_input_buffers < 1:
            raise ValueError(f"set_reduce_scatter_max_input_buffers: expected at least 1, got {max_input_buffers}.")
        for unit in self._units(recurse):
            unit.max_reductions = max_input_buffers

    def set_temporary_memory_limit(self, nbytes: int | None) -> None:
        """Hold no more than ``nbytes`` on each rank beside shards, their gradients and activations, from the next
        forward on; None, the default, sets no limit. Call it on the root.

        Counted are unsharded parameters, the staging memory of their gathers, gradients while their unit's backward
        runs, and what reductions in flight read and write. Near the limit, a prefetch that does not fit is left out:
        its unit is gathered when it is needed. What is needed waits for reductions in flight first. So less overlaps,
        and memory is as predictable as the plans; :func:`fsdp2.memory_plan` shows what units take. All ranks decide
        alike, and must set the same limit.

        Not counted are gradients that accumulate without communication, what a user's own communication or hooks
        allocate, and blocks that the allocator keeps.

        Raises:
            TypeError: ``nbytes`` is no int.
            ValueError: it is less than 1.
            ScheduleError: the module is no root.
            MemoryLimitError: later, by a forward or backward, if a unit does not fit at all.
        """
        if nbytes is not None and (isinstance(nbytes, bool) or not isinstance(nbytes, int)):
            raise TypeError(f"set_temporary_memory_limit: expected an int or None, got a {type(nbytes).__name__}.")
        if nbytes is not None and nbytes < 1:
            raise ValueError(f"set_temporary_memory_limit: expected at least 1 byte, got {nbytes}.")
        self._check_root("set_temporary_memory_limit")
        self._unit().memory_limit = nbytes

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether resharding leaves the memory of unsharded parameters allocated, so that they stay where they are, for
        CUDA graphs for example. Takes effect at the next reshard."""
        for unit in self._units(recurse):
            for group in unit.groups:
                group.keeps_storage = keep

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Have the next forward's gathers wait for ``event``, recorded after the optimizer's step, instead of all that
        the current stream was given before that forward. For one forward; call it on the root.

        On the CPU nothing is asynchronous in that way, and ``event`` is not looked at.
        """
        self._unit().form_root().post_optim_event = event

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Whether memory for unsharded parameters is allocated, and filled with this rank's part, on the stream of the
        caller, so that no memory belongs to a stream for gathers. Casts and copies around the collective then do not
        overlap with compute; the collective itself does where it is prefetched. Recursive. Reshards. On the CPU, which
        has no streams, nothing changes."""
        for unit in self._units(True):
            for group in unit.groups:
                group.gather_on_compute_stream(async_op)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """In this module's forward, start gathering ``modules`` instead of the one that followed in the last forward.

        Each further module in flight costs its unsharded parameters.
        """
        unit = self._unit()
        unit.forward_prefetch = _units_of(modules, "set_modules_to_forward_prefetch")
        unit.update_rules()

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """In this module's backward, start gathering ``modules`` instead of the one whose forward ran before."""
        unit = self._unit()
        unit.backward_prefetch = _units_of(modules, "set_modules_to_backward_prefetch")
        unit.update_rules()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``to``, ``cuda``, ``to_empty`` and their like work on the shards."""
        self.reshard()
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        self._unit().mark_stale()
        return result


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Have several roots, such as the stages of a pipeline, share the streams of their communication and the memory
    behind them. Here all roots on one device do so from the start: this checks its argument, and changes nothing.

    Raises:
        ValueError: ``modules`` has something that is not sharded, or are on several devices.
    """
    devices = dict.fromkeys(str(unit.mesh.device) for unit in _units_of(modules, "share_comm_ctx"))
    if len(devices) > 1:
        raise ValueError(f"share_comm_ctx: expected modules on one device, got modules on {' and '.join(devices)}.")


def _units_of(modules: list[FSDPModule], caller: str) -> list[Unit]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"{caller}: expected modules that fully_shard was called on, got a {type(module).__name__}."
            )
    return [module._unit() for module in modules]
