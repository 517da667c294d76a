"""Memory comes and goes under the same tensors: the pool reuses it, version counters stay apart, aliases own theirs."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp2.comm import memory as buffers
from fsdp2.comm.memory import BlockPool, alias, tensor_on

BLOCK = 4 << 20
SMAPS = Path("/proc/self/smaps")
HAS_HUGE_PAGES = SMAPS.exists() and Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()


def _storage(nbytes: int = 0) -> torch.UntypedStorage:
    return torch.UntypedStorage(nbytes)


def _fill(pool: BlockPool, nbytes: int) -> torch.UntypedStorage:
    storage = _storage()
    pool.fill(storage, nbytes)
    return storage


@pytest.fixture
def pool() -> BlockPool:
    return _pool(max_blocks=2)


def _pool(max_blocks: int) -> BlockPool:
    pool = BlockPool()
    pool.set_max_blocks(max_blocks)
    if pool.max_blocks == 0:
        pytest.skip("this torch cannot exchange the memory of two storages")
    return pool


def _is_marked(address: int) -> bool:
    """Whether the kernel was told to map the memory at ``address`` in huge pages."""
    is_inside = False
    for line in SMAPS.read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, stop = (int(bound, 16) for bound in head.split("-"))
            is_inside = start <= address < stop
        elif is_inside and head == "VmFlags:":
            return "hg" in line.split()
    raise AssertionError(f"{address:x} is not mapped")


@pytest.mark.skipif(not HAS_HUGE_PAGES, reason="this kernel has no transparent huge pages")
def test_large_new_memory_is_to_be_mapped_in_huge_pages_from_end_to_end(pool: BlockPool) -> None:
    large, small = _fill(pool, buffers.HUGE_MIN_NBYTES + 12345), _fill(pool, BLOCK)
    page = 4096
    assert _is_marked(large.data_ptr() + page)
    assert _is_marked(large.data_ptr() + large.nbytes() - 2 * page)
    assert not _is_marked(small.data_ptr() + page)


def test_a_system_without_huge_pages_gives_memory_all_the_same(
    pool: BlockPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "_madvise", lambda: None)
    assert _fill(pool, buffers.HUGE_MIN_NBYTES).nbytes() == buffers.HUGE_MIN_NBYTES


def test_drained_memory_comes_back_for_the_next_storage(pool: BlockPool) -> None:
    first = _fill(pool, BLOCK)
    address = first.data_ptr()
    pool.drain(first)
    assert first.nbytes() == 0
    second = _fill(pool, BLOCK)
    assert second.data_ptr() == address
    assert second.nbytes() == BLOCK


def test_small_memory_is_left_to_the_allocator(pool: BlockPool) -> None:
    pool.drain(_fill(pool, BlockPool.MIN_NBYTES - 1))
    assert pool.nbytes == 0


def test_block_in_use_is_not_handed_out_again(pool: BlockPool) -> None:
    pool.drain(_fill(pool, BLOCK))
    first, second = _fill(pool, BLOCK), _fill(pool, BLOCK)
    assert first.data_ptr() != second.data_ptr()


@pytest.mark.parametrize(
    ("nbytes", "reused"), [(BLOCK, True), (BLOCK // 2, True), (BLOCK // 2 - 1, False), (BLOCK + 1, False)]
)
def test_block_is_reused_if_it_is_large_enough_and_at_most_half_is_wasted(
    pool: BlockPool, nbytes: int, reused: bool
) -> None:
    block = _fill(pool, BLOCK)
    address = block.data_ptr()
    pool.drain(block)
    storage = _fill(pool, nbytes)
    assert (storage.data_ptr() == address) is reused
    assert storage.nbytes() >= nbytes
    assert pool.nbytes == (0 if reused else BLOCK)


def test_best_fitting_block_is_taken(pool: BlockPool) -> None:
    blocks = [_fill(pool, BLOCK), _fill(pool, BLOCK - 4096)]
    smaller = blocks[1].data_ptr()
    for block in blocks:
        pool.drain(block)
    assert _fill(pool, BLOCK - 8192).data_ptr() == smaller


@pytest.mark.parametrize("max_blocks", [1, 2])
def test_pool_holds_as_many_blocks_as_told_and_the_oldest_makes_room(max_blocks: int) -> None:
    pool = _pool(max_blocks=max_blocks)
    sizes = [BLOCK, 4 * BLOCK, 16 * BLOCK]
    blocks = [_fill(pool, nbytes) for nbytes in sizes]
    addresses = [block.data_ptr() for block in blocks]
    for block in blocks:
        pool.drain(block)
    assert pool.nbytes == sum(sizes[-max_blocks:])
    for nbytes, address in list(zip(sizes, addresses, strict=True))[-max_blocks:]:
        assert _fill(pool, nbytes).data_ptr() == address
    assert pool.nbytes == 0


def test_pool_that_is_made_smaller_frees_the_oldest_blocks(pool: BlockPool) -> None:
    for block in [_fill(pool, nbytes) for nbytes in (BLOCK, 4 * BLOCK)]:
        pool.drain(block)
    pool.set_max_blocks(1)
    assert pool.nbytes == 4 * BLOCK
    pool.set_max_blocks(0)
    assert pool.nbytes == 0


def test_pool_without_blocks_releases_and_allocates() -> None:
    pool = BlockPool()
    pool.set_max_blocks(0)
    storage = _fill(pool, BLOCK)
    pool.drain(storage)
    assert (storage.nbytes(), pool.nbytes) == (0, 0)
    pool.fill(storage, BLOCK)
    assert storage.nbytes() == BLOCK


def test_tensors_stay_usable_when_memory_returns_under_them(pool: BlockPool) -> None:
    storage = _storage(64)
    tensor = tensor_on(storage, 0, (4, 4), (4, 1), torch.float32)
    pool.drain(storage)
    pool.fill(storage, 64)
    tensor.fill_(3)
    assert torch.equal(tensor_on(storage, 0, (16,), (1,), torch.float32), torch.full((16,), 3.0))


def test_tensor_on_lies_where_it_is_told() -> None:
    storage = _storage(64)
    tensor_on(storage, 0, (16,), (1,), torch.float32).copy_(torch.arange(16))
    placed = tensor_on(storage, 16, (2, 3), (1, 2), torch.float32)
    assert placed.tolist() == [[4, 6, 8], [5, 7, 9]]
    assert tensor_on(storage, 8, (2,), (1,), torch.bfloat16).data_ptr() == storage.data_ptr() + 8


def test_tensor_on_has_a_version_counter_of_its_own() -> None:
    """I2: what collectives write is no in-place modification to autograd."""
    storage = _storage(32)
    parameter = nn.Parameter(tensor_on(storage, 0, (8,), (1,), torch.float32).fill_(1))
    x = torch.ones(8, requires_grad=True)
    output = (x * parameter).sum()  # saves parameter
    tensor_on(storage, 0, (8,), (1,), torch.float32).fill_(5)
    output.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((8,), 5.0))


def test_view_of_a_parameter_shares_its_version_counter() -> None:
    """The control for the test above: the same write through a view is refused."""
    parameter = nn.Parameter(torch.ones(8))
    x = torch.ones(8, requires_grad=True)
    output = (x * parameter).sum()
    parameter.detach().view(-1).fill_(5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_alias_shares_memory_and_owns_its_storage() -> None:
    flat = torch.arange(24.0)
    part = alias(flat, 8, (2, 3), (3, 1))
    assert part.storage_offset() == 0
    assert part.is_contiguous()
    assert part.data_ptr() == flat[8:].data_ptr()
    assert part.tolist() == [[8, 9, 10], [11, 12, 13]]
    part[0, 0] = -1
    assert flat[8] == -1
    flat[9] = -2
    assert part[0, 1] == -2


def test_alias_keeps_the_flat_buffer_alive() -> None:
    class Memory(bytearray):
        """Bytes that can be watched."""

    memory = Memory(64)
    watched = weakref.ref(memory)
    part = alias(torch.frombuffer(memory, dtype=torch.float32), 4, (4,), (1,))
    del memory
    gc.collect()
    assert watched() is not None
    part.fill_(1)
    del part
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_alias_keeps_the_dtype(dtype: torch.dtype) -> None:
    flat = torch.ones(8, dtype=dtype)
    part = alias(flat, 2, (3,), (1,))
    assert part.dtype is dtype
    assert torch.equal(part, flat[2:5])


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_empty_alias_has_the_shape_asked_for(shape: tuple[int, ...]) -> None:
    part = alias(torch.ones(8), 8, shape, (1,) * len(shape))
    assert part.shape == shape
    assert part.storage_offset() == 0


def test_alias_of_a_meta_buffer_is_meta() -> None:
    part = alias(torch.ones(8, device="meta"), 2, (2, 3), (3, 1))
    assert part.is_meta
    assert part.shape == (2, 3)
