"""Compiled under both runtimes: bit for bit the same, with the compiler in between."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests.harness.compare import compare
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP
from tests.harness.runtimes import Runtime
from tests.harness.training import Case, Step, shard_units_and_root


def _shard_and_compile(what: str, **kwargs: Any) -> Any:
    def shard(runtime: Runtime, model: MLP, mesh: DeviceMesh) -> None:
        torch.compiler.reset()
        shard_units_and_root(runtime, model, mesh, **kwargs)
        for module in model.units() if what == "blocks" else [model]:
            module.compile(backend="aot_eager")

    return shard


def _evaluate_and_accumulate(step: Step, model: MLP) -> list[Tensor]:
    """Evaluates first: torch's root computes once more with what an evaluation gathered before the optimizer's step."""
    model.eval()
    with torch.no_grad():
        losses = [step.loss(model, 2)]
    model.train()
    for micro in range(2):
        step.control(model).set_requires_gradient_sync(micro == 1)
        losses.append(step.loss(model, micro))
        losses[-1].backward()
    return losses


@pytest.mark.parametrize("kept", [None, False])
@pytest.mark.parametrize("what", ["blocks", "model"])
@distributed(2)
def test_compiled_training_is_that_of_torch(ctx: RankContext, what: str, kept: bool | None) -> None:
    # the compiler looks at .grad of every tensor it meets
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    shard = _shard_and_compile(what, reshard_after_forward=kept)
    compare(Case(MLP, shard=shard, step=_evaluate_and_accumulate), ctx.mesh_1d())
