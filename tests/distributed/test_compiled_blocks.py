"""Compiled blocks and models compute the same, hooks stay out of graphs, and nothing compiles after the warm-up."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import fully_shard
from fsdp2.report import trace
from tests.distributed.changes import assert_gradients, step_and_zero
from tests.distributed.compile_support import (
    BACKEND,
    Unrolled,
    assert_alike,
    breaks,
    num_graphs,
    start_compiling,
    train,
    unsupported,
)
from tests.distributed.support import DIM, Block, Stack, batch, seeded, shard, sharded
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import Block as TwoLayers
from tests.harness.selection import in_ci, long

OPTIONS: dict[str, Any] = {"backend": BACKEND, "fullgraph": True}  # hooks run outside of the block's graph


def _compile_method(block: Any) -> Any:
    block.compile(**OPTIONS)
    return block


def _compile_attribute(block: Any, name: str) -> Any:
    setattr(block, name, torch.compile(getattr(block, name), **OPTIONS))
    return block


COMPILE: dict[str, Callable[[Any], Any]] = {
    "block.compile()": _compile_method,
    "torch.compile(block)": lambda block: torch.compile(block, **OPTIONS),
    "torch.compile(block.forward)": lambda block: _compile_attribute(block, "forward"),
    "torch.compile(block.linear)": lambda block: _compile_attribute(block, "linear"),
}


def _compile_blocks(model: Any) -> Any:
    for block in model.blocks:
        block.compile(**OPTIONS)
    return model


def _assert_compiled_like_eager(
    ctx: RankContext,
    make: Callable[[], Any] = Stack,
    way: str = "block.compile()",
    before: bool = False,
    atol: float = 1e-5,
    **kwargs: Any,
) -> None:
    """Blocks are compiled before or after each becomes a unit. They are alike, so they share a graph for training and
    one for evaluation."""
    start_compiling()
    model, options = seeded(make), {"mesh": ctx.mesh_1d(), **kwargs}
    for index, block in enumerate(model.blocks):
        unit = fully_shard(COMPILE[way](block) if before else block, **options)
        model.blocks[index] = unit if before else COMPILE[way](unit)
    outputs = train(fully_shard(model, **options))
    assert num_graphs() == 2
    assert_alike(outputs, train(shard(ctx, seeded(make), **kwargs)), atol=atol)


class _CheckpointedInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def _stack_of(make_block: Callable[[], nn.Module]) -> Callable[[], Stack]:
    def make() -> Stack:
        model = Stack()
        model.blocks = nn.ModuleList(make_block() for _ in model.blocks)
        return model

    return make


MIXED = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# Of what programs cannot say: see tests/programs/features.py, "block.compiled".
CASES: dict[str, dict[str, Any]] = {
    "before": {"before": True},
    "mixed precision": {"mp_policy": MIXED, "atol": 2e-2},  # fused operations round once, eager ones twice
    "after": {},
    "checkpointed inside": {"make": _stack_of(_CheckpointedInside)},
    "checkpointed around": {"make": _stack_of(lambda: checkpoint_wrapper(Block()))},
    **{f"{way}, {before}": {"way": way, "before": before} for way in [*COMPILE][1:] for before in (True, False)},
}


@pytest.mark.ci
@pytest.mark.parametrize("case", [*[*CASES][:2], *long(*[*CASES][2:])])
@distributed(2)
def test_compiled_blocks_compute_as_eager_ones(ctx: RankContext, case: str) -> None:
    _assert_compiled_like_eager(ctx, **CASES[case])


@pytest.mark.parametrize("hooks", ["users-hook", *in_ci("inner-losses"), *long("tensor-parallelism")])
@distributed(2)
def test_blocks_with_hooks_inside_compile_whole(ctx: RankContext, hooks: str) -> None:
    """The compiler looks into the calls of modules with hooks. ``fullgraph`` refuses what it cannot trace there."""
    start_compiling()
    mesh = ctx.mesh(dp=1, tp=2) if hooks == "tensor-parallelism" else None
    outputs, gradients = [], []
    for is_compiled in (True, False):
        model = seeded(_stack_of(lambda: TwoLayers(DIM)))
        for block in model.blocks:
            if mesh is not None:
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            else:
                block.down.register_forward_hook(lambda module, args, output: 2 * output)
        shard(ctx, model, mesh=mesh["dp"] if mesh is not None else ctx.mesh_1d())
        if is_compiled:
            _compile_blocks(model)
        if hooks == "inner-losses":
            fsdp2.allow_inner_losses(model)
        outputs.append(model(batch()))
        outputs[-1].sum().backward()
        gradients.append([param.grad.full_tensor() for param in model.parameters()])
    assert_alike(outputs[:1], outputs[1:])
    assert_alike(*gradients, atol=1e-4)


@pytest.mark.long
@distributed(4)
def test_compiled_model_rests_on_a_smaller_mesh(ctx: RankContext) -> None:
    _assert_model_like_eager(ctx, WAYS[0], reshard_after_forward=2)


@distributed(2)
def test_frozen_and_thawed_blocks_compile_once_more(ctx: RankContext) -> None:
    """Whether a parameter is trained decides what the compiler saves; going back compiles nothing."""
    start_compiling()
    model, reference = _compile_blocks(sharded(ctx)), seeded(Stack)
    seen = []
    for requires_grad in (True, False, True, False):
        for each in (model, reference):
            each.zero_grad()
            each.blocks.requires_grad_(requires_grad)
            each(batch()).sum().backward()
        seen.append(num_graphs())
        assert_gradients(model, reference, atol=1e-4)
    assert seen == [1, 2, 2, 2]


@pytest.mark.long
@distributed(2)
def test_adapters_sharded_under_compiled_blocks(ctx: RankContext) -> None:
    """A unit inside of a compiled one breaks its graph, so that its hooks run."""
    start_compiling()
    models = []
    for is_compiled in (True, False):
        model = sharded(ctx)
        step_and_zero(model)
        torch.manual_seed(1)
        for block in model.blocks:
            block.linear = nn.Sequential(block.linear, nn.Linear(32, 32))
            fully_shard(block.linear[1], mesh=ctx.mesh_1d())
            if is_compiled:
                block.compile(backend=BACKEND)
        models.append(model)
    assert_alike(train(models[0]), train(models[1]))


# Whole models: graphs break at the units, hooks of all units run, nothing compiles after the warm-up

# Before the first block, a block (all share one graph), after the last; for training and for evaluation.
NUM_GRAPHS = 3 * 2


def _compile(model: Any, way: str) -> Any:
    if way == "torch.compile(model)":
        return torch.compile(model, backend=BACKEND)
    model.compile(backend=BACKEND)
    return model


class _Around(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.model(2 * x))


def _assert_model_like_eager(
    ctx: RankContext,
    way: str,
    make: Callable[[], Any] = Unrolled,
    around: Callable[[Any], Any] = lambda model: model,
    **options: Any,
) -> None:
    start_compiling()
    model, eager = (shard(ctx, seeded(make), **options) for _ in range(2))
    outputs = train(model, _compile(around(model), way))
    assert make is Stack or num_graphs() == NUM_GRAPHS + 4 * (around is _Around)
    assert_alike(outputs, train(eager, around(eager)))


WAYS = ["torch.compile(model)", "model.compile()"]


@pytest.mark.ci
@pytest.mark.parametrize("case", [(WAYS[1], True), *long((WAYS[0], None), (WAYS[1], False))], ids=str)
@distributed(2)
def test_graphs_break_at_the_units_and_nowhere_else(ctx: RankContext, case: tuple[str, bool | None]) -> None:
    way, kept = case
    _assert_model_like_eager(ctx, way, reshard_after_forward=kept)
    assert breaks() == ["Skip inlining `torch.compiler.disable()`d function"]


@pytest.mark.ci
@distributed(2)
def test_calls_that_the_compiler_leaves_to_python_are_watched_without_it(ctx: RankContext) -> None:
    """At a break in a loop, the compiler gives up on the frame: the calls of that frame run as they are."""
    _assert_model_like_eager(ctx, WAYS[0], Stack)
    assert unsupported() == ["Skip inlining `torch.compiler.disable()`d function"], unsupported()


@pytest.mark.parametrize("way", WAYS)
@distributed(2)
def test_compiled_model_does_the_same_as_the_eager_one(ctx: RankContext, way: str) -> None:
    """Events and actions of all units, so no unit is inlined without its hooks."""
    start_compiling()
    traces = []
    for is_compiled in (True, False):
        model = shard(ctx, seeded(Unrolled))
        called = _compile(model, way) if is_compiled else model
        with trace.record(model) as recorded:
            for index in range(3):
                called(batch(index)).sum().backward()
        traces.append(str(recorded))
    assert traces[0] == traces[1]
    assert "pre_forward second" in traces[0]


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@distributed(2)
def test_model_that_ran_compiled_before_it_was_sharded(ctx: RankContext, way: str) -> None:
    """The graphs of the plain model must not be used any more: they have no hooks."""
    start_compiling()
    model, reference = seeded(Unrolled), seeded(Unrolled)
    called = _compile(model, way)
    assert torch.allclose(called(batch()), reference(batch()), atol=1e-6)
    assert num_graphs() == 1
    shard(ctx, model)
    assert_alike(train(model, called), train(reference))
    assert num_graphs() == 1 + NUM_GRAPHS


@pytest.mark.ci
@distributed(2)
def test_one_unit_compiles_to_one_graph(ctx: RankContext) -> None:
    start_compiling()
    model = fully_shard(seeded(Unrolled), mesh=ctx.mesh_1d())
    outputs = train(model, torch.compile(model, backend=BACKEND, fullgraph=True))
    assert num_graphs() == 2
    assert_alike(outputs, train(seeded(Unrolled)))


@pytest.mark.long
@distributed(2)
def test_plain_module_around_the_root_is_compiled_too(ctx: RankContext) -> None:
    _assert_model_like_eager(ctx, WAYS[0], around=_Around)


@pytest.mark.long
@distributed(2)
def test_compiling_says_nothing(ctx: RankContext) -> None:
    """Neither warnings, which are errors here, nor messages of the compiler's loggers."""
    start_compiling()
    handler = logging.StreamHandler(stream := io.StringIO())
    loggers = [logging.getLogger(name) for name in ("torch._dynamo", "torch._functorch", "fsdp2")]
    model = shard(ctx, seeded(Unrolled))
    for block in model.blocks:
        block.compile(backend=BACKEND)
    for logger in loggers:
        logger.addHandler(handler)
    train(model, torch.compile(model, backend=BACKEND))
    for logger in loggers:
        logger.removeHandler(handler)
    assert stream.getvalue() == ""


@pytest.mark.in_turns
@pytest.mark.long  # generating code takes the time; what is compiled is the same with the other tests' backend
@pytest.mark.parametrize("what", ["blocks", "model"])
@distributed(2, timeout_s=240)
def test_inductor_computes_the_same(ctx: RankContext, what: str) -> None:
    """With the default backend, which generates code, for both ways to compile."""
    start_compiling()
    model = shard(ctx, seeded(Unrolled))
    called = torch.compile(model) if what == "model" else model
    if what == "blocks":
        for block in model.blocks:
            block.compile()
    outputs = train(model, called)
    assert num_graphs() == (NUM_GRAPHS if what == "model" else 2)
    assert_alike(outputs, train(shard(ctx, seeded(Unrolled))))
