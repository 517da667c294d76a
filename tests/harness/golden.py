"""Golden texts that many tests share: one file with a section for each case.

A section starts with ``== name``. ``EXPECTTEST_ACCEPT=1`` writes what was found in its place, with ``-n 0`` only: each
process writes the whole file. Read the difference before keeping it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

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

    def check(self, name: str, found: str) -> None:
        """``found`` is the text of the section ``name``."""
        __tracebackhide__ = True
        if os.environ.get("EXPECTTEST_ACCEPT") and self._texts.get(name) != found:
            self._texts[name] = found
            self._path.parent.mkdir(exist_ok=True)
            self._path.write_text("\n\n".join(f"== {each}\n{text}" for each, text in self._texts.items()) + "\n")
        expected = self._texts.get(name)
        assert found == expected, f"{name}:\n{found}\n\nexpected:\n{expected}"

    def check_names(self, names: Iterable[str]) -> None:
        """There is a section for each of ``names``, and no other one."""
        assert sorted(self._texts) == sorted(names)


def texts_beside(file: str) -> GoldenTexts:
    """Those of the test module ``file``, its ``__file__``: ``golden/<name>.txt`` beside it."""
    path = Path(file)
    return GoldenTexts(path.parent / "golden" / f"{path.stem.removeprefix('test_')}.txt")
