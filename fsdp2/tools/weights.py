"""Whole weights of a sharded model, in and out: load safetensors files into shards.

``Weight`` is one tensor of a model: which entries of the whole tensor this rank holds, and the whole tensor, gathered.
``save_weights`` and ``stream_weights`` hand out what ``Weight`` gathers. Rule: files are checked on all ranks before
the first shard is written.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from fsdp2 import _torch
from fsdp2.api.empty_buffers import empty_buffers
from fsdp2.api.state import bound_state
from fsdp2.comm.together import axis_of, together
from fsdp2.extras.lending import check_idle, gathered, joined, packed
from fsdp2.group.group import ParamGroup, groups_by_slot
from fsdp2.group.hooked_params import is_plain
from fsdp2.group.param import IN_FILES, WHOLE, ShardedParam, Slot, joined_along_dim_0, whole_subclass
from fsdp2.plan.mesh import mesh_device
from fsdp2.tensors.in_files import FileTensor
from fsdp2.tools.checkpoint_mapping import MappingLike, Shape, listed
from fsdp2.tools.checkpoint_pieces import Piece, Resolved, Run, reads, resolved_to_load, runs, whole_piece
from fsdp2.tools.progress import progress

Rename = Mapping[str, str] | Callable[[str], str | None]

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# How the headers of safetensors files call dtypes.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_MAX_LISTED = 20


class LoadedKeys(NamedTuple):
    """What did not match, as :func:`load_safetensors` returns it: names of the model that no file has, and keys of the
    files that the model does not have."""

    missing_keys: list[str]
    unexpected_keys: list[str]


# One tensor of a model


@dataclass(frozen=True)
class Weight:
    """A parameter or a persistent buffer, as it is bound between passes.

    Attributes:
        names: in the state dict; tied weights have several.
        tensor: the parameter or buffer; a DTensor if it is cut or replicated.
        group, param: what ``fully_shard`` knows of it; None if it does not manage the tensor.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    group: ParamGroup | None = None
    param: ShardedParam | None = None

    @property
    def local(self) -> torch.Tensor:
        """What this rank has of it, without autograd; shares the memory."""
        return (_torch.local_of(self.tensor) if isinstance(self.tensor, DTensor) else self.tensor).detach()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor in files."""
        return tuple(self.tensor.shape)

    @property
    def is_packed(self) -> bool:
        """Whether compute reads other values than the shards have: ``whole`` makes them."""
        return self.param is not None and hasattr(self.local, WHOLE)

    @property
    def whole_like(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of what ``whole`` returns, if nothing is cast."""
        if self.is_packed:
            dense: tuple[tuple[int, ...], torch.dtype] = self.local.dense_like  # type: ignore[attr-defined]
            return dense
        return tuple(self.tensor.shape), self.tensor.dtype

    def dtype_in_files(self, dtype: torch.dtype | None) -> torch.dtype:
        """If the user has asked for ``dtype``."""
        return cast_dtype(self.tensor, dtype)

    def in_files(self) -> list[Weight]:
        """The tensors that files have of it: itself, but a tensor subclass may have ``fsdp2_in_files``, which gives one
        or more by what comes behind the name."""
        made: Mapping[str, FileTensor] = {}
        if self.param is not None and not self.local.is_meta:
            made = getattr(self.local, IN_FILES, dict)()
        return [
            WeightInFiles(tuple(name + suffix for name in self.names), self.tensor, self.group, self.param, piece)
            for suffix, piece in made.items()
        ] or [self]

    def along(self) -> list[list[Run]]:
        """Which entries of the whole tensor this rank has, for each dim."""
        param, tensor = self.param, self.tensor
        along: list[Sequence[int]] = [range(size) for size in tensor.shape]
        if param is None:
            if isinstance(tensor, DTensor):
                along = _cut(tensor.device_mesh, tensor.placements, tensor.shape)
        elif along:  # every rank holds whole scalars
            before = param.spec.unsharded
            if before is not None:
                along = _cut(before.mesh, before.placements, before.shape)
            start, stop = param.layout.interval(param.mesh.shard.rank)
            along[param.layout.dim] = along[param.layout.dim][start:stop]
        return [runs(entries) for entries in along]

    def whole(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The whole tensor, plain, cast to ``dtype``. Collective on the tensor's mesh; a plain tensor is this rank's
        own. It is cast before it travels."""
        with torch.no_grad():
            if self.param is not None and self.is_packed:
                values: torch.Tensor = whole_subclass(self.param, self.local).dequantise()  # type: ignore[attr-defined]
                return values.to(cast_dtype(values, dtype))
            local = _plain(self.local, dtype)
            if self.group is not None and self.param is not None:
                own = self.param.spec.unsharded_tensor(gathered(self.group, self.param, local))
                return own.full_tensor() if isinstance(own, DTensor) else own
            if not isinstance(self.tensor, DTensor):
                return local
            return _torch.dtensors_like([self.tensor], [local])[0].full_tensor()

    def whole_on(self, rank: int, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """The whole tensor as ``whole`` has it, but on the global ``rank`` only; None elsewhere. Shards travel to that
        rank alone, and other replicas do nothing. On accelerators, and if model axes cut it, all ranks gather it."""
        mine, param = dist.get_rank() == rank, self.param
        is_simple = param is not None and param.spec.unsharded is None and param.layout.num_shards > 1
        # Backends differ in how messages follow streams; an all-gather is fast on accelerators.
        if param is None or not is_simple or param.mesh.device.type != "cpu":
            whole = self.whole(dtype)
            return whole if mine else None
        layout, group = param.layout, param.mesh.shard.group
        ranks = dist.get_process_group_ranks(group)
        if rank not in ranks or layout.padded_numel == 0:
            return self.local.new_empty(self.tensor.shape) if mine else None
        with torch.no_grad():
            sent = packed(param, _plain(self.local, dtype))
            if not mine:
                _do([dist.P2POp(dist.isend, sent.view(torch.uint8), rank, group)])
                return None
            got = sent.new_empty(layout.num_shards, layout.chunk_numel)
            got[param.mesh.shard.rank] = sent
            rows = zip(ranks, got.view(torch.uint8), strict=True)
            _do([dist.P2POp(dist.irecv, row, peer, group) for peer, row in rows if peer != rank])
            return joined(param, got.view(-1))


@dataclass(frozen=True)
class WeightInFiles(Weight):
    """One of several tensors that files have of a parameter. It is never cast."""

    piece: FileTensor | None = None

    @property
    def _piece(self) -> FileTensor:
        assert self.piece is not None
        return self.piece

    @property
    def shape(self) -> tuple[int, ...]:
        return self._piece.shape

    def dtype_in_files(self, dtype: torch.dtype | None) -> torch.dtype:
        return self._piece.dtype

    def whole(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        piece, whole = self._piece, self._piece.tensor.detach()
        if piece.is_cut and isinstance(self.tensor, DTensor):
            whole = joined_along_dim_0(self.tensor, whole)
        nbytes = math.prod(piece.shape) * piece.dtype.itemsize
        return whole.contiguous().view(-1).view(torch.uint8)[:nbytes].view(piece.dtype).view(piece.shape)

    def whole_on(self, rank: int, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        whole = self.whole(dtype)
        return whole if dist.get_rank() == rank else None

    def is_dense_in(self, opened: Any, key: str) -> bool:
        """Whether the file has the weight itself."""
        header, dense = opened.get_slice(key), self._piece.dense
        dtype = DTYPES.get(header.get_dtype())
        is_number = dtype is not None and dtype.is_floating_point
        return dense is not None and is_number and tuple(header.get_shape()) == dense.shape

    def problem_of(self, opened: Any, key: str, file: Path) -> str:
        piece, header = self._piece, opened.get_slice(key)
        if piece.check is not None:
            problem = piece.check(opened.get_tensor(key))
            advice = "Make the model with the options of the files"
            return f"'{key}' in {file.name} does not fit: {problem}. {advice}." if problem else ""
        found = tuple(header.get_shape()), DTYPES.get(header.get_dtype())
        if found == (piece.shape, piece.dtype) or self.is_dense_in(opened, key):
            return ""
        dense = f", or floating-point numbers of shape {piece.dense.shape}" if piece.dense else ""
        return (
            f"'{key}' has shape {found[0]} and dtype {header.get_dtype()} in {file.name}, expected {piece.shape} and "
            f"{piece.dtype}{dense}."
        )

    def load(self, opened: Any, key: str) -> None:
        piece = self._piece
        if piece.write is not None:
            piece.write(opened.get_tensor(key))
        elif piece.is_cut and not self.is_dense_in(opened, key):
            start, stop = self._rows
            mine = piece.tensor.view(-1).view(torch.uint8)
            row_nbytes = mine.numel() // max(stop - start, 1)
            first = start * row_nbytes // piece.dtype.itemsize
            values = opened.get_slice(key)[first : first + mine.numel() // piece.dtype.itemsize]
            mine[: values.nbytes].copy_(values.contiguous().view(-1).view(torch.uint8))
        elif not piece.is_cut:
            piece.tensor.copy_(opened.get_tensor(key))

    def load_dense(self, opened: Any, key: str) -> torch.Tensor:
        """Quantise this rank's part of ``key``. Returns what the ranks then need of each other."""
        dense = self._piece.dense
        assert dense is not None
        start, stop = (min(row * dense.row_numel, math.prod(dense.shape)) for row in self._rows)
        width = math.prod(dense.shape[1:])
        rows = opened.get_slice(key)[start // width : -(-stop // width)] if stop > start else torch.empty(0)
        before = start // width * width
        return dense.quantise(rows.reshape(-1)[start - before : stop - before])

    def finish_dense(self, mine: torch.Tensor) -> None:
        """Collective."""
        dense = self._piece.dense
        if dense is not None and dense.finish is not None and isinstance(self.tensor, DTensor):
            dense.finish(joined_along_dim_0(self.tensor, mine), self._rows[0])

    @property
    def _rows(self) -> tuple[int, int]:
        assert self.param is not None
        return self.param.layout.interval(self.param.mesh.shard.rank)


def _do(messages: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(messages):
        work.wait()


def weights_of(model: nn.Module, caller: str) -> list[Weight]:
    """The tensors of ``model``'s state dict in its order. Reshards, and takes over what users put in place of shards.

    Raises:
        ScheduleError: a forward or backward runs, or ``fsdp2.unsharded`` has lent parameters.
    """
    check_idle(model, caller)
    by_slot = groups_by_slot()
    slots = [Slot(module, name) for module in model.modules() for name in _torch.parameters_dict(module)]
    groups = dict.fromkeys(by_slot[slot][0] for slot in slots if slot in by_slot)
    for group in groups:
        group.take_replaced()
    managed = {id(param.sharded): (group, param) for group in groups for param in group.params}
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in bound_state(model).items():
        if isinstance(tensor, torch.Tensor):  # modules may have other things in it, as "extra state"
            tensors[id(tensor)] = tensor
            names.setdefault(id(tensor), []).append(name)
    return [Weight(tuple(names[key]), tensor, *managed.get(key, ())) for key, tensor in tensors.items()]


def check_ready(weights: Sequence[Weight], caller: str) -> None:
    """Refuse weights that this rank cannot gather.

    Raises:
        RuntimeError: a tensor is on the meta device.
        ValueError: a tensor is on a mesh without this rank.
    """
    for weight in weights:
        if isinstance(weight.tensor, DTensor) and weight.tensor.device_mesh.get_coordinate() is None:
            raise ValueError(
                f"{caller}: '{weight.names[0]}' is on {weight.tensor.device_mesh}, which rank {dist.get_rank()} is not "
                "in. Call it on the ranks of that mesh only, with their group."
            )
        if weight.local.is_meta:
            raise RuntimeError(
                f"{caller}: '{weight.names[0]}' is still on the meta device. Call model.to_empty(device=...), and "
                "initialise or load the values first."
            )


def cast_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of ``tensor`` after a cast that concerns floating-point tensors only."""
    return dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype


def _plain(local: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The values of ``local`` as a plain tensor. A subclass gives them when it is copied into a plain tensor."""
    wanted = cast_dtype(local, dtype)
    if is_plain(local):
        return local.to(wanted)
    return torch.empty(local.shape, dtype=wanted, device=local.device).copy_(local)


def _cut(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> list[Sequence[int]]:
    """For each dim, the entries that this rank has: torch itself cuts the numbers of the entries."""
    along: list[Sequence[int]] = []
    for dim, size in enumerate(shape):
        cuts = [_torch.shards_dim(placement, dim) for placement in placements]
        if not any(cuts):
            along.append(range(size))
            continue
        of_dim = [_torch.as_of_dim_0(each) if cut else Replicate() for each, cut in zip(placements, cuts, strict=True)]
        numbers = torch.arange(size, device=mesh_device(mesh))
        along.append(distribute_tensor(numbers, mesh, of_dim, src_data_rank=None).to_local().tolist())
    return along


def renamed(key: str, rename: Rename | None) -> str | None:
    """``key`` under its new name; None to leave it out.

    Raises:
        TypeError: ``rename`` is no mapping and no function, or gives something else.
        RuntimeError: it raised.
    """
    new: str | None = key
    if isinstance(rename, Mapping):
        new = rename.get(key, key)
    elif callable(rename):
        try:
            new = rename(key)
        except Exception as error:
            raise RuntimeError(f"rename('{key}') raised {type(error).__name__}: {error}") from error
    elif rename is not None:
        raise TypeError(f"rename is a {type(rename).__name__}, expected a mapping or a function of a name.")
    if new is not None and not isinstance(new, str):
        raise TypeError(f"rename gives {new!r} for '{key}', expected a name, or None to leave the tensor out.")
    return new


def check_dtype(dtype: object, caller: str) -> None:
    """Refuse what floating-point tensors must not be cast to.

    Raises:
        TypeError: ``dtype`` is no dtype, or not of floating-point numbers.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"{caller}: dtype is {dtype!r}, expected a floating-point dtype, such as torch.bfloat16.")


def extra(name: str, caller: str) -> Any:
    """The module ``name`` of an optional dependency.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        text = f"{caller} needs {name}, which is not installed. Run: pip install 'fsdp2[weights]'"
        raise ImportError(text) from error


# Load


class _Header(NamedTuple):
    """What a file says of a tensor."""

    file: Path
    shape: Shape
    code: str


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

    All ranks must call it. Each rank reads only the slices that it holds, from files that all ranks see. Floating-point
    values are cast to the dtype of the model. All files are checked on all ranks before anything is written. A model on
    the meta device needs ``to_empty`` first. A warning names non-persistent buffers, which no file has, that nobody has
    filled since. Of tied weights, the files need one name. A tensor subclass takes values
    as its ``copy_`` does: a quantised one quantises them. 4-bit weights of bitsandbytes take what it writes itself, or
    the weights themselves, which it quantises shard by shard.

    Args:
        model: the model, or a part of it, whose names are those of its own state dict.
        path_or_index: a ``.safetensors`` file, an index (``.json``), or a folder with ``model.safetensors`` or
            ``model.safetensors.index.json``.
        rename: maps a key of the files to a name of the model: a mapping, in which keys may be absent, or a function,
            which returns None to leave a key out.
        mapping: for tensors that the files have stacked, concatenated, split or transposed: a list of ``WeightRule`` of
            ``fsdp2.tools.checkpoint_mapping``, or ``transformers_mapping(model)`` of
            ``fsdp2.tools.transformers_mapping``. ``rename`` gets the keys that no rule is about.
        strict: whether missing and unexpected keys are errors. A tensor of which files have only some parts always is.
        group: the ranks that load together. Default: all ranks.

    Returns:
        The missing and the unexpected keys.

    Raises:
        ValueError: files are cut off or not there, keys are missing or unexpected, shapes or dtypes differ, a parameter
            is on the meta device, elements of a buffer share memory. One error lists all problems, on all ranks. The
            model is unchanged. Also: ``mapping`` does not fit the model.
        FileNotFoundError: ``path_or_index`` does not exist, or the folder has no checkpoint.
        TypeError: ``rename`` is of the wrong type, or gives something else than names.
        ScheduleError: a forward or backward runs, or parameters are lent to ``fsdp2.unsharded``.
        RuntimeError: a file could not be read after the checks. The model is loaded half.
        ImportError: safetensors is not installed.
    """
    axis = axis_of(group)
    with together(axis):
        library = extra("safetensors", "load_safetensors")
        weights = weights_of(model, "load_safetensors")
        checked = _Checked(weights, rename, mapping)
        for file, listed in _files(Path(path_or_index)).items():
            checked.add(library, file, listed)
        checked.finish(library)
        problems = checked.problems(strict)
        if problems:
            name = type(model).__name__.removeprefix("FSDP")
            raise ValueError(
                f"load_safetensors: {path_or_index} does not fit this {name}. Nothing was loaded.\n"
                + "\n".join(f"- {each}" for each in problems)
            )
        plan = checked.plan()
    with together(axis):
        shards = {id(shard): shard for pieces in plan.values() for _, shard in pieces}
        total = sum(shard.weight.local.nbytes for shard in shards.values())
        with progress("load", total, "B", is_first=axis.rank == 0) as advance:
            for file, pieces in plan.items():
                _load_file(library, file, pieces, advance)
    with together(axis):
        for shard in shards.values():
            shard.finish()
    _warn_of_empty_buffers(model)
    return LoadedKeys(checked.missing, checked.unexpected)


def _warn_of_empty_buffers(model: nn.Module) -> None:
    names = [each.full_name for each in empty_buffers(model)]
    if not names:
        return
    listed = ", ".join(f"'{name}'" for name in names[:_MAX_LISTED])
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    owner, _, name = names[0].rpartition(".")
    buffer = f"model.get_submodule('{owner}').{name}" if owner else f"model.{name}"
    warnings.warn(
        f"load_safetensors: no checkpoint has non-persistent buffers, and nobody has filled {listed}{more} since they "
        f"were on the meta device. Fill them before the first forward: {buffer} = value, with the value that the "
        "constructor of the module computes.",
        stacklevel=4,  # the caller of load_safetensors, behind torch.no_grad
    )


class _Shard:
    """What this rank has of ``weight``, while it takes ``num_pieces``. A subclass takes its values at once: so they are
    put together first."""

    def __init__(self, weight: Weight, num_pieces: int) -> None:
        self.weight = weight
        self._along, self._num_left = weight.along(), num_pieces
        self._values: torch.Tensor | None = None

    def take(self, opened: Any, piece: Piece) -> int:
        """Copy ``piece`` from the file. Returns the number of bytes that the shard has got."""
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
        return numel * local.dtype.itemsize

    def finish(self) -> None:
        """All files were read. Collective."""


class _PackedShard(_Shard):
    """What this rank has of one of several tensors that files have of a parameter."""

    weight: WeightInFiles
    _dense: torch.Tensor | None = None  # what was quantised on the way: what the ranks then need of each other

    def take(self, opened: Any, piece: Piece) -> int:
        if self.weight.is_dense_in(opened, piece.key):
            self._dense = self.weight.load_dense(opened, piece.key)
        else:
            self.weight.load(opened, piece.key)
        return self.weight.local.nbytes

    def finish(self) -> None:
        if self._dense is not None:
            self.weight.finish_dense(self._dense)


def _load_file(
    library: Any, file: Path, pieces: Sequence[tuple[Piece, _Shard]], advance: Callable[[int], object]
) -> None:
    key = ""
    try:
        with library.safe_open(file, framework="pt") as opened:
            for piece, shard in pieces:
                key = piece.key
                advance(shard.take(opened, piece))
    except Exception as error:
        raise RuntimeError(
            f"load_safetensors: reading '{key}' of {file} failed with {type(error).__name__}: {error}\n"
            "The file was readable before. The model is loaded half: load again before you use it."
        ) from error


def _values_of(
    opened: Any, piece: Piece, along: Sequence[Sequence[Run]]
) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
    """What a rank with the entries ``along`` has of ``piece``: where it goes, and the values, which nothing has read
    yet."""
    for read in reads(piece, along):
        values = _slice_of(opened, piece.key, read.of_key).permute(piece.key_order)
        yield read.local, values.reshape([part.stop - part.start for part in read.local])


def _slice_of(opened: Any, key: str, part: tuple[slice, ...]) -> torch.Tensor:
    """A part of ``key``. The file is mapped into memory, so only what is copied from there is read."""
    return opened.get_slice(key)[part]


def _files(path: Path) -> dict[Path, set[str] | None]:
    """The files of a checkpoint, each with the keys that the index lists for it; None without an index.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: ``path`` is neither kind of file, or the index cannot be read.
    """
    if path.is_dir():
        # In this order, as transformers looks for them. save_safetensors counts on it.
        found = next((path / name for name in (ONE_FILE, INDEX) if (path / name).exists()), None)
        if found is None:
            there = sorted(each.name for each in path.glob("*.safetensors*"))
            raise FileNotFoundError(
                f"load_safetensors: the folder {path} has neither {ONE_FILE} nor {INDEX}. "
                f"Pass the path of a file or index. There are: {', '.join(there[:_MAX_LISTED]) or 'none'}."
            )
        path = found
    if not path.exists():
        raise FileNotFoundError(f"load_safetensors: {path} does not exist on this rank.")
    if path.suffix == ".safetensors":
        return {path: None}
    if path.suffix != ".json":
        raise ValueError(f"load_safetensors: {path}: expected a folder, a .safetensors file, or an index (.json).")
    try:
        file_of = json.loads(path.read_text())["weight_map"]
        listed: dict[Path, set[str] | None] = {path.parent / name: set() for name in sorted(set(file_of.values()))}
        for key, name in file_of.items():
            listed[path.parent / name].add(key)  # type: ignore[union-attr]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"load_safetensors: the index {path} cannot be read: {type(error).__name__}: {error}. "
            'Expected JSON with a "weight_map" from keys to names of files.'
        ) from error
    return listed


class _Checked:
    """Compares what files have with what the model needs, from headers alone.

    Attributes:
        missing: first names of weights that no file has.
        unexpected: keys that are no names of the model.
    """

    def __init__(self, weights: Sequence[Weight], rename: Rename | None, mapping: MappingLike | None) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self._weights, self._rename = [each for weight in weights for each in weight.in_files()], rename
        self._mapping = mapping
        self._by_name = {name: weight for weight in self._weights for name in weight.names}
        self._dense: set[int] = set()  # ids of parameters that the files have as one tensor
        self._headers: dict[str, _Header] = {}
        self._sources: dict[str, list[Piece]] = {}
        self._absent: dict[str, str] = {}  # names with a rule, and a key of it, if no file has any
        self._unreadable: list[str] = []
        self._others: list[str] = []

    def add(self, library: Any, file: Path, listed: set[str] | None) -> None:
        """Read the header of ``file``."""
        try:
            with library.safe_open(file, framework="pt") as opened:
                # In the order of the data, so that the disk reads forward; older versions only have keys().
                keys = list(getattr(opened, "offset_keys", opened.keys)())
                for key in [key for key in keys if listed is None or key in listed]:
                    header = opened.get_slice(key)
                    self._headers[key] = _Header(file, tuple(header.get_shape()), header.get_dtype())
        except (OSError, library.SafetensorError) as error:
            self._unreadable.append(f"{file} cannot be read: {type(error).__name__}: {error}")
            return
        for key in sorted((listed or set()) - set(keys)):
            self._others.append(f"'{key}' is not in {file.name}, where the index says it is.")

    def finish(self, library: Any) -> None:
        """All files were added."""
        self._match(library)
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
        if not self._others and not self._unreadable:
            self._compare_tied(library)

    def _match(self, library: Any) -> None:
        """Find for each name of the model what it is in the files."""
        claimed: set[str] = set()
        if not self._unreadable or self._mapping is None:
            files = {key: header.shape for key, header in self._headers.items()}
            for rule in resolved_to_load(self._mapping, files, shapes_of(self._by_name), "load_safetensors"):
                claimed.update(rule.keys)
                self._add_rule(rule)
        for key in self._headers:
            if key not in claimed:
                self._add_key(library, key)

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

    def _add_key(self, library: Any, key: str) -> None:
        name = renamed(key, self._rename)
        if name is None:
            return
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
            self._check_packed(library, key, weight)
        else:
            self._check_header(key, weight.shape, weight)

    def _check_packed(self, library: Any, key: str, weight: WeightInFiles) -> None:
        file = self._headers[key].file
        with library.safe_open(file, framework="pt") as opened:
            if problem := weight.problem_of(opened, key, file):
                self._others.append(problem)
            elif weight.is_dense_in(opened, key):
                self._dense.add(id(weight.tensor))

    def _check_header(self, key: str, expected: Shape, weight: Weight) -> None:
        (file, shape, code), wanted = self._headers[key], weight.tensor.dtype
        dtype, problem = DTYPES.get(code), None
        if shape != expected:
            problem = f"'{key}' has shape {shape} in {file.name}, expected {expected}."
        elif dtype is not wanted and not (dtype and dtype.is_floating_point and wanted.is_floating_point):
            problem = f"'{key}' is {code} in {file.name}, which cannot be cast to {wanted}."
        if problem is not None and problem not in self._others:
            self._others.append(problem)

    def _compare_tied(self, library: Any) -> None:
        """Files may have a tied weight under several names. Then values are read here, since only one can be loaded."""
        for weight in self._weights:
            found = [self._sources[name] for name in weight.names if name in self._sources]
            if isinstance(weight, WeightInFiles):
                continue  # the first name counts
            for pieces, others in itertools.pairwise(found):
                values = [self._read(library, each, weight) for each in (pieces, others)]
                if not torch.equal(*values):
                    first, other = pieces[0].key, others[0].key
                    self._others.append(f"'{first}' and '{other}' differ, but the model ties them.")

    def _read(self, library: Any, pieces: Sequence[Piece], weight: Weight) -> torch.Tensor:
        values, along = torch.empty(weight.local.shape, dtype=weight.tensor.dtype, device="cpu"), weight.along()
        for piece in pieces:
            with library.safe_open(self._headers[piece.key].file, framework="pt") as opened:
                for box, found in _values_of(opened, piece, along):
                    values[box].copy_(found)
        return values

    def problems(self, strict: bool) -> list[str]:
        """One line each, with its remedy."""
        found = _first_of(self._unreadable) + _first_of(self._others)
        missing = [f"'{name}'" + self._why(name) for name in self.missing]
        unexpected = [f"'{key}'" for key in self.unexpected]
        for what, keys in (("Missing in the files", missing), ("Not in the model", unexpected)):
            if keys and strict:
                more = f" and {len(keys) - _MAX_LISTED} more" if len(keys) > _MAX_LISTED else ""
                named = ", ".join(keys[:_MAX_LISTED])
                found.append(f"{what}: {named}{more}. Pass rename=..., or strict=False to leave them out.")
        return found

    def _why(self, name: str) -> str:
        key = next((self._absent[each] for each in self._by_name[name].names if each in self._absent), None)
        return "" if key is None else f" (by the mapping from '{key}')"

    def plan(self) -> dict[Path, list[tuple[Piece, _Shard]]]:
        """By file, what to read in the order of the file: each weight once."""
        by_key: dict[str, list[tuple[Piece, _Shard]]] = {}
        for weight in self._weights:
            name = next((each for each in weight.names if each in self._sources), None)
            pieces = [] if name is None else self._sources[name]
            shard = (_PackedShard if isinstance(weight, WeightInFiles) else _Shard)(weight, len(pieces))
            for piece in pieces:
                by_key.setdefault(piece.key, []).append((piece, shard))
        plan: dict[Path, list[tuple[Piece, _Shard]]] = {}
        for key, header in self._headers.items():
            if key in by_key:
                plan.setdefault(header.file, []).extend(by_key[key])
        return plan


def shapes_of(by_name: Mapping[str, Weight]) -> dict[str, Shape]:
    """The shape of each whole tensor."""
    return {name: weight.shape for name, weight in by_name.items()}


def _shares_memory(tensor: torch.Tensor) -> bool:
    """Whether elements of ``tensor`` lie at one address, so that ``copy_`` refuses to write them."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(size > 1 and stride == 0 for size, stride in sizes)


def _first_of(lines: Sequence[str]) -> list[str]:
    more = len(lines) - _MAX_LISTED
    return [*lines[:_MAX_LISTED], *([f"... and {more} more like these."] if more > 0 else [])]
