"""One training run of a small model under a given runtime, recorded step by step.

The same case runs under torch's ``fully_shard``, under fsdp2's, and unsharded with gradients averaged here; only the
runtime differs. Every rank draws its own data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils import _pytree as pytree

from tests.harness.models import MLP, Branches, ParityModel, PartlyUsed
from tests.harness.runtimes import Runtime


@dataclass(frozen=True)
class Tolerance:
    """``of_largest``: also a part of the largest value of the tensor. Sums of low precision err by what their largest
    terms are rounded by, although they cancel."""

    rtol: float
    atol: float
    of_largest: float = 0.0


EXACT = Tolerance(0.0, 0.0)


class _NoControl:
    """Stands in for an FSDPModule where nothing is sharded: every control is accepted and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., _NoControl]:
        return lambda *args, **kwargs: self


@dataclass
class Step:
    """What a case's step function may use: data, the controls of FSDP modules, a place for observations."""

    index: int
    rank: int
    runtime: Runtime | None
    notes: dict[str, Any] = field(default_factory=dict)

    def batch(self, model: ParityModel, micro: int = 0) -> tuple[Any, ...]:
        """This rank's inputs for micro-batch ``micro`` of this step."""
        seed = 10_000 * (self.index + 1) + 100 * micro + self.rank
        return model.batch(torch.Generator().manual_seed(seed))

    def loss(self, model: ParityModel, micro: int = 0, **kwargs: Any) -> Tensor:
        """Forward on one micro-batch."""
        batch = self.batch(model, micro)
        return model.loss(model(*batch, **kwargs), batch)

    def control(self, module: nn.Module) -> Any:
        """``module`` with its FSDP controls; without a runtime, something that ignores them."""
        if self.runtime is None:
            return _NoControl()
        assert isinstance(module, self.runtime.FSDPModule), f"{type(module)} is not an FSDPModule"
        return module

    def note(self, name: str, value: Any) -> None:
        """Record something that the subject and the oracle must agree on; the unsharded run is not asked."""
        self.notes[name] = value.detach().clone() if isinstance(value, Tensor) else value


def one_backward(step: Step, model: ParityModel) -> list[Tensor]:
    loss = step.loss(model)
    loss.backward()
    return [loss]


def evaluate_before_step(step: Step, model: Any) -> list[Tensor]:
    """The gathers of the evaluation are the first to need what backward has begun. Nothing stays unsharded."""
    losses = one_backward(step, model)
    with torch.no_grad():
        losses.append(step.loss(model))
    for unit in (*model.units(), model):
        step.control(unit).reshard()
    return losses


def accumulate(
    step: Step,
    model: Any,
    switch: str | tuple[str, ...] = "set_requires_gradient_sync",
    note: Callable[[Any], Any] | None = None,
    num: int = 3,
    before: Callable[[int], Any] = lambda micro: None,
) -> list[Tensor]:
    """``num`` micro-batches, each behind ``before``; what ``switch`` sets is on in the last one only. ``note``: what to
    record after each."""
    losses = []
    for micro in range(num):
        for each in (switch,) if isinstance(switch, str) else switch:
            getattr(step.control(model), each)(micro == num - 1)
        before(micro)
        losses.append(step.loss(model, micro))
        losses[-1].backward()
        if note is not None and step.runtime is not None:
            step.note(f"after micro-batch {micro}", note(model))
    return losses


def gradients_of(model: nn.Module) -> dict[str, Snapshot | None]:
    """By name of the parameter; without communication."""
    return {name: None if p.grad is None else snapshot(p.grad) for name, p in model.named_parameters()}


def frozen_by_turns(step: Step, model: Any) -> list[Tensor]:
    """Most of the parameters are frozen in every other step, one in the steps between."""
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(step.index % 2 == 1)
    model.blocks[0].up.weight.requires_grad_(step.index % 2 == 0)
    return one_backward(step, model)


def other_units_by_turns(step: Step, model: Any) -> list[Tensor]:
    """Each step runs other blocks of ``Branches``."""
    loss = step.loss(model, active=[(0, 1, 2), (0, 2), (1,), (2, 0)][step.index])
    loss.backward()
    return [loss]


def other_parameters_by_turns(step: Step, model: Any) -> list[Tensor]:
    """Every other step leaves out the sides of ``PartlyUsed``."""
    loss = step.loss(model, use_side=step.index % 2 == 1)
    loss.backward()
    return [loss]


def shard_units_and_root(
    runtime: Runtime,
    model: Any,
    mesh: DeviceMesh,
    *,
    units: Callable[[Any], Iterable[Any]] | None = None,
    policy: Mapping[str, Any] | None = None,
    then: Callable[[Any], Any] | None = None,
    **kwargs: Any,
) -> None:
    """The usual way: every unit on its own, then the root with what is left; or what ``units`` names.

    ``policy``: of mixed precision. ``then``: what to do with the sharded model.
    """
    if policy is not None:
        kwargs["mp_policy"] = runtime.MixedPrecisionPolicy(**policy)
    for unit in (*model.units(), model) if units is None else units(model):
        runtime.fully_shard(unit, mesh=mesh, **kwargs)
    if then is not None:
        then(model)


def sharded(**options: Any) -> Callable[[Runtime, Any, DeviceMesh], None]:
    """``shard_units_and_root`` with ``options``, for a ``Case``."""
    return functools.partial(shard_units_and_root, **options)


class OnShards(torch.optim.Optimizer):
    """Steps the local tensors of DTensors with what ``make`` builds: the same values as a step of the DTensors.

    DTensor plans each foreach operation anew for other shapes, which takes a fifth of a comparison's time. Where the
    optimizer or its states are what a test is about, use ``make`` itself.
    """

    def __init__(self, parameters: Any, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__(parameters, {})
        self._make = make

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        shards = {p: _shard_with_gradient(p) for group in self.param_groups for p in group["params"]}
        groups = [{**group, "params": [shards[p] for p in group["params"]]} for group in self.param_groups]
        optimizer = self._make(groups)
        optimizer.state.update((shards[p], state) for p, state in self.state.items())
        optimizer.step()
        self.state.update((p, optimizer.state[shard]) for p, shard in shards.items() if shard in optimizer.state)


def _shard_with_gradient(parameter: Tensor) -> Tensor:
    local, gradient = (
        each._local_tensor if isinstance(each, DTensor) else each for each in (parameter, parameter.grad)
    )
    shard = local.detach()
    shard.grad = gradient
    return shard


def dtensor_adamw(parameters: Any) -> torch.optim.Optimizer:
    # eps is well above the rounding noise of a gradient, so that noise stays noise in the update
    parameters = list(parameters)
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.1, foreach=_are_alike(parameters))


def dtensor_sgd(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.01, foreach=_are_alike(parameters))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return OnShards(parameters, dtensor_adamw)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return OnShards(parameters, dtensor_sgd)


def _are_alike(parameters: list[Any]) -> bool:
    """Whether one operation can step all of them."""
    kinds = {isinstance(each, DTensor) for each in pytree.tree_leaves(parameters) if isinstance(each, Tensor)}
    return len(kinds) == 1


@dataclass(frozen=True)
class Case:
    """One comparison. ``unsharded`` is the tolerance against the unsharded run; None leaves that run out."""

    model: Callable[[], ParityModel]
    shard: Callable[[Runtime, Any, DeviceMesh], Any] = shard_units_and_root
    step: Callable[[Step, Any], list[Tensor]] = one_backward
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    num_steps: int = 2
    set_to_none: bool = True
    clip_norm: float | None = None
    gather_full: bool = False  # full_tensor() of the last parameters too; on 4 ranks that is most of a run's time
    reduce_dtype: torch.dtype = torch.float32
    unsharded: Tolerance | None = Tolerance(rtol=1e-4, atol=1e-5)
    longest_axis: int | None = None  # ranks that one reduction sums over, where that is no axis of the mesh


# Each step trains other parameters.
BY_TURNS: dict[str, Callable[..., Case]] = {
    "frozen by turns": functools.partial(Case, MLP, step=frozen_by_turns, num_steps=4),
    "other units": functools.partial(Case, Branches, step=other_units_by_turns, num_steps=4),
    "other parameters": functools.partial(Case, PartlyUsed, step=other_parameters_by_turns, num_steps=4),
}


@dataclass(frozen=True)
class Spec:
    """How a parameter or gradient lies on the mesh; plain tensors have no mesh and no placements."""

    kind: str
    mesh: DeviceMesh | None
    placements: tuple[Any, ...] | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    local_shape: tuple[int, ...]
    local_stride: tuple[int, ...]


@dataclass(frozen=True)
class Snapshot:
    spec: Spec
    local: Tensor
    full: Tensor | None = None

    def shard_of(self, full: Tensor) -> Tensor:
        """This rank's part of ``full``, cut as this snapshot is; no communication."""
        if self.spec.mesh is None or self.spec.placements is None:
            return full
        if any(type(placement) not in (Shard, Replicate) for placement in self.spec.placements):
            return distribute_tensor(full, self.spec.mesh, self.spec.placements, src_data_rank=None).to_local()
        for axis, placement in enumerate(self.spec.placements):
            if isinstance(placement, Shard):
                parts = full.chunk(self.spec.mesh.size(axis), placement.dim)
                index = self.spec.mesh.get_local_rank(axis)
                full = parts[index] if index < len(parts) else full.narrow(placement.dim, 0, 0)
        return full


@dataclass
class StepRecord:
    losses: list[Tensor]
    notes: dict[str, Any]
    gradients: dict[str, Snapshot | None]
    parameters: dict[str, Snapshot]
    buffers: dict[str, Tensor]


@torch.no_grad()
def snapshot(tensor: Tensor, with_full: bool = False) -> Snapshot:
    """A copy of ``tensor`` with its layout; ``with_full`` gathers DTensors, so all ranks must call it."""
    sharded = isinstance(tensor, DTensor)
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    spec = Spec(
        kind="DTensor" if sharded else "Tensor",
        mesh=tensor.device_mesh if isinstance(tensor, DTensor) else None,
        placements=tensor.placements if isinstance(tensor, DTensor) else None,
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        dtype=tensor.dtype,
        requires_grad=tensor.requires_grad,
        local_shape=tuple(local.shape),
        local_stride=tuple(local.stride()),
    )
    if not with_full:
        return Snapshot(spec, local.detach().clone())
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return Snapshot(spec, local.detach().clone(), full.detach().clone())


def train(case: Case, mesh: DeviceMesh, runtime: Runtime | None, seed: int = 0) -> list[StepRecord]:
    """Run ``case`` for its steps; ``runtime=None`` is the unsharded reference."""
    torch.manual_seed(seed)
    model = case.model()
    if runtime is not None:
        case.shard(runtime, model, mesh)
    optimizer = case.optimizer(model.parameters())
    records = []
    for index in range(case.num_steps):
        torch.manual_seed(1000 + index)
        step = Step(index, dist.get_rank(), runtime)
        losses = [loss.detach().clone() for loss in case.step(step, model)]
        if runtime is None:
            _average_gradients(model, mesh)
        if case.clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
            losses.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        gradients = gradients_of(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=case.set_to_none)
        full = case.gather_full and index == case.num_steps - 1
        parameters = {name: snapshot(parameter, with_full=full) for name, parameter in model.named_parameters()}
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        records.append(StepRecord(losses, step.notes, gradients, parameters, buffers))
    return records


@torch.no_grad()
def _average_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    for axis in range(mesh.ndim):
        dist.all_reduce(flat, group=mesh.get_group(axis))
    averages = (flat / mesh.size()).split([gradient.numel() for gradient in gradients])
    for gradient, average in zip(gradients, averages, strict=True):
        gradient.copy_(average.view_as(gradient))
