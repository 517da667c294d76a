"""``with`` blocks whose entry and exit run as part of the runtime, while their body remains user code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from types import TracebackType
from typing import ParamSpec

from fsdp2.runtime import door

_P = ParamSpec("_P")


class _Block(AbstractContextManager[None]):
    def __init__(self, around: AbstractContextManager[None]) -> None:
        self._around = around

    @door.entry
    def __enter__(self) -> None:
        self._around.__enter__()

    @door.entry
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._around.__exit__(kind, error, traceback)


def entered_and_left(
    make: Callable[_P, AbstractContextManager[None]],
) -> Callable[_P, AbstractContextManager[None]]:
    """Decorate a ``contextmanager`` so that the compiler and the user's modes see neither its entry nor its exit."""

    @wraps(make)
    def block(*args: _P.args, **kwargs: _P.kwargs) -> AbstractContextManager[None]:
        return _Block(make(*args, **kwargs))

    return door.entry(block)
