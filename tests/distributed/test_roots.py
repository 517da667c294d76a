"""Several roots: one takes units over from another, or computes inside another one's backward. Values are those of the
plain model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import CPUOffloadPolicy
from tests.distributed.changes import alike, assert_gradients, double, reshard_all
from tests.distributed.support import InjectedError, fail_now, seeded, shard_each
from tests.harness.distributed import RankContext, distributed
from tests.harness.messages import error_of
from tests.harness.selection import long

DIM = 8


def _nested() -> nn.Sequential:
    """Three modules inside one another, each with parameters of its own."""
    inner = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())
    middle = nn.Sequential(inner, nn.Linear(DIM, DIM), nn.Tanh())
    return nn.Sequential(middle, nn.Linear(DIM, DIM))


def _levels(model: Any) -> list[Any]:
    """From the inside out."""
    return [model[0][0], model[0], model]


def _x(seed: int = 0) -> Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(seed))


def _backward(module: nn.Module, seed: int) -> None:
    module(_x(seed)).square().mean().backward()


# How the backwards before the last one leave their gradients: what is set before, and what after them.
LEAVES: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "in flight": (lambda root: root.set_is_last_backward(False), lambda root: root.set_is_last_backward(True)),
    "on this rank": (
        lambda root: root.set_requires_gradient_sync(False),
        lambda root: root.set_requires_gradient_sync(True),
    ),
    "partial": (lambda root: root.set_requires_all_reduce(False), lambda root: root.set_requires_all_reduce(True)),
    "landed": (lambda root: None, lambda root: None),
}
OPTIONS: dict[str, Callable[[RankContext], dict[str, Any]]] = {
    "": lambda ctx: {"mesh": ctx.mesh_1d()},
    "HSDP": lambda ctx: {"mesh": ctx.mesh_2d(2, 1)},
    "offload": lambda ctx: {"mesh": ctx.mesh_1d(), "offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "kept": lambda ctx: {"mesh": ctx.mesh_1d(), "reshard_after_forward": False},
}


@pytest.mark.every_case
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("leaves", LEAVES)
@distributed(2)
def test_roots_in_every_order_share_a_step(ctx: RankContext, leaves: str, options: str) -> None:
    """Two backwards of the levels in each order, on new models. A backward of the whole model ends the step."""
    before, after = LEAVES[leaves]
    for order in itertools.product(range(3), repeat=2):
        model, plain = seeded(_nested), seeded(_nested)
        shard_each(*_levels(model), **OPTIONS[options](ctx))
        for seed, level in enumerate(order):
            root = _levels(model)[level]
            before(root)
            _backward(root, seed)
            after(root)
            _backward(_levels(plain)[level], seed)
        for each in (model, plain):
            _backward(each, 9)
        assert_gradients(model, plain)


@pytest.mark.parametrize("differ", [False, True])
@distributed(2)
def test_gradients_in_flight_land_where_ranks_differ_and_a_root_takes_over(ctx: RankContext, differ: bool) -> None:
    """Only rank 0 runs a part of the inner root. With ``differ``, it is the other rank in the second backward."""

    class Either(nn.Sequential):
        def forward(self, x: Tensor, chosen: int) -> Tensor:  # type: ignore[override]
            return self[chosen](x)

    class Outer(nn.Sequential):
        def forward(self, x: Tensor, chosen: int) -> Tensor:  # type: ignore[override]
            return self[1](self[0](x, chosen))

    def make() -> Outer:
        return Outer(Either(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)), nn.Linear(DIM, DIM))

    model, plains = seeded(make), [seeded(make) for _ in range(2)]
    either = model[0]
    shard_each(*either, either, model, mesh=ctx.mesh_1d())
    model.set_ranks_may_differ(True)
    either.set_is_last_backward(False)
    either(_x(), ctx.rank).square().mean().backward()
    either.set_is_last_backward(True)
    model(_x(1), ctx.rank ^ differ).square().mean().backward()
    for rank, plain in enumerate(plains):
        plain[0](_x(), rank).square().mean().backward()
        plain(_x(1), rank ^ differ).square().mean().backward()
    assert_gradients(model, *plains)


@distributed(2)
def test_a_root_that_takes_over_in_a_backward_is_refused(ctx: RankContext) -> None:
    """And nothing has changed: the backward goes on, and the root takes over afterwards."""
    model, plain = seeded(_nested), seeded(_nested)
    shard_each(*_levels(model), mesh=ctx.mesh_1d())
    errors = []
    output = model[0](_x())
    output.register_hook(lambda _: errors.append(error_of(lambda: _backward(model, 1))))
    output.square().mean().backward()
    _backward(plain[0], 0)
    assert "ScheduleError" in errors[0]
    assert "a backward of" in errors[0]
    for each in (model, plain):
        _backward(each, 1)
    assert_gradients(model, plain)


# Another model inside a backward


def _write(model: Any) -> None:
    reshard_all(model)  # a write into what is unsharded would be refused
    double(model.parameters())


def _step(model: Any) -> None:
    _backward(model, 3)
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def _load(model: Any) -> None:
    model.load_state_dict({name: value + 0.5 for name, value in model.state_dict().items()})


def _replace(model: Any) -> None:
    reshard_all(model)
    weight = model[1].weight.detach()
    changed = alike(weight, weight.full_tensor() + 0.5) if isinstance(weight, DTensor) else nn.Parameter(weight + 0.5)
    model[1].weight = changed


CHANGES = {"written": _write, "stepped": _step, "loaded": _load, "replaced": _replace}


@pytest.mark.parametrize("reshards", [True, *long(False)])
@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@distributed(2)
def test_a_model_inside_the_backward_of_another_computes_with_current_values(
    ctx: RankContext, change: str, records: bool, reshards: bool
) -> None:
    """It is a teacher, of which only a hook takes outputs, or gradients of its inputs."""
    found: list[list[Tensor]] = []
    for is_sharded in (True, False):
        student, teacher = seeded(_nested), seeded(_nested, 1)
        if is_sharded:
            for each in (student, teacher):
                shard_each(*_levels(each), mesh=ctx.mesh_1d(), reshard_after_forward=reshards)
        seen: list[Tensor] = []
        device = next(teacher.parameters()).device

        def ask(_: Tensor, teacher: Any = teacher, seen: list[Tensor] = seen, device: torch.device = device) -> None:
            with torch.set_grad_enabled(records):
                x = _x(5).to(device).requires_grad_()
                output = teacher(x)
                found = torch.autograd.grad(output.square().sum(), x)[0] if records else output.detach()
                seen.append(found.cpu().clone())

        for _ in range(3):
            output = student(_x())
            output.register_hook(ask)
            output.sum().backward()
            teacher.zero_grad()
            CHANGES[change](teacher)
            teacher.zero_grad()
        found.append(seen)
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)


# Units that leave


@distributed(2)
def test_gradients_of_a_unit_that_moved_stay_when_its_old_root_is_reset(ctx: RankContext) -> None:
    """It moves with gradients that are kept; then the backward of its old root fails, and starts again."""

    def run(is_sharded: bool) -> tuple[Any, Any]:
        old, new = seeded(_nested), seeded(_nested, 1)
        child = old[0]
        if is_sharded:
            for each in (old, new):
                shard_each(*_levels(each), mesh=ctx.mesh_1d())
            child.set_requires_gradient_sync(False)
        _backward(old, 0)
        for each in (old[1], new) if not is_sharded else (old, new):
            each.zero_grad()
        new[0] = child
        del old[0]
        old.insert(0, nn.Identity())
        _backward(new, 1)
        if is_sharded:
            old.reset_iter_state()
            child.set_requires_gradient_sync(True)
        _backward(new, 2)
        return new, old

    model, _ = run(True)
    plain, _ = run(False)
    assert_gradients(model, plain)


@pytest.mark.parametrize("new_ends_first", [False, *long(True)])
@distributed(2)
def test_a_unit_of_two_roots_is_reduced_once_where_unused_parameters_are_filled(
    ctx: RankContext, new_ends_first: bool
) -> None:
    """It moves between the forward of its old root and the backward. Until its next forward, the old one has no unit
    there whose gradients it could fill with zeros."""
    gradients = []
    for is_sharded in (True, False):
        old, new = seeded(_nested), seeded(_nested, 1)
        new[0] = old[0]
        if is_sharded:
            shard_each(*_levels(old), new, mesh=ctx.mesh_1d())
            for each in (old, new):
                each.set_reduce_scatter_unused_params(True)
        for seed in range(2):
            xs = [_x(seed + at).requires_grad_() for at in range(2)]  # so units are reduced before the backward ends
            losses = [each(x).square().mean() for each, x in zip((old, new), xs, strict=True)]
            for loss in reversed(losses) if new_ends_first else losses:
                loss.backward()
        gradients.append([each for root in (old, new) for each in root.parameters()])
    found, expected = gradients
    for param, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), plain.grad.to(param.device), rtol=0, atol=1e-6)


@distributed(2)
def test_a_unit_that_leaves_unsharded_has_shards(ctx: RankContext) -> None:
    model = seeded(_nested)
    shard_each(*_levels(model), mesh=ctx.mesh_1d())
    model.set_reshard_after_backward(False)
    _backward(model, 0)
    child = model[0]
    model[0] = nn.Identity()
    model(_x())
    assert all(isinstance(value, DTensor) for value in child.state_dict().values())
    assert all(isinstance(param, DTensor) for param in child.parameters())


@distributed(2)
def test_a_backward_whose_last_landing_raises_may_be_repeated(ctx: RankContext) -> None:
    """A hook of the user raises; the graph was kept."""
    model, plain = seeded(_nested), seeded(_nested)
    shard_each(*_levels(model), mesh=ctx.mesh_1d())
    handle = model[1].weight.register_post_accumulate_grad_hook(fail_now)
    loss = model(_x()).square().mean()
    with pytest.raises(InjectedError):
        loss.backward(retain_graph=True)
    handle.remove()
    for each in (model, plain):
        each.zero_grad()
    loss.backward()
    _backward(plain, 0)
    assert_gradients(model, plain)


@distributed(2)
def test_unshard_after_a_backward_that_raised_shows_what_was_written(ctx: RankContext) -> None:
    model, plain = seeded(_nested), seeded(_nested)
    shard_each(*_levels(model), mesh=ctx.mesh_1d())
    params = list(model.parameters())
    handle = model[0].register_forward_hook(lambda _module, _args, output: output.register_hook(fail_now) and None)
    with pytest.raises(InjectedError):
        _backward(model, 0)
    handle.remove()
    double((*params, *plain.parameters()))
    model.unshard()
    torch.testing.assert_close(model[1].weight.detach(), plain[1].weight.detach())
    model.reshard()
