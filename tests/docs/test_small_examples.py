"""The small examples do what they say: the average of weights, the weights of an engine, a class with hooks.

For the hooks, so does the class that the page shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import fsdp2
from docs.examples import ema, engine_weights
from docs.examples.int8_rows import Int8Rows
from fsdp2.testing import check_all_gather_extension
from tests.distributed.changes import step_and_zero_all, whole
from tests.distributed.support import sharded, step
from tests.docs.launch import forked_ranks
from tests.docs.markdown import ROOT, read
from tests.harness.distributed import RankContext, distributed


@distributed(2)
def test_the_average_is_that_of_the_whole_weights(ctx: RankContext) -> None:
    model = sharded(ctx)
    average, expected = ema.ShardedEMA(model, decay=0.75), whole(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        step(model, seed)
        step_and_zero_all([optimizer])
        average.update(model)
        expected = {name: torch.lerp(expected[name], new, 0.25) for name, new in whole(model).items()}
    torch.testing.assert_close(whole(average.model), expected)


@pytest.mark.long
@distributed(2)
def test_the_average_is_better_than_the_weights(ctx: RankContext) -> None:
    of_weights, of_average = ema.run()
    assert of_average < 0.9 * of_weights


@pytest.mark.parametrize("over", ["group", "memory"])
@distributed(4)
def test_the_engine_has_the_weights_of_the_trainer(ctx: RankContext, over: str) -> None:
    far = engine_weights.run(over)
    assert len(far) == (3 if ctx.rank in engine_weights.TRAINERS else 0)
    assert all(each < 0.1 for each in far), far


@pytest.mark.long
def test_the_engine_runs_as_its_first_lines_say() -> None:
    done = forked_ranks(ROOT / "docs" / "examples" / "engine_weights.py", ["--over", "memory"], num_ranks=4)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the engine, in bf16, is off by ") == 3, done.stdout


def _rounded(full: Tensor) -> Tensor:
    scales = full.abs().amax(dim=1, keepdim=True) / 127
    return (full / scales).round() * scales


@pytest.mark.parametrize("takes_the_page", [False, True])
def test_the_class_with_hooks_can_be_sharded(takes_the_page: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_layer_with_hooks_computes_steps_and_is_loaded(ctx: RankContext, tmp_path: Path) -> None:
    """Compute reads rounded weights; the optimizer steps exact ones, and a checkpoint has those."""

    def layer(exact: Tensor) -> Any:
        made = nn.Linear(6, 5, bias=False)
        made.weight = nn.Parameter(Int8Rows(exact.clone()))
        return fsdp2.fully_shard(made, mesh=ctx.mesh_1d())

    exact = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    trained, loaded = layer(exact), layer(torch.ones(5, 6))
    output = trained(torch.eye(6))
    torch.testing.assert_close(output, _rounded(exact).t())
    assert not torch.equal(output, exact.t())
    output.sum().backward()
    torch.optim.SGD(trained.parameters(), lr=0.5).step()
    dcp.save(trained.state_dict(), checkpoint_id=tmp_path / "checkpoint")
    dcp.load(loaded.state_dict(), checkpoint_id=tmp_path / "checkpoint")
    for each in (trained, loaded):
        torch.testing.assert_close(each.weight.to_local()._data, exact.chunk(2)[ctx.rank] - 0.5)
