"""What is trained on the simulated accelerator, and how its streams go on meanwhile."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp2
from fsdp2.tensors import Float8AllGatherTensor, Int8AllGatherTensor
from tests.accelerator import device
from tests.accelerator.support import cpu_mesh
from tests.harness import compare, training
from tests.harness.comms import direct_from
from tests.harness.distributed import RankContext
from tests.harness.extensions import Halved, Travelling, wrap
from tests.harness.models import MLP, ParityModel, PartlyUsed
from tests.harness.runtimes import Runtime, oracle, subject
from tests.harness.training import (
    Case,
    Step,
    StepRecord,
    accumulate,
    evaluate_before_step,
    one_backward,
    shard_units_and_root,
    train,
)

SCHEDULES: dict[str, dict[str, Any]] = {
    "late gathers": {"late": ["all-gather"]},
    "late reductions": {"late": ["reduce-scatter", "all-reduce"]},
    "late gathers and reductions": {"late": ["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]},
    "late all-reduces": {"late": ["all-reduce"]},
    "late copies": {"late": ["copy"]},
    "compute first": {"first": "compute"},
    "side streams first": {"first": "side"},
    **{f"seed {seed}": {"seed": seed} for seed in range(1, 5)},
}
FEW = ["late gathers and reductions", "side streams first", "seed 1"]

WIDE = partial(MLP, num_blocks=2, dim=128)  # shards of its weights travel direct


def bf16(runtime: Runtime, reduce_dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Sums in ``reduce_dtype``, whatever the version's default is: in bf16, gradients are cast back, one more kernel
    behind the reduction."""
    return {"mp_policy": runtime.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)}


def default(runtime: Runtime) -> dict[str, Any]:
    return {}


def sharded(runtime: Runtime, model: Any, mesh: DeviceMesh, *, policy: Any, then: Any, **options: Any) -> None:
    """Every unit on its own, then the root; ``then`` sets up what else the case asks for."""
    shard_units_and_root(runtime, model, mesh, **policy(runtime), **options)
    then(model, runtime)


bf16_fp32 = partial(bf16, reduce_dtype=torch.float32)
nothing = partial(torch.optim.SGD, lr=0.0)
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False)


def offloaded(runtime: Runtime, pin_memory: bool = True) -> dict[str, Any]:
    return {"offload_policy": runtime.CPUOffloadPolicy(pin_memory=pin_memory)}


def call(name: str, *args: Any) -> Callable[[Any, Runtime], object]:
    """Sets up a case by a method of the root."""
    return lambda model, runtime: getattr(model, name)(*args)


gather_on_compute_stream = call("_set_unshard_async_op", True)


def on_each_rank_alone(runtime: Runtime, model: Any, mesh: DeviceMesh, **options: Any) -> None:
    """Gradients land as they are: no copy, no collective."""
    alone = init_device_mesh(mesh.device_type, (mesh.size(), 1), mesh_dim_names=("ranks", "alone"))["alone"]
    sharded(runtime, model, alone, **options)


def halve_on_own_stream(model: Any, runtime: Runtime) -> None:
    """An all-reduce hook on a stream of the user's."""
    is_on_device = model.blocks[0].up.weight.device_mesh.device_type == device.DEVICE
    stream = torch.Stream(device=device.DEVICE) if is_on_device else None
    for module in [*model.units(), model]:
        module.set_all_reduce_hook(lambda reduced: reduced.mul_(0.5), stream=stream)


def update_in_backward(step: Step, model: Any) -> list[Tensor]:
    """SGD by hooks, as soon as a gradient has landed."""
    if step.index == 0:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_update)
    return one_backward(step, model)


def _update(parameter: Any) -> None:
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.1)
    parameter.grad = None


def update_in_each_backward(step: Step, model: Any) -> list[Tensor]:
    """As above, in two backwards of a step: the second forward computes with what the first backward has written."""
    step.control(model).set_is_last_backward(False)
    losses = update_in_backward(step, model)
    step.control(model).set_is_last_backward(True)
    return [*losses, *one_backward(step, model)]


def unshard_and_write(step: Step, model: Any) -> list[Tensor]:
    """An optimizer writes the shards on the host between ``unshard(async_op=True)`` and ``wait``."""
    losses = one_backward(step, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    handles = [block.unshard(async_op=True) for block in model.blocks]
    optimizer.step()
    for block, handle in zip(model.blocks, handles, strict=True):
        handle.wait()
        losses.append(block.up.weight.detach().sum())
    for block in model.blocks:
        block.reshard()
    return losses


def reduce_twice(step: Step, model: Any) -> list[Tensor]:
    """The second backward adds to the gradients of the first one."""
    return [*one_backward(step, model), *one_backward(step, model)]


def unshard_by_hand(step: Step, model: Any) -> list[Tensor]:
    handles = [step.control(block).unshard(async_op=True) for block in model.blocks]
    if handles[0] is not None:
        handles[0].wait()
    step.control(model.blocks[1]).reshard()
    return one_backward(step, model)


def gather_in_vain(step: Step, model: Any) -> list[Tensor]:
    """Between forward and backward, a block is gathered from its smaller mesh, and nobody uses that."""
    loss = step.loss(model)
    for block in model.blocks:
        step.control(block).unshard(async_op=True)
        step.control(block).reshard()
    loss.backward()
    return [loss]


def load_by_assignment(step: Step, model: Any) -> list[Tensor]:
    """Every step starts with other parameter objects, which the current stream has just written."""
    state = {name: value.detach() * 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return one_backward(step, model)


def evaluate_and_write(step: Step, model: Any) -> list[Tensor]:
    """As soon as a forward returns, the host writes the shards that it has gathered."""
    with torch.no_grad():
        loss = step.loss(model)
        step.control(model).reshard()
        for parameter in model.parameters():
            parameter.to_local().mul_(0.9)
    return [loss, *one_backward(step, model)]


def sum_up_alone(step: Step, model: Any) -> list[Tensor]:
    """Partial sums are added to gradients that compute has just written, by a finalization that reduces nothing."""
    root = step.control(model)
    root.set_manual_backward_finalization(True)
    losses = []
    for micro in range(2):
        root.set_requires_all_reduce(micro == 0)
        losses.append(step.loss(model, micro))
        losses[-1].backward()
        root.finalize_backward()
    for parameter in model.parameters():
        parameter.grad.to_local().mul_(0.5)
    root.set_requires_all_reduce(True)
    root.finalize_backward()
    return losses


class TimesFactor(Travelling):
    """Travels multiplied by ``factor``, one element on the device of the shards."""

    releases_outputs = False
    factor: Tensor

    @classmethod
    def encode(cls, shard: Tensor, rank: int, size: torch.Size, num_ranks: int) -> tuple[Tensor, ...]:
        return (shard * TimesFactor.factor,)


def look_into_and_write(step: Step, model: Any) -> list[Tensor]:
    """The unsharded parameters are read and written in a block of ``unsharded``."""
    with torch.no_grad(), fsdp2.unsharded(model):
        total = torch.stack([parameter.sum() for parameter in model.parameters()]).sum()
        for parameter in model.parameters():
            parameter.mul_(0.9)
    return [total, *one_backward(step, model)]


def flattened(parameters: Any) -> torch.optim.Optimizer:
    return fsdp2.optim.flatten_optimizer(torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, foreach=True))


class Awaited(fsdp2.optim.HostAdamW):
    """Tests read parameters behind ``zero_grad``."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.wait()
        super().zero_grad(set_to_none)


on_host = partial(Awaited, lr=1e-2, eps=1e-3)
on_host_overlapped = partial(on_host, overlap_forward=True)


def of_matrices(parameters: Any) -> torch.optim.Optimizer:
    """Muon of all matrices, each in a message of its own."""
    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    return fsdp2.optim.Muon(matrices, lr=0.1, ns_dtype=torch.float32, bucket_nbytes=1)


def backward_on_rank_0(step: Step, model: Any) -> list[Tensor]:
    """Whether the other ranks step a parameter, they hear from rank 0 only."""
    losses = one_backward(step, model)
    if step.rank > 0:
        model.zero_grad()
    return losses


def write_between(step: Step, model: Any) -> list[Tensor]:
    """The current stream writes shards between the steps."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    return one_backward(step, model)


def wrapped(make: Callable[[Tensor], Tensor]) -> MLP:
    """Its weights are of the class ``make``, which has all-gather hooks."""
    model: MLP = wrap(MLP(), make)
    return model


def change_factor(step: Step, model: Any) -> list[Tensor]:
    """What pre-hooks read is written behind the forward, so the gathers of backward find something new."""
    if step.index == 0:
        TimesFactor.factor = torch.ones(1, device=model.blocks[0].up.weight.device)
    TimesFactor.factor.mul_(1.25)
    loss = step.loss(model)
    TimesFactor.factor.mul_(0.5)
    loss.backward()
    return [loss]


def keep_activations_on_host(model: Any, runtime: Runtime) -> None:
    fsdp2.memory.offload_activations(model, min_nbytes=1)


def _loss_and_output(step: Step, model: Any, index: int) -> tuple[Tensor, Tensor]:
    """The loss, and what a block has returned on the way."""
    outputs: list[Tensor] = []
    hook = model.blocks[index].register_forward_hook(lambda *args: outputs.append(args[-1]))
    loss = step.loss(model)
    hook.remove()
    return loss, outputs[0]


def backward_from_a_block(step: Step, model: Any) -> list[Tensor]:
    """No unit that ran after it has brought its activations back."""
    _, output = _loss_and_output(step, model, 1)
    loss = output.square().mean()
    loss.backward()
    return [loss]


def backward_to_a_block(step: Step, model: Any) -> list[Tensor]:
    """Its activations come back, and nothing reads them. Their memory is free for the next forward."""
    loss, output = _loss_and_output(step, model, 2)
    (grad,) = torch.autograd.grad(loss, output)
    loss = loss.detach()
    del output
    return [loss, grad, *one_backward(step, model)]


def mirror_beside(step: Step, model: Any) -> list[Tensor]:
    """What the optimizer has just written is copied to a mirror beside the pass; the last losses are what arrived."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # it does not step
    with fsdp2.checkpoint.mirrored(model, optimizer, every=1, job=f"case_{os.getppid()}") as mirror:
        mirror.restore(newer_than=step.index)
        mirror.after_step(step.index)
        losses = one_backward(step, model)
        mirror.wait()
        rooms = [(room, room.header) for room in mirror._complete]  # of this rank, and what the other one has sent
        arrived = [
            room.tensors[: header.tensors_nbytes].view(torch.float32).clone() for room, header in rooms if header
        ]
    return [*losses, *arrived]


def sent_as_int8(runtime: Runtime) -> dict[str, Any]:
    """What is lost is kept for the next step."""
    policy = fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.float32, reduce_wire=fsdp2.tensors.Int8Wire())
    return {"mp_policy": policy}


def read_what_is_owed(step: Step, model: Any) -> list[Tensor]:
    """While reductions may still be on their way."""
    root = step.control(model)
    root.set_manual_backward_finalization(True)
    losses = one_backward(step, model)
    owed = [each.to_local().float() for each in fsdp2.tensors.wire_residuals(model).values()]  # type: ignore[union-attr]
    root.finalize_backward()
    return losses + owed


def with_optimizer_event(step: Step, model: Any) -> list[Tensor]:
    """The next forward's gathers wait for the optimizer's event, not for all compute."""
    root = step.control(model)
    if step.index > 0 and root.blocks[0].up.weight.device_mesh.device_type == device.DEVICE:
        root.set_post_optim_event(torch.accelerator.current_stream().record_event())
    return one_backward(step, model)


def step_on_a_side_stream(step: Step, model: Any) -> list[Tensor]:
    """SGD on a stream of its own; the forward is told of its end, and the current stream does not wait."""
    loss = step.loss(model)
    loss.backward()
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    if parameters[0].device.type != device.DEVICE:
        _sgd(parameters)
        return [loss]
    side = torch.sim.Stream()  # type: ignore[attr-defined]
    side.wait_stream(torch.accelerator.current_stream())
    with torch.sim.stream(side):  # type: ignore[attr-defined]
        _sgd(parameters)
        step.control(model).set_post_optim_event(side.record_event())
    return [loss]


def step_aside_and_evaluate(step: Step, model: Any) -> list[Tensor]:
    """The forward of an evaluation is what waits for the optimizer."""
    losses = step_on_a_side_stream(step, model)
    with torch.no_grad():
        return [*losses, step.loss(model)]


def _sgd(parameters: list[Any]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.to_local().sub_(parameter.grad.to_local(), alpha=0.1)


@dataclass(frozen=True)
class Trained:
    """One case.

    Attributes:
        shape: of the mesh.
        is_exact: the CPU makes the same bits. Not where gloo adds more than two numbers, nor where the CPU has a fused
            kernel and other devices do not, nor where the last bit of a norm decides how a factor is rounded.
        beyond_torch: torch's ``fully_shard`` has no such feature; the reference is then fsdp2 on the CPU.
    """

    shape: tuple[int, ...] = (2,)
    is_exact: bool = True
    model: Callable[[], ParityModel] = MLP
    shard: Callable[..., Any] = sharded
    step: Callable[[Step, Any], list[Tensor]] = one_backward
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    num_steps: int = 3
    beyond_torch: bool = False
    policy: Callable[[Runtime], dict[str, Any]] = default
    then: Callable[[Any, Runtime], object] = lambda model, runtime: None
    options: Mapping[str, Any] = field(default_factory=dict)

    def case(self, on: str) -> Case:
        return Case(
            model=partial(placed, self.model, on),
            shard=partial(self.shard, policy=self.policy, then=self.then, **self.options),
            step=self.step,
            optimizer=self.optimizer,
            num_steps=self.num_steps,
        )


def placed(make: Callable[[], ParityModel], on: str) -> ParityModel:
    """A model on ``on``, whose batches come there without the host waiting."""
    model = make().to(on)
    batch = model.batch

    def arrived(generator: torch.Generator) -> tuple[Any, ...]:
        return tuple(
            value.pin_memory().to(on, non_blocking=True) if on != "cpu" and isinstance(value, Tensor) else value
            for value in batch(generator)
        )

    model.batch = arrived  # type: ignore[method-assign]
    return model


# Trained whenever the tests run; the rest, and all that takes 4 ranks, when the long ones run.
FAST = {
    "direct bf16 reduced in fp32",
    "accumulated",
    "gathered on the compute stream",
    "reads what forward wrote",
    "partly used",
    "partly used, zeros elsewhere",
    "partly used, ranks may differ",
    "offloaded, evaluated",
    "replicated only",
    "muon",
    "stepped on the host",
}


def names(size: int) -> list[Any]:
    """The cases on so many ranks, for parametrize."""
    chosen = [name for name, case in CASES.items() if math.prod(case.shape) == size]
    return [pytest.param(name, marks=[] if name in FAST else [pytest.mark.long]) for name in chosen]


_partly_used = partial(Trained, model=PartlyUsed, step=training.other_parameters_by_turns, policy=bf16_fp32)
_replicated = partial(Trained, shape=(2, 2), policy=bf16_fp32)
_on_smaller_mesh = partial(
    Trained, shape=(4,), model=WIDE, is_exact=False, policy=bf16_fp32, options={"reshard_after_forward": 2}
)
_ours = partial(Trained, beyond_torch=True)
_aside = partial(_ours, step=step_aside_and_evaluate, optimizer=nothing)  # in torch, compute does not wait for it
_hooked = partial(_ours, model=partial(wrapped, Int8AllGatherTensor))
_on_host = partial(_ours, optimizer=on_host)
_overlapped = partial(_ours, optimizer=on_host_overlapped)
_offloading = partial(_ours, model=partial(MLP, num_blocks=4), then=keep_activations_on_host)

CASES: dict[str, Trained] = {
    "plain": Trained(),
    "bf16": Trained(policy=bf16),
    "bf16 reduced in fp32": Trained(policy=bf16_fp32),
    "direct": Trained(model=WIDE),
    "direct bf16": Trained(model=WIDE, policy=bf16),
    "direct bf16 reduced in fp32": Trained(model=WIDE, policy=bf16_fp32),
    "kept after forward": Trained(policy=bf16, options={"reshard_after_forward": False}),
    "accumulated": Trained(step=accumulate, policy=bf16_fp32),
    "on each rank alone": Trained(step=reduce_twice, shard=on_each_rank_alone),
    "gathered on the compute stream": Trained(policy=bf16, then=gather_on_compute_stream),
    "hook on a stream of its own": Trained(policy=bf16_fp32, then=halve_on_own_stream),
    "updated in backward": Trained(step=update_in_backward, policy=bf16_fp32),
    "updated in each backward": _ours(step=update_in_each_backward, policy=bf16_fp32),
    "unsharded by hand": Trained(step=unshard_by_hand, policy=bf16),
    "optimizer's event": Trained(step=with_optimizer_event, policy=bf16),
    "optimizer on a stream of its own": _aside(then=gather_on_compute_stream),
    "optimizer on a stream of its own, replicated": _aside(shape=(2, 1), then=gather_on_compute_stream),
    "optimizer on a stream of its own, gathered on another": _aside(),
    "optimizer on a stream of its own, replicated, gathered on another": _aside(shape=(2, 1)),
    "partly used": _partly_used(),
    "partly used, zeros elsewhere": _partly_used(then=call("set_reduce_scatter_unused_params", True)),
    "partly used, ranks may differ": _partly_used(beyond_torch=True, then=call("set_ranks_may_differ", True)),
    "loaded by assignment": Trained(step=load_by_assignment, policy=bf16),
    "kept storage": _ours(policy=bf16, then=call("set_keep_unsharded_storage", True)),
    "hooked": _ours(model=partial(wrapped, Halved), policy=bf16_fp32),
    "reads what forward wrote": _ours(model=partial(wrapped, TimesFactor), step=change_factor),
    "int8": _hooked(),
    "int8, offloaded": _hooked(policy=offloaded),
    "float8": _ours(model=partial(wrapped, Float8AllGatherTensor)),
    "flattened optimizer": _ours(optimizer=flattened, policy=bf16_fp32),
    "muon": _ours(optimizer=of_matrices),
    "muon, gradients on rank 0 alone": _ours(step=backward_on_rank_0, optimizer=of_matrices),
    "stepped on the host": _on_host(policy=bf16_fp32),
    "stepped on the host, gathered": _overlapped(step=evaluate_before_step),
    "stepped on the host, computed with": _overlapped(step=evaluate_before_step, then=gather_on_compute_stream),
    "stepped on the host, clipped": _ours(
        is_exact=False, model=WIDE, optimizer=partial(on_host_overlapped, max_norm=0.1), policy=bf16_fp32
    ),
    "stepped on the host, clipped by the step before": _ours(
        is_exact=False, optimizer=partial(on_host, max_norm=0.1, clip_by="step before"), policy=bf16_fp32
    ),
    "stepped on the host, in bf16": _on_host(model=lambda: MLP().bfloat16(), step=accumulate, policy=bf16_fp32),
    "stepped on the host, written by others": _on_host(step=write_between),
    "stepped on the host, offloaded": _overlapped(policy=offloaded),
    "activations on the host": _offloading(),
    "activations on the host, backward from a block": _offloading(step=backward_from_a_block),
    "activations on the host, backward to a block": _offloading(step=backward_to_a_block),
    "mirrored": _ours(model=WIDE, step=mirror_beside),
    "gradients in int8": _ours(model=WIDE, policy=sent_as_int8, step=read_what_is_owed),
    "states of 8 bits": _ours(model=WIDE, optimizer=partial(fsdp2.optim.AdamW8bit, lr=1e-2)),
    "looked into": _ours(step=look_into_and_write),
    "reduced in a group of its own": _ours(model=WIDE, policy=bf16, then=call("set_separate_reduce_scatter_group")),
    "three reductions in flight": _ours(
        model=partial(MLP, num_blocks=5), policy=bf16_fp32, then=call("set_reduce_scatter_max_input_buffers", 3)
    ),
    "offloaded": Trained(policy=offloaded),
    "offloaded, evaluated": _ours(policy=offloaded, step=evaluate_and_write),
    "offloaded, written while unsharded": _ours(policy=offloaded, step=unshard_and_write),
    "offloaded, accumulated": Trained(step=accumulate, policy=offloaded),
    "offloaded, not pinned": Trained(policy=partial(offloaded, pin_memory=False)),
    "replicated only": Trained(shape=(2, 1), policy=bf16_fp32),
    "replicated": _replicated(),
    "replicated, cast back": _replicated(model=lambda: MLP().bfloat16()),
    "replicated, direct": Trained(shape=(2, 2), model=WIDE),
    "replicated, partial sums": _replicated(step=partial(accumulate, switch="set_requires_all_reduce")),
    "replicated, sums carried on alone": _replicated(beyond_torch=True, step=sum_up_alone),
    "on a smaller mesh, gathered in vain": _on_smaller_mesh(beyond_torch=True, step=gather_in_vain),
    "on a smaller mesh until written": _on_smaller_mesh(step=accumulate, then=call("set_reshard_after_backward", 2)),
    "on a smaller mesh after forward": _on_smaller_mesh(),
}


def values(records: list[StepRecord]) -> dict[str, Tensor]:
    """All that a run has made, on the host."""
    found: dict[str, Tensor] = {}
    for index, record in enumerate(records):
        for position, loss in enumerate(record.losses):
            found[f"step {index}: loss {position}"] = loss.cpu()
        for kind, snapshots in (("gradient", record.gradients), ("parameter", record.parameters)):
            for name, snapshot in snapshots.items():
                if snapshot is not None:
                    found[f"step {index}: {kind} of {name}"] = snapshot.local.cpu()
    return found


def run(trained: Trained, mesh: DeviceMesh, runtime: Runtime, **schedule: Any) -> dict[str, Tensor]:
    """Train on ``mesh`` under ``schedule``; returns all values."""
    on = mesh.device_type
    if on == device.DEVICE:
        device.load().drain()
        device.load().spoil_all_free()  # else values of an earlier run stand in for those that came too late
        device.schedule(**schedule)
    with direct_from(16 * 1024) if on == device.DEVICE else nullcontext():  # models are small
        found = values(train(trained.case(on), mesh, runtime))
    if on == device.DEVICE:
        device.load().drain()
    return found


def differences(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, is_exact: bool = True) -> list[str]:
    """The values that are not the same, bit for bit or to a few roundings of fp32, and by how much they differ."""
    return compare.differences(actual, expected, compare.EXACT if is_exact else compare.SUMMATION_ORDER[torch.float32])


def mesh_of(ctx: RankContext, name: str) -> DeviceMesh:
    """The mesh of the case on the device."""
    shape = CASES[name].shape
    return ctx.mesh_1d() if len(shape) == 1 else ctx.mesh_2d(*shape)


_references: dict[str, dict[str, Tensor]] = {}


def reference(ctx: RankContext, name: str) -> dict[str, Tensor]:
    """What torch's ``fully_shard`` makes of the case on the CPU; or on the device, where it is not the same bits."""
    if name not in _references:
        case = CASES[name]
        runtime = subject() if case.beyond_torch else oracle()
        found = run(case, cpu_mesh(*case.shape), runtime)
        if not case.is_exact:
            exact = run(case, mesh_of(ctx, name), runtime)
            assert not differences(exact, found, is_exact=False)
            found = exact
        _references[name] = found
    return _references[name]
