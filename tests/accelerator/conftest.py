"""The device is compiled once, before the first test that needs it."""

from __future__ import annotations

import pytest

from tests.accelerator.build import build, compiler


@pytest.fixture(scope="session", autouse=True)
def _simulated_device() -> None:
    if compiler() is None:
        pytest.skip("no C++ compiler: the simulated accelerator cannot be built")
    build()
