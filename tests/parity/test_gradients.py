"""Which parameters receive a gradient: frozen ones, unused ones, and those that change between steps."""

from __future__ import annotations

import pytest
from torch import Tensor

from tests.harness.compare import compare, trains_alike
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Branches, PartlyUsed, Transformer, freeze
from tests.harness.training import Case, Step, frozen_by_turns

FROZEN = {
    "some_of_each_group": ("blocks.0.up.bias", "blocks.1.down.weight", "entry.weight", "exit.bias"),
    "a_whole_group": ("blocks.1",),
    "the_first_groups": ("entry", "blocks.0", "blocks.1"),
    "the_root_group": ("entry", "exit"),
    "the_last_groups": ("blocks.2", "exit"),
}


@pytest.mark.parametrize("prefixes", FROZEN.values(), ids=FROZEN.keys())
@distributed(2, 4)
def test_frozen_parameters_get_no_gradient(ctx: RankContext, prefixes: tuple[str, ...]) -> None:
    def frozen_mlp() -> MLP:
        model = MLP()
        freeze(model, *prefixes)
        return model

    compare(Case(frozen_mlp), ctx.mesh_1d())


@distributed(4)
def test_frozen_parameters_on_hsdp(ctx: RankContext) -> None:
    def frozen_mlp() -> MLP:
        model = MLP()
        freeze(model, *FROZEN["some_of_each_group"], "blocks.2")
        return model

    compare(Case(frozen_mlp), ctx.mesh_2d(2, 2))


@distributed(2, 4)
def test_adapters_train_on_a_frozen_transformer(ctx: RankContext) -> None:
    def model() -> Transformer:
        model = Transformer()
        freeze(model, "embedding", "blocks.0.attention.", "blocks.0.mlp.", "blocks.1.attention.", "output")
        return model

    compare(Case(model), ctx.mesh_1d())


@distributed(2, 4)
def test_parameters_frozen_and_thawed_between_steps(ctx: RankContext) -> None:
    compare(Case(MLP, step=frozen_by_turns, num_steps=4), ctx.mesh_1d())


@trains_alike(2, 4, model=Branches, num_steps=4)
def test_units_that_a_step_does_not_run_get_no_gradient(step: Step, model: Branches) -> list[Tensor]:
    active = [(0, 1, 2), (0, 2), (1,), (2, 0)][step.index]
    loss = step.loss(model, active=active)
    loss.backward()
    return [loss]


@trains_alike(2, 4, model=PartlyUsed, num_steps=4)
def test_parameters_unused_within_a_group_get_no_gradient(step: Step, model: PartlyUsed) -> list[Tensor]:
    loss = step.loss(model, use_side=step.index % 2 == 1)
    loss.backward()
    return [loss]


@trains_alike(4, model=PartlyUsed, mesh=lambda ctx: ctx.mesh_2d(2, 2), num_steps=4)
def test_parameters_unused_within_a_group_on_hsdp(step: Step, model: PartlyUsed) -> list[Tensor]:
    loss = step.loss(model, use_side=step.index % 2 == 1)
    loss.backward()
    return [loss]


@distributed(2, 4)
def test_units_whose_output_is_not_in_the_loss_get_no_gradient(ctx: RankContext) -> None:
    def step(step: Step, model: MLP) -> list[Tensor]:
        (x,) = step.batch(model)
        used = model.blocks[0]
        output = model(x)
        loss = model.loss(used.output if step.index == 1 else output, (x,))
        loss.backward()
        used.output = None
        return [loss]

    def model() -> MLP:
        model = MLP()
        model.blocks[0].register_forward_hook(lambda module, args, output: setattr(module, "output", output))
        return model

    compare(Case(model, step=step), ctx.mesh_1d())


@trains_alike(2, 4, model=MLP, unsharded=None)
def test_a_step_in_which_nothing_runs_backward_changes_nothing(step: Step, model: MLP) -> list[Tensor]:
    loss = step.loss(model)
    if step.index != 1:
        loss.backward()
    return [loss]
