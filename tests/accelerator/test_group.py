"""The process group of the simulated accelerator keeps NCCL's contract."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2.core import _torch
from tests.accelerator import device
from tests.accelerator.device import counted_syncs
from tests.accelerator.support import on_device
from tests.accelerator.test_device import SIM, on, side_stream
from tests.harness.distributed import RankContext


def mine(ctx: RankContext, numel: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((numel,), ctx.rank + 1, dtype=dtype, device=SIM)


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
def test_message_of_the_cpu_is_not_taken_for_one_of_the_device(ctx: RankContext) -> None:
    """The first launches of a group had the tags 1, 2, ..., and in a long run that of any message of the CPU."""
    group, peer, tags = dist.new_group(), 1 - ctx.rank, range(1, 4)
    sent, received = torch.zeros(4, device="cpu"), torch.empty(4, device="cpu")
    works = [group.send([sent], peer, tag) for tag in tags]
    values = mine(ctx)
    dist.all_reduce(values, group=group)
    assert values.tolist() == [3.0] * 4
    for work in [*works, *(group.recv([received], peer, tag) for tag in tags)]:
        work.wait()


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
        lambda: _torch.all_gather(dist.group.WORLD, [out, out], [], on_stream=True)(),
    ]
    for call in refused:
        with pytest.raises(ValueError, match=r"simnccl: |argument"):
            call()


@pytest.mark.every_case
@pytest.mark.parametrize("async_op", [False, True])
@on_device(2)
def test_only_an_asynchronous_collective_keeps_its_tensors_and_until_it_is_waited_for(
    ctx: RankContext, async_op: bool
) -> None:
    output, part = torch.empty(8, device=SIM), mine(ctx)
    storage = weakref.ref(part.untyped_storage())
    before = device.load().memory_allocated()
    work = dist.all_gather_into_tensor(output, part, async_op=async_op)
    del part
    if async_op:
        assert device.load().memory_allocated() == before
        work.wait()
    assert storage() is None
    assert device.load().memory_allocated() == before - 512
    assert output.tolist() == [1.0] * 4 + [2.0] * 4


@on_device(2)
def test_input_that_is_freed_too_early_travels_as_nan(ctx: RankContext) -> None:
    device.schedule(0, first="compute")
    output, part, side = torch.empty(8, device=SIM), mine(ctx), side_stream()
    side.wait_stream(torch.accelerator.current_stream())
    with on(side):
        dist.all_gather_into_tensor(output, part)
    del part
    torch.empty(100, device=SIM)
    torch.accelerator.synchronize()
    assert output.isnan().all()


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
