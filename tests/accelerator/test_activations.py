"""``offload_activations`` on the simulated accelerator: the same bits, memory by count, copies without waits."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import fsdp2
from fsdp2.memory import offload_activations
from tests.accelerator import device
from tests.accelerator.cases import SCHEDULES
from tests.accelerator.support import on_device
from tests.distributed.support import DIM, Stack, seeded, shard
from tests.harness.distributed import RankContext
from tests.harness.selection import long

ROWS = 256
NBYTES = ROWS * DIM * 4  # of an activation
SAVED = 2 * NBYTES  # a block saves its input and what tanh returns


def _model(ctx: RankContext, num_blocks: int = 4, **options: Any) -> Any:
    model = shard(ctx, seeded(lambda: Stack(num_blocks)), **options)
    return model.to(device.DEVICE)


def _batch(seed: int) -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(seed)).to(device.DEVICE)


def _step(model: Any, seed: int = 0) -> Tensor:
    loss = model(_batch(seed)).square().mean()
    loss.backward()
    return loss.detach()


def _grads(model: Any) -> list[Tensor]:
    return [param.grad.to_local().cpu() for param in model.parameters()]


@pytest.mark.parametrize("name", ["late copies", *long(*(name for name in SCHEDULES if name != "late copies"))])
@on_device(2)
def test_copies_are_ordered_after_and_before_what_compute_does(ctx: RankContext, name: str) -> None:
    """However streams go on: freed memory, and memory that a copy has not filled, reads as NaN."""
    expected = _model(ctx)
    for seed in range(3):
        _step(expected, seed)
    model = _model(ctx)
    with offload_activations(model, min_nbytes=NBYTES):
        _step(model)
        device.schedule(**{"seed": 0, **SCHEDULES[name]})
        for seed in range(1, 3):
            _step(model, seed)
    assert all(map(torch.equal, _grads(model), _grads(expected)))


@on_device(2)
def test_a_backward_that_begins_in_a_unit_on_the_host_waits_for_its_copies(ctx: RankContext) -> None:
    """No later unit has brought them back."""
    found = []
    for offloads in (False, True):
        model, kept = _model(ctx), []
        model.blocks[1].register_forward_hook(lambda *args, kept=kept: kept.append(args[-1]))
        offload = offload_activations(model, min_nbytes=NBYTES)
        if not offloads:
            offload.remove()
        model(_batch(0))
        device.schedule(0, late=["copy"])
        kept[0].square().mean().backward()
        found.append([param.grad.to_local().cpu() for param in model.blocks[:2].parameters()])
        offload.remove()
    assert all(map(torch.equal, *found))


@on_device(2)
def test_memory_is_what_was_counted_and_the_host_never_waits(ctx: RankContext) -> None:
    """What was sent is missing at the end of forward, and at the peak, which is in backward."""
    model, x = _model(ctx), _batch(0)
    found = {}
    for budget in (None, 0, 3 * NBYTES):
        offload = None if budget is None else offload_activations(model, budget, min_nbytes=NBYTES)
        for _ in range(2):  # the first step makes plans
            model.zero_grad()
            gc.collect()  # what other tests in this process have left
            before = torch.sim.memory_allocated()  # type: ignore[attr-defined]
            device.load().reset_peak_memory()
            with device.counted_syncs() as syncs:
                loss = model(x).square().mean()
                held = torch.sim.memory_allocated() - before  # type: ignore[attr-defined]
                loss.backward()
            del loss
        found[budget] = held, torch.sim.max_memory_allocated() - before  # type: ignore[attr-defined]
        assert syncs == []
        if offload is not None:
            sent = sum(each.sent for each in offload.units)
            assert found[budget] == tuple(each - sent for each in found[None])
            assert sent == 3 * SAVED - (budget or 0) * 2 // 3
            offload.remove()


@on_device(2)
def test_copies_are_asked_for_a_unit_ahead_and_a_report_shows_them(ctx: RankContext) -> None:
    """Counted by how many blocks have been asked for before: the copies out of a block come with the next block, and
    those back into a block before the backward of the next one."""
    model, x = _model(ctx), _batch(0)
    asked: list[str] = []
    with offload_activations(model, min_nbytes=NBYTES):
        model(x).square().mean().backward()
        with device.on_launch(asked.append):
            model(x).square().mean().backward()
        with fsdp2.report.report(model) as report:
            for _ in range(3):
                model(x).square().mean().backward()
    copies = [index for index, name in enumerate(asked) if name == "aten::copy_"]
    out, back = copies[:6:2], copies[6::2]  # two for each block
    assert [asked[:index].count("aten::tanh") for index in out] == [1, 2, 3]
    assert [asked[:index].count("aten::tanh_backward") for index in back] == [0, 1, 2]
    for timeline in (report.data or {"timelines": []})["timelines"]:  # rank 0 has it
        shown = [(report.data["kinds"][kind], unit) for kind, unit, *_ in timeline["transfers"]]
        assert [unit for kind, unit in shown if kind == "copy to host"] == [1, 2, 3]  # the root is number 0
        assert [unit for kind, unit in shown if kind == "copy to device"] == [3, 2, 1]
