"""Files that are written whole or not at all: beside their place, then renamed."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Let ``path`` hold ``text``. If it raises, as on a full disk, ``path`` is as it was."""
    written = _beside(path)
    try:
        with open(written, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())  # else a power cut could leave the new name with no content
        os.replace(written, path.resolve())
    except BaseException:
        written.unlink(missing_ok=True)
        raise


def check_writable(path: Path) -> None:
    """Raise now what :func:`write_whole` would raise after long work.

    Raises:
        OSError: ``path`` is a folder or a device, or its folder takes no files.
    """
    if path.exists() and not path.is_file():
        raise OSError("it is no file")
    written = _beside(path)
    written.touch()
    written.unlink()


def _beside(path: Path) -> Path:
    """In the folder of what a link points to, so that the link stays one. No other process has this name."""
    target = path.resolve()
    return target.with_name(f".{target.name}.{os.getpid()}")
