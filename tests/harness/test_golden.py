"""Golden texts: each belongs to a test."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.harness.golden import texts_beside

TESTS = Path(__file__).parents[1]
FILES = sorted(path.relative_to(TESTS) for path in TESTS.glob("**/golden/*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parents[1].as_posix()}/{path.stem}")
def test_every_text_named_like_a_test_has_one(path: Path) -> None:
    """Names of other kinds are the affair of the module, which calls ``check_names``."""
    module = importlib.import_module(".".join(["tests", *path.parts[:-2], f"test_{path.stem}"]))
    tests = {name.partition("[")[0] for name in texts_beside(str(module.__file__)).names()}
    assert [test for test in tests if test.startswith("test_") and not hasattr(module, test)] == []
