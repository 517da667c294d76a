"""torchft: replica groups that come and go, whose ranks hold shards. ``tests/faults/replicas.py`` kills them; here are
two of its kills, for both ways to take the mean over groups, and the lines of docs/advanced/torchft.md."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.docs.markdown import ROOT, programs
from tests.faults.replica import batch, built
from tests.faults.replicas import free_port, killed, summary
from tests.harness.selection import long

PAGE = ROOT / "docs" / "advanced" / "torchft.md"
NO_TORCHFT = "torchft is not installed: pip install -e '.[clients]'"


# The quorum beside training is torchft's default; there, its thread makes state dicts in the middle of passes.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", long("mesh, async", "hook, sync"))
def test_a_group_that_was_killed_comes_back_with_the_state_of_the_others(case: str) -> None:
    pytest.importorskip("torchft", reason=NO_TORCHFT)
    way, quorum = case.split(", ")
    campaign = killed("fsdp2", way, quorum, seed=5, num_kills=2)
    found = summary(campaign)
    assert found["holds"], (campaign.kills, found)
    assert len(campaign.kills) >= 2


def _train(rank: int, group: int, port: int, lighthouse: str, folder: Path) -> None:
    """One rank of a group runs the lines of the page for three steps, and saves its shards."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(TORCHFT_LIGHTHOUSE=lighthouse)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    namespace: dict[str, Any] = {"__name__": "example"}
    for block in dict(programs(PAGE))["HSDP"]:
        exec(compile("\n" * (block.line - 1) + block.text, str(PAGE), "exec"), namespace)
    model = built(0)
    namespace["train"](model, [batch(0, group, rank, step) for step in range(3)])
    shards = [param.to_local() for param in model.parameters() if isinstance(param, DTensor)]
    torch.save(shards, folder / f"{group}_{rank}.pt")
    os._exit(0)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_lines_of_the_page_give_both_groups_the_same_model(tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason=NO_TORCHFT)
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=1000)
    address = f"http://localhost:{lighthouse.address().rsplit(':', 1)[1]}"
    context = multiprocessing.get_context("spawn")
    ports = [free_port(), free_port()]
    ranks = [
        context.Process(target=_train, args=(rank, group, ports[group], address, tmp_path))
        for group in range(2)
        for rank in range(2)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    lighthouse.shutdown()
    assert [each.exitcode for each in ranks] == [0] * 4
    for rank in range(2):
        first, second = (torch.load(tmp_path / f"{group}_{rank}.pt") for group in range(2))
        assert len(first) == 12
        assert all(map(torch.equal, first, second))
