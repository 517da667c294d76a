"""Memory comes and goes under the same tensors: version counters stay apart, aliases own theirs."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn

from fsdp2.core.comm.memory import alias, tensor_on

F32, BF16 = torch.float32, torch.bfloat16


def test_tensor_on_lies_where_it_is_told() -> None:
    storage = torch.UntypedStorage(64)
    tensor_on(storage, 0, (16,), (1,), F32).copy_(torch.arange(16))
    placed = tensor_on(storage, 16, (2, 3), (1, 2), F32)
    assert placed.tolist() == [[4, 6, 8], [5, 7, 9]]
    assert tensor_on(storage, 8, (2,), (1,), torch.bfloat16).data_ptr() == storage.data_ptr() + 8


def test_tensor_on_has_a_version_counter_of_its_own() -> None:
    """I2: what collectives write is no in-place modification to autograd."""
    storage = torch.UntypedStorage(32)
    parameter = nn.Parameter(tensor_on(storage, 0, (8,), (1,), F32).fill_(1))
    x = torch.ones(8, requires_grad=True)
    output = (x * parameter).sum()  # saves parameter
    tensor_on(storage, 0, (8,), (1,), F32).fill_(5)
    output.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((8,), 5.0))
    output = (x * parameter).sum()
    parameter.detach().view(-1).fill_(5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # the same write through a view
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
    flat = torch.arange(24.0)
    assert torch.equal(alias(flat[4:], 5, (2, 3), (8, 2)), flat.as_strided((2, 3), (8, 2), 5))  # strided elements


def test_alias_is_copied_and_saved_without_the_rest_of_the_flat_buffer() -> None:
    flat = torch.arange(1e6)
    part, file = alias(flat, 8, (2, 3), (3, 1)), io.BytesIO()
    torch.save(part, file)
    assert file.tell() < 1e4
    assert copy.deepcopy(part).untyped_storage().nbytes() == part.nbytes


@pytest.mark.parametrize("flat", [torch.ones(8, dtype=torch.bool), torch.ones(8, device="meta")], ids=["bool", "meta"])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 3)])
def test_alias_is_of_the_flat_buffers_kind_and_empty_if_asked(flat: torch.Tensor, shape: tuple[int, ...]) -> None:
    part = alias(flat, 2, shape, (3, 1))
    assert (part.shape, part.dtype, part.is_meta, part.storage_offset()) == (shape, flat.dtype, flat.is_meta, 0)


def test_alias_keeps_the_flat_buffer_alive() -> None:
    class Memory(bytearray):
        """Bytes that can be watched."""

    memory = Memory(64)
    watched = weakref.ref(memory)
    part = alias(torch.frombuffer(memory, dtype=F32), 4, (4,), (1,))
    del memory
    gc.collect()
    assert watched() is not None
    part.fill_(1)
    del part
    gc.collect()
    assert watched() is None
