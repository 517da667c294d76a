"""What the setters that control a step do beyond its numbers: memory, what is in flight, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from fsdp2 import register_fsdp_forward_method, share_comm_ctx
from fsdp2.core.group.all_gather import Gather
from fsdp2.core.runtime.unit import unit_of
from fsdp2.core.runtime.unit_tree import tree_of
from fsdp2.report import trace
from tests.distributed.changes import assert_gradients, evaluate, step_and_zero_all, stepped, whole
from tests.distributed.support import (
    BLOCK_NBYTES,
    ROOT_NBYTES,
    Stack,
    UnshardedStorages,
    batch,
    compact,
    seeded,
    shard,
    shard_units,
    sharded,
    step,
)
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import golden_on_ranks
from tests.harness.messages import error_of
from tests.harness.models import MLP
from tests.harness.training import Step, one_backward

# Reductions in flight


@pytest.mark.parametrize("num_buffers", [None, 3])
@golden_on_ranks()
def test_one_reduction_is_in_flight_unless_told_otherwise(ctx: RankContext, num_buffers: int | None) -> str:
    """At the start of each block's backward, the blocks whose gradients have landed."""
    model = sharded(ctx, num_blocks=5)
    if num_buffers is not None:  # behind a first step, which has used another number
        step(model)
        model.zero_grad()
        model.set_reduce_scatter_max_input_buffers(num_buffers)
    found = []

    class Watch(fsdp2.core.Observer):
        def on_event(self, event: str, unit: str) -> None:
            if event == "pre_backward" or event == "end_backward":
                landed = [str(i) for i, block in enumerate(model.blocks) if block.linear.weight.grad is not None]
                found.append(f"{event} {unit}: {' '.join(landed) or 'none'}")

    with trace.observe(model, Watch()):
        step(model)
    assert all(parameter.grad is not None for parameter in model.parameters())
    return "\n".join(found)


# Unsharding in backward


@golden_on_ranks()
def test_unit_is_not_gathered_for_backward_though_backward_reads_it(ctx: RankContext) -> str:
    model = sharded(ctx, num_blocks=2)
    model.blocks[0].set_unshard_in_backward(False)
    y = model(batch())
    with trace.record(model) as recorded:
        error = error_of(y.square().mean().backward)  # what backward does read is not there
    model.reset_iter_state()
    return compact(recorded) + "\n" + error


# Memory that is kept


# 4 MiB is beyond what the pool of freed memory takes.
@pytest.mark.parametrize(("dim", "reshard"), [(32, None), (1024, None), (32, 2)])
@distributed(4)
def test_kept_memory_stays_where_it_is(ctx: RankContext, dim: int, reshard: int | None) -> None:
    model, reference = (seeded(lambda: MLP(dim=dim)) for _ in range(2))
    shard_units(model, mesh=ctx.mesh_1d(), reshard_after_forward=reshard)
    model.set_keep_unsharded_storage(True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    places: list[int] = []  # where the parameters of each block lie, whenever it runs
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: places.append(next(module.parameters()).data_ptr()))
    for _ in range(3):
        for each in (model, reference):
            one_backward(Step(0, 0, None), each)
        step_and_zero_all(optimizers)
    assert places == places[:3] * 3
    assert len(set(places)) == 3
    torch.testing.assert_close(whole(model), whole(reference), rtol=1e-5, atol=1e-5)


@distributed(2)
def test_memory_is_freed_at_the_next_reshard_once_it_need_not_be_kept(ctx: RankContext) -> None:
    model = sharded(ctx, num_blocks=2)
    storages = UnshardedStorages(model)
    model.blocks[0].set_keep_unsharded_storage(True)
    step(model)
    assert storages.nbytes == BLOCK_NBYTES
    model.set_keep_unsharded_storage(True, recurse=False)
    step(model)
    assert storages.nbytes == BLOCK_NBYTES + ROOT_NBYTES
    model.set_keep_unsharded_storage(False)
    step(model)
    assert storages.nbytes == 0


@distributed(4)
def test_shards_on_a_node_are_gathered_from_until_the_parameters_change(ctx: RankContext) -> None:
    issued: list[Gather] = []
    issue = Gather.issue
    model = sharded(ctx, num_blocks=2, reshard_after_forward=2)
    model.set_reshard_after_backward(2)
    groups = [group for unit in (*model.blocks, model) for group in unit._unit().groups]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def gathers_of(act: Callable[[], object]) -> tuple[int, int]:
        """Over all ranks, and inside a node."""
        issued.clear()
        with mock.patch.object(Gather, "issue", lambda gather: (issued.append(gather), issue(gather))):
            act()
        smaller = [group.unsharded.post_forward.gather for group in groups if group.unsharded.post_forward is not None]
        inside = sum(gather in smaller for gather in issued)
        return len(issued) - inside, inside

    num_units = len(groups)
    assert gathers_of(lambda: step(model)) == (num_units, num_units)
    assert gathers_of(lambda: step(model)) == (0, 2 * num_units)
    assert gathers_of(lambda: evaluate(model)) == (0, num_units)
    optimizer.step()
    assert gathers_of(lambda: step(model)) == (num_units, num_units)
    model.load_state_dict(model.state_dict())
    assert gathers_of(lambda: evaluate(model)) == (num_units, 0)
    step(model)
    for value in model.state_dict().values():
        value.detach().to_local().mul_(0.5)  # as torch.distributed.checkpoint loads: unnoticed
    assert gathers_of(lambda: step(model)) == (num_units, num_units)
    with torch.no_grad():
        model.entry.weight.zero_()  # in the root's group
    assert gathers_of(lambda: step(model)) == (1, 2 * num_units - 1)
    for unit in (*model.blocks, model):
        unit.reshard()  # as ranks do that write to some shards only
    assert gathers_of(lambda: step(model)) == (num_units, num_units)
    sent = [storage for group in groups for storage, _ in group.unsharded.post_forward._memory]
    assert all(storage.nbytes() > 0 for storage in sent)
    model.set_reshard_after_backward(True)
    assert [storage.nbytes() for storage in sent] == [0] * len(sent)
    assert gathers_of(lambda: step(model)) == (num_units, num_units)


@distributed(4)
def test_ranks_to_keep_shards_on_are_those_of_reshard_after_forward(ctx: RankContext) -> None:
    model = sharded(ctx, num_blocks=2, reshard_after_forward=2)
    found = error_of(lambda: model.set_reshard_after_backward(4))
    assert found == (
        "ValueError: set_reshard_after_backward(4): unit 'FSDPStack' has reshard_after_forward=2. Pass\n"
        "reshard_after_forward=4 to fully_shard, or a bool here."
    )
    plain = sharded(ctx, num_blocks=2)
    assert "has reshard_after_forward=True or False" in error_of(lambda: plain.set_reshard_after_backward(2))


# Registered methods


class _WithMethods(Stack):
    label = "no method"

    def encode(self, x: Tensor) -> Tensor:
        """Half of the forward."""
        return self.blocks[0](self.entry(x))

    def failing(self, x: Tensor) -> Tensor:
        self.encode(x)
        raise ArithmeticError("as planned")


@golden_on_ranks()
def test_registered_method_runs_like_a_forward(ctx: RankContext) -> str:
    model = shard(ctx, seeded(_WithMethods))
    for _ in range(2):  # the second call changes nothing
        register_fsdp_forward_method(model, "encode")
    assert model.encode.__doc__ == "Half of the forward."
    with trace.record(model) as recorded:
        model.encode(batch()).square().mean().backward()
    return compact(recorded)


@distributed(2)
def test_model_recovers_from_a_registered_method_that_raised(ctx: RankContext) -> None:
    model = shard(ctx, seeded(_WithMethods))
    register_fsdp_forward_method(model, "encode")
    register_fsdp_forward_method(model, "failing")
    reference = seeded(_WithMethods)
    expected = reference.encode(batch())
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            model.failing(batch())
        assert torch.allclose(model.encode(batch()), expected, atol=1e-6)
        with pytest.raises(ArithmeticError):
            model.failing(batch())
        for each in (model, reference):
            step(each)
    model.reshard()  # a root keeps its parameters after forward
    assert_gradients(model, reference)


class _Caller(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model.encode(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("order", ["compiled first", "registered first", "called by a compiled module"])
@distributed(2)
def test_registered_method_and_compilation(ctx: RankContext, order: str) -> None:
    model, reference = shard(ctx, seeded(_WithMethods)), seeded(_WithMethods)
    if order == "compiled first":
        model.encode = torch.compile(model.encode, backend="aot_eager")
    register_fsdp_forward_method(model, "encode")
    encode: Any = _Caller(model) if order.startswith("called") else model.encode
    if order != "compiled first":
        encode = torch.compile(encode, backend="aot_eager")
    warnings.filterwarnings("ignore", message=".*is not a leaf Tensor.*")  # the compiler looks at .grad of inputs
    for seed in range(3):
        expected, actual = reference.encode(batch(seed)), encode(batch(seed))
        assert torch.allclose(actual, expected, atol=1e-5)
        for output in (actual, expected):
            output.square().mean().backward()
    assert_gradients(model, reference, atol=1e-4)


@golden_on_ranks()
def test_method_that_does_not_exist(ctx: RankContext) -> str:
    model = shard(ctx, seeded(_WithMethods))
    plain = _WithMethods()
    for name in ("encode", "no such method"):  # a module that is not sharded stays as it is
        register_fsdp_forward_method(plain, name)
        assert name not in vars(plain)
    names = ("encod", "label", "xyz")
    return "\n".join(error_of(partial(register_fsdp_forward_method, model, name)) for name in names)


# Roots that share units


@distributed(2)
def test_a_root_that_takes_a_trunk_back_follows_what_was_set_meanwhile(ctx: RankContext) -> None:
    """The gradients of the trunk stayed on their rank: when communication was allowed again, another root had it."""
    trunk = sharded(ctx)
    first, second = (fsdp2.fully_shard(nn.Sequential(trunk), mesh=ctx.mesh_1d()) for _ in range(2))
    first.set_requires_gradient_sync(False)
    step(first)
    evaluate(second)
    first.set_requires_gradient_sync(True)
    step(first)
    assert_gradients(trunk, stepped(0, 0))


# Shared streams


@distributed(2)
def test_roots_share_streams_from_the_start(ctx: RankContext) -> None:
    models = [sharded(ctx), sharded(ctx)]
    first, second = (tree_of(unit_of(model)).executor.streams for model in models)  # type: ignore[arg-type]
    assert first is second
    for roots in ([], models):
        share_comm_ctx(roots)
