"""torch's distributed checkpoints as safetensors. ``tests/parity/test_state.py`` has them in torch's own format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
)
from torch.nn import functional as F

from tests.clients.compare import client, files_in, parameters_of, shard_each
from tests.harness.models import Block

WIDTH = 9  # which two ranks do not divide
PRELOADED = ("torch.distributed.checkpoint.state_dict", "torch.distributed.checkpoint.hf_storage", "torch._dynamo")


def on_two_ranks(*packages: str) -> Any:
    return client(*packages, preload=PRELOADED)


def sharded(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(Block(WIDTH), Block(WIDTH))
    shard_each(*model, model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        inputs, target = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
        F.mse_loss(model(inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("consolidates", [True, False], ids=["one-file", "file-per-rank"])
@on_two_ranks("safetensors")
def test_safetensors_are_equal_and_are_read_back(rank: int, folder: Path, consolidates: bool) -> Any:
    model, optimizer = sharded(seed=0)
    train(model, optimizer, rank, range(2))
    saved = parameters_of(model)
    writer = dcp.HuggingFaceStorageWriter(
        str(folder / "saved"), save_distributed=True, enable_consolidation=consolidates
    )
    dcp.save(get_model_state_dict(model), storage_writer=writer)
    model, _ = sharded(seed=1)
    state = get_model_state_dict(model)
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder / "saved")))
    set_model_state_dict(model, state)
    loaded = parameters_of(model)
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    return loaded, files_in(folder)
