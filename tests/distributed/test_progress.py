"""The bar of a model's first forward."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.support import InjectedError, batch, sharded, step
from tests.harness.distributed import RankContext, distributed
from tests.harness.terminal import on_a_terminal


@distributed(2)
def test_the_first_forward_shows_its_units_on_the_first_rank(ctx: RankContext) -> None:
    model = sharded(ctx)
    shown = on_a_terminal(lambda: step(model))
    assert ("first forward: 100%" in shown and "4/4" in shown) is (ctx.rank == 0)
    assert on_a_terminal(lambda: step(model)) == ""


@distributed(2)
def test_the_bar_of_a_forward_that_raises_ends_with_the_next_one(ctx: RankContext) -> None:
    model = sharded(ctx)

    def fail(*_: object) -> None:
        raise InjectedError

    def run() -> None:
        handle = model.blocks[1].linear.register_forward_hook(fail)
        with pytest.raises(InjectedError):
            model(batch())
        handle.remove()
        model(batch())

    shown = on_a_terminal(run)
    assert ("first forward" in shown) is (ctx.rank == 0)
    assert ("4/4" in shown) is False
    assert on_a_terminal(lambda: step(model)) == ""


@distributed(2)
def test_units_that_a_forward_leaves_out_do_not_keep_the_bar(ctx: RankContext) -> None:
    model = sharded(ctx)
    model.blocks[1].forward = lambda x: x
    assert on_a_terminal(lambda: step(model)).endswith("\n" if ctx.rank == 0 else "")
    with torch.no_grad():
        assert on_a_terminal(lambda: model(batch())) == ""
