"""Claim: steps that others published, and that nothing was fitted to, are predicted within 10% in the median.

Each row is a published step on A100s, H100s, H200s or B200s, predicted with ``fsdp2.planner.plan`` from what its source
says: ``blind.py`` has the sources. The worst rows come first.

    python benchmarks/scale/scale_blind.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
from benchmarks.common import Table, publish
from benchmarks.scale import blind
from fsdp2.planner import Candidate

COLUMNS = ["", "published tokens/s", "predicted", "error", "published GiB", "predicted GiB", "fits"]


def nearest(row: blind.Row, found: Sequence[Candidate]) -> float:
    """The error of time of the prediction that is nearest, where a source leaves several open."""
    return min((each.result.tokens_per_second / row.tokens_s - 1 for each in found), key=abs)


def blind_table(predicted: Mapping[str, Sequence[Candidate]]) -> Table:
    rows = sorted(blind.ROWS, key=lambda row: -abs(nearest(row, predicted[row.name])))
    errors = [abs(nearest(row, predicted[row.name])) for row in rows]
    note = (
        f"Error of the nearest: {100 * statistics.median(errors):.0f}% in the median, "
        f"{100 * statistics.fmean(each <= 0.1 for each in errors):.0f}% of the rows within 10%, "
        f"{100 * statistics.fmean(each <= 0.2 for each in errors):.0f}% within 20%."
    )
    return Table("rows", "Published steps, per GPU; the worst first", COLUMNS, _cells(rows, predicted), None, note=note)


def _cells(rows: Sequence[blind.Row], predicted: Mapping[str, Sequence[Candidate]]) -> list[list[object]]:
    cells: list[list[object]] = []
    for row in rows:
        found = predicted[row.name]
        rates = [each.result.tokens_per_second for each in found]
        errors = [f"{100 * (rate / row.tokens_s - 1):+.0f}%" for rate in rates]
        gib = [f"{each.result.reserved_nbytes / 2**30:.1f}" for each in found]
        fits = ["yes" if each.fits else "tight" if each.may_fit else "no" for each in found]
        shown = [_range(f"{rate:.0f}" for rate in rates), _range(errors)]
        published_gib = None if row.gib is None else f"{row.gib:.1f}"
        cells.append([row.name, f"{row.tokens_s:.0f}", *shown, published_gib, _range(gib), _range(fits)])
    return cells


def _range(texts: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(texts))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    publish("scale/scale_blind", "Published steps, predicted blind", [blind_table(blind.predicted())])


if __name__ == "__main__":
    main()
