"""The comparison notices what it is there to notice: each test breaks one thing in the subject's run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from tests.harness import compare as comparison
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP
from tests.harness.runtimes import Runtime, oracle
from tests.harness.training import Case, Tolerance


def _first(model: nn.Module) -> Any:
    return next(model.parameters())


# By what is reported. In the last one, the placement is another one.
DAMAGES: dict[str, Callable[[nn.Module], object]] = {
    "not bit-equal": lambda model: _first(model).to_local().view(torch.int32).bitwise_xor_(1),
    "requires_grad=False": lambda model: _first(model).requires_grad_(False),
    "None, expected Snapshot": lambda model: _first(model).register_post_accumulate_grad_hook(_drop_gradient),
    "unexpected ['extra']": lambda model: model.register_buffer("extra", torch.zeros(1)),
    "Shard(dim=1)": lambda model: None,
}


def _drop_gradient(parameter: Any) -> None:
    parameter.grad = None


@pytest.mark.parametrize("message", DAMAGES)
@distributed(2)
def test_difference_in_one_place_is_reported(ctx: RankContext, message: str) -> None:
    is_elsewhere = "Shard" in message
    given = {"shard_placement_fn": lambda parameter: Shard(parameter.ndim - 1)} if is_elsewhere else {}

    def fully_shard(module: nn.Module, **options) -> nn.Module:
        sharded = oracle().fully_shard(module, **options, **given)
        if isinstance(module, MLP):
            DAMAGES[message](module)
        return sharded

    report = _compare(Case(MLP, unsharded=None), ctx, dataclasses.replace(oracle(), fully_shard=fully_shard))
    assert message in report
    assert ("layout is" in report) >= is_elsewhere


@distributed(2)
def test_wrong_average_is_reported_against_the_unsharded_model(ctx: RankContext) -> None:
    """Both runtimes doubled: they agree with each other, so only the unsharded run can tell."""

    def doubled(parameters) -> torch.optim.Optimizer:
        parameters = list(parameters)
        for parameter in parameters:
            if hasattr(parameter, "placements"):
                parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))
        return torch.optim.SGD(parameters, lr=0.1)

    report = _compare(Case(MLP, optimizer=doubled), ctx, oracle())
    assert "differs from the unsharded model" in report
    assert "beyond Tolerance" in report


def test_sums_that_cancel_may_err_by_a_part_of_the_largest_value() -> None:
    expected, tolerance = torch.tensor([100.0, 0.0]), Tolerance(rtol=0.0, atol=0.0, of_largest=1e-2)
    comparison.compare_values("sums", torch.tensor([100.0, 0.9]), expected, tolerance)
    for actual, allowed in ((1.1, tolerance), (0.9, Tolerance(rtol=1e-2, atol=0.0))):
        with pytest.raises(AssertionError, match="beyond Tolerance"):
            comparison.compare_values("sums", torch.tensor([100.0, actual]), expected, allowed)


def _compare(case: Case, ctx: RankContext, subject: Runtime) -> str:
    before, comparison.subject = comparison.subject, lambda: subject
    try:
        comparison.compare(case, ctx.mesh_1d())
    except AssertionError as error:
        return str(error)
    finally:
        comparison.subject = before
    return "no difference found"
