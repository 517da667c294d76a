"""``to``, ``half``, ``bfloat16`` and what else goes through ``_apply``, at any time; frozen and ignored parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness.compare import compare, compare_losses_with_unsharded, hsdp, trains_alike
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Uneven, freeze
from tests.harness.runtimes import Runtime, beyond_torch
from tests.harness.training import Case, Step, Tolerance, one_backward, sgd, shard_units_and_root
from tests.parity.setups import SETUPS, setups

CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bfloat16": nn.Module.bfloat16,
    "half": nn.Module.half,
    "double": nn.Module.double,
    "to bfloat16": lambda model: model.to(torch.bfloat16),
}
ANY_DTYPE = Tolerance(rtol=5e-2, atol=5e-2)


class AnyDtype(Uneven):
    """Takes its inputs in the dtype that its parameters have."""

    def batch(self, generator: torch.Generator) -> tuple[Any, ...]:
        return (super().batch(generator)[0].to(self.exit.weight.dtype),)


def _cast_at(step_index: int, cast: Callable[[nn.Module], nn.Module], evaluates: bool = False) -> Any:
    def step(step: Step, model: Any) -> list[Tensor]:
        if step.index == step_index:
            if evaluates:
                with torch.no_grad():
                    step.loss(model)
            model.zero_grad()
            assert cast(model) is model
        losses = one_backward(step, model)
        if step.index >= step_index:
            expected = cast(nn.Linear(1, 1)).weight.dtype
            assert all(parameter.dtype is parameter.grad.dtype is expected for parameter in model.parameters())
        return losses

    return step


# without state, which would keep its dtype
STATELESS = functools.partial(torch.optim.SGD, lr=0.02)


@pytest.mark.parametrize("cast", list(CASTS))
@distributed(2, 4)
def test_cast_before_the_first_step(ctx: RankContext, cast: str) -> None:
    reduce_dtype = CASTS[cast](nn.Linear(1, 1)).weight.dtype
    step = _cast_at(0, CASTS[cast])
    case = Case(AnyDtype, step=step, optimizer=STATELESS, reduce_dtype=reduce_dtype, unsharded=ANY_DTYPE)
    compare(case, ctx.mesh_1d())


@beyond_torch("gathers into memory of the dtype before, and raises")
@pytest.mark.parametrize("evaluates", [False, True], ids=["after a step", "after an evaluation"])
@pytest.mark.parametrize("cast", list(CASTS))
@distributed(2)
def test_cast_in_the_middle_of_training(ctx: RankContext, cast: str, evaluates: bool) -> None:
    step = _cast_at(1, CASTS[cast], evaluates)
    compare_losses_with_unsharded(Case(AnyDtype, step=step, optimizer=STATELESS, unsharded=ANY_DTYPE), ctx.mesh_1d())


@setups("fsdp", long=("resting", "hsdp", "kept"))
@distributed(2, 4)
def test_cast_to_double_and_back_between_steps(ctx: RankContext, setup: str) -> None:
    """Optimizers keep their parameters: what is cast is the memory behind them."""

    def step(step: Step, model: Any) -> list[Tensor]:
        return one_backward(step, model.double().float())

    where = SETUPS[setup]
    compare(Case(where.build, where.shard, step=step), where.mesh(ctx))


@trains_alike(2, model=MLP, mesh=hsdp)
def test_move_to_the_device_that_it_is_on_changes_nothing(step: Step, model: Any) -> list[Tensor]:
    before = list(model.parameters())
    model.to("cpu").cpu().to(torch.zeros(1))
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    return one_backward(step, model)


@pytest.mark.parametrize("mesh", ["fsdp", "hsdp"])
@distributed(2)
def test_freezing_and_thawing_with_ignored_parameters(ctx: RankContext, mesh: str) -> None:
    def shard(runtime: Runtime, model: MLP, mesh: Any) -> None:
        freeze(model, "blocks.1.down", "exit.bias")
        shard_units_and_root(runtime, model, mesh, ignored_params={model.blocks[0].up.weight, model.blocks[1].up.bias})

    def step(step: Step, model: MLP) -> list[Tensor]:
        model.blocks[1].down.requires_grad_(step.index == 1)
        model.blocks[0].up.requires_grad_(step.index != 2)  # one of its parameters is ignored
        return one_backward(step, model)

    where = ctx.mesh_1d() if mesh == "fsdp" else hsdp(ctx)
    # Ignored parameters are not averaged, so ranks diverge and there is no one unsharded model to compare with.
    compare(Case(MLP, shard, step, optimizer=sgd, num_steps=4, unsharded=None), where)
