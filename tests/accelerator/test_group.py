"""The process group of the simulated accelerator keeps NCCL's contract."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp2 import _torch
from tests.accelerator import device
from tests.accelerator.device import counted_syncs
from tests.accelerator.support import on_device
from tests.harness.distributed import RankContext

SIM: Any = device.DEVICE


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def mine(ctx: RankContext, numel: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((numel,), ctx.rank + 1, dtype=dtype, device=SIM)


@on_device(2)
def test_collective_on_the_stream_returns_no_work(ctx: RankContext) -> None:
    output, part = torch.empty(8, device=SIM), torch.empty(2, device=SIM)
    assert _torch.all_gather(world(), [output], [mine(ctx)], on_stream=True)() is None
    assert _torch.reduce_scatter(world(), dist.ReduceOp.SUM, on_stream=True)([part], [mine(ctx)]) is None
    assert output.tolist() == [1.0] * 4 + [2.0] * 4
    assert part.tolist() == [3.0] * 2


@on_device(2)
def test_asynchronous_collective_runs_beside_the_stream_until_it_waits(ctx: RankContext) -> None:
    device.schedule(0, first="compute", late=["all-gather"])
    output = torch.zeros(8, device=SIM)
    work = dist.all_gather_into_tensor(output, mine(ctx), async_op=True)
    before = output.clone()
    work.wait()
    after = output.clone()
    assert before.tolist() == [0.0] * 8
    assert after.tolist() == [1.0] * 4 + [2.0] * 4


@on_device(2)
def test_what_has_not_arrived_is_nan(ctx: RankContext) -> None:
    device.schedule(0, first="side")  # the launch starts in front of what the default stream does
    store = dist.distributed_c10d._get_default_store()
    output = torch.zeros(8, device=SIM)
    torch.accelerator.synchronize()
    if ctx.rank == 1:
        store.wait([f"{__name__} go"])
    work = dist.all_gather_into_tensor(output, mine(ctx), async_op=True)
    if ctx.rank == 0:
        assert output.clone().isnan().all()  # its own part, too
        store.set(f"{__name__} go", "")
    work.wait()
    assert output.tolist() == [1.0] * 4 + [2.0] * 4
    store.delete_key(f"{__name__} go")


@on_device(2)
def test_several_tensors_travel_in_one_launch(ctx: RankContext) -> None:
    outputs = [torch.empty(8, device=SIM), torch.empty(4, dtype=torch.bfloat16, device=SIM)]
    inputs = [mine(ctx), mine(ctx, 2, torch.bfloat16)]
    assert _torch.all_gather(world(), outputs, inputs, on_stream=True)() is None
    assert outputs[0].tolist() == [1.0] * 4 + [2.0] * 4
    assert outputs[1].tolist() == [1.0] * 2 + [2.0] * 2
    with dist._coalescing_manager(device=None):
        for each in inputs:
            dist.all_reduce(each)
    assert inputs[0].tolist() == [3.0] * 4
    assert inputs[1].tolist() == [3.0] * 2


@on_device(2)
def test_reductions(ctx: RankContext) -> None:
    found = {}
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        values = mine(ctx)
        dist.all_reduce(values, op)
        found[str(op)] = values[0].item()
    values, part = mine(ctx), torch.empty(2, device=SIM)
    dist.reduce_scatter_tensor(part, values, dist._make_nccl_premul_sum(0.25))
    assert list(found.values()) == [3.0, 1.5, 2.0, 1.0, 2.0]
    assert part.tolist() == [0.75, 0.75]


@on_device(2)
def test_what_nccl_refuses_is_refused(ctx: RankContext) -> None:
    x = torch.zeros(4, 4, device=SIM)
    out = torch.empty(8, 4, device=SIM)
    refused = [
        lambda: dist.all_gather_into_tensor(out, x.t(), async_op=True),
        lambda: dist.all_gather_into_tensor(out, x.bfloat16(), async_op=True),
        lambda: dist.all_gather_into_tensor(out[:6], x, async_op=True),
        lambda: dist.all_gather_into_tensor(out, x.cpu(), async_op=True),
        lambda: dist.all_reduce(x.int(), dist.ReduceOp.BAND),
        lambda: dist.all_reduce(x.int(), dist._make_nccl_premul_sum(0.5)),
        lambda: _torch.all_gather(world(), [out, out], [], on_stream=True)(),
    ]
    for call in refused:
        with pytest.raises(ValueError, match=r"simnccl: |argument"):
            call()


@on_device(2)
def test_collective_on_the_stream_keeps_no_tensor(ctx: RankContext) -> None:
    output, part = torch.empty(8, device=SIM), mine(ctx)
    storage = weakref.ref(part.untyped_storage())
    before = device.load().memory_allocated()
    dist.all_gather_into_tensor(output, part)
    del part
    assert storage() is None
    assert device.load().memory_allocated() == before - 512


@on_device(2)
def test_asynchronous_collective_keeps_its_tensors_until_it_is_waited_for(ctx: RankContext) -> None:
    output, part = torch.empty(8, device=SIM), mine(ctx)
    before = device.load().memory_allocated()
    work = dist.all_gather_into_tensor(output, part, async_op=True)
    del part
    assert device.load().memory_allocated() == before
    work.wait()
    assert device.load().memory_allocated() == before - 512
    assert output.tolist() == [1.0] * 4 + [2.0] * 4


@on_device(2)
def test_input_that_is_freed_too_early_travels_as_nan(ctx: RankContext) -> None:
    device.schedule(0, first="compute")
    output, part, side = torch.empty(8, device=SIM), mine(ctx), torch.sim.Stream()  # type: ignore[attr-defined]
    side.wait_stream(torch.accelerator.current_stream())
    with torch.sim.stream(side):  # type: ignore[attr-defined]
        dist.all_gather_into_tensor(output, part)
    del part
    torch.empty(100, device=SIM)
    torch.accelerator.synchronize()
    assert output.isnan().all()


@pytest.mark.long
@on_device(2)
def test_ranks_that_choose_differently_do_not_wait_for_each_other_for_good(ctx: RankContext) -> None:
    device.schedule(seed=ctx.rank)
    streams = [torch.sim.Stream() for _ in range(3)]  # type: ignore[attr-defined]
    outputs = []
    for index in range(12):
        with torch.sim.stream(streams[index % 3]):  # type: ignore[attr-defined]
            outputs.append(torch.empty(8, device=SIM))
            dist.all_gather_into_tensor(outputs[-1], mine(ctx) + index)
    torch.accelerator.synchronize()
    for index, output in enumerate(outputs):
        assert output.tolist() == [1.0 + index] * 4 + [2.0 + index] * 4


@on_device(2)
def test_what_meshes_and_dtensors_use(ctx: RankContext) -> None:
    mesh = ctx.mesh_1d()
    full = torch.arange(10.0, device=SIM).view(5, 2)
    sharded = distribute_tensor(full + 100 * ctx.rank, mesh, [Shard(0)])
    assert sharded.full_tensor().tolist() == full.tolist()
    assert sharded.redistribute(mesh, [Replicate()]).to_local().tolist() == full.tolist()
    values = mine(ctx)
    dist.broadcast(values, 1)
    assert values.tolist() == [2.0] * 4
    rows = [torch.empty(4, device=SIM) for _ in range(2)]
    dist.all_gather(rows, mine(ctx))
    assert [row[0].item() for row in rows] == [1.0, 2.0]
    found: list[Any] = [None, None]
    dist.all_gather_object(found, f"rank {ctx.rank}")
    assert found == ["rank 0", "rank 1"]
    dist.gather_object(f"rank {ctx.rank}", found if ctx.rank == 0 else None)
    assert found == ["rank 0", "rank 1"]


@on_device(2)
def test_barrier_makes_the_host_wait_and_collectives_do_not(ctx: RankContext) -> None:
    x = mine(ctx)
    with counted_syncs() as found:
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
    assert found == []
    with counted_syncs() as found:
        dist.barrier()
    assert found == ["stream.synchronize"]
