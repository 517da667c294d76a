"""``fsdp2.unsharded`` and ``fsdp2.no_sync``: what holds inside a block, and that nothing of it is left behind it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import fsdp2
from fsdp2 import MixedPrecisionPolicy
from fsdp2.report import trace
from fsdp2.tensors import BFloat16AllGatherTensor, wrap_parameters
from tests.distributed.changes import assert_gradients, double, stepped, whole
from tests.distributed.support import Stack, batch, seeded, shard, shard_units, sharded, step
from tests.harness.compare import compare_values
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import golden_on_ranks
from tests.harness.messages import error_of
from tests.harness.models import MLP, Transformer, Uneven
from tests.harness.selection import in_ci, long
from tests.harness.training import Step, one_backward
from tests.parity.test_model_parallel import tensor_parallel

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
STEP = Step(0, 0, None)


def _wire_format() -> Any:
    model = Transformer()
    wrap_parameters(model, BFloat16AllGatherTensor)
    return model


SETUPS: dict[str, Callable[[RankContext], Any]] = {
    "uneven": lambda ctx: shard_units(Uneven(), mesh=ctx.mesh_1d()),
    "last dim, resting": lambda ctx: shard_units(
        Uneven(), mesh=ctx.mesh_1d(), shard_placement_fn=lambda p: Shard(p.dim() - 1), reshard_after_forward=2
    ),
    "tied, in bf16": lambda ctx: shard_units(Transformer(tied=True), mesh=ctx.mesh_1d(), mp_policy=BF16),
    "HSDP": lambda ctx: shard_units(Uneven(), mesh=ctx.mesh_2d(2, ctx.world_size // 2)),
    "wire format": lambda ctx: shard_units(_wire_format(), mesh=ctx.mesh_1d()),
}


@pytest.mark.parametrize("setup", [*list(SETUPS)[:2], *long(*list(SETUPS)[2:])])
@pytest.mark.parametrize("rank0_only", [True, *long(False)])
@distributed(4)
def test_whole_parameters_are_written_back(ctx: RankContext, setup: str, rank0_only: bool) -> None:
    model = seeded(lambda: SETUPS[setup](ctx))
    one_backward(STEP, model)
    before, shards = whole(model), list(model.parameters())
    first = not rank0_only or ctx.rank == 0
    with fsdp2.unsharded(model, rank0_only=rank0_only, offload_to_cpu=True):
        assert all(isinstance(p, DTensor) is not first for p in model.parameters())
        if first:
            for (name, parameter), value in zip(model.named_parameters(), before.values(), strict=True):
                assert torch.equal(parameter, value), name
            double(model.parameters())
            state = model.state_dict()
            assert all(state[name].shape == value.shape for name, value in before.items())
    assert all(now is then for now, then in zip(model.parameters(), shards, strict=True))
    compare_values("parameters", whole(model), {name: 2 * value for name, value in before.items()})
    reference = seeded(lambda: SETUPS[setup](ctx))
    double(reference.parameters())
    assert torch.equal(STEP.loss(model), STEP.loss(reference))


@pytest.mark.parametrize("place", ["embedding", "output"])
@distributed(2)
def test_what_has_replaced_one_place_of_a_tie_is_written_back(ctx: RankContext, place: str) -> None:
    model = seeded(partial(Transformer, tied=True))
    before = model.embedding.weight.detach().clone()
    fsdp2.fully_shard(model, mesh=ctx.mesh_1d())
    with fsdp2.unsharded(model):
        getattr(model, place).weight = nn.Parameter(before + 1)
    assert model.embedding.weight is model.output.weight
    assert torch.equal(model.embedding.weight.full_tensor(), before + 1)


@distributed(4)
def test_what_tensor_parallelism_has_cut_stays_cut(ctx: RankContext) -> None:
    mesh, model, reference = ctx.mesh(dp=2, tp=2), seeded(MLP), seeded(MLP)
    tensor_parallel(model, mesh["tp"])
    shard_units(model, mesh=mesh["dp"])
    with fsdp2.unsharded(model):
        up = model.blocks[0].up.weight
        assert up.placements == (Shard(0),)
        assert torch.equal(up.full_tensor(), reference.blocks[0].up.weight)
        double(model.parameters())
    double(reference.parameters())
    compare_values("parameters", whole(model), whole(reference))


@distributed(2)
def test_a_module_inside_of_a_unit_has_its_own_parameters_only(ctx: RankContext) -> None:
    model = sharded(ctx)
    with fsdp2.unsharded(model.exit):
        assert not isinstance(model.exit.weight, DTensor)
        assert isinstance(model.entry.weight, DTensor)
        with torch.no_grad():
            model.exit(batch())  # no unit: nothing is gathered for it
        model.exit.bias = nn.Parameter(torch.full_like(model.exit.bias, 3.0))
    assert (model.exit.bias.full_tensor() == 3).all()


class _Generating(Stack):
    def generate(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        for _ in range(tokens):
            x = self(x)
        return x


RUNS: dict[str, Callable[[RankContext], dict[str, Any]]] = {
    "FSDP": lambda ctx: {"mesh": ctx.mesh_1d()},
    "HSDP in bf16": lambda ctx: {"mesh": ctx.mesh_2d(2, ctx.world_size // 2), "mp_policy": BF16},
}


@pytest.mark.parametrize("rank0_only", [False, True])
@pytest.mark.parametrize("setup", RUNS)
@distributed(2)
def test_forwards_without_gradients_run_on_whole_parameters(ctx: RankContext, setup: str, rank0_only: bool) -> None:
    """As those of the unsharded model: nothing is communicated, so ranks may differ; nothing is cast."""
    model, reference = seeded(_Generating), seeded(_Generating)
    shard(ctx, model, **RUNS[setup](ctx))
    fsdp2.register_fsdp_forward_method(model, "generate")
    step(model)
    model.zero_grad()
    tokens = 1 + ctx.rank
    with trace.record(model) as seen, fsdp2.unsharded(model, rank0_only=rank0_only), torch.no_grad():
        if rank0_only and ctx.rank > 0:
            assert "some parameters of the unit" in error_of(lambda: model(batch()))
        else:
            assert torch.equal(model.generate(batch(), tokens), reference.generate(batch(), tokens))
            assert torch.equal(model.blocks[1](batch()), reference.blocks[1](batch()))
            double(model.parameters())
            assert not torch.equal(model(batch()), reference(batch()))
    assert {entry.name for entry in seen.entries} <= {"reshard"}
    double(reference.parameters())
    compare_values("parameters", whole(model), whole(reference))
    torch.testing.assert_close(step(model).float(), step(reference), rtol=0.1, atol=0.1)


NOT_WRITTEN: dict[str, tuple[dict[str, bool], str | None]] = {
    "not asked to": ({"writeback": False}, None),
    "exception": ({}, "ZeroDivisionError: exception"),
    "another shape on the first rank": ({"rank0_only": True}, "expected a parameter of shape (32,)"),
    "exception on the last rank": ({"rank0_only": True}, "ZeroDivisionError: exception on the last rank"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("why", [*list(NOT_WRITTEN)[:3], *in_ci(*list(NOT_WRITTEN)[3:])])
@distributed(2)
def test_what_one_rank_must_not_write_no_rank_writes_or_waits_for(ctx: RankContext, why: str) -> None:
    model, (options, error) = sharded(ctx), NOT_WRITTEN[why]
    before = whole(model)

    def write() -> None:
        with fsdp2.unsharded(model, **options):
            if ctx.rank == 0 or "rank0_only" not in options:
                nn.init.zeros_(model.entry.weight)
                if "shape" in why:
                    model.exit.bias = nn.Parameter(torch.zeros(3))
            if "exception" in why and (ctx.rank == 1 or "rank" not in why):
                raise ZeroDivisionError(why)

    if error is None:
        write()
    else:
        assert error in " ".join(error_of(write).split())
    compare_values("parameters", whole(model), before)
    step(model)


@golden_on_ranks()
def test_what_is_refused_changes_nothing(ctx: RankContext) -> str:
    model = sharded(ctx)
    expected = step(model)
    model.zero_grad()

    def other_shape() -> None:
        with fsdp2.unsharded(model):
            model.exit.bias = nn.Parameter(torch.zeros(3))

    found = [error_of(lambda: fsdp2.unsharded(nn.Linear(2, 2)).__enter__()), error_of(other_shape)]
    with fsdp2.unsharded(model.blocks[1]):
        found.append(error_of(lambda: fsdp2.unsharded(model).__enter__()))
        found.append(error_of(lambda: model.blocks[1](batch())))
        with torch.no_grad():  # the root's own parameters are shards
            found.append(error_of(lambda: model(batch())).partition(". Last")[0])
    model.reset_iter_state()
    model.blocks[1].register_forward_pre_hook(lambda *_: found.append(error_of(fsdp2.unsharded(model).__enter__)))
    model.blocks[2].register_forward_pre_hook(lambda *_: found.append(error_of(fsdp2.unsharded(model.exit).__enter__)))
    assert torch.equal(step(model), expected)
    return "\n".join(found)


@pytest.mark.parametrize("replicas", [1, 2])
@distributed(2)
def test_no_sync_accumulates_and_puts_every_setting_back(ctx: RankContext, replicas: int) -> None:
    model = sharded(ctx, mesh=ctx.mesh_2d(replicas, 2 // replicas))
    model.blocks[2].set_requires_gradient_sync(False)
    with fsdp2.no_sync(nn.ModuleList([model])):  # any module with units in it
        step(model, seed=0)
        assert all(parameter.grad is None for parameter in model.parameters())
    step(model, seed=1)
    reference = stepped(0, 1)
    reference.blocks[2].zero_grad()
    assert_gradients(model, reference)


@distributed(2)
def test_finalization_inside_no_sync_reduces_nothing(ctx: RankContext) -> None:
    """Not even over the replicate axis, what a backward before the block has reduced over the shard axis only."""
    model = sharded(ctx, mesh=ctx.mesh_2d(2, 1))
    model.set_manual_backward_finalization(True)
    model.set_requires_all_reduce(False)
    step(model, seed=0)
    model.finalize_backward()
    model.set_requires_all_reduce(True)
    with fsdp2.no_sync(model):
        step(model, seed=1)
        model.finalize_backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    step(model, seed=2)
    model.finalize_backward()
    assert_gradients(model, stepped(0, 1, 2))
