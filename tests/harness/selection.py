"""What is long: ``make test`` leaves it out, ``make test-all`` runs it too.

Three things are, and each has a test that is not, and that fails for the same reason:

- what is marked: ``@pytest.mark.long``, or ``*long(...)`` in a list of parameters;
- all but the first size in ``@distributed(2, 4)``, unless ``short`` names more;
- of a product of parameters on a pool of ranks, the cases that ``covering`` leaves out.

What ``tests/accelerator/other_suites.py`` runs once more on the simulated accelerator is long, but for its ``SAMPLE``.

What tests a tool for developers is long as a whole, too: ``tests/memory_errors``, ``tests/mutations``, pools of ranks,
and the script of ``make gpu``.

What runs the pages' examples on ranks is long as a whole: ``make docs`` runs it, and what they show has tests
elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

_DOCS = Path(__file__).parents[1] / "docs"
_MIGRATING = _DOCS / "migrating"  # a test for each row of that page
WORLD_SIZE = "world_size"  # the parameter that ``@distributed`` adds


def long(*values: Any) -> list[Any]:
    """``values`` of a parameter that the short suite leaves out."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


def covering(cases: Sequence[Mapping[str, Any]]) -> list[int]:
    """The cases that hold each pair of values that ``cases`` hold; each value, where there are only two parameters.

    Cases are the values of parameters by name, and told apart by identity. Returns indices, in the order of ``cases``.
    """
    varied = [name for name in cases[0] if len({id(case[name]) for case in cases}) > 1]
    strength = 2 if len(varied) > 2 else min(1, len(varied))
    held = [
        {tuple((name, id(case[name])) for name in names) for names in itertools.combinations(varied, strength)}
        for case in cases
    ]
    missing = set().union(*held)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda index: len(held[index] & missing))  # the first one of equals
        chosen.append(best)
        missing -= held[best]
    return sorted(chosen)


def mark_long_cases(items: Iterable[pytest.Item]) -> None:
    """Mark what ``covering`` leaves out of each test on a pool of ranks, and the examples of the pages."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("long") is not None:
            continue
        if _MIGRATING in item.path.parents or (_DOCS in item.path.parents and pool_of(item)):
            item.add_marker("long")
        elif isinstance(item, pytest.Function) and pool_of(item):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        chosen = set(covering([_parameters(case) for case in cases]))
        for index, case in enumerate(cases):
            if index not in chosen:
                case.add_marker("long")


def _parameters(item: pytest.Function) -> Mapping[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def pool_of(item: pytest.Item | None) -> int:
    """The size of the pool of ranks that ``item`` runs on; 0 if it does not say."""
    return _parameters(item).get(WORLD_SIZE, 0) if isinstance(item, pytest.Function) else 0
