"""Runs benchmarks one after the other, and says how long each took. One that fails does not stop the others.

They write what the documentation shows, ``benchmarks/results/<room>/<script>.json``. With arguments, which measure
something else, they only print.

    python benchmarks/run.py [SCRIPT ...] [-- ARGUMENTS OF EACH SCRIPT]

A script is named by its path, its room and name, or its name: ``memory/peak_memory`` or ``peak_memory``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # started by its path, a script sees only its own folder
from benchmarks.common import RESULTS, RESULTS_FOLDER_VARIABLE, table

FOLDER = Path(__file__).resolve().parent
CLAIM = '"""Claim: '  # begins a benchmark; whatever else is in the folder helps them


def benchmarks() -> list[Path]:
    return [path for path in sorted(FOLDER.rglob("*.py")) if path.read_text().startswith(CLAIM)]


def name_of(script: Path) -> str:
    """Its room and name, which its results have, too."""
    path = script.resolve().with_suffix("")
    return path.relative_to(FOLDER).as_posix() if path.is_relative_to(FOLDER) else path.name


def named(text: str) -> Path:
    """The benchmark at the path ``text``, or of that name."""
    known = {name_of(path): path for path in benchmarks()}
    path = known.get(text) or next((path for path in known.values() if path.stem == text), Path(text))
    if not path.is_file():
        sys.exit(f"There is no benchmark '{text}'. There are: {', '.join(known)}.")
    return path


def run(scripts: Sequence[Path], arguments: Sequence[str] = (), results: Path | None = None) -> bool:
    """Run ``scripts``, which write to the folder ``results`` if it is given; True where all of them succeeded."""
    environment = {**os.environ, **({RESULTS_FOLDER_VARIABLE: str(results)} if results else {})}
    rows: list[list[object]] = []
    for script in scripts:
        start = time.perf_counter()
        status = subprocess.run([sys.executable, str(script), *arguments], env=environment).returncode
        rows.append([name_of(script), f"{time.perf_counter() - start:.0f}", f"failed: {status}" if status else ""])
    seconds = sum(int(str(row[1])) for row in rows)
    print(table(["", "seconds", ""], [*rows, ["all", seconds, ""]]), flush=True)
    return not any(row[2] for row in rows)


def main() -> int:
    given = sys.argv[1:]
    split = given.index("--") if "--" in given else len(given)
    arguments = given[split + 1 :]
    results = None if arguments or RESULTS_FOLDER_VARIABLE in os.environ else RESULTS
    return 0 if run([*map(named, given[:split])] or benchmarks(), arguments, results) else 1


if __name__ == "__main__":
    sys.exit(main())
