"""What users may ask of a model in training, as functions of a simulated accelerator, for ``test_stream_order.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2.comm.offload import StagedOffloadPolicy
from fsdp2.tensors import (
    BFloat16AllGatherTensor,
    Float8AllGatherTensor,
    Float8Scaling,
    Int8AllGatherTensor,
    wrap_parameters,
)
from tests.harness.comms import CountingAllGather, CountingReduceScatter
from tests.harness.models import MLP, PartlyUsed, Uneven
from tests.harness.simulated import Simulation

BF16 = {"mp_policy": fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
BF16_FP32 = {"mp_policy": fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
LARGE = 512  # wide enough for shards to travel direct


def mesh_of(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])


def sharded(model: Any = None, mesh: DeviceMesh | None = None, **kwargs: Any) -> Any:
    model = MLP() if model is None else model
    mesh = mesh_of(4) if mesh is None else mesh
    for unit in model.units():
        fsdp2.fully_shard(unit, mesh=mesh, **kwargs)
    return fsdp2.fully_shard(model, mesh=mesh, **kwargs)


def backward(model: Any, seed: int = 0, *, to_inputs: bool = False, **kwargs: Any) -> None:
    batch = model.batch(torch.Generator().manual_seed(seed))
    if to_inputs:  # otherwise the root has no backward of its own, and is reduced at the end
        batch[0].requires_grad_()
    model.loss(model(*batch, **kwargs), batch).backward()


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """The same one for all steps of ``model``. First called while parameters are sharded."""
    if not hasattr(model, "optimizer"):
        model.optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    return model.optimizer


def train(model: Any, num_steps: int = 3, *, set_to_none: bool = True, **kwargs: Any) -> None:
    optimizer = optimizer_of(model)
    for seed in range(num_steps):
        backward(model, seed, **kwargs)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


def plain(sim: Simulation) -> None:
    train(sharded())


def gradients_zeroed_in_place(sim: Simulation) -> None:
    train(sharded(**BF16_FP32), set_to_none=False)


def direct(sim: Simulation) -> None:
    train(sharded(MLP(dim=LARGE)))


def direct_cast(sim: Simulation) -> None:
    train(sharded(MLP(dim=LARGE), **BF16_FP32))
    train(sharded(MLP(dim=LARGE).bfloat16(), **BF16))


def uneven(sim: Simulation) -> None:
    train(sharded(Uneven(), **BF16))


def kept_after_forward(sim: Simulation) -> None:
    train(sharded(reshard_after_forward=False, **BF16))


def resting_on_a_smaller_mesh(sim: Simulation) -> None:
    train(sharded(MLP(dim=LARGE), reshard_after_forward=2, **BF16))


def resting_and_gathered_in_vain(sim: Simulation) -> None:
    model = sharded(MLP(dim=LARGE), reshard_after_forward=2, **BF16)
    optimizer_of(model)
    batch = model.batch(torch.Generator().manual_seed(0))
    for _ in range(2):
        loss = model.loss(model(*batch), batch)
        model.blocks[1].unshard(async_op=True)
        model.blocks[1].reshard()
        del loss
    train(model, 1)


def kept_storage(sim: Simulation) -> None:
    model = sharded(**BF16)
    model.set_keep_unsharded_storage(True)
    train(model)


def gathered_on_the_compute_stream(sim: Simulation) -> None:
    model = sharded(**BF16)
    train(model, 1)
    model._set_unshard_async_op(True)
    train(model)
    model._set_unshard_async_op(False)
    train(model, 1)


def replicated(sim: Simulation) -> None:
    for sizes in ((2, 2), (4, 1)):
        train(sharded(mesh=mesh_of(*sizes), **BF16_FP32))


def one_rank(sim: Simulation) -> None:
    mesh = mesh_of(4, 1)["shard"]
    for options in ({}, BF16_FP32):
        train(sharded(mesh=mesh, **options), set_to_none=False)
        train(sharded(mesh=mesh, **options))


def accumulated_unreduced(sim: Simulation) -> None:
    model = sharded(**BF16_FP32)
    for _ in range(2):
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            backward(model, micro)
        for parameter in model.parameters():
            parameter.grad.to_local().mul_(0.5)
            parameter.grad = None


def accumulated_partial(sim: Simulation) -> None:
    model = sharded(mesh=mesh_of(2, 2), **BF16_FP32)
    for _ in range(2):
        for micro in range(3):
            model.set_requires_all_reduce(micro == 2)
            backward(model, micro)
        scale_gradients(model)


def partial_sums_carried_on_alone(sim: Simulation) -> None:
    """By a finalization that has nothing else to reduce, right behind compute that has written the gradients."""
    for policy in (BF16, BF16_FP32):
        model = sharded(mesh=mesh_of(2, 2), **policy)
        model.set_manual_backward_finalization(True)
        for _ in range(2):
            model.set_requires_all_reduce(False)
            backward(model, to_inputs=True)
            scale_gradients(model, set_to_none=False)
            model.set_requires_all_reduce(True)
            model.finalize_backward()
            backward(model, to_inputs=True)
            model.set_requires_all_reduce(False)
            backward(model, to_inputs=True)
            scale_gradients(model, set_to_none=True)
            model.set_requires_all_reduce(True)
            model.finalize_backward()


def partial_sums_of_other_parameters(sim: Simulation) -> None:
    """What was summed before a parameter was frozen lands on its own, while the sums may still be on their way."""
    model = sharded(mesh=mesh_of(2, 2), **BF16_FP32)
    for _ in range(2):
        model.set_requires_all_reduce(False)
        model.set_is_last_backward(False)
        backward(model)
        model.blocks[1].up.weight.requires_grad_(False)
        model.set_requires_all_reduce(True)
        model.set_is_last_backward(True)
        backward(model)
        model.blocks[1].up.weight.requires_grad_(True)
        scale_gradients(model)


def scale_gradients(model: nn.Module, *, set_to_none: bool = True) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.to_local().mul_(0.5)
    model.zero_grad(set_to_none=set_to_none)


def unused_parameters(sim: Simulation) -> None:
    model = sharded(PartlyUsed(), **BF16_FP32)
    train(model, use_side=False)
    model.set_reduce_scatter_unused_params(True)
    train(model, use_side=False)


def reductions_in_flight(sim: Simulation) -> None:
    model = sharded(MLP(num_blocks=5), **BF16_FP32)
    model.set_reduce_scatter_max_input_buffers(3)
    train(model)


def reduced_over_a_group_of_its_own(sim: Simulation) -> None:
    model = sharded(**BF16)
    model.set_separate_reduce_scatter_group()
    train(model)


def hook_on_a_stream_of_its_own(sim: Simulation) -> None:
    model = sharded(**BF16_FP32)
    stream = sim.device.Stream()
    for module in [*model.units(), model]:
        module.set_all_reduce_hook(lambda reduced: reduced.mul_(0.5), stream=stream)
    train(model)


def custom_communication(sim: Simulation) -> None:
    for persistent in (False, True):
        model = sharded(**BF16)
        gather, reduce = CountingAllGather(persistent=persistent), CountingReduceScatter(persistent=persistent)
        for module in [*model.units(), model]:
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduce)
        train(model)


def finalized_by_hand(sim: Simulation) -> None:
    model = sharded(**BF16_FP32)
    model.set_manual_backward_finalization(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for micro in range(2):
            backward(model, micro)
        model.finalize_backward(async_op=True).wait()
        optimizer.step()
        optimizer.zero_grad()


def optimizer_in_backward(sim: Simulation) -> None:
    model = sharded(**BF16_FP32)
    for parameter in model.parameters():
        optimizer = torch.optim.AdamW([parameter], foreach=True)

        def update(parameter: Any, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)
    for seed in range(3):
        backward(model, seed)


def clipped(sim: Simulation) -> None:
    model = sharded(mesh=mesh_of(2, 2), **BF16_FP32)
    for _ in range(2):
        backward(model)
        fsdp2.clip_grad_norm_(model.parameters(), 0.1)
        model.zero_grad()


def prefetched_by_hand(sim: Simulation) -> None:
    model = sharded(MLP(num_blocks=5), **BF16)
    blocks = list(model.blocks)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
        block.set_modules_to_backward_prefetch(blocks[max(index - 2, 0) : index][::-1])
    train(model)


def unsharded_by_hand(sim: Simulation) -> None:
    model = sharded(**BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        handles = [block.unshard(async_op=True) for block in model.blocks]
        handles[0].wait()
        backward(model, seed)
        optimizer.step()
        model.blocks[1].unshard()
        model.blocks[1].reshard()
        optimizer.zero_grad()


def evaluated_between_steps(sim: Simulation) -> None:
    model = sharded(**BF16)
    batch = model.batch(torch.Generator().manual_seed(0))
    for _ in range(2):
        train(model, 1)
        with torch.no_grad():
            model(*batch)
        with torch.inference_mode():
            model(*batch)


def checkpointed(sim: Simulation) -> None:
    model = sharded(**BF16_FP32)
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    train(model)


def used_twice(sim: Simulation) -> None:
    model = sharded(**BF16_FP32)
    model.blocks.append(model.blocks[0])
    train(model)


def recovered_from_an_exception(sim: Simulation) -> None:
    model = sharded(**BF16_FP32)
    train(model, 1)
    for stage in ("forward", "backward"):

        def fail(*_: Any, stage: str = stage) -> None:
            raise RuntimeError(stage)

        register = "register_forward_hook" if stage == "forward" else "register_full_backward_hook"
        handle = getattr(model.blocks[1].up, register)(fail)
        with pytest.raises(RuntimeError, match=stage):
            backward(model)
        handle.remove()
        model.zero_grad()
        train(model, 1)


def saved_and_loaded(sim: Simulation) -> None:
    model = sharded(**BF16_FP32)
    for assign in (False, True):
        train(model, 1)
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        backward(model)
        model.load_state_dict(state, assign=assign)
        model.zero_grad()
    train(model, 1)


def offloaded(sim: Simulation) -> None:
    """Shards, gradients and optimizer states are the CPU's as soon as a pass returns."""
    model = sharded(offload_policy=StagedOffloadPolicy(), **BF16_FP32)
    batch = model.batch(torch.Generator().manual_seed(0))
    for micro in range(4):
        model.set_requires_gradient_sync(micro != 2)
        train(model, 1, set_to_none=False)
        with torch.no_grad():
            model(*batch)
            model.reshard()
            for parameter in model.parameters():
                parameter.to_local().mul_(0.5)


def hooked(make: Callable[[Tensor], Tensor]) -> Callable[[Simulation], None]:
    def run(sim: Simulation) -> None:
        for options in ({}, {"reshard_after_forward": 2}):
            model = MLP()
            wrap_parameters(model, make)
            train(sharded(model, **options))

    return run


def float8_per_row(tensor: Tensor) -> Tensor:
    return Float8AllGatherTensor(tensor, scaling=Float8Scaling.PER_ROW)


def int8_kept(tensor: Tensor) -> Tensor:
    return Int8AllGatherTensor(tensor, quantise_once=True)


SCENARIOS = [
    plain,
    gradients_zeroed_in_place,
    direct,
    direct_cast,
    uneven,
    kept_after_forward,
    resting_on_a_smaller_mesh,
    resting_and_gathered_in_vain,
    kept_storage,
    gathered_on_the_compute_stream,
    replicated,
    one_rank,
    accumulated_unreduced,
    accumulated_partial,
    partial_sums_carried_on_alone,
    partial_sums_of_other_parameters,
    unused_parameters,
    reductions_in_flight,
    reduced_over_a_group_of_its_own,
    hook_on_a_stream_of_its_own,
    custom_communication,
    finalized_by_hand,
    optimizer_in_backward,
    clipped,
    prefetched_by_hand,
    unsharded_by_hand,
    evaluated_between_steps,
    checkpointed,
    used_twice,
    recovered_from_an_exception,
    saved_and_loaded,
]
HOOKED = {
    "bfloat16": BFloat16AllGatherTensor,
    "int8": Int8AllGatherTensor,
    "int8 kept": int8_kept,
    "float8": Float8AllGatherTensor,
    "float8 per row": float8_per_row,
}
