"""How much memory unsharded parameters take and when, what shards own, and which objects stay the same."""

from __future__ import annotations

import copy
import io
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import MixedPrecisionPolicy, Observer, fully_shard
from fsdp2.group import all_gather
from fsdp2.group.reduce_scatter import Reduce
from fsdp2.runtime.root import form_root
from fsdp2.runtime.unit import unit_of
from fsdp2.tools import trace
from tests.distributed.support import (
    BLOCK_NBYTES,
    DIM,
    ROOT_NBYTES,
    Stack,
    UnshardedStorages,
    batch,
    seeded,
    shard,
    sharded,
    step,
)
from tests.harness.alone import on_one_rank
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


def _peak_of_step(model: Any) -> Peak:
    step(model)  # the storages are known and the order is recorded
    peak = Peak(UnshardedStorages(model))
    step(model)
    with trace.observe(model, peak):
        step(model)
    return peak


@distributed(2)
def test_at_most_two_blocks_and_the_root_are_unsharded_in_a_step(ctx: RankContext) -> None:
    peak = _peak_of_step(sharded(ctx, num_blocks=6))
    assert peak.of_groups == ROOT_NBYTES + 2 * BLOCK_NBYTES
    assert ROOT_NBYTES + BLOCK_NBYTES <= peak.of_storages <= ROOT_NBYTES + 2 * BLOCK_NBYTES


@distributed(2)
def test_each_block_listed_for_prefetch_is_one_more_that_is_unsharded(ctx: RankContext) -> None:
    model = sharded(ctx, num_blocks=6)
    for index, block in enumerate(model.blocks):
        block.set_modules_to_forward_prefetch(list(model.blocks[index + 1 : index + 3]))
    peak = _peak_of_step(model)
    assert peak.of_groups == ROOT_NBYTES + 3 * BLOCK_NBYTES
    assert ROOT_NBYTES + BLOCK_NBYTES <= peak.of_storages <= ROOT_NBYTES + 3 * BLOCK_NBYTES


@distributed(2)
def test_parameters_kept_after_forward_are_all_unsharded_at_once(ctx: RankContext) -> None:
    peak = _peak_of_step(sharded(ctx, num_blocks=6, reshard_after_forward=False))
    assert peak.of_storages == ROOT_NBYTES + 6 * BLOCK_NBYTES


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


@distributed(2)
def test_reshard_by_hand_frees_what_unshard_by_hand_took(ctx: RankContext) -> None:
    model = sharded(ctx)
    storages = UnshardedStorages(model)
    step(model)
    model.blocks[1].unshard()
    assert storages.nbytes == BLOCK_NBYTES
    model.blocks[1].reshard()
    assert storages.nbytes == 0


class _Gathers(Observer):
    """What started and what finished gathering."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.finished: list[str] = []

    def on_transition(self, unit: str, before: str, after: str) -> None:
        if after == "UNSHARDING":
            self.started.append(unit)
        elif before == "UNSHARDING" and after == "UNSHARDED":
            self.finished.append(unit)


@distributed(2)
def test_unshard_twice_issues_one_all_gather(ctx: RankContext) -> None:
    model = sharded(ctx)
    step(model)
    gathers = _Gathers()
    with trace.observe(model, gathers):
        model.blocks[1].unshard()
        model.blocks[1].unshard()
        model.blocks[1].unshard(async_op=True).wait()
        assert (gathers.started, gathers.finished) == (["blocks.1"], ["blocks.1"])
        with torch.no_grad():
            model.blocks[1](batch())  # nor does the forward gather again
    assert gathers.started.count("blocks.1") == 1


@distributed(2)
def test_handle_waits_once_and_never_for_a_later_gather(ctx: RankContext) -> None:
    model = sharded(ctx)
    step(model)
    block, gathers = model.blocks[1], _Gathers()
    with trace.observe(model, gathers):
        handle = block.unshard(async_op=True)
        assert (gathers.started, gathers.finished) == (["blocks.1"], [])
        assert isinstance(block.linear.weight, DTensor)
        handle.wait()
        assert not isinstance(block.linear.weight, DTensor)
        handle.wait()
        assert gathers.finished == ["blocks.1"]
        block.reshard()
        second = block.unshard(async_op=True)
        handle.wait()
        assert gathers.finished == ["blocks.1"]
        second.wait()
        assert gathers.finished == ["blocks.1"] * 2
    block.reshard()


@distributed(2)
def test_handle_of_a_gather_that_was_undone_waits_for_nothing(ctx: RankContext) -> None:
    model = sharded(ctx)
    handle = model.blocks[1].unshard(async_op=True)
    model.blocks[1].reshard()
    handle.wait()
    assert isinstance(model.blocks[1].linear.weight, DTensor)


@distributed(2)
def test_observer_sees_the_life_of_a_group_in_a_step(ctx: RankContext) -> None:
    class Life(Observer):
        def __init__(self) -> None:
            self.states: list[tuple[str, str]] = []

        def on_transition(self, unit: str, before: str, after: str) -> None:
            if unit == "blocks.1":
                self.states.append((before, after))

    model, life = sharded(ctx), Life()
    once = [("SHARDED", "UNSHARDING"), ("UNSHARDING", "UNSHARDED"), ("UNSHARDED", "SHARDED")]
    for _ in range(2):
        with trace.observe(model, life):
            step(model)
    assert life.states == once * 4
    step(model)
    assert len(life.states) == 12  # nobody watches any more


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(2)
def test_parameter_objects_are_the_same_in_every_step(ctx: RankContext, reshard_after_forward: bool) -> None:
    model = sharded(ctx, reshard_after_forward=reshard_after_forward)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = [model.entry.weight, model.blocks[1].linear.weight, model.blocks[1].linear.bias]
    computed: list[nn.Parameter] = []
    model.blocks[1].linear.register_forward_pre_hook(lambda module, args: computed.append(module.weight))
    for _ in range(3):
        step(model)
        optimizer.step()
        optimizer.zero_grad()
    after = [model.entry.weight, model.blocks[1].linear.weight, model.blocks[1].linear.bias]
    assert all(before is now for before, now in zip(weights, after, strict=True))
    assert len(computed) == 3
    assert all(weight is computed[0] for weight in computed)
    assert computed[0] is not weights[1]


@distributed(2)
def test_unsharded_parameter_objects_outlive_a_load_that_replaces_the_shards(ctx: RankContext) -> None:
    """I1: what autograd has saved stays what is gathered into."""
    model = sharded(ctx)
    computed: list[nn.Parameter] = []
    model.blocks[1].linear.register_forward_pre_hook(lambda module, args: computed.append(module.weight))
    step(model)
    before = model.blocks[1].linear.weight
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    assert model.blocks[1].linear.weight is not before
    step(model)
    assert computed[1] is computed[0]


class _TwoLinears(nn.Module):
    """Two parameters of one group, large beside what a file needs around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 256, bias=False)
        self.second = nn.Linear(256, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def _with_gradients(ctx: RankContext) -> Any:
    model = fully_shard(seeded(_TwoLinears), mesh=ctx.mesh_1d())
    model(torch.ones(2, 256)).sum().backward()
    return model


@distributed(2)
def test_saved_shard_is_as_large_as_the_shard(ctx: RankContext) -> None:
    model = _with_gradients(ctx)
    for parameter in (model.first.weight, model.second.weight):
        local = parameter.to_local().detach()
        file = io.BytesIO()
        torch.save(local, file)
        nbytes = local.numel() * local.itemsize
        assert nbytes <= file.tell() < 1.1 * nbytes
        file.seek(0)
        assert torch.equal(torch.load(file), local)


@distributed(2)
def test_saved_state_dict_is_as_large_as_this_ranks_shards(ctx: RankContext) -> None:
    model = _with_gradients(ctx)
    file = io.BytesIO()
    torch.save({name: value.to_local() for name, value in model.state_dict().items()}, file)
    nbytes = sum(p.to_local().numel() * p.itemsize for p in model.parameters())
    assert nbytes <= file.tell() < 1.1 * nbytes


@distributed(2)
def test_deepcopied_parameter_has_values_and_memory_of_its_own(ctx: RankContext) -> None:
    model = _with_gradients(ctx)
    model.zero_grad()  # as in torch, deepcopy refuses gradients
    for parameter in (model.first.weight, model.second.weight):
        copied = copy.deepcopy(parameter)
        assert isinstance(copied, DTensor)
        assert copied.placements == parameter.placements
        assert torch.equal(copied.to_local(), parameter.to_local())
        before = parameter.to_local().detach().clone()
        with torch.no_grad():
            copied.zero_()
        assert torch.equal(parameter.to_local(), before)


@distributed(2)
def test_on_one_rank_the_unsharded_parameters_are_the_shards(ctx: RankContext) -> None:
    """No collective and no copy."""
    model = seeded(Stack)
    fully_shard(model, mesh=ctx.mesh_of_one())
    sharded_at = model.exit.weight.to_local().data_ptr()
    model.unshard()
    assert not isinstance(model.exit.weight, DTensor)
    assert model.exit.weight.data_ptr() == sharded_at


@distributed(2)
def test_frozen_unit_keeps_no_gradient_memory(ctx: RankContext) -> None:
    model = seeded(Stack)
    model.blocks[1].requires_grad_(False)
    shard(ctx, model)
    step(model)
    assert all(parameter.grad is None for parameter in model.blocks[1].parameters())
    assert model.blocks[0].linear.weight.grad.shape == (DIM, DIM)


def _most_sums_alive(ctx: RankContext, num_blocks: int) -> int:
    """The most flat buffers of reduce dtype that exist when a further reduction starts. Gradients are of another dtype,
    so they lie elsewhere."""
    model = seeded(lambda: Stack(num_blocks)).to(torch.bfloat16)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=ctx.mesh_2d(2, ctx.world_size // 2), mp_policy=policy)
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
def test_no_reduction_is_in_flight_after_a_step(ctx: RankContext) -> None:
    """Else it would keep its memory until the next backward."""
    model = sharded(ctx)
    for _ in range(2):
        step(model)
        unit = unit_of(model)
        assert unit is not None
        assert form_root(unit).executor.num_reductions == 0


def test_a_gather_that_cannot_start_keeps_no_memory() -> None:
    on_one_rank(_starts_no_gather)


def _starts_no_gather(ctx: RankContext) -> None:
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


def test_to_empty_puts_shards_where_they_stay() -> None:
    """Else each unit's first use would need memory for its shards a second time."""
    on_one_rank(_materialised)


def _materialised(ctx: RankContext) -> None:
    with torch.device("meta"):
        model = Stack()
    shard(ctx, model)
    model.to_empty(device="cpu")
    places = [parameter.to_local().data_ptr() for parameter in model.parameters()]
    model(batch())
    model.reshard()  # the root
    assert [parameter.to_local().data_ptr() for parameter in model.parameters()] == places
