"""Compiled blocks: the hooks stay out of the graphs, and no step after the second compiles again."""

from __future__ import annotations

import warnings

import torch

from tests.distributed.support import Stack, batch, seeded, shard
from tests.harness.distributed import RankContext, distributed


@distributed(2)
def test_compiled_blocks_compute_the_same_and_are_compiled_once(ctx: RankContext) -> None:
    reference, model = seeded(Stack), seeded(Stack)
    shard(ctx, model)
    torch.compiler.reset()
    for block in model.blocks:
        block.compile(backend="eager")
    for index in range(4):
        stance = "default" if index < 2 else "fail_on_recompile"
        with warnings.catch_warnings(), torch.compiler.set_stance(stance):
            # the compiler looks at .grad of every tensor it meets
            warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
            output = model(batch(index))
            output.sum().backward()
        expected = reference(batch(index))
        expected.sum().backward()
        assert torch.allclose(output, expected, atol=1e-6)
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(parameter.grad.full_tensor(), expected.grad, atol=1e-4)
