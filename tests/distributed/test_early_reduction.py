"""A large group is reduced in two launches: half of its gradients leaves while the other half is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.tools import trace
from tests.distributed.support import InjectedError, RaiseInBackward, same_on_all_ranks, seeded
from tests.harness.distributed import RankContext, distributed
from tests.harness.runtimes import oracle

WIDTH = 1024  # weights of 4 MiB: on two ranks of gloo they travel without a bucket, and three of them are a large group


class _Block(nn.Module):
    """``skips``: the last layer takes no part. ``raises``: in backward, between the last layer and the others.
    ``recomputes``: the last layer is used twice, once under a checkpoint with a backward of its own."""

    skips = raises = recomputes = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second, last = self.layers
        y = second(torch.tanh(first(x)))
        if self.raises:
            y = RaiseInBackward.apply(y)
        if self.recomputes:
            y = checkpoint(last, y, use_reentrant=True)
        return x + (y if self.skips else last(y))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.exit = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.exit(x)


def _sharded(ctx: RankContext, by: Any = fully_shard, **options: Any) -> Any:
    model = seeded(_Model)
    for block in model.blocks:
        by(block, mesh=ctx.mesh_1d(), **options)
    return by(model, mesh=ctx.mesh_1d(), **options)


def _loss(model: Any, seed: int) -> Tensor:
    return model(torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))).float().square().mean()


def _backward_trace(ctx: RankContext) -> str:
    model = _sharded(ctx)
    _loss(model, 0).backward()  # from then on it is known what is early
    loss = _loss(model, 0)
    with trace.record(model) as recorded:
        loss.backward()
    return str(recorded)


def test_early_gradients_leave_before_the_rest_and_never_those_of_a_unit_around_others() -> None:
    assert_expected_inline(
        same_on_all_ranks(_backward_trace),
        """\
pre_backward (root)
    prefetch blocks.1  12595200 bytes
pre_backward blocks.1
    wait blocks.1  12595200 bytes
    prefetch blocks.0  12595200 bytes
    reduce_early blocks.1
post_backward blocks.1
    reshard blocks.1  12595200 bytes
    reduce blocks.1
pre_backward blocks.0
    wait blocks.0  12595200 bytes
    reduce_early blocks.0
end_backward (root)
    reshard blocks.0  12595200 bytes
    reduce blocks.0
    reshard (root)  32896 bytes
    reduce (root)
    land (root)""",
    )


def _train(model: Any, rank: int) -> list[Tensor]:
    """Gradients after three steps, of two microbatches each, that are added up."""
    for step in range(3):
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1)
            _loss(model, 100 * rank + 10 * step + microbatch).backward()
    return [parameter.grad.to_local() for parameter in model.parameters()]


@pytest.mark.parametrize("mixed", [False, True])
@distributed(2)
def test_numbers_are_torchs(ctx: RankContext, mixed: bool) -> None:
    dtypes: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if mixed else {}
    ours = _train(_sharded(ctx, mp_policy=MixedPrecisionPolicy(**dtypes)), ctx.rank)
    theirs = _sharded(ctx, oracle().fully_shard, mp_policy=oracle().MixedPrecisionPolicy(**dtypes))
    for mine, expected in zip(ours, _train(theirs, ctx.rank), strict=True):
        assert torch.equal(mine, expected)


@distributed(2)
def test_rank_that_lacks_an_early_gradient_reduces_the_same(ctx: RankContext) -> None:
    model, plain = _sharded(ctx), seeded(_Model)
    _loss(model, 0).backward()
    model.zero_grad()
    model.blocks[1].skips = ctx.rank == 1
    _loss(model, 0).backward()
    expected = []
    for skips in (False, True):
        plain.zero_grad()
        plain.blocks[1].skips = skips
        _loss(plain, 0).backward()
        expected.append([torch.zeros_like(p) if p.grad is None else p.grad for p in plain.parameters()])
    for (name, parameter), whole, partial in zip(model.named_parameters(), *expected, strict=True):
        mean = ((whole + partial) / 2).chunk(2)[ctx.rank]
        torch.testing.assert_close(parameter.grad.to_local(), mean, msg=name)


@distributed(2)
def test_gradients_that_come_after_the_early_ones_have_left_are_reduced_too(ctx: RankContext) -> None:
    model, plain = _sharded(ctx), seeded(_Model)
    for each in (model, plain):
        for block in each.blocks:
            block.recomputes = True
    for _ in range(2):  # the first one finds out what is early
        model.zero_grad()
        _loss(model, 0).backward()
    _loss(plain, 0).backward()
    for (name, mine), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.to_local(), expected.grad.chunk(2)[ctx.rank], msg=name)


@distributed(2)
def test_step_is_right_after_an_exception_between_the_two_launches(ctx: RankContext) -> None:
    model, plain = _sharded(ctx), seeded(_Model)
    _loss(model, 0).backward()
    model.zero_grad()
    model.blocks[1].raises = True
    with pytest.raises(InjectedError):
        _loss(model, 1).backward()
    model.blocks[1].raises = False
    model.reset_iter_state()
    assert all(parameter.grad is None for parameter in model.parameters())
    _loss(model, 2).backward()
    _loss(plain, 2).backward()
    for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), expected.grad.chunk(2)[ctx.rank])
