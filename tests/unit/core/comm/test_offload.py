"""Where shards live, and the two stages: what is copied when, whose memory that takes, and who waits.

No device needed: stand-ins for streams note what they are asked for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp2.core.comm.backends import LocalComm
from fsdp2.core.comm.offload import HOST, FlatStage, Home, HostCopies, StagedOffloadPolicy, home_for
from fsdp2.core.comm.streams import Streams, streams_for
from fsdp2.core.group.all_gather import FlatShards, Gather, GatheredMemory, flat_shards, shard_slice
from fsdp2.core.plan.dtypes import param_dtypes
from fsdp2.core.plan.layout import shard_layout
from fsdp2.core.plan.plan import PlanInput, compile_gather
from fsdp2.core.types import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

CUDA = torch.device("cuda", 1)
F32, BF16 = torch.float32, torch.bfloat16
STAGED = Home(HOST, is_staged=True)
PINNED = Home(HOST, is_staged=True, pin_memory=True)


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
