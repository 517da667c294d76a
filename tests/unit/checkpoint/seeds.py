"""Checkpoints in a folder, told apart by the seeds of their models."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import fsdp2
from tests.harness.models import MLP

SIZES: list[int | str] = ["5GB", 1100, 550]  # 1, 2 and 3 files


def mlp_of(seed: int) -> MLP:
    torch.manual_seed(seed)
    return MLP(num_blocks=0)


def state_of(seed: int) -> dict[str, Tensor]:
    return mlp_of(seed).state_dict()


def save(seed: int, folder: Path, size: int | str = 1100) -> None:
    fsdp2.checkpoint.save_safetensors(mlp_of(seed), folder, max_shard_size=size)
