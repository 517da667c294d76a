"""Plain training, and which parameters receive a gradient: frozen, unused, and others in each step."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tests.harness.comms import direct_from
from tests.harness.compare import Cases, compare, each_compared, trains_alike
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Buffers, ParityModel, SharedModules, Transformer, Uneven, frozen
from tests.harness.training import BY_TURNS, Case, Step, dtensor_adamw, one_backward, sharded


class Float64(MLP):
    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return (super().batch(generator)[0].double(),)


@each_compared(2, 4)
def test_trains_as_torchs() -> Cases:
    three_deep = sharded(units=lambda m: [*(u for b in m.blocks for u in (b.mlp, b.attention, b)), m])
    cast_later = sharded(then=lambda model: model.double())
    of_float64 = Case(lambda: Float64().double(), reduce_dtype=torch.float64)
    return {
        "MLP": Case(MLP, optimizer=dtensor_adamw),
        "transformer": Case(Transformer, num_steps=4),
        "shared modules and parameters": Case(SharedModules),
        "dims uneven or smaller than the world": Case(Uneven, gather_full=True),
        "units three deep": Case(Transformer, three_deep),
        "buffers, and int and bool inputs": Case(Buffers),
        "float64": (of_float64, Case(Float64, cast_later, reduce_dtype=torch.float64, unsharded=None)),
    }


@distributed(2, 4)
def test_uneven_parameters_train_when_all_that_can_travels_direct(ctx: RankContext) -> None:
    with direct_from(0):
        compare(Case(Uneven, gather_full=True), ctx.mesh_1d())


@trains_alike(2, 4, model=partial(Transformer, tied=True))
def test_tied_embedding_and_output_in_one_group_stay_tied(step: Step, model: Transformer) -> list[Tensor]:
    losses = one_backward(step, model)
    step.note("tied", model.output.weight is model.embedding.weight)
    step.note("names", [name for name, _ in model.named_parameters(remove_duplicate=False)])
    return losses


@trains_alike(2, 4, model=MLP)
def test_inputs_that_require_grad_receive_their_gradient(step: Step, model: ParityModel) -> list[Tensor]:
    batch = step.batch(model)
    batch[0].requires_grad_()
    loss = model.loss(model(*batch), batch)
    loss.backward()
    assert batch[0].grad is not None
    return [loss, batch[0].grad]


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
        **{name: make() for name, make in BY_TURNS.items()},
        "units whose output is not in the loss": Case(_model_that_keeps_an_output, step=_loss_of_an_inner_output),
    }


@trains_alike(2, 4, model=MLP, unsharded=None)
def test_a_step_in_which_nothing_runs_backward_changes_nothing(step: Step, model: MLP) -> list[Tensor]:
    loss = step.loss(model)
    if step.index != 1:
        loss.backward()
    return [loss]
