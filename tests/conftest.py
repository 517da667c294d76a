"""What all tests share: which are long, in which order they run, and when the pools of ranks end."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.selection import LANDING, landing, mark_suites, pool_of

_ACCELERATOR = Path(__file__).parent / "accelerator"
_CLIENTS = Path(__file__).parent / "clients"
_NUMBER, _COUNTED = landing()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make clients` names the folder; all other runs leave it out, whether clients are installed or not."""
    is_named = any((config.invocation_params.dir / name).is_relative_to(_CLIENTS) for name in config.args)
    return True if collection_path == _CLIENTS and not is_named else None


def pytest_configure() -> None:
    os.environ[LANDING] = str(_NUMBER)  # the workers of pytest-xdist inherit it


def pytest_report_header() -> str:
    return f"landing {_NUMBER} ({_COUNTED}); {LANDING}={_NUMBER} repeats what it chooses of the cases that run in turns"


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_suites(items, _NUMBER)
    # Short tests last, else one process waits for another: those on two ranks. The accelerator is compiled meanwhile.
    items.sort(key=lambda item: (pool_of(item) == 2, pool_of(item), _ACCELERATOR in item.path.parents))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    # Ranks that wait still wake up: those of three pools took a tenth of two cores.
    if pool_of(item) != pool_of(nextitem):
        _close_pools()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Compares a text with that of the test: see ``tests/harness/golden.py``."""
    from tests.harness.golden import texts_beside  # imports torch

    return functools.partial(texts_beside(str(request.path)).check, request.node.name)


@pytest.fixture(scope="session", autouse=True)
def _worker_pools() -> Iterator[None]:
    yield
    _close_pools()


def _close_pools() -> None:
    from tests.harness.pool import close_shared_pools  # imports torch: the process that only distributes tests need not

    close_shared_pools()
