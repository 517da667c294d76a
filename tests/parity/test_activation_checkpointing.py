"""Activation checkpointing: recomputation unshards what it needs, inside and around sharded modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.harness.compare import Cases, compare, each_compared, trains_alike
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Block, ParityModel, Transformer
from tests.harness.training import Case, Step, accumulate, sgd, sharded
from tests.parity.test_mixed_precision import BF16, BFLOAT16_ARITHMETIC, FP32


def _saves_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_matmul = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if is_matmul else CheckpointPolicy.PREFER_RECOMPUTE


RECOMPUTE = {
    False: partial(checkpoint, use_reentrant=False),
    True: partial(checkpoint, use_reentrant=True),
    "selective": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, _saves_matmuls)
    ),
}


class CheckpointsInside(Block):
    """A unit that recomputes its own middle."""

    kind: bool | str = False

    def forward(self, x: Tensor) -> Tensor:
        return x + RECOMPUTE[self.kind](super().forward, x)


class CheckpointsAround(MLP):
    """A model that recomputes its units."""

    kind: bool | str = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = RECOMPUTE[self.kind](block, x)
        return self.exit(x)


def _inside(kind: bool | str) -> MLP:
    model = MLP()
    for block in model.blocks:
        block.__class__ = CheckpointsInside
        block.kind = kind
    return model


def _around(kind: bool | str) -> MLP:
    model = CheckpointsAround()
    model.kind = kind
    return model


MODELS = {"around": _around, "inside": _inside}
KINDS = {
    f"{where}, {kind}, {reshard}": Case(partial(build, kind), sharded(reshard_after_forward=reshard))
    for where, build in MODELS.items()
    for kind in RECOMPUTE
    for reshard in (True, False, 2)
}
IN_SHORT = ("inside, False, True", "inside, selective, True")


@each_compared(2, 4, ci=[name for name in KINDS if name not in IN_SHORT])
def test_checkpoint_function() -> Cases:
    return KINDS


class AroundSeveral(MLP):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.recompute = RECOMPUTE[reentrant]

    def forward(self, x: Tensor) -> Tensor:
        def several(x: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](x))

        return self.exit(self.blocks[2](self.recompute(several, self.entry(x))))


def _dropping_out(build: Callable[[bool], MLP], reentrant: bool) -> MLP:
    """The generator's state is put back: else the gradients would not be those of the loss."""
    model = build(reentrant)
    for block in model.blocks:
        block.down = nn.Sequential(nn.Dropout(0.5), block.down)
    return model


def _wrapped_inside() -> Transformer:
    model = Transformer()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    return model


def _submodules_wrapped() -> Transformer:
    model = Transformer()
    for block in model.blocks:
        block.attention, block.mlp = checkpoint_wrapper(block.attention), checkpoint_wrapper(block.mlp)
    return model


_mixed = partial(Case, optimizer=sgd, reduce_dtype=BF16, unsharded=BFLOAT16_ARITHMETIC)
CI = ["several units, reentrant", "accumulation, reentrant"]
CI += [f"dropout {where}, {kind}" for where in MODELS for kind in ("non-reentrant", "reentrant")][1:]


@each_compared(2, 4, ci=CI)
def test_recomputation() -> Cases:
    mixed = sharded(policy={"param_dtype": BF16, "reduce_dtype": FP32})
    rows: dict[str, Any] = {
        "checkpoint_wrapper inside units": Case(_wrapped_inside),
        "checkpoint_wrapper around submodules of units": Case(_submodules_wrapped),
        "mixed precision": tuple(_mixed(partial(model, False), mixed) for model in MODELS.values()),
    }
    for kind, reentrant in (("non-reentrant", False), ("reentrant", True)):
        around = partial(_around, reentrant)
        rows[f"several units, {kind}"] = Case(partial(AroundSeveral, reentrant))
        rows[f"accumulation, {kind}"] = Case(around, step=accumulate)
        for where, build in MODELS.items():
            rows[f"dropout {where}, {kind}"] = Case(partial(_dropping_out, build, reentrant))
    return rows


@trains_alike(2, model=MLP)
def test_checkpoint_around_the_root(step: Step, model: ParityModel) -> list[Tensor]:
    batch = step.batch(model)
    loss = model.loss(checkpoint(model, *batch, use_reentrant=False), batch)
    loss.backward()
    return [loss]


@distributed(2)
def test_checkpoint_wrapper_around_units(ctx: RankContext) -> None:
    def shard(runtime, model: Transformer, mesh) -> None:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(runtime.fully_shard(block, mesh=mesh))
        runtime.fully_shard(model, mesh=mesh)

    # The unsharded model has no wrappers and so other names.
    compare(Case(Transformer, shard, unsharded=None), ctx.mesh_1d())
