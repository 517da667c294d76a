"""Reads small files that others have written, and shows their names and keys.

Rule: a file from elsewhere can make a call fail with a clear error, but not hang, exhaust the memory or the stack, or
send escape sequences to a terminal.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of ``path``.

    Raises:
        OSError: it cannot be read; or it is no regular file, such as a FIFO, which would block, or a device, which may
            never end.
        ValueError: it is not UTF-8, or the path has a NUL.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, encoding="utf-8") as file:
        check_regular(os.fstat(descriptor))
        return file.read()


def check_regular(found: os.stat_result) -> None:
    """Raise an OSError unless ``found`` is about a regular file."""
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it is no regular file")


def read_json(path: str | os.PathLike[str]) -> Any:
    """What the JSON in ``path`` says. Errors are those of :func:`read_text` and :func:`json_of`."""
    return json_of(read_text(path))


def json_of(text: str) -> Any:
    """What the JSON ``text`` says.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or has a surrogate, which no file or terminal can take.
    """
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def printable(text: str) -> str:
    """``text`` with control characters, such as those of escape sequences, in escaped form. Lines stay lines."""
    return "".join(each if each.isprintable() or each == "\n" else _escaped(each) for each in text)


def is_inside(name: object) -> bool:
    """Whether ``name``, which a file gives as that of another file, is a path below the folder of the first one."""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    path = Path(name)
    return not path.is_absolute() and ".." not in path.parts


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
