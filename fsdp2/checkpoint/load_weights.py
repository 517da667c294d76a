"""``load_safetensors``: load files in Hugging Face's layout into shards.

Rule: files are checked on all ranks before the first shard is written, and are never reopened by name.
"""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.checkpoint.mapping import MAX_LISTED, MappingLike, Shape, listed
from fsdp2.checkpoint.open_checkpoint import OpenCheckpoint, open_together
from fsdp2.checkpoint.pieces import Piece, Resolved, Run, reads, resolved_to_load, whole_piece
from fsdp2.checkpoint.weights import (
    DTYPES,
    Rename,
    Weight,
    WeightInFiles,
    extra,
    renamed,
    weights_of,
)
from fsdp2.core import Axis, is_plain
from fsdp2.extras import output
from fsdp2.extras.checked import check
from fsdp2.extras.empty_buffers import empty_buffers
from fsdp2.extras.exchange import axis_of, together
from fsdp2.extras.foreign_files import printable
from fsdp2.extras.half_loaded import said_if_interrupted
from fsdp2.extras.lending import joined_along_dim_0
from fsdp2.extras.output import progress
from fsdp2.extras.plain_names import plain_name
from fsdp2.tensors.in_files import DenseWeight


class LoadedKeys(NamedTuple):
    """The mismatches that :func:`load_safetensors` returns: names in the model that no file has, and keys in the files
    that the model does not have."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@torch.no_grad()
def load_safetensors(
    model: nn.Module,
    path_or_index: str | os.PathLike[str],
    *,
    rename: Rename | None = None,
    mapping: MappingLike | None = None,
    strict: bool = True,
    group: dist.ProcessGroup | None = None,
) -> LoadedKeys:
    """Load safetensors files into the parameters and persistent buffers of ``model``, sharded or not.

    All ranks must call it. Each rank reads only the slices that it holds, from files that all ranks see or have copies
    of. Floating-point values are cast to the dtype of the model. All files are checked on all ranks before anything is
    written. If ``save_safetensors`` replaces them meanwhile, either all ranks load the old ones or all load the new
    ones. A model on the meta device needs ``to_empty`` first. Non-persistent buffers are in no file; a warning names
    those that are still unfilled. For tied weights, the files need only one name. Tensor subclasses take values through
    ``copy_``, so a quantised one quantises them. 4-bit weights of bitsandbytes load from its own format, or from the
    original weights, which are quantised shard by shard.

    Args:
        model: the model, or a part of it. Names are those of its own state dict, without wrappers. Keys of the files
            may include wrappers, as those of ``state_dict()`` do under ``torch.compile``.
        path_or_index: a ``.safetensors`` file, an index (``.json``), or a folder with ``model.safetensors`` or
            ``model.safetensors.index.json``.
        rename: maps a key in the files to a name in the model: either a mapping, which need not have all keys, or a
            function, which returns None to leave a key out.
        mapping: handles tensors that are stacked, concatenated, split or transposed in the files: a list of
            ``WeightRule`` from ``fsdp2.checkpoint.mapping``, or ``transformers_mapping(model)`` from
            ``fsdp2.checkpoint.from_transformers``. ``rename`` gets the keys that no rule covers.
        strict: whether missing and unexpected keys are errors. A tensor with only some parts in the files always is.
        group: the ranks that load together. Default: all ranks.

    Returns:
        The missing and the unexpected keys.

    Raises:
        ValueError: files are truncated or absent, keys are missing or unexpected, shapes or dtypes differ, a parameter
            is on the meta device, elements of a buffer share memory. One error lists all problems, on all ranks. The
            model is unchanged. Also: ``mapping`` does not fit the model; ranks find different checkpoints; files come
            from two saves.
        FileNotFoundError: ``path_or_index`` does not exist, or the folder has no checkpoint.
        TypeError: ``rename`` is of the wrong type, or returns something other than names.
        ScheduleError: a forward or backward is running, or parameters are lent to ``fsdp2.unsharded``.
        RuntimeError: files keep being replaced: the model is unchanged. Or a file was overwritten, or could not be
            read, after the checks: the model is partly loaded.
        ImportError: safetensors is not installed.
    """
    axis = axis_of(group)
    with together(axis):
        check("load_safetensors: path_or_index", path_or_index, "path")
        check("load_safetensors: strict", strict, "bool")
        library = extra("safetensors", "load_safetensors")
        weights = weights_of(model, "load_safetensors")
        path = Path(path_or_index)
    checkpoint = open_together(axis, library, path)
    with together(axis):
        if checkpoint.problem is not None:
            raise checkpoint.problem
        checked = _Checked(model, weights, rename, mapping, checkpoint)
        problems = checked.problems(strict)
        if problems:
            name = type(model).__name__.removeprefix("FSDP")
            raise ValueError(
                f"load_safetensors: {path_or_index} does not fit this {name}. Nothing was loaded.\n"
                + "\n".join(f"- {printable(each)}" for each in problems)
            )
        plan = checked.plan()
    with said_if_interrupted(model, "load_safetensors"):
        _write(axis, checkpoint, plan)
    _warn_of_empty_buffers(model)
    return LoadedKeys(checked.missing, checked.unexpected)


def _write(axis: Axis, checkpoint: OpenCheckpoint, plan: dict[Path, list[tuple[Piece, _Shard]]]) -> None:
    with together(axis):
        shards = {id(shard): shard for pieces in plan.values() for _, shard in pieces}
        total = sum(shard.weight.local.nbytes for shard in shards.values())
        with progress("load", total, "B", is_first=axis.rank == 0) as advance:
            for file, pieces in plan.items():
                _load_file(checkpoint, file, pieces, advance)
    with together(axis):
        for shard in shards.values():
            shard.finish()


def _warn_of_empty_buffers(model: nn.Module) -> None:
    found = empty_buffers(model)
    if not found:
        return
    names = listed([each.full_name for each in found])
    path, name = found[0].path, found[0].name
    buffer = f"model.get_submodule('{path}').{name}" if path else f"model.{name}"
    warnings.warn(
        f"load_safetensors: no checkpoint has non-persistent buffers, and nobody has filled {names} since they "
        f"were on the meta device. Fill them before the first forward: {buffer} = value, with the value that the "
        "constructor of the module computes.",
        stacklevel=4,  # the caller of load_safetensors, beyond torch.no_grad
    )


class _Shard:
    """This rank's part of ``weight``, while it receives ``num_pieces`` pieces. A subclass must take all its values at
    once, so they are assembled first."""

    def __init__(self, weight: Weight, num_pieces: int) -> None:
        self.weight = weight
        self._along, self._num_left = weight.along(), num_pieces
        self._values: torch.Tensor | None = None

    def take(self, opened: Any, piece: Piece) -> int:
        """Copy ``piece`` from the file. Returns the number of bytes that the shard received."""
        local, numel = self.weight.local, 0
        for box, values in _values_of(opened, piece, self._along):
            if values.shape == local.shape:
                local.copy_(values)
            elif is_plain(local):
                local[box].copy_(values)
            else:
                if self._values is None:
                    self._values = torch.empty(local.shape, dtype=values.dtype, device=values.device)
                self._values[box].copy_(values)
            numel += values.numel()
        self._num_left -= 1
        if self._num_left == 0 and self._values is not None:
            local.copy_(self._values)
            self._values = None
        elif self._num_left == 0 and local.numel() == 0:
            local.zero_()  # all ranks write, so that whatever depends on writes is the same on all
        return numel * local.dtype.itemsize

    def finish(self) -> None:
        """Called after all files were read. Collective."""


class _PackedShard(_Shard):
    """This rank's part of one of several tensors that the files have for a parameter. With ``is_dense``, the files have
    the parameter itself, which is quantised while it is loaded."""

    def __init__(self, weight: WeightInFiles, *, is_dense: bool) -> None:
        _, param = weight.managed
        self.weight, self._piece = weight, weight.piece
        self._start, self._stop = param.layout.interval(param.mesh.shard.rank)
        self._dense = weight.piece.dense if is_dense else None

    def take(self, opened: Any, piece: Piece) -> int:
        mine = self._piece.tensor
        if self._dense is not None:
            self._found = self._quantised(self._dense, opened, piece.key)
        elif self._piece.write is not None:
            self._piece.write(opened.get_tensor(piece.key))
        elif self._piece.is_cut:
            mine, itemsize = mine.view(-1).view(torch.uint8), self._piece.dtype.itemsize
            first = self._start * (mine.numel() // max(self._stop - self._start, 1)) // itemsize
            values = _slice_of(opened, piece.key, (slice(first, first + mine.numel() // itemsize),))
            mine[: values.nbytes].copy_(values.contiguous().view(-1).view(torch.uint8))
        else:
            mine.copy_(opened.get_tensor(piece.key))
        return self.weight.local.nbytes

    def _quantised(self, dense: DenseWeight, opened: Any, key: str) -> torch.Tensor:
        """Quantise this rank's rows. Returns what the ranks then need from each other."""
        numel, width = math.prod(dense.shape), math.prod(dense.shape[1:])
        start, stop = (min(row * dense.row_numel, numel) for row in (self._start, self._stop))
        first = start // width
        rows = opened.get_slice(key)[first : -(-stop // width)] if stop > start else torch.empty(0)
        return dense.quantise(rows.reshape(-1)[start - first * width : stop - first * width])

    def finish(self) -> None:
        tensor = self.weight.tensor
        if self._dense is not None and self._dense.finish is not None and isinstance(tensor, DTensor):
            self._dense.finish(joined_along_dim_0(tensor, self._found), self._start)


def _load_file(
    checkpoint: OpenCheckpoint, file: Path, pieces: Sequence[tuple[Piece, _Shard]], advance: Callable[[int], object]
) -> None:
    key, opened = "", checkpoint.opened.pop(file)  # unmapped when this function returns
    try:
        with torch.device("cpu"):  # safetensors makes tensors on the default device, which may be the meta device
            for piece, shard in pieces:
                key = piece.key
                advance(shard.take(opened, piece))
    except Exception as error:
        raise RuntimeError(
            f"load_safetensors: reading '{key}' of {file} failed with {type(error).__name__}: {error}\n"
            "The file was readable before. The model is loaded half: load again before you use it."
        ) from error
    if checkpoint.is_overwritten(file):
        raise RuntimeError(
            f"load_safetensors: {file} was overwritten while it was read. The model is loaded half: load again before "
            "you use it."
        )


def _values_of(
    opened: Any, piece: Piece, along: Sequence[Sequence[Run]]
) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
    """The parts of ``piece`` that a rank with the entries ``along`` holds: where each one goes, and its values, which
    are not read yet."""
    for read in reads(piece, along):
        values = _slice_of(opened, piece.key, read.of_key).permute(piece.key_order)
        yield read.local, values.reshape([part.stop - part.start for part in read.local])


def _slice_of(opened: Any, key: str, part: tuple[slice, ...]) -> torch.Tensor:
    """A part of ``key``. The file is memory-mapped, so only what is copied from it is read."""
    return opened.get_slice(key)[part]


class _Checked:
    """Compares the contents of the files with what the model needs, using only headers.

    Attributes:
        missing: the first names of weights that no file has.
        unexpected: keys that are not names in the model.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Sequence[Weight],
        rename: Rename | None,
        mapping: MappingLike | None,
        checkpoint: OpenCheckpoint,
    ) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self._model, self._rename = model, rename
        self._weights = [each for weight in weights for each in weight.in_files()]
        self._mapping = mapping
        self._by_name = {name: weight for weight in self._weights for name in weight.names}
        self._dense: set[int] = set()  # ids of parameters that the files have as one tensor
        self._opened, self._headers = checkpoint.opened, checkpoint.headers
        self._sources: dict[str, list[Piece]] = {}
        self._absent: dict[str, str] = {}  # names whose rule has no key in any file, each with one of these keys
        self._unreadable, self._others = checkpoint.unreadable, list(checkpoint.absent)
        self._match()
        self._check()

    def _check(self) -> None:
        for weight in self._weights:
            found = [name for name in weight.names if name in self._sources]
            if not found and not self._unreadable and id(weight.tensor) not in self._dense:
                self.missing.append(weight.names[0])
            if weight.local.is_meta:
                self._others.append(
                    f"'{weight.names[0]}' of the model is on the meta device. Call model.to_empty(device=...) first."
                )
            if found and _shares_memory(weight.local):
                self._others.append(
                    f"'{weight.names[0]}' of the model has elements that share memory, as after expand(), so it cannot "
                    "take their values. Make it contiguous() first."
                )
            if isinstance(weight.tensor, DTensor) and any(each.is_partial() for each in weight.tensor.placements):
                self._others.append(f"'{weight.names[0]}' of the model is a sum that is still pending.")
            self._others += [text for name in found for text in self._scaled(self._sources[name], weight)]
        if not self._others and not self._unreadable:
            self._compare_tied()

    def _scaled(self, pieces: Sequence[Piece], weight: Weight) -> Iterator[str]:
        """Problems with 8-bit ``pieces`` that have scales: a cast to a wider dtype would ignore the scales."""
        keys = [piece.key for piece in pieces if piece.key in self._headers]
        for key in [key for key in keys if self._headers[key].code.startswith("F8_")]:
            scales = [scale for scale in (f"{key}_scale", f"{key}_scale_inv") if scale in self._headers]
            if scales and weight.local.dtype.itemsize > 1:
                yield (
                    f"'{key}' is in 8 bits, and to be multiplied by '{scales[0]}', which a load into "
                    f"{weight.local.dtype} does not do. Write files without scales first: load these with "
                    "from_pretrained(..., dtype=torch.bfloat16), which dequantises, and save_pretrained."
                )

    def _match(self) -> None:
        """Find the tensors in the files for each name in the model."""
        claimed: set[str] = set()
        if not self._unreadable or self._mapping is None:
            files = {key: header.shape for key, header in self._headers.items()}
            shapes = {name: weight.shape for name, weight in self._by_name.items()}
            for rule in resolved_to_load(self._mapping, files, shapes, "load_safetensors"):
                claimed.update(rule.keys)
                self._add_rule(rule)
        for key in self._headers:
            if key not in claimed:
                self._add_key(key)

    def _add_rule(self, rule: Resolved) -> None:
        absent = [key for key in rule.keys if key not in self._headers]
        if len(absent) == len(rule.keys):
            self._absent.update(dict.fromkeys(rule.names, absent[0]))
            return
        if absent:
            self._others.append(
                f"{listed(rule.names)} would be made of {len(rule.keys)} tensors, but no file has {listed(absent)}."
            )
        packed = [name for name in rule.names if isinstance(self._by_name[name], WeightInFiles)]
        if packed:
            self._others.append(f"{listed(packed)}: no rule can make 4-bit weights of other tensors.")
            return
        for piece in rule.pieces:
            self._sources.setdefault(piece.name, []).append(piece)
            if piece.key in self._headers:
                self._check_header(piece.key, rule.keys[piece.key], self._by_name[piece.name])

    def _add_key(self, key: str) -> None:
        name = renamed(key, self._rename)
        if name is None:
            return
        if name not in self._by_name:  # state_dict() includes wrappers in its keys
            name = plain_name(self._model, name)
        weight = self._by_name.get(name)
        if weight is None:
            self.unexpected.append(key)
            return
        if name in self._sources or name in self._absent:
            other = self._absent[name] if name in self._absent else self._sources[name][0].key
            what = f"'{key}' and '{other}' are both"
            self._others.append(f"{what} renamed to '{name}'." if self._mapping is None else f"{what} '{name}'.")
            return
        self._sources[name] = [whole_piece(name, key, weight.shape)]
        if isinstance(weight, WeightInFiles):
            self._check_packed(key, weight)
        else:
            self._check_header(key, weight.shape, weight)

    def _check_packed(self, key: str, weight: WeightInFiles) -> None:
        piece, (file, shape, code) = weight.piece, self._headers[key]
        dtype, dense = DTYPES.get(code), piece.dense
        if piece.check is not None:
            if problem := piece.check(self._opened[file].get_tensor(key)):
                problem = f"'{key}' in {file.name} does not fit: {problem}"
                self._others.append(f"{problem}. Make the model with the options of the files.")
        elif dense is not None and dtype is not None and dtype.is_floating_point and shape == dense.shape:
            self._dense.add(id(weight.tensor))
        elif (shape, dtype) != (piece.shape, piece.dtype):
            expected = f"{piece.shape} and {piece.dtype}"
            expected += f", or floating-point numbers of shape {dense.shape}" if dense else ""
            self._others.append(f"'{key}' has shape {shape} and dtype {code} in {file.name}, expected {expected}.")

    def _check_header(self, key: str, expected: Shape, weight: Weight) -> None:
        (file, shape, code), wanted = self._headers[key], weight.tensor.dtype
        dtype, problem = DTYPES.get(code), None
        if shape != expected:
            problem = f"'{key}' has shape {shape} in {file.name}, expected {expected}."
        elif dtype is not wanted and not (dtype and dtype.is_floating_point and wanted.is_floating_point):
            problem = f"'{key}' is {code} in {file.name}, which cannot be cast to {wanted}."
        if problem is not None and problem not in self._others:
            self._others.append(problem)

    def _compare_tied(self) -> None:
        """Compare tied weights that the files have under several names, since only one can be loaded. Reads values."""
        for weight in self._weights:
            found = [self._sources[name] for name in weight.names if name in self._sources]
            if isinstance(weight, WeightInFiles):
                continue  # the first name is used
            for pieces, others in itertools.pairwise(found):
                one, another = (self._read(each, weight) for each in (pieces, others))
                if not torch.allclose(one, another, rtol=0.0, atol=0.0, equal_nan=True):  # equal() lacks float8
                    first, other = pieces[0].key, others[0].key
                    self._others.append(f"'{first}' and '{other}' differ, but the model ties them.")

    def _read(self, pieces: Sequence[Piece], weight: Weight) -> torch.Tensor:
        values, along = torch.empty(weight.local.shape, dtype=weight.tensor.dtype, device="cpu"), weight.along()
        for piece in pieces:
            for box, found in _values_of(self._opened[self._headers[piece.key].file], piece, along):
                values[box].copy_(found)
        return values

    def problems(self, strict: bool) -> list[str]:
        """One line for each problem, with its remedy."""
        rest = "... and {} more like these."
        found = output.first_lines(self._unreadable, MAX_LISTED, rest)
        found += output.first_lines(self._others, MAX_LISTED, rest)
        missing = [f"'{name}'" + self._why(name) for name in self.missing]
        unexpected = [f"'{key}'" for key in self.unexpected]
        for what, keys in (("Missing in the files", missing), ("Not in the model", unexpected)):
            if keys and strict:
                names = output.listed(keys, MAX_LISTED)
                found.append(f"{what}: {names}. Pass rename=..., or strict=False to leave them out.")
        return found

    def _why(self, name: str) -> str:
        key = next((self._absent[each] for each in self._by_name[name].names if each in self._absent), None)
        return "" if key is None else f" (by the mapping from '{key}')"

    def plan(self) -> dict[Path, list[tuple[Piece, _Shard]]]:
        """What to read from each file, in the order of the file: each weight once."""
        by_key: dict[str, list[tuple[Piece, _Shard]]] = {}
        for weight in self._weights:
            pieces = next((self._sources[name] for name in weight.names if name in self._sources), [])
            if isinstance(weight, WeightInFiles):
                shard: _Shard = _PackedShard(weight, is_dense=id(weight.tensor) in self._dense)
            else:
                shard = _Shard(weight, len(pieces))
            for piece in pieces:
                by_key.setdefault(piece.key, []).append((piece, shard))
        plan: dict[Path, list[tuple[Piece, _Shard]]] = {}
        for key in (key for key in self._headers if key in by_key):
            plan.setdefault(self._headers[key].file, []).extend(by_key[key])
        return plan


def _shares_memory(tensor: torch.Tensor) -> bool:
    """Whether elements of ``tensor`` lie at one address, so that ``copy_`` refuses to write them."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(size > 1 and stride == 0 for size, stride in sizes)
