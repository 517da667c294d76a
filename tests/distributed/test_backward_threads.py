"""Two threads and one model: a backward runs in a worker thread while the main thread comes to the model, or a worker
makes a state dict in the middle of a pass. Values are those of the plain model, which knows no threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import fully_shard
from fsdp2.core import GroupState, _torch, unit_of
from tests.distributed.changes import assert_gradients
from tests.distributed.support import Stack, batch, seeded, sharded, step
from tests.harness.distributed import RankContext, distributed
from tests.harness.messages import error_of
from tests.harness.runtimes import beyond_torch
from tests.harness.selection import long


def _evaluate(model: Any, root: Any) -> None:
    with torch.no_grad():
        model(batch(7))


# What the main thread does first. ``root`` is a module around ``model`` that has not run yet.
COMES_BY: dict[str, Callable[[Any, Any], object]] = {
    "forward": lambda model, root: model(batch(7)),
    "evaluation": _evaluate,
    "unshard": lambda model, root: model.unshard(),
    "a root around it": lambda model, root: root(batch(7)),
}
# How the worker's backward leaves its gradients.
LEAVES: dict[str, Callable[[Any, bool], object]] = {
    "in flight": lambda model, is_last: model.set_is_last_backward(is_last),
    "on this rank": lambda model, is_last: model.set_requires_gradient_sync(is_last),
}


@contextmanager
def _backward_in_a_worker(model: Any, seed: int) -> Iterator[tuple[Future[None], threading.Event]]:
    """In the block, it has come to the model, and goes on when the event is set."""
    has_come, goes_on = threading.Event(), threading.Event()

    def stop(_: Tensor) -> None:
        has_come.set()
        assert goes_on.wait(60)

    def tell(_: nn.Module, __: object, output: Tensor) -> None:
        output.register_hook(stop)

    handle = model.blocks[1].register_forward_hook(tell)
    loss = model(batch(seed)).square().mean()
    handle.remove()
    with ThreadPoolExecutor(1) as pool:
        try:
            backward = pool.submit(loss.backward)
            assert has_come.wait(60)
            yield backward, goes_on
        finally:
            goes_on.set()
        backward.result()


@contextmanager
def _pauses(pause: Callable[[float], object]) -> Iterator[None]:
    """The runtime calls ``pause`` where it would sleep."""
    with mock.patch.object(_torch, "time", SimpleNamespace(sleep=pause)):
        yield


@pytest.mark.parametrize("comes_by", ["forward", *long(*list(COMES_BY)[1:])])
@pytest.mark.parametrize("leaves", LEAVES)
@distributed(2)
def test_who_comes_while_a_backward_runs_in_a_worker_waits_for_its_end(
    ctx: RankContext, leaves: str, comes_by: str
) -> None:
    """The backward ends well meanwhile: its gradients stay."""
    model, plain = sharded(ctx), seeded(Stack)
    root = fully_shard(nn.Sequential(model), mesh=ctx.mesh_1d())
    pauses = []
    LEAVES[leaves](model, False)
    with _backward_in_a_worker(model, 1) as (backward, goes_on):

        def let_it_end(seconds: float) -> None:
            pauses.append(seconds)
            goes_on.set()
            backward.result(60)

        with _pauses(let_it_end):
            COMES_BY[comes_by](model, root)
    assert pauses
    for each in (model, root):
        LEAVES[leaves](each, True)
    model.reshard()
    for each in (root, plain):
        step(each, 2)
    step(plain, 1)
    assert_gradients(model, plain)


@pytest.mark.parametrize("comes_by", ["forward", *long(*list(COMES_BY)[1:])])
@distributed(2)
def test_who_comes_while_a_backward_runs_in_a_worker_does_not_wait_for_ever(ctx: RankContext, comes_by: str) -> None:
    """The error says what to do, and nothing has changed: the backward ends well, and so does a later step."""
    model, plain = sharded(ctx), seeded(Stack)
    root = fully_shard(nn.Sequential(model), mesh=ctx.mesh_1d())
    with _backward_in_a_worker(model, 1), _pauses(lambda _: None):
        error = error_of(lambda: COMES_BY[comes_by](model, root))
    assert error.startswith("ScheduleError: a backward of FSDPStack is running in another thread. Run forwards and")
    for each in (model, plain):
        step(each, 2)
    step(plain, 1)
    assert_gradients(model, plain)


def _in_a_worker(make: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(make).result(60)


# Where a pass is when the worker comes: between forward and backward, units stay unsharded.
@pytest.mark.parametrize("where", ["forward", *long("backward", "between")])
@beyond_torch("it takes the parameters away from the forward that computes with them (torchft#343)")
@distributed(2)
def test_a_state_dict_of_another_thread_has_shards_and_takes_nothing_away(ctx: RankContext, where: str) -> None:
    model, plain, made = sharded(ctx, reshard_after_forward=where != "between"), seeded(Stack), []
    expected = {name: value.to_local().clone() for name, value in model.state_dict().items()}

    def come(*_: object) -> None:
        made.append(_in_a_worker(model.state_dict))

    inner = model.blocks[1]
    first = next(each for each in inner.modules() if isinstance(each, nn.Linear))
    handle = first.register_forward_hook(lambda _, __, output: output.register_hook(come) and None)
    if where == "forward":
        handle.remove()
        handle = first.register_forward_hook(come)
    if where == "between":
        handle.remove()
    loss = model(batch(1)).square().mean()
    if where == "between":
        come()
    unsharded = [group.state for unit in (unit_of(each) for each in (*model.blocks, model)) for group in unit.groups]
    loss.backward()
    handle.remove()
    step(plain, 1)
    assert_gradients(model, plain)
    assert where != "between" or set(unsharded) == {GroupState.UNSHARDED}
    assert len(made) == 1
    assert list(made[0]) == list(expected)
    for name, value in made[0].items():
        assert isinstance(value, DTensor), name
        assert torch.equal(value.to_local(), expected[name]), name
