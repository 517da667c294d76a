"""How much memory unsharded parameters take and when, what shards own, and which objects stay the same."""

from __future__ import annotations

import copy
import functools
import io
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import MixedPrecisionPolicy, UnshardHandle, fully_shard
from fsdp2.core import Observer
from fsdp2.core.group import all_gather
from fsdp2.core.group.reduce_scatter import Reduce
from fsdp2.report import trace
from tests.distributed.support import (
    BLOCK_NBYTES,
    ROOT_NBYTES,
    Stack,
    UnshardedStorages,
    batch,
    seeded,
    shard,
    sharded,
    step,
    train,
)
from tests.harness.distributed import RankContext, distributed


class Peak(Observer):
    """The most bytes that unsharded parameters took.

    By the groups' states, a gather in flight included, and by their storages: one that is filled from a bucket may get
    its memory as late as the bucket arrives.
    """

    def __init__(self, storages: UnshardedStorages) -> None:
        self._storages = storages
        self._gathered: dict[str, int] = {}
        self.of_groups = 0
        self.of_storages = 0

    def on_transition(self, unit: str, before: str, after: str) -> None:
        is_gathered = after in ("UNSHARDING", "UNSHARDED")
        self._gathered[unit] = (ROOT_NBYTES if unit == "(root)" else BLOCK_NBYTES) if is_gathered else 0
        self.of_groups = max(self.of_groups, sum(self._gathered.values()))

    def on_action(self, action: str, unit: str, nbytes: int) -> None:
        self.of_storages = max(self.of_storages, self._storages.nbytes)


@pytest.mark.parametrize(("keeps", "ahead", "num_blocks"), [(False, 0, 2), (False, 2, 3), (True, 0, 6)])
@distributed(2)
def test_at_most_two_blocks_and_the_root_are_unsharded_in_a_step(
    ctx: RankContext, keeps: bool, ahead: int, num_blocks: int
) -> None:
    """Each block listed for prefetch is one more; of those that are kept after forward, all."""
    model = sharded(ctx, num_blocks=6, reshard_after_forward=not keeps)
    for index, block in enumerate(model.blocks if ahead else ()):
        block.set_modules_to_forward_prefetch(list(model.blocks[index + 1 : index + 1 + ahead]))
    step(model)  # the storages are known and the order is recorded
    peak = Peak(UnshardedStorages(model))
    step(model)
    with trace.observe(model, peak):
        step(model)
    most = ROOT_NBYTES + num_blocks * BLOCK_NBYTES
    assert peak.of_groups == most
    assert (most if keeps else ROOT_NBYTES + BLOCK_NBYTES) <= peak.of_storages <= most


@pytest.mark.parametrize("grad", [True, False])
@distributed(2)
def test_only_the_root_stays_unsharded_after_forward_and_nothing_after_backward(ctx: RankContext, grad: bool) -> None:
    model = sharded(ctx)
    storages = UnshardedStorages(model)
    with torch.set_grad_enabled(grad):
        loss = model(batch()).sum()
    assert storages.nbytes == ROOT_NBYTES
    if grad:
        loss.backward()
        assert storages.nbytes == 0


class _Gathers(Observer):
    """What started (``+``) and what finished (``-``) gathering."""

    def __init__(self) -> None:
        self.seen = ""

    def on_transition(self, unit: str, before: str, after: str) -> None:
        if "UNSHARDING" in (before, after) and after != "SHARDED":
            self.seen += "+" if after == "UNSHARDING" else "-"


@distributed(2)
def test_gathers_by_hand_start_once_and_their_handles_wait_for_no_later_one(ctx: RankContext) -> None:
    model, gathers = sharded(ctx), _Gathers()
    block, storages = model.blocks[1], UnshardedStorages(model)
    step(model)
    with trace.observe(block, gathers):
        block.unshard()
        block.unshard()
        block.unshard(async_op=True).wait()
        assert gathers.seen == "+-"
        assert storages.nbytes == BLOCK_NBYTES
        with torch.no_grad():
            block(batch())  # nor does the forward gather again
        block.reshard()
        assert storages.nbytes == 0
        handle = block.unshard(async_op=True)
        assert isinstance(handle, UnshardHandle)
        assert gathers.seen == "+-+"
        assert isinstance(block.linear.weight, DTensor)
        for _ in range(2):
            handle.wait()
            assert not isinstance(block.linear.weight, DTensor)
        block.reshard()
        second = block.unshard(async_op=True)
        handle.wait()
        assert gathers.seen == "+-+-+"
        second.wait()
        assert gathers.seen == "+-+-+-"
        block.reshard()
        undone = block.unshard(async_op=True)
        block.reshard()
        undone.wait()
        assert isinstance(block.linear.weight, DTensor)
    step(model)
    assert gathers.seen == "+-+-+-+"  # nobody watches any more


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(2)
def test_parameter_objects_are_the_same_in_every_step(ctx: RankContext, reshard_after_forward: bool) -> None:
    """Autograd's are what is gathered into (I1). Behind a load that replaces the shards, others stand for these: who
    has kept the old ones has the old shards."""
    model = sharded(ctx, reshard_after_forward=reshard_after_forward)
    weights = list(model.parameters())
    computed: list[nn.Parameter] = []
    model.blocks[1].linear.register_forward_pre_hook(lambda module, args: computed.append(module.weight))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert all(before is now for before, now in zip(weights, model.parameters(), strict=True))
    before = model.blocks[1].linear.weight
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    assert model.blocks[1].linear.weight is not before
    step(model)
    *trained, loaded = computed
    assert len(trained) == 3
    assert all(weight is trained[0] for weight in trained)
    assert loaded is not trained[0]
    assert not any(weight is before for weight in computed)


def _saved(values: list[Tensor]) -> Any:
    """``values``, once saved and loaded; their file is little larger than they are."""
    file = io.BytesIO()
    torch.save(values, file)
    assert 1 <= file.tell() / sum(value.nbytes for value in values) < 1.1
    file.seek(0)
    return torch.load(file)


@distributed(2)
def test_what_is_saved_or_copied_of_a_shard_is_as_large_as_the_shard(ctx: RankContext) -> None:
    """A copy has values and memory of its own."""
    make = functools.partial(nn.Linear, 256, 256, bias=False)  # large beside what a file needs around it
    model: Any = fully_shard(seeded(lambda: nn.Sequential(make(), make())), mesh=ctx.mesh_1d())
    model(torch.ones(2, 256)).sum().backward()
    values = [value.to_local() for value in model.state_dict().values()]
    for some in (values[:1], values[1:], values):
        assert all(map(torch.equal, _saved(some), some))
    model.zero_grad()  # as in torch, deepcopy refuses gradients
    for parameter in model.parameters():
        copied, before = copy.deepcopy(parameter), parameter.to_local().detach().clone()
        assert isinstance(copied, DTensor)
        assert copied.placements == parameter.placements
        assert torch.equal(copied.to_local(), before)
        with torch.no_grad():
            copied.zero_()
        assert torch.equal(parameter.to_local(), before)


def _most_sums_alive(ctx: RankContext, num_blocks: int) -> int:
    """The most flat buffers of reduce dtype that exist when a further reduction starts. Gradients are of another dtype,
    so they lie elsewhere."""
    model = seeded(lambda: Stack(num_blocks)).to(torch.bfloat16)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    shard(ctx, model, mesh=ctx.mesh_2d(2, ctx.world_size // 2), mp_policy=policy)
    made: list[weakref.ref[Tensor]] = []
    most = 0

    def launch(self: Reduce, *args: Any) -> Any:
        nonlocal most
        most = max(most, sum(ref() is not None for ref in made))
        launched = plain_launch(self, *args)
        made.extend(weakref.ref(buffer) for buffers in launched.sums for buffer in buffers)
        return launched

    plain_launch = Reduce.launch
    with mock.patch.object(Reduce, "launch", launch):
        model(batch().to(torch.bfloat16)).float().square().mean().backward()
    assert len(made) == num_blocks + 1
    return most


@distributed(4)
def test_buffers_of_hsdp_do_not_grow_with_the_number_of_layers(ctx: RankContext) -> None:
    found = [_most_sums_alive(ctx, 2), _most_sums_alive(ctx, 8)]
    assert max(found) <= 2, found  # of one reduce-scatter, and of the all-reduce beside it


@distributed(2)
def test_a_gather_that_cannot_start_keeps_no_memory(ctx: RankContext) -> None:
    model = sharded(ctx)
    step(model)
    model.reshard()
    allocate, storages = all_gather.allocate, []

    def fails(wanted: Any) -> None:
        allocate(wanted)
        storages.extend(storage for storage, _ in wanted)
        raise torch.OutOfMemoryError

    with mock.patch.object(all_gather, "allocate", fails), pytest.raises(torch.OutOfMemoryError):
        model(batch())
    assert [storage.nbytes() for storage in storages] == [0] * len(storages) != []


@distributed(2)
def test_to_empty_puts_shards_where_they_stay(ctx: RankContext) -> None:
    """Else each unit's first use would need memory for its shards a second time."""
    model = shard(ctx, Stack().to("meta"))
    model.to_empty(device=ctx.device_type)
    places = [parameter.to_local().data_ptr() for parameter in model.parameters()]
    model(batch())
    model.reshard()  # the root
    assert [parameter.to_local().data_ptr() for parameter in model.parameters()] == places
