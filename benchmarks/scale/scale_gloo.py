"""Claim: from its parts, measured in the same minute, the model predicts a step on 2 and 4 gloo ranks of this machine.

    python benchmarks/scale/scale_gloo.py

Run it on a quiet machine. A process beside it keeps one rank waiting for the other, which the model does not know.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
from benchmarks.common import Table, publish
from benchmarks.scale import gloo

CASES = tuple(
    case
    for num_ranks in (2, 4)
    for case in (gloo.Case(num_ranks, 1024, 6, 256, rounds=5), gloo.Case(num_ranks, 256, 8, 64, rounds=15))
)


def gloo_table() -> Table:
    rows = []
    for case in CASES:
        measured = gloo.measure(case)
        predicted = gloo.predict(case, measured)
        seconds = (predicted.compute, predicted.step, measured.step)
        error = f"{100 * (predicted.step / measured.step - 1):+.0f}%"
        rows.append([str(case), *(f"{1e3 * value:.1f}" for value in seconds), error])
    columns = ["", "one rank alone", "predicted", "measured", "error"]
    return Table("steps", "A step on gloo ranks of this machine, ms", columns, rows, ratio=None)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    publish("scale/scale_gloo", "A step on gloo ranks, predicted", [gloo_table()])


if __name__ == "__main__":
    main()
