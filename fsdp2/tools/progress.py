"""Where long work is: a bar on the first rank, on a terminal, if tqdm is installed; else nothing.

``TQDM_DISABLE=1`` in the environment hides all bars: that is tqdm's own switch.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist

from fsdp2.runtime.root import Root, register_first_forward
from fsdp2.runtime.unit import Watch
from fsdp2.types import Observer

DELAY_S = 1.0  # shorter work shows nothing


@contextmanager
def progress(label: str, total: int, unit: str, *, is_first: bool | None = None) -> Iterator[Callable[[int], object]]:
    """Show how much of ``total`` is done: call what this yields with each amount, in ``unit``. ``is_first``: whether
    this is the rank that shows it; None asks the default process group."""
    tqdm = _tqdm() if (_is_first() if is_first is None else is_first) else None
    if tqdm is None:
        yield lambda amount: None
        return
    is_large = unit == "B"  # bytes read better as MB and GB
    with tqdm(total=total, desc=label, unit=unit, unit_scale=is_large, delay=DELAY_S) as bar, _shown_in_time(bar):
        yield bar.update


@contextmanager
def _shown_in_time(bar: Any) -> Iterator[None]:
    """tqdm looks at its delay only in updates: show ``bar`` although the first piece of work takes longer."""

    def show() -> None:
        bar.delay = 0  # else close() takes it for one that was never shown, and ends no line
        bar.refresh()

    timer = threading.Timer(DELAY_S, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _tqdm() -> Any:
    """The class of bars; None where none can be shown."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    try:
        return importlib.import_module("tqdm").tqdm
    except ImportError:
        return None


class _FirstForward(Observer):
    """A bar of the units that the first forward of ``root`` gathers: plans are compiled then, and compilers run."""

    def __init__(self, root: Root) -> None:
        self._root, self._has_begun = root.unit.name, False
        self._left = {unit.name for unit in root.units}
        self._bar = ExitStack()
        self._advance = self._bar.enter_context(progress("first forward", len(self._left), "unit"))
        self._bar.callback(Watch(root.unit.modules[0], self).end)

    def on_action(self, action: str, unit: str, nbytes: int) -> None:
        if unit in self._left:
            self._left.discard(unit)
            self._advance(1)

    def on_event(self, event: str, unit: str) -> None:
        if unit == self._root:  # its forward begins, and ends; or begins again, if it raised
            if self._has_begun:
                self._bar.close()
            self._has_begun = True


def register() -> None:
    """Show the first forward of every root, where bars can be shown."""
    register_first_forward(lambda root: _FirstForward(root) if _is_first() and _tqdm() is not None else None)
