"""The list of defects fits the package: each can be put in, and the tests that shall notice it are there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutations.__main__ import ROOT, first_failure, mutated
from tests.mutations.mutations import MUTATIONS, Mutation

pytestmark = pytest.mark.long


def test_mutations_apply_to_one_place_each_and_leave_python() -> None:
    for number, mutation in enumerate(MUTATIONS):
        text = (ROOT / "fsdp2" / mutation.file).read_text()
        assert text.count(mutation.before) == 1, (number, mutation)
        changed = ast.parse(text.replace(mutation.before, mutation.after))
        assert ast.dump(changed) != ast.dump(ast.parse(text)), (number, mutation)
        assert all((ROOT / "tests" / test).exists() for test in mutation.tests), (number, mutation)


def test_places_are_listed_once() -> None:
    assert len({(each.file, each.before) for each in MUTATIONS}) == len(MUTATIONS)


def test_runner_names_the_test_that_fails_and_restores_the_file(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sum.py").write_text(
        "from total import total\n\ndef test_of_two():\n    assert total(1, 2) == 3\n"
    )
    source = tmp_path / "total.py"
    source.write_text("def total(a, b):\n    return a + b\n")
    mutation = Mutation("total.py", "a + b", "a - b", ("test_sum.py",))
    assert first_failure(tmp_path, mutation.tests, "not long") is None
    with mutated(source, mutation):
        assert first_failure(tmp_path, mutation.tests, "not long") == "tests/test_sum.py::test_of_two"
    assert source.read_text() == "def total(a, b):\n    return a + b\n"
