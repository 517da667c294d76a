"""Session-wide fixtures: the pools of ranks end with the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.pool import close_shared_pools


@pytest.fixture(scope="session", autouse=True)
def _worker_pools() -> Iterator[None]:
    yield
    close_shared_pools()
