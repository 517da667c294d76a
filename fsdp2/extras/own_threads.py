"""Threads that communicate while the main thread continues, such as that of a save in the background.

Python waits for the threads of an executor before it ends. When a rank is lost, this can be forever: the thread waits
for a rank whose training waits for this process, until it sees that this process has ended. Rule: a process that ends
with an error waits for no other rank. One that ends without an error waits, or the save would be lost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from multiprocessing.util import Finalize
from threading import Thread
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

_running: list[Thread] = []


def run_beside(name: str, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
    """Run ``function`` in a thread called ``name``, and return what will come of it."""
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            outcome.set_result(function(*args, **kwargs))
        except BaseException as error:
            outcome.set_exception(error)

    thread = Thread(target=run, name=name, daemon=True)
    _running[:] = [*(each for each in _running if each.is_alive()), thread]
    thread.start()
    _wait_before_the_end()
    return outcome


@cache
def _wait_before_the_end() -> None:
    """Also at the end of a child process that a library has started as a rank."""

    def wait() -> None:
        if not _ends_with_error():
            for thread in _running:
                thread.join()

    Finalize(None, wait, exitpriority=0)


def _ends_with_error() -> bool:
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return error is not None and not (isinstance(error, SystemExit) and not error.code)
