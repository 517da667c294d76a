"""Error messages as golden texts, and what is logged."""

from __future__ import annotations

import logging
import textwrap
import time
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


def one_line(message: str) -> str:
    """``message`` without line breaks."""
    return " ".join(message.split())


class Heard(logging.Handler):
    """In the block, collects what fsdp2 logs, the names of the levels, and when: in seconds from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.levels: list[str] = []
        self.times: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.levels.append(record.levelname)
        self.times.append(time.monotonic() - self._begun)

    def __enter__(self) -> Heard:
        self._begun = time.monotonic()
        logging.getLogger("fsdp2").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("fsdp2").removeHandler(self)
