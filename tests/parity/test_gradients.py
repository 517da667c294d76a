"""Which parameters receive a gradient: frozen ones, unused ones, and those that change between steps."""

from __future__ import annotations

from torch import Tensor

from tests.harness.compare import Cases, each_compared, hsdp, trains_alike
from tests.harness.models import MLP, Branches, PartlyUsed, Transformer, frozen
from tests.harness.training import Case, Step, frozen_by_turns, other_parameters_by_turns, other_units_by_turns

FROZEN = {
    "some of each group": ("blocks.0.up.bias", "blocks.1.down.weight", "entry.weight", "exit.bias"),
    "a whole group": ("blocks.1",),
    "the first groups": ("entry", "blocks.0", "blocks.1"),
    "the root group": ("entry", "exit"),
    "the last groups": ("blocks.2", "exit"),
}


def _model_that_keeps_an_output() -> MLP:
    model = MLP()
    model.blocks[0].register_forward_hook(lambda module, args, output: setattr(module, "output", output))
    return model


def _loss_of_an_inner_output(step: Step, model: MLP) -> list[Tensor]:
    (x,) = step.batch(model)
    used = model.blocks[0]
    output = model(x)
    loss = model.loss(used.output if step.index == 1 else output, (x,))
    loss.backward()
    used.output = None
    return [loss]


@each_compared(2, 4, ci=[*FROZEN][1:])
def test_frozen_and_unused_parameters_get_no_gradient() -> Cases:
    adapters = ("embedding", "blocks.0.attention.", "blocks.0.mlp.", "blocks.1.attention.", "output")
    return {
        **{name: Case(frozen(MLP, *prefixes)) for name, prefixes in FROZEN.items()},
        "adapters on a frozen transformer": Case(frozen(Transformer, *adapters)),
        "frozen and thawed between steps": Case(MLP, step=frozen_by_turns, num_steps=4),
        "units that a step does not run": Case(Branches, step=other_units_by_turns, num_steps=4),
        "unused within a group": Case(PartlyUsed, step=other_parameters_by_turns, num_steps=4),
        "units whose output is not in the loss": Case(_model_that_keeps_an_output, step=_loss_of_an_inner_output),
    }


@each_compared(4, mesh=hsdp)
def test_on_hsdp() -> Cases:
    return {
        "frozen": Case(frozen(MLP, *FROZEN["some of each group"], "blocks.2")),
        "unused within a group": Case(PartlyUsed, step=other_parameters_by_turns, num_steps=4),
    }


@trains_alike(2, 4, model=MLP, unsharded=None)
def test_a_step_in_which_nothing_runs_backward_changes_nothing(step: Step, model: MLP) -> list[Tensor]:
    loss = step.loss(model)
    if step.index != 1:
        loss.backward()
    return [loss]
