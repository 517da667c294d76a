"""``make`` without a target says what it can do."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from tests.docs.markdown import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def test_help_is_the_default_and_lists_every_target() -> None:
    rules = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shown = subprocess.run(
        ["make", "-C", str(ROOT), "--no-print-directory"], capture_output=True, text=True, check=True
    )
    listed = re.findall(r"^  make ([a-z-]+) +\S", shown.stdout, re.MULTILINE)
    assert set(listed) == set(rules)
    assert {"train", "test", "lint", "bench", "bench-check", "docs"} <= set(listed)
