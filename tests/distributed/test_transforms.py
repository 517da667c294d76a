"""Transforms of ``torch.func``, and forward-mode AD, around a sharded model: values are those of the plain model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from tests.distributed.changes import assert_gradients
from tests.distributed.support import seeded, shard_each
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import golden_on_ranks
from tests.harness.messages import error_of

DIM = 4


class _Pair(nn.Module):
    """A unit with two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.left(x)) + self.right(y)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry, self.block, self.pair = nn.Linear(DIM, DIM), nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()), _Pair()

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(torch.tanh(self.entry(x)))
        return self.pair(x, 2 * x)


def _x(seed: int = 0) -> Tensor:
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(seed))


def _energy(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().sum()


def _forward_mode(model: nn.Module) -> Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(_x(), _x(1)))).tangent
        assert tangent is not None
        return tangent


def _backward_through_vmap(model: nn.Module) -> Tensor:
    """It leaves gradients on the parameters, to which the step behind it adds."""
    loss = vmap(model)(_x()).square().mean()
    loss.backward()
    return loss


TRANSFORMS: dict[str, Callable[[nn.Module], Tensor]] = {
    "jvp": lambda model: jvp(model, (_x(),), (_x(1),))[1],
    "forward mode": _forward_mode,
    "grad": lambda model: grad(_energy(model))(_x()),
    "vjp": lambda model: vjp(model, _x())[1](_x(1))[0],
    "vmap": lambda model: vmap(model)(_x()),
    "vmap of grad": lambda model: vmap(grad(_energy(model)))(_x()),
    "grad of vmap": lambda model: grad(lambda x: vmap(model)(x).square().sum())(_x()),
    "jacrev": lambda model: jacrev(model)(_x()[0]),
    "jacfwd": lambda model: jacfwd(model)(_x()[0]),
    "hessian": lambda model: hessian(_energy(model))(_x()[0]),
    "backward through vmap": _backward_through_vmap,
    "autograd.functional": lambda model: torch.autograd.functional.jacobian(model, _x()[0]),
}


def _sharded(ctx: RankContext, reshard: bool) -> Any:
    model = seeded(_Model)
    return shard_each(model.block, model.pair, model, mesh=ctx.mesh_1d(), reshard_after_forward=reshard)


def _assert_step_is_that_of(model: Any, plain: nn.Module) -> None:
    for each in (model, plain):
        each(_x(2)).square().sum().backward()
    assert_gradients(model, plain, atol=1e-5)


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("name", list(TRANSFORMS))
@distributed(2)
def test_a_transform_sees_the_plain_model_and_leaves_nothing_behind(
    ctx: RankContext, name: str, reshard: bool, has_run: bool
) -> None:
    model, plain = _sharded(ctx, reshard), seeded(_Model)
    if has_run:
        _assert_step_is_that_of(model, plain)
        model.zero_grad()
        plain.zero_grad()
    torch.testing.assert_close(TRANSFORMS[name](model), TRANSFORMS[name](plain))
    _assert_step_is_that_of(model, plain)


@golden_on_ranks()
def test_a_transform_of_parameters_is_named_and_leaves_the_model_as_it_was(ctx: RankContext) -> str:
    model, plain = _sharded(ctx, True), seeded(_Model)

    def loss(params: dict[str, Tensor]) -> Tensor:
        return functional_call(model, params, (_x(),)).sum()

    found = error_of(lambda: grad(loss)(dict(model.named_parameters())))
    _assert_step_is_that_of(model, plain)
    return found
