"""Compiled under both runtimes: bit for bit the same, with the compiler in between."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.distributed.compile_support import start_compiling
from tests.harness.compare import as_torchs, compare
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Uneven
from tests.harness.runtimes import Runtime
from tests.harness.selection import long
from tests.harness.training import Case, Step, one_backward, shard_units_and_root, sharded


def _compile(model: MLP, what: str) -> None:
    torch.compiler.reset()
    for module in model.units() if what == "blocks" else [model]:
        module.compile(backend="aot_eager")


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
    shard = sharded(reshard_after_forward=kept, then=partial(_compile, what=what))
    compare(Case(MLP, shard, _evaluate_and_accumulate), ctx.mesh_1d())


OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3),
    "AdamW, foreach": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, foreach=True),
    "AdamW, fused": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, fused=True),
    "Adam, amsgrad": partial(torch.optim.Adam, lr=1e-2, eps=1e-3, amsgrad=True),
    "SGD": partial(torch.optim.SGD, lr=0.02, momentum=0.9),
    "SGD, foreach": partial(torch.optim.SGD, lr=0.02, momentum=0.9, foreach=True),
}


@as_torchs(2)
def test_gradients_lie_in_their_memory_as_under_torch(ctx: RankContext, runtime: Runtime) -> Any:
    """A compiled step of an optimizer makes fake tensors of them."""
    model = MLP()
    shard_units_and_root(runtime, model, ctx.mesh_1d())
    one_backward(Step(0, ctx.rank, runtime), model)
    fakes: list[Any] = [FakeTensorMode().from_tensor(parameter.grad) for parameter in model.parameters()]
    return [(fake.storage_offset(), fake._local_tensor.storage_offset(), fake.stride()) for fake in fakes]


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
