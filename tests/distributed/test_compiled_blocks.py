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
from fsdp2.tensors import BFloat16AllGatherTensor
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
from tests.distributed.support import DIM, Block, Stack, batch, seeded, shard
from tests.harness.distributed import RankContext, distributed
from tests.harness.selection import in_ci, long

OPTIONS: dict[str, Any] = {"backend": BACKEND, "fullgraph": True}  # hooks run outside of the block's graph


def _compile_method(block: Any) -> Any:
    block.compile(**OPTIONS)
    return block


def _compiled(name: str) -> Callable[[Any], Any]:
    def compile_attribute(block: Any) -> Any:
        setattr(block, name, torch.compile(getattr(block, name), **OPTIONS))
        return block

    return compile_attribute


COMPILE: dict[str, Callable[[Any], Any]] = {
    "block.compile()": _compile_method,
    "torch.compile(block)": lambda block: torch.compile(block, **OPTIONS),
    "torch.compile(block.forward)": _compiled("forward"),
    "torch.compile(block.linear)": _compiled("linear"),
}


def _shard(ctx: RankContext, model: Any, compile_block: Callable[[Any], Any], *, before: bool, **kwargs: Any) -> Any:
    """Every block as a unit, compiled before or after that, then the root."""
    mesh = kwargs.pop("mesh", ctx.mesh_1d())
    for index, block in enumerate(model.blocks):
        compiled = compile_block(block) if before else block
        fsdp2.fully_shard(compiled, mesh=mesh, **kwargs)
        model.blocks[index] = compiled if before else compile_block(block)
    return fsdp2.fully_shard(model, mesh=mesh, **kwargs)


def _same(block: Any) -> Any:
    return block


def _assert_compiled_like_eager(
    ctx: RankContext,
    make: Callable[[], Any] = Stack,
    compile_block: Callable[[Any], Any] = _compile_method,
    before: bool = False,
    atol: float = 1e-5,
    **kwargs: Any,
) -> None:
    """Blocks are alike, so they share a graph for training and one for evaluation."""
    start_compiling()
    outputs = train(_shard(ctx, seeded(make), compile_block, before=before, **kwargs))
    assert num_graphs() == 2
    assert_alike(outputs, train(_shard(ctx, seeded(make), _same, before=False, **kwargs)), atol=atol)


@pytest.mark.ci
@pytest.mark.parametrize("before", [True, *long(False)], ids=["before", "after"])
@pytest.mark.parametrize("way", ["block.compile()", *long(*list(COMPILE)[1:])])
@distributed(2)
def test_compiled_before_or_after_fully_shard(ctx: RankContext, way: str, before: bool) -> None:
    _assert_compiled_like_eager(ctx, Stack, COMPILE[way], before)


class _CheckpointedInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def _stack_of(make_block: Callable[[], nn.Module]) -> Callable[[], Stack]:
    def make() -> Stack:
        model = Stack()
        model.blocks = nn.ModuleList(make_block() for _ in model.blocks)
        return model

    return make


def _with_hooks() -> nn.Module:
    block = Block()
    block.linear.weight = nn.Parameter(BFloat16AllGatherTensor(block.linear.weight.detach()))
    return block


MIXED = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
VARIANTS: dict[str, tuple[Callable[[], Stack], dict[str, Any]]] = {
    "mixed precision": (Stack, {"mp_policy": MIXED, "atol": 2e-2}),  # fused operations round once, eager ones twice
    "kept": (Stack, {"reshard_after_forward": False}),
    "resharded": (Stack, {"reshard_after_forward": True}),
    "checkpointed inside": (_stack_of(_CheckpointedInside), {}),
    "checkpointed around": (_stack_of(lambda: checkpoint_wrapper(Block())), {}),
    "hooks": (_stack_of(_with_hooks), {}),
}


@pytest.mark.ci
@pytest.mark.parametrize("variant", ["mixed precision", *long(*list(VARIANTS)[1:])])
@distributed(2)
def test_compiled_with_every_option(ctx: RankContext, variant: str) -> None:
    make, kwargs = VARIANTS[variant]
    _assert_compiled_like_eager(ctx, make, **kwargs)


class _Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def _in_parallel(block: nn.Module, ctx: RankContext) -> None:
    parallelize_module(block, ctx.mesh(dp=1, tp=2)["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _doubled(block: nn.Module, ctx: RankContext) -> None:
    block.down.register_forward_hook(lambda module, args, output: 2 * output)


def _doubled_and_watched(block: nn.Module, ctx: RankContext) -> None:
    """With a unit that allows losses inside."""
    _doubled(block, ctx)


@pytest.mark.parametrize(
    "add_hooks",
    [_doubled, *in_ci(_doubled_and_watched), *long(_in_parallel)],
    ids=["users-hook", "inner-losses", "tensor-parallelism"],
)
@distributed(2)
def test_blocks_with_hooks_inside_compile_whole(
    ctx: RankContext, add_hooks: Callable[[nn.Module, RankContext], None]
) -> None:
    """The compiler looks into the calls of modules with hooks. ``fullgraph`` refuses what it cannot trace there."""
    start_compiling()
    mesh = ctx.mesh(dp=1, tp=2)["dp"] if add_hooks is _in_parallel else ctx.mesh_1d()
    outputs, gradients = [], []
    for compile_block in (_compile_method, _same):
        model = seeded(_stack_of(_Halves))
        for block in model.blocks:
            add_hooks(block, ctx)
        model = _shard(ctx, model, compile_block, before=False, mesh=mesh)
        if add_hooks is _doubled_and_watched:
            fsdp2.allow_inner_losses(model)
        outputs.append(model(batch()))
        outputs[-1].sum().backward()
        gradients.append([param.grad.full_tensor() for param in model.parameters()])
    assert_alike(outputs[:1], outputs[1:])
    assert_alike(*gradients, atol=1e-4)


@pytest.mark.parametrize("variant", ["rest on a smaller mesh", "hsdp", "one rank"])
@pytest.mark.long
@distributed(4)
def test_compiled_on_every_mesh(ctx: RankContext, variant: str) -> None:
    meshes = {"hsdp": ctx.mesh_2d(2, 2), "one rank": ctx.mesh_of_one()}
    kwargs = {"mesh": meshes[variant]} if variant in meshes else {"reshard_after_forward": 2}
    _assert_compiled_like_eager(ctx, **kwargs)


@distributed(2)
def test_frozen_and_thawed_blocks_compile_once_more(ctx: RankContext) -> None:
    """Whether a parameter is trained decides what the compiler saves; going back compiles nothing."""
    start_compiling()
    model, reference = _shard(ctx, seeded(Stack), _compile_method, before=False), seeded(Stack)
    seen = []
    for requires_grad in (True, False, True, False):
        for each in (model, reference):
            each.zero_grad()
            each.blocks.requires_grad_(requires_grad)
            each(batch()).sum().backward()
        seen.append(num_graphs())
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert (param.grad is None) == (expected.grad is None)
            assert expected.grad is None or torch.allclose(param.grad.full_tensor(), expected.grad, atol=1e-4)
    assert seen == [1, 2, 2, 2]


@pytest.mark.long
@distributed(2)
def test_adapters_sharded_under_compiled_blocks(ctx: RankContext) -> None:
    """A unit inside of a compiled one breaks its graph, so that its hooks run."""
    start_compiling()
    models = []
    for compile_block in (lambda block: block.compile(backend=BACKEND), lambda block: None):
        model: Any = seeded(Stack)
        for block in model.blocks:
            fsdp2.fully_shard(block, mesh=ctx.mesh_1d())
        fsdp2.fully_shard(model, mesh=ctx.mesh_1d())
        model(batch()).sum().backward()
        model.zero_grad()
        torch.manual_seed(1)
        for block in model.blocks:
            block.linear = nn.Sequential(block.linear, nn.Linear(32, 32))
            fsdp2.fully_shard(block.linear[1], mesh=ctx.mesh_1d())
            compile_block(block)
        models.append(model)
    assert_alike(train(models[0]), train(models[1]))


# Whole models: graphs break at the units, hooks of all units run, nothing compiles after the warm-up

# Before the first block, a block (all share one graph), after the last; for training and for evaluation.
NUM_GRAPHS = 3 * 2


def _compile(model: Any, way: str, **options: Any) -> Any:
    if way == "torch.compile(model)":
        return torch.compile(model, backend=BACKEND, **options)
    model.compile(backend=BACKEND, **options)
    return model


def _assert_model_like_eager(ctx: RankContext, way: str, **kwargs: Any) -> None:
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
    _assert_model_like_eager(ctx, way, reshard_after_forward=kept)
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


@pytest.mark.long
@distributed(4)
def test_compiled_model_that_rests_on_a_smaller_mesh(ctx: RankContext) -> None:
    _assert_model_like_eager(ctx, WAYS[0], reshard_after_forward=2)


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
