"""Losses on activations inside a unit, not on what it returns: gradients are those of the unsharded model."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.distributed.changes import assert_gradients, step_and_zero_all
from tests.distributed.compile_support import BACKEND, start_compiling
from tests.distributed.support import DIM, batch, seeded, shard_each
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import golden_on_ranks
from tests.harness.messages import error_of
from tests.harness.patience import assert_freed


class _Splitter(nn.Module):
    """Returns views that one node of the graph makes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, 2 * DIM) / DIM)

    def forward(self, x: Tensor) -> dict[str, Any]:
        gate, value = (x @ self.weight).chunk(2, dim=-1)
        return {"gate": gate, "values": [value]}


class _Experts(nn.Module):
    """Computes with parameters in a list, which has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(DIM, DIM) / DIM for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weights[0]) @ self.weights[1]


class _Scale(torch.autograd.Function):
    """A product that nobody sees being formed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x).sum(0)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.split = _Splitter()
        self.experts = _Experts()
        self.scale = nn.Parameter(torch.rand(DIM))
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(x))
        parts = self.split(hidden)
        mixed = torch.sigmoid(parts["gate"]) * parts["values"][0]
        y = self.experts(mixed)
        scaled = _Scale.apply(x, self.scale)
        self.kept |= {"hidden": hidden, "value": parts["values"][0], "experts": y, "scaled": scaled}
        return x + y * self.scale


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(DIM, DIM)
        # One is a unit inside of a unit.
        self.blocks = nn.ModuleList([_Block(), nn.Sequential(_Block(), nn.LayerNorm(DIM)), _Block()])
        self.exit = nn.Linear(DIM, DIM)
        self.checkpoints = False
        self.entered: list[Tensor] = []
        self.entry.register_forward_hook(lambda module, args, output: self.entered.append(output))

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.exit(x)


def _sharded(ctx: RankContext, *, allows: bool = True, **options: Any) -> Any:
    model = seeded(_Model)
    shard_each(model.blocks[0], model.blocks[1][0], *model.blocks[1:], model, mesh=ctx.mesh_1d(), **options)
    if allows:
        fsdp2.allow_inner_losses(model)
    return model


def _loss(tensor: Tensor) -> Tensor:
    return tensor.float().square().mean()


def _of(model: Any, index: int, name: str) -> Tensor:
    block = model.blocks[index]
    return _loss((block[0] if index == 1 else block).kept[name])


def _alone(index: int, name: str) -> Callable[[Any, Tensor], None]:
    def run(model: Any, x: Tensor) -> None:
        model(x)
        _of(model, index, name).backward()

    return run


def _hook_of_the_root(model: Any, x: Tensor) -> None:
    model(x)
    _loss(model.entered[-1]).backward()


def _checkpointed(model: Any, x: Tensor) -> None:
    model.checkpoints = True
    _alone(2, "hidden")(model, x)


def _checkpointed_reentrantly(model: Any, x: Tensor) -> None:
    """Only the backward inside of a backward meets the root's parameters."""
    x = x.requires_grad_()
    model(x)
    _loss(checkpoint(model.exit, model.entered[-1].detach().requires_grad_(), use_reentrant=True)).backward()


def _with_output(model: Any, x: Tensor) -> None:
    output = model(x)
    (_loss(output) + _of(model, 1, "hidden") + _of(model, 2, "scaled")).backward()


def _one_after_the_other(model: Any, x: Tensor) -> None:
    output = model(x)
    loss = _of(model, 2, "experts")
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    _loss(output).backward()


def _earlier_forward(model: Any, x: Tensor) -> None:
    model(x)
    earlier = _of(model, 1, "experts")
    (_loss(model(2 * x)) + earlier).backward()


LOSSES: dict[str, Callable[[Any, Tensor], None]] = {
    "relu of a layer": _alone(2, "hidden"),
    "second output of a node": _alone(0, "value"),
    "what a list of parameters made": _alone(2, "experts"),
    "inner unit": _alone(1, "hidden"),
    "hook of the root": _hook_of_the_root,
    "checkpointed": _checkpointed,
    "with output": _with_output,
    "one after the other": _one_after_the_other,
    "earlier forward": _earlier_forward,
}


def _assert_trains_like_unsharded(
    ctx: RankContext, model: Any, run: Callable[[Any, Tensor], None], make: Callable[[], nn.Module] = _Model
) -> None:
    references = [seeded(make) for _ in range(ctx.world_size)]
    for _ in range(2):  # the second shows what the first has left behind
        run(model, batch(seed=ctx.rank))
        for rank, reference in enumerate(references):
            run(reference, batch(seed=rank))
    assert_gradients(model, *references)


@pytest.mark.parametrize("kept", [True, False], ids=["reshards", "keeps"])
@pytest.mark.parametrize("name", list(LOSSES))
@distributed(2)
def test_gradients_are_those_of_the_unsharded_model(ctx: RankContext, name: str, kept: bool) -> None:
    _assert_trains_like_unsharded(ctx, _sharded(ctx, reshard_after_forward=kept), LOSSES[name])


@distributed(2)
def test_a_backward_inside_of_a_backward_is_seen(ctx: RankContext) -> None:
    model = _sharded(ctx, reshard_after_forward=False)  # else only shards are there
    _assert_trains_like_unsharded(ctx, model, _checkpointed_reentrantly)


@distributed(2)
def test_copies_unshard_their_own_units(ctx: RankContext) -> None:
    model = _sharded(ctx)
    copied = copy.deepcopy(model)
    fsdp2.allow_inner_losses(copied)
    _assert_trains_like_unsharded(ctx, copied, LOSSES["relu of a layer"])
    assert all(parameter.grad is None for parameter in model.parameters())


@distributed(2)
def test_mixed_precision(ctx: RankContext) -> None:
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, reference = _sharded(ctx, mp_policy=policy), seeded(_Model)
    for each in (model, reference):
        _alone(1, "hidden")(each, batch())
    found = model.blocks[1][0].up.weight.grad.full_tensor()
    assert torch.allclose(found, reference.blocks[1][0].up.weight.grad, atol=1e-3)
    assert found.abs().max() > 1e-2


@golden_on_ranks()
def test_parameter_in_a_function_of_the_units_own_is_not_read_while_it_is_freed(ctx: RankContext) -> str:
    model = _sharded(ctx)
    error = error_of(lambda: _alone(2, "scaled")(model, batch()))
    model.reset_iter_state()
    _assert_trains_like_unsharded(ctx, model, _with_output)
    return error


def _unsharded_by_hand(model: Any, x: Tensor) -> None:
    model(x)
    if isinstance(model, fsdp2.FSDPModule):
        model.blocks[2].unshard()
    _of(model, 2, "scaled").backward()


@pytest.mark.parametrize("kept", [True, False], ids=["unsharded by hand", "keeps"])
@distributed(2)
def test_parameter_that_the_unit_itself_used_is_reduced_if_it_is_there(ctx: RankContext, kept: bool) -> None:
    run = _unsharded_by_hand if kept else _alone(2, "scaled")
    _assert_trains_like_unsharded(ctx, _sharded(ctx, reshard_after_forward=kept), run)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(DIM))

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x * self.scale
        return x + self.kept


@distributed(2)
def test_parameter_that_the_root_itself_used_is_reduced_if_the_loss_reaches_nothing_else(ctx: RankContext) -> None:
    """Neither an output nor an input that needs a gradient tells of this backward."""

    def run(model: Any, x: Tensor) -> None:
        model(x)
        _loss(model.kept).backward()

    model = fsdp2.fully_shard(seeded(_Scaled), mesh=ctx.mesh_1d())
    for _ in range(2):  # the second call changes nothing
        fsdp2.allow_inner_losses(model)
    _assert_trains_like_unsharded(ctx, model, run, _Scaled)


# Without allow_inner_losses


@distributed(2)
def test_a_model_that_is_no_longer_used_is_freed(ctx: RankContext) -> None:
    model = fsdp2.fully_shard(nn.Sequential(_Experts(), nn.Linear(DIM, DIM)), mesh=ctx.mesh_1d())
    fsdp2.allow_inner_losses(model)
    model(batch()).sum().backward()
    alive = weakref.ref(model)
    del model
    assert_freed(alive)


@distributed(2)
def test_a_loss_that_has_the_units_output_too_needs_nothing(ctx: RankContext) -> None:
    def run(model: Any, x: Tensor) -> None:
        (_loss(model(x)) + _of(model, 1, "hidden") + _of(model, 2, "value")).backward()

    _assert_trains_like_unsharded(ctx, _sharded(ctx, allows=False), run)


@pytest.mark.parametrize("kept", [False, True])
@golden_on_ranks()
def test_what_nobody_unshards_or_reduces_is_an_error(ctx: RankContext, kept: bool) -> str:
    """Freed parameters are not read, which is torch's own error: debugging.md explains it. And no gradient is lost in
    silence."""
    model = _sharded(ctx, allows=False, reshard_after_forward=not kept)
    run = _alone(2, "hidden") if not kept else _hook_of_the_root
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    error = error_of(lambda: [(run(model, batch()), optimizer.step()) for _ in range(2)])
    model.reset_iter_state()
    model.zero_grad()
    _assert_trains_like_unsharded(ctx, model, lambda model, x: _loss(model(x)).backward())
    return error


@distributed(2)
def test_a_lost_gradient_is_an_error_too_after_kept_ones_were_dropped(ctx: RankContext) -> None:
    model = _sharded(ctx, allows=False, reshard_after_forward=False)
    with fsdp2.no_sync(model):
        _loss(model(batch())).backward()
    model.reset_iter_state()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    error = error_of(lambda: [(_hook_of_the_root(model, batch()), optimizer.step()) for _ in range(2)])
    assert "had a gradient that was not reduced when the optimizer stepped" in error.replace("\n", " ")


class _Forces(nn.Module):
    """Takes gradients in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.requires_grad_()
        (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return force * self.energy(x)


@distributed(2)
def test_forward_that_takes_gradients(ctx: RankContext) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(nn.Linear(DIM, DIM), _Forces())

    model = seeded(make)
    shard_each(model[1], model, mesh=ctx.mesh_1d())
    _assert_trains_like_unsharded(ctx, model, lambda model, x: _loss(model(x)).backward(), make)


@distributed(2)
def test_backward_of_gradients_that_were_taken_behind_the_forward(ctx: RankContext) -> None:
    """A penalty on the gradient of the input. The second backward reads parameters, so the first must not free them."""

    def model() -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(3)))

    sharded, reference = seeded(model), seeded(model)
    shard_each(*sharded, sharded, mesh=ctx.mesh_1d())
    sharded.set_reshard_after_backward(False)
    shards = list(sharded.parameters())
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in (shards, reference.parameters())]
    for seed in range(3):
        for each in (sharded, reference):
            x = batch(seed).requires_grad_()
            output = each(x)
            (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            (gradient.square().sum() + output.mean() + each(x).square().mean()).backward()
        assert_gradients(shards, reference)
        step_and_zero_all(optimizers)


@pytest.mark.ci
@distributed(2)
def test_compiled_block(ctx: RankContext) -> None:
    """All that a graph returns comes out of one node."""
    start_compiling()
    model, reference = _sharded(ctx), seeded(_Model)
    model.blocks[2].compile(backend=BACKEND, fullgraph=True)
    for each in (model, reference):
        _alone(2, "hidden")(each, batch())
    for name in ("blocks.2.up.weight", "blocks.0.scale", "entry.weight"):  # the graph makes zeros for parameters unused
        found, expected = model.get_parameter(name).grad, reference.get_parameter(name).grad
        assert torch.allclose(found.full_tensor(), expected, atol=1e-6), name
