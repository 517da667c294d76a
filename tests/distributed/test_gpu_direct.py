"""``benchmarks/gpu_direct.py`` on a toy and on the CPU, and what it would send on a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2.comm.backends import CollectiveComm
from fsdp2.plan.plan import Route, compile_gather

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu_direct
from gpu_device import device
from gpu_direct import OneBlock, inputs_of
from gpu_groups import real_group
from gpu_subjects import Shape

TOY = Shape(64, 2, 1, 128)


def num_direct(num_ranks: int, nbytes: int) -> int:
    routing = replace(CollectiveComm.routing, direct_min_nbytes=nbytes)
    return len(compile_gather(dict(enumerate(inputs_of(Shape(), num_ranks))), routing).on_route(Route.DIRECT))


def test_thresholds_differ_in_what_travels_direct() -> None:
    """Of nine tensors of 8B's block. On 64 ranks, shards are as small as 128 KiB."""
    found = [[num_direct(ranks, nbytes) for nbytes in gpu_direct.THRESHOLDS.values()] for ranks in gpu_direct.RANKS]
    assert found == [[7, 7, 7, 5, 0], [7, 5, 3, 0, 0]]


def test_each_launch_sends_one_chunk_of_each_tensor_and_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[tuple[int, int]]] = []

    def note(_: object, outputs: list[Tensor], inputs: list[Tensor], **__: Any) -> Any:
        sent.append([(a.numel(), b.numel()) for a, b in zip(outputs, inputs, strict=True)])
        return []

    monkeypatch.setattr(CollectiveComm, "all_gather", note)
    monkeypatch.setattr(CollectiveComm, "reduce_scatter", note)
    with real_group(device("cpu")):
        OneBlock(TOY, torch.device("cpu"), 8, direct_min_nbytes=1024).reduce()
    matrices = [64 * 64, 64 * 64, 128 * 64, 128 * 64, 64 * 128]  # q, out, gate, up, down; k and v have 512 bytes
    bucket = 2 * 64 + 2 * 32 * 64
    gathered, reduced = ([numel for numel, _ in each] for each in sent)
    assert gathered == [*(numel // 8 for numel in matrices), bucket // 8]
    assert reduced == [bucket // 8, *(numel // 8 for numel in matrices)]
    assert all(a == b for each in sent for a, b in each)


def test_costs_become_a_table() -> None:
    costs = gpu_direct.measure("cpu", TOY, rounds=1)
    assert list(costs) == ["8", "64"]
    assert all(cost["gather_ms"] > 0 and cost["reduce_ms"] > 0 for each in costs.values() for cost in each.values())
    table = gpu_direct.table(costs)
    assert [row[0] for row in table.rows] == list(gpu_direct.THRESHOLDS)
    assert "takes several GPUs" in table.note
