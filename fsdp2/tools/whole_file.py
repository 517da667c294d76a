"""Files that are written whole or not at all: under a new name in their folder, then renamed.

Rule: an existing name is never opened, so that a link planted there is not followed. Permissions are preserved.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

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
    """Raise now what :func:`write_whole` would raise after long work.

    Raises:
        OSError: ``path`` is a folder or a device, or no file can be created in its folder.
    """
    if path.exists() and not path.is_file():
        raise OSError("it is no file")
    written = _new_name(path.resolve())
    os.close(create(written))
    written.unlink()


def create(path: str | Path, rights: int | None = None, *, folder: int | None = None) -> int:
    """Create the file ``path``, in the open ``folder`` if there is one, and return a descriptor for writing to it.

    Its permissions are ``rights``, or what the umask leaves; it never has more than these, not even briefly.

    Raises:
        OSError: the name exists, even as a link, or the folder takes no files.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
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
