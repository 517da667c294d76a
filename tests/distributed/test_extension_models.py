"""All-gather hooks in tied, faulty and compiled models, and in units of several modules; each beside one by hand."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import fully_shard
from tests.distributed.extension_support import UNEVEN, Net, Twins, batch, loss_of, sgd
from tests.distributed.support import InjectedError
from tests.harness.distributed import RankContext, distributed
from tests.harness.extensions import Aliasing, KeptAliasing, Padded, Scaled, count, recorded
from tests.harness.selection import long

SOME = {"scaled": Scaled, "kept": KeptAliasing}
some = pytest.mark.parametrize("name", list(SOME))


def _twins(ctx: RankContext, name: str, **kwargs: Any) -> Twins:
    return Twins(SOME[name], ctx.mesh_1d(), ctx.rank, dim=UNEVEN, **kwargs)


# Modules


class _Tied(Net):
    """One weight in two places of a block, and one in two blocks of the root's own."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.out = nn.Linear(6, dim)
        self.out.weight = self.entry.weight
        for block in self.blocks:
            block.down = nn.Linear(block.up.in_features, dim, bias=False)
            block.down.weight = block.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.out(x)


@some
@distributed(2)
def test_tied_parameters_travel_once_and_train(ctx: RankContext, name: str) -> None:
    twins = _twins(ctx, name, model=_Tied)
    with recorded() as calls:
        twins.backward()
    assert count(calls, "post") == 3
    twins.step()
    twins.train(2)
    assert twins.model.out.weight is twins.model.entry.weight


@distributed(2)
def test_several_modules_as_one_unit(ctx: RankContext) -> None:
    def together(model: Any, mesh: Any) -> None:
        fully_shard(list(model.blocks), mesh=mesh)
        fully_shard(model, mesh=mesh)

    for name in SOME:
        _twins(ctx, name, shard=together).train(3)


@some
@distributed(2)
def test_parameters_without_a_gradient_get_none(ctx: RankContext, name: str) -> None:
    class Unused(Net):
        """A weight that shares its unit with a bias that is used, and a whole block."""

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0](x.mean(-1, keepdim=True) * self.entry.bias)

    _twins(ctx, name, model=Unused).train(3)


@some
@distributed(2)
def test_hook_of_a_gradient_steps_the_optimizer(ctx: RankContext, name: str) -> None:
    """Each step writes the shards while the rest of backward runs."""
    twins = _twins(ctx, name, optimizer=sgd)
    for parameter in twins.model.parameters():
        optimizer = sgd([parameter])

        def step(_: Tensor, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    for index in range(3):
        loss = loss_of(batch(ctx.rank, index))
        loss(twins.model).backward()
        twins.reference.backward(loss)
        twins.reference.step()
        twins.check()


# Errors


class _Faulty(Net):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.entry(x))
        if self.fails:
            raise InjectedError
        return self.blocks[1](x)


@pytest.mark.parametrize("resets", [True, False])
@pytest.mark.parametrize("warm", [True, False])
@some
@distributed(2)
def test_step_after_an_exception_in_forward_is_right(ctx: RankContext, name: str, warm: bool, resets: bool) -> None:
    twins = _twins(ctx, name, model=_Faulty)
    if warm:
        twins.train(1)
    twins.model.fails = True
    with pytest.raises(InjectedError):
        twins.model(batch(ctx.rank, 9))
    twins.model.fails = False
    if resets:
        twins.model.reset_iter_state()
    twins.train(3)


# Compiled


@pytest.mark.ci
@pytest.mark.parametrize("make", [Scaled, *long(Aliasing, Padded)])
@distributed(2)
def test_compiled_blocks_train_and_are_compiled_once(ctx: RankContext, make: Any) -> None:
    twins = Twins(make, ctx.mesh_1d(), ctx.rank, dim=UNEVEN)
    torch.compiler.reset()
    for block in twins.model.blocks:
        block.compile(backend="aot_eager")
    for index in range(4):
        stance = "default" if index < 2 else "fail_on_recompile"
        with warnings.catch_warnings(), torch.compiler.set_stance(stance):
            # the compiler looks at .grad of every tensor it meets
            warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
            twins.exact = False  # the compiler may order sums otherwise
            twins.train(1)
