"""What users read: lists and tables in texts, bars that show the progress of long work, files that are written whole.

A bar is shown by the first rank, on a terminal, if tqdm is installed. ``TQDM_DISABLE=1`` in the environment hides all
bars: that is tqdm's own switch.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist


def listed(names: Iterable[object], limit: int = 10) -> str:
    """``names`` in a sentence: the first ``limit`` of them, and how many more there are."""
    found = list(names)
    more = f" and {len(found) - limit} more" if len(found) > limit else ""
    return ", ".join(map(str, found[:limit])) + more


def first_lines(lines: Sequence[str], limit: int, rest: str) -> list[str]:
    """The first ``limit`` of ``lines``. If there are more, ``rest`` follows, formatted with their number."""
    more = len(lines) - limit
    return [*lines[:limit], rest.format(more)] if more > 0 else list(lines)


def aligned(rows: Sequence[Sequence[str]], num_left: int = 1) -> str:
    """A table of ``rows``: the first ``num_left`` columns are aligned to the left, and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        left, right = map(str.ljust, row[:num_left], widths), map(str.rjust, row[num_left:], widths[num_left:])
        lines.append("  ".join([*left, *right]).rstrip())
    return "\n".join(lines)


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


_RIGHTS = 0o777  # of a mode: without setuid, setgid and sticky bits


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path``. If this raises, for example on a full disk, ``path`` is unchanged."""
    target = path.resolve()  # so that a link stays a link
    written = _new_name(target)
    descriptor = create(written, rights_of(target))
    try:
        with open(descriptor, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())  # otherwise a power cut could leave the new name with no content
        os.replace(written, target)
    except BaseException:
        written.unlink(missing_ok=True)
        raise


def check_writable(path: Path) -> None:
    """Raise now what :func:`write_whole` would raise after long work."""
    if path.exists() and not path.is_file():
        raise OSError("it is no file")
    written = _new_name(path.resolve())
    os.close(create(written))
    written.unlink()


def create(path: str | Path, rights: int | None = None, *, folder: int | None = None, readable: bool = False) -> int:
    """Create the file ``path``, in the open ``folder`` if there is one, and return a descriptor for writing to it, and
    with ``readable`` also for reading.

    Its permissions are ``rights``, or what the umask leaves; it never has more than these, not even briefly.

    Raises:
        OSError: the name exists, even as a link, or the folder takes no files.
    """
    flags = (os.O_RDWR if readable else os.O_WRONLY) | os.O_CREAT | os.O_EXCL
    descriptor = os.open(path, flags, 0o666 if rights is None else rights, dir_fd=folder)
    if rights is not None:
        with contextlib.suppress(OSError):  # some file systems have no permissions
            os.fchmod(descriptor, rights)  # the umask may have removed some
    return descriptor


def rights_of(path: str | Path, *, folder: int | None = None) -> int | None:
    """The permissions of ``path``; None if it does not exist."""
    with contextlib.suppress(OSError):
        return os.stat(path, dir_fd=folder).st_mode & _RIGHTS
    return None


def _new_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.{uuid.uuid4().hex}")
