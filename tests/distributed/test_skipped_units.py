"""Units, and parameters of a unit, that some ranks skip: nobody hangs, and every rank ends with the mean over all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2.core.comm.offload import StagedOffloadPolicy
from fsdp2.report import trace
from tests.distributed.changes import assert_gradients
from tests.distributed.support import DIM, Block, Stack, batch, compact, seeded, shard, shard_each, step
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import Check
from tests.harness.pool import shared_pool
from tests.harness.selection import in_ci

Way = Sequence[int]
Compute = Callable[[Any, Way, int], None]


Run = Callable[[Any, Tensor], Tensor]


class _Encoder(Block):
    def encode(self, x: Tensor) -> Tensor:
        return self.forward(x)


class Routed(nn.Module):
    """Blocks, of which ``way`` names those that run, in that order, and a tower that runs if it names 4. No gradient
    reaches a block that is named by its complement."""

    def __init__(self, run: Run = nn.Module.__call__) -> None:
        super().__init__()
        self.entry = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(_Encoder() for _ in range(4))
        self.tower = Stack(2)
        self.run = run

    def forward(self, x: Tensor, way: Way) -> Tensor:
        x = self.entry(x)
        for each in way:
            if each < 0:
                x = x + self.blocks[~each](x).detach()
            else:
                x = self.run(self.tower if each == 4 else self.blocks[each], x)
        return x


def _checkpointed(module: Any, x: Tensor) -> Tensor:
    return checkpoint(module, x, use_reentrant=False)


def _checkpointed_method(module: Any, x: Tensor) -> Tensor:
    """What checkpointing computes again ends with an exception inside of a registered method."""
    if isinstance(module, fsdp2.FSDPModule) and isinstance(module, _Encoder):
        fsdp2.register_fsdp_forward_method(module, "encode")
    return checkpoint(getattr(module, "encode", module), x, use_reentrant=False)


def _reentrant(module: Any, x: Tensor) -> Tensor:
    return checkpoint(module, x, use_reentrant=True) if torch.is_grad_enabled() else module(x)


def _mesh(ctx: RankContext) -> DeviceMesh:
    return ctx.mesh_1d() if ctx.world_size == 2 else ctx.mesh_2d(2, 2)


def _sharded(ctx: RankContext, make: Callable[[], Any] = Routed, **kwargs: Any) -> Any:
    model = seeded(make)
    units = (*model.blocks, *model.tower.blocks, model.tower, model)
    return _may_differ(shard_each(*units, **{"mesh": _mesh(ctx), **kwargs}))


def _may_differ(model: Any) -> Any:
    model.set_ranks_may_differ(True)
    return model


def _wrapped(ctx: RankContext) -> Any:
    """``fully_shard`` gets what is inside of the wrappers."""
    model = seeded(Routed)
    units = (*model.blocks, *model.tower.blocks, model.tower, model)
    model.blocks = nn.ModuleList(map(checkpoint_wrapper, model.blocks))
    return _may_differ(shard_each(*units, mesh=ctx.mesh_1d()))


def _loss(model: Any, way: Any, seed: int) -> Tensor:
    return model(batch(seed), way).float().square().mean()


def _step(model: Any, way: Way, seed: int) -> None:
    _loss(model, way, seed).backward()


def _assert_steps(
    ctx: RankContext,
    model: Any,
    ways: Sequence[Sequence[Way]],
    compute: Compute = _step,
    make: Callable[[], Any] = Routed,
    atol: float = 1e-6,
) -> None:
    """``ways``: per step, one for each rank. ``compute(model, way, seed)`` computes gradients."""
    for number, by_rank in enumerate(ways):
        references = [seeded(make) for _ in range(ctx.world_size)]
        for rank, reference in enumerate(references):
            for each in (reference, model) if rank == ctx.rank else (reference,):
                compute(each, by_rank[rank], 10 * number + rank)
        assert_gradients(model, *references, atol=atol)
        model.zero_grad()


# The tower's first use is in the third step, by one rank only. 3 is never used.
WAYS: list[list[Way]] = [
    [[0, 2], [1], [], [0, 1]],
    [[1], [0, 1, 2], [0], []],
    [[0, 4], [1], [2], [0]],
    [[], [1, 4], [4], [0, 4]],
]
MIXED = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed": {"mp_policy": MIXED},
    "offloaded": {"offload_policy": StagedOffloadPolicy()},
    "kept": {"reshard_after_forward": False},
    "checkpointed": {"make": partial(Routed, _checkpointed)},
    "checkpointed methods": {"make": partial(Routed, _checkpointed_method)},
    "reentrant": {"make": partial(Routed, _reentrant)},
}


def _evaluate_and_step(model: Any, way: Way, seed: int) -> None:
    with torch.no_grad():  # ranks part in evaluation, too
        _loss(model, way[:1], 0)
    _step(model, way, seed)


@pytest.mark.parametrize("setting", SETTINGS)
@distributed(2, 4)
def test_every_rank_ends_with_the_mean(ctx: RankContext, setting: str) -> None:
    ways = WAYS if setting != "reentrant" else WAYS[:2]  # the tower is a checkpoint around several units
    atol = 4e-3 if setting == "mixed" else 1e-6
    _assert_steps(ctx, _sharded(ctx, **SETTINGS[setting]), ways, _evaluate_and_step, atol=atol)


@pytest.mark.long
@distributed(4)
def test_resting_on_a_smaller_mesh(ctx: RankContext) -> None:
    _assert_steps(ctx, _sharded(ctx, mesh=ctx.mesh_1d(), reshard_after_forward=2), WAYS)


def _micro_batches(model: Any, way: Way, seed: int) -> None:
    with fsdp2.no_sync(model) if isinstance(model, fsdp2.FSDPModule) else nullcontext():
        _step(model, way[:1], seed)
    _step(model, way[1:], seed + 1)


def _two_forwards(model: Any, way: Way, seed: int) -> None:
    (_loss(model, way, seed) + _loss(model, way[-1:], seed + 1)).backward()


def _two_backwards(model: Any, way: Way, seed: int) -> None:
    loss = _loss(model, way, seed)
    loss.backward(retain_graph=True)
    (2 * loss).backward()


class Listed(nn.Module):
    """Its first and last block are one unit. A unit lies between them, and one in each."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)) for _ in "abc")

    def forward(self, x: Tensor, way: Way) -> Tensor:
        x = self.entry(x)
        for index, block in enumerate(self.blocks):
            x = block(x) if index in way else x
        return x


def _listed(ctx: RankContext) -> Any:
    model = seeded(Listed)
    first, second, third = model.blocks
    shard_each(first[0], second[0], third[0], second, [first, third], model, mesh=ctx.mesh_1d())
    return _may_differ(model)


def _limited(ctx: RankContext) -> Any:
    model = _sharded(ctx)
    _step(model, [0, 1, 2, 3, 4], 0)
    model.zero_grad()
    model.set_temporary_memory_limit(fsdp2.memory.memory_plan(model).at_least)
    return model


def _bare() -> Routed:
    model = Routed()
    model.entry = nn.Identity()  # type: ignore[assignment]
    return model


Case = tuple[Callable[[RankContext], Any], list[list[Way]], Compute, Callable[[], Any]]
SEVERAL = [[[0, 2], [1]], [[1], [0, 1, 2]], [[0, 4], [1]], [[3], [1, 4]]]
# Every rank computes with two blocks; the gradient of one rank reaches the first, that of the other the second.
CROSSED = [[[~0, 1, 2], [0, ~1, 2]], [[0, 1, ~2], [~0, ~1, 2]], [[~0], [~0]]]
NOT_IN_ORDER = [[[4, 2, 1, 0], [4, 2, 1, 0]], [[4, 0], [2, 1]], [[1], [4, 2]], [[3, 0], [1]]]
AT_FIRST_ONE = [[[0, 1, 2], []], [[], [0, 2]], [[1], [0, 1, 2]], [[0, 1, 2], [0, 1, 2]]]
CASES: dict[str, Case] = {
    "micro-batches": (_sharded, SEVERAL, _micro_batches, Routed),
    "gradients that reach other units": (_sharded, CROSSED, _step, Routed),
    "order that is not that of registration": (_sharded, NOT_IN_ORDER, _step, Routed),
    "units inside and between several modules of one unit": (_listed, AT_FIRST_ONE, _step, Listed),
    "inside of wrappers": (_wrapped, WAYS, _step, Routed),
    "limit on memory": (_limited, WAYS, _step, Routed),  # ranks withhold the same prefetches
    # A unit's hook on a tensor comes ahead of the root's on the same one.
    "root without parameters": (partial(_sharded, make=_bare), [[[0, 2, 3], [1, 3]], [[1, 3], [2, 3]]], _step, _bare),
    # What a checkpoint runs again came before a unit without a gradient on one rank, and behind it on the other.
    "reentrant, and a unit that no gradient reaches": (
        partial(_sharded, make=partial(Routed, _reentrant)),
        [[[0, ~1], [0]], [[0], [0, ~1]]],
        _two_backwards,
        Routed,
    ),
    "two forwards": (_sharded, SEVERAL, _two_forwards, Routed),
    "two backwards": (_sharded, SEVERAL, _two_backwards, Routed),
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", [*list(CASES)[:-2], *in_ci(*list(CASES)[-2:])])
@distributed(2)
def test_other_ways_steps_and_models(ctx: RankContext, case: str) -> None:
    make_sharded, *others = CASES[case]
    _assert_steps(ctx, make_sharded(ctx), *others)


class _Gated(Block):
    """Returns its input unchanged, unless ``runs``; then, a module with parameters returns that input inside."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = _Gate(DIM, DIM)

    def forward(self, x: Tensor | list[Tensor], runs: bool = True) -> Tensor:
        x = x[0] if isinstance(x, list) else x
        return super().forward(self.gate(x)) if runs else x


class _Gate(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Gated(nn.Module):
    """All blocks are called, and those that ``way`` does not name return their input."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(_Gated() for _ in range(3))

    def forward(self, x: Tensor, way: Way) -> Tensor:
        x = self.blocks[0](self.entry(x), 0 in way)
        x = self.blocks[1](x=x, runs=1 in way)
        return self.blocks[2]([x], runs=2 in way)  # type: ignore[no-any-return]


@distributed(2)
def test_units_that_return_their_input_on_one_rank(ctx: RankContext) -> None:
    """As where layers are dropped. The gradient of the output is that of the input, and comes first all the same."""
    model = _may_differ(shard(ctx, seeded(Gated)))
    fsdp2.allow_inner_losses(model)  # the hook on what the gate returns must not come after that on the unit's input

    def compute(each: Any, way: Way, seed: int) -> None:
        with trace.record(model) as recorded:
            _step(each, way, seed)
        gathered = [entry.unit for entry in recorded.entries if entry.name in ("unshard", "prefetch")]
        assert [gathered.count(f"blocks.{index}") for index in range(3)] == [2 * (each is model)] * 3

    ways = [[[0, 1, 2], [0, 1, 2]], [[1, 2], [0, 1, 2]], [[0], [1]], [[0, 1], [2]], [[], []]]
    _assert_steps(ctx, model, ways, compute, Gated)


@distributed(2)
def test_zeros_for_what_nobody_used(ctx: RankContext) -> None:
    model, references = _sharded(ctx), [seeded(Routed) for _ in range(2)]
    model.set_reduce_scatter_unused_params(True)
    for rank, each in [(ctx.rank, model), *enumerate(references)]:
        _step(each, [0, rank + 1], rank)
    for parameter in references[0].parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    assert_gradients(model, *references)


@distributed(2)
def test_frozen_units_are_gathered_as_often_as_on_ranks_that_use_them(ctx: RankContext) -> None:
    """No gradient reaches the tower, which comes first."""
    model = _sharded(ctx)
    for module in (model.entry, model.tower):
        module.requires_grad_(False)
    ways: list[list[Way]] = [[[4, 0], [4, 0]], [[4, 0], [1]], [[0], [4, 1]]]
    for number, by_rank in enumerate(ways):
        with trace.record(model) as recorded:
            _step(model, by_rank[ctx.rank], number)
        gathers = [each.unit for each in recorded.entries if each.name in ("unshard", "prefetch")]
        assert sum("tower" in unit for unit in gathers) == 3 + 1, gathers  # one block is prefetched in vain
        model.zero_grad()


# Parameters of one unit


def _one_unit(ctx: RankContext, **options: Any) -> Any:
    return _may_differ(fsdp2.fully_shard(seeded(Routed), mesh=_mesh(ctx), **options))


@pytest.mark.parametrize("setting", ["plain", "mixed", "offloaded"])
@distributed(2, 4)
def test_parameters_that_one_rank_uses_get_the_mean_on_every_rank(ctx: RankContext, setting: str) -> None:
    """Two microbatches: one block for each rank, and one that all of them use. Nobody uses the tower."""

    def compute(each: Any, way: Way, seed: int) -> None:
        for microbatch, block in enumerate(way):
            _step(each, [block], 2 * seed + microbatch)

    ways = [[[(rank + index) % 4, index] for rank in range(4)] for index in range(2)]
    atol = 2e-3 if setting == "mixed" else 1e-6
    _assert_steps(ctx, _one_unit(ctx, **SETTINGS[setting]), ways, compute, atol=atol)


@distributed(2)
def test_hooks_on_parameters_run_on_every_rank(ctx: RankContext) -> None:
    model = _one_unit(ctx)
    called: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
    _step(model, [ctx.rank], 0)
    layers = ("entry", "blocks.0.linear", "blocks.1.linear")
    assert sorted(called) == sorted(f"{layer}.{kind}" for layer in layers for kind in ("bias", "weight"))


@distributed(2)
def test_what_was_withheld_is_dropped_after_an_exception(ctx: RankContext) -> None:
    """The reduction has landed, but no rank has said yet who had a gradient."""
    model = _one_unit(ctx)
    model.set_is_last_backward(False)
    _step(model, [ctx.rank], 0)
    model.reset_iter_state()
    model.zero_grad()
    model.set_is_last_backward(True)
    _step(model, [3], 0)
    assert [block.linear.weight.grad is not None for block in model.blocks] == [False, False, False, True]


# What a rank does for units that it skips


class Short(Stack):
    """Two blocks, of which rank 1 skips the second from the second forward on."""

    num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        x = self.blocks[0](self.entry(x))
        if self.num_forwards == 1 or dist.get_rank() == 0:
            x = self.blocks[1](x)
        return self.exit(x)


def _trace(ctx: RankContext) -> str:
    model = _may_differ(shard(ctx, seeded(lambda: Short(2))))
    step(model)
    model.zero_grad()
    with trace.record(model) as recorded:
        step(model)
    return compact(recorded)


def test_a_rank_that_skips_a_unit_gathers_and_reduces_it_without_computing(golden: Check) -> None:
    used, skipped = shared_pool(2).run(_trace)
    golden(skipped)
    assert [line for line in skipped.splitlines() if line.startswith("  ")] == [
        line for line in used.splitlines() if line.startswith("  ")
    ]
