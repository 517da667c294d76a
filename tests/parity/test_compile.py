"""Compiled under both runtimes: bit for bit the same, with the compiler in between."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from tests.distributed.compile_support import start_compiling
from tests.harness.compare import compare
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Uneven
from tests.harness.runtimes import Runtime, oracle, subject
from tests.harness.selection import long
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


@pytest.mark.ci
@pytest.mark.parametrize("kept", [None, *long(False)])
@pytest.mark.parametrize("what", ["blocks", "model"])
@distributed(2)
def test_compiled_training_is_that_of_torch(ctx: RankContext, what: str, kept: bool | None) -> None:
    # the compiler looks at .grad of every tensor it meets
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    shard = _shard_and_compile(what, reshard_after_forward=kept)
    compare(Case(MLP, shard=shard, step=_evaluate_and_accumulate), ctx.mesh_1d())


OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3),
    "AdamW, foreach": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, foreach=True),
    "AdamW, fused": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, fused=True),
    "Adam, amsgrad": partial(torch.optim.Adam, lr=1e-2, eps=1e-3, amsgrad=True),
    "SGD": partial(torch.optim.SGD, lr=0.02, momentum=0.9),
    "SGD, foreach": partial(torch.optim.SGD, lr=0.02, momentum=0.9, foreach=True),
}


@distributed(2)
def test_gradients_lie_in_their_memory_as_under_torch(ctx: RankContext) -> None:
    """A compiled step of an optimizer makes fake tensors of them."""
    found = []
    for runtime in (subject(), oracle()):
        model = MLP()
        shard_units_and_root(runtime, model, ctx.mesh_1d())
        Step(0, ctx.rank, runtime).loss(model).backward()
        fakes: list[Any] = [FakeTensorMode().from_tensor(parameter.grad) for parameter in model.parameters()]
        found.append([(fake.storage_offset(), fake._local_tensor.storage_offset(), fake.stride()) for fake in fakes])
    assert found[0] == found[1]


@pytest.mark.long
@pytest.mark.parametrize("make", OPTIMIZERS)
@distributed(2)
def test_compiled_step_of_an_optimizer_is_that_of_torch(ctx: RankContext, make: str) -> None:
    start_compiling()

    def compiled(parameters: Any) -> torch.optim.Optimizer:
        torch.compiler.reset()
        optimizer = OPTIMIZERS[make](parameters)
        optimizer.step = torch.compile(optimizer.step, backend="aot_eager")  # type: ignore[method-assign]
        return optimizer

    compare(Case(Uneven, optimizer=compiled, num_steps=4), ctx.mesh_1d())
