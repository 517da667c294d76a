"""The ranks of one process group that share a host (``host_meeting``), and the tokens that they send each other.

Tokens are short messages over Unix sockets: a few 64-bit integers, whole and in order, and a wake-up for who waits.
gloo could carry them, but a message of 64 bytes took it 250 to 600 us out of a step in which all cores compute, against
60 us at most this way.

Whoever waits for a token serves the neighbours meanwhile. While the main thread computes, a helper thread looks after
them now and then, one for all groups of a process. So a rank serves its neighbours whatever its main thread does.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any, Protocol
from weakref import finalize, ref

from fsdp2.comm.same_host import remote_memory

_MAX_NBYTES = 192 * 1024  # of a token; Linux lets a socket hold 208 KiB
_FAREWELL = b"\xff" * 8  # begins a rank's last words, which are text; no token begins so

Words = Any  # array("Q"), which is no type at run time on Python 3.10 and 3.11


class NeighbourError(RuntimeError):
    """A rank on this host is gone, cannot be read any more, or does not do what this rank does.

    Attributes:
        reason: what the first rank that gave up had to say.
    """

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason or message


class Errand(Protocol):
    """What somebody is to look after until it is done."""

    def attempt(self) -> None:
        """Do what can be done by now; never blocks for long."""


class Service:
    """Calls what belongs to a socket when something has come there, and attempts errands; one per process.

    It does so on a thread that waits, and on the helper thread: that one looks every ``NAP_S`` while there are errands,
    unless somebody else serves. All of it happens under one lock, so nothing runs twice at a time.
    """

    # A helper that every token wakes up costs more than it gains, at least where all cores compute: threads change, and
    # the interpreter's lock changes hands. With 2 ranks and 8 blocks of width 256, a step took 47 ms so, 40 ms without
    # any helper, and no more than that with naps of 10 ms (benchmarks/gloo_step.py --nap-ms).
    NAP_S = 0.01
    _PATIENCE_S = 0.05  # after that, let another thread that waits see whether its errand is over

    def __init__(self) -> None:
        self._errands: set[Errand] = set()
        self._process = os.getpid()
        self._epoll = select.epoll()
        self._actions: dict[int, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._has_errands = threading.Event()
        threading.Thread(target=self._help, name="fsdp2-same-host", daemon=True).start()

    def watch(self, fd: int, action: Callable[[], None]) -> None:
        """From now on, call ``action`` whenever there is something to read."""
        self._actions[fd] = action
        self._epoll.register(fd, select.EPOLLIN)

    def forget(self, fd: int) -> None:
        """Stop watching. A forked child shares what its parent watches, and leaves it alone."""
        if self._actions.pop(fd, None) is not None and self._process == os.getpid():
            self._epoll.unregister(fd)

    def add(self, errand: Errand) -> None:
        """Attempt ``errand`` from now on."""
        self._errands.add(errand)
        if not self._has_errands.is_set():
            self._has_errands.set()

    def remove(self, errand: Errand) -> None:
        """No longer do."""
        self._errands.discard(errand)

    @contextmanager
    def nothing_served(self) -> Iterator[None]:
        """Whoever serves has finished what he was at; nobody is served meanwhile."""
        with self._lock:
            yield

    def serve_until(self, is_over: Callable[[], bool], deadline: float) -> None:
        """Serve until ``is_over()``, or until the monotonic clock shows ``deadline``."""
        while not is_over() and time.monotonic() < deadline:
            if self._lock.acquire(timeout=self._PATIENCE_S):
                try:
                    self._attempt_all()
                    while not is_over() and self._serve(self._PATIENCE_S):
                        pass
                finally:
                    self._lock.release()

    def _serve(self, timeout_s: float) -> bool:
        """Returns whether there was anything to do."""
        found = self._epoll.poll(timeout_s)
        for fd, _ in found:
            if (action := self._actions.get(fd)) is not None:
                action()
        return bool(found)

    def _attempt_all(self) -> None:
        for errand in list(self._errands):
            errand.attempt()

    def _help(self) -> None:
        while True:
            self._has_errands.wait()
            time.sleep(self.NAP_S)
            if not self._errands:
                self._has_errands.clear()
                if self._errands:  # added since
                    self._has_errands.set()
            elif self._lock.acquire(blocking=False):
                try:
                    self._attempt_all()
                    while self._serve(0):
                        pass
                finally:
                    self._lock.release()


@cache
def _service_of(process: int) -> Service:
    """The service of ``process``, which is this one: a forked child does not inherit its parent's thread."""
    return Service()


class Neighbours:
    """Connections to the other ranks of a process group, each of which this rank may read.

    ``start`` says who receives tokens; before that, none is received.

    Attributes:
        rank, size: as in the process group.
        timeout_s: how long the process group lets a rank wait for others, in seconds.
        processes: the process id of every rank.
        others: the other ranks; the one before this rank comes first, so that no rank is everybody's first.
        gone: ranks that have closed their connection, and the error for whoever still needs them.
        failure: why nothing can be expected of the others any more; None as long as that is not so.
    """

    def __init__(
        self, rank: int, processes: Sequence[int], sockets: dict[int, socket.socket], timeout_s: float
    ) -> None:
        self.rank, self.size, self.timeout_s, self.processes = rank, len(processes), timeout_s, tuple(processes)
        self.others = tuple((rank - step) % self.size for step in range(1, self.size))
        self.gone: dict[int, NeighbourError] = {}
        self.failure: NeighbourError | None = None
        self.service = _service_of(os.getpid())
        self._sockets = sockets
        self._hang_ups = {other: _hang_up_of(line) for other, line in sockets.items()}
        self._unsent: list[tuple[int, bytes]] = []
        self._buffer = bytearray(_MAX_NBYTES)
        self._on_token: Callable[[int, Words], None]
        self._on_gone: Callable[[int], None]
        self._on_failure: Callable[[], None]
        finalize(self, _close, self.service, sockets)

    def start(
        self,
        on_token: Callable[[int, Words], None],
        on_gone: Callable[[int], None],
        on_failure: Callable[[], None],
    ) -> None:
        """Call ``on_token(rank, words)`` for each token, ``on_gone(rank)`` behind the last one of a rank that has
        left, and ``on_failure()`` once."""
        self._on_token, self._on_gone, self._on_failure = on_token, on_gone, on_failure
        for rank, line in self._sockets.items():
            self.service.watch(line.fileno(), partial(_serve, ref(self), rank))

    def tell(self, rank: int, token: bytes) -> None:
        """Send ``token``; blocks while the socket is full. Not for who serves: it must not wait for another.

        Raises:
            NeighbourError: ``rank`` is gone, or reads nothing for too long. Nothing is expected of anybody then.
        """
        line = self._sockets[rank]
        try:
            while True:
                try:
                    line.send(token)
                    return
                except BlockingIOError:
                    room = select.poll()
                    room.register(line, select.POLLOUT)
                    if not room.poll(self.timeout_s * 1e3):
                        raise TimeoutError(f"it reads nothing for {self.timeout_s:g} s") from None
        except OSError as error:
            with self.service.nothing_served():
                is_gone = isinstance(error, ConnectionError)
                raise self.fail(self._why_gone(rank) if is_gone else self.lost(rank, error)) from error

    def tell_later(self, rank: int, token: bytes) -> None:
        """Send ``token`` when there is room. For who serves."""
        self._unsent.append((rank, token))
        self.attempt()

    def attempt(self) -> None:
        """Send what there was no room for, as far as there is now."""
        waiting, self._unsent = self._unsent, []
        full: set[int] = set()
        for rank, token in waiting:
            try:
                if rank not in full:
                    self._sockets[rank].send(token)
                    continue
            except BlockingIOError:
                full.add(rank)
            except OSError as error:
                self.fail(self.lost(rank, error))
                return
            self._unsent.append((rank, token))
        if full:
            self.service.add(self)
        else:
            self.service.remove(self)

    def read(self, rank: int, spans: remote_memory.Spans, here: Sequence[int], there: Sequence[int]) -> None:
        """Copy ``spans`` from the addresses ``there`` on ``rank`` to ``here``."""
        try:
            spans.read(self.processes[rank], here, there)
        except OSError as error:
            raise self.lost(rank, error) from error

    def read_piece(self, rank: int, here: int, there: int, nbytes: int) -> None:
        """The same for one piece of ``nbytes``, at most 1 GiB."""
        try:
            remote_memory.read(self.processes[rank], here, there, nbytes)
        except OSError as error:
            raise self.lost(rank, error) from error

    def check_still_there(self, rank: int) -> None:
        """Raise unless ``rank`` is connected: what was read of it before this is what it has sent.

        A rank that gives up disconnects before anybody there may write or free what others still read; one that dies,
        before another process can get its number.
        """
        if self._hang_ups[rank].poll(0):
            raise self._why_gone(rank)

    def fail(self, failure: NeighbourError) -> NeighbourError:
        """Give up: whoever waits, here and elsewhere, is told so. Returns why. For who serves, or while nobody does."""
        if self.failure is None:
            self.failure = failure
            farewell = _FAREWELL + failure.reason.encode()[:4096]
            for line in self._sockets.values():
                self.service.forget(line.fileno())
                with suppress(OSError):  # the other end may be gone, or have no room
                    line.send(farewell)
                with suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)
            self.service.remove(self)
            self._on_failure()
        return self.failure

    def serve(self, rank: int) -> None:
        """Receive a token of ``rank``."""
        self.guard(partial(self._receive, rank))

    def guard(self, action: Callable[[], None]) -> None:
        """Call ``action``, and give up if it raises: other process groups are served as well, and by this thread."""
        try:
            action()
        except NeighbourError as error:
            self.fail(error)
        except BaseException as error:
            failure = NeighbourError(f"{type(error).__name__} while serving ranks of this host: {error}")
            failure.__cause__ = error
            self.fail(failure)
            if not isinstance(error, Exception):  # the user has interrupted the main thread
                raise

    def lost(self, rank: int, cause: Exception) -> NeighbourError:
        """The error to raise when ``rank`` could not be reached because of ``cause``."""
        error = NeighbourError(
            f"lost rank {rank} of a process group of {self.size} (process {self.processes[rank]} of this host): "
            f"{type(cause).__name__}: {cause}. If that process has ended or died, its own output says why."
        )
        error.__cause__ = cause
        return error

    def _why_gone(self, rank: int) -> NeighbourError:
        """What ``rank``, which has left, said last."""
        while rank not in self.gone:
            self._receive(rank)
        return self.gone[rank]

    def _receive(self, rank: int) -> None:
        try:
            nbytes = self._sockets[rank].recv_into(self._buffer)
        except (BlockingIOError, ConnectionResetError):  # after a reset comes what was sent before it, then the end
            return
        if nbytes == 0 or self._buffer.startswith(_FAREWELL):
            reason = self._buffer[len(_FAREWELL) : nbytes].decode(errors="replace")
            told = f"rank {rank} of a process group of {self.size} has given up: {reason}"
            end = ConnectionError("it has closed its connection")
            self.gone[rank] = NeighbourError(told, reason) if reason else self.lost(rank, end)
            self.service.forget(self._sockets[rank].fileno())
            self._on_gone(rank)
            return
        words = array("Q")
        words.frombytes(memoryview(self._buffer)[:nbytes])
        self._on_token(rank, words)


def _serve(neighbours: ref[Neighbours], rank: int) -> None:
    """The service lives on when nobody needs these neighbours any more."""
    if (alive := neighbours()) is not None:
        alive.serve(rank)


def _hang_up_of(line: socket.socket) -> select.poll:
    """What reports nothing but the other end's leaving."""
    found = select.poll()
    found.register(line, 0)
    return found


def _close(service: Service, sockets: dict[int, socket.socket]) -> None:
    for line in sockets.values():
        service.forget(line.fileno())
    close_all(sockets)


def close_all(sockets: dict[int, socket.socket] | None) -> None:
    for line in (sockets or {}).values():
        line.close()
