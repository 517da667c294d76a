"""What travels between ranks, without any model."""

from __future__ import annotations

import torch

from fsdp2.comm import PeerComm
from tests.harness.distributed import RankContext, distributed


@distributed(2)
def test_messages_of_two_groups_are_never_mixed_up(ctx: RankContext) -> None:
    """Ranks that gather two groups in opposite orders still get each group's own values."""
    group = ctx.mesh_1d().get_group()
    comms = [PeerComm(group) for _ in range(2)]
    outputs = [torch.zeros(2) for _ in comms]
    inputs = [torch.full((1,), 10.0 * index + ctx.rank) for index in range(2)]
    launches = [comm.all_gather([out], [mine]) for comm, out, mine in zip(comms, outputs, inputs, strict=True)]
    works = [work for launch in (launches if ctx.rank == 0 else reversed(launches)) for work in launch()]
    for work in works:
        work.wait()
    assert [output.tolist() for output in outputs] == [[0.0, 1.0], [10.0, 11.0]]


@distributed(2, 4)
def test_reduction_of_uneven_tensors_sums_every_element_once(ctx: RankContext) -> None:
    comm = PeerComm(ctx.mesh_1d().get_group())
    chunk, numel = 3, 3 * ctx.world_size - 4
    values = torch.arange(numel, dtype=torch.float32) + 100 * ctx.rank
    output = torch.full((chunk,), -1.0)
    for work in comm.reduce_scatter([output], [values.clone()]):
        work.wait()
    ranks = torch.arange(ctx.world_size, dtype=torch.float32)
    total = torch.arange(numel) * ctx.world_size + 100 * ranks.sum()
    expected = torch.nn.functional.pad(total, (0, chunk * ctx.world_size - numel))
    assert torch.equal(output, expected[chunk * ctx.rank : chunk * (ctx.rank + 1)])
