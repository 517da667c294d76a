"""``save_safetensors``: the whole model in Hugging Face's layout, written tensor by tensor, replaced atomically.

Each file is written by one rank: rank r writes files r, r + W, ... Several ranks never write one file, because network
file systems may mix up writes to one page. One tensor of each open file is sent to its writer (on accelerators, to all
ranks), then all writers write.

Rule: at every moment, a reader of the folder finds one complete checkpoint. New files have names of their own, and a
token of their save in their headers. When rank 0 has seen all of them, a single rename, of the index or of the only
file, makes them the checkpoint. Only then are old files removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.checkpoint.mapping import MappingLike
from fsdp2.checkpoint.pieces import Piece
from fsdp2.checkpoint.save_folder import LOCK, SaveFolder
from fsdp2.checkpoint.save_plan import Entry, File, digest_of, entries_of, files_of, tag_of
from fsdp2.checkpoint.weights import (
    INDEX,
    ONE_FILE,
    TOKEN,
    Rename,
    Weight,
    check_dtype,
    check_ready,
    plain_values,
    send_to,
    weights_of,
)
from fsdp2.core import Axis, comms
from fsdp2.extras.checked import check
from fsdp2.extras.exchange import are_alike, axis_of, exchange, from_first, together
from fsdp2.extras.lending import joined, packed
from fsdp2.extras.output import progress
from fsdp2.extras.plain_names import bound_state
from fsdp2.extras.sizes import nbytes_of

_CALLER = "save_safetensors"


def save_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    rename: Rename | None = None,
    mapping: MappingLike | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write the parameters and persistent buffers of ``model``, sharded or not, as Hugging Face stores them.

    Writes ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and so on with an index. It replaces a
    checkpoint in the folder: whenever the processes are killed, the folder has either the old one or the new one. Other
    files stay, and the old permissions are kept. All ranks must call it, between steps, and must see the folder. A rank
    holds one whole tensor at a time, plus the result if ``mapping`` fuses several into one. Tied weights are written
    once, under their first name.
    Plain tensors, such as buffers, are written as the first rank has them, wire formats as the values of the shards,
    quantised weights dequantised, and 4-bit weights of bitsandbytes under the keys that it writes itself.

    Args:
        model: the model, or a part of it.
        folder: the folder, which is created if it does not exist.
        max_shard_size: the largest size of one file, in bytes or as text such as ``"500MB"`` or ``"2GiB"``. A tensor
            that is larger gets its own file.
        dtype: the dtype of floating-point tensors in the files. Default: the dtypes of the model.
        rename: maps a name in the model to a key in the files: either a mapping, which need not have all names, or a
            function, which returns None to leave a tensor out.
        mapping: splits, fuses or transposes tensors in the files, in the form that ``load_safetensors`` takes.
            ``rename`` gets the names that no rule covers.
        group: the ranks that save together. Default: all ranks.

    Raises:
        ValueError: ``max_shard_size`` is not a size; two tensors get one key, or one gets a reserved key; a dtype has
            no name in safetensors; ranks have different tensors; a tensor is on a mesh without this rank; ``mapping``
            does not fit the model.
        TypeError: ``folder`` is not a path; ``dtype`` is not a floating-point dtype; ``rename`` does not return names.
        ScheduleError: a forward or backward is running, or parameters are lent to ``fsdp2.unsharded``.
        RuntimeError: a tensor is on the meta device.
        OSError: a rank cannot write, or sees a different folder than rank 0; another save writes to the folder; the
            folder or a file was replaced meanwhile. The old checkpoint is still there.
    """
    axis = axis_of(group)
    token = from_first(axis, uuid.uuid4().hex)
    with contextlib.ExitStack() as stack:
        with together(axis):
            check(f"{_CALLER}: folder", folder, "path")
            path = Path(folder)
            check_dtype(dtype, _CALLER)
            weights = weights_of(model, _CALLER)
            check_ready(weights, _CALLER)
            _warn_of_others(model, axis)
            device = next((each.param.mesh.device for each in weights if each.param is not None), None)
            max_nbytes = nbytes_of(max_shard_size, f"{_CALLER}: max_shard_size", "5GB")
            files = files_of(entries_of(weights, dtype, rename, mapping), max_nbytes, token)
        with together(axis):
            _check_alike(axis, digest_of(files))
            if axis.rank == 0:
                opened = stack.enter_context(_opened(path, is_first=True))
                _claim(opened, files, token)
        with together(axis):
            rights = from_first(axis, opened.rights() if axis.rank == 0 else None)
            if axis.rank > 0:
                opened = stack.enter_context(_opened(path))
                _check_claim(opened, files[axis.rank :], token)
        with together(axis):
            problem, total = None, sum(entry.nbytes for file in files for entry in file.entries)
            with progress("save", total, "B", is_first=axis.rank == 0) as advance:
                for first in range(0, len(files), axis.size):
                    some = files[first : first + axis.size]
                    problem = _write(opened, some, rights, axis, device, advance) or problem
            if problem is not None:
                raise problem
        opened.keep()
        with together(axis):
            if axis.rank == 0:
                _commit(opened, files, token)


# Claiming the folder


def _opened(path: Path, *, is_first: bool = False) -> SaveFolder:
    with _writing(path):
        if is_first:
            path.mkdir(parents=True, exist_ok=True)
        return SaveFolder(path)


def _claim(opened: SaveFolder, files: Sequence[File], token: str) -> None:
    """Keep other saves out, and leave a marker by which the other writers recognise the folder."""
    with _writing(opened.path):
        is_alone = opened.lock()
        if is_alone and len(files) > 1:
            opened.create(_unfinished_index(token), opened.rights()).close()
    if not is_alone:
        raise OSError(
            f"{_CALLER}: another save writes to {opened.path}. Nothing was written. Save again when it has ended, or "
            "pass another folder. If there is none (file servers may keep the lock of a node that is lost), remove "
            f"{opened.path / LOCK}."
        )


def _check_claim(opened: SaveFolder, files: Sequence[File], token: str) -> None:
    """Check that this rank sees rank 0's folder, if it writes one of ``files``, which start at its first one."""
    if files and not opened.has(_unfinished_index(token)):
        raise FileNotFoundError(
            f"{_CALLER}: {opened.path} is another folder on this rank than on rank 0. Nothing was written. Pass a "
            "folder that all ranks see, or max_shard_size=... such that rank 0 writes the only file."
        )


def _unfinished_index(token: str) -> str:
    return f"{INDEX}.{tag_of(token)}"


def _check_alike(axis: Axis, digest: str) -> None:
    if are_alike(axis, digest):
        return
    digests = exchange(axis, digest)
    others = [str(rank) for rank, each in enumerate(digests) if each != digests[0]]
    raise ValueError(
        f"{_CALLER}: rank {', '.join(others)} would write other tensors than rank 0. Build the same model on all ranks "
        "of the group, and pass the same arguments. Pipeline stages: save each to its folder, with its group."
    )


def _warn_of_others(model: nn.Module, axis: Axis) -> None:
    others = [name for name, value in bound_state(model).items() if not isinstance(value, torch.Tensor)]
    if others and axis.rank == 0:
        warnings.warn(f"{_CALLER}: not saved, because these are no tensors: {', '.join(others)}", stacklevel=3)


# Write


def _write(
    opened: SaveFolder,
    files: Sequence[File],
    rights: int | None,
    axis: Axis,
    device: torch.device | None,
    advance: Callable[[int], object],
) -> OSError | None:
    """Write ``files``; the rank with index i on ``axis`` writes file i. A rank that cannot write returns its error.
    ``advance`` is called with the bytes that some rank has gathered."""
    gathered = _gathered_in_turn(files, axis, device, advance)
    problem: OSError | None = None
    if axis.rank < len(files):
        mine = files[axis.rank]
        try:
            with _writing(opened.path / mine.name), opened.create(mine.new_name, rights) as out:
                out.write(mine.header)
                for tensor in gathered:
                    out.write(_bytes_of(tensor))
                    del tensor  # before the next one is gathered
                out.flush()
                os.fsync(out.fileno())
        except OSError as error:
            problem = error
    for _ in gathered:  # the others need this rank, even if it cannot write
        pass
    return problem


def _gathered_in_turn(
    files: Sequence[File], axis: Axis, device: torch.device | None, advance: Callable[[int], object]
) -> Iterator[torch.Tensor]:
    """Gather one tensor of each of ``files`` after another. Yields those of this rank's file, on the CPU."""
    gatherings = [_Gathering(owner, axis, device) for owner in range(len(files))]
    for index in range(max(len(file.entries) for file in files)):
        kept: torch.Tensor | None = None
        for gathering, file in zip(gatherings, files, strict=True):
            if index < len(file.entries):
                values = gathering.values(file.entries[index])
                if values is not None:
                    kept = values.cpu().contiguous()
                del values
                advance(file.entries[index].nbytes)
        if kept is not None:
            yield kept


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Add the file name to errors of the system in this block, since that of a full disk lacks it, and the remedy."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{_CALLER}: {path} could not be written ({type(error).__name__}: {error}). The checkpoint that was in the "
            "folder is there. Make room, or pass a folder that all ranks see and may write."
        ) from error


class _Gathering:
    """Brings tensors to the rank ``owner`` of ``axis``. Keeps the last whole tensor of which a key was a part, since
    the next keys are other parts of it. All ranks make the same decision whether to gather it."""

    def __init__(self, owner: int, axis: Axis, device: torch.device | None) -> None:
        self._owner, self._axis, self._device = owner, axis, device
        self._kept: tuple[Weight, torch.dtype] | None = None
        self._whole: torch.Tensor | None = None

    def values(self, entry: Entry) -> torch.Tensor | None:
        """The tensor of ``entry`` on the owner, in the dtype of the file; None elsewhere."""
        if len(entry.parts) == 1:
            ((weight, piece),) = entry.parts
            part = self._part(weight, piece, entry.dtype)
            if all(box.stop - box.start == size for box, size in zip(piece.box, weight.shape, strict=True)):
                self._kept = self._whole = None  # no other key is a part of it
            return part
        values: torch.Tensor | None = None
        for weight, piece in entry.parts:
            part = self._part(weight, piece, entry.dtype)
            if part is not None:
                values = torch.empty(entry.shape, dtype=entry.dtype) if values is None else values
                values[piece.key_box].copy_(part)
            del part
        return values

    def _part(self, weight: Weight, piece: Piece, dtype: torch.dtype) -> torch.Tensor | None:
        if self._kept is None or self._kept[0] is not weight or self._kept[1] is not dtype:
            self._kept = self._whole = None  # freed before another one is gathered
            whole = _gathered(weight, dtype, self._owner, self._axis, self._device)
            self._whole = None if whole is None else whole.cpu()
            self._kept = weight, dtype
        if self._whole is None:
            return None
        shape = [part.stop - part.start for part in piece.key_box]
        return self._whole[piece.box].permute(piece.order).reshape(shape)


def _gathered(
    weight: Weight, dtype: torch.dtype, owner: int, axis: Axis, device: torch.device | None
) -> torch.Tensor | None:
    """The whole tensor in the dtype of the file, on the rank ``owner`` of ``axis``. A plain tensor is taken from the
    first rank, and is sent by way of ``device``. Shards are sent only to the owner, and other replicas do nothing; on
    accelerators, and if model axes cut the tensor, all ranks gather it."""
    # Backends differ in how messages are ordered with streams, and an all-gather is fast on accelerators.
    if axis.group is not None and weight.is_cut_once and weight.managed[1].mesh.device.type == "cpu":
        return _sent_to(dist.get_global_rank(axis.group, owner), weight, dtype)
    whole = weight.whole(dtype)
    if axis.group is not None and not isinstance(weight.tensor, DTensor):
        sent = whole.to(device, copy=True, memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        dist.broadcast(sent, group=axis.group, group_src=0)
        whole = sent.view(dtype).reshape(whole.shape)
    return whole if owner == axis.rank else None


@torch.no_grad()
def _sent_to(rank: int, weight: Weight, dtype: torch.dtype) -> torch.Tensor | None:
    """The whole tensor on the global ``rank``, from the shards of its replica."""
    _, param = weight.managed
    layout, group, is_mine = param.layout, param.mesh.shard.group, dist.get_rank() == rank
    assert group is not None
    if rank not in dist.get_process_group_ranks(group):
        return None
    sent = packed(param, plain_values(weight.local, dtype))
    got = sent.new_empty(layout.padded_numel if is_mine else 0)
    comms.wait_for(send_to(rank, group, [sent.view(torch.uint8)], [got.view(torch.uint8)]))
    return joined(param, got) if is_mine else None


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU. NumPy has this built in, but the package does not use it."""
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""
    return memoryview(memory)


# Replace the old checkpoint


def _commit(opened: SaveFolder, files: Sequence[File], token: str) -> None:
    """Make ``files`` the checkpoint of the folder, and remove the old one. A reader looks for the only file first, and
    then for the index."""
    new_names = [file.new_name for file in files]
    try:
        others = opened.others(new_names)
        opened.sync()
        place = _publish(opened, files, new_names, token)
    except OSError:  # the new checkpoint is not in place; the old one still is
        opened.remove([*new_names, _unfinished_index(token)])
        raise
    _check_in_place(opened, files, new_names, token)
    opened.remove_unchanged({name: version for name, version in others.items() if name != place})
    if len(files) > 1:
        if opened.has(ONE_FILE):
            raise OSError(
                f"{_CALLER}: {opened.path / ONE_FILE} cannot be removed, and is what readers find instead of the new "
                f"checkpoint, {INDEX}. Remove it."
            )
        new_names = _usual_names(opened, files, new_names, token)
    _check_in_place(opened, files, new_names, token)


def _publish(opened: SaveFolder, files: Sequence[File], names: Sequence[str], token: str) -> str:
    """With one rename, make ``files``, which now have ``names``, the checkpoint. Returns the name that it replaces."""
    unfinished, place = (names[0], ONE_FILE) if len(files) == 1 else (_unfinished_index(token), INDEX)
    if place == INDEX:
        with _writing(opened.path / place):
            _write_index(opened, files, names, token)
    _check_seen(opened, files, names)
    with _writing(opened.path / place):
        opened.replace(unfinished, place)
    return place


def _check_seen(opened: SaveFolder, files: Sequence[File], names: Sequence[str]) -> None:
    """Raise if this rank does not see a file as it was written."""
    stays = "The checkpoint that was in the folder is there."
    if not opened.is_at_path():
        raise OSError(f"{_CALLER}: {opened.path} was replaced during the save. {stays} Save again.")
    for file, name in zip(files, names, strict=True):
        found = _problem_of(opened, file, name)
        if found is not None:
            raise OSError(
                f"{_CALLER}: {opened.path / name} was written with {file.nbytes} bytes, but rank 0 finds {found}. "
                f"{stays} Pass a folder that all ranks see, and that nothing else writes to."
            )


def _problem_of(opened: SaveFolder, file: File, name: str) -> str | None:
    """What this rank finds under ``name`` instead of ``file``."""
    try:
        nbytes, header = opened.beginning(name, len(file.header))
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    if nbytes != file.nbytes:
        return f"{nbytes} bytes"
    return None if header == file.header else "another file"


def _check_in_place(opened: SaveFolder, files: Sequence[File], names: Sequence[str], token: str) -> None:
    """Detect other saves, which no lock keeps out on some file systems."""
    if len(files) == 1:
        is_ours = _problem_of(opened, files[0], ONE_FILE) is None
    else:
        is_ours = (opened.index().get("metadata") or {}).get(TOKEN) == token and all(map(opened.has, names))
    if not is_ours:
        raise OSError(
            f"{_CALLER}: another save has replaced the new checkpoint in {opened.path}. Let one save at a time write "
            "there, and save again."
        )


def _usual_names(opened: SaveFolder, files: Sequence[File], new_names: list[str], token: str) -> list[str]:
    """Give files their usual names, which may have belonged to the old checkpoint until now, and return the names that
    they end up with. Each file briefly has both names."""
    linked = {}
    try:
        for file in files:
            opened.link(file.new_name, file.name)
            linked[file.name] = opened.version(file.new_name)
        _publish(opened, files, list(linked), token)
    except OSError:  # no hard links, or no room for another index: the one with the new names stays
        opened.remove_unchanged(linked)
        opened.remove([_unfinished_index(token)])
        return new_names
    opened.remove(new_names)
    opened.sync()
    return list(linked)


def _write_index(opened: SaveFolder, files: Sequence[File], names: Sequence[str], token: str) -> None:
    entries = [entry for file in files for entry in file.entries]
    index = {
        "metadata": {"total_size": sum(entry.nbytes for entry in entries), TOKEN: token},
        "weight_map": {entry.key: name for file, name in zip(files, names, strict=True) for entry in file.entries},
    }
    rights, unfinished = opened.rights(), _unfinished_index(token)
    opened.remove([unfinished])  # the marker
    with io.TextIOWrapper(opened.create(unfinished, rights)) as out:
        json.dump(index, out, indent=2)
        out.flush()
        os.fsync(out.fileno())
