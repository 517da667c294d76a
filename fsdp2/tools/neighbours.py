"""Which tensors lie right behind each other in memory, and may be read and written as one.

Decided by address, size and storage alone, so it holds for whatever lies there. ``runs.py`` acts on it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2 import _torch

# Gradients that do not touch each other are copied behind each other if they are no larger. A copy of 64 KiB costs
# about as much as one more tensor in the step of an optimizer.
COPY_MAX_NBYTES = 64 * 1024


_nbytes_of, _dtype_of = attrgetter("nbytes"), attrgetter("dtype")


class Buffers:
    """Flat tensors, found by address."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = sorted((tensor for tensor in tensors if tensor.data_ptr() != 0), key=torch.Tensor.data_ptr)
        self._starts = [tensor.data_ptr() for tensor in self._tensors]

    def find(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The flat tensor in which ``tensor`` starts."""
        address = tensor.data_ptr()
        index = bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._starts[index] + self._tensors[index].nbytes:
            return None
        return self._tensors[index]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """``parts``, contiguous and of one dtype, as one 1-D tensor, if they touch each other in one flat tensor."""
        first, numel = parts[0], sum(part.numel() for part in parts)
        if len(parts) == 1:
            return first.view(-1)
        if numel == 0:
            return first.new_empty(0)
        buffer = self.find(first)
        if buffer is None or buffer.dtype is not first.dtype or not all(map(_touch, parts, parts[1:])):
            return None
        start = (first.data_ptr() - buffer.data_ptr()) // buffer.itemsize
        return buffer.narrow(0, start, numel) if start + numel <= buffer.numel() else None


class Apart(Enum):
    """A gradient that is no part of a run: DTensor's own operations have to deal with it."""

    APART = "apart"


# Per parameter: None without a gradient; else whether it touches that of the parameter before, and its dtype.
Code = tuple[bool, torch.dtype] | Apart | None


def codes_of(grads: Sequence[torch.Tensor | None], locals_: Sequence[torch.Tensor | None]) -> list[Code]:
    """How gradients lie, given their local tensors, None for those that are not placed like their parameter."""
    codes: list[Code] = []
    end = 0
    for grad, local in zip(grads, locals_, strict=True):
        if local is None:
            codes.append(None if grad is None else Apart.APART)
            end = -1
        elif not local.is_contiguous():
            codes.append((False, local.dtype))
            end = -1
        else:
            start = local.data_ptr()
            codes.append((start == end, local.dtype))
            end = start + local.nbytes
    return codes


def touch_throughout(codes: Sequence[Code]) -> bool:
    """Whether each of these gradients touches the one before."""
    return all(isinstance(code, tuple) and code[0] for code in codes[1:])


def spanned(first: torch.Tensor, numel: int) -> torch.Tensor | None:
    """The ``numel`` elements from the first one of ``first`` on; None where its storage ends before, or its own
    elements do not lie behind each other."""
    offset = int(first.storage_offset())
    if not first.is_contiguous() or (offset + numel) * first.itemsize > first.untyped_storage().nbytes():
        return None
    return first.as_strided((numel,), (1,), offset)


def cuts_of(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """How ``joined`` makes few of ``tensors``: the position of the first one, and the number of elements, for each."""
    starts, sizes, dtypes = (list(map(get, tensors)) for get in (torch.Tensor.data_ptr, _nbytes_of, _dtype_of))
    are_flat = list(map(torch.Tensor.is_contiguous, tensors))
    found: list[tuple[int, int]] = []
    end, dtype, left = 0, None, 0
    for i in sorted(range(len(tensors)), key=starts.__getitem__):
        size, numel = sizes[i], tensors[i].numel()
        if size == 0:
            continue
        if starts[i] == end and dtypes[i] is dtype and are_flat[i] and size <= left:
            found[-1] = (found[-1][0], found[-1][1] + numel)
            left -= size
        else:
            found.append((i, numel))
            dtype = dtypes[i]
            # No further than its storage: what follows it in memory by chance is another's.
            offset_nbytes = int(tensors[i].storage_offset()) * tensors[i].itemsize
            left = tensors[i].untyped_storage().nbytes() - offset_nbytes - size if are_flat[i] else 0
        end = starts[i] + size
    return found


def joined(tensors: Sequence[torch.Tensor], cuts: Sequence[tuple[int, int]]) -> list[torch.Tensor] | None:
    """The elements of ``tensors`` in as few tensors as memory allows, cut as ``cuts_of`` says: those of one dtype
    that touch each other in one storage are one 1-D view, in the order of their addresses; empty ones are left out.
    None if they do not lie that way any more."""
    found = []
    for first, numel in cuts:
        whole = tensors[first] if tensors[first].numel() == numel else spanned(tensors[first], numel)
        if whole is None:
            return None
        found.append(whole)
    return found


def spans(keys: Sequence[object], codes: Sequence[Code], numels: Sequence[int]) -> list[range]:
    """Intervals of equal ``keys`` that are not None, cut where gradients do not touch, unless both sides are small."""
    found: list[range] = []
    was_small = False
    for stretch, follows in _stretches(keys, codes):
        _, dtype = codes[stretch.start]  # type: ignore[misc]
        is_small = sum(numels[stretch.start : stretch.stop]) * dtype.itemsize <= COPY_MAX_NBYTES
        if follows and is_small and was_small:
            found[-1] = range(found[-1].start, stretch.stop)
        else:
            found.append(stretch)
        was_small = is_small
    return found


def _stretches(keys: Sequence[object], codes: Sequence[Code]) -> Iterator[tuple[range, bool]]:
    """Intervals of equal keys whose gradients touch, and whether the interval right before has the same key."""
    start = 0
    for stop in range(1, len(keys) + 1):
        is_alike = stop < len(keys) and keys[stop] == keys[stop - 1]
        if is_alike and (keys[start] is None or codes[stop][0]):  # type: ignore[index]
            continue
        if keys[start] is not None:
            yield range(start, stop), start > 0 and keys[start] == keys[start - 1]
        start = stop


def touching(params: Sequence[DTensor], buffers: Buffers) -> Iterator[tuple[list[DTensor], torch.Tensor]]:
    """``params`` whose shards touch each other in one of ``buffers``, and those shards as one tensor. Empty shards have
    no address; all of one dtype count as touching."""
    ordered = sorted(params, key=_place)
    start = 0
    for stop in range(1, len(ordered) + 1):
        if stop < len(ordered) and _touch_in(buffers, *_torch.locals_of(ordered[stop - 1 : stop + 1])):
            continue
        flat = buffers.join(_torch.locals_of(ordered[start:stop]))
        assert flat is not None
        yield ordered[start:stop], flat
        start = stop


def is_flat(param: torch.Tensor) -> bool:
    """Whether ``param`` is a DTensor of which this rank has a plain tensor, its elements behind each other."""
    if not isinstance(param, DTensor):
        return False
    local = _torch.local_of(param)
    return type(local) is torch.Tensor and not local.is_meta and local.is_contiguous()


def kind_of(param: DTensor, entry: Mapping[str, Any]) -> tuple[object, ...] | None:
    """What the state ``entry`` of ``param`` must have in common with another for both to be one: all but values of
    elements. None if it has values per element that are not placed like the parameter."""
    kind: list[object] = []
    for name, value in entry.items():
        if isinstance(value, DTensor):
            local = _torch.locals_placed_like([param], [value])[0]
            if local is None or not local.is_contiguous():
                return None
            kind.append((name, local.dtype, local.device))
        elif isinstance(value, torch.Tensor):
            if value.numel() != 1:
                return None
            kind.append((name, value.dtype, value.device, value.item()))
        else:
            kind.append((name, value))
    return tuple(kind)


def _place(param: DTensor) -> tuple[str, str, int]:
    local = _torch.local_of(param)
    return str(local.dtype), str(local.device), local.data_ptr()


def _touch_in(buffers: Buffers, a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype is not b.dtype or a.device != b.device or not _touch(a, b):
        return False
    buffer = buffers.find(a)
    return b.numel() == 0 if buffer is None else buffer is buffers.find(b)


def _touch(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() + a.nbytes == b.data_ptr()
