"""What travels between ranks on gloo, without any model."""

from __future__ import annotations

import pytest
import torch

from fsdp2.core.comm.backends import OneByOneComm, comm_for
from fsdp2.core.plan.mesh import Axis
from fsdp2.extras.peers import PeerComm
from tests.harness.distributed import RankContext, distributed


def _comm(ctx: RankContext) -> PeerComm:
    comm = comm_for(Axis(ctx.mesh_1d().get_group(), ctx.world_size, ctx.rank), torch.device("cpu"))
    assert isinstance(comm, PeerComm)
    return comm


@distributed(2)
def test_messages_of_two_groups_are_never_mixed_up(ctx: RankContext) -> None:
    """Ranks that gather two groups in opposite orders still get each group's own values."""
    comms = [_comm(ctx) for _ in range(2)]
    outputs = [torch.zeros(2) for _ in comms]
    inputs = [torch.full((1,), 10.0 * index + ctx.rank) for index in range(2)]
    launches = [comm.all_gather([out], [mine]) for comm, out, mine in zip(comms, outputs, inputs, strict=True)]
    works = [work for launch in (launches if ctx.rank == 0 else reversed(launches)) for work in launch()]
    for work in works:
        work.wait()
    assert [output.tolist() for output in outputs] == [[0.0, 1.0], [10.0, 11.0]]


@distributed(2, 4)
def test_tensors_of_any_sizes_and_dtypes_are_gathered_in_one_launch(ctx: RankContext) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.uint8, torch.int16, torch.complex64, torch.float8_e4m3fn]
    parts = [
        [torch.full((numel,), 10 * rank + i).to(dtype) for rank in range(ctx.world_size)]
        for i, (numel, dtype) in enumerate(zip([1, 70_001, 3, 4, 5, 6], dtypes, strict=True))
    ]
    outputs = [torch.empty(ctx.world_size * tensors[0].numel(), dtype=tensors[0].dtype) for tensors in parts]
    inputs = [tensors[ctx.rank].clone() for tensors in parts]
    inputs[1] = outputs[1].view(ctx.world_size, -1)[ctx.rank].copy_(inputs[1])  # in place
    launch = _comm(ctx).all_gather(outputs, inputs)
    for _ in range(2):
        for work in launch():
            work.wait()
        for output, tensors in zip(outputs, parts, strict=True):
            assert torch.equal(output.view(torch.uint8), torch.cat(tensors).view(torch.uint8))
        outputs[0].zero_()


@pytest.mark.parametrize("on_stream", [False, True])
@distributed(2)
def test_one_call_per_tensor_moves_several_dtypes(ctx: RankContext, on_stream: bool) -> None:
    """gloo's calls for many tensors give garbage here."""
    comm = OneByOneComm(ctx.mesh_1d().get_group(), on_stream=on_stream)
    dtypes = (torch.float32, torch.bfloat16)
    outputs = [torch.empty(6, dtype=dtype) for dtype in dtypes]
    parts = [torch.full((3,), 1.0 + ctx.rank, dtype=dtype) for dtype in dtypes]
    for work in comm.all_gather(outputs, parts)():
        work.wait()
    assert [output.tolist() for output in outputs] == [[1.0] * 3 + [2.0] * 3] * 2
    sums = [torch.empty(3, dtype=dtype) for dtype in dtypes]
    for work in comm.reduce_scatter()(sums, outputs):
        work.wait()
    assert [each.tolist() for each in sums] == [[2.0 + 2 * ctx.rank] * 3] * 2


@distributed(2, 4)
def test_reduction_of_uneven_tensors_sums_every_element_once(ctx: RankContext) -> None:
    chunk, numel = 3, 3 * ctx.world_size - 4
    values = torch.arange(numel, dtype=torch.float32) + 100 * ctx.rank
    output = torch.full((chunk,), -1.0)
    for work in _comm(ctx).reduce_scatter()([output], [values.clone()]):
        work.wait()
    ranks = torch.arange(ctx.world_size, dtype=torch.float32)
    total = torch.arange(numel) * ctx.world_size + 100 * ranks.sum()
    expected = torch.nn.functional.pad(total, (0, chunk * ctx.world_size - numel))
    assert torch.equal(output, expected[chunk * ctx.rank : chunk * (ctx.rank + 1)])


@distributed(2, 4)
def test_sums_run_in_rank_order_from_behind_this_rank_in_dtypes_that_round(ctx: RankContext) -> None:
    numel, rank, size = 700_003, ctx.rank, ctx.world_size
    for dtype in (torch.float32, torch.bfloat16):
        of_ranks = [
            torch.randn(numel * size, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(size)
        ]
        mine, output = of_ranks[rank].clone(), torch.empty(numel, dtype=dtype)
        for work in _comm(ctx).reduce_scatter()([output], [mine]):
            work.wait()
        parts = [of_ranks[(rank - step) % size].split(numel)[rank] for step in range(1, size + 1)]
        assert torch.equal(output, sum(parts[1:], parts[0]))
        assert torch.equal(mine, of_ranks[rank])
