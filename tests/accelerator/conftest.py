"""The device is compiled once, while tests run that do not need it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.accelerator.device import NAME, SOURCE
from tests.harness.cpp import build, compiler

_HERE = Path(__file__).parent


@pytest.hookimpl(trylast=True)  # after `-m` and `-k` have selected
def pytest_collection_modifyitems(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    if not config.option.collectonly and any(_HERE in item.path.parents for item in items):
        threading.Thread(target=_build_quietly, daemon=True).start()


def _build_quietly() -> None:
    with contextlib.suppress(Exception):  # the first test that needs it asks again, and says what is wrong
        build(NAME, SOURCE)


@pytest.fixture(scope="session", autouse=True)
def _simulated_device() -> None:
    if compiler() is None:
        pytest.skip("no C++ compiler: the simulated accelerator cannot be built")
    build(NAME, SOURCE)
