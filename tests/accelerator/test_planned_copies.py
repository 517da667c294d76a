"""What ``benchmarks/gpu/step.py`` allows on the compute stream is what the simulated accelerator is asked for there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import fsdp2
from benchmarks.gpu.step import planned_copies
from benchmarks.gpu.subjects import BF16, CASES, Block, Shape
from benchmarks.step.launches import COPIES, FOLDERS, lines_of
from fsdp2.core.comm.backends import CollectiveComm
from fsdp2.core.plan.dtypes import GRADIENTS_FOLLOW_SHARDS
from tests.accelerator import device
from tests.accelerator.support import on_device
from tests.harness.distributed import RankContext
from tests.harness.selection import long

SHAPE = Shape(64, 2, 1, 128)


@pytest.mark.ci
@pytest.mark.parametrize("index", [3, *long(0, 1, 2)])
@pytest.mark.skipif(
    GRADIENTS_FOLLOW_SHARDS,
    reason="torch 2.15 keeps gradients as wide as kernels return them; the CPU's, which run here, return wider ones",
)
@on_device(2)
def test_planned_copies_are_those_on_the_compute_stream(ctx: RankContext, index: int) -> None:
    case = CASES[index]
    with pytest.MonkeyPatch.context() as patch:
        # A gain has 64 bytes per shard, k and v have 2 KiB.
        patch.setattr(CollectiveComm, "routing", replace(CollectiveComm.routing, direct_min_nbytes=1024))
        model = nn.Sequential(*(Block(SHAPE, has_gains=case.has_gains) for _ in range(2))).to(case.shard_dtype)
        model = model.to(device.DEVICE)
        policy = fsdp2.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=case.reduce_dtype)
        for module in (*model, model):
            fsdp2.fully_shard(module, mesh=ctx.mesh_1d(), mp_policy=policy)
        x = torch.ones(1, 4, SHAPE.dim, dtype=BF16).to(device.DEVICE)
        for _ in range(2):
            model(x).sum().backward()
            model.zero_grad()
        found = _copies_of_the_runtime(lambda: model(x).sum().backward())
        planned = planned_copies(model)
    # The addresses that a bucket's kernel reads are a copy of their own on CUDA, and not here.
    assert len(found) == planned.kernels, found
    assert planned.uploads == (2 if case.has_gains else 0)


def _copies_of_the_runtime(step: Callable[[], object]) -> list[str]:
    """The lines of fsdp2 that ask for copies on the compute stream. The model's own copies are left out."""
    compute = torch.accelerator.current_stream()
    found: list[str] = []

    def note(what: str) -> None:
        lines = lines_of(FOLDERS["fsdp2"])
        if lines and what.removeprefix("aten::") in COPIES and torch.accelerator.current_stream() == compute:
            found.append(f"{what}: {lines}")

    with device.on_launch(note):
        step()
    return found
