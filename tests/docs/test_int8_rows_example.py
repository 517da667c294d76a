"""The example of all-gather hooks works with ``fully_shard``, and so do the hooks that the page shows."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import fsdp2
from fsdp2.testing import check_all_gather_extension
from tests.docs.markdown import ROOT, read
from tests.harness.distributed import RankContext, distributed


def _rows_class() -> Any:
    spec = importlib.util.spec_from_file_location("int8_rows", ROOT / "docs" / "examples" / "int8_rows.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["int8_rows"] = module  # where pickle looks for the class
    return module.Int8Rows


def _class_with_hooks_of_the_page() -> Any:
    (block,) = (b for b in read(ROOT / "docs" / "guide" / "extensions.md").blocks if "class Int8Rows" in b.text)
    namespace: dict[str, Any] = {"torch": torch}
    exec(block.text, namespace)
    hooks = {name: hook for name, hook in vars(namespace["Int8Rows"]).items() if name.startswith("fsdp_")}
    assert set(hooks) == {"fsdp_pre_all_gather", "fsdp_post_all_gather"}
    cls = _rows_class()
    for name, hook in hooks.items():
        setattr(cls, name, hook)
    return cls


def _rounded(full: torch.Tensor) -> torch.Tensor:
    scales = full.abs().amax(dim=1, keepdim=True) / 127
    return (full / scales).round() * scales


def test_the_example_can_be_sharded() -> None:
    check_all_gather_extension(_rows_class(), shapes=[(8, 6), (5, 3), (2, 4)], value=_rounded)


def test_the_hooks_of_the_page_are_enough_with_the_rest_of_the_example() -> None:
    check_all_gather_extension(_class_with_hooks_of_the_page(), shapes=[(8, 6), (5, 3), (2, 4)], value=_rounded)


@distributed(2)
def test_a_checkpoint_of_the_example_is_loaded(ctx: RankContext, tmp_path: Path) -> None:
    make = _rows_class()

    def layer(value: float) -> nn.Linear:
        made = nn.Linear(6, 5, bias=False)
        made.weight = nn.Parameter(make(torch.arange(30.0).view(5, 6) + value))
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
    layer.weight = nn.Parameter(_rows_class()(exact.clone()))
    fsdp2.fully_shard(layer, mesh=ctx.mesh_1d())
    x = torch.eye(6)
    output = layer(x)
    torch.testing.assert_close(output, _rounded(exact).t())
    assert not torch.equal(output, exact.t())
    output.sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.5).step()
    shard = layer.weight.to_local()._data  # type: ignore[operator]
    torch.testing.assert_close(shard, exact.chunk(2)[ctx.rank] - 0.5)
