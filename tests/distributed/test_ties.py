"""Weights tied across units: they move to the nearest unit around all their places, and train as one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import MixedPrecisionPolicy, ScheduleError, allow_inner_losses, fully_shard
from fsdp2.core.runtime.unit import units_under
from fsdp2.report import trace
from tests.distributed.changes import assert_gradients, step_and_zero_all
from tests.distributed.support import BLOCK_NBYTES, DIM, Stack, batch, seeded, shard, shard_each, sharded, step
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import golden_on_ranks
from tests.harness.messages import error_of
from tests.harness.selection import long


def _tied(places: tuple[str, ...]) -> Stack:
    """One weight in the linear layers ``places``."""
    model = seeded(Stack)
    _tie(model, places)
    return model


def _tie(model: Stack, places: tuple[str, ...]) -> None:
    for name in places:
        model.get_submodule(name).weight = model.get_submodule(places[0]).weight


PLACES = {
    "one unit": ("entry", "exit"),
    "root and block": ("entry", "blocks.2.linear"),
    "two blocks": ("blocks.0.linear", "blocks.2.linear"),
    "all": ("entry", "blocks.0.linear", "blocks.1.linear", "blocks.2.linear", "exit"),
}


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
@distributed(2)
def test_a_tied_parameter_has_one_of_its_names_in_the_model(ctx: RankContext, places: tuple[str, ...]) -> None:
    model = shard(ctx, _tied(places))
    step(model)
    names = {param.full_name for _, unit in units_under(model) for group in unit.groups for param in group.params}
    assert len(names & {f"{place}.weight" for place in places}) == 1
    assert names <= {name for name, _ in model.named_parameters(remove_duplicate=False)}


def _embedding_and_head() -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(8, DIM), nn.Linear(DIM, 8, bias=False))
    model[1].weight = model[0].weight
    return model


@distributed(2)
def test_dtensors_of_tensor_parallelism_move_as_well(ctx: RankContext) -> None:
    mesh = ctx.mesh(dp=1, tp=2)
    model, reference = seeded(_embedding_and_head), seeded(_embedding_and_head)
    rows, columns = RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh["tp"], {"0": rows, "1": columns})
    embedding, head = model
    head.weight = embedding.weight
    shard_each(embedding, model, mesh=mesh["dp"])
    for each in (model, reference):
        each(torch.arange(8)).square().mean().backward()
    assert head.weight is embedding.weight
    assert isinstance(head.weight.grad, DTensor)
    torch.testing.assert_close(head.weight.grad.full_tensor(), reference[1].weight.grad)
    with pytest.raises(ValueError, match="already sharded"):
        fully_shard(head, mesh=mesh["dp"])


@pytest.mark.parametrize("case", [*list(PLACES)[:2], *long(*list(PLACES)[2:])])
@pytest.mark.parametrize(
    ("replicas", "kept"),
    [(1, None), *(pytest.param(*each, marks=pytest.mark.long) for each in [(1, False), (2, True)])],
)
@distributed(2)
def test_sharded_parameters_that_are_tied_before_the_first_forward_train_as_if_tied_before(
    ctx: RankContext, case: str, replicas: int, kept: bool | None
) -> None:
    """As transformers ties them after loading. Both train as in the unsharded model."""
    late, early, reference = seeded(Stack), _tied(PLACES[case]), _tied(PLACES[case])
    for model in (late, early):
        shard(ctx, model, mesh=ctx.mesh_2d(replicas, 2 // replicas), reshard_after_forward=kept)
    _tie(late, PLACES[case])
    assert list(early.state_dict()) == list(reference.state_dict())
    assert len({early.get_submodule(place).weight for place in PLACES[case]}) == 1
    assert len(list(early.parameters())) == len(list(reference.parameters()))
    models = (late, early, reference)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for seed in range(6):
        losses = [step(model, seed) for model in models]
        assert torch.equal(losses[0], losses[1])
        torch.testing.assert_close(losses[0], losses[2])
        if seed % 2:  # two backwards for each step
            step_and_zero_all(optimizers)
    weights = [late.get_submodule(place).weight for place in PLACES[case]]
    assert all(weight is weights[0] for weight in weights)
    assert late.state_dict().keys() == reference.state_dict().keys()
    for name, parameter in reference.named_parameters():
        found = late.get_parameter(name).full_tensor()
        assert torch.equal(found, early.get_parameter(name).full_tensor())
        torch.testing.assert_close(found, parameter)


@distributed(2)
def test_one_unit_manages_what_was_tied_across_units(ctx: RankContext) -> None:
    """So no unit copies its shard again, the root gathers it, and the inner module saves the shard."""
    model = sharded(ctx, reshard_after_forward=False)
    _tie(model, PLACES["root and block"])
    step(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = model.entry.weight.to_local().data_ptr()
    with trace.record(model) as recorded:
        step(model)
        optimizer.step()
        step(model)
    assert model.entry.weight.to_local().data_ptr() == local
    assert f"wait blocks.2  {BLOCK_NBYTES - 4 * DIM * DIM} bytes" in str(recorded)
    model.unshard()
    assert not isinstance(model.blocks[2].linear.weight, DTensor)
    assert isinstance(model.blocks[2].state_dict()["linear.weight"], DTensor)
    made = copy.deepcopy(model)
    assert made.entry.weight is made.blocks[2].linear.weight is not model.entry.weight
    assert torch.equal(step(made), step(model))


class _WithPair(nn.Module):
    """``pair`` has a layer of its own before the two."""

    uses_pair = False

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(DIM, DIM)
        self.pair = nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        return self.pair(x) if self.uses_pair else x  # type: ignore[no-any-return]


@distributed(2)
def test_units_that_no_forward_has_used_may_be_tied_later(ctx: RankContext) -> None:
    """One of them is left without parameters, and the ranks that wait for each other forget it."""
    model, reference = seeded(_WithPair), seeded(_WithPair)
    shard_each(*model.pair[1:], model.pair, model, mesh=ctx.mesh_1d())
    for each in (model, reference):
        step(each)
        each.pair[2].weight = each.pair[1].weight
    model.load_state_dict(model.state_dict())  # the root looks for ties
    for seed in range(2):
        for each in (model, reference):
            each.uses_pair = True
            each.zero_grad()
            step(each, seed)
        assert_gradients(model, reference)


@distributed(2)
def test_a_loss_inside_a_block_finds_the_weight_that_the_root_has_taken(ctx: RankContext) -> None:
    kept: list[Tensor] = []
    model, reference = sharded(ctx, reshard_after_forward=True), seeded(Stack)
    for each in (model, reference):
        _tie(each, PLACES["two blocks"])
        each(batch())  # moves the weight
    allow_inner_losses(model)
    for each in (model, reference):
        each.blocks[1].register_forward_hook(lambda *args: kept.append(args[2]))
        each(batch())
    for output in kept:
        output.sum().backward()
    gradients = [each.blocks[0].linear.weight.grad for each in (model, reference)]
    torch.testing.assert_close(gradients[0].full_tensor(), gradients[1])


@distributed(2)
def test_ties_of_sharded_parameters_that_cannot_move_are_refused(ctx: RankContext) -> None:
    def made(**options: Any) -> Stack:
        model = seeded(Stack)
        for unit in (*model.blocks, model):
            fully_shard(unit, mesh=ctx.mesh_1d(), **(options if unit is model.blocks[2] else {}))
        return model

    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    across: Any = made(mp_policy=policy)
    _tie(across, PLACES["two blocks"])
    before = [parameter.to_local().data_ptr() for parameter in across.parameters()]
    places = "'blocks.0.linear.weight' and 'blocks.2.linear.weight'"
    with pytest.raises(ScheduleError, match=f"{places} are in two units"):
        step(across)
    assert [parameter.to_local().data_ptr() for parameter in across.parameters()] == before
    late = made()
    step(late)
    _tie(late, PLACES["one unit"])
    with pytest.raises(ScheduleError, match=r"'entry\.weight' and 'exit\.weight' were tied after the first use"):
        step(late)
    late = made()
    step(late)
    late.reshard()
    _tie(late, ("blocks.0.linear", "blocks.1.linear"))
    late.load_state_dict(late.state_dict())  # the root looks for ties again
    with pytest.raises(ScheduleError, match="one of the units was used before"):
        step(late)


@distributed(2)
def test_the_nearest_unit_around_them_takes_them(ctx: RankContext) -> None:
    model: Any = nn.Sequential(_tied(PLACES["two blocks"]), seeded(Stack))
    shard_each(*model[0].blocks, model[0], *model[1].blocks, model[1], model, mesh=ctx.mesh_1d())
    model[0].unshard()
    assert not isinstance(model[0].blocks[0].linear.weight, DTensor)
    assert isinstance(model[0].blocks[0].linear.bias, DTensor)
    model[0].reshard()
    with trace.record(model) as recorded:
        model(batch()).sum().backward()
    assert "reduce 0" in recorded.actions()


@golden_on_ranks()
def test_what_nobody_can_take_is_refused(ctx: RankContext) -> str:
    mesh, found = ctx.mesh_1d(), []
    apart = _tied(PLACES["two blocks"])
    shard_each(*apart.blocks, mesh=mesh)
    found.append(error_of(lambda: apart.blocks[2](batch())))
    written = _tied(("blocks.1.linear", "exit"))
    fully_shard(written.blocks[1], mesh=mesh)
    with torch.no_grad():
        written.blocks[1].linear.weight.zero_()
    found.append(error_of(lambda: fully_shard(written, mesh=mesh)))
    assert isinstance(written.blocks[1].linear.weight, DTensor)
    return "\n".join(found)


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
