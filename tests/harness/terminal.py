"""What work shows on a terminal, without one."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from unittest import mock

from fsdp2.extras import output as progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(work: Callable[[], object]) -> str:
    """What ``work`` writes to standard error if that is a terminal. Bars show at once."""
    shown = _Terminal()
    with contextlib.redirect_stderr(shown), mock.patch.object(progress, "DELAY_S", 0.0):
        work()
    return shown.getvalue()
