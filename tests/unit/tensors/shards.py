"""Shards of each wire format, what hooks are called with, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fsdp2.core import _torch
from fsdp2.core.types import MixedPrecisionPolicy
from fsdp2.tensors import (
    BFloat16AllGatherTensor,
    Float8AllGatherTensor,
    Float8Scaling,
    Int8AllGatherTensor,
    MXBlocks,
    MXFP8AllGatherTensor,
    WireFormatTensor,
)
from tests.harness.golden import GoldenTexts
from tests.harness.messages import error_of

MAKERS: dict[str, Callable[[torch.Tensor], WireFormatTensor]] = {
    "bfloat16": functools.partial(BFloat16AllGatherTensor, pad=True),
    "int8": functools.partial(Int8AllGatherTensor, block_size=4),
    "mxfp8": MXFP8AllGatherTensor,
    "mxfp8, columns": functools.partial(MXFP8AllGatherTensor, blocks=MXBlocks.COLUMNS),
    "float8": functools.partial(Float8AllGatherTensor, scaling=Float8Scaling.PER_ROW),
}


def mesh_of(size: int) -> Any:
    """What hooks ask a 1D mesh for, as long as they do not communicate."""
    return SimpleNamespace(size=lambda: size)


def pre(shard: WireFormatTensor, num_ranks: int, full: torch.Tensor, param_dtype: torch.dtype | None = None) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    return shard.fsdp_pre_all_gather(mesh_of(num_ranks), full.shape, full.stride(), nn.Module(), policy)


def random(*shape: int, spread: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    factors = 10.0 ** torch.randint(-6, 6, (shape[0], *[1] * (len(shape) - 1)), generator=generator) if spread else 1
    return torch.randn(shape, generator=generator) * factors


# What is made, and the call on it that is refused.
Refused = dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]


def _held(subject: Any) -> list[Any]:
    tensors = [subject] if isinstance(subject, torch.Tensor) else list(subject.parameters() if subject else [])
    return [(id(t), t.shape, t.requires_grad, [str(leaf.tolist()) for leaf in _torch.leaves(t)]) for t in tensors]


def assert_refused(texts: GoldenTexts, name: str, cases: Refused) -> None:
    """What ``cases`` have as ``name`` is refused in the words of ``texts``, and changes nothing."""
    make, call = cases[name]
    subject = make()
    before = _held(subject)
    texts.check(name, error_of(lambda: call(subject)), among=cases)
    assert _held(subject) == before
