"""``save_safetensors``: the whole model in Hugging Face's layout, written tensor by tensor, replaced atomically.

Each file is written by one rank; file k by rank k, k + W, ... Several ranks never write one file, because network file
systems may mix up writes to one page. One tensor of each open file travels to its writer (on accelerators, to all
ranks), then all writers write.

Rule: at every moment, one complete checkpoint is what a reader of the folder finds. New files have names of their own.
Then one rename makes them the checkpoint: of the index, or of the only file. Only then old files are removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import json
import math
import os
import re
import uuid
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.api.state import bound_state
from fsdp2.comm.backends import exchange
from fsdp2.comm.together import axis_of, together
from fsdp2.plan.mesh import Axis
from fsdp2.tools.progress import progress
from fsdp2.tools.sizes import nbytes_of
from fsdp2.tools.weights import (
    DTYPES,
    INDEX,
    ONE_FILE,
    Rename,
    Weight,
    check_dtype,
    check_ready,
    renamed,
    weights_of,
)

_CALLER = "save_safetensors"
_CODES = {dtype: code for code, dtype in DTYPES.items()}
# Files of one checkpoint, and what a save that was killed has left of one.
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?(\.[0-9a-f]{8})?\.safetensors|model\.safetensors\.index\.json\.[0-9a-f]{8}")
_HEADER_ALIGNMENT = 8
_METADATA = "__metadata__"  # what headers have besides tensors


@dataclass(frozen=True)
class _Entry:
    """One tensor of a file: its key, its dtype there, and its bytes."""

    key: str
    weight: Weight
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.weight.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _File:
    """One file of the checkpoint: its name at the end, the name that it is written under, and its tensors."""

    name: str
    new_name: str
    entries: tuple[_Entry, ...]


def save_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    rename: Rename | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write the parameters and persistent buffers of ``model``, sharded or not, as Hugging Face stores them.

    The folder gets ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and so on with an index. A checkpoint
    in the folder is replaced: whoever reads the folder finds the old one or the new one, whenever the processes are
    killed. Other files stay. All ranks must call it, between steps, and see the folder. A rank holds one whole tensor
    at a time. Tied weights are written once, under the first name. Plain tensors, such as
    buffers, are written as the first rank has them. A tensor subclass is written as the values that compute reads, and
    4-bit weights of bitsandbytes under the keys that it writes itself.

    Args:
        model: the model, or a part of it.
        folder: is made if it does not exist.
        max_shard_size: of one file, in bytes, or text such as ``"500MB"`` or ``"2GiB"``. A larger tensor gets its own
            file.
        dtype: of floating-point tensors in the files. Default: the dtypes of the model.
        rename: maps a name of the model to a key of the files: a mapping, in which names may be absent, or a function,
            which returns None to leave a tensor out.
        group: the ranks that save together. Default: all ranks.

    Raises:
        ValueError: ``max_shard_size`` is no size; two tensors get one key, or one gets a reserved key; a dtype has no
            name in safetensors; ranks have different tensors; a tensor is on a mesh without this rank.
        TypeError: ``folder`` is no path; ``dtype`` is not a floating-point dtype; ``rename`` gives no names.
        ScheduleError: a forward or backward runs, or parameters are lent to ``fsdp2.unsharded``.
        RuntimeError: a tensor is on the meta device.
        OSError: a rank cannot write, or does not see the folder. The old checkpoint is there.
    """
    axis = axis_of(group)
    (tag, *_) = exchange(axis, uuid.uuid4().hex[:8])
    with together(axis):
        path = _path(folder)
        check_dtype(dtype, _CALLER)
        weights = weights_of(model, _CALLER)
        check_ready(weights, _CALLER)
        _warn_of_others(model, axis)
        device = next((each.param.mesh.device for each in weights if each.param is not None), None)
        max_nbytes = nbytes_of(max_shard_size, f"{_CALLER}: max_shard_size", "5GB")
        files = _files(_entries(weights, dtype, rename), max_nbytes, tag)
        if axis.rank == 0:
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _unwritable(path, error) from error
    with together(axis):
        _check_alike(exchange(axis, _digest(files)))
        if not path.is_dir():
            raise FileNotFoundError(f"{_CALLER}: {path} is not there on this rank. Pass a folder that all ranks see.")
    try:
        with together(axis):
            problem, total = None, sum(entry.nbytes for file in files for entry in file.entries)
            with progress("save", total, "B", is_first=axis.rank == 0) as advance:
                for first in range(0, len(files), axis.size):
                    problem = _write(path, files[first : first + axis.size], axis, device, advance) or problem
            if problem is not None:
                raise problem
    except BaseException:
        for file in files[axis.rank :: axis.size]:
            (path / file.new_name).unlink(missing_ok=True)
        raise
    with together(axis):
        if axis.rank == 0:
            _commit(path, files, tag)


def _path(folder: object) -> Path:
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"{_CALLER}: folder is a {type(folder).__name__}, expected a str or a Path. Pass a folder.")
    return Path(folder)


# What goes where


def _entries(weights: Sequence[Weight], dtype: torch.dtype | None, rename: Rename | None) -> list[_Entry]:
    found: dict[str, _Entry] = {}
    for weight in itertools.chain.from_iterable(each.in_files() for each in weights):
        name = weight.names[0]
        key = renamed(name, rename)
        if key is None:
            continue
        if key == _METADATA:
            raise ValueError(
                f"{_CALLER}: '{name}' would get the key '{key}', which safetensors reserves. Let rename give it "
                "another key."
            )
        if key in found:
            raise ValueError(
                f"{_CALLER}: '{found[key].weight.names[0]}' and '{name}' are both renamed to '{key}'. Let rename give "
                "each its own key."
            )
        found[key] = entry = _Entry(key, weight, weight.dtype_in_files(dtype))
        if entry.dtype not in _CODES:
            raise ValueError(
                f"{_CALLER}: safetensors has no name for {entry.dtype}, the dtype of '{name}'. Pass "
                "dtype=torch.float32, or another one that it names."
            )
    return list(found.values())


def _files(entries: Sequence[_Entry], max_nbytes: int, tag: str) -> list[_File]:
    """``entries`` in their order, cut where the next one would make a file too large. Inside a file, wide dtypes come
    first: so each tensor starts at a multiple of its item size, which readers that map the file need."""
    cut: list[list[_Entry]] = [[]]
    filled = 0
    for entry in entries:
        if cut[-1] and filled + entry.nbytes > max_nbytes:
            cut.append([])
            filled = 0
        cut[-1].append(entry)
        filled += entry.nbytes
    for each in cut:
        each.sort(key=lambda entry: -entry.dtype.itemsize)
    if len(cut) == 1:
        return [_File(ONE_FILE, f"model.{tag}.safetensors", tuple(cut[0]))]
    stems = [f"model-{i:05d}-of-{len(cut):05d}" for i in range(1, len(cut) + 1)]
    return [
        _File(f"{stem}.safetensors", f"{stem}.{tag}.safetensors", tuple(each))
        for stem, each in zip(stems, cut, strict=True)
    ]


def _digest(files: Sequence[_File]) -> str:
    """Of all that ranks must have in common."""
    said = [
        (file.name, each.key, str(each.dtype), each.weight.shape, isinstance(each.weight.tensor, DTensor))
        for file in files
        for each in file.entries
    ]
    return hashlib.sha256(repr(said).encode()).hexdigest()


def _check_alike(digests: Sequence[str]) -> None:
    others = [str(rank) for rank, each in enumerate(digests) if each != digests[0]]
    if others:
        raise ValueError(
            f"{_CALLER}: rank {', '.join(others)} would write other tensors than rank 0. Build the same model on all "
            "ranks of the group, and pass the same arguments. Pipeline stages: save each to its folder, with its group."
        )


def _warn_of_others(model: nn.Module, axis: Axis) -> None:
    others = [name for name, value in bound_state(model).items() if not isinstance(value, torch.Tensor)]
    if others and axis.rank == 0:
        warnings.warn(f"{_CALLER}: not saved, because these are no tensors: {', '.join(others)}", stacklevel=3)


# Write


def _write(
    path: Path, files: Sequence[_File], axis: Axis, device: torch.device | None, advance: Callable[[int], object]
) -> OSError | None:
    """Write ``files``; file i is this rank's if its rank on ``axis`` is i. A rank that cannot write goes on gathering,
    since the others need it, and returns its error. ``advance``: gets the bytes that some rank has gathered."""
    mine = files[axis.rank] if axis.rank < len(files) else None
    out: BinaryIO | None = None
    problem: OSError | None = None
    with contextlib.ExitStack() as stack:
        if mine is not None:
            try:
                out = open(path / mine.new_name, "wb")  # noqa: SIM115  # a with would raise the error once more
                stack.callback(_close, out)
                out.write(_header(mine.entries))
            except OSError as error:
                problem = _unwritable(path / mine.name, error)
        for index in range(max(len(file.entries) for file in files)):
            kept: torch.Tensor | None = None
            for owner, file in enumerate(files):
                if index < len(file.entries):
                    values = _gathered(file.entries[index], owner, axis, device)
                    if values is not None:
                        kept = values.cpu().contiguous()
                    del values
                    advance(file.entries[index].nbytes)
            if kept is not None and mine is not None and out is not None and problem is None:
                try:
                    out.write(_bytes_of(kept))
                except OSError as error:
                    problem = _unwritable(path / mine.name, error)
        if mine is not None and out is not None and problem is None:
            try:
                out.flush()
                os.fsync(out.fileno())
                out.close()  # a full disk may show only now
            except OSError as error:
                problem = _unwritable(path / mine.name, error)
    return problem


def _close(file: BinaryIO) -> None:
    """Closing tries once more to write what could not be written, which has been noted."""
    with contextlib.suppress(OSError):
        file.close()


def _unwritable(path: Path, error: OSError) -> OSError:
    """What the system says of a full disk names no file."""
    return OSError(
        f"{_CALLER}: {path} could not be written ({type(error).__name__}: {error}). The checkpoint that was in the "
        "folder is there. Make room, or pass a folder that this process may write."
    )


def _gathered(entry: _Entry, owner: int, axis: Axis, device: torch.device | None) -> torch.Tensor | None:
    """The whole tensor in the dtype of the file, on the rank ``owner`` of ``axis``. A plain tensor is that of the first
    rank, and travels through ``device``."""
    weight = entry.weight
    if axis.group is None:
        return weight.whole(entry.dtype)
    if isinstance(weight.tensor, DTensor):
        return weight.whole_on(dist.get_global_rank(axis.group, owner), entry.dtype)
    values = weight.whole(entry.dtype)
    sent = values.to(device, copy=True, memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    dist.broadcast(sent, group=axis.group, group_src=0)
    return sent.view(entry.dtype).reshape(values.shape) if owner == axis.rank else None


def _header(entries: Iterable[_Entry]) -> bytes:
    """What safetensors files begin with: the size of the header, and where each tensor lies behind it."""
    header: dict[str, object] = {_METADATA: {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.nbytes
        shape = list(entry.weight.shape)
        header[entry.key] = {"dtype": _CODES[entry.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU. The package does without NumPy, which has this built in."""
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""
    return memoryview(memory)


# Replace the old checkpoint


def _commit(path: Path, files: Sequence[_File], tag: str) -> None:
    """Make ``files`` the checkpoint of the folder, and remove the old one. A reader looks for the only file first, and
    then for the index."""
    _sync(path)
    new_names = {file.name: file.new_name for file in files}
    try:
        if len(files) == 1:
            os.replace(path / files[0].new_name, path / ONE_FILE)
        else:
            _write_index(path, files, new_names, tag)
    except OSError as error:  # the new checkpoint is not in its place: the old one is
        for name in (*new_names.values(), f"{INDEX}.{tag}"):
            (path / name).unlink(missing_ok=True)
        raise _unwritable(path / (ONE_FILE if len(files) == 1 else INDEX), error) from error
    if len(files) == 1:
        _sync(path)
        _remove(path, {ONE_FILE})
        return
    _remove(path, set(new_names.values()) | {INDEX})
    # The usual names may have belonged to the old checkpoint until now. Each file has both names for a moment.
    try:
        for file in files:
            os.link(path / file.new_name, path / file.name)
        _write_index(path, files, {file.name: file.name for file in files}, tag)
    except OSError:  # no hard links, or no room for another index: the one with the new names stays
        _remove(path, set(new_names.values()) | {INDEX})
        return
    _remove(path, {file.name for file in files} | {INDEX})


def _write_index(path: Path, files: Sequence[_File], name_of: dict[str, str], tag: str) -> None:
    entries = [entry for file in files for entry in file.entries]
    index = {
        "metadata": {"total_size": sum(entry.nbytes for entry in entries)},
        "weight_map": {entry.key: name_of[file.name] for file in files for entry in file.entries},
    }
    written = path / f"{INDEX}.{tag}"
    with open(written, "w") as out:
        json.dump(index, out, indent=2)
        out.flush()
        os.fsync(out.fileno())
    os.replace(written, path / INDEX)
    _sync(path)


def _remove(path: Path, kept: set[str]) -> None:
    """Remove the files of other checkpoints: first the index or the only file, which others follow from."""
    entry_points = [name for name in (ONE_FILE, INDEX) if name not in kept]
    found = [each.name for each in path.iterdir() if _OURS.fullmatch(each.name) and each.name not in kept]
    for name in dict.fromkeys([*entry_points, *found]):
        (path / name).unlink(missing_ok=True)
    _sync(path)


def _sync(path: Path) -> None:
    """Write names of files in ``path`` to the disk, where the system can open folders."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
