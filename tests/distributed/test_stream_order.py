"""On an accelerator, everything that touches the same memory is ordered by streams, whatever the user has asked for.

No accelerator is needed: streams are clocks (``tests/harness/simulated.py``), and an access that nothing orders is an
error even where, by luck, it would come late enough on a GPU. What is trained are the cases of ``tests/accelerator``,
and those below.
"""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2.tensors import BFloat16AllGatherTensor, Float8AllGatherTensor, Float8Scaling, Int8AllGatherTensor
from tests.accelerator import cases
from tests.accelerator.cases import WIDE, Trained, bf16, bf16_fp32
from tests.accelerator.test_left_out_waits import UNSEEN, UNSEEN_OF_4, Wait, leaving_out
from tests.harness.comms import CountingAllGather, CountingReduceScatter
from tests.harness.models import MLP, Uneven
from tests.harness.offload import offload_policy
from tests.harness.runtimes import Runtime, subject
from tests.harness.selection import in_ci
from tests.harness.simulated import SimulatedGroup, Simulation, simulated_accelerator
from tests.harness.training import Step, one_backward, train


def zero_in_place(step: Step, model: Any) -> list[Tensor]:
    losses = one_backward(step, model)
    model.zero_grad(set_to_none=False)
    return [*losses, *one_backward(step, model)]


def freeze_what_is_summed(step: Step, model: Any) -> list[Tensor]:
    """What was summed before a parameter was frozen lands on its own, while the sums may still be on their way."""
    losses = []
    for is_last in (False, True):
        model.blocks[1].up.weight.requires_grad_(not is_last)
        model.set_requires_all_reduce(is_last)
        model.set_is_last_backward(is_last)
        losses += one_backward(step, model)
    model.blocks[1].up.weight.requires_grad_(True)
    return losses


def evaluate_between(step: Step, model: Any) -> list[Tensor]:
    losses = one_backward(step, model)
    with torch.no_grad():
        losses.append(step.loss(model))
    with torch.inference_mode():
        return [*losses, step.loss(model)]


def switch_streams(step: Step, model: Any) -> list[Tensor]:
    model._set_unshard_async_op(step.index == 1)
    return one_backward(step, model)


def clip(step: Step, model: Any) -> list[Tensor]:
    losses = one_backward(step, model)
    return [*losses, fsdp2.clip_grad_norm_(model.parameters(), 0.05)]


def update_in_last_backward(step: Step, model: Any) -> list[Tensor]:
    """Gradients of the first backward are added to, and dropped as soon as that is enqueued."""
    losses = one_backward(step, model)
    hooks = [parameter.register_post_accumulate_grad_hook(cases._update) for parameter in model.parameters()]
    losses += one_backward(step, model)
    for hook in hooks:
        hook.remove()
    return losses


class StoppedError(Exception):
    """A step has raised."""


def stop(*_: object) -> None:
    raise StoppedError


def stop_and_repeat(step: Step, model: Any, *hooks: Any, resets: bool = True) -> list[Tensor]:
    """A step that raises in one of ``hooks``, and one that does not. Between them, gradients are read and written."""
    parameters = list(model.parameters())
    with pytest.raises(StoppedError):
        one_backward(step, model)
    gc.collect()  # the error holds what was in flight
    for hook in hooks:
        hook.remove()
    if resets:
        model.reset_iter_state()
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.to_local().mul_(0.5)
    return one_backward(step, model)


def stop_when_landed(step: Step, model: Any) -> list[Tensor]:
    hook = model.blocks[-1].up.weight.register_post_accumulate_grad_hook(stop)  # the first to land
    return stop_and_repeat(step, model, hook)


def stop_when_updated(step: Step, model: Any) -> list[Tensor]:
    """What was updated in backward is gathered next."""
    weights = [block.up.weight for block in model.blocks]
    hooks = [weight.register_post_accumulate_grad_hook(cases._update) for weight in weights]
    stops = weights[0].register_post_accumulate_grad_hook(stop)
    losses = stop_and_repeat(step, model, stops, resets=False)
    for hook in hooks:
        hook.remove()
    return losses


def stop_in_backward(step: Step, model: Any) -> list[Tensor]:
    """The only reduction so far is given up; its gradients may be in place already."""

    def stop_at(module: Any, inputs: Any, output: Tensor) -> None:
        output.register_hook(stop)

    return stop_and_repeat(step, model, model.blocks[-2].register_forward_hook(stop_at))


def stop_on_own_stream(step: Step, model: Any) -> list[Tensor]:
    assert SimulatedGroup.simulation is not None
    stream = SimulatedGroup.simulation.device.Stream()

    def halve_and_stop(reduced: Tensor) -> None:
        reduced.mul_(0.5)
        stop()

    model.blocks[1].set_all_reduce_hook(halve_and_stop, stream=stream)
    with pytest.raises(StoppedError):
        one_backward(step, model)
    gc.collect()
    model.blocks[1].set_all_reduce_hook(lambda reduced: reduced.mul_(0.5), stream=stream)
    return one_backward(step, model)


def prefetch_two(model: Any, runtime: Runtime) -> None:
    blocks = list(model.blocks)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
        block.set_modules_to_backward_prefetch(blocks[max(index - 2, 0) : index][::-1])


def checkpoint_blocks(model: Any, runtime: Runtime) -> None:
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def communicate_by_hand(model: Any, runtime: Runtime, persistent: bool = True) -> None:
    """The user's own collectives, with one buffer per size for good, or a new one each time."""
    gather, reduce = CountingAllGather(persistent=persistent), CountingReduceScatter(persistent=persistent)
    for module in [*model.units(), model]:
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(reduce)


def halve_on_own_stream(model: Any, runtime: Runtime) -> None:
    assert SimulatedGroup.simulation is not None
    stream = SimulatedGroup.simulation.device.Stream()
    for module in [*model.units(), model]:
        module.set_all_reduce_hook(lambda reduced: reduced.mul_(0.5), stream=stream)


HOOKED = {
    "bfloat16": BFloat16AllGatherTensor,
    "int8": Int8AllGatherTensor,
    "float8": Float8AllGatherTensor,
    "float8 per row": partial(Float8AllGatherTensor, scaling=Float8Scaling.PER_ROW),
}
CASES: dict[str, Trained] = {
    **cases.CASES,
    "hook on a stream of its own": Trained(policy=bf16_fp32, then=halve_on_own_stream),
    "uneven": Trained(model=Uneven),
    "checkpointed": Trained(policy=bf16_fp32, then=checkpoint_blocks),
    "prefetched two ahead": Trained(model=partial(MLP, num_blocks=4), policy=bf16, then=prefetch_two),
    "communicated by hand": Trained(policy=bf16, then=communicate_by_hand),
    "zeroed in place": Trained(step=zero_in_place, policy=bf16_fp32),
    "direct, cast back": Trained(model=lambda: WIDE().bfloat16(), policy=bf16),
    "alone, cast": Trained(step=zero_in_place, shard=cases.on_each_rank_alone, policy=bf16_fp32),
    "frozen while summed": Trained(shape=(2, 2), step=freeze_what_is_summed, policy=bf16_fp32),
    "evaluated": Trained(step=evaluate_between, policy=bf16),
    "switched streams": Trained(step=switch_streams, policy=bf16),
    "used twice": Trained(policy=bf16_fp32, then=lambda model, _: model.blocks.append(model.blocks[0])),
    "replicated, clipped": Trained(shape=(2, 2), step=clip, policy=bf16_fp32),
    "alone, updated in the last backward": Trained(step=update_in_last_backward, shard=cases.on_each_rank_alone),
    "stopped when landed": Trained(step=stop_when_landed, policy=bf16_fp32),
    "replicated, stopped when landed": Trained(shape=(2, 2), step=stop_when_landed, policy=bf16_fp32),
    "stopped when updated": Trained(step=stop_when_updated, policy=bf16_fp32),
    "stopped in backward": Trained(step=stop_in_backward),
    "stopped on a stream of its own": Trained(step=stop_on_own_stream, policy=bf16_fp32),
    "own buffers": Trained(policy=bf16, then=partial(communicate_by_hand, persistent=False)),
    "offloaded, zeroed in place": Trained(step=zero_in_place),
    **{
        f"{name} on a smaller mesh": Trained(
            (4,), model=partial(cases.wrapped, make), options={"reshard_after_forward": 2}
        )
        for name, make in HOOKED.items()
    },
}
# It writes shards that a gather reads, which is made anew for that.
del CASES["offloaded, written while unsharded"]
for _name in ("muon", "muon, gradients on rank 0 alone", "gradients in int8"):
    del CASES[_name]  # the simulated group has no all-to-all
del CASES["mirrored"]  # it copies in a thread
# Each leads to waits that the others do not.
_SHORT = [
    *("plain", "uneven", "on a smaller mesh, gathered in vain", "kept storage", "replicated, partial sums"),
    *("hook on a stream of its own", "communicated by hand", "loaded by assignment", "bfloat16 on a smaller mesh"),
    "offloaded, evaluated",
    *("alone, updated in the last backward", "stopped when landed", "stopped in backward"),
]


def _trained(name: str) -> Simulation:
    """The case, on as many simulated accelerators as it takes; all that is on the device there is on the CPU here."""
    case, is_offloaded = CASES[name], "offloaded" in name
    if is_offloaded:
        case = replace(case, policy=lambda runtime: {"offload_policy": offload_policy(runtime)})
    with simulated_accelerator(math.prod(case.shape), shards_on_host=is_offloaded) as simulation:
        mesh = init_device_mesh("cpu", case.shape, mesh_dim_names=("replicate", "shard")[-len(case.shape) :])
        train(case.case("cpu"), mesh, subject())
    return simulation


@pytest.mark.filterwarnings("ignore:.*torch.distributed.*deprecated:FutureWarning")  # newer torch renames collectives
@pytest.mark.parametrize("name", [*_SHORT, *in_ci(*(name for name in CASES if name not in _SHORT))])
def test_all_accesses_are_ordered(name: str) -> None:
    races = _trained(name).races
    assert races.num_accesses > 100
    assert not races.found, "\n".join(races.found)


# What the test above finds, beside what ``tests/accelerator/test_left_out_waits.py`` leaves to it.

_WAITS = [
    *(*UNSEEN, *UNSEEN_OF_4),
    Wait("gather_after_compute", "core.group.all_gather.Gather.release", "kept storage"),
    Wait("compute_after_reduce", "core.runtime.executor.Executor.wait_for_landed", "plain"),
    Wait("compute_after_reduce", "core.runtime.executor._run", "stopped when updated"),
    Wait("wait_on_cpu", "core.comm.offload.FlatStage.wait", "offloaded, evaluated"),
]


@pytest.mark.ci
@pytest.mark.parametrize("wait", _WAITS, ids=str)
def test_a_wait_that_is_left_out_is_noticed(wait: Wait) -> None:
    left_out: list[None] = []
    with leaving_out(wait, left_out):
        races = _trained(wait.case).races
    assert left_out
    assert races.found
