"""After an exception in a step, ``reset_iter_state`` brings the model to rest and the next step is right."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2.extras.standings import Board
from fsdp2.report import trace
from tests.distributed.changes import (
    assert_gradients,
    assert_step_is_that_of,
    assert_trains_as_stack,
    double,
    step_and_zero,
    stepped,
)
from tests.distributed.support import (
    Faulty,
    InjectedError,
    Stack,
    UnshardedStorages,
    batch,
    fail,
    fail_now,
    seeded,
    shard,
    sharded,
    step,
)
from tests.harness.distributed import RankContext, distributed
from tests.harness.patience import assert_freed
from tests.harness.selection import long


def _faulty_model(ctx: RankContext, warm: bool) -> Any:
    """``warm``: the order is recorded, so that the exception finds a prefetch in flight."""
    model = shard(ctx, seeded(Faulty))
    if warm:
        step_and_zero(model)
    return model


def _here(run: Callable[[], object]) -> None:
    run()


def _in_thread(run: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result()


@pytest.mark.every_case
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("fault", ["forward", "backward"])
@distributed(2)
def test_step_after_an_exception_is_right_without_a_reset(ctx: RankContext, fault: str, warm: bool) -> None:
    """The next forward finds that the last pass never ended; what it left on unsharded parameters is dropped."""
    model = _faulty_model(ctx, warm)
    fail(model, fault)
    model.zero_grad()
    assert_trains_as_stack(model)


@pytest.mark.every_case
@pytest.mark.parametrize("checkpoints", [None, *long("blocks", "blocks, nested")])
@pytest.mark.parametrize("num_failures", [1, *long(2)])
@pytest.mark.parametrize("thread", ["", "of the failures", *long("of the retry")])
@distributed(2)
def test_backward_is_repeated_on_the_kept_graph(
    ctx: RankContext, thread: str, num_failures: int, checkpoints: str | None
) -> None:
    """A gradient hook raises in the middle. The graph was kept, so the user zeroes the gradients and tries again, all
    in one thread or in another ``thread``."""
    fails = _in_thread if thread == "of the failures" else _here
    repeats = _in_thread if thread == "of the retry" else _here
    models = shard(ctx, seeded(Stack)), seeded(Stack)
    for block in (*models[0].blocks, *models[1].blocks) if checkpoints is not None else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=checkpoints == "blocks, nested")
    for seed in range(3):
        for model in models:
            failures = [InjectedError] * num_failures if seed == 1 else []

            def raise_once(_: Tensor, failures: list[type[Exception]] = failures) -> None:
                if failures:
                    raise failures.pop()

            def tell(_: nn.Module, __: object, output: Tensor, hook: Any = raise_once) -> None:
                if output.requires_grad:  # not where a checkpoint runs the block for its output only
                    output.register_hook(hook)

            handle = model.blocks[1].register_forward_hook(tell)
            loss = model(batch(seed)).square().mean()
            handle.remove()
            while failures:
                with pytest.raises(InjectedError):
                    fails(partial(loss.backward, retain_graph=True))
                model.zero_grad()
            repeats(loss.backward)
        assert_gradients(*models)
        for model in models:
            model.zero_grad()


@pytest.mark.every_case
@pytest.mark.parametrize("error", [InjectedError, KeyboardInterrupt])  # torch calls no hook after the second
@pytest.mark.parametrize("warm", [False, True])
@distributed(2)
def test_step_after_one_unit_was_called_alone_and_raised(
    ctx: RankContext, warm: bool, error: type[BaseException]
) -> None:
    """The root runs next, around the unit that raised: a pass of its own, with its own parameters unsharded."""
    model = _faulty_model(ctx, warm)
    block = model.blocks[1]
    block.forward = mock.Mock(side_effect=error)
    with pytest.raises(error):
        block(batch())
    del block.forward
    assert_step_is_that_of(model, seeded(Stack))


@distributed(2)
def test_reset_drops_gradients_that_were_not_reduced(ctx: RankContext) -> None:
    model = _faulty_model(ctx, warm=False)
    model.set_requires_gradient_sync(False)
    step(model, seed=3)
    model.set_requires_gradient_sync(True)
    model.reset_iter_state()
    assert_trains_as_stack(model)


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fault", ["forward", "backward"])
@distributed(2)
def test_unreduced_gradients_survive_a_forward_that_raises(
    ctx: RankContext, fault: str, reduce_dtype: torch.dtype
) -> None:
    """As those of a plain module do. A backward that raises has left parts of its own on them, so they are dropped."""
    model = shard(ctx, seeded(Faulty), mp_policy=fsdp2.MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    with fsdp2.no_sync(model):
        step(model, seed=3)
    optimizer = torch.optim.SGD(model.parameters())
    fail(model, fault)
    optimizer.zero_grad()  # of the shards; the backward that raised has landed some
    step(model, seed=1)
    assert_gradients(model, stepped(*((3, 1) if fault == "forward" else (1,))))


@distributed(2)
def test_model_that_was_reset_can_join_a_larger_root(ctx: RankContext) -> None:
    model = _faulty_model(ctx, warm=True)
    fail(model, "forward")
    model.reset_iter_state()
    outer = fsdp2.fully_shard(nn.Sequential(model), mesh=ctx.mesh_1d())
    assert_trains_as_stack(outer)


@pytest.mark.ci
@distributed(2)
def test_sharded_model_that_is_dropped_is_freed(ctx: RankContext) -> None:
    """With what it showed in the store: a store that lives on is in the way of the next process group at its port."""
    before = _boards()
    model = sharded(ctx)
    step(model)
    watched = [weakref.ref(model), weakref.ref(model.blocks[1]), weakref.ref(model.exit.weight)]
    watched += map(weakref.ref, set(_boards()) - set(before))
    assert len(watched) == 4
    del before, model
    assert_freed(*watched)


def _boards() -> list[Board]:
    return [each for each in gc.get_objects() if type(each) is Board]


@pytest.mark.parametrize("raises", ["forward", "hook of the user"])
@distributed(2)
def test_a_unit_that_raised_alone_leaves_no_forward_behind(ctx: RankContext, raises: str) -> None:
    """Its sibling, run alone, was taken for a part of that forward, and kept old weights."""
    model = sharded(ctx, reshard_after_forward=False)
    first, second = model.blocks[:2]
    shards = list(second.parameters())
    step(model)
    if raises == "forward":
        handle = first.linear.register_forward_hook(fail_now)
    else:
        handle = first.register_forward_hook(fail_now, prepend=True)
    with pytest.raises(InjectedError):
        first(batch())
    handle.remove()
    x = batch()
    second(x)
    double(parameter.to_local() for parameter in shards)
    found = second(x)
    second.reshard()
    with fsdp2.unsharded(second):
        plain = second.linear.weight.detach().clone(), second.linear.bias.detach().clone()
    assert torch.equal(found, x + torch.tanh(torch.nn.functional.linear(x, *plain)))


@pytest.mark.parametrize("part", [0, 1])
@distributed(2)
def test_a_part_of_a_model_whose_forward_was_interrupted_has_new_values_after_a_reset(
    ctx: RankContext, part: int
) -> None:
    """Torch calls no hook when a KeyboardInterrupt ends a forward, so a part alone counts as inside that forward."""
    model, plain = sharded(ctx, reshard_after_forward=False), seeded(Stack)
    step(model)
    params = list(model.parameters())
    with (
        mock.patch.object(model.blocks[1].linear, "forward", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        model(batch())
    model.reset_iter_state()
    with torch.no_grad():
        for _ in range(2):
            double((*params, *plain.parameters()))
            torch.testing.assert_close(model.blocks[part](batch()), plain.blocks[part](batch()))


# Wherever a step raises, the gradients that the model had accumulated stay; those on their way do after a forward


class _RaiseAt(fsdp2.core.Observer):
    """Raises at the event or action number ``position`` of what it sees."""

    def __init__(self, position: int) -> None:
        self.left = position

    def _count(self, *_: object) -> None:
        self.left -= 1
        if self.left < 0:
            raise InjectedError

    on_event = on_action = on_transition = _count


def _fails_at(model: Any, position: int) -> bool:
    with trace.observe(model, _RaiseAt(position)):
        try:
            step(model, seed=2)
        except InjectedError:
            return True
    return False


@pytest.mark.ci
@pytest.mark.parametrize("reshards", [True, *long(False)])
@distributed(2)
def test_a_model_is_usable_and_keeps_its_gradients(ctx: RankContext, reshards: bool) -> None:
    before, after = (
        [param.grad.chunk(ctx.world_size)[ctx.rank] for param in stepped(*seeds).parameters()]
        for seeds in ((1,), (1, 2))
    )
    model = sharded(ctx, reshard_after_forward=reshards)
    unsharded = UnshardedStorages(model)
    step_and_zero(model)  # the order is recorded: exceptions find prefetches in flight
    for position in itertools.count():
        step(model, seed=1)
        torch.testing.assert_close([param.grad.to_local() for param in model.parameters()], before)
        if not _fails_at(model, position):
            break
        model.reset_iter_state()
        assert unsharded.nbytes == 0, position
        for param, *expected in zip(model.parameters(), before, after, strict=True):
            assert any(torch.allclose(param.grad.to_local(), each, atol=1e-6) for each in expected), position
        model.zero_grad()
    assert position > 40


@pytest.mark.ci
@pytest.mark.parametrize("resets", [True, False], ids=["reset", "no reset"])
@pytest.mark.parametrize(
    "leave", ["requires_all_reduce", *long("requires_gradient_sync", "is_last_backward", "by hand")]
)
@distributed(4)
def test_gradients_on_their_way_stay_after_a_forward_that_raises(ctx: RankContext, leave: str, resets: bool) -> None:
    """``leave``: the setting under which gradients of the first micro-batch are not in ``.grad`` when that ends."""
    by_hand, reference = leave == "by hand", stepped(1, 3, num_blocks=1)
    model = shard(ctx, seeded(lambda: Stack(1)), mesh=ctx.mesh_2d(2, 2))
    model.set_manual_backward_finalization(by_hand)
    model.set_reduce_scatter_max_input_buffers(8 if leave == "is_last_backward" else 1)
    switch = getattr(model, f"set_{'requires_gradient_sync' if by_hand else leave}")

    def go_on() -> None:
        step(model, seed=3)
        if by_hand:
            model.finalize_backward()

    for position in itertools.count():
        switch(False)
        step(model, seed=1)
        switch(True)
        assert _fails_at(model, position)
        if model.blocks[0]._unit().running == "backward":
            break
        if resets:
            model.reset_iter_state(keep_unreduced=True)
        go_on()
        assert_gradients(model, reference)
        model.zero_grad()
    assert position > 8
    with pytest.raises(fsdp2.ScheduleError, match="an exception in backward"):
        model.reset_iter_state(keep_unreduced=True)
    model.reset_iter_state()
    model.zero_grad()
    go_on()


@distributed(2)
def test_recovery_on_one_rank_communicates_nothing(ctx: RankContext) -> None:
    """What is summed over the shard axis only is summed over replicas with the next backward, not by the recovery."""
    model = shard(ctx, seeded(lambda: Stack(1)), mesh=ctx.mesh_2d(2, 1))
    model.set_requires_all_reduce(False)
    step(model, 1)
    model.set_requires_all_reduce(True)
    if ctx.rank == 1:
        assert _fails_at(model, 4)
        with CommDebugMode() as counted:
            model.reset_iter_state(keep_unreduced=True)
        assert counted.get_total_counts() == 0
    step(model, 3)
    assert_gradients(model, stepped(1, 3, num_blocks=1))
