"""Checkpoints of safetensors, found as transformers finds them, and read by safetensors itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.harness.compare import compare_values

safetensors = pytest.importorskip("safetensors.torch")

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"


def listed(folder: Path) -> dict[str, str]:
    """Which file has which tensor, in the order of the index."""
    return json.loads((folder / INDEX).read_text())["weight_map"]


def read(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    if (folder / ONE).exists():
        return safetensors.load_file(folder / ONE)
    files = {name: safetensors.load_file(folder / name) for name in set(listed(folder).values())}
    return {key: files[name][key] for key, name in listed(folder).items()}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same tensors of the same dtypes, bit for bit, in any order."""
    compare_values("tensors", dict(sorted(found.items())), dict(sorted(expected.items())))


def bytes_of(folder: Path) -> dict[str, bytes]:
    """What each file below ``folder`` holds."""
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def write(folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> None:
    """By safetensors itself, as transformers would. All ranks must call this."""
    if rank == 0:
        folder.mkdir(exist_ok=True)
        contiguous = {key: value.contiguous() for key, value in tensors.items()}
        safetensors.save_file(contiguous, folder / ONE, metadata={"format": "pt"})
    dist.barrier()


def locals_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies, on the host, of what this rank has of the state."""
    state = model.state_dict()
    return {key: (each.to_local() if isinstance(each, DTensor) else each).cpu().clone() for key, each in state.items()}
