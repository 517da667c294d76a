"""Plans for gathers and reductions: plain data, computed once and the same on all ranks.

Each tensor takes one route. ``DIRECT`` tensors are sent from and received into their final memory. Small tensors, and
those that must be rearranged, share a bucket, one per dtype: ``ROWS`` for shards that are intervals of their tensor,
``STRIDED`` for others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from operator import attrgetter

import torch

from fsdp2.core.plan.dtypes import DivideFactors, ParamDtypes, divide_factors
from fsdp2.core.plan.layout import ALIGNMENT_NBYTES, Layout, pack, shard_layout


class Route(Enum):
    """How one tensor is sent."""

    ROWS = "bucket"
    STRIDED = "strided bucket"
    DIRECT = "direct"


@dataclass(frozen=True)
class Routing:
    """Which tensors take which route, chosen to suit the comm that sends them.

    Attributes:
        direct_min_nbytes: shards of at least this many bytes are sent without a staging copy; others share a bucket.
        reduces_uneven: whether reductions accept inputs whose last shards are short.
        reduces_casts: whether reductions accept inputs of another dtype than their outputs.
    """

    direct_min_nbytes: int
    reduces_uneven: bool = True
    reduces_casts: bool = False


class Origin(Enum):
    """Where a rank's part comes from: the group's flat shards, or an all-gather hook, which is called for each gather.
    Gathered data is kept while the group is unsharded, unless the hooks consume it on arrival."""

    SHARD = "shard"
    HOOK = "for a hook, kept while unsharded"
    HOOK_CONSUMED = "for a hook, consumed on arrival"


@dataclass(frozen=True)
class PlanInput:
    """What a plan needs to know about one parameter, the part of it that is kept after forward, or one tensor that an
    all-gather hook returns."""

    name: str
    layout: Layout
    dtypes: ParamDtypes
    origin: Origin = Origin.SHARD


@dataclass(frozen=True)
class GatherStep:
    """How one tensor is gathered. ``index``: its key among the inputs. ``shard_offset``: its offset in elements in the
    flat shard buffer of dtype ``source``. ``offset_nbytes``: its offset in bytes in the group's unsharded storage;
    tensors that hooks send have their own storages."""

    index: int
    name: str
    route: Route
    layout: Layout
    source: torch.dtype
    dtype: torch.dtype
    shard_offset: int
    offset_nbytes: int
    origin: Origin

    @property
    def is_copied_in(self) -> bool:
        """Whether this rank's part is copied before it is sent, because it is cast or was made by a hook."""
        return self.source is not self.dtype or self.origin is not Origin.SHARD

    @property
    def padded_nbytes(self) -> int:
        """Bytes that are gathered, including padding."""
        return self.layout.padded_numel * self.dtype.itemsize


@dataclass(frozen=True)
class GatherBucket:
    """Tensors of one dtype that are sent in one message. Each rank's row of the staging memory holds its shards one
    after another. ``offset_nbytes``: where the rows start in the staging storage."""

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
    """A group's all-gather. ``shard_numels``: length of the flat shard buffer of each dtype. ``shared_nbytes``: size of
    the storage of all plain parameters. ``staging_nbytes``: size of the buckets while they are in flight."""

    steps: tuple[GatherStep, ...]
    shard_numels: tuple[tuple[torch.dtype, int], ...]
    shared_nbytes: int
    buckets: tuple[GatherBucket, ...]
    staging_nbytes: int

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes that are gathered and kept while the group is unsharded."""
        return self.shared_nbytes + sum(step.padded_nbytes for step in self.steps if step.origin is Origin.HOOK)

    def on_route(self, route: Route) -> tuple[GatherStep, ...]:
        return tuple(step for step in self.steps if step.route is route)


@dataclass(frozen=True)
class ReduceStep:
    """One parameter's gradient. ``offset`` is its offset in elements in the flat reduced buffer."""

    index: int
    name: str
    route: Route
    layout: Layout
    offset: int


@dataclass(frozen=True)
class ReducePlan:
    """The reduction of a group's gradients of one combination of dtypes; all plans share one launch.

    Attributes:
        calls: the (offset, length) in the flat buffer that each call of the comm fills: first the buckets, then each
            direct tensor.
        casts_first: whether direct gradients are cast to the reduce dtype before they are sent; else the comm casts.
    """

    steps: tuple[ReduceStep, ...]
    dtypes: ParamDtypes
    factors: DivideFactors
    flat_numel: int
    calls: tuple[tuple[int, int], ...]
    casts_first: bool


def compile_gather(
    inputs: Mapping[int, PlanInput], routing: Routing, *, back_into: GatherPlan | None = None
) -> GatherPlan:
    """Place every shard in a flat buffer per dtype, and all gathered tensors in one storage.

    ``inputs``: by the keys that the steps have as ``index``. ``back_into``: for shards on the post-forward mesh, the
    plan whose gathered tensors were cut into these shards. The shards are gathered back to their old places.
    """
    unplaced = [_unplaced_step(index, item, routing) for index, item in inputs.items()]
    dtypes, sources = ([getattr(step, name) for step in unplaced] for name in ("dtype", "source"))

    def place(step: GatherStep) -> tuple[bool, int, bool, int, int]:
        """Sort key: shards that share a bucket are neighbours in the flat buffer, whatever else has their dtype."""
        is_direct, is_of_hook = step.route is Route.DIRECT, step.origin is not Origin.SHARD
        return is_direct, dtypes.index(step.dtype), is_of_hook, sources.index(step.source), step.index

    steps, shard_numels = _place_shards(sorted(unplaced, key=place))
    if back_into is None:
        steps, shared_nbytes = _place_regions(steps)
    else:  # a cut over fewer ranks never needs more padding
        earlier = {step.index: step for step in back_into.steps}
        steps = [replace(step, offset_nbytes=earlier[step.index].offset_nbytes) for step in steps]
        shared_nbytes = back_into.shared_nbytes
    buckets, staging_nbytes = _place_buckets([step for step in steps if step.route is not Route.DIRECT])
    return GatherPlan(tuple(steps), shard_numels, shared_nbytes, buckets, staging_nbytes)


def compile_reduces(
    inputs: Sequence[PlanInput],
    routing: Routing,
    world_size: int,
    factor: float | None = None,
    *,
    behind_hook: bool = False,
    averages: bool = False,
) -> tuple[ReducePlan, ...]:
    """A plan per combination of dtypes, for gradients that are summed over ``world_size`` ranks and divided by
    ``factor``, after the user's hook if ``behind_hook``. If ``averages``, and the result is the mean, the collectives
    take the mean. The ``index`` of a step is the position in ``inputs``."""
    by_dtypes: dict[ParamDtypes, list[tuple[int, PlanInput]]] = {}
    for index, item in enumerate(inputs):
        by_dtypes.setdefault(item.dtypes, []).append((index, item))
    factors = [divide_factors(dtypes.reduce, world_size, factor, behind_hook=behind_hook) for dtypes in by_dtypes]
    if averages and world_size > 1 and set(factors) == {DivideFactors(1.0, float(world_size))}:
        factors = [DivideFactors(1.0, 1.0, averages=True)] * len(factors)
    return tuple(
        _compile_reduce(alike, divisions, routing) for alike, divisions in zip(by_dtypes.values(), factors, strict=True)
    )


def cut_after_forward(step: GatherStep, num_shards: int) -> PlanInput:
    """The tensor that ``step`` gathered, as ``num_shards`` ranks hold it between forward and backward. It is already
    cast. A tensor that hooks sent is cut as a flat tensor, since only the hooks know its shape."""
    layout = step.layout
    shape, dim = (layout.shape, layout.dim) if step.origin is Origin.SHARD else ((layout.numel,), 0)
    return PlanInput(step.name, shard_layout(shape, dim, num_shards), ParamDtypes.uncast(step.dtype))


def _compile_reduce(inputs: Sequence[tuple[int, PlanInput]], factors: DivideFactors, routing: Routing) -> ReducePlan:
    """Place the reduced gradients of ``inputs``, which have the same dtypes, in one flat buffer."""
    routes = [_reduce_route(item, routing) for _, item in inputs]
    calls = [[i for i, found in enumerate(routes) if found is route] for route in (Route.ROWS, Route.STRIDED)]
    calls = [call for call in calls if call] + [[i] for i, found in enumerate(routes) if found is Route.DIRECT]
    dtypes = inputs[0][1].dtypes
    sizes = [sum(inputs[i][1].layout.chunk_numel for i in call) for call in calls]
    starts, _ = pack(sizes, ALIGNMENT_NBYTES // dtypes.reduce.itemsize)
    steps: list[ReduceStep] = []
    for call, offset in zip(calls, starts, strict=True):
        for i in call:
            index, item = inputs[i]
            steps.append(ReduceStep(index, item.name, routes[i], item.layout, offset))
            offset += item.layout.chunk_numel
    places = tuple(zip(starts, sizes, strict=True))
    casts_first = not routing.reduces_casts or factors.before != 1.0  # division comes after the cast
    return ReducePlan(tuple(steps), dtypes, factors, sum(places[-1]), places, casts_first)


def _unplaced_step(index: int, item: PlanInput, routing: Routing) -> GatherStep:
    layout, dtypes = item.layout, item.dtypes
    route = Route.DIRECT if _is_large(item, routing) else Route.ROWS
    route = route if layout.is_contiguous else Route.STRIDED
    return GatherStep(index, item.name, route, layout, dtypes.orig, dtypes.param, 0, 0, item.origin)


def _reduce_route(item: PlanInput, routing: Routing) -> Route:
    if item.layout.dim != 0:
        return Route.STRIDED
    is_even = item.layout.is_even or routing.reduces_uneven
    return Route.DIRECT if is_even and _is_large(item, routing) else Route.ROWS


def _is_large(item: PlanInput, routing: Routing) -> bool:
    return item.layout.chunk_numel * item.dtypes.param.itemsize >= max(routing.direct_min_nbytes, 1)


def _place_shards(steps: Sequence[GatherStep]) -> tuple[list[GatherStep], tuple[tuple[torch.dtype, int], ...]]:
    """Choose offsets in the flat shard buffer of each dtype. Bucketed shards are adjacent, so that a bucket's input is
    a slice; direct ones are aligned."""
    placed: list[GatherStep] = []
    ends: dict[torch.dtype, int] = {}
    for step in steps:
        if step.origin is Origin.SHARD:
            alignment = ALIGNMENT_NBYTES // step.source.itemsize if step.route is Route.DIRECT else 1
            step = replace(step, shard_offset=-(-ends.get(step.source, 0) // alignment) * alignment)
            ends[step.source] = step.shard_offset + step.layout.chunk_numel
        placed.append(step)
    return placed, tuple(ends.items())


def _place_regions(steps: Sequence[GatherStep]) -> tuple[list[GatherStep], int]:
    """Choose regions of the shared storage, in the order of the inputs. Also returns the bytes they take."""
    placed = sorted((step for step in steps if step.origin is Origin.SHARD), key=lambda step: step.index)
    starts, nbytes = pack([step.padded_nbytes for step in placed], ALIGNMENT_NBYTES)
    offsets = {step.index: start for step, start in zip(placed, starts, strict=True)}
    return [replace(step, offset_nbytes=offsets.get(step.index, 0)) for step in steps], nbytes


def _place_buckets(steps: Sequence[GatherStep]) -> tuple[tuple[GatherBucket, ...], int]:
    """One bucket per dtype, and the bytes they take together."""
    alike = [tuple(group) for _, group in groupby(steps, key=attrgetter("dtype"))]
    starts, nbytes = pack([sum(step.padded_nbytes for step in bucket) for bucket in alike], ALIGNMENT_NBYTES)
    return tuple(map(GatherBucket, alike, starts)), nbytes
