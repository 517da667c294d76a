"""The engine of the example computes with the weights that the trainer has, after each update, over both channels."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.examples import engine_weights
from tests.docs.launch import ROOT, forked_ranks
from tests.harness.distributed import RankContext, distributed


@pytest.mark.parametrize("over", ["group", "memory"])
@distributed(4)
def test_the_engine_has_the_weights_of_the_trainer(ctx: RankContext, over: str) -> None:
    far = engine_weights.run(over)
    assert len(far) == (3 if ctx.rank in engine_weights.TRAINERS else 0)
    assert all(each < 0.1 for each in far), far


@pytest.mark.long
def test_it_runs_as_its_first_lines_say() -> None:
    script: Path = ROOT / "docs" / "examples" / "engine_weights.py"
    done = forked_ranks(script, ["--over", "memory"], num_ranks=4)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the engine, in bf16, is off by ") == 3, done.stdout
