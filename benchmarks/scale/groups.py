"""What a parameter group sends and holds, read off the plans that ``fsdp2.plan.plan`` compiles for it.

Ranks hold equal parts, so one rank's plan is every rank's. Plans are compiled once per kind of group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any

import torch

from fsdp2.comm.backends import CollectiveComm, LocalComm
from fsdp2.plan.dtypes import ParamDtypes
from fsdp2.plan.layout import ShardLayout, join
from fsdp2.plan.plan import (
    GatherInput,
    GatherPlan,
    HookInput,
    Lifetime,
    PlanInput,
    ReducePlan,
    Route,
    compile_gather,
    compile_reduces,
)

from .hardware import Hardware, Ranks, Transfer, all_reduce, gather
from .workload import Param

_DTYPES = ParamDtypes(orig=torch.float32, param=torch.bfloat16, reduce=torch.float32, grad=torch.float32)


class Wire(Enum):
    """In which dtype matrices are gathered; they stay in it while unsharded."""

    __hash__ = object.__hash__

    BF16 = "bf16"
    FP8 = "fp8"


@dataclass(frozen=True)
class Flight:
    """One launch, and the seconds that copies before and behind it take."""

    transfer: Transfer
    before: float = 0.0
    behind: float = 0.0


@dataclass(frozen=True)
class GroupCost:
    """What one group's actions cost in seconds and bytes.

    Attributes:
        regather: from where it rests between forward and backward; None if it rests with its shards.
        reduce: one after the other: reduce-scatter, and all-reduce with HSDP.
        rest: seconds to cut what rests.
        staging_nbytes: while a gather arrives. regather_staging_nbytes: while that from the resting shards does.
        grad_nbytes: the gradients that autograd leaves. cast_nbytes: what is made of them to be sent.
        reduced_nbytes: what arrives, the sharded gradients. shard_numel: elements of its shards.
    """

    gather: Flight
    regather: Flight | None
    reduce: tuple[Flight, ...]
    unsharded_nbytes: float
    grad_nbytes: float
    reduced_nbytes: float
    shard_numel: int
    rest: float = 0.0
    resting_nbytes: float = 0.0
    staging_nbytes: float = 0.0
    regather_staging_nbytes: float = 0.0
    cast_nbytes: float = 0.0


@dataclass(frozen=True)
class Axes:
    """Which ranks shard a group, which hold replicas of a shard, and which it rests on between the passes."""

    shard: Ranks
    replicate: Ranks
    resting: Ranks | None = None


def group_cost(hardware: Hardware, params: tuple[Param, ...], axes: Axes, wire: Wire) -> GroupCost:
    """The cost of a group of ``params``, with bf16 parameters, fp32 reduction and fp32 shards."""
    plans = _compiled(params, axes.shard.size, axes.replicate.size, axes.resting and axes.resting.size, wire)
    reduced_nbytes = sum(plan.flat_numel * plan.dtypes.reduce.itemsize for plan in plans.reduces)
    resting_nbytes = sum(numel * dtype.itemsize for dtype, numel in plans.resting.shard_numels) if plans.resting else 0
    regather = None
    if plans.resting is not None and axes.resting is not None:
        regather = _gather_flight(hardware, axes.resting, plans.resting)
    return GroupCost(
        gather=_gather_flight(hardware, axes.shard, plans.gather),
        regather=regather,
        reduce=_reduce_flights(hardware, axes, plans.reduces, reduced_nbytes),
        unsharded_nbytes=plans.gather.unsharded_nbytes,
        grad_nbytes=sum(param.numel for param in params) * _DTYPES.param.itemsize,
        reduced_nbytes=reduced_nbytes,
        shard_numel=plans.shard_numel,
        rest=2 * resting_nbytes / hardware.copy_bandwidth,
        resting_nbytes=resting_nbytes,
        staging_nbytes=plans.gather.staging_nbytes,
        regather_staging_nbytes=plans.resting.staging_nbytes if plans.resting else 0,
        cast_nbytes=sum(_sent_nbytes(plan) for plan in plans.reduces),
    )


@dataclass(frozen=True)
class _Plans:
    gather: GatherPlan
    resting: GatherPlan | None
    reduces: tuple[ReducePlan, ...]
    shard_numel: int


@cache
def _compiled(params: tuple[Param, ...], num_shards: int, num_replicas: int, resting: int | None, wire: Wire) -> _Plans:
    """As ``fsdp2.group.unsharded`` and ``fsdp2.group.gradients`` compile them; of a comm, its preferences matter."""
    comm: Any = LocalComm if num_shards == 1 else CollectiveComm
    plain = [PlanInput(param.name, ShardLayout(param.shape, 0, num_shards), _DTYPES) for param in params]
    inputs: dict[int, GatherInput] = dict(enumerate(plain))
    if wire is Wire.FP8:
        for index, param in enumerate(plain):
            if len(param.layout.shape) > 1:
                inputs[index] = _in_float8(param, num_shards)
    whole = compile_gather(inputs, comm)
    rest = None
    if resting is not None:
        cut: dict[int, GatherInput] = {step.index: _resting_input(whole, step.index, resting) for step in whole.steps}
        rest = compile_gather(cut, comm, back_into=whole)
    reduces = compile_reduces(plain, comm, num_shards * num_replicas)
    return _Plans(whole, rest, reduces, sum(item.layout.chunk_numel for item in plain))


def _in_float8(param: PlanInput, num_shards: int) -> HookInput:
    """What ``Float8AllGatherTensor`` sends with a scale per tensor, as ``fsdp2.group.group.hooked_params`` joins it."""
    shapes = [param.layout.shard_shape(rank) for rank in range(num_shards)]
    return HookInput(param.name, join(shapes, 0), torch.uint8, Lifetime.UNSHARDED)


def _resting_input(plan: GatherPlan, index: int, num_shards: int) -> PlanInput:
    """As ``fsdp2.group.group.post_forward`` cuts it; what hooks sent is cut wherever it falls."""
    step = next(step for step in plan.steps if step.index == index)
    shape = (step.layout.numel,) if step in plan.hooked else step.layout.shape
    return PlanInput(step.name, ShardLayout(shape, 0, num_shards), ParamDtypes(*4 * (step.dtype,)))


def _gather_flight(hardware: Hardware, ranks: Ranks, plan: GatherPlan) -> Flight:
    """Casts into what is sent, the launch, and copies out of the buckets."""
    cast = sum(
        step.layout.chunk_numel * (step.source.itemsize + step.dtype.itemsize)
        for step in plan.steps
        if step.is_copied_in
    )
    unpacked = sum(2 * step.padded_nbytes for bucket in plan.buckets for step in bucket.steps)
    num_tensors = len(plan.on_route(Route.DIRECT)) + len(plan.buckets)
    transfer = gather(hardware, ranks, sum(step.padded_nbytes for step in plan.steps), num_tensors)
    return Flight(transfer, cast / hardware.copy_bandwidth, unpacked / hardware.copy_bandwidth)


def _reduce_flights(
    hardware: Hardware, axes: Axes, plans: tuple[ReducePlan, ...], reduced_nbytes: float
) -> tuple[Flight, ...]:
    """Copies into what is sent, the reduce-scatter, with HSDP the all-reduce, and the division by the ranks."""
    nbytes = sum(step.layout.padded_numel * plan.dtypes.reduce.itemsize for plan in plans for step in plan.steps)
    read = sum(
        step.layout.numel * plan.dtypes.param.itemsize
        for plan in plans
        for step in plan.steps
        if _is_copied(plan, step.route)
    )
    copies = (read + sum(map(_sent_nbytes, plans))) / hardware.copy_bandwidth
    average = 2 * reduced_nbytes / hardware.copy_bandwidth
    scatter = Flight(gather(hardware, axes.shard, nbytes, sum(len(plan.calls) for plan in plans)), copies)
    if axes.replicate.size == 1:
        return (replace(scatter, behind=average),)
    return scatter, Flight(all_reduce(hardware, axes.replicate, reduced_nbytes), behind=average)


def _sent_nbytes(plan: ReducePlan) -> int:
    """What is made of the gradients to be sent: buckets, padded; casts."""
    sizes = [
        step.layout.numel if step.route is Route.DIRECT else step.layout.padded_numel
        for step in plan.steps
        if _is_copied(plan, step.route)
    ]
    return sum(sizes) * plan.dtypes.reduce.itemsize


def _is_copied(plan: ReducePlan, route: Route) -> bool:
    return route is not Route.DIRECT or plan.dtypes.param is not plan.dtypes.reduce
