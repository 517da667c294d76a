"""Passes other than one forward and one backward of the root: what they return, methods as entry points, modules of one
unit that are called on their own (chunked loss), and recomputation, inside and around sharded modules.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests.harness.compare import Cases, compare, compare_losses_with_unsharded, each_compared, trains_alike
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import (
    DIM,
    MLP,
    STRUCTURES,
    Branches,
    Buffers,
    Nested,
    ParityModel,
    Transformer,
    frozen,
)
from tests.harness.runtimes import Runtime, beyond_torch
from tests.harness.training import Case, Step, evaluate_before_step, one_backward, shard_units_and_root, sharded


def _noting_the_type(step: Step, model: Nested) -> list[Tensor]:
    batch = step.batch(model)
    output = model(*batch)
    step.note("type", type(output).__name__)
    loss = model.loss(output, batch)
    loss.backward()
    return [loss]


@each_compared(2, 4, ci=[make.__name__ for make in STRUCTURES[1:]])
def test_nested_outputs_are_returned_and_differentiated() -> Cases:
    return {make.__name__: Case(partial(Nested, make), step=_noting_the_type) for make in STRUCTURES}


class Chain(MLP):
    """Units inside of units, each of which returns what its last unit has returned. None but the innermost ones have
    parameters."""

    def __init__(self) -> None:
        super().__init__()
        first, second, third = self.blocks
        self.chain = nn.Sequential(nn.Sequential(self.entry, first, second), nn.Sequential(third, self.exit))
        del self.entry, self.blocks, self.exit

    def forward(self, x: Tensor) -> Tensor:
        return self.chain(x)

    def units(self) -> list[nn.Module]:
        return [*self.chain[0], *self.chain[1], *self.chain, self.chain]


class TwoExits(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.other_exit = nn.Linear(self.dim, 8)

    def units(self) -> list[nn.Module]:
        return [self.entry, *self.blocks, self.exit, self.other_exit]


def _four_forwards(step: Step, model: ParityModel) -> list[Tensor]:
    losses = [step.loss(model, micro) for micro in range(4)]
    losses[1].backward()  # in no order of forwards
    (losses[0] + losses[2]).backward()
    return losses  # nobody asks for the gradients of the last one


def _four_of(model: Any, units: Any = None) -> Case:
    return Case(model, sharded(units=units), _four_forwards)


SHARED_OUTPUTS = {
    "as torchtitan": _four_of(MLP, lambda m: [m.entry, *m.blocks[:2], [m.blocks[2], m.exit], m]),
    "all but the entry": _four_of(MLP, lambda m: [*m.blocks, m.exit, m]),
    "frozen entry": _four_of(frozen(MLP, "entry"), lambda m: [*m.blocks, m.exit, m]),
    "chain": _four_of(Chain),
    "two exits": _four_of(TwoExits),
}


@each_compared(2, 4, ci=[*SHARED_OUTPUTS][1:])
def test_several_forwards_of_a_model_that_returns_what_a_unit_returned() -> Cases:
    """The gradient of that one tensor begins the backward of both. Programs have a root without parameters."""
    return SHARED_OUTPUTS


class Twice(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if len(x) == 1 else torch.cat([self(x[:1]), self(x[1:])])


@each_compared(2, 4)
def test_several_forwards_and_backwards() -> Cases:
    return {
        "a unit that runs several times": Case(partial(Branches, (0, 1, 0, 1, 0, 1, 2))),
        "root calls itself": Case(Twice),
    }


def _evaluate_then_train(
    step: Step, model: ParityModel, guard: Callable[[], Any] = torch.no_grad, first_step: int = 0
) -> list[Tensor]:
    losses = []
    if step.index >= first_step:
        model.eval()
        with guard():
            losses = [step.loss(model, micro=7), step.loss(model, micro=8)]
        model.train()
    return losses + one_backward(step, model)


def _train_then_evaluate(step: Step, model: ParityModel) -> list[Tensor]:
    losses = one_backward(step, model)
    with torch.no_grad():
        return [*losses, step.loss(model, micro=7)]


_infer_then_train = partial(_evaluate_then_train, guard=torch.inference_mode)


@each_compared(2, 4)
def test_evaluation_between_training_steps() -> Cases:
    """In inference mode; programs evaluate without."""
    return {
        "MLP": Case(MLP, step=partial(_infer_then_train, first_step=1)),
        "running buffers": Case(Buffers, step=partial(_evaluate_then_train, first_step=1)),
        "before the optimizer's step, resharded by hand": Case(MLP, step=evaluate_before_step),
    }


@beyond_torch("raises: its buffers become inference tensors when the first forward is in inference mode")
@pytest.mark.parametrize("reshard", [True, False])
@distributed(2)
def test_evaluation_under_inference_mode_comes_first(ctx: RankContext, reshard: bool) -> None:
    shard = sharded(reshard_after_forward=reshard)
    detour = Case(MLP, shard, _evaluate_then_train)
    compare(Case(MLP, shard, _infer_then_train), ctx.mesh_1d(), oracle_case=detour)


@beyond_torch("keeps the root unsharded after an evaluation, so the next step computes with parameters gone stale")
@distributed(2, 4)
def test_evaluation_before_the_optimizer_step_leaves_nothing_stale(ctx: RankContext) -> None:
    compare_losses_with_unsharded(Case(MLP, step=_train_then_evaluate), ctx.mesh_1d())


@trains_alike(2, 4, model=MLP)
def test_a_unit_alone_evaluates_and_trains_after_the_root_has_run(step: Step, model: MLP) -> list[Tensor]:
    losses = one_backward(step, model)
    (x,) = step.batch(model, micro=7)
    with torch.no_grad():
        encoded = model.blocks[1](x)
    alone = model.blocks[1](x).square().mean()
    alone.backward()
    return [*losses, encoded, alone]


class Tower(ParityModel):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = MLP(2), MLP(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) * self.right(x)


_each_tower = sharded(units=lambda model: [*model.left.units(), model.left, *model.right.units(), model.right])


@trains_alike(2, model=Tower, shard=_each_tower)
def test_two_roots_in_one_loss(step: Step, model: Tower) -> list[Tensor]:
    return one_backward(step, model)


RESHARD: dict[str, bool | None] = {"resharded": True, "kept": False, "by default": None}
IN_CI = [*RESHARD][1:]


class _Coder(MLP):
    """An autoencoder whose halves are methods, as in image models."""

    def __init__(self) -> None:
        super().__init__(num_blocks=2)
        self.exit = nn.Linear(DIM, DIM)

    def encode(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.blocks[0](self.entry(x * scale))

    def decode(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self.exit(self.blocks[1](x))}

    def forward(self, x: Tensor) -> Any:
        return self.decode(self.encode(x))


METHODS = ("encode", "decode")


def _shard_with_methods(runtime: Runtime, model: Any, mesh: DeviceMesh, **kwargs: Any) -> None:
    for name in METHODS:
        runtime.register_fsdp_forward_method(model, name)  # not sharded yet: nothing happens
    shard_units_and_root(runtime, model, mesh, **kwargs)
    for name in METHODS:
        runtime.register_fsdp_forward_method(model, name)


WITH_METHODS = {name: partial(_shard_with_methods, reshard_after_forward=value) for name, value in RESHARD.items()}


def _methods_only(step: Step, model: _Coder) -> list[Tensor]:
    (x,) = batch = step.batch(model)
    latent = model.encode(x, scale=0.5)
    loss = model.loss(model.decode(latent), batch)
    loss.backward()
    return [latent, loss]


def _one_method(step: Step, model: _Coder) -> list[Tensor]:
    (x,) = step.batch(model)
    loss = model.loss(model.encode(x), (x,))
    loss.backward()
    return [loss]


def _evaluate(step: Step, model: _Coder) -> list[Tensor]:
    with torch.no_grad():
        latent = model.encode(*step.batch(model))
    return [latent, *_methods_only(step, model)]


class _Inner(ParityModel):
    """A registered method of an inner unit, called from the root's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.coder, self.exit = _Coder(), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.exit(self.coder.decode(self.coder.encode(x))["y"])

    def units(self) -> list[nn.Module]:
        return [*self.coder.blocks, self.coder]


def _register(runtime: Runtime, model: Any, mesh: DeviceMesh) -> None:
    shard_units_and_root(runtime, model, mesh)
    for name in METHODS:
        runtime.register_fsdp_forward_method(model.coder, name)


@each_compared(2, 4, ci=IN_CI)
def test_training_through_methods_alone() -> Cases:
    return {
        **{name: Case(_Coder, shard, _methods_only) for name, shard in WITH_METHODS.items()},
        "one method": Case(_Coder, _shard_with_methods, _one_method),
        "evaluation first": Case(_Coder, _shard_with_methods, _evaluate),
        "methods of an inner unit": Case(_Inner, _register),
    }


class _Recurrent(_Coder):
    """A method that calls ``forward`` of its own module, and goes on with the module's parameters."""

    def encode(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.exit(self.generate(x, scale))

    def generate(self, x: Tensor, scale: float = 1.0) -> Tensor:
        for _ in range(2):
            x = self(x * scale)["y"]
        return x

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self.blocks[1](self.blocks[0](self.entry(x)))}


@each_compared(2, by=compare_losses_with_unsharded, ci=IN_CI)
def test_methods_and_forward_of_one_module_may_call_each_other() -> Cases:
    forward_calls = {name: Case(_Coder, shard) for name, shard in WITH_METHODS.items()}
    return {**forward_calls, "method calls forward": Case(_Recurrent, _shard_with_methods, _one_method)}


@beyond_torch("it reshards when the inner call returns, so that the rest of the method meets shards")
@each_compared(2, by=compare_losses_with_unsharded)
def test_method_may_call_forward_of_its_own_module_that_reshards() -> Cases:
    return {"resharded": Case(_Recurrent, WITH_METHODS["resharded"], _one_method)}


# Modules of one unit that are called on their own


class _Chunked(MLP):
    """``forward`` ends with the norm; the head is called per chunk by the loss."""

    def __init__(self) -> None:
        super().__init__(num_blocks=2)
        self.norm, self.head = nn.LayerNorm(DIM), self.exit
        del self.exit

    def batch(self, generator: torch.Generator) -> tuple[Any, ...]:
        return (torch.randn(6, DIM, generator=generator),)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class _ChunkedInside(_Chunked):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.head(chunk) for chunk in super().forward(x).chunk(NUM_CHUNKS)])


def _shard_norm_and_head(runtime: Runtime, model: _Chunked, mesh: DeviceMesh, **kwargs: Any) -> None:
    runtime.fully_shard([model.norm, model.head], mesh=mesh, **kwargs)
    shard_units_and_root(runtime, model, mesh, **kwargs)


NUM_CHUNKS = 3


def _chunk_by_chunk(step: Step, model: _Chunked, reduces_once: bool = False, evaluates: bool = False) -> list[Tensor]:
    """Backward through the head per chunk, then through the rest."""
    losses = []
    if evaluates:
        with torch.no_grad():
            losses.append(model.head(model(*step.batch(model, 1))))
    hidden = model(*step.batch(model))
    detached = hidden.detach().requires_grad_()
    step.control(model).set_is_last_backward(False)
    step.control(model).set_requires_gradient_sync(not reduces_once)
    for chunk in detached.chunk(NUM_CHUNKS):
        losses.append(model.head(chunk).square().mean())
        losses[-1].backward()
    step.control(model).set_is_last_backward(True)
    step.control(model).set_requires_gradient_sync(True)
    hidden.backward(detached.grad)
    return losses


def _all_chunks_at_once(step: Step, model: _Chunked) -> list[Tensor]:
    hidden = model(*step.batch(model))
    loss = torch.stack([model.head(chunk).square().mean() for chunk in hidden.chunk(NUM_CHUNKS)]).sum()
    loss.backward()
    return [loss]


WITH_HEAD = {name: partial(_shard_norm_and_head, reshard_after_forward=value) for name, value in RESHARD.items()}


@each_compared(2, ci=IN_CI)
def test_head_called_per_chunk_with_its_own_backward() -> Cases:
    return {
        **{name: Case(_Chunked, shard, _chunk_by_chunk) for name, shard in WITH_HEAD.items()},
        "reduced once": Case(_Chunked, _shard_norm_and_head, partial(_chunk_by_chunk, reduces_once=True)),
        "called without grad between steps": Case(
            _Chunked, _shard_norm_and_head, partial(_chunk_by_chunk, evaluates=True)
        ),
    }


@each_compared(
    2, by=compare_losses_with_unsharded, ci=[f"{name}, {where}" for name in IN_CI for where in ("loss", "root")]
)
def test_chunks_in_one_backward() -> Cases:
    """The head is called by the loss, or inside the forward of the root."""
    return {
        **{f"{name}, loss": Case(_Chunked, shard, _all_chunks_at_once) for name, shard in WITH_HEAD.items()},
        **{f"{name}, root": Case(_ChunkedInside, shard) for name, shard in WITH_HEAD.items()},
    }


@pytest.mark.parametrize("grad_enabled", [False, True])
@pytest.mark.parametrize("reshard", [None, False])
@distributed(2)
def test_parameters_are_shards_after_a_method_that_calls_forward(
    ctx: RankContext, reshard: bool | None, grad_enabled: bool
) -> None:
    """An optimizer that is built then trains; with whole parameters it would train nothing, and say nothing."""

    def shard(runtime: Runtime, model: Any, mesh: DeviceMesh) -> None:
        shard_units_and_root(runtime, model, mesh, reshard_after_forward=reshard)
        runtime.register_fsdp_forward_method(model, "generate")

    def step(step: Step, model: _Recurrent) -> list[Tensor]:
        batch = step.batch(model)
        with torch.set_grad_enabled(grad_enabled):
            generated = model.generate(*batch)
        step.note("kinds", [type(parameter).__name__ for parameter in model.parameters()])
        # Blocks may be kept unsharded; torch would train nothing of them then, and fsdp2 refuses the step.
        sharded = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
        optimizer = torch.optim.SGD(sharded, lr=0.1)
        loss = model.loss(model.generate(*batch) if grad_enabled else model(*batch), batch)
        loss.backward()
        optimizer.step()
        return [generated, loss]

    compare(Case(_Recurrent, shard=shard, step=step, unsharded=None), ctx.mesh_1d())


class Recomputing(MLP):
    """Drops out in its blocks, which it recomputes: each by a checkpoint around or inside of it, or two by one."""

    def __init__(self, where: str, reentrant: bool) -> None:
        super().__init__()
        self.where, self.recompute = where, partial(checkpoint, use_reentrant=reentrant)
        for block in self.blocks:
            block.down = nn.Sequential(nn.Dropout(0.5), block.down)
            if where == "inside":
                block.forward = partial(self.recompute, block.forward)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        if self.where == "two by one":
            return self.exit(self.blocks[2](self.recompute(nn.Sequential(*self.blocks[:2]).forward, x)))
        for block in self.blocks:
            x = self.recompute(block, x) if self.where == "around" else block(x)
        return self.exit(x)


def _wrapped_inside() -> Transformer:
    model = Transformer()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    return model


def _submodules_wrapped() -> Transformer:
    model = Transformer()
    for block in model.blocks:
        block.attention, block.mlp = checkpoint_wrapper(block.attention), checkpoint_wrapper(block.mlp)
    return model


KINDS = {
    f"{where}, {'reentrant' if reentrant else 'non-reentrant'}": Case(partial(Recomputing, where, reentrant))
    for reentrant in (False, True)
    for where in ("around", "inside", "two by one")
}


@each_compared(2, 4, ci=[*KINDS][1:])
def test_recomputation() -> Cases:
    """The generator's state is put back: else the gradients would not be those of the loss."""
    return {
        **KINDS,
        "checkpoint_wrapper inside units": Case(_wrapped_inside),
        "checkpoint_wrapper around submodules of units": Case(_submodules_wrapped),
    }


@trains_alike(2, model=MLP)
def test_checkpoint_around_the_root(step: Step, model: ParityModel) -> list[Tensor]:
    batch = step.batch(model)
    loss = model.loss(checkpoint(model, *batch, use_reentrant=False), batch)
    loss.backward()
    return [loss]


@distributed(2)
def test_checkpoint_wrapper_around_units(ctx: RankContext) -> None:
    def shard(runtime, model: Transformer, mesh) -> None:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(runtime.fully_shard(block, mesh=mesh))
        runtime.fully_shard(model, mesh=mesh)

    # The unsharded model has no wrappers and so other names.
    compare(Case(Transformer, shard, unsharded=None), ctx.mesh_1d())
