"""What a parameter group sends and holds, taken from the plans that ``fsdp2.core.plan.plan`` compiles for it.

Ranks hold equal parts, so all ranks have the same plan. Plans are compiled once per kind of group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache

import torch
from torch import nn
from torch.distributed.tensor import Shard

from fsdp2.core import MixedPrecisionPolicy, comms, plans
from fsdp2.extras.checked import AT_LEAST_1, checked
from fsdp2.memory.plan import UnitBytes, gather_bytes, reduce_bytes
from fsdp2.planner.machine import Machine, Ranks, Transfer, all_reduce, gather
from fsdp2.planner.work import Param


def shard_dim(shape: tuple[int, ...], num_shards: int) -> int:
    """The first dim, unless it has fewer rows than there are shards and another dim has enough, as with stacked
    experts, where sharding the first dim would send padding."""
    if shape and shape[0] < num_shards:
        return next((dim for dim, size in enumerate(shape) if size >= num_shards), 0)
    return 0


@checked(num_shards=AT_LEAST_1)
def placement_for(num_shards: int) -> Callable[[nn.Parameter], Shard]:
    """The ``shard_placement_fn`` that shards each parameter along :func:`shard_dim`."""
    return lambda param: Shard(shard_dim(tuple(param.shape), num_shards))


class Wire(Enum):
    """The dtype in which matrices are gathered and stay while unsharded."""

    BF16 = "bf16"
    FP8 = "fp8"


@dataclass(frozen=True)
class GroupCost:
    """What one group's actions cost in seconds and bytes.

    Attributes:
        regather: the gather from where it rests between forward and backward; None if that is its shards.
        reduce: reduce-scatter, then all-reduce with HSDP; none if nothing is trained.
        nbytes: what its gathers and reductions take.
        reduced_nbytes: the sharded gradients that arrive.
        shards_nbytes: bytes of its shards. trained_nbytes: bytes of those that get gradients.
        rest: seconds to cut the resting shards.
    """

    gather: Transfer
    regather: Transfer | None
    reduce: tuple[Transfer, ...]
    nbytes: UnitBytes
    reduced_nbytes: int
    shards_nbytes: int
    trained_nbytes: int
    rest: float = 0.0


@dataclass(frozen=True)
class Axes:
    """Which ranks shard a group, which hold replicas of a shard, and which it rests on between the passes."""

    shard: Ranks
    replicate: Ranks
    resting: Ranks | None = None


@cache
def group_cost(
    machine: Machine,
    params: tuple[Param, ...],
    axes: Axes,
    wire: Wire,
    policy: MixedPrecisionPolicy,
    *,
    offloads: bool = False,
) -> GroupCost:
    """The cost of a group of ``params``. With ``offloads``, its shards and their gradients are in host memory.

    Plans are compiled as ``fsdp2.core.group.unsharded`` and ``fsdp2.core.group.gradients`` do."""
    num_shards = axes.shard.size
    routing = (comms.LocalComm if num_shards == 1 else comms.CollectiveComm).routing
    inputs = [_input(param, num_shards, policy) for param in params]
    trained = [item for item, param in zip(inputs, params, strict=True) if param.trainable]
    sent = [_in_float8(item, num_shards) if wire is Wire.FP8 else item for item in inputs]
    whole = plans.compile_gather(dict(enumerate(sent)), routing)
    reduces = plans.compile_reduces(trained, routing, num_shards * axes.replicate.size)
    shards_nbytes = _shards_nbytes(inputs)
    reduced_nbytes = sum(plan.flat_numel * plan.dtypes.grad.itemsize for plan in reduces)
    gather, reduce = _gather(machine, axes.shard, whole), _reduces(machine, axes, reduces)
    regather, num_resting = None, None
    if axes.resting is not None:
        num_resting = axes.resting.size
        cut = {step.index: plans.cut_after_forward(step, num_resting) for step in whole.steps}
        again = plans.compile_gather(cut, routing, back_into=whole)
        regather = _gather(machine, axes.resting, again)
    if offloads:  # shards come from the host before each gather, and gradients go there after each reduction
        gather = replace(gather, before=gather.before + shards_nbytes / machine.to_host())
    if offloads and reduce:
        behind = reduce[-1].behind + reduced_nbytes / machine.to_host()
        reduce = (*reduce[:-1], replace(reduce[-1], behind=behind))
    staged_nbytes = shards_nbytes if offloads else 0
    nbytes = gather_bytes(whole, staged_nbytes=staged_nbytes, num_resting=num_resting)
    nbytes += reduce_bytes(reduces, packs_at_once=True)
    return GroupCost(
        gather,
        regather,
        reduce,
        nbytes,
        reduced_nbytes=0 if offloads else reduced_nbytes,
        shards_nbytes=shards_nbytes,
        trained_nbytes=_shards_nbytes(trained),
        rest=2 * nbytes.post_forward / machine.copy_bandwidth,
    )


def _input(param: Param, num_shards: int, policy: MixedPrecisionPolicy) -> plans.PlanInput:
    layout = plans.shard_layout(param.shape, shard_dim(param.shape, num_shards), num_shards)
    return plans.PlanInput(param.name, layout, plans.param_dtypes(param.dtype, policy))


def _shards_nbytes(inputs: list[plans.PlanInput]) -> int:
    return sum(item.layout.chunk_numel * item.dtypes.orig.itemsize for item in inputs)


def _in_float8(param: plans.PlanInput, num_shards: int) -> plans.PlanInput:
    """What ``Float8AllGatherTensor`` sends of a matrix, with a scale per tensor, as ``tensors/all_gather_hooks.py``
    joins it."""
    if len(param.layout.shape) < 2:
        return param
    shapes = [param.layout.shard_shape(rank) for rank in range(num_shards)]
    return plans.PlanInput(
        param.name, plans.join(shapes, param.layout.dim), plans.ParamDtypes.uncast(torch.uint8), plans.Origin.HOOK
    )


def _gather(machine: Machine, ranks: Ranks, plan: plans.GatherPlan) -> Transfer:
    """Casts to the sent dtype, the launch, and copies out of the buckets."""
    cast = sum(
        step.layout.chunk_numel * (step.source.itemsize + step.dtype.itemsize)
        for step in plan.steps
        if step.is_copied_in
    )
    unpacked = sum(2 * step.padded_nbytes for bucket in plan.buckets for step in bucket.steps)
    num_tensors = len(plan.on_route(plans.Route.DIRECT)) + len(plan.buckets)
    transfer = gather(machine, ranks, sum(step.padded_nbytes for step in plan.steps), num_tensors)
    return replace(transfer, before=cast / machine.copy_bandwidth, behind=unpacked / machine.copy_bandwidth)


def _reduces(machine: Machine, axes: Axes, plans: tuple[plans.ReducePlan, ...]) -> tuple[Transfer, ...]:
    """Copies into send buffers, the reduce-scatter, with HSDP the all-reduce, and the division by the number of ranks.
    Empty if nothing is trained."""
    if not plans:
        return ()
    reduced_nbytes = sum(plan.flat_numel * plan.dtypes.reduce.itemsize for plan in plans)
    nbytes = sum(step.layout.padded_numel * plan.dtypes.reduce.itemsize for plan in plans for step in plan.steps)
    read = sum(step.layout.numel * plan.dtypes.param.itemsize for plan in plans for step in _copied(plan))
    copies = (read + sum(map(_sent_nbytes, plans))) / machine.copy_bandwidth
    average = 2 * reduced_nbytes / machine.copy_bandwidth
    scatter = replace(gather(machine, axes.shard, nbytes, sum(len(plan.calls) for plan in plans)), before=copies)
    if axes.replicate.size == 1:
        return (replace(scatter, behind=average),)
    return scatter, replace(all_reduce(machine, axes.replicate, reduced_nbytes), behind=average)


def _sent_nbytes(plan: plans.ReducePlan) -> int:
    """Bytes of the copies of gradients that are sent: padded buckets, and casts."""
    sizes = [
        step.layout.numel if step.route is plans.Route.DIRECT else step.layout.padded_numel for step in _copied(plan)
    ]
    return sum(sizes) * plan.dtypes.reduce.itemsize


def _copied(plan: plans.ReducePlan) -> list[plans.ReduceStep]:
    """The gradients that are copied before they are sent, into a bucket or by a cast."""
    is_cast = plan.dtypes.param is not plan.dtypes.reduce and plan.casts_first
    return [step for step in plan.steps if is_cast or step.route is not plans.Route.DIRECT]
