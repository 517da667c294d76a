"""What the runtime does in a step: events, and the actions that each of them leads to, as ``compact`` writes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fsdp2.core import Observer
from fsdp2.report import trace
from tests.distributed.changes import assert_gradients
from tests.distributed.support import Stack, batch, compact, seeded, shard, sharded, step
from tests.harness.alone import on_one_rank
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import Check, golden_alone


class _InPlace(Stack):
    """Each block writes its input in place, twice, before it computes."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_pre_hook(lambda _, args: (args[0].mul_(2).add_(1),))


class _InPlaceAround(Stack):
    """Each block also writes its input behind the use of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = lambda x, block=block: x.mul_(2).add_(block.linear(x * 1)) * 0.5


class _CheckpointedBlocks(Stack):
    """Every block is recomputed on its own, from outside."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.exit(x)


class _CheckpointedRegion(Stack):
    """The last two blocks are recomputed together."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.entry(x))
        x = checkpoint(lambda x: self.blocks[2](self.blocks[1](x)), x, use_reentrant=False)
        return self.exit(x)


class _Skipping(Stack):
    """Leaves its last two blocks out."""

    skips = True

    def forward(self, x: Tensor) -> Tensor:
        return self.exit(self.blocks[0](self.entry(x))) if self.skips else super().forward(x)


def _forward(model: Any) -> None:
    model(batch())


def _evaluate(model: Any) -> None:
    with torch.no_grad():
        model(batch())


def _differentiate_the_input(model: Any) -> None:
    x = batch().requires_grad_()
    torch.autograd.grad(model(x).sum(), x)
    assert all(parameter.grad is None for parameter in model.parameters())


def _run_all(model: Any) -> None:
    model.skips = False
    step(model)
    model.skips = True


def _may_differ(model: Any) -> None:
    model.set_ranks_may_differ(True)


def _microbatches(*settings: str) -> dict[str, Any]:
    """A case of two of them, the second one alone with ``settings``, and of one block."""

    def act(model: Any) -> None:
        for is_last in (False, True):
            for setting in settings:
                getattr(model, f"set_{setting}")(is_last)
            step(model)

    return {"make": partial(Stack, 1), "act": act}


def _list(model: Any, *, way: str, of_root: list[int], of_first: int, first: int) -> None:
    """The user lists what the root and the first block prefetch, and nothing for block 1."""
    for module, listed in ((model, of_root), (model.blocks[first], [of_first]), (model.blocks[1], [])):
        getattr(module, f"set_modules_to_{way}_prefetch")([model.blocks[index] for index in listed])


def _one_frozen() -> Stack:
    model = Stack()
    model.blocks[1].requires_grad_(False)
    return model


def _traced(
    ctx: RankContext,
    make: Callable[[], Any] = Stack,
    *,
    prepare: Callable[[Any], object] = lambda model: None,
    before: Callable[[Any], object] = step,
    act: Callable[[Any], object] = step,
    only_backward: bool = False,
    **options: Any,
) -> str:
    """What ``act`` does, by default in the second step: the order is known."""
    model = shard(ctx, seeded(make), **options)
    prepare(model)
    before(model)
    loss = model(batch()).sum() if only_backward else None
    with trace.record(model) as recorded:
        act(model) if loss is None else loss.backward()
    return compact(recorded)


NOTHING: dict[str, Any] = {"before": lambda model: None}
CASES: dict[str, dict[str, Any]] = {
    "first step gathers each unit when it is needed": NOTHING,
    "second step prefetches along the recorded order": {},
    "later steps are the second one again": {"before": lambda model: [step(model) for _ in range(4)]},
    # It reduced zeros for each unit.
    "gradient of the input alone reduces nothing": {**NOTHING, "act": _differentiate_the_input},
    # They stayed unsharded and unreduced until the whole backward had ended. Torch refuses them.
    "units that write their input in place are reduced when their backward ends": {"make": _InPlace},
    "parameters kept after forward are not gathered in backward": {"reshard_after_forward": False},
    "parameters rest on the smaller mesh between forward and backward": {"world_size": 4, "reshard_after_forward": 2},
    "only units that reduce are said to reduce": {"make": _one_frozen},
    "accumulation without sync reduces in the last backward only": _microbatches("requires_gradient_sync"),
    "backward that is not the last does not wait for its reductions": _microbatches("is_last_backward"),
    "parameters kept after backward are not gathered for the next microbatch": _microbatches(
        "requires_gradient_sync", "reshard_after_backward"
    ),
    "forward prefetches what the user listed": {
        "prepare": partial(_list, way="forward", of_root=[0, 1], of_first=2, first=0),
        "act": _forward,
    },
    "backward prefetches what the user listed": {
        "prepare": partial(_list, way="backward", of_root=[2, 1], of_first=0, first=2),
        "only_backward": True,
    },
    "forward without grad": {"before": _evaluate, "act": _evaluate},
    "backward of checkpointed blocks gathers each once": {"make": _CheckpointedBlocks, "only_backward": True},
    "backward of a checkpointed region keeps what it recomputed": {"make": _CheckpointedRegion, "only_backward": True},
    "unit that is skipped is gathered for other ranks": {"make": _Skipping, "prepare": _may_differ},
    "unit that is skipped is left alone where ranks do not differ": {"make": _Skipping},
    "unit that is skipped is left alone on one rank": {"make": _Skipping, "prepare": _may_differ, "world_size": 1},
    "unit without any gradient is not reduced if no rank may have one": {"make": _Skipping, "before": _run_all},
}


@pytest.mark.parametrize("case", CASES)
def test_actions(golden: Check, case: str) -> None:
    golden(on_one_rank(_traced, **CASES[case]))


@pytest.mark.parametrize("made", [_InPlace, _InPlaceAround])
@distributed(2)
def test_units_that_write_their_input_in_place_train_as_in_the_unsharded_model(
    ctx: RankContext, made: type[Stack]
) -> None:
    model, reference = shard(ctx, seeded(made)), seeded(made)
    for each in (model, reference):
        step(each)
    assert_gradients(model, reference, atol=0.0)


def _traces_of_parts(ctx: RankContext) -> list[tuple[str, ...]]:
    """What records of a block and of the model say of that block, before there is a root and after."""
    model = sharded(ctx)
    found = []
    for _ in range(2):
        with trace.record(model.blocks[0]) as of_block, trace.record(model) as of_model:
            step(model)
        said = "\n".join(line for line in str(of_model).splitlines() if "blocks.0" in line)
        found.append((str(of_block), said))
    step(model)  # nothing is recorded outside of the block
    assert str(of_block) == said
    return found


def test_a_unit_is_recorded_on_its_own_even_before_it_has_a_root() -> None:
    for of_block, said_of_block in on_one_rank(_traces_of_parts):
        assert of_block == said_of_block
        assert of_block.startswith(("pre_forward blocks.0", "    prefetch blocks.0"))


@golden_alone()
def test_transitions_are_those_of_the_units_that_are_observed(ctx: RankContext) -> str:
    class Transitions(Observer):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def on_transition(self, unit: str, before: str, after: str) -> None:
            self.seen.append(f"{unit} {before} {after}")

    model, transitions = sharded(ctx), Transitions()
    with trace.observe(model.blocks[1], transitions), torch.no_grad():
        model(batch())
    model(batch())
    return "\n".join(transitions.seen)
