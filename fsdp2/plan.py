"""What a gather and a reduction do, decided once: plain, printable data.

Each tensor takes one route. ``DIRECT`` tensors travel out of and into their final memory. Small ones, and those that
must be rearranged, share a bucket, one per dtype: ``ROWS`` for shards that are intervals of their tensor, ``STRIDED``
for shards along another dimension. A plan is compiled from layouts, dtypes and what the comm prefers, and is the same
on all ranks; the rooms above bind memory to it and replay it every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from fsdp2.comm import Comm
from fsdp2.layout import ALIGNMENT_NBYTES, Packing, ShardLayout, pack
from fsdp2.precision import DivideFactors, ParamDtypes


class Route(Enum):
    """How one tensor travels. Declared in the order in which their shards lie in a flat buffer."""

    ROWS = "bucket"
    STRIDED = "strided bucket"
    DIRECT = "direct"


_ROUTES = list(Route)


@dataclass(frozen=True)
class PlanInput:
    """What a plan needs to know of one parameter."""

    name: str
    layout: ShardLayout
    dtypes: ParamDtypes


@dataclass(frozen=True)
class GatherStep:
    """One parameter's way from shard to unsharded.

    ``index``: its place in the group. ``shard_offset``: elements into the flat shard buffer of dtype ``source``.
    ``offset_nbytes``: bytes into the group's unsharded storage. ``cast``: whether ``source`` becomes another ``dtype``.
    """

    index: int
    name: str
    route: Route
    layout: ShardLayout
    source: torch.dtype
    dtype: torch.dtype
    shard_offset: int
    offset_nbytes: int

    @property
    def cast(self) -> bool:
        return self.source is not self.dtype

    @property
    def chunk_nbytes(self) -> int:
        """Bytes that each rank sends."""
        return self.layout.chunk_numel * self.dtype.itemsize


@dataclass(frozen=True)
class GatherBucket:
    """Tensors of one dtype that travel in one message. Each rank's row of the staging memory holds its shards behind
    each other. ``offset_nbytes``: where the rows start in the staging storage."""

    steps: tuple[GatherStep, ...]
    offset_nbytes: int

    @property
    def dtype(self) -> torch.dtype:
        return self.steps[0].dtype

    @property
    def num_shards(self) -> int:
        return self.steps[0].layout.num_shards

    @property
    def row_numel(self) -> int:
        return sum(step.layout.chunk_numel for step in self.steps)


@dataclass(frozen=True)
class GatherPlan:
    """A group's all-gather. ``shard_numels``: length of the flat shard buffer of each dtype. ``regions``: where in the
    unsharded storage each parameter lies, in bytes. ``staging_nbytes``: what the buckets need while they travel."""

    steps: tuple[GatherStep, ...]
    shard_numels: tuple[tuple[torch.dtype, int], ...]
    regions: Packing
    buckets: tuple[GatherBucket, ...]
    staging_nbytes: int

    @property
    def unsharded_nbytes(self) -> int:
        return self.regions.total

    def on_route(self, route: Route) -> tuple[GatherStep, ...]:
        return tuple(step for step in self.steps if step.route is route)

    def __str__(self) -> str:
        rows = [
            f"  {step.name}: {step.route.value}, {_arrow(step.source, step.dtype)}, "
            f"{step.layout.num_shards} x {step.chunk_nbytes} bytes at {step.offset_nbytes}"
            for step in self.steps
        ]
        return "\n".join([f"all-gather into {self.unsharded_nbytes} bytes", *rows])


@dataclass(frozen=True)
class ReduceStep:
    """One parameter's gradient: ``offset`` counts elements into the flat reduced buffer."""

    index: int
    name: str
    route: Route
    layout: ShardLayout
    offset: int


@dataclass(frozen=True)
class ReducePlan:
    """The reduction of a group's gradients, for one set of trainable parameters.

    ``calls``: (offset, length) in the flat buffer of what each call of the comm fills: buckets first, then each direct
    tensor.
    """

    steps: tuple[ReduceStep, ...]
    dtypes: ParamDtypes
    factors: DivideFactors
    flat_numel: int
    calls: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        rows = [
            f"  {step.name}: {step.route.value}, {step.layout.num_shards} x {step.layout.chunk_numel} elements"
            for step in self.steps
        ]
        divide = f"divide by {self.factors.before:g} before, {self.factors.after:g} after"
        dtypes = f"{_arrow(self.dtypes.param, self.dtypes.reduce)} -> {_name(self.dtypes.orig)}"
        return "\n".join([f"reduce-scatter {dtypes}, {divide}", *rows])


def compile_gather(inputs: Sequence[PlanInput], comm: Comm, *, back_into: GatherPlan | None = None) -> GatherPlan:
    """Place every parameter's shard in a flat buffer per dtype, and its unsharded tensor in one storage.

    ``back_into``: the plan whose unsharded tensors were cut into the shards gathered here, those that rest on the
    post-forward mesh. They have been cast already, and go back to where they came from.
    """
    sources = [item.dtypes.orig if back_into is None else item.dtypes.param for item in inputs]
    routes = [_gather_route(item, comm) for item in inputs]
    order = sorted(range(len(inputs)), key=lambda i: (_ROUTES.index(routes[i]), i))
    shard_offsets, shard_numels = _place_shards(inputs, sources, routes, order)
    regions = pack([item.layout.padded_numel * item.dtypes.param.itemsize for item in inputs], ALIGNMENT_NBYTES)
    if back_into is not None:  # a cut over fewer ranks never needs more padding
        regions = back_into.regions
    steps = tuple(
        GatherStep(
            index=i,
            name=inputs[i].name,
            route=routes[i],
            layout=inputs[i].layout,
            source=sources[i],
            dtype=inputs[i].dtypes.param,
            shard_offset=shard_offsets[i],
            offset_nbytes=regions.offsets[i],
        )
        for i in order
    )
    buckets, staging_nbytes = _place_buckets([step for step in steps if step.route is not Route.DIRECT])
    return GatherPlan(steps, shard_numels, regions, buckets, staging_nbytes)


def compile_reduce(inputs: Sequence[tuple[int, PlanInput]], comm: Comm, factors: DivideFactors) -> ReducePlan:
    """Place the reduced gradients of ``inputs`` (index in the group, parameter) in one flat buffer.

    All of them have the same dtypes: ``fully_shard`` has seen to it.
    """
    routes = [_reduce_route(item, comm) for _, item in inputs]
    calls = [[i for i, found in enumerate(routes) if found is route] for route in (Route.ROWS, Route.STRIDED)]
    calls = [call for call in calls if call] + [[i] for i, found in enumerate(routes) if found is Route.DIRECT]
    dtypes = inputs[0][1].dtypes
    sizes = [sum(inputs[i][1].layout.chunk_numel for i in call) for call in calls]
    placed = pack(sizes, ALIGNMENT_NBYTES // dtypes.reduce.itemsize)
    steps: list[ReduceStep] = []
    for call, offset in zip(calls, placed.offsets, strict=True):
        for i in call:
            index, item = inputs[i]
            steps.append(ReduceStep(index, item.name, routes[i], item.layout, offset))
            offset += item.layout.chunk_numel
    places = tuple(zip(placed.offsets, sizes, strict=True))
    return ReducePlan(tuple(steps), dtypes, factors, sum(places[-1]), places)


def _gather_route(item: PlanInput, comm: Comm) -> Route:
    if item.layout.dim != 0:
        return Route.STRIDED
    return Route.DIRECT if _is_large(item.layout, item.dtypes.param, comm) else Route.ROWS


def _reduce_route(item: PlanInput, comm: Comm) -> Route:
    if item.layout.dim != 0:
        return Route.STRIDED
    is_even = item.layout.is_even or comm.reduces_uneven
    return Route.DIRECT if is_even and _is_large(item.layout, item.dtypes.param, comm) else Route.ROWS


def _is_large(layout: ShardLayout, dtype: torch.dtype, comm: Comm) -> bool:
    return layout.chunk_numel * dtype.itemsize >= max(comm.direct_min_nbytes, 1)


def _place_shards(
    inputs: Sequence[PlanInput], sources: list[torch.dtype], routes: list[Route], order: list[int]
) -> tuple[dict[int, int], tuple[tuple[torch.dtype, int], ...]]:
    """Offsets in the flat shard buffer of each dtype. Bucketed shards touch each other, so that a bucket's contribution
    is a slice; direct ones are aligned."""
    offsets: dict[int, int] = {}
    ends: dict[torch.dtype, int] = {}
    for i in order:
        alignment = ALIGNMENT_NBYTES // sources[i].itemsize if routes[i] is Route.DIRECT else 1
        offsets[i] = -(-ends.get(sources[i], 0) // alignment) * alignment
        ends[sources[i]] = offsets[i] + inputs[i].layout.chunk_numel
    return offsets, tuple(ends.items())


def _place_buckets(steps: Sequence[GatherStep]) -> tuple[tuple[GatherBucket, ...], int]:
    """One bucket per dtype, and the bytes they take together."""
    sources = list(dict.fromkeys(step.source for step in steps))
    by_dtype: dict[torch.dtype, list[GatherStep]] = {}
    for step in sorted(steps, key=lambda step: sources.index(step.source)):  # neighbours in the flat shards stay so
        by_dtype.setdefault(step.dtype, []).append(step)
    sizes = [sum(step.chunk_nbytes * step.layout.num_shards for step in bucket) for bucket in by_dtype.values()]
    placed = pack(sizes, ALIGNMENT_NBYTES)
    places = zip(by_dtype.values(), placed.offsets, strict=True)
    return tuple(GatherBucket(tuple(bucket), offset) for bucket, offset in places), placed.total


def _arrow(before: torch.dtype, after: torch.dtype) -> str:
    return _name(before) if before is after else f"{_name(before)} -> {_name(after)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
