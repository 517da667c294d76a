"""Model state dicts of every kind, entry by entry as with torch's class."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from tests.harness.distributed import RankContext, distributed
from tests.parity.fsdp1.fronts import Front, assert_same, batch, same

FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)


class Model(nn.Module):
    """Sizes that do not divide; a buffer that is not saved; a norm with an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)) for _ in range(2))
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 1)
        self.register_buffer("saved", torch.arange(3.0))
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)
        self.head.bias.requires_grad_(False)


def wrapped_model(front: Front, **options: Any) -> Any:
    """A wrapper in a wrapper, one around a module without parameters of its own, and the root."""
    model = Model()
    frozen_too = options.get("use_orig_params", False)
    model.head.bias.requires_grad_(not frozen_too)
    model.blocks[0][0] = front.wrap(model.blocks[0][0], **options)
    model.blocks[0][2] = front.wrap(model.blocks[0][2], **options)
    model.blocks[0] = front.wrap(model.blocks[0], **options)
    model.norm = front.wrap(model.norm, **options)
    return front.wrap(model, **options)


def of_kind(front: Front, model: nn.Module, kind: StateDictType, *configs: Any) -> AbstractContextManager[Any]:
    """``state_dict_type`` without torch's warning that its class is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return front.cls.state_dict_type(model, kind, *configs)


def described(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Entries for ``assert_same``: ShardedTensors as their metadata and local parts."""
    return {name: described_value(value) for name, value in state_dict.items()}


def described_value(value: Any) -> Any:
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        return ["ShardedTensor", repr(value.metadata()), [(repr(s.metadata), s.tensor.detach()) for s in shards]]
    return value


def state_of(front: Front, model: nn.Module, kind: StateDictType, *configs: Any, **options: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with of_kind(front, model, kind, *configs):
            return described(model.state_dict(**options))


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(2, 4)
def test_every_kind_is_torchs(ctx: RankContext, use_orig_params: bool) -> None:
    def scenario(front: Front):
        model = wrapped_model(front, use_orig_params=use_orig_params)
        result = [state_of(front, model, FULL), state_of(front, model, FULL, prefix="a.b.")]
        result.append(state_of(front, model, FULL, FullStateDictConfig(rank0_only=True)))
        result.append(state_of(front, model, SHARDED))
        result.append(state_of(front, model.blocks[0], SHARDED))
        if not use_orig_params:
            result.append(state_of(front, model, LOCAL))
        return result

    same(ctx, scenario)
