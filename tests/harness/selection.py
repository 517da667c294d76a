"""Which tests run when: each suite runs those of the one before, too.

- ``make test``, the short suite: all that is not long.
- ``make test-ci``, in CI, beyond that: all long cases that are not rare.
- ``make clients``: all of ``tests/clients``. CI leaves out what is rare there, too.
- ``make test-exhaustive``: all others, before a release.

Every test function runs in CI at every landing, but for those marked ``@pytest.mark.in_turns``, which take long, for
clients, and for what runs once more on the simulated accelerator. Long, and in turns rare, is:

- what is marked ``@pytest.mark.long``, or is in ``*long(...)`` in a list of parameters;
- all but the first size in ``@distributed(2, 4)``, unless ``short`` names more;
- of a product of parameters on a pool of ranks, the cases that ``covering`` leaves out;
- what ``tests/accelerator/other_suites.py`` runs once more on the simulated accelerator, but for its ``SAMPLE``;
- what tests a tool for developers: ``tests/memory_errors``, ``tests/mutations``, pools of ranks, the script of
  ``make gpu``;
- what runs the pages' examples on ranks: ``make docs`` runs it.

Of these cases, CI runs one share in ``SHARES`` at each landing, another one at the next; ``landing`` says which. Where
all cases of a test are such cases, it always runs the first. It runs one share in ``FEW_SHARES`` of

- the first cases of what is marked ``in_turns``, and of what runs once more on the simulated accelerator;
- all but the first case of a test on a pool of ranks, and all cases of clients, unless the test is marked
  ``@pytest.mark.every_case``, since a planted defect or a behaviour shows in one of the others only.

Long, but never rare, is what is marked ``@pytest.mark.ci``, or is in ``*in_ci(...)``: it takes a second and more, or
notices a defect that nothing else does.
"""

from __future__ import annotations

import datetime
import itertools
import os
import subprocess
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

_DOCS = Path(__file__).parents[1] / "docs"
_MIGRATING = _DOCS / "migrating"  # a test for each row of that page
_CLIENTS = Path(__file__).parents[1] / "clients"
_AGAIN = ("test_distributed_on_device.py", "test_parity_on_device.py")
WORLD_SIZE = "world_size"  # the parameter that ``@distributed`` adds
SHARES = 40
FEW_SHARES = 10
LANDING = "LANDING"  # the environment variable


def long(*values: Any) -> list[Any]:
    """``values`` of a parameter that the short suite leaves out, and CI runs in turns."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


def in_ci(*values: Any) -> list[Any]:
    """``values`` of a parameter that the short suite leaves out, and CI always runs."""
    return [pytest.param(value, marks=pytest.mark.ci) for value in values]


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


def mark_suites(items: Sequence[pytest.Item], number: int) -> None:
    """Mark ``long`` what only CI runs, and ``rare`` what it leaves out at landing ``number``."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        others = _cases_in_turns(cases)
        always = [case for case in cases if case not in others]
        is_of_client = _CLIENTS in cases[0].path.parents
        is_sampled = (is_of_client or pool_of(cases[0])) and cases[0].get_closest_marker("every_case") is None
        short = [case for case in always if case.get_closest_marker("ci") is None]
        num_first = 0 if always else 1
        in_few = (always if is_of_client else short[1:]) if is_sampled else []
        if cases[0].get_closest_marker("in_turns") is not None or cases[0].path.name in _AGAIN:
            in_few = [*in_few, *others[:num_first]]
        for shares, in_turns in ((SHARES, others[num_first:]), (FEW_SHARES, in_few)):
            for case in in_turns:
                if not _has_its_turn(case, number, shares):
                    case.add_marker("rare")
        for case in {*cases} - {*(short[:1] if is_sampled else short)}:
            case.add_marker("long")


def _cases_in_turns(cases: Sequence[pytest.Item]) -> list[pytest.Item]:
    """What is marked, runs the examples of the pages, or is left out by ``covering``."""
    marked = [case for case in cases if case.get_closest_marker("long") is not None]
    others = [case for case in cases if case not in marked]
    if others and (_MIGRATING in others[0].path.parents or (_DOCS in others[0].path.parents and pool_of(others[0]))):
        return list(cases)
    if others and pool_of(others[0]):
        chosen = covering([_parameters(case) for case in others])
        marked += [case for index, case in enumerate(others) if index not in chosen]
    return [case for case in cases if case in marked]


def _has_its_turn(case: pytest.Item, number: int, shares: int) -> bool:
    """Follows from the case's name alone, so that all of pytest's processes choose alike."""
    return number > 0 and zlib.crc32(case.nodeid.encode()) % shares == number % shares


def landing() -> tuple[int, str]:
    """The number of this landing, and what it counts; at landing 0, CI runs what it runs at all of them.

    Commits on the main line, so that the next commit gets the next share; who lands several commits at once passes over
    shares. A shallow clone knows only some of them, and a copy without git none: then the days, so that another share
    runs tomorrow. ``LANDING`` in the environment comes first, to repeat a run.
    """
    if LANDING in os.environ:
        return int(os.environ[LANDING]), f"from {LANDING}"
    if _git("rev-parse", "--is-shallow-repository") == "false":
        return int(_git("rev-list", "--count", "--first-parent", "HEAD")), "commits"
    return datetime.datetime.now(datetime.timezone.utc).toordinal(), "days, for want of the history of commits"


def _git(*arguments: str) -> str:
    """What git prints; nothing where there is no git or no repository."""
    command = ["git", "-C", str(Path(__file__).parents[2]), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def _parameters(item: pytest.Item) -> Mapping[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def pool_of(item: pytest.Item | None) -> int:
    """The size of the pool of ranks that ``item`` runs on; 0 if it does not say."""
    return _parameters(item).get(WORLD_SIZE, 0) if isinstance(item, pytest.Function) else 0
