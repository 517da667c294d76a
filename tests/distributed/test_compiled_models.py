"""Whole models compiled: graphs break at the units, hooks of all units run, nothing compiles after the warm-up."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import fully_shard
from fsdp2.tools import trace
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
from tests.distributed.support import Stack, batch, seeded, shard
from tests.harness.distributed import RankContext, distributed
from tests.harness.selection import long

# Before the first block, a block (all share one graph), after the last; for training and for evaluation.
NUM_GRAPHS = 3 * 2


def _compile(model: Any, way: str, **options: Any) -> Any:
    if way == "torch.compile(model)":
        return torch.compile(model, backend=BACKEND, **options)
    model.compile(backend=BACKEND, **options)
    return model


def _assert_compiled_like_eager(ctx: RankContext, way: str, **kwargs: Any) -> None:
    start_compiling()
    model = shard(ctx, seeded(Unrolled), **kwargs)
    outputs = train(model, _compile(model, way))
    assert num_graphs() == NUM_GRAPHS
    assert_alike(outputs, train(shard(ctx, seeded(Unrolled), **kwargs)))


WAYS = ["torch.compile(model)", "model.compile()"]
MORE_WAYS = [(WAYS[0], None), (WAYS[1], False)]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("way", "kept"), [(WAYS[1], True), *(pytest.param(*case, marks=pytest.mark.long) for case in MORE_WAYS)]
)
@distributed(2)
def test_graphs_break_at_the_units_and_nowhere_else(ctx: RankContext, way: str, kept: bool | None) -> None:
    _assert_compiled_like_eager(ctx, way, reshard_after_forward=kept)
    assert breaks() == ["Skip inlining `torch.compiler.disable()`d function"]


@pytest.mark.ci
@distributed(2)
def test_calls_that_the_compiler_leaves_to_python_are_watched_without_it(ctx: RankContext) -> None:
    """At a break in a loop, the compiler gives up on the frame: the calls of that frame run as they are."""
    start_compiling()
    model = shard(ctx, seeded(Stack))
    outputs = train(model, _compile(model, WAYS[0]))
    assert unsupported() == ["Skip inlining `torch.compiler.disable()`d function"], unsupported()
    assert_alike(outputs, train(shard(ctx, seeded(Stack))))


@pytest.mark.long  # blocks that rest on a smaller mesh are not: test_compiled_blocks.py
@distributed(4)
def test_compiled_model_that_rests_on_a_smaller_mesh(ctx: RankContext) -> None:
    _assert_compiled_like_eager(ctx, WAYS[0], reshard_after_forward=2)


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
@pytest.mark.parametrize("way", [WAYS[0], *long(WAYS[1])])
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


class _Around(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.model(2 * x))


@pytest.mark.long
@distributed(2)
def test_plain_module_around_the_root_is_compiled_too(ctx: RankContext) -> None:
    start_compiling()
    model = shard(ctx, seeded(Unrolled))
    outputs = train(model, torch.compile(_Around(model), backend=BACKEND))
    assert num_graphs() == NUM_GRAPHS + 2 * 2
    reference = seeded(Unrolled)
    assert_alike(outputs, train(reference, _Around(reference)))


@pytest.mark.long
@distributed(2)
def test_compiling_says_nothing(ctx: RankContext) -> None:
    """Neither warnings, which are errors here, nor messages of the compiler's loggers."""
    start_compiling()
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
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
