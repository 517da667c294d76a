"""``python -m tests.memory_errors.hunt``: run ranks for hours under an allocator that makes memory errors fatal.

What runs: random programs in one pool of ranks that lives as long as the hunt, or the tests on pools of ranks in a
random order. The same processes compile blocks, call hooks, raise, recover and gather full tensors,
in any order. Nothing is printed unless a rank dies, or gets something wrong. At the end come the totals, which are also
appended to ``--results``, a file of JSON lines.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.harness.cpp import compiler
from tests.harness.pool import WorkerError, WorkerPool
from tests.memory_errors.allocator import CHOICE
from tests.memory_errors.programs import run_programs

ROOT = Path(__file__).parents[2]
TESTS = ["tests/distributed", "tests/parity"]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "", "--timeout", "1800", "--no-header"]
PYTEST += ["-p", "tests.memory_errors.shuffled"]
PROGRAMS_PER_CALL = 4
TIMEOUT_S = 30  # of a call, times the patience that an allocator needs; some programs hang
DIED = "the worker process died"
MALLOC_DEBUG = "libc_malloc_debug.so.0"


def _checks_of_glibc() -> dict[str, str]:
    """A check of each block when it is freed, and freed memory that is filled with a pattern."""
    return {"LD_PRELOAD": MALLOC_DEBUG, "GLIBC_TUNABLES": "glibc.malloc.check=3:glibc.malloc.perturb=165"}


def _checks_of_asan() -> dict[str, str]:
    """AddressSanitizer's allocator, and its checks of each ``memcpy``, ``recv`` and their like, in all libraries."""
    command = [compiler() or "c++", "-print-file-name=libasan.so"]
    library = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    library += ":libstdc++.so.6"  # it must know of exceptions before the first one is thrown
    return {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1"}


# What the environment of the ranks must contain for an allocator. With both, Python's objects lie in its memory, too.
CHECKS: dict[str, Callable[[], dict[str, str]]] = {"malloc": _checks_of_glibc, "asan": _checks_of_asan}


def environment(options: argparse.Namespace) -> dict[str, str]:
    """The variables that the ranks need."""
    variables = {"FSDP2_TEST_SUBJECT": options.runtime, "OMP_NUM_THREADS": "1"}
    if options.allocator == "guard":
        return variables | {CHOICE: "guard"}
    if options.allocator in CHECKS:
        return variables | CHECKS[options.allocator]() | {CHOICE: "system", "PYTHONMALLOC": "malloc"}
    return variables


@dataclass
class Totals:
    """What a hunt has seen so far. ``reports``: of ranks that died, and of work that failed."""

    programs: int = 0
    tests: int = 0
    rank_seconds: float = 0.0
    deaths: int = 0
    failures: int = 0
    reports: list[str] = field(default_factory=list)

    def note(self, where: str, report: str) -> None:
        """Work at ``where`` went wrong."""
        if DIED in report:
            self.deaths += 1
        else:
            self.failures += 1
        self.reports.append(f"{where}\n{report}")
        print(f"== {where}\n{report}", flush=True)


def hunt_programs(
    options: argparse.Namespace, deadline: float, totals: Totals, body: Callable[..., None] = run_programs
) -> None:
    """Random programs in one pool, which a failure replaces."""
    pool = WorkerPool(options.world_size)
    seed = options.seed
    try:
        while time.monotonic() < deadline:
            started = time.monotonic()
            seeds = list(range(seed, seed + PROGRAMS_PER_CALL))
            seed += PROGRAMS_PER_CALL
            try:
                pool.run(body, timeout_s=TIMEOUT_S, seeds=seeds)
            except WorkerError as error:  # the time is not counted, since ranks may have waited for each other
                totals.note(f"programs {seeds}, {options}", str(error))
                continue
            totals.programs += PROGRAMS_PER_CALL
            totals.rank_seconds += (time.monotonic() - started) * options.world_size
    finally:
        pool.close(kill=True)


def hunt_tests(options: argparse.Namespace, deadline: float, totals: Totals) -> None:
    """The tests on pools of ranks, in another order each time."""
    seed = options.seed
    while (left := deadline - time.monotonic()) > 0:
        with tempfile.TemporaryDirectory() as folder:
            tally = Path(folder) / "tally"
            shuffled = [f"--shuffle-seed={seed}", f"--tally={tally}", f"--seconds={left}"]
            kinds = "ranks" if options.compile == "on" else "ranks and not compil"
            command = [*PYTEST, *shuffled, "-k", kinds, *options.selected]
            result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            seen = json.loads(tally.read_text()) if tally.exists() else {"tests": 0, "rank_seconds": 0}
        totals.tests += seen["tests"]
        totals.rank_seconds += seen["rank_seconds"]
        if DIED in result.stdout or " failed" in result.stdout or not seen["tests"]:
            totals.note(f"tests in the order of seed {seed}, {options}", result.stdout)
        seed += 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.memory_errors.hunt", description=__doc__)
    parser.add_argument("work", choices=["programs", "tests"])
    parser.add_argument("selected", nargs="*", default=TESTS, help="of tests: files or folders")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--allocator", choices=["guard", *CHECKS, "none"], default="guard")
    parser.add_argument("--runtime", choices=["fsdp2", "torch"], default="fsdp2", help="which runtime is tested")
    parser.add_argument("--compile", choices=["on", "off"], default="on", help="of tests: those that compile, too")
    parser.add_argument("--world-size", type=int, default=2, help="of programs")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "memory_errors.jsonl")
    options, totals = parser.parse_args(argv), Totals()
    os.environ.update(environment(options))
    started = time.monotonic()
    deadline = started + 60 * options.minutes
    if options.work == "tests":
        hunt_tests(options, deadline, totals)
    else:
        hunt_programs(options, deadline, totals)
    line: dict[str, Any] = vars(options) | {"hours": (time.monotonic() - started) / 3600} | asdict(totals)
    with options.results.open("a") as results:
        results.write(json.dumps(line, default=str) + "\n")
    print(
        f"{totals.programs} programs, {totals.tests} tests, {totals.rank_seconds / 3600:.2f} hours of ranks, "
        f"{totals.deaths} deaths, {totals.failures} other failures"
    )
    return 1 if totals.deaths or totals.failures else 0


if __name__ == "__main__":
    sys.exit(main())
