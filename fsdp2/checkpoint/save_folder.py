"""The folder that ``save_safetensors`` writes to, as one rank has opened it.

It is opened once, and all names are looked up relative to the open folder. So nothing changes elsewhere if a link
replaces it. Rank 0 locks it; the system unlocks it when the process ends, however it ends.

Rule: files are only created under unused names. The files removed are those that this save has made, those of the old
checkpoint and, under the lock, those that killed saves have left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import operator
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from fsdp2.checkpoint.weights import INDEX, ONE_FILE
from fsdp2.extras.output import create, rights_of

LOCK = ".fsdp2_save.lock"
# Files of one checkpoint, and files that a killed save may have left behind.
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?(\.[0-9a-f]{8})?\.safetensors|model\.safetensors\.index\.json\.[0-9a-f]{8}")
_LOCK_ATTEMPTS = 10
_Version: TypeAlias = tuple[int, int] | None  # size and modification time; None if the file does not exist


class SaveFolder(contextlib.AbstractContextManager["SaveFolder"]):
    """A folder, open until ``close``, which removes the files that ``create`` has made if ``keep`` was not called."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if this rank cannot open the folder ``path``."""
        self.path = path
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._lock: BinaryIO | None = None  # a file is closed even if an interrupt comes before close()
        self._made: list[str] = []

    def __exit__(self, *_: object) -> None:
        self.close()

    def lock(self) -> bool:
        """Keep other saves out; returns False if another one is running. Does nothing if the file system has no locks,
        or no inodes to tell files apart."""
        for _ in range(_LOCK_ATTEMPTS):
            # On NFS, an exclusive lock needs a writable descriptor, which a folder does not have.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            lock = os.fdopen(os.open(LOCK, flags, 0o666, dir_fd=self._folder), "rb+", buffering=0)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                return False
            except OSError:
                lock.close()
                self.remove([LOCK])
                return True
            there = self._stat(LOCK)
            if there is not None and os.path.samestat(there, os.fstat(lock.fileno())):
                self._lock = lock
                return True
            lock.close()  # the save that held the lock has ended and removed the file
        return True

    def keep(self) -> None:
        """Let ``close`` keep the files that were made, since a checkpoint may consist of them from now on."""
        self._made.clear()

    def close(self) -> None:
        try:
            self.remove([*self._made, *([] if self._lock is None else [LOCK])])  # the lock last, while it is locked
        finally:  # an interrupted process may save again
            if self._lock is not None:
                with contextlib.suppress(OSError):
                    fcntl.flock(self._lock, fcntl.LOCK_UN)  # a process forked in the meantime has it open, too
                self._lock.close()
            os.close(self._folder)

    def create(self, name: str, rights: int | None) -> BinaryIO:
        """Create a new file."""
        descriptor = create(name, rights, folder=self._folder)
        self._made.append(name)
        return open(descriptor, "wb")

    def replace(self, name: str, new_name: str) -> None:
        """Rename the file ``name`` to ``new_name``, replacing what had that name."""
        os.replace(name, new_name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self.sync()

    def link(self, name: str, new_name: str) -> None:
        os.link(name, new_name, src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files in this order. Those that do not exist, or that this user may not remove, are skipped."""
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._folder)

    def sync(self) -> None:
        """Flush the names of files to the disk."""
        with contextlib.suppress(OSError):
            os.fsync(self._folder)

    def is_at_path(self) -> bool:
        """Whether its path still leads here."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.stat(self.path), os.fstat(self._folder))
        return False

    def has(self, name: str) -> bool:
        return self._stat(name) is not None

    def beginning(self, name: str, nbytes: int) -> tuple[int, bytes]:
        """The size of a file, and its first ``nbytes``."""
        with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._folder), "rb") as file:
            return os.fstat(file.fileno()).st_size, file.read(nbytes)

    def rights(self) -> int | None:
        """The permissions that all files of the existing checkpoint have; None if there is no checkpoint."""
        found = [rights_of(name, folder=self._folder) for name in self._checkpoint()]
        return functools.reduce(operator.and_, [each for each in found if each is not None]) if any(found) else None

    def others(self, own: Iterable[str]) -> dict[str, _Version]:
        """The files to remove once the files ``own`` are the checkpoint, those that readers look for first."""
        found = self._checkpoint()
        if self._lock is not None:
            found += [name for name in os.listdir(self._folder) if _OURS.fullmatch(name)]
        return {name: self.version(name) for name in found if name not in own}

    def remove_unchanged(self, versions: Mapping[str, _Version]) -> None:
        """Remove unchanged files: where locks only work within a node, another save may have taken a name."""
        for name, version in versions.items():
            if self.version(name) == version:
                self.remove([name])
        self.sync()

    def version(self, name: str) -> _Version:
        found = self._stat(name)
        return None if found is None else (found.st_size, found.st_mtime_ns)

    def index(self) -> dict[str, Any]:
        """The contents of the index; an empty dict if there is none."""
        with contextlib.suppress(OSError, ValueError):
            descriptor = os.open(INDEX, os.O_RDONLY, dir_fd=self._folder)
            with open(descriptor, encoding="utf-8") as file:
                found = json.load(file)
            return found if isinstance(found, dict) else {}
        return {}

    def _stat(self, name: str) -> os.stat_result | None:
        with contextlib.suppress(FileNotFoundError):
            return os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        return None

    def _checkpoint(self) -> list[str]:
        """The files that readers look for, and those that the index names, as far as a save may have written them."""
        file_of = self.index().get("weight_map")
        named = file_of.values() if isinstance(file_of, dict) else ()
        return [ONE_FILE, INDEX, *(name for name in named if isinstance(name, str) and _OURS.fullmatch(name))]
