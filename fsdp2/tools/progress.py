"""Progress of long work: a bar on the first rank, on a terminal, if tqdm is installed; otherwise nothing.

``TQDM_DISABLE=1`` in the environment hides all bars: that is tqdm's own switch.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

DELAY_S = 1.0  # shorter work shows nothing


@contextmanager
def progress(label: str, total: int, unit: str, *, is_first: bool | None = None) -> Iterator[Callable[[int], object]]:
    """Show how much of ``total`` is done: call the yielded function with each amount, in ``unit``. ``is_first`` says
    whether this rank shows the bar; None asks the default process group."""
    tqdm = _tqdm() if (_is_first() if is_first is None else is_first) else None
    if tqdm is None:
        yield lambda amount: None
        return
    is_large = unit == "B"  # bytes read better as MB and GB
    with tqdm(total=total, desc=label, unit=unit, unit_scale=is_large, delay=DELAY_S) as bar, _shown_in_time(bar):
        yield bar.update


@contextmanager
def _shown_in_time(bar: Any) -> Iterator[None]:
    """Show ``bar`` even if the first piece of work takes longer than the delay, which tqdm checks only in updates."""

    def show() -> None:
        bar.delay = 0  # otherwise close() treats the bar as never shown, and does not end the line
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
    """The class of progress bars; None if none can be shown."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    try:
        return importlib.import_module("tqdm").tqdm
    except ImportError:
        return None
