"""Rules and the expressions in them: which are refused, in the words of ``golden/mapping.txt``."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fsdp2.checkpoint.mapping import Concat, Stack, Transpose, WeightRule
from tests.harness.golden import texts_beside
from tests.harness.messages import error_of

TEXTS = texts_beside(__file__)
REFUSED: dict[str, Callable[[], object]] = {
    "placeholders that differ": lambda: WeightRule("{i}.x", Stack("{i}.{j}.x", over="i")),
    "over that is not there": lambda: Stack("x", over="i"),
    "over of two parts": lambda: Stack(["{i}.x", "{i}.y"], over="i"),
    "parts that are text": lambda: Concat("ab"),
    "no parts": lambda: Concat([]),
    "a part that is none": lambda: Stack(["a", 3]),  # type: ignore[list-item]
    "a transposed number": lambda: Transpose(3),  # type: ignore[arg-type]
    "a side that is none": lambda: WeightRule("a", ["b"]),  # type: ignore[arg-type]
    "sizes of other parts": lambda: Concat(["a", "b"], sizes=(1, 2, 3)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rule_is_refused(case: str) -> None:
    TEXTS.check(case, error_of(REFUSED[case]), among=REFUSED)
