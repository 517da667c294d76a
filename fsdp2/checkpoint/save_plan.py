"""What ``save_safetensors`` writes: which tensors in which files, under which keys, made of which parts of the model.

All ranks compute the same plan from their models, without files or process groups. ``digest_of`` lets them check that.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from fsdp2.checkpoint.mapping import MappingLike, Shape, listed
from fsdp2.checkpoint.pieces import Piece, Resolved, resolved_to_save, whole_piece
from fsdp2.checkpoint.weights import (
    DTYPES,
    TOKEN,
    Rename,
    Weight,
    WeightInFiles,
    check_dtype,
    renamed,
)

_CALLER = "save_safetensors"
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_HEADER_ALIGNMENT = 8
_METADATA = "__metadata__"  # the key in headers that is not a tensor


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its key, its shape and dtype there, and the parts of the model that it is made of."""

    key: str
    shape: Shape
    dtype: torch.dtype
    parts: tuple[tuple[Weight, Piece], ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def names(self) -> str:
        return ", ".join(dict.fromkeys(f"'{piece.name}'" for _, piece in self.parts))


@dataclass(frozen=True)
class File:
    """One file of the checkpoint: its final name, the name that it is written under, its tensors, and the token of its
    save."""

    name: str
    new_name: str
    entries: tuple[Entry, ...]
    token: str

    @functools.cached_property
    def header(self) -> bytes:
        """The beginning of the safetensors file: the size of the header, and where each tensor lies after it."""
        header: dict[str, object] = {_METADATA: {"format": "pt", TOKEN: self.token}}
        end = 0
        for entry in self.entries:
            start, end = end, end + entry.nbytes
            shape = list(entry.shape)
            header[entry.key] = {"dtype": _CODES[entry.dtype], "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _HEADER_ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(entry.nbytes for entry in self.entries)


def entries_of(
    weights: Sequence[Weight], dtype: torch.dtype | None, rename: Rename | None, mapping: MappingLike | None
) -> list[Entry]:
    """The entries in the order of the model; those of a rule come where its first tensor is."""
    weights = [each for weight in weights for each in weight.in_files()]
    by_name = {name: weight for weight in weights for name in weight.names}
    shapes = {name: weight.shape for name, weight in by_name.items()}
    rules = resolved_to_save(mapping, [weight.names[0] for weight in weights], shapes, _CALLER)
    made: dict[int, list[Entry]] = {id(weight): [] for weight in weights}
    by_rule: set[int] = set()
    order = {id(weight): index for index, weight in enumerate(weights)}
    for rule in rules:
        packed = [name for name in rule.names if isinstance(by_name[name], WeightInFiles)]
        if packed:
            raise ValueError(f"{_CALLER}: mapping: {listed(packed)}: no rule can write 4-bit weights otherwise.")
        parts = {id(by_name[name]) for name in rule.names}
        by_rule |= parts
        made[min(parts, key=order.__getitem__)] += _made_by(rule, by_name, dtype)
    for weight in weights:
        key = None if id(weight) in by_rule else renamed(weight.names[0], rename)
        if key is not None:
            piece = whole_piece(weight.names[0], key, weight.shape)
            made[id(weight)].append(Entry(key, weight.shape, weight.dtype_in_files(dtype), ((weight, piece),)))
    found: dict[str, Entry] = {}
    for entry in (entry for entries in made.values() for entry in entries):
        _add(found, entry)
    return list(found.values())


def _made_by(rule: Resolved, by_name: dict[str, Weight], dtype: torch.dtype | None) -> list[Entry]:
    check_dtype(rule.dtype, f"{_CALLER}: mapping")
    parts: dict[str, list[tuple[Weight, Piece]]] = {key: [] for key in rule.keys}
    for piece in rule.pieces:
        parts[piece.key].append((by_name[piece.name], piece))
    entries = []
    for key, shape in rule.keys.items():
        dtypes = {weight.dtype_in_files(rule.dtype or dtype) for weight, _ in parts[key]}
        if len(dtypes) != 1:
            names = ", ".join(f"'{piece.name}'" for _, piece in parts[key])
            raise ValueError(
                f"{_CALLER}: mapping: '{key}' would be made of {names}, whose dtypes differ. Pass dtype=, or give the "
                "rule one."
            )
        entries.append(Entry(key, shape, dtypes.pop(), tuple(parts[key])))
    return entries


def _add(found: dict[str, Entry], entry: Entry) -> None:
    if entry.key == _METADATA:
        raise ValueError(
            f"{_CALLER}: {entry.names} would get the key '{entry.key}', which safetensors reserves. Let rename give it "
            "another key."
        )
    if entry.key in found:
        raise ValueError(
            f"{_CALLER}: {found[entry.key].names} and {entry.names} are both renamed to '{entry.key}'. Let rename give "
            "each its own key."
        )
    found[entry.key] = entry
    if entry.dtype not in _CODES:
        raise ValueError(
            f"{_CALLER}: safetensors has no name for {entry.dtype}, the dtype of {entry.names}. Pass "
            "dtype=torch.float32, or another one that it names."
        )


def files_of(entries: Sequence[Entry], max_nbytes: int, token: str) -> list[File]:
    """``entries`` in their order, split where the next one would make a file too large. Within a file, wide dtypes come
    first, so that each tensor starts at a multiple of its item size, as readers that map the file require."""
    cut: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if cut[-1] and filled + entry.nbytes > max_nbytes:
            cut.append([])
            filled = 0
        cut[-1].append(entry)
        filled += entry.nbytes
    for each in cut:
        each.sort(key=lambda entry: -entry.dtype.itemsize)
    stems = ["model"]
    if len(cut) > 1:
        stems = [f"model-{i:05d}-of-{len(cut):05d}" for i in range(1, len(cut) + 1)]
    return [
        File(f"{stem}.safetensors", f"{stem}.{tag_of(token)}.safetensors", tuple(each), token)
        for stem, each in zip(stems, cut, strict=True)
    ]


def digest_of(files: Sequence[File]) -> str:
    """A digest of everything that ranks must have in common."""
    said = [
        (file.name, each.key, str(each.dtype), each.shape, piece, isinstance(weight.tensor, DTensor))
        for file in files
        for each in file.entries
        for weight, piece in each.parts
    ]
    return hashlib.sha256(repr(said).encode()).hexdigest()


def tag_of(token: str) -> str:
    """The part of the token that is used in names of unfinished files."""
    return token[:8]
