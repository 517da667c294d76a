"""Files that are written whole or not at all: under a new name in their folder, then renamed.

Rule: a name that exists is never opened, so that nobody can plant a link there. Rights stay as they were.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

_RIGHTS = 0o777  # of a mode: without the bits that change what runs


def write_whole(path: Path, text: str) -> None:
    """Let ``path`` hold ``text``. If it raises, as on a full disk, ``path`` is as it was."""
    target = path.resolve()  # so that a link stays one
    written = _new_name(target)
    descriptor = create(written, rights_of(target))
    try:
        with open(descriptor, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())  # else a power cut could leave the new name with no content
        os.replace(written, target)
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
    written = _new_name(path.resolve())
    os.close(create(written))
    written.unlink()


def create(path: str | Path, rights: int | None = None, *, folder: int | None = None) -> int:
    """Make the file ``path``, in the open ``folder`` if there is one, and return a descriptor that writes to it.

    Its rights are ``rights``, or what the umask leaves; at no moment more.

    Raises:
        OSError: the name exists, if only as a link, or the folder takes no files.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    descriptor = os.open(path, flags, 0o666 if rights is None else rights, dir_fd=folder)
    if rights is not None:
        with contextlib.suppress(OSError):  # some file systems have no rights
            os.fchmod(descriptor, rights)  # the umask may have taken some
    return descriptor


def rights_of(path: str | Path, *, folder: int | None = None) -> int | None:
    """Who may do what with ``path``; None if it does not exist."""
    with contextlib.suppress(OSError):
        return os.stat(path, dir_fd=folder).st_mode & _RIGHTS
    return None


def _new_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.{uuid.uuid4().hex}")
