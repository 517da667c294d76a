"""The example of all-gather hooks works with ``fully_shard``, and so do the hooks that the page shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import fsdp2
from docs.examples.int8_rows import Int8Rows
from fsdp2.testing import check_all_gather_extension
from tests.docs.markdown import ROOT, read
from tests.harness.distributed import RankContext, distributed


def _rounded(full: torch.Tensor) -> torch.Tensor:
    scales = full.abs().amax(dim=1, keepdim=True) / 127
    return (full / scales).round() * scales


@pytest.mark.parametrize("takes_the_page", [False, True])
def test_the_example_can_be_sharded(takes_the_page: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page shows the same class without types: its methods work in the class of the example."""
    if takes_the_page:
        (block,) = (b for b in read(ROOT / "docs" / "guide" / "extensions.md").blocks if "class Int8Rows" in b.text)
        namespace: dict[str, Any] = {"torch": torch, "nn": nn}
        exec(block.text.partition("torch.serialization")[0], namespace)
        members = {name: each for name, each in vars(namespace["Int8Rows"]).items() if name in vars(Int8Rows)}
        methods = {name: each for name, each in members.items() if name not in ("__module__", "__doc__", "__dict__")}
        assert {"fsdp_pre_all_gather", "fsdp_post_all_gather", "__torch_dispatch__", "__new__"} <= methods.keys()
        namespace["Int8Rows"] = Int8Rows
        for name, each in methods.items():
            monkeypatch.setattr(Int8Rows, name, each)
        monkeypatch.delattr(Int8Rows, "fsdp_should_release_all_gather_outputs_after_post_all_gather")
    check_all_gather_extension(Int8Rows, shapes=[(8, 6), (5, 3), (2, 4)], value=_rounded)


@distributed(2)
def test_a_checkpoint_of_the_example_is_loaded(ctx: RankContext, tmp_path: Path) -> None:
    def layer(value: float) -> nn.Linear:
        made = nn.Linear(6, 5, bias=False)
        made.weight = nn.Parameter(Int8Rows(torch.arange(30.0).view(5, 6) + value))
        return fsdp2.fully_shard(made, mesh=ctx.mesh_1d())

    dcp.save(layer(0.0).state_dict(), checkpoint_id=tmp_path / "checkpoint")
    loaded = layer(7.0)
    dcp.load(loaded.state_dict(), checkpoint_id=tmp_path / "checkpoint")
    shard = loaded.weight.to_local()._data  # type: ignore[operator]
    torch.testing.assert_close(shard, torch.arange(30.0).view(5, 6).chunk(2)[ctx.rank])


@distributed(2)
def test_compute_reads_rounded_weights_and_the_optimizer_steps_exact_ones(ctx: RankContext) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 5, bias=False)
    exact = layer.weight.detach().clone()
    layer.weight = nn.Parameter(Int8Rows(exact.clone()))
    fsdp2.fully_shard(layer, mesh=ctx.mesh_1d())
    x = torch.eye(6)
    output = layer(x)
    torch.testing.assert_close(output, _rounded(exact).t())
    assert not torch.equal(output, exact.t())
    output.sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.5).step()
    shard = layer.weight.to_local()._data  # type: ignore[operator]
    torch.testing.assert_close(shard, exact.chunk(2)[ctx.rank] - 0.5)
