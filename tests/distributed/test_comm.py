"""What travels between ranks on gloo, without any model: by its messages, and within one host."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from fsdp2.comm.backends import PeerComm, comm_for
from fsdp2.comm.same_host.transfers import SameHostComm
from fsdp2.plan.mesh import Axis
from tests.harness.comms import RANKS_MAY_READ_EACH_OTHER, messages_only
from tests.harness.distributed import RankContext, distributed

by_both_ways = pytest.mark.parametrize("way", ["messages", *(["same host"] if RANKS_MAY_READ_EACH_OTHER else [])])


def _comms(ctx: RankContext, way: str, count: int = 1) -> list[Any]:
    axis = Axis(ctx.mesh_1d().get_group(), ctx.world_size, ctx.rank)
    with messages_only() if way == "messages" else nullcontext():
        comms = [comm_for(axis, torch.device("cpu")) for _ in range(count)]
    assert all(type(comm) is {"messages": PeerComm, "same host": SameHostComm}[way] for comm in comms)
    return comms


@by_both_ways
@distributed(2)
def test_messages_of_two_groups_are_never_mixed_up(ctx: RankContext, way: str) -> None:
    """Ranks that gather two groups in opposite orders still get each group's own values."""
    comms = _comms(ctx, way, 2)
    outputs = [torch.zeros(2) for _ in comms]
    inputs = [torch.full((1,), 10.0 * index + ctx.rank) for index in range(2)]
    launches = [comm.all_gather([out], [mine]) for comm, out, mine in zip(comms, outputs, inputs, strict=True)]
    works = [work for launch in (launches if ctx.rank == 0 else reversed(launches)) for work in launch()]
    for work in works:
        work.wait()
    assert [output.tolist() for output in outputs] == [[0.0, 1.0], [10.0, 11.0]]


@by_both_ways
@distributed(2, 4)
def test_tensors_of_any_sizes_and_dtypes_are_gathered_in_one_launch(ctx: RankContext, way: str) -> None:
    (comm,) = _comms(ctx, way)
    parts = [
        [torch.full((numel,), 10 * rank + i).to(dtype) for rank in range(ctx.world_size)]
        for i, (numel, dtype) in enumerate([(1, torch.float32), (70_001, torch.bfloat16), (3, torch.uint8)])
    ]
    outputs = [torch.empty(ctx.world_size * tensors[0].numel(), dtype=tensors[0].dtype) for tensors in parts]
    inputs = [tensors[ctx.rank].clone() for tensors in parts]
    inputs[1] = outputs[1].view(ctx.world_size, -1)[ctx.rank].copy_(inputs[1])  # in place
    launch = comm.all_gather(outputs, inputs)
    for _ in range(2):
        for work in launch():
            work.wait()
        for output, tensors in zip(outputs, parts, strict=True):
            assert torch.equal(output, torch.cat(tensors))
        outputs[0].zero_()


@by_both_ways
@distributed(2, 4)
def test_reduction_of_uneven_tensors_sums_every_element_once(ctx: RankContext, way: str) -> None:
    (comm,) = _comms(ctx, way)
    chunk, numel = 3, 3 * ctx.world_size - 4
    values = torch.arange(numel, dtype=torch.float32) + 100 * ctx.rank
    output = torch.full((chunk,), -1.0)
    for work in comm.reduce_scatter([output], [values.clone()]):
        work.wait()
    ranks = torch.arange(ctx.world_size, dtype=torch.float32)
    total = torch.arange(numel) * ctx.world_size + 100 * ranks.sum()
    expected = torch.nn.functional.pad(total, (0, chunk * ctx.world_size - numel))
    assert torch.equal(output, expected[chunk * ctx.rank : chunk * (ctx.rank + 1)])


@pytest.mark.skipif(not RANKS_MAY_READ_EACH_OTHER, reason="ranks may not read each other here")
@pytest.mark.parametrize("num_threads", [1, 2])
@distributed(2, 4)
def test_both_ways_give_the_same_sums_bit_for_bit(ctx: RankContext, num_threads: int) -> None:
    """Of several pieces, on 4 ranks, in a dtype that rounds at every addition."""
    numel = 700_003
    values = [torch.randn(numel, generator=torch.Generator().manual_seed(ctx.rank)) for _ in range(2)]
    values[1] = values[1].bfloat16()
    sums = {}
    torch.set_num_threads(num_threads)
    try:
        for way in ("messages", "same host"):
            (comm,) = _comms(ctx, way)
            sums[way] = [torch.empty(-(-numel // ctx.world_size), dtype=tensor.dtype) for tensor in values]
            for work in comm.reduce_scatter(sums[way], [tensor.clone() for tensor in values]):
                work.wait()
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(*pair) for pair in zip(*sums.values(), strict=True))
