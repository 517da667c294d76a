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

COLUMNS = ["", "published tokens/s", "predicted", "error", "published GiB", "predicted GiB", "fits", "figure"]


def errors(row: blind.Row, found: Sequence[blind.Prediction]) -> list[float]:
    """Of tokens per second, the smallest first: one for each way in which it may have run."""
    return sorted((each.tokens_s / row.tokens_s - 1 for each in found), key=abs)


def blind_table(predicted: Mapping[str, Sequence[blind.Prediction]]) -> Table:
    rows = sorted(blind.ROWS, key=lambda row: (not row.is_open, -abs(errors(row, predicted[row.name])[0])))
    return Table(
        "rows",
        "Published steps, per GPU; the worst first",
        COLUMNS,
        [_cells(row, predicted[row.name]) for row in rows],
        None,
        note=_summary([row for row in rows if not row.is_open], predicted),
    )


def _summary(rows: Sequence[blind.Row], predicted: Mapping[str, Sequence[blind.Prediction]]) -> str:
    """Where a source leaves several ways open, the nearest counts."""
    found = {row.name: [abs(each) for each in errors(row, predicted[row.name])] for row in rows}
    said = [f"{len(blind.ROWS) - len(rows)} rows are open, and not counted."]
    said.append(_of("Time", [each[0] for each in found.values()]))
    said += [
        _of(f"Those {seen.value}", [found[row.name][0] for row in rows if row.seen is seen]) for seen in blind.Seen
    ]
    said.append(_of("If the farthest counted", [each[-1] for each in found.values()]))
    memory = [
        abs(predicted[row.name][0].candidate.result.reserved_nbytes / 2**30 / row.gib - 1)
        for row in blind.ROWS
        if row.gib is not None
    ]
    return " ".join([*said, _of("Memory", memory)])


def _of(name: str, errors: Sequence[float]) -> str:
    shares = ", ".join(f"{sum(each <= limit for each in errors)} within {100 * limit:.0f}%" for limit in (0.1, 0.2))
    median, worst = 100 * statistics.median(errors), 100 * max(errors)
    return f"{name}: {len(errors)} rows, median {median:.0f}%, worst {worst:.0f}%, {shares}."


def _cells(row: blind.Row, found: Sequence[blind.Prediction]) -> list[object]:
    candidates = [each.candidate for each in found]
    fits = ["yes" if each.fits else "tight" if each.may_fit else "no" for each in candidates]
    return [
        row.name,
        f"{row.tokens_s:.0f}",
        _range(f"{each.tokens_s:.0f}" for each in found),
        "open" if row.is_open else _range(f"{100 * (each.tokens_s / row.tokens_s - 1):+.0f}%" for each in found),
        None if row.gib is None else f"{row.gib:.1f}",
        _range(f"{each.result.reserved_nbytes / 2**30:.1f}" for each in candidates),
        _range(fits),
        row.seen.value,
    ]


def _range(texts: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(texts))


def not_predicted_table() -> Table:
    rows = [[name, reason] for name, reason in blind.NOT_PREDICTED.items()]
    return Table("not_predicted", "Published steps that cannot be predicted", ["", "the planner lacks"], rows, None)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    tables = [blind_table(blind.predicted()), not_predicted_table()]
    publish("scale/scale_blind", "Published steps, predicted blind", tables)


if __name__ == "__main__":
    main()
