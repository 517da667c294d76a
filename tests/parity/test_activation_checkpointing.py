"""Activation checkpointing: recomputation unshards what it needs, inside and around sharded modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.harness.compare import compare, trains_alike
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Block, ParityModel, Transformer
from tests.harness.selection import long
from tests.harness.training import Case, Step, sgd, shard_units_and_root
from tests.parity.setups import hybrid_mesh
from tests.parity.test_mixed_precision import BF16, BFLOAT16_ARITHMETIC, FP32, shard_with_policy

REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])


class CheckpointsInside(Block):
    """A unit that recomputes its own middle."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(super().forward, x, use_reentrant=self.reentrant)


class CheckpointsAround(MLP):
    """A model that recomputes its units."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.exit(x)


def _inside(reentrant: bool) -> MLP:
    model = MLP()
    for block in model.blocks:
        block.__class__ = CheckpointsInside
        block.reentrant = reentrant
    return model


def _around(reentrant: bool) -> MLP:
    model = CheckpointsAround()
    model.reentrant = reentrant
    return model


@REENTRANT
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("model", [_inside, _around])
@distributed(2, 4)
def test_checkpoint_function(ctx: RankContext, model, reshard: bool, reentrant: bool) -> None:
    shard = functools.partial(shard_units_and_root, reshard_after_forward=reshard)
    compare(Case(functools.partial(model, reentrant), shard=shard), ctx.mesh_1d())


@REENTRANT
@distributed(2)
def test_checkpoint_around_several_units(ctx: RankContext, reentrant: bool) -> None:
    class AroundSeveral(MLP):
        def forward(self, x: Tensor) -> Tensor:
            def several(x: Tensor) -> Tensor:
                return self.blocks[1](self.blocks[0](x))

            return self.exit(self.blocks[2](checkpoint(several, self.entry(x), use_reentrant=reentrant)))

    compare(Case(AroundSeveral), ctx.mesh_1d())


@trains_alike(2, model=MLP)
def test_checkpoint_around_the_root(step: Step, model: ParityModel) -> list[Tensor]:
    batch = step.batch(model)
    loss = model.loss(checkpoint(model, *batch, use_reentrant=False), batch)
    loss.backward()
    return [loss]


@distributed(2, 4)
def test_checkpoint_wrapper_inside_units(ctx: RankContext) -> None:
    def wrapped() -> Transformer:
        model = Transformer()
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block)
        return model

    compare(Case(wrapped), ctx.mesh_1d())


@distributed(2)
def test_checkpoint_wrapper_around_units(ctx: RankContext) -> None:
    def shard(runtime, model: Transformer, mesh) -> None:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(runtime.fully_shard(block, mesh=mesh))
        runtime.fully_shard(model, mesh=mesh)

    # The unsharded model has no wrappers and so other names.
    compare(Case(Transformer, shard=shard, unsharded=None), ctx.mesh_1d())


@distributed(2)
def test_checkpoint_wrapper_around_submodules_of_units(ctx: RankContext) -> None:
    def wrapped() -> Transformer:
        model = Transformer()
        for block in model.blocks:
            block.attention, block.mlp = checkpoint_wrapper(block.attention), checkpoint_wrapper(block.mlp)
        return model

    compare(Case(wrapped), ctx.mesh_1d())


@distributed(2, 4)
def test_recomputation_and_mixed_precision(ctx: RankContext) -> None:
    shard = functools.partial(shard_with_policy, param_dtype=BF16, reduce_dtype=FP32)
    for model in (_around, _inside):
        case = Case(
            functools.partial(model, False), shard, optimizer=sgd, reduce_dtype=BF16, unsharded=BFLOAT16_ARITHMETIC
        )
        compare(case, ctx.mesh_1d())


@REENTRANT
@distributed(2)
def test_recomputation_and_gradient_accumulation(ctx: RankContext, reentrant: bool) -> None:
    def step(step: Step, model: ParityModel) -> list[Tensor]:
        losses = []
        for micro in range(2):
            step.control(model).set_requires_gradient_sync(micro == 1)
            losses.append(step.loss(model, micro))
            losses[-1].backward()
        return losses

    compare(Case(functools.partial(_around, reentrant), step=step), ctx.mesh_1d())


# What is recomputed with, and what is not recomputed


def _dropping_out(build: Callable[[bool], MLP], reentrant: bool) -> MLP:
    model = build(reentrant)
    for block in model.blocks:
        block.down = nn.Sequential(nn.Dropout(0.5), block.down)
    return model


@REENTRANT
@pytest.mark.parametrize("build", [_inside, _around])
@distributed(2)
def test_recomputation_drops_the_same_elements(ctx: RankContext, build, reentrant: bool) -> None:
    """The generator's state is put back: else the gradients would not be those of the loss."""
    compare(Case(functools.partial(_dropping_out, build, reentrant)), ctx.mesh_1d())


def _saves_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_matmul = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if is_matmul else CheckpointPolicy.PREFER_RECOMPUTE


def _selective(function: Any, *args: Any) -> Any:
    contexts = functools.partial(create_selective_checkpoint_contexts, _saves_matmuls)
    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


class SelectiveInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + _selective(super().forward, x)


class SelectiveAround(MLP):
    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = _selective(block, x)
        return self.exit(x)


def _selective_inside() -> MLP:
    model = MLP()
    for block in model.blocks:
        block.__class__ = SelectiveInside
    return model


@pytest.mark.parametrize("reshard", [True, False, 2])
@pytest.mark.parametrize("build", [_selective_inside, SelectiveAround])
@distributed(2, 4)
def test_selective_checkpointing(ctx: RankContext, build, reshard: bool | int) -> None:
    shard = functools.partial(shard_units_and_root, reshard_after_forward=reshard)
    compare(Case(build, shard=shard), ctx.mesh_1d())


@pytest.mark.ci
@pytest.mark.parametrize("reentrant", [False, *long(True)], ids=["non_reentrant", "reentrant"])
@pytest.mark.parametrize("reshard", [2, *long(True)])
@distributed(4)
def test_recomputation_on_other_meshes(ctx: RankContext, reshard: bool | int, reentrant: bool) -> None:
    shard = functools.partial(shard_units_and_root, reshard_after_forward=reshard)
    mesh = hybrid_mesh(ctx) if reshard is True else ctx.mesh_1d()
    for build in (_around, _inside):
        compare(Case(functools.partial(build, reentrant), shard=shard), mesh)
