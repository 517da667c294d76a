"""``@distributed(2, 4)``: a function that runs on every rank of a pool becomes a pytest test."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.harness.pool import CALL_TIMEOUT_S, shared_pool
from tests.harness.selection import WORLD_SIZE, long
from tests.harness.worker import RankContext

__all__ = ["RankContext", "distributed"]


def distributed(
    *world_sizes: int, short: int = 1, timeout_s: float = CALL_TIMEOUT_S, device_type: str = "cpu"
) -> Callable[[Callable[..., Any]], Any]:
    """Run the decorated ``body(ctx, ...)`` on pools of each of ``world_sizes`` ranks on ``device_type``.

    All but the first ``short`` sizes are long (see ``selection``). Further arguments of ``body`` are pytest fixtures or
    parameters; they are pickled on their way to the ranks. The body fails when any rank raises, dies, or does not
    answer within ``timeout_s``.
    """

    def decorate(body: Callable[..., Any]) -> Any:
        @pytest.mark.parametrize(WORLD_SIZE, [*world_sizes[:short], *long(*world_sizes[short:])], ids="{}ranks".format)
        def test(world_size: int, **kwargs: Any) -> None:
            __tracebackhide__ = True
            shared_pool(world_size, device_type).run(body, timeout_s, **kwargs)

        test.body = body  # type: ignore[attr-defined]  # the ranks find it behind the test's name
        test.timeout_s = timeout_s  # type: ignore[attr-defined]
        return as_test_of(body, test, [WORLD_SIZE, *list(inspect.signature(body).parameters)[1:]])

    return decorate


def as_test_of(body: Callable[..., Any], test: Any, arguments: Iterable[str]) -> Any:
    """``test`` by the name of ``body``, with the marks made below a decorator, and with ``arguments`` for pytest."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    test.__signature__ = inspect.Signature([inspect.Parameter(name, keyword) for name in arguments])
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(test, name, getattr(body, name))
    test.pytestmark = [*getattr(body, "pytestmark", []), *getattr(test, "pytestmark", [])]
    return test
