"""What hooks send, in layouts and plans: pieces of sizes that the ranks chose, joined; routes and lifetimes as text."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from fsdp2.group.all_gather import piece_pairs
from fsdp2.plan.dtypes import param_dtypes
from fsdp2.plan.layout import Layout, join, shard_layout
from fsdp2.plan.plan import GatherInput, HookInput, Lifetime, Origin, PlanInput, Route, Routing, compile_gather
from fsdp2.types import MixedPrecisionPolicy
from tests.unit.plan_text import text_of_gather

F32, BF16, I8, U8 = torch.float32, torch.bfloat16, torch.int8, torch.uint8
WORLD_SIZE = 4
ARRIVAL, UNSHARDED = Lifetime.ARRIVAL, Lifetime.UNSHARDED


def _random_pieces(draw: random.Random) -> tuple[list[torch.Tensor], int]:
    """One piece per rank that differ along one dim only; some of size 0."""
    num_dims = draw.randint(1, 4)
    dim = draw.randrange(num_dims)
    rest = [draw.choice((1, 2, 3, 5)) for _ in range(num_dims)]
    sizes = [draw.choice((0, 1, 1, 2, 4, 7)) for _ in range(draw.randint(1, 5))]
    shapes = [(*rest[:dim], size, *rest[dim + 1 :]) for size in sizes]
    return [torch.randn(shape) for shape in shapes], dim


def _joined(shape: tuple[int, ...], dim: int, sizes: tuple[int, ...]) -> Layout:
    return Layout(shape, dim, sizes)


@pytest.mark.parametrize("seed", range(100))
def test_joined_pieces_are_their_concatenation_and_cut_back_into_them(seed: int) -> None:
    parts, dim = _random_pieces(random.Random(seed))
    layout = join([tuple(part.shape) for part in parts], dim)
    full = torch.cat(parts, dim)
    if full.numel():
        assert (layout.shape, layout.dim) == (tuple(full.shape), dim)
    assert layout.numel == full.numel()
    if full.numel():
        rows = torch.zeros(len(parts), layout.chunk_numel, dtype=full.dtype)
        for piece, place in zip(*piece_pairs(full, rows, layout), strict=True):
            place.copy_(piece)
        assert all(torch.equal(row[: part.numel()], part.reshape(-1)) for row, part in zip(rows, parts, strict=True))
        back = torch.zeros_like(full)
        for piece, place in zip(*piece_pairs(back, rows, layout), strict=True):
            piece.copy_(place)
        assert torch.equal(back, full)
        assert [layout.shard_shape(rank) for rank in range(len(parts))] == [tuple(part.shape) for part in parts]


@pytest.mark.parametrize("seed", range(100))
def test_joined_layout_counts_as_a_shard_layout_of_the_same_pieces_does(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.choice((1, 2, 3, 5, 8)) for _ in range(draw.randint(1, 3)))
    cut = shard_layout(shape, draw.randrange(len(shape)), draw.choice((1, 2, 3, 4, 7)))
    joined = join([cut.shard_shape(rank) for rank in range(cut.num_shards)], cut.dim)
    for name in ("shape", "dim", "num_shards", "numel", "chunk_numel", "padded_numel", "is_even", "is_contiguous"):
        assert getattr(joined, name) == getattr(cut, name), (name, cut)
    for rank in range(cut.num_shards):
        start, stop = cut.interval(rank)
        found = joined.interval(rank)
        assert found == (start, stop) or start == stop == found[1]


@pytest.mark.parametrize("seed", range(100))
def test_contiguous_means_that_padding_lies_behind_the_last_piece(seed: int) -> None:
    parts, dim = _random_pieces(random.Random(seed))
    layout = join([tuple(part.shape) for part in parts], dim)
    rows = [torch.cat([part.flatten(), torch.full((layout.chunk_numel - part.numel(),), -1.0)]) for part in parts]
    begins_with_it = torch.equal(torch.cat(rows)[: layout.numel], torch.cat(parts, dim).flatten())
    assert begins_with_it or not layout.is_contiguous


@pytest.mark.parametrize(
    ("shapes", "dim", "expected"),
    [
        ([(), (), ()], 0, _joined((3,), 0, (1, 1, 1))),
        ([(), ()], 1, _joined((2,), 0, (1, 1))),
        ([(4,), (9,)], 1, _joined((13,), 0, (4, 9))),  # no such dim: joined along the first
        ([(2, 3), (2, 5)], 1, _joined((2, 8), 1, (3, 5))),
        ([(2, 3), (0, 3), (1, 3)], 0, _joined((3, 3), 0, (2, 0, 1))),
        ([(2, 3), (0,)], 0, _joined((2, 3), 0, (2, 0))),  # empty pieces fit to any shape
        ([(0, 7), (2, 3)], 0, _joined((2, 3), 0, (0, 2))),
        ([(0,), (0, 5)], 0, _joined((0,), 0, (0, 0))),
        ([(6, 1)], 1, _joined((6, 1), 1, (1,))),
    ],
)
def test_join(shapes: list[tuple[int, ...]], dim: int, expected: Layout) -> None:
    assert join(shapes, dim) == expected


@pytest.mark.parametrize(
    ("shapes", "dim"), [([(2, 3), (2, 4)], 0), ([(2, 3), (3, 3)], 1), ([(2, 3), (6,)], 0), ([(), (2, 2)], 0)]
)
def test_pieces_that_differ_elsewhere_are_not_joined(shapes: list[tuple[int, ...]], dim: int) -> None:
    with pytest.raises(ValueError, match="differ in more than dim"):
        join(shapes, dim)


ROUTING = Routing(direct_min_nbytes=1024, reduces_uneven=False)


def _hook(name: str, shapes: list[tuple[int, ...]], dtype: torch.dtype, lifetime: Lifetime, dim: int = 0) -> HookInput:
    return HookInput(name, join(shapes, dim), dtype, lifetime)


def _param(
    name: str, shape: tuple[int, ...], *, dim: int = 0, num_shards: int = WORLD_SIZE, **policy: Any
) -> PlanInput:
    return PlanInput(name, shard_layout(shape, dim, num_shards), param_dtypes(F32, MixedPrecisionPolicy(**policy)))


def _gather(inputs: list[GatherInput]) -> Any:
    return compile_gather(dict(enumerate(inputs)), ROUTING)


def test_what_hooks_send_takes_the_routes_of_parameters() -> None:
    inputs: list[GatherInput] = [
        _param("bias", (64,)),
        _hook("weight[0]", [(64, 32)] * 4, I8, ARRIVAL),
        _hook("weight[1]", [(64, 1)] * 4, F32, ARRIVAL),
        _hook("columns[0]", [(4, 8)] * 4, F32, UNSHARDED, dim=1),
        _hook("ragged[0]", [(3,), (0,), (7,), (1,)], U8, UNSHARDED),
        _hook("short[0]", [(7,), (7,), (2,), (0,)], U8, UNSHARDED),
        _hook("large[0]", [(600,), (600,), (600,), (5,)], BF16, UNSHARDED),
    ]
    assert_expected_inline(
        text_of_gather(_gather(inputs)),
        """\
all-gather into 5624 bytes
  bias: bucket, float32, 4 x 64 bytes at 0
  weight[1]: bucket, float32, 4 x 256 bytes for a hook, consumed on arrival
  columns[0]: strided bucket, float32, 4 x 128 bytes for a hook, kept while unsharded
  short[0]: bucket, uint8, 4 x 7 bytes for a hook, kept while unsharded
  ragged[0]: strided bucket, uint8, 4 x 7 bytes for a hook, kept while unsharded
  weight[0]: direct, int8, 4 x 2048 bytes for a hook, consumed on arrival
  large[0]: direct, bfloat16, 4 x 1200 bytes for a hook, kept while unsharded""",
    )


def test_cast_parameters_share_a_bucket_with_what_hooks_send() -> None:
    inputs: list[GatherInput] = [
        _param("bias", (64,), param_dtype=BF16),
        _hook("weight[0]", [(5, 3), (5, 3), (3, 3), (0, 3)], BF16, ARRIVAL),
        _param("norm", (6,), param_dtype=BF16),
    ]
    plan = _gather(inputs)
    (bucket,) = plan.buckets
    assert [step.name for step in bucket.steps] == ["bias", "norm", "weight[0]"]  # flat shards in front, in one run
    assert_expected_inline(
        text_of_gather(plan),
        """\
all-gather into 256 bytes
  bias: bucket, float32 -> bfloat16, 4 x 32 bytes at 0
  weight[0]: bucket, bfloat16, 4 x 30 bytes for a hook, consumed on arrival
  norm: bucket, float32 -> bfloat16, 4 x 4 bytes at 128""",
    )


def test_hooks_add_nothing_to_the_flat_shards_nor_to_the_shared_storage() -> None:
    plain: list[GatherInput] = [_param("a", (64, 32)), _param("b", (7,))]
    hooked: list[GatherInput] = [
        _hook("c[0]", [(3, 4)] * 4, F32, UNSHARDED),
        _hook("d[0]", [(1000,)] * 4, F32, ARRIVAL),
    ]
    alone, together = _gather(plain), _gather([*plain, *hooked])
    assert together.shard_numels == alone.shard_numels
    assert together.shared_nbytes == alone.shared_nbytes
    assert together.unsharded_nbytes == alone.unsharded_nbytes + 4 * 3 * 4 * 4  # what is consumed does not count
    assert [step.name for step in together.hooked] == ["c[0]", "d[0]"]
    assert {step.origin for step in alone.steps} == {Origin.SHARD}


def test_plan_of_hooks_that_send_nothing_is_empty() -> None:
    plan = _gather([])
    assert (plan.steps, plan.buckets, plan.unsharded_nbytes, plan.staging_nbytes) == ((), (), 0, 0)
    (step,) = _gather([_hook("w[0]", [(0, 3)] * 4, F32, UNSHARDED)]).steps
    assert (step.padded_nbytes, step.route) == (0, Route.ROWS)
