"""Several roots in one process, as the stages of a pipeline, under a schedule of explicit actions.

Each stage is a root of its own. Activations and their gradients cross between stages as plain detached tensors.
Under torch the stages share nothing: with ``share_comm_ctx``, the last backward of one stage makes the next backward of
another raise an ``IndexError``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.harness.compare import compare, compare_losses_with_unsharded, trains_alike
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, ParityModel
from tests.harness.runtimes import Runtime, beyond_torch, oracle
from tests.harness.training import Case, Step, shard_units_and_root

NUM_MICRO = 4


class _Stage(MLP):
    def __init__(self) -> None:
        super().__init__(num_blocks=2)
        self.exit = nn.Identity()  # type: ignore[assignment]


class _Pipeline(ParityModel):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(_Stage() for _ in range(2))


# (stage, forward or backward, micro-batch): both stages in one process, in an order that 1F1B may lead to
ONE_F_ONE_B: tuple[tuple[int, str, int], ...] = (
    *((0, "F", 0), (1, "F", 0), (0, "F", 1)),
    *((1, "B", 0), (0, "B", 0), (1, "F", 1), (0, "F", 2)),
    *((1, "B", 1), (0, "B", 1), (1, "F", 2), (0, "F", 3)),
    *((1, "B", 2), (0, "B", 2), (1, "F", 3), (1, "B", 3), (0, "B", 3)),
)
GPIPE: tuple[tuple[int, str, int], ...] = (
    *((stage, "F", micro) for micro in range(NUM_MICRO) for stage in (0, 1)),
    *((stage, "B", micro) for micro in reversed(range(NUM_MICRO)) for stage in (1, 0)),
)


def _shard_stages(runtime: Runtime, model: Any, mesh: DeviceMesh, **kwargs: Any) -> None:
    for stage in model.stages:
        shard_units_and_root(runtime, stage, mesh, **kwargs)
    if runtime is not oracle():
        runtime.share_comm_ctx(list(model.stages))


class _Run:
    """One step of a pipeline: what the stages have computed and not yet used."""

    def __init__(self, step: Step, model: _Pipeline) -> None:
        self._step, self._model = step, model
        self._inputs: dict[tuple[int, int], Tensor] = {}
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self._gradients: dict[tuple[int, int], Tensor] = {}
        self.losses: list[Tensor] = []

    def forward(self, stage: int, micro: int) -> None:
        if stage == 0:
            (x,) = self._step.batch(self._model, micro)
        else:
            x = self._outputs[stage - 1, micro].detach().requires_grad_()
        self._inputs[stage, micro] = x
        output = self._model.stages[stage](x)
        if stage == 1:
            output = self._model.loss(output, (x,)) / NUM_MICRO
            self.losses.append(output)
        self._outputs[stage, micro] = output

    def backward(self, stage: int, micro: int) -> None:
        self._outputs.pop((stage, micro)).backward(self._gradients.pop((stage, micro), None))
        gradient = self._inputs.pop((stage, micro)).grad
        if gradient is not None:
            self._gradients[stage - 1, micro] = gradient

    def follow(self, order: Sequence[tuple[int, str, int]], before_backward: Any = lambda stage: None) -> None:
        for stage, kind, micro in order:
            if kind == "F":
                self.forward(stage, micro)
            else:
                before_backward(stage)
                self.backward(stage, micro)


def _actions(step: Step, model: _Pipeline, order: Sequence[tuple[int, str, int]]) -> list[Tensor]:
    """Unshard all, no communication but in the last backward of each stage, then reshard."""
    run, num_backwards = _Run(step, model), [0, 0]
    modules = [step.control(module) for stage in model.stages for module in (stage, *stage.blocks)]  # type: ignore[misc]
    for module in modules:
        module.unshard(async_op=True)

    def configure(stage: int) -> None:
        num_backwards[stage] += 1
        control, is_last = step.control(model.stages[stage]), num_backwards[stage] == NUM_MICRO
        control.set_is_last_backward(is_last)
        control.set_reshard_after_backward(is_last)
        control.set_requires_gradient_sync(is_last)

    run.follow(order, configure)
    for module in modules:
        module.reshard()
    return run.losses


@pytest.mark.parametrize("order", [ONE_F_ONE_B, GPIPE], ids=["1f1b", "gpipe"])
@pytest.mark.parametrize("reshard", [False, None])
@distributed(2, 4)
def test_stages_that_reduce_in_their_last_backward(ctx: RankContext, order, reshard: bool | None) -> None:
    shard = functools.partial(_shard_stages, reshard_after_forward=reshard)
    compare(Case(_Pipeline, shard, functools.partial(_actions, order=order)), ctx.mesh_1d())


@trains_alike(2, model=_Pipeline, shard=_shard_stages)
def test_stages_that_reduce_in_every_backward(step: Step, model: _Pipeline) -> list[Tensor]:
    run = _Run(step, model)
    run.follow(ONE_F_ONE_B)
    return run.losses


def _finalized(
    step: Step, model: _Pipeline, *, async_op: bool = True, sync: bool = False, order: Any = ONE_F_ONE_B
) -> list[Tensor]:
    """Reducing is an action of its own, after all backwards of a stage."""
    run = _Run(step, model)
    controls = [step.control(stage) for stage in model.stages]
    for control in controls:
        control.set_manual_backward_finalization(True)
        control.set_reshard_after_backward(False)
        control.set_requires_gradient_sync(sync)
    run.follow(order)
    handles = []
    for control in controls:
        control.set_reshard_after_backward(True)
        control.set_requires_gradient_sync(True)
        handles.append(control.finalize_backward(async_op=async_op))
    if async_op and step.runtime is not None:
        for handle in handles:
            handle.wait()
    return run.losses


def _partly_reduced(step: Step, model: _Pipeline) -> list[Tensor]:
    controls = [step.control(stage) for stage in model.stages]
    for control in controls:
        control.set_requires_all_reduce(False)
        control.set_manual_backward_finalization(True)
    run = _Run(step, model)
    run.follow(ONE_F_ONE_B)
    for control in controls:
        control.set_requires_all_reduce(True)
        control.finalize_backward()
    return run.losses


@beyond_torch("manual finalization came with torch 2.15")
@pytest.mark.parametrize("order", [ONE_F_ONE_B, GPIPE], ids=["1f1b", "gpipe"])
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("sync", [False, True])
@distributed(2)
def test_stages_whose_backwards_are_finalized(ctx: RankContext, order, async_op: bool, sync: bool) -> None:
    step = functools.partial(_finalized, async_op=async_op, sync=sync, order=order)
    compare_losses_with_unsharded(Case(_Pipeline, _shard_stages, step), ctx.mesh_1d())


@beyond_torch("manual finalization came with torch 2.15")
@distributed(2)
def test_finalized_backwards_are_those_that_reduce_in_the_last_one(ctx: RankContext) -> None:
    """Bit for bit what automatic finalization gives, which is torch's by the tests above."""
    automatic = functools.partial(_actions, order=ONE_F_ONE_B)
    case = Case(_Pipeline, _shard_stages, _finalized, unsharded=None)
    compare(case, ctx.mesh_1d(), Case(_Pipeline, _shard_stages, automatic))


@beyond_torch("manual finalization came with torch 2.15")
@distributed(4)
def test_stages_on_hsdp_whose_backwards_are_finalized(ctx: RankContext) -> None:
    for step in (_partly_reduced, _finalized):
        compare_losses_with_unsharded(Case(_Pipeline, _shard_stages, step), ctx.mesh_2d(2, 2))
