"""Runs benchmarks again and prints whose ratios differ from the committed ones by more than the noise.

Exits with 0 whatever got worse, since time is no matter of right and wrong; with 1 where a script failed.

    python benchmarks/check.py [SCRIPT ...]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # started by its path, a script sees only its own folder
from benchmarks.common import RESULTS, machine, number, table
from benchmarks.run import benchmarks, name_of, named, run

Record = Mapping[str, Any]


class Verdict(Enum):
    WORSE = "worse by more than the noise"
    BETTER = "better by more than the noise"
    MISSING = "no longer measured"
    NEW = "not in the committed results"
    SAME = "within the noise"


@dataclass(frozen=True)
class Comparison:
    """A row's ratio in the committed results and now; None where it has none."""

    row: str
    before: float | None
    after: float | None
    noise: float

    @property
    def change(self) -> float:
        """Relative; positive is worse."""
        assert self.before is not None
        assert self.after is not None
        if self.before == self.after:
            return 0.0
        return self.after / self.before - 1 if self.before else math.inf

    @property
    def verdict(self) -> Verdict:
        if self.before is None or self.after is None:
            return Verdict.NEW if self.before is None else Verdict.MISSING
        if abs(self.change) <= self.noise:
            return Verdict.SAME
        return Verdict.WORSE if self.change > 0 else Verdict.BETTER

    @property
    def cells(self) -> list[object]:
        before, after = ("" if value is None else f"{value:.4g}" for value in (self.before, self.after))
        is_change = self.before is not None and self.after is not None
        return [self.row, before, after, f"{self.change:+.2%}" if is_change else "", f"{self.noise:.0%}"]


def compare(before: Record, after: Record) -> Iterator[Comparison]:
    """The rows of all tables of one script that have a ratio in either record."""
    old, new = ({table["name"]: table for table in record["tables"]} for record in (before, after))
    for name in [*new, *(name for name in old if name not in new)]:
        was, now = _ratios(old.get(name)), _ratios(new.get(name))
        noise = new.get(name, old.get(name, {}))["noise"]
        for row in [*now, *(row for row in was if row not in now)]:
            yield Comparison(f"{after['script']}.{name}: {row}", was.get(row), now.get(row), noise)


def report(comparisons: Sequence[Comparison]) -> str:
    """What differs, the worst first; and how much does not."""
    lines = []
    for verdict in Verdict:
        found = [comparison for comparison in comparisons if comparison.verdict is verdict]
        if verdict is Verdict.SAME:
            lines.append(f"{len(found)} of {len(comparisons)} rows are within the noise.")
        elif found:
            if verdict in (Verdict.WORSE, Verdict.BETTER):
                found.sort(key=lambda comparison: -abs(comparison.change))
            lines.append(table([verdict.value, "before", "after", "change", "noise"], [each.cells for each in found]))
    return "\n".join(lines)


def differences(before: Record, after: Record) -> list[str]:
    """Whatever else than the code may have changed the figures of a script."""
    was, now = machine(before), machine(after)
    if was == now:
        return []
    remark = f"{after['script']}: not the machine and torch of the committed results; ratios are compared all the same."
    return [remark, f"  committed: {was}", f"  this run:  {now}"]


def _ratios(published: Record | None) -> dict[str, float]:
    """By row, where it is a number."""
    if published is None or published["ratio"] is None:
        return {}
    index = published["columns"].index(published["ratio"])
    return {row[0]: number(row[index]) for row in published["rows"] if math.isfinite(number(row[index]))}


def _read(path: Path) -> Record | None:
    return json.loads(path.read_text()) if path.exists() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", type=named, help="all of them by default")
    scripts = parser.parse_args().scripts or benchmarks()
    comparisons: list[Comparison] = []
    remarks: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        succeeded = run(scripts, results=Path(folder))
        for script in scripts:
            name = name_of(script)
            before, after = (_read(path / f"{name}.json") for path in (RESULTS, Path(folder)))
            if after is None:
                remarks.append(f"{name}: it wrote no results here.")
                continue
            remarks += differences(before, after) if before else [f"{name}: no committed results yet."]
            comparisons += compare(before or {"tables": []}, after)
    print("\n".join([report(comparisons), *remarks]))
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
