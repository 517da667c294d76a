"""Memory that is released and allocated again under the same tensors.

Autograd saves the unsharded parameters, and views of them, for backward. So a group's unsharded tensors keep one
storage for life, and it is the storage's memory that comes and goes (architecture.md, I1). Memory belongs to the stream
that it was allocated on; releasing takes effect only when the last reader on another stream is done (I3).
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from fsdp2 import _torch
from fsdp2.comm.streams import Streams
from fsdp2.plan.layout import contiguous_stride


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
    """Elements of ``flat`` from ``offset`` on, as a tensor whose own storage starts there; it keeps ``flat`` alive.

    A slice would do, but for two things that users see: ``copy.deepcopy`` of a DTensor refuses a local tensor with a
    storage offset, and ``torch.save`` writes the whole storage of a slice.
    """
    view = flat.as_strided(shape, stride, offset)
    if view.is_meta or view.numel() == 0:  # no memory to share
        return view.new_empty_strided(shape, stride)
    return from_dlpack(to_dlpack(view))


HUGE_MIN_NBYTES = 32 * 1024 * 1024  # from here on, glibc maps a block of its own


def prefer_huge_pages(storage: torch.UntypedStorage) -> None:
    """Have the kernel map new, large CPU memory in huge pages, if it can and may: 512 times fewer page faults.

    Only whole pages inside of the memory are marked, so no more memory is used. Where the kernel's setting is "never",
    or the system is not Linux, nothing happens.
    """
    madvise = _madvise()
    if madvise is None or storage.nbytes() < HUGE_MIN_NBYTES:
        return
    start, stop = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    madvise(first, last - first, mmap.MADV_HUGEPAGE)  # advice: if it is refused, pages are small as ever


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return function


class BlockPool:
    """Freed CPU memory, kept for the next group of the same pass.

    A block above glibc's 32 MiB limit is mapped and unmapped at each use, and the kernel zeroes every page again:
    measured 21 ms for 48 MiB, against 3 ms for writing it. With groups of 63 MiB a step takes 3 to 10% longer without
    (benchmarks/gloo_step.py --case 1536 4 64 --ours-only --no-block-pool); below 32 MiB it makes no difference.

    One group computes and one is gathered while a third is released, so one block is all that a pass reuses.
    """

    MIN_NBYTES = 1024 * 1024  # smaller blocks the allocator itself reuses, at no cost

    def __init__(self) -> None:
        self.max_blocks = 0
        self._blocks: list[torch.UntypedStorage] = []

    @property
    def nbytes(self) -> int:
        """Bytes held for reuse."""
        return sum(block.nbytes() for block in self._blocks)

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give the empty ``storage`` memory: the best fitting block, unless it wastes more than half, or new memory."""
        fitting = [block for block in self._blocks if nbytes <= block.nbytes() <= 2 * nbytes]
        if not fitting:
            storage.resize_(nbytes)
            prefer_huge_pages(storage)
            return
        block = min(fitting, key=torch.UntypedStorage.nbytes)
        self._blocks.remove(block)
        _torch.swap_storages(storage, block)

    def drain(self, storage: torch.UntypedStorage) -> None:
        """Take the memory of ``storage``. The oldest block makes room: the latest ones fit what runs now."""
        if self.max_blocks == 0 or storage.nbytes() < self.MIN_NBYTES:
            storage.resize_(0)
            return
        block = torch.UntypedStorage(0)
        _torch.swap_storages(storage, block)
        self._blocks.append(block)
        if len(self._blocks) > self.max_blocks:
            self._blocks.pop(0)

    def set_max_blocks(self, max_blocks: int) -> None:
        """Keep at most so many blocks; frees the oldest of those that are too many."""
        if max_blocks != self.max_blocks and _torch.can_swap_storages():
            self.max_blocks = max_blocks
            del self._blocks[: max(len(self._blocks) - max_blocks, 0)]


class Memory:
    """Allocates and releases group storages; one per device.

    On an accelerator, the caching allocator is the pool, and ``release`` only notes the compute that must finish first.
    """

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._device, self._streams = device, streams
        self._pool = None if streams.runs_ahead else BlockPool()
        self._releasing: list[tuple[torch.Event | None, torch.UntypedStorage | None]] = []

    def allocate(self, storages: Sequence[tuple[torch.UntypedStorage, int]]) -> None:
        """Give each of ``storages`` that has none memory of its size in bytes; called on the gather stream."""
        if self._pool is None:
            self.flush()
        for storage, nbytes in storages:
            if storage.nbytes() == nbytes:  # its memory was kept
                continue
            if self._pool is not None and nbytes >= self._pool.MIN_NBYTES:
                self._pool.fill(storage, nbytes)
            else:
                storage.resize_(nbytes)

    def scratch(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory of the current stream, for as long as the tensor lives: freed memory that is kept for
        reuse, if it fits, so that it does not lie idle meanwhile."""
        nbytes = math.prod(shape) * dtype.itemsize
        if self._pool is None or nbytes < self._pool.MIN_NBYTES:
            return torch.empty(shape, dtype=dtype, device=self._device)
        storage = torch.UntypedStorage(0)
        self._pool.fill(storage, nbytes)
        return tensor_on(storage, 0, shape, contiguous_stride(shape), dtype)

    def release(self, storages: Sequence[tuple[torch.UntypedStorage, int]]) -> None:
        """Empty ``storages``, given with their sizes in bytes, once the compute enqueued so far has read them; called
        on the compute stream."""
        if self._pool is None:
            event = self._streams.record()
            self._releasing += [(event, storage) for storage, _ in storages]
            return
        for storage, nbytes in storages:
            if nbytes < self._pool.MIN_NBYTES:
                storage.resize_(0)
            else:
                self._pool.drain(storage)

    def keep(self) -> None:
        """The same for storages that are not emptied: the next gather writes them."""
        if self._pool is None:
            self._releasing.append((self._streams.record(), None))

    def keep_freed(self, *, for_reuse: bool) -> None:
        """Whether what is released from here on is likely to be allocated again soon."""
        if self._pool is not None:
            self._pool.set_max_blocks(1 if for_reuse else 0)

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
