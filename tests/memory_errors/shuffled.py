"""A pytest plugin for ``hunt``: tests in a drawn order, those on pools of one size together, and the time of ranks."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from tests.harness.selection import pool_of

SEED, TALLY, SECONDS = "--shuffle-seed", "--tally", "--seconds"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hunt")
    group.addoption(SEED, type=int, required=True)
    group.addoption(TALLY, type=Path, required=True)
    group.addoption(SECONDS, type=float, required=True, help="begin no test after this time")


class _Tally:
    """Counts what ran, and writes it when the session ends, which it does when the time is over."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path = path
        self._deadline = time.monotonic() + seconds
        self._world_sizes: dict[str, int] = {}
        self.num_tests = 0
        self.rank_seconds = 0.0

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._world_sizes[item.nodeid] = pool_of(item)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.num_tests += 1
            self.rank_seconds += report.duration * self._world_sizes.get(report.nodeid, 0)

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if time.monotonic() > self._deadline:
            item.session.shouldstop = "the time is over"

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps({"tests": self.num_tests, "rank_seconds": self.rank_seconds}))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Tally(config.getoption(TALLY), config.getoption(SECONDS)))


@pytest.hookimpl(trylast=True)  # behind the order of tests/conftest.py
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    random.Random(config.getoption(SEED)).shuffle(items)
    items.sort(key=pool_of)
