"""The list of defects fits the package: each can be put in, and the tests that shall notice it are there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutations.__main__ import ROOT, files_of_tests, first_failure
from tests.mutations.mutations import MUTATIONS
from tests.mutations.places import Package

pytestmark = pytest.mark.long


def test_mutations_apply_to_one_place_each_and_leave_python() -> None:
    package, found = Package(ROOT / "fsdp2"), set()
    for number, mutation in MUTATIONS.items():
        place = package.find(mutation.place, mutation.before, mutation.after)
        changed = ast.parse(place.replaced(mutation.after))
        assert ast.dump(changed) != ast.dump(ast.parse(place.path.read_bytes())), (number, mutation)
        assert all((ROOT / "tests" / test).exists() for test in files_of_tests(number)), (number, mutation)
        found.add(place)
    assert len(found) == len(MUTATIONS)
    assert sorted(MUTATIONS) == list(range(len(MUTATIONS)))


def test_runner_names_the_test_that_fails_and_restores_the_file(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sum.py").write_text(
        "from total import total\n\ndef test_of_two():\n    assert total(1, 2) == 3\n"
    )
    source = tmp_path / "total.py"
    source.write_text("def total(a, b):\n    return a + b\n")
    assert first_failure(tmp_path, ("test_sum.py",), "not long") is None
    with Package(tmp_path).find("total", "a + b", "a - b").mutated("a - b"):
        assert first_failure(tmp_path, ("test_sum.py",), "not long") == "tests/test_sum.py::test_of_two"
    assert source.read_text() == "def total(a, b):\n    return a + b\n"
