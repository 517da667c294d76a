"""Read the memory of another process of this host, with one copy and no help from that process.

Linux calls it cross-memory attach: ``process_vm_readv(2)``, by C. Yeoh, since Linux 3.2. Open MPI and MPICH move large
messages between the ranks of a host with it. The kernel allows it to whoever may trace the process: the same user,
unless Yama, seccomp or a container forbid it.

This room only reads, and only what it is told. Who may read what, and when, is the matter of ``same_host``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate

# What Linux takes in one call: entries of a vector, and bytes (2 GiB less a page, whatever the vector says).
_MAX_SPANS = 1024
_MAX_NBYTES = 1 << 30

_Read = Callable[[int, int, int, int, int, int], int]


@cache
def _system_call() -> _Read | None:
    """``process_vm_readv``, if the C library has it."""
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if function is None:
        return None
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    function.argtypes = [ctypes.c_int, pointer, count, pointer, count, count]
    function.restype = ctypes.c_ssize_t
    return function


def is_supported() -> bool:
    """Whether this system has the call at all; only trying says whether it is allowed."""
    return _system_call() is not None


class Spans:
    """Pieces of memory of fixed sizes, read in as few calls as possible; their addresses come with each read."""

    def __init__(self, nbytes: Sequence[int]) -> None:
        pieces = [
            (span, start, min(_MAX_NBYTES, size - start))
            for span, size in enumerate(nbytes)
            for start in range(0, size, _MAX_NBYTES)
        ]
        self._span = [span for span, _, _ in pieces]
        self._start = [start for _, start, _ in pieces]
        self._is_whole = self._span == list(range(len(nbytes)))
        self._calls = _calls([size for _, _, size in pieces])
        self._here = array("Q", [value for _, _, size in pieces for value in (0, size)])
        self._there = array("Q", self._here)

    def read(self, process: int, here: Sequence[int], there: Sequence[int]) -> None:
        """Copy from the addresses ``there`` in ``process`` to the addresses ``here``.

        Raises:
            OSError: ``ESRCH``, the process is gone; ``EPERM``, it may not be read; ``EFAULT``, there is no memory.
        """
        if not self._is_whole:
            here = [here[span] + start for span, start in zip(self._span, self._start, strict=True)]
            there = [there[span] + start for span, start in zip(self._span, self._start, strict=True)]
        self._here[0::2] = array("Q", here)
        self._there[0::2] = array("Q", there)
        here_at, there_at = self._here.buffer_info()[0], self._there.buffer_info()[0]
        for offset, count, expected in self._calls:
            _read(process, here_at + offset, there_at + offset, count, expected)


def read(process: int, here: int, there: int, nbytes: int) -> None:
    """The same for one piece of ``nbytes``, at most 1 GiB."""
    ours, theirs = array("Q", (here, nbytes)), array("Q", (there, nbytes))
    _read(process, ours.buffer_info()[0], theirs.buffer_info()[0], 1, nbytes)


def _read(process: int, here: int, there: int, count: int, expected: int) -> None:
    """``here`` and ``there`` are the addresses of vectors of ``count`` entries, each an address and a size."""
    call = _system_call()
    assert call is not None
    found = call(process, here, count, there, count, 0)
    if found == expected:
        return
    # A part of what was asked for: the next piece cannot be read.
    code = ctypes.get_errno() if found < 0 else errno.EFAULT
    raise OSError(code, f"reading {expected} bytes of process {process}: {os.strerror(code)}")


def _calls(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Which entries each call takes: where they start in bytes, how many, and how many bytes they stand for."""
    calls: list[tuple[int, int, int]] = []
    ends = [0, *accumulate(sizes)]
    first = 0
    while first < len(sizes):
        stop = first + 1
        while stop < min(len(sizes), first + _MAX_SPANS) and ends[stop + 1] - ends[first] <= _MAX_NBYTES:
            stop += 1
        calls.append((first * 16, stop - first, ends[stop] - ends[first]))
        first = stop
    return calls
