"""``Package.find``: what survives a refactoring, and what its errors tell."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tests.mutations.places import Package

TIDY = """
    class Sums:
        def add(self, a: int, b: int) -> int:
            if a > 0 and b > 0:
                self.seen += 1
                note("ä", a)
            return a + b
"""
REFORMATTED = """
    # é: counts as one column, but as two bytes
    @final
    class Sums:
        def add(self,
                a: int, b: int) -> int:
            '''It adds.'''
            if (a > 0
                    and b > 0):  # both
                self.seen += 1  # counted

                note('ä', (a),
                     )
            return (a
                    + b)
"""


def _package(folder: Path, **files: str) -> Package:
    for name, text in files.items():
        (folder / f"{name}.py").write_bytes(dedent(text).encode())
    return Package(folder)


@pytest.mark.parametrize("text", [TIDY, REFORMATTED], ids=["tidy", "reformatted"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a > 0 and b > 0", "False"),
        ("note('ä', a)", "pass"),
        ("self.seen += 1\nnote('ä', a)", "for _ in range(2):\n    note(a)"),
    ],
)
def test_code_is_found_in_whichever_file_and_back_byte_for_byte(
    tmp_path: Path, text: str, before: str, after: str
) -> None:
    place = _package(tmp_path, empty="", moved=dedent(text).replace("\n", "\r\n")).find("Sums.add", before, after)
    original = place.path.read_bytes()
    with place.mutated(after):
        changed = place.path.read_bytes()
        assert changed.startswith(original[: place.start])
        assert changed.endswith(original[place.end :])
        with pytest.raises(LookupError, match="has no `"):
            Package(tmp_path).find("Sums.add", before, after)
        Package(tmp_path).find("Sums.add", after, before)
    assert place.path.read_bytes() == original


@pytest.mark.parametrize(
    ("place", "before", "message"),
    [
        ("Sum.add", "a + b", r"has no Sum\.add; like it: `Sums\.add`, "),
        ("Sums.add", "a + c", r"Sums\.add has no `a \+ c`; like it: `a \+ b`, "),
        ("Sums.add", "a", r"Sums\.add has `a` 3 times: one\.py:4, one\.py:6, one\.py:7"),
        ("Sums.add#4", "a", r"Sums\.add#4 has `a` 0 times: too few"),
        ("twice", "1", r"twice has `1` 2 times: one\.py:9, two\.py:2"),
    ],
)
def test_errors_tell_what_is_missing_and_what_is_like_it(tmp_path: Path, place: str, before: str, message: str) -> None:
    function = "def twice():\n    return 1\n"
    package = _package(tmp_path, one=dedent(TIDY) + function, two=function)
    with pytest.raises(LookupError, match=message):
        package.find(place, before, "0")


def test_one_of_several_is_named_by_its_number(tmp_path: Path) -> None:
    package = _package(tmp_path, one=TIDY)
    starts = [package.find(f"Sums.add#{number}", "a", "0").start for number in (1, 2, 3)]
    assert starts == sorted(set(starts))
