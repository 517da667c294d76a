"""Golden texts that many tests share: one file with a section for each case.

Tests ask the fixture ``golden``, and those on ranks are made by ``golden_on_ranks``. A section starts with ``== name``,
which is that of the test with its parameters. ``EXPECTTEST_ACCEPT=1`` writes what was found in its
place, with ``-n 0`` only: each process writes the whole file. Read the difference before keeping it.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.harness.alone import on_one_rank
from tests.harness.distributed import as_test_of
from tests.harness.pool import shared_pool

Check = Callable[[str], None]  # what the fixture is

_HEAD = re.compile(r"^== (.*)$", re.MULTILINE)


class GoldenTexts:
    """The sections of the file at ``path``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        _, *parts = _HEAD.split(path.read_text() if path.exists() else "")
        self._texts = {name: text.strip("\n") for name, text in zip(parts[::2], parts[1::2], strict=True)}

    def of(self, name: str) -> str:
        """The text of the section ``name``."""
        return self._texts[name]

    def check(self, name: str, found: str, among: Iterable[str] = ()) -> None:
        """``found`` is the text of the section ``name``. ``among``: there are sections for these, and no others."""
        __tracebackhide__ = True
        if os.environ.get("EXPECTTEST_ACCEPT") and self._texts.get(name) != found:
            self._texts[name] = found
            self._path.parent.mkdir(exist_ok=True)
            written = self._path.with_suffix(f".{os.getpid()}")  # at once: other ranks may read it meanwhile
            written.write_text("\n\n".join(f"== {each}\n{text}" for each, text in self._texts.items()) + "\n")
            written.replace(self._path)
        expected = self._texts.get(name)
        assert found == expected, f"{name}:\n{found}\n\nexpected:\n{expected}"
        if among and not os.environ.get("EXPECTTEST_ACCEPT"):
            self.check_names(among)

    def names(self) -> list[str]:
        return list(self._texts)

    def check_names(self, names: Iterable[str]) -> None:
        """There is a section for each of ``names``, and no other one."""
        assert sorted(self._texts) == sorted(names)


@functools.cache
def texts_beside(file: str) -> GoldenTexts:
    """Those of the test module ``file``, its ``__file__``: ``golden/<name>.txt`` beside it."""
    path = Path(file)
    return GoldenTexts(path.parent / "golden" / f"{path.stem.removeprefix('test_')}.txt")


def same_on_all_ranks(body: Callable[..., Any], world_size: int = 2, **kwargs: Any) -> Any:
    """What ``body(ctx, **kwargs)`` returns on every rank."""
    __tracebackhide__ = True
    first, *others = shared_pool(world_size).run(body, **kwargs)
    assert all(other == first for other in others), f"the ranks differ: {[first, *others]}"
    return first


def golden_on_ranks(
    world_size: int = 2, *, run: Callable[..., str] = same_on_all_ranks
) -> Callable[[Callable[..., str]], Any]:
    """``body(ctx, ...)`` becomes a test: on every rank, it returns the golden text."""

    def decorate(body: Callable[..., str]) -> Any:
        def test(golden: Check, **kwargs: Any) -> None:
            __tracebackhide__ = True
            golden(run(body, world_size, **kwargs))

        as_test_of(body, test, ["golden", *list(inspect.signature(body).parameters)[1:]])
        test.on_ranks = body  # type: ignore[attr-defined]
        body.__qualname__ += ".on_ranks"  # where the ranks find it
        return test

    return decorate


golden_alone = functools.partial(golden_on_ranks, run=on_one_rank)
