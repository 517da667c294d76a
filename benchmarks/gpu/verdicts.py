"""How a check of ``acceptance.py`` gives its verdict."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Protocol


class Report(Protocol):
    """Writes a verdict. ``status``: "PASS", "FAIL" or "NOT RUN"."""

    def __call__(self, status: str, detail: str, **figures: object) -> None: ...


def attempt(report: Report, name: str, check: Callable[[], str]) -> None:
    """A verdict on ``check``, which returns its figures as text, or raises."""
    try:
        report("PASS", f"{name}: {check()}")
    except Exception as error:
        text = str(error).strip().splitlines()
        report("FAIL", f"{name}: {type(error).__name__}: {text[0] if text else ''}", traceback=traceback.format_exc())


def ensure(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise AssertionError(otherwise)
