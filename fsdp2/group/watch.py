"""Tells in backward when a part of a group's gradients is complete, by hooks on the unsharded parameters.

Autograd holds hooks where the garbage collector does not look, so they refer weakly to what they tell.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdp2 import _torch


class GradientWatch:
    """Watches for one part of the gradients at a time.

    Attributes:
        on_early: called when all gradients given to ``for_all_of`` are complete, once per backward.
        on_halfway: called when half of those given to ``for_half_of`` are.
    """

    def __init__(self) -> None:
        self.on_early: Callable[[], None] = lambda: None
        self.on_halfway: Callable[[], None] = lambda: None
        self._handles: list[RemovableHandle] = []
        self._own_handles: list[RemovableHandle] = []
        self._num_watched = 0
        self._num_missing = 0  # in the backward that was seen last
        self._seen_backward = -1

    def stop(self) -> None:
        """Watch for nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def for_all_of(self, params: Sequence[nn.Parameter]) -> None:
        """Watch until the gradients of all ``params`` are complete."""
        self.stop()
        self._num_watched, self._seen_backward = len(params), -1
        note = partial(_tell, weakref.WeakMethod(self._note))
        self._handles = [param.register_post_accumulate_grad_hook(note) for param in params]

    def for_half_of(self, params: Sequence[nn.Parameter]) -> None:
        """Watch until about half of the gradients of ``params``, in elements, are complete."""
        self.stop()
        left = sum(param.numel() for param in params) / 2
        for param in reversed(params):  # backward reaches the parameters that forward used last first
            left -= param.numel()
            if left <= 0:
                report = partial(_tell, weakref.WeakMethod(self._report))
                self._handles = [param.register_post_accumulate_grad_hook(report)]
                return

    def for_each_of(self, params: Sequence[nn.Parameter], on_gradient: weakref.WeakMethod[Callable[[], None]]) -> None:
        """Beside the above, call ``on_gradient`` for every gradient of ``params``."""
        for handle in self._own_handles:
            handle.remove()
        tell = partial(_tell, on_gradient)
        self._own_handles = [param.register_post_accumulate_grad_hook(tell) for param in params]

    def _report(self) -> None:
        self.on_halfway()

    def _note(self) -> None:
        """One more is complete: in one backward, autograd accumulates into a leaf once."""
        backward = _torch.running_backward()
        if backward != self._seen_backward:
            self._seen_backward, self._num_missing = backward, self._num_watched
        self._num_missing -= 1
        if self._num_missing == 0:
            self.on_early()


def _tell(method: weakref.WeakMethod[Callable[[], None]], _: torch.Tensor) -> None:
    if (alive := method()) is not None:
        alive()
