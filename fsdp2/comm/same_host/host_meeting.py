"""How the ranks of a process group find out, together, whether they share a host and may read each other's memory.

Nobody's word is taken for it: every rank reads some random bytes of every other, and they connect. So containers, other
users, and processes that have the same number elsewhere are told apart. One rank that fails has all send messages.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from fsdp2.comm.same_host import remote_memory
from fsdp2.comm.same_host.host_ranks import Neighbours, close_all

SWITCH = "FSDP2_SAME_HOST"  # "0" in the environment: do not look whether ranks share a host
_HELLO = struct.Struct("=16sI")  # the secret of whom it goes to, and the rank that it comes from


class _Offer(NamedTuple):
    """How to reach a rank, and memory of its to try reading."""

    process: int
    socket_name: str
    secret: bytes
    probe_address: int
    probe: bytes


def meet(rank: int, ask: Callable[[object], list[Any]], timeout_s: float) -> Neighbours | None:
    """Neighbours, if all ranks of a process group are on this host and may read each other; else None, on all ranks.

    ``ask`` returns what every rank asked with, in rank order. All ranks call this, which asks once or twice.
    """
    listener = _listener()
    probe = ctypes.create_string_buffer(secrets.token_bytes(32), 32)
    try:
        offers: list[_Offer | None] = ask(None if listener is None else _offer(listener, probe))
        willing = [offer for offer in offers if offer is not None]
        if listener is None or len(willing) < len(offers):
            return None
        sockets = _try_all(rank, willing)
        if not all(ask(sockets is not None)) or sockets is None:
            close_all(sockets)
            return None
        _accept(listener, rank, willing, sockets)
    finally:
        if listener is not None:
            listener.close()
    return Neighbours(rank, [offer.process for offer in willing], sockets, timeout_s)


def _listener() -> socket.socket | None:
    """A socket that other ranks can connect to; None if they need not try."""
    has_sockets = hasattr(socket, "AF_UNIX") and hasattr(socket, "SOCK_SEQPACKET") and hasattr(select, "epoll")
    if os.environ.get(SWITCH) == "0" or not has_sockets or not remote_memory.is_supported():
        return None
    listener = None
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"\0fsdp2-{secrets.token_hex(16)}")  # in no file system, and gone with the socket
        listener.listen(socket.SOMAXCONN)
        listener.setblocking(False)  # nobody is accepted before he has connected
    except OSError:
        if listener is not None:
            listener.close()
        return None
    return listener


def _offer(listener: socket.socket, probe: ctypes.Array[ctypes.c_char]) -> _Offer:
    return _Offer(os.getpid(), listener.getsockname(), secrets.token_bytes(16), ctypes.addressof(probe), probe.raw)


def _try_all(rank: int, offers: Sequence[_Offer]) -> dict[int, socket.socket] | None:
    """Read every rank's probe, and connect to the ranks before this one. None if that fails in any way."""
    sockets: dict[int, socket.socket] = {}
    try:
        for other, offer in enumerate(offers):
            found = ctypes.create_string_buffer(len(offer.probe))
            remote_memory.read(offer.process, ctypes.addressof(found), offer.probe_address, len(offer.probe))
            if found.raw != offer.probe:  # the number means another process here
                raise ProcessLookupError
            if other < rank:
                sockets[other] = line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                line.setblocking(False)  # a queue that is full is an error: it is emptied only when all have answered
                line.connect(offer.socket_name)
                line.send(_HELLO.pack(offer.secret, rank))
    except OSError:
        close_all(sockets)
        return None
    return sockets


def _accept(listener: socket.socket, rank: int, offers: Sequence[_Offer], sockets: dict[int, socket.socket]) -> None:
    """Take the connections of the ranks behind this one; they have connected, and said hello, before they answered."""
    while len(sockets) < len(offers) - 1:
        line, _ = listener.accept()
        line.setblocking(False)
        with suppress(OSError, struct.error):
            secret, other = _HELLO.unpack(line.recv(_HELLO.size))
            if secret == offers[rank].secret:
                sockets[other] = line
                continue
        line.close()  # some other process of this host: names of sockets are no secret
