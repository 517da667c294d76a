"""What ``merge_lora`` refuses, in the words of ``golden/lora.txt``."""

from __future__ import annotations

from pathlib import Path

import pytest

import fsdp2
from tests.harness.golden import texts_beside
from tests.unit.checkpoint.weights import Refused, assert_refused, small

TEXTS = texts_beside(__file__)
REFUSED: Refused = {
    "lora without adapters": lambda folder: fsdp2.checkpoint.merge_lora(small()),
}


@pytest.mark.parametrize("case", REFUSED)
def test_call_is_refused_and_changes_no_file(case: str, tmp_path: Path) -> None:
    assert_refused(TEXTS, case, REFUSED, tmp_path)
