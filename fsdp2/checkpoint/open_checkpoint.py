"""The files of a checkpoint, opened once by each rank, while other processes may replace them.

A rank notes the identity of each path before it opens it. When all ranks have opened their files, each checks again. If
nothing has changed, there was a moment at which all files were in place: so they form one checkpoint, the same on all
ranks. Files stay open, so replacing them later does no harm.

This is not enough where a file system answers from a cache, as NFS does for seconds, or where each node has a copy.
Therefore ranks also compare the headers, and the token that ``save_safetensors`` writes into them.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from fsdp2.checkpoint.mapping import Shape
from fsdp2.checkpoint.weights import INDEX, ONE_FILE, TOKEN
from fsdp2.core import Axis
from fsdp2.extras.exchange import any_of, are_alike, exchange
from fsdp2.extras.foreign_files import check_regular, is_inside, read_json

_CALLER = "load_safetensors"
_MAX_LISTED = 20
_ATTEMPTS = 10
_PAUSE_S = 0.05  # grows from attempt to attempt


class Header(NamedTuple):
    """The header entry of a file for one tensor."""

    file: Path
    shape: Shape
    code: str


class _Seen(NamedTuple):
    """What distinguishes a file from others that have had its name, and what changes when it is written to."""

    device: int
    inode: int
    nbytes: int
    written_ns: int


def _seen(path: Path) -> _Seen | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return _Seen(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class OpenCheckpoint:
    """The files that one rank has opened.

    Attributes:
        opened: the open files, as ``safetensors.safe_open`` returns them.
        headers: the headers of all tensors, in the order of the data in each file.
        unreadable: messages about files that could not be opened.
        absent: messages about tensors that are not in the file that the index names.
        problem: why nothing was opened.
    """

    def __init__(self, library: Any, path: Path) -> None:
        self.opened: dict[Path, Any] = {}
        self.headers: dict[str, Header] = {}
        self.unreadable: list[str] = []
        self.absent: list[str] = []
        self.problem: Exception | None = None
        self._said: list[object] = []  # must be the same on all ranks
        self._noted: dict[Path, _Seen | None] = {}
        try:
            files, token = self._files(path)
        except Exception as error:  # any exception, since other ranks wait
            self.problem = error
            return
        for file, listed in files.items():
            try:
                self._open(library, file, listed, token)
            except Exception as error:  # from the library, the system, or torch, which opens the file again
                self.unreadable.append(f"{file} cannot be read: {type(error).__name__}: {error}")

    @property
    def digest(self) -> str | None:
        """A digest of what all ranks must find; None if this rank did not find everything."""
        is_whole = self.problem is None and not self.unreadable
        return hashlib.sha256(repr(self._said).encode()).hexdigest() if is_whole else None

    def is_unchanged(self) -> bool:
        """Whether all paths that were looked up are unchanged."""
        return all(_seen(path) == noted for path, noted in self._noted.items())

    def is_overwritten(self, file: Path) -> bool:
        """Whether ``file`` has been written to. A file that has replaced it does no harm."""
        found, noted = _seen(file), self._noted[file]
        return found is not None and noted is not None and found[:2] == noted[:2] and found != noted

    def _exists(self, path: Path) -> bool:
        self._noted[path] = _seen(path)
        return self._noted[path] is not None

    def _files(self, path: Path) -> tuple[dict[Path, set[str] | None], str | None]:
        """The files of a checkpoint, each with the keys that the index lists for it (None without an index), and the
        token of the index."""
        if path.is_dir():
            # transformers looks for them in this order, too, and save_safetensors relies on it.
            found = next((path / name for name in (ONE_FILE, INDEX) if self._exists(path / name)), None)
            if found is None:
                there = sorted(each.name for each in path.glob("*.safetensors*"))
                raise FileNotFoundError(
                    f"{_CALLER}: the folder {path} has neither {ONE_FILE} nor {INDEX}. "
                    f"Pass the path of a file or index. There are: {', '.join(there[:_MAX_LISTED]) or 'none'}."
                )
            path = found
        elif not self._exists(path):
            raise FileNotFoundError(f"{_CALLER}: {path} does not exist on this rank.")
        if path.suffix == ".safetensors":
            return {path: None}, None
        if path.suffix != ".json":
            raise ValueError(f"{_CALLER}: {path}: expected a folder, a .safetensors file, or an index (.json).")
        try:
            index = read_json(path)
            file_of, metadata = index["weight_map"], index.get("metadata")
            token = metadata.get(TOKEN) if isinstance(metadata, dict) else None
            outside = [name for name in file_of.values() if not is_inside(name)]
            if outside:
                raise ValueError(f"it names {outside[0]!r}, which is no file below its folder")
            listed: dict[Path, set[str] | None] = {path.parent / name: set() for name in sorted(set(file_of.values()))}
            for key, name in file_of.items():
                listed[path.parent / name].add(key)  # type: ignore[union-attr]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{_CALLER}: the index {path} cannot be read: {type(error).__name__}: {error}. "
                'Expected JSON with a "weight_map" from keys to names of files.'
            ) from error
        return listed, token

    def _open(self, library: Any, file: Path, listed: set[str] | None, token: str | None) -> None:
        """Read the header of ``file``, and keep it open."""
        self._exists(file)
        check_regular(os.stat(file))  # the library would wait for what somebody writes into a FIFO
        noted, opened = self._noted[file], library.safe_open(file, framework="pt")
        # Iterate in the order of the data, so that the disk reads forward; older versions only have keys().
        keys = list(getattr(opened, "offset_keys", opened.keys)())
        headers = {}
        for key in [key for key in keys if listed is None or key in listed]:
            header = opened.get_slice(key)
            headers[key] = Header(file, tuple(header.get_shape()), header.get_dtype())
        metadata = dict(opened.metadata() or {})
        if token is not None and metadata.get(TOKEN, token) != token:  # other programs write no token
            self.unreadable.append(
                f"{file} is of another save than the index. Copy the folder when no save is running."
            )
            return
        self.opened[file] = opened
        self.headers |= headers
        self._said.append((noted and noted.nbytes, sorted(metadata.items()), [(k, *h[1:]) for k, h in headers.items()]))
        for key in sorted((listed or set()) - set(keys)):
            self.absent.append(f"'{key}' is not in {file.name}, where the index says it is.")


def open_together(axis: Axis, library: Any, path: Path) -> OpenCheckpoint:
    """Open ``path`` on all ranks of ``axis``, so that all have opened the same files of one checkpoint. If that fails,
    ``problem`` says why."""
    for attempt in range(_ATTEMPTS):
        time.sleep(attempt * _PAUSE_S)
        checkpoint = OpenCheckpoint(library, path)
        is_usable = any_of(axis, checkpoint.digest is None) or are_alike(axis, checkpoint.digest)
        is_steady = not any_of(axis, not checkpoint.is_unchanged())  # asked when all ranks have opened their files
        if is_steady and is_usable:
            return checkpoint
    if is_steady:
        digests = exchange(axis, checkpoint.digest)
        others = [str(rank) for rank, each in enumerate(digests) if each != digests[0]]
        checkpoint.problem = ValueError(
            f"{_CALLER}: rank {', '.join(others)} finds another checkpoint than rank 0 in {path}. Nothing was loaded. "
            "Pass a path that all ranks see, or one checkpoint on all nodes. Stages of a pipeline: pass their group."
        )
    else:
        checkpoint.problem = RuntimeError(
            f"{_CALLER}: {path} was replaced while it was opened, {_ATTEMPTS} times. Nothing was loaded. Load when "
            "nothing writes there, or pass a copy."
        )
    return checkpoint
