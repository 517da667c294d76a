"""Memory that is released and allocated again under the same tensors, and what all groups on one device share.

Autograd saves the unsharded parameters, and views of them, for backward. So a group's unsharded tensors keep one
storage for life, and it is the storage's memory that comes and goes (I1). Memory belongs to the stream that it was
allocated on; releasing takes effect only when the last reader on another stream is done (I3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from fsdp2.comm.streams import AcceleratorStreams, ComputeStreamGathers, Streams, streams_for


def tensor_on(
    storage: torch.UntypedStorage, offset_nbytes: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """A tensor with a version counter of its own on ``storage`` (a view would share its base's counter).

    Collectives write through such tensors, between the moment autograd saves a parameter and the moment backward reads
    it, without autograd taking that for an in-place modification (I2).
    """
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    return tensor.set_(storage, offset_nbytes // dtype.itemsize, tuple(shape), tuple(stride))


def alias(flat: torch.Tensor, offset: int, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Elements of the storage of ``flat`` from ``offset`` on, as a tensor whose own storage starts there; it keeps the
    memory alive.

    A view would do, but for two things that users see: ``copy.deepcopy`` of a DTensor refuses a local tensor with a
    storage offset, and ``torch.save`` writes the whole storage of a view.
    """
    if flat.is_meta or 0 in shape:  # no memory to share
        return flat.new_empty_strided(shape, stride)
    numel = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    part = flat.untyped_storage()[offset * flat.itemsize : (offset + numel) * flat.itemsize]
    return tensor_on(part, 0, shape, stride, flat.dtype)


class Memory:
    """Allocates and releases the storages of groups.

    On an accelerator, where the CPU runs ahead, ``release`` only notes the compute that must finish first.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._releasing: list[tuple[torch.Event | None, torch.UntypedStorage | None]] = []

    def allocate(self, storages: Sequence[tuple[torch.UntypedStorage, int]]) -> None:
        """Give each of ``storages`` memory of its size in bytes, unless it has it; called on the gather stream."""
        if self._releasing:
            self.flush()
        for storage, nbytes in storages:
            if storage.nbytes() != nbytes:  # else its memory was kept
                storage.resize_(nbytes)

    def release(self, storages: Sequence[tuple[torch.UntypedStorage, int]]) -> None:
        """Empty ``storages``, given with their sizes in bytes, once the compute enqueued so far has read them; called
        on the compute stream."""
        if self._streams.runs_ahead:
            event = self._streams.record()
            self._releasing += [(event, storage) for storage, _ in storages]
            return
        for storage, _ in storages:
            storage.resize_(0)

    def keep(self) -> None:
        """The same for storages that are not emptied: the next gather writes them."""
        if self._streams.runs_ahead:
            self._releasing.append((self._streams.record(), None))

    def flush(self) -> None:
        """Carry out the deferred releases; called on the gather stream.

        I3. Producer: compute of the groups that were released; consumer: gather stream, which owns their memory and
        reuses it next. The group that computes now is not among them, so the gather overlaps with it.
        """
        for event, storage in self._releasing:
            self._streams.wait_here(event)
            if storage is not None:
                storage.resize_(0)
        self._releasing.clear()


@dataclass(frozen=True)
class Services:
    """Streams and memory of one device."""

    streams: Streams
    memory: Memory

    def flush(self) -> None:
        """Give back what was released."""
        with self.streams.on_gather():
            self.memory.flush()


@cache
def services_for(device: torch.device) -> Services:
    """The services on ``device``; the same for all models of the process, so that their gathers queue behind each
    other and freed memory serves any of them."""
    streams = streams_for(device)
    return Services(streams, Memory(streams))


@cache
def compute_stream_services(device: torch.device) -> Services:
    """Those of groups that gather on the compute stream: memory belongs to a stream, so theirs is apart. On the CPU,
    which has no streams, the same as all others use."""
    shared = services_for(device)
    if not isinstance(shared.streams, AcceleratorStreams):
        return shared
    streams = ComputeStreamGathers(shared.streams)
    return Services(streams, Memory(streams))
