"""The files in which ``mirrored`` keeps shards in the memory of a host, as one rank sees them.

All ranks of one job on one host share a folder of a file system in memory, which outlives the processes. Rule: a file
has the name of its generation only when all that its header promises is in it; what is half written has another name,
and is never read. Sizes and checksums are checked before anything is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import stat
import struct
import uuid
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from fsdp2.extras.output import create

HEADER_NBYTES = 128
_ROOM_NBYTES = 1 << 16  # files have multiples of this size, so that the next generation fits into an old file
_FIELDS = struct.Struct("<8sqiiqqqI")
_MAGIC = b"fsdp2mir"
_CRC = struct.Struct("<I")
_NAME = re.compile(r"step(\d+)_of(\d+)_at(\d+)")
_JOB = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Header(NamedTuple):
    """What the first bytes of a file or of a message say: which rank's shards of which step follow, of how many ranks;
    a digest of that rank's model; the sizes of the tensors' bytes and of the description; a checksum of both."""

    step: int
    owner: int
    num_ranks: int
    digest: int
    tensors_nbytes: int
    text_nbytes: int
    checksum: int

    @property
    def nbytes(self) -> int:
        """The size of all, the header included."""
        return HEADER_NBYTES + self.tensors_nbytes + self.text_nbytes

    def packed(self) -> bytes:
        fields = _FIELDS.pack(_MAGIC, *self)
        return (fields + _CRC.pack(zlib.crc32(fields))).ljust(HEADER_NBYTES, b"\0")

    @staticmethod
    def of(raw: bytes) -> Header | None:
        """The header that ``raw`` is; None if it is not a valid one."""
        if len(raw) < HEADER_NBYTES:
            return None
        magic, *found = _FIELDS.unpack_from(raw)
        is_whole = _CRC.unpack_from(raw, _FIELDS.size)[0] == zlib.crc32(raw[: _FIELDS.size])
        return Header(*found) if is_whole and magic == _MAGIC else None


class Room:
    """Memory for a header and what it describes: a mapped file, or memory of this process.

    Attributes:
        name: the name of the file; empty if there is none.
        memory: all bytes, as a tensor of shape ``[nbytes]`` and dtype uint8.
    """

    def __init__(self, mapped: mmap.mmap, name: str = "") -> None:
        self.name, self._mapped = name, mapped
        self.memory = torch.frombuffer(mapped, dtype=torch.uint8)

    @classmethod
    def of_process(cls, nbytes: int) -> Room:
        """Memory without a file."""
        return cls(mmap.mmap(-1, nbytes))

    @property
    def tensors(self) -> torch.Tensor:
        """What follows the header."""
        return self.memory[HEADER_NBYTES:]

    def fill(self, header: Header, text: bytes) -> None:
        """Write what is not in tensors."""
        self.header = header
        self._mapped[HEADER_NBYTES + header.tensors_nbytes : header.nbytes] = text

    @property
    def header(self) -> Header | None:
        return Header.of(self._mapped[:HEADER_NBYTES])

    @header.setter
    def header(self, header: Header) -> None:
        self._mapped[:HEADER_NBYTES] = header.packed()

    def checksum(self, nbytes: int) -> int:
        """Of what follows the header, up to ``nbytes`` of the whole."""
        with memoryview(self._mapped) as view:
            return zlib.crc32(view[HEADER_NBYTES:nbytes])

    def is_whole(self, header: Header) -> bool:
        """Whether all that ``header`` promises is here."""
        return len(self._mapped) >= header.nbytes and self.checksum(header.nbytes) == header.checksum

    def text(self, header: Header) -> bytes:
        """The description."""
        return self._mapped[HEADER_NBYTES + header.tensors_nbytes : header.nbytes]


class Found(NamedTuple):
    """A file that has the name of a generation."""

    name: str
    step: int
    owner: int
    holder: int


class MirrorFolder:
    """The folder of ``job`` in ``parent``, which is created if it does not exist.

    Attributes:
        place: a number that tells hosts apart, and different memories of one host.

    Raises:
        ValueError: ``job`` is no name.
        OSError: the folder cannot be used, or other users can write to it.
    """

    def __init__(self, parent: Path, job: str) -> None:
        if not _JOB.fullmatch(job):
            raise ValueError(
                f"mirrored: job is {job!r}, expected 1 to 100 letters, digits, dots, dashes or underscores. Pass a "
                "name that the restarted job has, too, and no other one on these hosts."
            )
        self.path = parent / f"fsdp2_mirror_{os.getuid()}_{job}"
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path, 0o700)
            self._folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            raise OSError(
                f"mirrored: the folder {self.path} cannot be used ({type(error).__name__}: {error}). Pass folder=, a "
                "folder in the memory of the host, such as /dev/shm."
            ) from error
        found = os.fstat(self._folder)
        if found.st_uid != os.getuid() or found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise OSError(
                f"mirrored: other users can use {self.path} (mode {stat.S_IMODE(found.st_mode):o}, owner "
                f"{found.st_uid}), expected a folder of this user alone. Remove it, or pass another job."
            )
        text = f"{_boot()} {found.st_dev} {found.st_ino}"
        self.place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        self._spare: list[Room] = []

    def room(self, nbytes: int) -> Room:
        """A file with a name of its own for at least ``nbytes``: an old one that fits, or a new one.

        Raises:
            OSError: the host has too little memory for it.
        """
        size = -(-nbytes // _ROOM_NBYTES) * _ROOM_NBYTES
        for room in self._spare:
            if room.memory.numel() == size:
                self._spare.remove(room)
                return room
        self.trim()
        name = f".unfinished_{uuid.uuid4().hex}"
        descriptor = create(name, 0o600, folder=self._folder, readable=True)
        try:
            os.posix_fallocate(descriptor, 0, size)  # otherwise a full memory would kill the process when it writes
            return Room(mmap.mmap(descriptor, size), name)
        except OSError as error:
            self.remove_files([name])
            raise OSError(
                f"mirrored: {self.path} has no room for {size} bytes ({type(error).__name__}: {error}). Give the host "
                "or container more shared memory (docker: --shm-size), or pass folder=, another folder in memory."
            ) from error
        finally:
            os.close(descriptor)

    def publish(self, room: Room, holder: int) -> None:
        """Give ``room`` the name of its generation: from now on, a restarted job may find it."""
        header = room.header
        assert header is not None
        self._rename(room, f"step{header.step}_of{header.owner}_at{holder}")

    def retire(self, room: Room) -> None:
        """Take the name of its generation from ``room``, and use it for a later one."""
        try:
            self._rename(room, f".unfinished_{uuid.uuid4().hex}")
        except FileNotFoundError:  # somebody has removed it
            return
        self._spare.append(room)

    def trim(self) -> None:
        """Free rooms that wait for a later generation."""
        self.remove_files(room.name for room in self._spare)
        self._spare.clear()

    def _rename(self, room: Room, name: str) -> None:
        os.rename(room.name, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        room.name = name

    def found(self) -> list[Found]:
        """The files that have the name of a generation."""
        matches = filter(None, map(_NAME.fullmatch, sorted(os.listdir(self._folder))))
        return [Found(match[0], *map(int, match.groups())) for match in matches]

    def opened(self, name: str) -> Room | None:
        """The file ``name``; None if it cannot be read, or is too short for a header."""
        try:
            descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._folder)
            try:
                return Room(mmap.mmap(descriptor, 0), name) if os.fstat(descriptor).st_size >= HEADER_NBYTES else None
            finally:
                os.close(descriptor)
        except (OSError, ValueError):
            return None

    def remove_files(self, names: Iterable[str]) -> None:
        """Remove files, as far as they exist. Memory that is mapped stays until it is no longer used."""
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._folder)

    def remove_others(self, names: Iterable[str]) -> None:
        """Remove all files but ``names``."""
        self.remove_files({*os.listdir(self._folder)} - {*names})

    def remove(self) -> None:
        """Remove the folder, if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(self.path)


def _boot() -> str:
    with contextlib.suppress(OSError):
        return _BOOT.read_text().strip()
    return os.uname().nodename
