"""Lets ranks with different numbers of batches run the same number of passes.

A rank whose batches have ended repeats its last batch, so that it takes part in all collectives. Its gradients of that
pass are replaced by zeros where the runtime takes them, whatever the loop does with the loss. So everything behind a
reduction (optimizers, clipping, schedulers, other meshes) works as usual. Experts are the exception: their gradients
on this rank come from the tokens of other ranks, too. For them, the gradients of the root's outputs become zeros.

Rule: whether a rank still has batches is known before a pass begins. The message about the next pass is sent when a
pass begins, and read when it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdp2.core import Axis, ParamGroup, Unit, UnitTree, comms, expect, find_tensors, schedules, seams, tree_of
from fsdp2.extras.lending import all_ranks
from fsdp2.extras.units import sharded_unit

T = TypeVar("T")
_Decorator = Callable[[str, Unit | None, schedules.Actions], Iterable[tuple[schedules.Action, int]]]
_TAKES_GRADIENTS = (schedules.Action.REDUCE, schedules.Action.REDUCE_JOINTLY, schedules.Action.KEEP)
_UNKNOWN = -1

_NOTHING: Any = object()


def joined(
    batches: Iterable[T],
    model: nn.Module,
    *,
    divide: Literal["active", "all"] = "active",
    example: T | None = None,
) -> Iterator[tuple[T, bool]]:
    """Iterate over ``batches`` on every rank until the rank with the most batches is done.

    Yields ``(batch, is_real)``. A rank whose batches have ended gets its last batch again, with ``is_real = False``.
    Run the same forward and backward with it: the gradients of this pass then count as zeros on this rank. Leave its
    loss out of what you log. With experts that exchange tokens between ranks, call ``model`` itself, and compute the
    loss from nothing but its outputs. Under ``no_grad``, nothing else is to be done. One iteration may be a step, or a
    micro-batch of an accumulated step; its backward belongs to the same iteration as its forward.

    The loop begins with one all-reduce of 16 bytes per rank. Unless ``batches`` has a length on every rank, each
    iteration sends another of 8 bytes per rank, which overlaps with the pass. One batch is read ahead.

    Args:
        batches: this rank's batches. A length, if they have one, must be right.
        model: the root, after :func:`fully_shard`. The ranks that average its gradients iterate together.
        divide: ``"active"`` averages the gradients of an iteration over the ranks that had a batch in it; ``"all"``
            over all ranks, as if the others had contributed zeros.
        example: the batch for a rank that has none at all.

    Raises:
        ValueError: ``model`` is not sharded; or, on all ranks, at the first iteration: a rank has no batch and no
            ``example``.
        RuntimeError: ``batches`` ended before the length that they have.
    """
    expect(divide in ("active", "all"), "joined: divide", divide, "'active' or 'all'", by_value=True)
    expect(isinstance(batches, Iterable), "joined: batches", batches, "an iterable of batches")
    return _iterate(batches, sharded_unit(model, "joined"), _Loop(averages_active=divide == "active"), example)


def _iterate(batches: Iterable[T], unit: Unit, loop: _Loop, example: T | None) -> Iterator[tuple[T, bool]]:
    tree, axis, device = tree_of(unit), all_ranks(unit.mesh), unit.mesh.device
    length = len(batches) if isinstance(batches, Sized) else _UNKNOWN
    batches_left = iter(batches)
    batch = following = next(batches_left, _NOTHING)
    has_any = batch is not _NOTHING
    if not has_any:
        batch, length = example, min(length, 0)
    rows = _Message(axis, device, [length, has_any or example is not None]).read()
    without = [rank for rank, (_, has_batch) in enumerate(rows) if not has_batch]
    if without:
        raise ValueError(
            f"joined: the ranks {without} of {axis.size} have no batch, so they cannot take part. On every rank, pass "
            "example=, a batch of the usual shapes."
        )
    lengths = [length for length, _ in rows]
    are_known = _UNKNOWN not in lengths
    outer = tree.loop
    message = None if are_known else _Message(axis, device, [has_any])
    number = 0
    zeroing = _zero_gradients_of_outputs(unit, loop)
    try:
        while True:
            has_batch = [number < each for each in lengths]
            if message is not None:
                has_batch, message = [bool(has) for (has,) in message.read()], None
            if not any(has_batch):
                return
            is_real = has_batch[axis.rank]
            if is_real:
                if following is _NOTHING:
                    raise RuntimeError(
                        f"joined: batches ended after {number} of the {length} that len() announced, so the other "
                        "ranks wait for this one. Correct __len__, or pass iter(batches), which has no length."
                    )
                batch, following = following, next(batches_left, _NOTHING)
            if not are_known:
                message = _Message(axis, device, [following is not _NOTHING])
            loop.begin(has_batch, is_real=is_real)
            tree.loop = loop
            yield batch, is_real
            number += 1
    finally:
        tree.loop = outer
        loop.end()
        if zeroing is not None:
            zeroing.remove()
        if message is not None:  # all ranks leave the loop early
            message.read()


class _Message:
    """One row of numbers from each rank of ``axis``, on its way to all of them."""

    def __init__(self, axis: Axis, device: torch.device, row: Sequence[int]) -> None:
        streams = self._streams = comms.streams_for(device)
        with streams.beside("joined"):  # so that reading it does not wait for the pass
            self._rows = torch.zeros(axis.size, len(row), dtype=torch.int64, device=device)
            self._rows[axis.rank] = torch.tensor(row, device=device)
            self._works = comms.launched(comms.all_reduce, axis.group, self._rows) if axis.size > 1 else ()
            if streams.runs_ahead:
                comms.wait_for(self._works)  # the stream of this message waits, not the CPU
                self._works = ()
                self._rows = torch.empty_like(self._rows, device="cpu", pin_memory=True).copy_(
                    self._rows, non_blocking=True
                )
            self._sent = streams.record()

    def read(self) -> list[list[int]]:
        """The rows, in rank order."""
        comms.wait_for(self._works)
        self._streams.wait_on_cpu(self._sent)
        return self._rows.tolist()


class _Loop:
    """Replaces the gradients of one root while a loop runs.

    Attributes:
        is_real: whether the batch of this iteration is one of this rank's batches.
        scale: what the gradients of this iteration are multiplied by on all ranks.
    """

    def __init__(self, *, averages_active: bool) -> None:
        self._averages_active = averages_active
        self.end()

    def begin(self, has_batch: Sequence[bool], *, is_real: bool) -> None:
        """An iteration begins, in which each rank ``has_batch`` or not."""
        self.is_real = is_real
        self.scale = len(has_batch) / sum(has_batch) if self._averages_active else 1.0

    def end(self) -> None:
        """Gradients count as they are."""
        self.is_real, self.scale = True, 1.0


def _has_tokens_of_others(group: ParamGroup, root: Unit) -> bool:
    """Whether ``group`` has experts: they are sharded over fewer ranks than the root, and see tokens of all of them."""
    return group.mesh.data_parallel_size < root.mesh.data_parallel_size


def _zero_gradients_of_outputs(root: Unit, loop: _Loop) -> RemovableHandle | None:
    """Let the outputs of ``root`` pass back zeros for batches that are not real, so that this rank's tokens add nothing
    to the gradients of experts on other ranks. None: there are no experts."""
    units = tree_of(root).units
    if not any(_has_tokens_of_others(group, root) for unit in units for group in unit.groups):
        return None

    def hook(module: nn.Module, args: object, output: object) -> None:
        if not loop.is_real and torch.is_grad_enabled():
            for tensor in find_tensors(output, []):
                if tensor.requires_grad:
                    tensor.register_hook(torch.zeros_like)

    return root.modules[-1].register_forward_hook(hook)


class _Decorated:
    """Performs the actions of ``tree``, and scales gradients before the runtime takes them."""

    def __init__(self, tree: UnitTree, loop: _Loop, inner: _Decorator | None) -> None:
        self._tree, self._loop, self._inner = tree, loop, inner
        self._in_backward = False

    def __call__(
        self, event: str, unit: Unit | None, actions: schedules.Actions
    ) -> Iterable[tuple[schedules.Action, int]]:
        if self._tree.passes.in_backward and not self._in_backward:
            self._set_aside()
        self._in_backward = self._tree.passes.in_backward
        for action, index in actions if self._inner is None else self._inner(event, unit, actions):
            if action in _TAKES_GRADIENTS:
                self._scale(self._tree.units[index], keeps=action is schedules.Action.KEEP)
            yield action, index

    def _set_aside(self) -> None:
        """Keep gradients of earlier backwards apart, so that they are not scaled again."""
        for unit in self._tree.units:
            for group in unit.groups:
                for param in group.params:
                    param.keep_grad()

    def _scale(self, unit: Unit, *, keeps: bool) -> None:
        loop, root = self._loop, self._tree.root
        for group in unit.groups:
            is_zero = not loop.is_real and not _has_tokens_of_others(group, root)
            for param in group.params:
                grad = param.unsharded_grad
                if grad is not None and is_zero:
                    grad.zero_()  # also where the loss was not finite
                elif grad is not None and loop.scale != 1.0:
                    grad.mul_(loop.scale)
                if keeps:
                    param.keep_grad()


def decorated(tree: UnitTree) -> _Decorator | None:
    """What performs the actions of ``tree`` from this forward on; None: its executor."""
    limit, loop = tree.root.config.memory_limit, tree.loop
    inner = None if limit is None else seams.limit_memory(limit, tree)
    return _Decorated(tree, loop, inner) if isinstance(loop, _Loop) else inner
