"""Which backward autograd runs for a root. Autograd tells of the end of a backward only if nothing raises."""

from __future__ import annotations

from fsdp2 import _torch

_NONE = -1  # what autograd says outside of a backward


class RunningBackward:
    """The backward that has begun under a root, and has not ended.

    Attributes:
        task: autograd's number of it.
    """

    def __init__(self) -> None:
        self.task, self._nested = _NONE, _NONE
        self._place = (0, 0)

    def begin(self) -> None:
        """A backward has begun."""
        self.task, self._place = _torch.running_backward(), _torch.backward_depth()

    def has_raised(self) -> bool:
        """Whether it is over, since autograd now runs another one that is not nested in it. A backward on another
        thread counts as nested."""
        now = _torch.running_backward()
        if now in (self.task, self._nested):
            return False
        (thread, depth), (its_thread, its_depth) = _torch.backward_depth(), self._place
        if thread == its_thread and depth <= its_depth:
            return True
        self._nested = now
        return False
