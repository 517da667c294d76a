"""Error messages as golden texts."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any


def wrapped(message: str) -> str:
    """``message`` in lines that fit into a golden text."""
    lines = [textwrap.fill(line, 100, break_long_words=False, break_on_hyphens=False) for line in message.splitlines()]
    return "\n".join(lines)


def error_of(call: Callable[[], Any]) -> str:
    """The type and the text of what ``call`` raises."""
    try:
        call()
    except Exception as error:
        return wrapped(f"{type(error).__name__}: {error}")
    raise AssertionError("nothing was refused")
