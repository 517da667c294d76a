"""The folder that ``save_safetensors`` writes to, as one rank has opened it.

It is opened once, and all names are looked up in what was opened. So nothing changes elsewhere if a link takes its
place. Rank 0 locks it; the system unlocks it when the process ends, however it ends.

Rule: a file is made where nothing was. Removed is what this save has made, what the old checkpoint consists of and,
under the lock, what killed saves have left.
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

from fsdp2.tools.weights import INDEX, ONE_FILE
from fsdp2.tools.whole_file import create, rights_of

LOCK = ".fsdp2_save.lock"
# Files of one checkpoint, and what a save that was killed has left of one.
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?(\.[0-9a-f]{8})?\.safetensors|model\.safetensors\.index\.json\.[0-9a-f]{8}")
_LOCK_ATTEMPTS = 10
_Version: TypeAlias = tuple[int, int] | None  # size, and when it was written; None: it is not there


class SaveFolder:
    """A folder, open until ``close``, which removes the files that ``create`` has made if ``keep`` was not called."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if this rank cannot open the folder ``path``."""
        self.path = path
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._lock: int | None = None
        self._made: list[str] = []

    def __enter__(self) -> SaveFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lock(self) -> None:
        """Keep other saves out. Where the file system has no locks, or no inodes to tell files apart, it does nothing.

        Raises:
            BlockingIOError: another save is running.
        """
        for _ in range(_LOCK_ATTEMPTS):
            # On NFS, an exclusive lock needs a descriptor that may write, which a folder's may not.
            lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666, dir_fd=self._folder)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise
            except OSError:
                os.close(lock)
                self.remove([LOCK])
                return
            there = self._stat(LOCK)
            if there is not None and os.path.samestat(there, os.fstat(lock)):
                self._lock = lock
                return
            os.close(lock)  # the save that had it has ended, and removed it

    def keep(self) -> None:
        """What was made is another's to remove: from now on, a checkpoint may consist of it."""
        self._made.clear()

    def close(self) -> None:
        self.remove(self._made)
        if self._lock is not None:
            self.remove([LOCK])  # while it is locked
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)  # a process that was forked meanwhile has it open, too
            os.close(self._lock)
        os.close(self._folder)

    def create(self, name: str, rights: int | None) -> BinaryIO:
        """A new file."""
        descriptor = create(name, rights, folder=self._folder)
        self._made.append(name)
        return open(descriptor, "wb")

    def replace(self, name: str, new_name: str) -> None:
        """Let the file ``name`` take the place of what has the name ``new_name``."""
        os.replace(name, new_name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self.sync()

    def link(self, name: str, new_name: str) -> None:
        os.link(name, new_name, src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def remove(self, names: Iterable[str]) -> None:
        """In this order. What is not there, or another's, is left out."""
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._folder)

    def sync(self) -> None:
        """Write names of files to the disk."""
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
        """Of the checkpoint that is there: those that all its files have; None without one."""
        found = [rights_of(name, folder=self._folder) for name in self._checkpoint()]
        return functools.reduce(operator.and_, [each for each in found if each is not None]) if any(found) else None

    def others(self, own: Iterable[str]) -> dict[str, _Version]:
        """What is to be removed when ``own`` files are the checkpoint: first what readers look for."""
        found = self._checkpoint()
        if self._lock is not None:
            found += [name for name in os.listdir(self._folder) if _OURS.fullmatch(name)]
        return {name: self.version(name) for name in found if name not in own}

    def remove_unchanged(self, versions: Mapping[str, _Version]) -> None:
        """Another save may have taken a name meanwhile, where locks keep out only those of this node."""
        for name, version in versions.items():
            if self.version(name) == version:
                self.remove([name])
        self.sync()

    def version(self, name: str) -> _Version:
        found = self._stat(name)
        return None if found is None else (found.st_size, found.st_mtime_ns)

    def index(self) -> dict[str, Any]:
        """What the index says; nothing if there is none."""
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
        """What a reader looks for, and the files that the index names, as far as a save may have written them."""
        file_of = self.index().get("weight_map")
        named = file_of.values() if isinstance(file_of, dict) else ()
        return [ONE_FILE, INDEX, *(name for name in named if isinstance(name, str) and _OURS.fullmatch(name))]
