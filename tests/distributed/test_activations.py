"""``offload_activations`` changes no bit, whatever surrounds a step; and what travels, what stays, what is refused.

On the CPU, where the function does nothing, its hooks are installed by hand, so that everything is copied there and
back; the simulated device runs this file again, with the function.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2.memory import offload_activations
from fsdp2.memory.activations import ActivationOffload
from tests.distributed.compile_support import BACKEND, start_compiling
from tests.distributed.support import DIM, Stack, seeded, shard
from tests.harness.distributed import RankContext, distributed
from tests.harness.messages import error_of, one_line
from tests.harness.selection import long

ROWS = 64
NBYTES = ROWS * DIM * 4  # of an activation in fp32


@contextmanager
def offloaded(model: Any, budget: int = 0) -> Iterator[ActivationOffload]:
    if next(model.parameters()).device.type != "cpu":
        with offload_activations(model, budget, min_nbytes=NBYTES // 2) as found:
            yield found
        return
    with ActivationOffload(model, budget, NBYTES // 2) as found:
        found.attach()
        yield found


class Checkpointed(Stack):
    """Checkpoints around its units; those of ``checkpoint_wrapper`` are inside."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.exit(x)


class Views(nn.Module):
    """Saves views of one memory, its own result, and a mask that all blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(DIM, 2 * DIM)
        self.register_buffer("mask", torch.ones(ROWS, DIM))

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.both(x).chunk(2, dim=-1)
        return (x + gate * value.t().t() * self.mask).relu()


def views() -> Stack:
    model = Stack()
    model.blocks = nn.ModuleList(Views() for _ in range(3))
    return model


def with_wrappers() -> Stack:
    model = Stack()
    model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    return model


def compiled() -> Stack:
    start_compiling()
    model = Stack()
    for block in model.blocks:
        block.compile(backend=BACKEND, fullgraph=True)
    return model


def batch(model: nn.Module, seed: int) -> Tensor:
    found = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(seed))
    return found.to(next(model.parameters()).device)


Step = Callable[[Any, int], None]


def one(model: Any, seed: int) -> None:
    model(batch(model, seed)).square().mean().backward()


def in_order(model: Any, seed: int) -> None:
    """Two forwards, then their backwards in the same order."""
    losses = [model(batch(model, seed + index)).square().mean() for index in (0, 10)]
    for loss in losses:
        loss.backward()


def twice(model: Any, seed: int) -> None:
    loss = model(batch(model, seed)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise ZeroDivisionError


def _raise(*_: object) -> None:
    raise ZeroDivisionError


def after_failures(model: Any, seed: int) -> None:
    """Before the step: a forward that raises, a backward that raises, a graph that is dropped, and an evaluation."""
    for hook in (_raise, lambda _module, _args, output: _Raises.apply(output)):
        handle = model.blocks[1].linear.register_forward_hook(hook)
        with pytest.raises(ZeroDivisionError):
            one(model, seed)
        handle.remove()
    model(batch(model, seed))
    with torch.no_grad():
        model(batch(model, seed))
    one(model, seed)


MODELS: dict[str, Callable[[], Any]] = {
    "checkpoints around units": Checkpointed,
    "checkpoints inside units": with_wrappers,
    "views": views,
    "compiled": compiled,
}
STEPS: dict[str, Step] = {"in order": in_order, "twice": twice, "failures": after_failures}
OPTIONS: dict[str, dict[str, Any]] = {
    "kept": {"reshard_after_forward": False},
    "bf16": {"mp_policy": fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
}
CASES = ["plain", *MODELS, *STEPS, "kept", "bf16", "budget", "HSDP"]


def trained(ctx: RankContext, case: str, budget: int | None) -> tuple[list[Tensor], int]:
    """The gradients after two steps, and what was sent in the last one. ``budget``: None does not offload."""
    mesh = ctx.mesh_2d(2, 1) if case == "HSDP" else ctx.mesh_1d()
    model = shard(ctx, seeded(MODELS.get(case, Stack)), mesh=mesh, **OPTIONS.get(case, {}))
    step = STEPS.get(case, one)
    if budget is None:
        step(model, 0)
        step(model, 1)
        return [param.grad.to_local().cpu() for param in model.parameters()], 0
    with offloaded(model, budget) as found:
        step(model, 0)
        step(model, 1)
    return [param.grad.to_local().cpu() for param in model.parameters()], sum(each.sent for each in found.units)


@pytest.mark.parametrize("case", [CASES[0], *long(*CASES[1:])])
@distributed(2)
def test_a_step_has_the_same_bits(ctx: RankContext, case: str) -> None:
    expected, _ = trained(ctx, case, None)
    found, sent = trained(ctx, case, NBYTES if case == "budget" else 0)
    assert all(map(torch.equal, found, expected))
    assert sent > 0


@distributed(2)
def test_what_travels_and_what_stays(ctx: RankContext) -> None:
    """Memory travels once, however often it was saved. What the budget has room for, the last unit, parameters, small
    tensors, and what the program holds (the input) stay."""
    model = shard(ctx, seeded(Stack))
    for budget, sent, peak in ((0, [2, 2, 0, 0], 4), (3 * NBYTES, [2, 0, 0, 0], 6), (9 * NBYTES, [0, 0, 0, 0], 8)):
        with offloaded(model, budget) as found:
            one(model, 0)
        assert [each.name for each in found.units] == ["blocks.0", "blocks.1", "blocks.2", "(root)"]
        assert [each.saved for each in found.units] == [each * NBYTES for each in (3, 2, 2, 1)]
        assert [each.sent for each in found.units] == [each * NBYTES for each in sent], budget
        assert found.peak == peak * NBYTES
    assert str(found).splitlines()[1].split() == ["blocks.0", str(3 * NBYTES), "0"]
    units = found.units
    one(model, 0)
    assert found.units is units, "removed"


def _kept(model: Any, found: ActivationOffload) -> None:
    """The program keeps what blocks return, and with it what the next block saves."""
    kept: list[Tensor] = []
    handles = [block.register_forward_hook(lambda *args: kept.append(args[-1])) for block in model.blocks]
    one(model, 0)
    for handle in handles:
        handle.remove()
    assert [each.sent for each in found.units] == [2 * NBYTES, NBYTES, 0, 0]


def _in_other_hooks(model: Any, found: ActivationOffload) -> None:
    """Hooks around the model get what is saved."""
    seen: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor):
        one(model, 0)
    assert seen
    assert found.units == ()


def _of_a_copy(model: Any, found: ActivationOffload) -> None:
    """A copy of the model shares the hooks, which go from each on its own."""
    other = copy.deepcopy(model)
    one(other, 0)
    assert sum(each.sent for each in found.units) > 0
    for expected, param in zip(_grads(model), other.parameters(), strict=True):
        assert torch.equal(param.grad.to_local(), expected)


def _grads(model: Any) -> list[Tensor]:
    one(model, 0)
    return [param.grad.to_local() for param in model.parameters()]


@pytest.mark.parametrize("check", [_kept, *long(_in_other_hooks, _of_a_copy)])
@distributed(2)
def test_what_is_around(ctx: RankContext, check: Callable[[Any, ActivationOffload], None]) -> None:
    model = shard(ctx, seeded(Stack))
    with offloaded(model) as found:
        check(model, found)


@pytest.mark.parametrize("index", [0, *long(2)])
@distributed(2)
def test_a_saved_tensor_that_is_written_later_is_refused_as_by_torch(ctx: RankContext, index: int) -> None:
    """Whether it has been on the host by then, as that of the first block, or not."""
    model = shard(ctx, seeded(Stack))

    def write(_module: Any, _args: Any, output: Tensor) -> Tensor:
        result = torch.exp(output)
        result.mul_(2)
        return result

    model.blocks[index].register_forward_hook(write)
    with offloaded(model) as found:
        assert "modified by an inplace operation" in one_line(error_of(lambda: one(model, 0)))
        assert sum(each.sent for each in found.units) > 0


@distributed(2)
def test_refused_calls_change_nothing(ctx: RankContext) -> None:
    model = shard(ctx, seeded(Stack))
    assert "not given to fully_shard" in one_line(error_of(lambda: offload_activations(Stack())))
    assert "budget is '3 apples'" in one_line(error_of(lambda: offload_activations(model, "3 apples")))
    assert "min_nbytes is -1" in one_line(error_of(lambda: offload_activations(model, min_nbytes=-1)))
    with offloaded(model):
        assert "already offloaded" in one_line(error_of(lambda: offload_activations(model, 1)))
        assert "already offloaded" in one_line(error_of(lambda: offload_activations(model.blocks[0])))
    assert not any(isinstance(getattr(hook, "__self__", None), ActivationOffload) for hook in _hooks(model))


def _hooks(model: nn.Module) -> list[Any]:
    """All hooks of forwards."""
    modules = list(model.modules())
    return [hook for each in modules for hook in (*each._forward_pre_hooks.values(), *each._forward_hooks.values())]
