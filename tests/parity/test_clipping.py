"""Gradient clipping: the norms and the clipped gradients are torch's, and those of the unsharded model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.harness.compare import SUMMATION_ORDER, as_torchs, compare_values
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Uneven
from tests.harness.runtimes import Runtime, oracle, subject
from tests.harness.training import EXACT, Step, Tolerance, one_backward, shard_units_and_root
from tests.parity.setups import SETUPS, Setup, recorded, setups, whole

FINITE = (1.0, 2.0, 3.5, 0.0)
INFINITE = (float("inf"), float("-inf"))  # torch has none of an empty tensor: every rank needs a row of each parameter
MAX_NORM = 0.05


def _model_with_gradients(setup: Setup, runtime: Runtime, ctx: RankContext) -> Any:
    model = setup.sharded(runtime, ctx)
    one_backward(Step(0, ctx.rank, runtime), model)
    return model


def _clip(parameters: list[nn.Parameter], **options: Any) -> list[Any]:
    """The norm and the clipped gradients; the gradients are put back."""
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None if parameter.grad is None else parameter.grad.clone()
    norm = nn.utils.clip_grad_norm_(parameters, MAX_NORM, **options)
    clipped = [parameter.grad for parameter in parameters]
    for parameter, grad in zip(parameters, kept, strict=True):
        parameter.grad = grad
    return [norm, clipped]


def _tolerance(setup: Setup, ctx: RankContext) -> Tolerance:
    return EXACT if max(setup.mesh(ctx).shape) <= 2 else SUMMATION_ORDER[torch.float32]


def _assert_close(actual: Any, expected: Any, tolerance: Tolerance) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance.rtol, atol=tolerance.atol)


def _unsharded(setup: Setup, ctx: RankContext) -> list[nn.Parameter]:
    """The parameters of the unsharded model, with gradients that are averaged over what all ranks compute with."""
    torch.manual_seed(0)
    model = setup.build()
    for rank in range(ctx.world_size):
        one_backward(Step(0, rank, None), model)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= ctx.world_size
    return list(model.parameters())


@setups("uneven", "hsdp", long=("fsdp", "resting"))
@distributed(2, 4)
def test_gradients_are_clipped_as_torch_clips_them(ctx: RankContext, setup: str) -> None:
    where = SETUPS[setup]
    theirs, ours = (list(_model_with_gradients(where, r, ctx).parameters()) for r in (oracle(), subject()))
    reference = _unsharded(where, ctx)
    norms = FINITE if where.build is Uneven else FINITE + INFINITE
    for norm_type, foreach in itertools.product(norms, (True, False)):
        options = {"norm_type": norm_type, "foreach": foreach}
        found, expected = (_clip(parameters, **options) for parameters in (ours, theirs))
        _assert_close(whole(found), whole(expected), _tolerance(where, ctx))
        if ctx.world_size == 2:
            compare_values("layout", recorded(found), recorded(expected))
        _assert_close(whole(found), _clip(reference, **options), Tolerance(rtol=1e-4, atol=1e-6))


@setups("fsdp", "hsdp")
@as_torchs(2)
def test_norm_and_clipping_in_two_calls(ctx: RankContext, runtime: Runtime, setup: str) -> Any:
    """``get_total_norm`` and ``clip_grads_with_norm_``, as pipelines use them to sum over their stages."""
    parameters = list(_model_with_gradients(SETUPS[setup], runtime, ctx).parameters())
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    nn.utils.clip_grads_with_norm_(parameters, MAX_NORM, norm)
    once, again = whole([norm, [parameter.grad for parameter in parameters]])
    assert once > MAX_NORM
    squares = torch.stack([grad.square().sum() for grad in again])
    assert torch.allclose(squares.sum().sqrt(), torch.tensor(MAX_NORM), rtol=1e-4)
    return [once, again]


@setups("uneven", "hsdp")
@distributed(2)
def test_a_gradient_that_is_not_finite_in_one_shard_is_refused_on_all_ranks(ctx: RankContext, setup: str) -> None:
    model = _model_with_gradients(SETUPS[setup], subject(), ctx)
    grad = model.exit.weight.grad  # 7 rows: each shard has some
    axis = grad.device_mesh.ndim - 1
    if grad.device_mesh.get_local_rank(axis) == grad.device_mesh.size(axis) - 1:
        grad.to_local()[-1, 0] = float("nan")
    before = [p.grad.to_local().clone() for p in model.parameters()]
    for foreach in (True, False):
        with pytest.raises(RuntimeError, match=r"total norm of order 2.* is non-finite"):
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, error_if_nonfinite=True, foreach=foreach)
    for kept, p in zip(before, model.parameters(), strict=True):
        assert torch.equal(kept.nan_to_num(7.0), p.grad.to_local().nan_to_num(7.0))
    assert nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).full_tensor().isnan()


@as_torchs(2)
def test_clipping_by_value(ctx: RankContext, runtime: Runtime) -> Any:
    model = _model_with_gradients(SETUPS["uneven"], runtime, ctx)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    clipped = whole([parameter.grad for parameter in model.parameters()])
    assert max(grad.abs().max() for grad in clipped) == torch.tensor(0.01)
    return clipped


def _with_ignored(runtime: Runtime, model: MLP, mesh: Any) -> None:
    ignored = {model.entry.weight, model.blocks[1].up.bias}
    shard_units_and_root(runtime, model, mesh, ignored_params=ignored)


IGNORED = Setup(MLP, shard=_with_ignored)


def _total_norm_of_both_kinds(parameters: list[nn.Parameter]) -> Tensor:
    """The norm over sharded gradients and over plain ones, which torch does not take in one list."""
    grads = [parameter.grad for parameter in parameters]
    sharded = [grad for grad in grads if isinstance(grad, DTensor)]
    plain = [grad for grad in grads if not isinstance(grad, DTensor)]
    norms = [nn.utils.get_total_norm(sharded).full_tensor(), nn.utils.get_total_norm(plain)]
    return torch.linalg.vector_norm(torch.stack(norms))


@as_torchs(2)
def test_ignored_parameters_are_clipped_in_a_call_of_their_own(ctx: RankContext, runtime: Runtime) -> Any:
    parameters = list(_model_with_gradients(IGNORED, runtime, ctx).parameters())
    norm = _total_norm_of_both_kinds(parameters)
    for kind in (True, False):
        nn.utils.clip_grads_with_norm_([p for p in parameters if isinstance(p, DTensor) is kind], MAX_NORM, norm)
    clipped = whole([norm, [parameter.grad for parameter in parameters]])
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as refusal:
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
    return [clipped, str(refusal.value)]
