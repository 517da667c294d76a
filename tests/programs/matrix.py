"""The page's matrix: for each two features, how their pairs of values were compared."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.programs.check import Outcome
from tests.programs.pairs import Pair, pairs_of

PAGE = Path(__file__).parents[2] / "docs" / "programs.md"
BEGIN, END = "<!-- matrix -->\n", "<!-- /matrix -->"
# From the best to the worst: what a pair of values got in its best program, or that it is in none.
SIGNS = {Outcome.EQUAL: "=", Outcome.TORCH_REFUSES: "u", Outcome.TORCH_HANGS: "u", Outcome.KNOWN: "k"}
_ORDER = "=uk-x"


def signs(rows: Iterable[tuple[Mapping[str, Any], Outcome]]) -> dict[Pair, str]:
    """The sign of each pair of values that ran."""
    found: dict[Pair, str] = {}
    for row, outcome in rows:
        sign = SIGNS.get(outcome, "-")
        for pair in pairs_of(row):
            found[pair] = min(found.get(pair, sign), sign, key=_ORDER.index)
    return found


def matrix(found: Mapping[Pair, str], values: Mapping[str, tuple[Any, ...]]) -> str:
    """A line for each feature, with the worst sign of its pairs with each feature of an earlier line."""
    names = list(values)
    width = max(map(len, names))
    lines = [f"{'':{width}}    " + "".join(str(index % 10) for index in range(len(names)))]
    for index, name in enumerate(names):
        worst = (
            max((found.get(frozenset(pair), "x") for pair in _pairs(name, other, values)), key=_ORDER.index)
            for other in names[:index]
        )
        lines.append(f"{name:{width}} {index:2} {''.join(worst)}".rstrip())
    return "\n".join(lines) + "\n"


def _pairs(first: str, second: str, values: Mapping[str, tuple[Any, ...]]) -> Iterable[tuple[Any, ...]]:
    of_first, of_second = ([(name, value) for value in values[name]] for name in (first, second))
    return itertools.product(of_first, of_second)


def write(text: str) -> None:
    """Put ``text`` into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}```text\n{text}```\n{END}{after}")
