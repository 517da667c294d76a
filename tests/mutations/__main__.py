"""Put each defect of ``mutations.py`` into a copy of the package, and see which test notices it.

    python -m tests.mutations              # all of them: about an hour on 2 cores
    python -m tests.mutations 17 40-44     # some, by number
    python -m tests.mutations --jobs 2

Files of tests run whose tests noticed the defect before, or others in the same file of the package; where there is
none, all. The short tests run first, then those that CI runs beyond them at every landing, then the others.
``noticed.md`` gets a row for each defect; the exit code is 1 if no test notices one.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.harness.selection import LANDING
from tests.mutations.mutations import MUTATIONS, Mutation
from tests.mutations.places import Package, Place

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("noticed.md")
HEAD = """# Which test notices which defect

Written by `python -m tests.mutations`. "Short": a test of `make test`; "CI": one that CI runs beyond those,
at every landing; "in turns": one that it runs at some landings.

| number | file | without | with | suite | test |
|---|---|---|---|---|---|
"""
TIMEOUT_S = 900


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", help="of mutations: 17, or 40-44; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="mutations that are tried at the same time")
    args = parser.parse_args()
    numbers = sorted({number for text in args.numbers for number in _range(text)}) or sorted(MUTATIONS)
    rows = rows_of_table()
    tests = {number: files_of_tests(number) for number in numbers}  # now: the table changes while others run
    with tempfile.TemporaryDirectory() as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for job in range(args.jobs):
            trees.put(_copy_of_package(Path(folder, str(job))))

        def row_of(number: int) -> str:
            tree = trees.get()
            try:
                return _row(number, *_noticed_by(number, tests[number], tree))
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(args.jobs) as executor:
            for number, row in zip(numbers, executor.map(row_of, numbers), strict=True):
                rows[number] = row
                print(row, flush=True)
                TABLE.write_text(HEAD + "\n".join(rows[each] for each in sorted(rows)) + "\n")
    sys.exit("no test" in "".join(rows[number] for number in numbers))


def _range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def rows_of_table() -> dict[int, str]:
    return {int(found[1]): found[0] for found in re.finditer(r"^\| (\d+) \|.*$", TABLE.read_text(), re.MULTILINE)}


def files_of_tests(number: int) -> tuple[str, ...]:
    """In ``tests/``: the one that noticed this defect, then those that noticed others in this file of the package."""
    ends = {each: (row.split(" | ")[1], row.split(" | ")[-1].split("::")[0]) for each, row in rows_of_table().items()}
    file = ends[number][0] if number in ends else _file_of(MUTATIONS[number])
    beside = [test for _, (place, test) in sorted(ends.items(), key=lambda of: of[0] != number) if place == file]
    return tuple(dict.fromkeys(beside)) or ("",)


def _copy_of_package(tree: Path) -> Path:
    unneeded = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "__pycache__", "runs", "dist")
    shutil.copytree(ROOT, tree, ignore=unneeded)
    return tree


def _noticed_by(number: int, tests: tuple[str, ...], tree: Path) -> tuple[str, str]:
    """The suite, and the first of its tests that fails."""
    mutation = MUTATIONS[number]
    with _place_of(mutation, tree).mutated(mutation.after):
        for suite, marked in (("short", "not long"), ("CI", "long and not rare"), ("in turns", "rare")):
            failed = first_failure(tree, tests, marked)
            if failed is not None:
                return suite, failed
    return "neither", "no test"


def _place_of(mutation: Mutation, tree: Path) -> Place:
    return Package(tree / "fsdp2").find(mutation.place, mutation.before, mutation.after)


def _file_of(mutation: Mutation) -> str:
    return _place_of(mutation, ROOT).path.relative_to(ROOT / "fsdp2").as_posix()


def first_failure(tree: Path, tests: tuple[str, ...], marked: str) -> str | None:
    options = ["-x", "-q", "--no-header", "-n", "0", "-p", "no:cacheprovider", "--timeout", "150", "-m", marked]
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)]
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", LANDING: "0"}
    try:
        ended = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "hangs"
    if ended.returncode in (0, 5):  # all pass, or none is marked so
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", ended.stdout, re.MULTILINE)
    return failed[1] if failed else f"pytest ends with {ended.returncode}"


def _row(number: int, suite: str, test: str) -> str:
    mutation = MUTATIONS[number]
    before, after = (_in_one_line(text) for text in (mutation.before, mutation.after))
    return f"| {number} | {_file_of(mutation)} | {before} | {after} | {suite} | {test.removeprefix('tests/')} |"


def _in_one_line(text: str) -> str:
    return f"`{' ⏎ '.join(line.strip() for line in text.splitlines())}`".replace("|", "\\|")


if __name__ == "__main__":
    main()
