"""What a stream yields, and in which buckets: decided before anything is sent.

Weights in, places in flat buckets out. Nothing here communicates, or depends on what only one rank has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fsdp2.checkpoint.weights import Rename, Weight, renamed
from fsdp2.core import plans

Function = Callable[..., Mapping[str, torch.Tensor]]
Transform = Mapping[str | tuple[str, ...], Function]


@dataclass(frozen=True)
class StreamedTensor:
    """One whole tensor, and the byte of its bucket at which it begins."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class BucketManifest:
    """The contents of one bucket. It is plain data, the same on all ranks: pickle it for the receiver of the bucket.

    Attributes:
        tensors: the tensors in order; each begins at a multiple of 128 bytes.
        nbytes: the size of the bucket.
    """

    tensors: tuple[StreamedTensor, ...]
    nbytes: int

    def cut(self, flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """``(name, tensor)`` for all tensors, as views of ``flat``, the bytes of the bucket: ``uint8`` of shape
        ``[nbytes]``.

        Raises:
            ValueError: ``flat`` has a different dtype or shape.
        """
        if flat.dtype is not torch.uint8 or flat.shape != (self.nbytes,):
            raise ValueError(
                f"BucketManifest.cut: got {flat.dtype} of shape {tuple(flat.shape)}, expected torch.uint8 of shape "
                f"({self.nbytes},). Receive the bucket into torch.empty(manifest.nbytes, dtype=torch.uint8)."
            )
        return [
            (each.name, flat[each.offset : each.offset + each.nbytes].view(each.dtype).view(each.shape))
            for each in self.tensors
        ]


@dataclass(frozen=True)
class StreamedBucket:
    """Whole tensors that lie one after another in one buffer.

    Attributes:
        flat: the buffer, ``uint8`` of shape ``[manifest.nbytes]``, which fits into one message.
        tensors: ``(name, tensor)``, views of ``flat``, plain and contiguous.
        manifest: where each tensor lies. The receiver of ``flat`` calls ``manifest.cut``.
    """

    flat: torch.Tensor
    tensors: list[tuple[str, torch.Tensor]]
    manifest: BucketManifest


@dataclass(frozen=True)
class Item:
    """Tensors that are yielded together.

    Attributes:
        weights: the weights that are sent.
        dtypes: the dtypes in which they are sent.
        outputs: what the caller gets, not in a bucket yet.
        function: makes ``outputs`` from the whole ``weights``; None if the only output is the only weight.
        keys: the names that ``function`` gives to its outputs.
    """

    weights: tuple[Weight, ...]
    dtypes: tuple[torch.dtype, ...]
    outputs: tuple[StreamedTensor, ...]
    function: Function | None = None
    keys: tuple[str, ...] = ()

    @property
    def travelling_nbytes(self) -> int:
        pairs = zip(self.weights, self.dtypes, strict=True)
        sizes = [math.prod(weight.whole_like[0]) * dtype.itemsize for weight, dtype in pairs]
        return plans.pack(sizes, plans.ALIGNMENT_NBYTES)[1]

    @property
    def nbytes(self) -> int:
        """The size of this item's part of the bucket."""
        return plans.pack([each.nbytes for each in self.outputs], plans.ALIGNMENT_NBYTES)[1]


@dataclass(frozen=True)
class PlannedBucket:
    items: tuple[Item, ...]
    manifest: BucketManifest


def plan_stream(
    weights: Sequence[Weight],
    dtype: torch.dtype | None,
    transform: Transform | None,
    rename: Rename | None,
    max_nbytes: int | None,
    caller: str,
) -> tuple[PlannedBucket, ...]:
    """Plan buckets in the order of ``weights``: of at most ``max_nbytes``, or one for each unit."""
    functions = _resolved(transform, weights, caller)
    items = [item for item in _items(weights, dtype, functions, rename, caller) if item.outputs]
    _check_names(items, caller)
    if max_nbytes is None:
        by_unit = itertools.groupby(items, lambda each: id(each.weights[0].group or each))
        cut = [list(unit) for _, unit in by_unit]
    else:
        cut = _by_nbytes(items, max_nbytes)
    return tuple(PlannedBucket(tuple(each), _manifest(each)) for each in cut)


def called(function: Function, tensors: Sequence[torch.Tensor], weights: Sequence[Weight], caller: str) -> Any:
    """The result of ``function`` for ``tensors``."""
    where = f"{caller}: transform of {', '.join(repr(each.names[0]) for each in weights)}"
    kind = ", called with meta tensors to see what it returns," if any(each.is_meta for each in tensors) else ""
    try:
        made = function(*tensors)
    except Exception as error:
        raise RuntimeError(f"{where}{kind} raised {type(error).__name__}: {error}") from error
    if not isinstance(made, Mapping) or not all(
        isinstance(name, str) and isinstance(each, torch.Tensor) for name, each in made.items()
    ):
        raise TypeError(f"{where} returned a {type(made).__name__}, expected a mapping of names to tensors.")
    return made


def _resolved(transform: object, weights: Sequence[Weight], caller: str) -> dict[int, tuple[list[Weight], Function]]:
    """Maps the first weight that a function takes to all that it takes, in its order, and to the function."""
    if transform is None:
        return {}
    if not isinstance(transform, Mapping):
        raise TypeError(
            f"{caller}: transform is a {type(transform).__name__}, expected a mapping of names, or of tuples of names, "
            "to functions of their whole tensors."
        )
    by_name = {name: weight for weight in weights for name in weight.names}
    order = {id(weight): index for index, weight in enumerate(weights)}
    found: dict[int, tuple[list[Weight], Function]] = {}
    taken: set[int] = set()
    for key, function in transform.items():
        names = (key,) if isinstance(key, str) else key
        if not isinstance(names, tuple) or not names or not callable(function):
            raise TypeError(
                f"{caller}: transform maps {key!r} to a {type(function).__name__}, expected names and a function."
            )
        for name in names:
            if name not in by_name:
                raise ValueError(
                    f"{caller}: transform takes {name!r}, which is not streamed. Take names of the state dict; buffers "
                    "need buffers=True."
                )
            if id(by_name[name]) in taken:
                raise ValueError(f"{caller}: transform takes '{name}' twice. Make one function of both.")
            taken.add(id(by_name[name]))
        given = [by_name[name] for name in names]
        found[min(map(id, given), key=order.__getitem__)] = (given, function)
    return found


def _items(
    weights: Sequence[Weight],
    dtype: torch.dtype | None,
    functions: Mapping[int, tuple[list[Weight], Function]],
    rename: Rename | None,
    caller: str,
) -> Iterator[Item]:
    taken = {id(weight) for given, _ in functions.values() for weight in given}
    for weight in weights:
        if id(weight) in functions:
            given, function = functions[id(weight)]
            shapes, dtypes = zip(*(each.whole_like for each in given), strict=True)
            metas = [torch.empty(s, dtype=d, device="meta") for s, d in zip(shapes, dtypes, strict=True)]
            made = called(function, metas, given, caller)
            names = {key: renamed(key, rename) for key in made}
            kept = tuple(key for key in made if names[key] is not None)
            outputs = tuple(StreamedTensor(str(names[key]), tuple(made[key].shape), made[key].dtype, 0) for key in kept)
            yield Item(tuple(given), dtypes, outputs, function, kept)
        elif id(weight) not in taken:
            name, (shape, own) = renamed(weight.names[0], rename), weight.whole_like
            cast = dtype if dtype is not None and own.is_floating_point else own
            outputs = () if name is None else (StreamedTensor(name, shape, cast, 0),)
            yield Item((weight,), (cast,), outputs)


def _check_names(items: Sequence[Item], caller: str) -> None:
    origin: dict[str, str] = {}
    for item in items:
        for each in item.outputs:
            source = item.weights[0].names[0]
            if each.name in origin:
                raise ValueError(
                    f"{caller}: what is made of '{origin[each.name]}' and of '{source}' would both be named "
                    f"'{each.name}'. Let rename, or transform, give each its own name."
                )
            origin[each.name] = source


def _by_nbytes(items: Sequence[Item], max_nbytes: int) -> list[list[Item]]:
    """Group items so that neither what is sent for a bucket nor the bucket is larger, unless a single item is."""
    cut: list[list[Item]] = []
    travelling = nbytes = 0
    for item in items:
        travelling, nbytes = travelling + item.travelling_nbytes, nbytes + item.nbytes
        if not cut or max(travelling, nbytes) > max_nbytes:
            cut.append([])
            travelling, nbytes = item.travelling_nbytes, item.nbytes
        cut[-1].append(item)
    return cut


def _manifest(items: Sequence[Item]) -> BucketManifest:
    outputs = [each for item in items for each in item.outputs]
    offsets, nbytes = plans.pack([each.nbytes for each in outputs], plans.ALIGNMENT_NBYTES)
    placed = [replace(each, offset=offset) for each, offset in zip(outputs, offsets, strict=True)]
    return BucketManifest(tuple(placed), nbytes)
