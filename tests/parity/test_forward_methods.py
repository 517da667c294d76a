"""Methods other than ``forward`` as entry points, and modules of one unit called on their own (chunked loss)."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.harness.compare import Cases, compare, compare_losses_with_unsharded, each_compared
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import DIM, MLP, Block, ParityModel
from tests.harness.runtimes import Runtime, beyond_torch
from tests.harness.training import Case, Step, shard_units_and_root

RESHARD: dict[str, bool | None] = {"resharded": True, "kept": False, "by default": None}
IN_CI = [*RESHARD][1:]


class _Coder(ParityModel):
    """An autoencoder whose halves are methods, as in image models."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.exit = nn.Linear(DIM, DIM)

    def encode(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.blocks[0](self.entry(x * scale))

    def decode(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self.exit(self.blocks[1](x))}

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.decode(self.encode(x))

    def units(self) -> list[nn.Module]:
        return list(self.blocks)


METHODS = ("encode", "decode")


def _shard_with_methods(runtime: Runtime, model: Any, mesh: DeviceMesh, **kwargs: Any) -> None:
    for name in METHODS:
        runtime.register_fsdp_forward_method(model, name)  # not sharded yet: nothing happens
    shard_units_and_root(runtime, model, mesh, **kwargs)
    for name in METHODS:
        runtime.register_fsdp_forward_method(model, name)


def _with_methods(reshard: bool | None) -> Any:
    return functools.partial(_shard_with_methods, reshard_after_forward=reshard)


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
    (x,) = step.batch(model)
    with torch.no_grad():
        latent = model.encode(x)
    return [latent, *_methods_only(step, model)]


class _Inner(ParityModel):
    """A registered method of an inner unit, called from the root's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.coder = _Coder()
        self.exit = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.exit(self.coder.decode(self.coder.encode(x))["y"])

    def units(self) -> list[nn.Module]:
        return [*self.coder.blocks, self.coder]


def _shard_inner(runtime: Runtime, model: Any, mesh: DeviceMesh) -> None:
    shard_units_and_root(runtime, model, mesh)
    for name in METHODS:
        runtime.register_fsdp_forward_method(model.coder, name)


@each_compared(2, 4, ci=IN_CI)
def test_training_through_methods_alone() -> Cases:
    return {
        **{name: Case(_Coder, _with_methods(value), _methods_only) for name, value in RESHARD.items()},
        "one method": Case(_Coder, _shard_with_methods, _one_method),
        "evaluation first": Case(_Coder, _shard_with_methods, _evaluate),
        "methods of an inner unit": Case(_Inner, _shard_inner),
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
    forward_calls = {name: Case(_Coder, _with_methods(value)) for name, value in RESHARD.items()}
    return {**forward_calls, "method calls forward": Case(_Recurrent, _shard_with_methods, _one_method)}


@beyond_torch("it reshards when the inner call returns, so that the rest of the method meets shards")
@distributed(2)
def test_method_may_call_forward_of_its_own_module_that_reshards(ctx: RankContext) -> None:
    compare_losses_with_unsharded(Case(_Recurrent, _with_methods(True), _one_method), ctx.mesh_1d())


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


WITH_HEAD = {
    name: functools.partial(_shard_norm_and_head, reshard_after_forward=value) for name, value in RESHARD.items()
}


@each_compared(2, ci=IN_CI)
def test_head_called_per_chunk_with_its_own_backward() -> Cases:
    once, evaluated = (functools.partial(_chunk_by_chunk, **{key: True}) for key in ("reduces_once", "evaluates"))
    return {
        **{name: Case(_Chunked, shard, _chunk_by_chunk) for name, shard in WITH_HEAD.items()},
        "reduced once": Case(_Chunked, _shard_norm_and_head, once),
        "called without grad between steps": Case(_Chunked, _shard_norm_and_head, evaluated),
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
