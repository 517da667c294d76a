"""Weights tied across units: they move to the nearest unit around all their places, and train as one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import ScheduleError, fully_shard
from fsdp2.tools import trace
from tests.distributed.support import Stack, batch, same_on_all_ranks, seeded, step
from tests.harness.distributed import RankContext, distributed
from tests.harness.messages import error_of


def _tied(places: tuple[str, ...]) -> Stack:
    """One weight in the linear layers ``places``."""
    model = seeded(Stack)
    for name in places:
        model.get_submodule(name).weight = model.get_submodule(places[0]).weight
    return model


PLACES = {
    "block and root": ("blocks.1.linear", "exit"),
    "two blocks": ("blocks.0.linear", "blocks.2.linear"),
    "all": ("entry", "blocks.0.linear", "blocks.1.linear", "blocks.2.linear", "exit"),
}


@pytest.mark.parametrize("case", PLACES)
@pytest.mark.parametrize("replicas", [1, 2])
@distributed(2)
def test_they_train_as_in_the_unsharded_model(ctx: RankContext, case: str, replicas: int) -> None:
    model, reference = _tied(PLACES[case]), _tied(PLACES[case])
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=ctx.mesh_2d(replicas, 2 // replicas))
    bound = [model.get_submodule(name).weight for name in PLACES[case]]
    assert isinstance(bound[0], DTensor)
    assert all(weight is bound[0] for weight in bound)
    names = [name for name, _ in model.named_parameters()]
    assert names == [name for name, _ in reference.named_parameters()]
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, reference))
    for seed in range(3):
        torch.testing.assert_close(step(model, seed), step(reference, seed))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).full_tensor(), parameter)


def _tie(model: Stack, places: tuple[str, ...]) -> None:
    for name in places:
        model.get_submodule(name).weight = model.get_submodule(places[0]).weight


@pytest.mark.parametrize("places", [("entry", "exit"), ("entry", "blocks.2.linear")], ids=["one unit", "two units"])
@pytest.mark.parametrize("replicas", [1, 2])
@distributed(2)
def test_sharded_parameters_that_are_tied_before_the_first_forward_train_as_one(
    ctx: RankContext, places: tuple[str, ...], replicas: int
) -> None:
    """As transformers ties them after loading. Of two units, both stay unsharded between forward and backward."""
    model, reference = seeded(Stack), _tied(places)
    for unit in (*model.blocks, model):
        keeps = unit is model.blocks[2] and places[1] == "blocks.2.linear"
        fully_shard(unit, mesh=ctx.mesh_2d(replicas, 2 // replicas), reshard_after_forward=False if keeps else None)
    _tie(model, places)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, reference))
    for seed in range(6):
        torch.testing.assert_close(step(model, seed), step(reference, seed))
        if seed % 2:  # two backwards for each step
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    assert model.get_submodule(places[1]).weight is model.entry.weight
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).full_tensor(), parameter)


@distributed(2)
def test_ties_of_sharded_parameters_that_cannot_be_kept_are_refused(ctx: RankContext) -> None:
    def sharded() -> Stack:
        model = seeded(Stack)
        for unit in (*model.blocks, model):
            fully_shard(unit, mesh=ctx.mesh_1d())
        return model

    across = sharded()
    _tie(across, ("blocks.0.linear", "blocks.2.linear"))
    with pytest.raises(
        ScheduleError, match=r"'blocks\.0\.linear\.weight' and 'blocks\.2\.linear\.weight' are in two units"
    ):
        step(across)
    late = sharded()
    step(late)
    _tie(late, ("entry", "exit"))
    with pytest.raises(ScheduleError, match=r"'entry\.weight' and 'exit\.weight' were tied after the first use"):
        step(late)


@distributed(2)
def test_the_nearest_unit_around_them_takes_them(ctx: RankContext) -> None:
    model: Any = nn.Sequential(_tied(PLACES["two blocks"]), seeded(Stack))
    for unit in (*model[0].blocks, model[0], *model[1].blocks, model[1], model):
        fully_shard(unit, mesh=ctx.mesh_1d())
    model[0].unshard()
    assert not isinstance(model[0].blocks[0].linear.weight, DTensor)
    assert isinstance(model[0].blocks[0].linear.bias, DTensor)
    model[0].reshard()
    with trace.record(model) as recorded:
        model(batch()).sum().backward()
    assert "reduce 0" in recorded.actions()


def _refusals(ctx: RankContext) -> str:
    mesh, found = ctx.mesh_1d(), []
    apart = _tied(PLACES["two blocks"])
    for block in apart.blocks:
        fully_shard(block, mesh=mesh)
    found.append(error_of(lambda: apart.blocks[2](batch())))
    written = _tied(PLACES["block and root"])
    fully_shard(written.blocks[1], mesh=mesh)
    with torch.no_grad():
        written.blocks[1].linear.weight.zero_()
    found.append(error_of(lambda: fully_shard(written, mesh=mesh)))
    assert isinstance(written.blocks[1].linear.weight, DTensor)
    found.append(error_of(lambda: fully_shard(written, mesh=mesh, tied_weights="move")))  # type: ignore[call-overload]
    return "\n".join(found)


def test_what_nobody_can_take_is_refused() -> None:
    assert_expected_inline(
        same_on_all_ranks(_refusals),
        """\
ScheduleError: parameter 'weight' of a Linear in unit '(root)' is tied to a parameter of another
unit, but fully_shard was not called on a module that contains both. Call fully_shard on the
outermost module, too, or list the parameter in ignored_params.
ValueError: fully_shard: parameter 'exit.weight' is tied to 'linear.weight' of a unit that is
already sharded. This call would break the tie. The parameter moves to the new unit only with
tied_weights=MOVE, and only if the old unit has not run and none of its parameters was written or
replaced. Otherwise, call fully_shard([a, b]) on the modules that share the parameter, to make one
unit.
TypeError: fully_shard: tied_weights must be an fsdp2.TiedWeights, not builtins.str.""",
    )


class _Final(Stack):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise TypeError("this class is final")


@distributed(2)
def test_a_weight_stays_with_its_unit_if_the_call_that_would_move_it_is_refused(ctx: RankContext) -> None:
    model = seeded(_Final)
    model.exit.weight = model.blocks[1].linear.weight
    block = fully_shard(model.blocks[1], mesh=ctx.mesh_1d())
    with pytest.raises(TypeError, match="this class is final"):
        fully_shard(model, mesh=ctx.mesh_1d())
    block(batch()).sum().backward()
    assert isinstance(block.linear.weight.grad, DTensor)
