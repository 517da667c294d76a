"""The guard allocator of ``guard.cpp``, as this process's allocator of CPU tensors; and reports of fatal signals.

``FSDP2_TEST_ALLOCATOR`` chooses what the ranks of the pools use: ``guard``; or ``system``, the system's allocator, with
a report of fatal signals, such as those of glibc's own checks (see ``hunt``). Without it, they are as users' processes.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

from tests.harness.cpp import build

NAME = "guard_allocator"
SOURCE = Path(__file__).with_name("guard.cpp")
PRELOADED = Path(__file__).with_name("preload.cpp")
CHOICE = "FSDP2_TEST_ALLOCATOR"
QUARANTINE_NBYTES = 8 << 30  # of address space: freed memory goes back to the system at once
# How many times longer a test may take: checks are slow, and hunts run beside other work.
PATIENCE = 10


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build(NAME, SOURCE)))
    library.install_guard_allocator.argtypes = [ctypes.c_size_t]
    library.num_guarded_allocations.restype = ctypes.c_uint64
    return library


def report_fatal_signals(fd: int) -> None:
    """Write the native stack of a fatal signal to ``fd``, then let the handlers run that are installed now."""
    _library().report_fatal_signals(fd)


def install_guard_allocator() -> None:
    """Allocate CPU tensors on pages of their own from now on.

    Raises:
        RuntimeError: this process was started without what ``environment`` returns.
    """
    if not _library().install_guard_allocator(QUARANTINE_NBYTES):
        raise RuntimeError("the guard allocator needs preload.cpp: start the process with what environment() returns")


def environment() -> dict[str, str]:
    """Further variables that a process needs from its start for what ``FSDP2_TEST_ALLOCATOR`` asks for."""
    if os.environ.get(CHOICE) != "guard":
        return {}
    return {"LD_PRELOAD": str(build("guard_preload", PRELOADED, links_torch=False))}


def patience() -> int:
    """How many times longer than usual a call of the ranks may take."""
    return PATIENCE if CHOICE in os.environ else 1


def num_guarded_allocations() -> int:
    """How many tensors the guard allocator has given memory to in this process."""
    return int(_library().num_guarded_allocations())


def watch_memory(fd: int) -> None:
    """Do in this process what ``FSDP2_TEST_ALLOCATOR`` asks for, and report to ``fd``.

    Raises:
        ValueError: there is no such choice.
    """
    chosen = os.environ.get(CHOICE)
    if chosen is None:
        return
    if chosen not in ("guard", "system"):
        raise ValueError(f"{CHOICE}={chosen}: expected guard or system")
    report_fatal_signals(fd)
    if chosen == "guard":
        install_guard_allocator()
