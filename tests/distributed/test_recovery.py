"""After an exception in a step, ``reset_iter_state`` brings the model to rest and the next step is right."""

from __future__ import annotations

import gc
import itertools
import weakref
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2.schedule.states import Pass
from fsdp2.tools import trace
from tests.distributed.changes import assert_gradients, assert_step_is_that_of
from tests.distributed.support import (
    InjectedError,
    RaiseInBackward,
    Stack,
    UnshardedStorages,
    batch,
    seeded,
    shard,
    sharded,
    step,
)
from tests.harness.comms import CountingReduceScatter
from tests.harness.distributed import RankContext, distributed
from tests.harness.selection import long


class Faulty(Stack):
    """Raises between two blocks, in the pass that ``fault`` names."""

    fault: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](self.entry(x)))
        if self.fault == "forward":
            raise InjectedError
        if self.fault == "backward":
            x = RaiseInBackward.apply(x)
        return self.exit(self.blocks[2](x))


class _States(fsdp2.Observer):
    """The state that each unit's group was last seen in."""

    def __init__(self) -> None:
        self.last: dict[str, str] = {}

    def on_transition(self, unit: str, before: str, after: str) -> None:
        self.last[unit] = after


def _faulty_model(ctx: RankContext, warm: bool) -> Any:
    """``warm``: the order is recorded, so that the exception finds a prefetch in flight."""
    model = shard(ctx, seeded(Faulty))
    if warm:
        step(model)
        model.zero_grad()
    return model


def _fail(model: Any, fault: str) -> None:
    model.fault = fault
    with pytest.raises(InjectedError):
        step(model, seed=5)
    model.fault = None


def _assert_step_is_right(model: Any) -> None:
    """Twice, since the second step prefetches along the order that the first one recorded."""
    for seed in (1, 2):
        assert_step_is_that_of(model, seeded(Stack), seed=seed)


@pytest.mark.every_case
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("fault", ["forward", "backward"])
@distributed(2)
def test_step_after_an_exception_is_right_without_a_reset(ctx: RankContext, fault: str, warm: bool) -> None:
    """The next forward finds that the last pass never ended; what it left on unsharded parameters is dropped."""
    model = _faulty_model(ctx, warm)
    _fail(model, fault)
    model.zero_grad()
    _assert_step_is_right(model)


@pytest.mark.every_case
@pytest.mark.parametrize("checkpoints", [None, *long("blocks", "blocks, nested")])
@pytest.mark.parametrize("num_failures", [1, *long(2)])
@distributed(2)
def test_backward_is_repeated_on_the_kept_graph(ctx: RankContext, num_failures: int, checkpoints: str | None) -> None:
    """A gradient hook raises in the middle. The graph was kept, so the user zeroes the gradients and tries again."""
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
                    loss.backward(retain_graph=True)
                model.zero_grad()
            loss.backward()
        assert_gradients(*models)
        for model in models:
            model.zero_grad()


def _fail_now(*_: object) -> None:
    raise InjectedError


@pytest.mark.every_case
@pytest.mark.parametrize("error", [InjectedError, KeyboardInterrupt])  # torch calls no hook after the second
@pytest.mark.parametrize("warm", [False, True])
@distributed(2)
def test_step_after_one_unit_was_called_alone_and_raised(
    ctx: RankContext, warm: bool, error: type[BaseException]
) -> None:
    """The root runs next, around the unit that raised: a pass of its own, with its own parameters unsharded."""
    model = sharded(ctx)
    if warm:
        step(model)
        model.zero_grad()
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
    _assert_step_is_right(model)


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
    _fail(model, fault)
    optimizer.zero_grad()  # of the shards; the backward that raised has landed some
    step(model, seed=1)
    reference = seeded(Stack)
    for seed in (3, 1) if fault == "forward" else (1,):
        step(reference, seed)
    assert_gradients(model, reference)


@pytest.mark.parametrize("warm", [False, True])
@distributed(2)
def test_reset_between_steps_changes_nothing(ctx: RankContext, warm: bool) -> None:
    model = _faulty_model(ctx, warm)
    model.reset_iter_state()
    model.reset_iter_state()
    _assert_step_is_right(model)


@distributed(2)
def test_model_that_was_reset_can_join_a_larger_root(ctx: RankContext) -> None:
    model = _faulty_model(ctx, warm=True)
    _fail(model, "forward")
    model.reset_iter_state()
    outer = fsdp2.fully_shard(nn.Sequential(model), mesh=ctx.mesh_1d())
    _assert_step_is_right(outer)


class Recurrent(Stack):
    """The first block runs twice; what it computes the first time is detached."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.entry(x)).detach()
        return self.exit(self.blocks[0](self.blocks[1](x)))


@distributed(2)
def test_prefetch_for_a_backward_that_never_comes_is_freed_at_the_end_of_the_backward(ctx: RankContext) -> None:
    model = shard(ctx, seeded(lambda: Recurrent(2)))
    step(model)
    states = _States()
    with trace.observe(model, states):
        step(model)
    assert states.last == dict.fromkeys(("(root)", "blocks.0", "blocks.1"), "SHARDED")


@distributed(2)
def test_forward_that_leaves_out_a_prefetched_block_frees_it(ctx: RankContext) -> None:
    class Skipping(Stack):
        skips = False

        def forward(self, x: Tensor) -> Tensor:
            for index in (0, 2) if self.skips else (0, 1, 2):
                x = self.blocks[index](x)
            return x

    model = shard(ctx, seeded(Skipping))
    step(model)
    model.skips = True
    states = _States()
    with trace.observe(model, states), torch.no_grad():
        model(batch())
    assert {states.last[f"blocks.{index}"] for index in range(3)} == {"SHARDED"}


@pytest.mark.ci
@distributed(2)
def test_sharded_model_that_is_dropped_is_freed(ctx: RankContext) -> None:
    model = sharded(ctx)
    step(model)
    watched = [weakref.ref(model), weakref.ref(model.blocks[1]), weakref.ref(model.exit.weight)]
    del model
    gc.collect()
    assert [reference() for reference in watched] == [None, None, None]


class _Work:
    """A collective, and how often it was waited for."""

    fails = False

    def __init__(self, work: Any) -> None:
        self._work, self.num_waits = work, 0

    def wait(self) -> None:
        self._work.wait()
        self.num_waits += 1
        if self.fails:
            raise RuntimeError("connection closed")


class _WatchedReduceScatter(CountingReduceScatter):
    def __init__(self) -> None:
        super().__init__()
        self.works: list[_Work] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.works.append(_Work(super().__call__(*args, **kwargs)))
        return self.works[-1]


def _watch_reductions(model: Any) -> list[_Work]:
    reduce_scatter = _WatchedReduceScatter()
    for module in model.modules():
        if isinstance(module, fsdp2.FSDPModule):
            module.set_custom_reduce_scatter(reduce_scatter)
    return reduce_scatter.works


@distributed(2)
def test_reset_waits_for_reductions_in_flight(ctx: RankContext) -> None:
    """Else the backend writes into memory that is free."""
    model = _faulty_model(ctx, warm=True)
    works = _watch_reductions(model)
    _fail(model, "backward")
    waits = [work.num_waits for work in works]
    assert waits.count(0) == 1, waits  # the reduction of the block behind the fault
    model.reset_iter_state()
    assert {work.num_waits for work in works} == {1}


@distributed(2)
def test_reset_brings_all_units_to_rest_though_a_reduction_is_lost(ctx: RankContext) -> None:
    model = _faulty_model(ctx, warm=True)
    works, states = _watch_reductions(model), _States()
    with trace.observe(model, states):
        _fail(model, "backward")
        works[-1].fails = True
        with pytest.raises(fsdp2.CommunicationError, match=r"reduction of unit 'blocks\.2' failed.*connection closed"):
            model.reset_iter_state()
    assert set(states.last.values()) == {"SHARDED"}
    model.zero_grad()
    _assert_step_is_right(model)


@pytest.mark.parametrize("raises", ["forward", "hook of the user"])
@distributed(2)
def test_a_unit_that_raised_alone_leaves_no_forward_behind(ctx: RankContext, raises: str) -> None:
    """Its sibling, run alone, was taken for a part of that forward, and kept old weights."""
    model = sharded(ctx, reshard_after_forward=False)
    first, second = model.blocks[:2]
    shards = list(second.parameters())
    step(model)
    if raises == "forward":
        handle = first.linear.register_forward_hook(_fail_now)
    else:
        handle = first.register_forward_hook(_fail_now, prepend=True)
    with pytest.raises(InjectedError):
        first(batch())
    handle.remove()
    x = batch()
    second(x)
    with torch.no_grad():
        for parameter in shards:
            parameter.to_local().mul_(2)
    found = second(x)
    second.reshard()
    with fsdp2.unsharded(second):
        plain = second.linear.weight.detach().clone(), second.linear.bias.detach().clone()
    assert torch.equal(found, x + torch.tanh(torch.nn.functional.linear(x, *plain)))


# Wherever a step raises, the gradients that the model had accumulated stay; those on their way do after a forward


class _RaiseAt(fsdp2.Observer):
    """Raises at the event or action number ``position`` of what it sees."""

    def __init__(self, position: int) -> None:
        self.left = position

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise InjectedError

    def on_event(self, event: str, unit: str) -> None:
        self._count()

    def on_action(self, action: str, unit: str, nbytes: int) -> None:
        self._count()

    def on_transition(self, unit: str, before: str, after: str) -> None:
        self._count()


def _gradients(model: Any) -> list[Tensor]:
    return [parameter.grad.to_local() for parameter in model.parameters()]


def _fails_at(model: Any, position: int) -> bool:
    with trace.observe(model, _RaiseAt(position)):
        try:
            step(model, seed=2)
        except InjectedError:
            return True
    return False


SETTINGS: dict[str, dict[str, Any]] = {"reshard": {}, "keep": {"reshard_after_forward": False}}


@pytest.mark.parametrize("setting", ["reshard", *long("keep")])
@distributed(2)
def test_a_model_is_usable_and_keeps_its_gradients(ctx: RankContext, setting: str) -> None:
    references = [seeded(Stack) for _ in range(2)]
    for seed, reference in enumerate(references, start=1):
        step(reference, seed)
    first, second = (
        [parameter.grad.chunk(ctx.world_size)[ctx.rank] for parameter in reference.parameters()]
        for reference in references
    )
    model = sharded(ctx, **SETTINGS[setting])
    unsharded = UnshardedStorages(model)
    step(model, seed=1)  # the order is recorded: exceptions find prefetches in flight
    model.zero_grad()
    position = 0
    while True:
        step(model, seed=1)
        for found, one in zip(_gradients(model), first, strict=True):
            assert torch.allclose(found, one, atol=1e-6), position
        if not _fails_at(model, position):
            break
        model.reset_iter_state()
        assert unsharded.nbytes == 0, position
        for found, one, other in zip(_gradients(model), first, second, strict=True):
            has_landed = torch.allclose(found, one + other, atol=1e-6)
            assert has_landed or torch.allclose(found, one, atol=1e-6), position
        model.zero_grad()
        position += 1
    assert position > 40


def _no_gradient_sync(model: Any, enabled: bool) -> None:
    model.set_requires_gradient_sync(not enabled)


def _no_all_reduce(model: Any, enabled: bool) -> None:
    model.set_requires_all_reduce(not enabled)


def _no_landing(model: Any, enabled: bool) -> None:
    model.set_reduce_scatter_max_input_buffers(8)
    model.set_is_last_backward(not enabled)


def _no_finalization(model: Any, enabled: bool) -> None:
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(not enabled)


def _on_their_way(model: Any, leave: Any, seed: int) -> None:
    """A micro-batch whose gradients are not in ``.grad`` when it ends."""
    leave(model, True)
    step(model, seed)
    leave(model, False)


def _go_on(model: Any, leave: Any, seed: int) -> None:
    step(model, seed)
    if leave is _no_finalization:
        model.finalize_backward()


@pytest.mark.ci
@pytest.mark.parametrize("resets", [True, False], ids=["reset", "no reset"])
@pytest.mark.parametrize("leave", [_no_all_reduce, *long(_no_gradient_sync, _no_landing, _no_finalization)])
@distributed(4)
def test_gradients_on_their_way_stay_after_a_forward_that_raises(ctx: RankContext, leave: Any, resets: bool) -> None:
    reference = seeded(lambda: Stack(1))
    for seed in (1, 3):
        step(reference, seed)
    model = shard(ctx, seeded(lambda: Stack(1)), mesh=ctx.mesh_2d(2, 2))
    for position in itertools.count():
        _on_their_way(model, leave, seed=1)
        assert _fails_at(model, position)
        if model.blocks[0]._unit().running is Pass.BACKWARD:
            break
        if resets:
            model.reset_iter_state(keep_unreduced=True)
        _go_on(model, leave, seed=3)
        assert_gradients(model, reference)
        model.zero_grad()
    assert position > 8
    with pytest.raises(fsdp2.ScheduleError, match="an exception in backward"):
        model.reset_iter_state(keep_unreduced=True)
    model.reset_iter_state()
    model.zero_grad()
    _go_on(model, leave, seed=3)


@distributed(2)
def test_recovery_on_one_rank_communicates_nothing(ctx: RankContext) -> None:
    """What is summed over the shard axis only is summed over replicas with the next backward, not by the recovery."""
    reference = seeded(lambda: Stack(1))
    for seed in (1, 3):
        step(reference, seed)
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
    assert_gradients(model, reference)
