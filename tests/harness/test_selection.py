"""Which cases of a test the suites run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.harness import selection
from tests.harness.selection import FEW_SHARES, LANDING, SHARES, covering, landing, mark_suites


def _product(**values: str) -> list[dict[str, str]]:
    return [dict(zip(values, case, strict=True)) for case in itertools.product(*values.values())]


@pytest.mark.parametrize(
    ("values", "num_names", "most"),
    [
        ({"model": "ab", "mesh": "xyz", "dtype": "12"}, 2, 7),
        ({"model": "abc", "mesh": "xy"}, 1, 3),
        ({"model": "abc"}, 1, 3),
        ({}, 0, 1),
    ],
)
def test_pairs_are_kept_or_where_there_are_only_two_parameters_values(
    values: dict[str, str], num_names: int, most: int
) -> None:
    cases = _product(**values, ranks="4")
    kept = [cases[index] for index in covering(cases)]
    assert 0 < len(kept) <= most
    for names in itertools.combinations(values, num_names):
        held, wanted = ({tuple(case[name] for name in names) for case in some} for some in (kept, cases))
        assert held == wanted


TESTS = Path(__file__).parents[1]


@pytest.fixture
def module(request: pytest.FixtureRequest) -> pytest.Module:
    return pytest.Module.from_parent(request.session, path=request.path)


def _cases(module: pytest.Module, number: int, *markers: str, **parameters: int) -> list[pytest.Function]:
    """The cases of one test: ``number`` of them, of a product of three parameters, with ``parameters`` beside."""
    cases = []
    for index in range(number):
        case = pytest.Function.from_parent(module, name=f"test_it[{index}]", callobj=lambda: None)
        values = {"index": index // 4, "mesh": index // 2 % 2, "dtype": index % 2, **parameters}
        case.callspec = SimpleNamespace(params=values)  # type: ignore[assignment]
        for marker in markers:
            case.add_marker(marker)
        cases.append(case)
    return cases


def _without(marker: str, cases: Sequence[pytest.Function]) -> list[int]:
    """The indices of the cases that do not have ``marker``."""
    return [index for index, case in enumerate(cases) if case.get_closest_marker(marker) is None]


def test_landings_in_sequence_run_every_long_case_and_each_runs_the_first(module: pytest.Module) -> None:
    ran = []
    for number in range(1000, 1000 + SHARES):
        cases = _cases(module, 100, "long")
        mark_suites(cases, number)
        assert _without("long", cases) == []
        ran.append(_without("rare", cases))
        assert ran[-1][0] == 0
        assert len(ran[-1]) < 30
    assert set().union(*ran) == set(range(100))
    assert sum(map(len, ran)) == 100 + SHARES - 1
    cases = _cases(module, 100, "long")
    mark_suites(cases, 0)
    assert _without("rare", cases) == [0]


@pytest.mark.parametrize(
    ("path", "markers"),
    [
        ("docs/test_train_example.py", ["long", "in_turns"]),
        ("accelerator/test_parity_on_device.py", ["long"]),
        ("clients/test_peft.py", []),
    ],
)
def test_first_case_of_what_takes_long_runs_at_one_landing_of_few(
    module: pytest.Module, path: str, markers: list[str]
) -> None:
    module.path = TESTS / path
    suites = [_cases(module, 1, *markers, world_size=2) for _ in range(FEW_SHARES)]
    for number, cases in enumerate(suites, start=1):
        mark_suites(cases, number)
    assert [_without("rare", cases) for cases in suites].count([0]) == 1


def test_short_suite_runs_one_case_on_a_pool_and_ci_those_that_cover_in_turns(module: pytest.Module) -> None:
    numbers = range(1, 1 + SHARES)
    suites = [_cases(module, 16, world_size=2) for _ in numbers]
    for cases, number in zip(suites, numbers, strict=True):
        mark_suites(cases, number)
        assert _without("long", cases) == [0]
    in_ci = [set(_without("rare", cases)) for cases in suites]
    assert set.intersection(*in_ci) == {0}
    assert set().union(*in_ci[:FEW_SHARES]) >= set(covering([case.callspec.params for case in suites[0]]))
    assert set().union(*in_ci) == set(range(16))


def test_marks_keep_every_case_that_covers_short_or_in_ci(module: pytest.Module) -> None:
    short, in_ci = _cases(module, 16, "every_case", world_size=2), _cases(module, 16, "ci", world_size=2)
    for cases in (short, in_ci):
        mark_suites(cases, 0)
    covers = covering([case.callspec.params for case in short])
    assert _without("long", short) == covers
    assert _without("long", in_ci) == []
    assert set(covers) <= set(_without("rare", in_ci))


def test_tests_on_no_pool_are_short_as_a_whole(module: pytest.Module) -> None:
    cases = _cases(module, 16)
    mark_suites(cases, 0)
    assert _without("long", cases) == list(range(16))


def test_landing_is_told_or_counted_in_commits_or_else_in_days(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LANDING, "17")
    assert landing()[0] == 17
    monkeypatch.delenv(LANDING)
    answers = {"rev-parse": "false", "rev-list": "123"}
    monkeypatch.setattr(selection, "_git", lambda command, *_: answers[command])
    assert landing() == (123, "commits")
    for shallow_or_absent in ("true", ""):
        answers["rev-parse"] = shallow_or_absent
        number, counted = landing()
        assert number > 700_000
        assert counted.startswith("days")
