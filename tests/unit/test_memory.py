"""Memory comes and goes under the same tensors: version counters stay apart, aliases own theirs. Where shards live,
and the two stages: what is copied when, whose memory that takes, and who waits. No device needed: stand-ins for streams
note what they are asked for. Refusals are in ``golden/memory.txt``."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fsdp2.core.comm.backends import LocalComm
from fsdp2.core.comm.memory import alias, tensor_on
from fsdp2.core.comm.offload import HOST, FlatStage, Home, HostCopies, StagedOffloadPolicy, home_for
from fsdp2.core.comm.streams import AcceleratorStreams, Streams, streams_for
from fsdp2.core.group.all_gather import FlatShards, Gather, GatheredMemory, flat_shards, shard_slice
from fsdp2.core.plan.dtypes import param_dtypes
from fsdp2.core.plan.layout import shard_layout
from fsdp2.core.plan.plan import PlanInput, compile_gather
from fsdp2.core.types import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fsdp2.extras.replaced import check_device
from fsdp2.tensors.cut import pinned
from tests.harness.extensions import Halved
from tests.harness.golden import texts_beside
from tests.harness.messages import error_of

TEXTS = texts_beside(__file__)
CUDA = torch.device("cuda", 1)
F32, BF16 = torch.float32, torch.bfloat16
STAGED = Home(HOST, is_staged=True)
PINNED = Home(HOST, is_staged=True, pin_memory=True)


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


@pytest.mark.parametrize(
    ("policy", "device", "home"),
    [
        (OffloadPolicy(), HOST, Home(HOST)),
        (OffloadPolicy(), CUDA, Home(CUDA)),
        (CPUOffloadPolicy(), CUDA, PINNED),
        (CPUOffloadPolicy(pin_memory=False), CUDA, STAGED),
        (CPUOffloadPolicy(), HOST, Home(HOST)),  # the shards are there already
        (StagedOffloadPolicy(), HOST, STAGED),  # nothing to pin memory for
        (StagedOffloadPolicy(), CUDA, PINNED),
    ],
)
def test_home_of_the_shards(policy: OffloadPolicy, device: torch.device, home: Home) -> None:
    assert home_for(policy, device) == home


# Tensor subclasses in pinned memory. Here is none, so copies stand in for it.


class _Pinned(Halved):
    """Notes that it was pinned."""

    is_pinned_copy = False

    def pin_memory(self, device: Any = None) -> Tensor:  # type: ignore[override]
        made = type(self)(self.plain.clone())
        made.is_pinned_copy = True
        return made


class _LosesItsClass(Halved):
    def pin_memory(self, device: Any = None) -> Tensor:  # type: ignore[override]
        return self.plain.clone()


class _RaisesWhenPinned(Halved):
    def pin_memory(self, device: Any = None) -> Tensor:  # type: ignore[override]
        raise NotImplementedError("aten._pin_memory.default")


REFUSED: dict[str, Callable[[], object]] = {
    "on the device where shards are offloaded": lambda: check_device("blocks.0.weight", CUDA, PINNED),
    "on another device": lambda: check_device("blocks.0.weight", HOST, Home(CUDA)),
    "on another device of the same type": lambda: check_device("weight", torch.device("cuda", 0), Home(CUDA)),
    "loses its class": lambda: pinned("blocks.0.weight", _LosesItsClass(torch.ones(2)), PINNED),
    "raises when pinned": lambda: pinned("blocks.0.weight", _RaisesWhenPinned(torch.ones(2)), PINNED),
}


@pytest.mark.parametrize("case", REFUSED)
def test_shard_is_refused(case: str) -> None:
    TEXTS.check(case, error_of(REFUSED[case]), among=REFUSED)


def test_shard_is_accepted_and_pinned_where_that_is_asked_for() -> None:
    for device, home in ((HOST, PINNED), (torch.device("meta"), PINNED), (HOST, Home(HOST)), (CUDA, Home(CUDA))):
        check_device("weight", device, home)
    shard, plain = _Pinned(torch.ones(2)), torch.ones(2)
    found = pinned("weight", shard, PINNED)
    assert isinstance(found, _Pinned)
    assert found.is_pinned_copy
    assert pinned("weight", shard, STAGED) is shard
    assert pinned("weight", plain, PINNED) is plain


class NotedStreams(Streams):
    """Numbers its events, and notes them and what the CPU waits for."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def record(self) -> Any:
        self.log.append(f"record {len(self.log)}")
        return len(self.log) - 1

    def wait_on_cpu(self, event: Any) -> None:
        self.log.append("no wait" if event is None else f"CPU waits for {event}")


def _staged_gather() -> tuple[Gather, FlatShards, NotedStreams]:
    """Of a parameter that is cast, one that is not, and one of another dtype, on one rank."""
    cast, kept = MixedPrecisionPolicy(param_dtype=BF16), MixedPrecisionPolicy()
    inputs = {
        index: PlanInput(f"p{index}", shard_layout(shape, 0, 1), param_dtypes(dtype, policy))
        for index, (shape, dtype, policy) in enumerate([((3, 4), F32, cast), ((5,), F32, kept), ((2, 2), BF16, kept)])
    }
    comm, streams = LocalComm(), NotedStreams()
    plan = compile_gather(inputs, comm.routing)
    flats = flat_shards(plan, HOST)
    for flat in flats.values():
        flat.copy_(torch.arange(flat.numel()))
    stage = FlatStage(flats, HOST, streams)
    memory = GatheredMemory(plan, HOST)
    return Gather(plan, flats, memory, 0, comm, streams_for(HOST), None, stage=stage), flats, streams


def _nbytes(gather: Gather) -> list[int]:
    assert gather.stage is not None
    return [storage.nbytes() for storage, _ in gather.stage.storages]


def test_gather_reads_copies_of_what_the_shards_hold_at_issue_and_the_cpu_waits_once_for_the_last_ones() -> None:
    gather, flats, streams = _staged_gather()
    assert gather.stage is not None
    gather.stage.wait()
    for _ in range(2):
        shards = {step.index: shard_slice(flats, step, step.layout.shape) for step in gather.plan.steps}
        expected = {index: shard.to(gather.outputs[index].dtype, copy=True) for index, shard in shards.items()}
        gather.issue()
        for flat in flats.values():
            flat.add_(1.0)
        gather.wait()
        assert all(torch.equal(gather.outputs[index], shard) for index, shard in expected.items())
        gather.release()
    gather.stage.wait()
    gather.stage.wait()
    assert streams.log == ["no wait", "record 1", "record 2", "CPU waits for 2", "no wait"]


def test_copies_take_memory_from_issue_to_arrival_only() -> None:
    gather, flats, _ = _staged_gather()
    assert _nbytes(gather) == [0, 0]
    gather.issue()
    assert gather.outputs[0].untyped_storage().nbytes() > 0
    gather.wait()
    assert _nbytes(gather) == [0, 0]
    assert all(flat.untyped_storage().nbytes() >= flat.nbytes for flat in flats.values())
    assert [nbytes for _, nbytes in gather.stage.storages] == [flat.nbytes for flat in flats.values()]  # type: ignore[union-attr]
    gather, *_ = _staged_gather()
    gather.issue()
    gather.drop()
    assert _nbytes(gather) == [0, 0]


def test_values_are_there_when_the_cpu_has_waited_for_them() -> None:
    streams, source = NotedStreams(), torch.arange(6.0).view(2, 3)
    copies = HostCopies([source, source[0]], STAGED, streams)
    assert streams.log == ["record 0"]
    copies.wait()
    assert streams.log == ["record 0", "CPU waits for 0"]
    source.zero_()
    assert torch.equal(copies.tensors[0], torch.arange(6.0).view(2, 3))
    assert torch.equal(copies.tensors[1], torch.arange(3.0))


def test_cpu_waits_for_events_of_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: mock.Mock())
    streams, event = AcceleratorStreams(CUDA), mock.Mock()
    streams.wait_on_cpu(None)
    streams.wait_on_cpu(event)
    event.synchronize.assert_called_once_with()
