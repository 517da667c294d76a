"""Gradient accumulation: with and without communication; and several roots in one process, as the stages of a pipeline.

Each stage is a root of its own. Activations and their gradients cross between stages as plain detached tensors.
Under torch the stages share nothing: with ``share_comm_ctx``, the last backward of one stage makes the next backward of
another raise an ``IndexError``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.harness.compare import Cases, compare, each_compared, hsdp, one_replica
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Branches, ParityModel, Uneven
from tests.harness.runtimes import Runtime, oracle
from tests.harness.training import Case, Step, accumulate, gradients_of, sgd, shard_units_and_root, sharded, snapshot
from tests.parity.test_mixed_precision import BF16, BFLOAT16_ARITHMETIC, FP32

_no_sync = partial(accumulate, note=gradients_of)
_no_all_reduce = partial(accumulate, switch="set_requires_all_reduce", note=gradients_of)
LAST, KEEP, SYNC = "set_is_last_backward", "set_reshard_after_backward", "set_requires_gradient_sync"


def _registered(model: ParityModel) -> list[Any]:
    return [(type(parameter).__name__, snapshot(parameter)) for parameter in model.parameters()]


def _in_one_unit(step: Step, model: MLP) -> list[Tensor]:
    """And in the root, but not in the other units."""

    def before(micro: int) -> None:
        step.control(model.blocks[0]).set_requires_gradient_sync(micro == 2)
        step.control(model).set_requires_gradient_sync(micro == 2, recurse=False)

    return accumulate(step, model, (), gradients_of, before=before)


def _other_units(step: Step, model: Branches) -> list[Tensor]:
    losses = []
    for micro, active in enumerate([(0, 1, 2), (1,), (0, 1)]):
        step.control(model).set_requires_gradient_sync(micro == 2)
        losses.append(step.loss(model, micro, active=active))
        losses[-1].backward()
    return losses


@each_compared(2, 4, ci=("kept without sync",))
def test_without_gradient_sync_until_the_last_micro_batch() -> Cases:
    """Programs have other models, what is kept after forward, and gradients that are zeroed in place."""
    noted = partial(accumulate, note=_registered)
    return {
        "MLP": Case(MLP, step=_no_sync),
        "with communication in every backward": Case(MLP, step=partial(accumulate, switch=(), note=gradients_of)),
        "one unit only": Case(MLP, step=_in_one_unit),
        "the last has no gradient": Case(Branches, step=_other_units),
        "is_last_backward defers the end of backward": Case(MLP, step=partial(noted, switch=LAST)),
        "parameters kept": Case(MLP, step=partial(noted, switch=KEEP)),
        "kept without sync": Case(MLP, step=partial(noted, switch=(KEEP, SYNC))),
    }


@each_compared(2, 4)
def test_without_gradient_sync_accumulates_in_reduce_dtype() -> Cases:
    """Programs have the other policies."""
    shard = sharded(policy={"param_dtype": BF16, "reduce_dtype": FP32})
    low = Case(MLP, shard, _no_sync, sgd, reduce_dtype=BF16, unsharded=BFLOAT16_ARITHMETIC)
    return {"bf16 reduced in fp32": low}


def _frozen_meanwhile(step: Step, model: MLP) -> list[Tensor]:
    def freeze(micro: int) -> None:
        for part in (model.blocks[0], model.blocks[1].up):
            part.requires_grad_(micro == 0)

    return accumulate(step, model, num=2, before=freeze)


@each_compared(2)
def test_what_is_frozen_before_its_gradient_is_reduced() -> Cases:
    """The gradient of the first micro-batch is reduced, and nothing of it is left for later steps."""
    in_bf16 = Case(MLP, sharded(policy={"param_dtype": BF16}), _frozen_meanwhile, unsharded=None)
    return {"fp32 and bf16": (Case(MLP, step=_frozen_meanwhile), in_bf16)}


def _replicas(ctx: RankContext) -> list[DeviceMesh]:
    return [hsdp(ctx), one_replica(ctx)][: 2 if ctx.world_size == 2 else 1]


@each_compared(2, 4, mesh=_replicas)
def test_hsdp_without_all_reduce_until_the_last_micro_batch() -> Cases:
    return {"MLP and uneven": (Case(MLP, step=_no_all_reduce), Case(Uneven, step=_no_all_reduce))}


@each_compared(2, 4, mesh=_replicas)
def test_hsdp_without_gradient_sync_until_the_last_micro_batch() -> Cases:
    return {"MLP": Case(MLP, step=_no_sync)}


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


def _shard_stages(runtime: Runtime, model: Any, mesh: DeviceMesh, **kwargs: Any) -> None:
    for stage in model.stages:
        shard_units_and_root(runtime, stage, mesh, **kwargs)
    if runtime is not oracle():
        runtime.share_comm_ctx(list(model.stages))


def _actions(step: Step, model: _Pipeline) -> list[Tensor]:
    """Unshard all, no communication but in the last backward of each stage, then reshard."""
    inputs: dict[tuple[int, int], Tensor] = {}
    outputs: dict[tuple[int, int], Tensor] = {}
    modules = [step.control(module) for stage in model.stages for module in (stage, *stage.blocks)]  # type: ignore[misc]
    for module in modules:
        module.unshard(async_op=True)
    for stage, kind, micro in ONE_F_ONE_B:
        if kind == "F":
            x = outputs[0, micro].detach().requires_grad_() if stage else step.batch(model, micro)[0]
            y = model.stages[stage](x)
            inputs[stage, micro], outputs[stage, micro] = x, model.loss(y, (x,)) / NUM_MICRO if stage else y
            continue
        control, is_last = step.control(model.stages[stage]), micro == NUM_MICRO - 1
        control.set_is_last_backward(is_last)
        control.set_reshard_after_backward(is_last)
        control.set_requires_gradient_sync(is_last)
        outputs[stage, micro].backward(None if stage else inputs[1, micro].grad)
    for module in modules:
        module.reshard()
    return [outputs[1, micro] for micro in range(NUM_MICRO)]


@pytest.mark.parametrize("reshard", [False, None])
@distributed(2, 4)
def test_stages_that_reduce_in_their_last_backward(ctx: RankContext, reshard: bool | None) -> None:
    shard = partial(_shard_stages, reshard_after_forward=reshard)
    compare(Case(_Pipeline, shard, _actions), ctx.mesh_1d())
