"""Tensors on process groups, as plain values."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import torch

from fsdp2.optim.matrices.planner import PlannedTensor
from fsdp2.optim.matrices.regions import AxisCut, Placed
from fsdp2.optim.matrices.rules import MatrixRule

MIB = 1024 * 1024
Shape = tuple[int, ...]


def placed(shape: Shape, *axes: AxisCut) -> Placed:
    coordinates = itertools.product(*(range(axis.size) for axis in axes))
    return Placed(shape, axes, tuple(coordinates))


def fsdp(shape: Shape, num_ranks: int, dim: int = 0) -> Placed:
    return placed(shape, AxisCut(num_ranks, dim))


def planned(where: Sequence[Placed], itemsize: int = 2) -> dict[int, PlannedTensor]:
    rules = [MatrixRule.batch() if len(each.shape) == 3 else MatrixRule.whole() for each in where]
    return {
        i: PlannedTensor(f"t{i}", each, itemsize, rule) for i, (each, rule) in enumerate(zip(where, rules, strict=True))
    }


def indices(where: Placed) -> torch.Tensor:
    return torch.arange(math.prod(where.shape)).reshape(where.shape)


def local_part(where: Placed, member: int, whole: torch.Tensor) -> torch.Tensor:
    """What ``member`` has, made from its region."""
    for dim, along in enumerate(where.region(member)):
        parts = [whole.narrow(dim, start, stop - start) for start, stop in along]
        whole = torch.cat(parts, dim) if parts else whole.narrow(dim, 0, 0)
    return whole


def random_placed(draw: random.Random) -> Placed:
    shape = tuple(draw.choice((1, 2, 3, 5, 8)) for _ in range(draw.randint(2, 3)))
    axes = tuple(
        AxisCut(draw.choice((1, 2, 3)), draw.choice((None, *range(len(shape))))) for _ in range(draw.randint(1, 3))
    )
    return placed(shape, *axes)
