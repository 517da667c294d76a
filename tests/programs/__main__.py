"""Compare runtimes on programs drawn from seeds, or on programs in which each pair of features occurs.

    python -m tests.programs --seeds 1000                 # on 2 ranks
    python -m tests.programs --seeds 200 --first 1000 --ranks 4
    python -m tests.programs --seeds 1 --first 17 --show  # print program 17
    python -m tests.programs pairs                        # the programs of pairs.py
    python -m tests.programs pairs --first 20 --num 10    # rows 20 to 29 of the array
    python -m tests.programs pairs --matrix               # the page's matrix is written anew
    python -m tests.programs pairs --triples              # programs with each triple of the riskiest features
    python -m tests.programs regressions                  # programs that once failed

Each program runs under torch's ``fully_shard``, under fsdp2's, and unsharded. A program on which they differ is shrunk,
and printed as Python. The exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import closing

from tqdm import tqdm

from tests.programs import matrix
from tests.programs.check import Outcome, Verdict
from tests.programs.drawn import CHANGES, draw
from tests.programs.features import Row, features, program_of
from tests.programs.pairs import Pair, allowed_pairs, array, packed, pairs_of, triples
from tests.programs.program import Program
from tests.programs.regressions import REGRESSIONS
from tests.programs.runner import Runner, shrunk
from tests.programs.source import source

MOST_VALUES = (12, 6, 2)  # that are no defaults, in programs for pairs that the array's programs leave out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="seeds", choices=("seeds", "pairs", "regressions"))
    parser.add_argument("--seeds", type=int, default=100, help="how many programs")
    parser.add_argument("--first", type=int, default=0, help="the first seed, or the first row of the array")
    parser.add_argument("--num", type=int, help="how many rows of the array; without it, all that follow")
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--device", default="cpu", choices=("cpu", "sim"), help="sim: the simulated accelerator")
    parser.add_argument("--changes", action="store_true", help="programs from seeds change more between passes")
    parser.add_argument("--matrix", action="store_true", help="write what came of pairs into docs/programs.md")
    parser.add_argument("--triples", action="store_true", help="triples of the riskiest features, in place of pairs")
    parser.add_argument("--show", action="store_true", help="print the programs; run nothing")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    if options.what == "pairs":
        stop = None if options.num is None else options.first + options.num
        share = slice(options.first, stop)
        if not options.triples:
            sys.exit(_run_pairs(options.ranks, options.device, share, options.show, writes=options.matrix))
        programs = {f"row {index}": program_of(row) for index, row in enumerate(triples(options.ranks)[share])}
    elif options.what == "regressions":
        programs = REGRESSIONS
    else:
        often = CHANGES if options.changes else ()
        programs = {f"seed {seed}": draw(seed, options.ranks, often) for seed in seeds}
    programs = {name: program for name, program in programs.items() if program.runs_on(options.device)}
    if options.show:
        sys.exit(_show(programs, options.ranks))
    with closing(Runner(options.ranks, options.device)) as runner:
        verdicts = _run(programs, runner)
        print(f"{len(programs)} programs on {options.ranks} ranks ({options.device}):")
        sys.exit(_report(programs, verdicts, runner))


def _show(programs: dict[str, Program], num_ranks: int) -> None:
    for name, program in programs.items():
        print(f"# {name} on {num_ranks} ranks\n{source(program)}")


def _run_pairs(num_ranks: int, device_type: str, share: slice, shows: bool, *, writes: bool) -> bool | None:
    """Whether one differs. A pair is counted in a program whose values could be compared. Pairs that are in none after
    the whole array has run, since some other pair in their rows is refused, run in simpler and simpler programs."""
    rows = dict(list(enumerate(array(num_ranks, device_type)))[share])
    programs = {f"row {index}": program_of(row) for index, row in rows.items()}
    if shows:
        return _show(programs, num_ranks)
    with closing(Runner(num_ranks, device_type)) as runner:
        verdicts = _run(programs, runner)
        ran = list(zip(rows.values(), verdicts.values(), strict=True))
        missing = allowed_pairs(num_ranks, device_type)
        num_pairs = len(missing)
        missing -= _compared(rows.values(), verdicts.values())
        for most in MOST_VALUES if len(rows) == len(array(num_ranks, device_type)) else ():
            more = list(packed(missing, features(num_ranks, device_type), most))
            named = {f"{len(programs) + index}, {most} values": program_of(row) for index, row in enumerate(more)}
            found = _run(named, runner)
            missing -= _compared(more, found.values())
            ran += zip(more, found.values(), strict=True)
            programs, verdicts = programs | named, verdicts | found
        for pair in sorted(" and ".join(sorted(f"{name}={value!r}" for name, value in pair)) for pair in missing):
            print(f"not compared: {pair}")
        has_failed = _report(programs, verdicts, runner)
    if writes:
        found_signs = matrix.signs((row, verdict.outcome) for row, verdict in ran)
        matrix.write(matrix.matrix(found_signs, features(num_ranks)))
    num_failed = sum(verdict.outcome.is_failure for verdict in verdicts.values())
    print(f"{len(programs)} programs, {num_pairs - len(missing)} pairs of {num_pairs}, {num_failed} differ")
    return has_failed


def _compared(rows: Iterable[Row], verdicts: Iterable[Verdict]) -> set[Pair]:
    """The pairs in the programs whose values were found to be right."""
    held = (pairs_of(row) for row, verdict in zip(rows, verdicts, strict=True) if verdict.outcome.is_compared)
    return set[Pair]().union(*held)


def _run(programs: dict[str, Program], runner: Runner) -> dict[str, Verdict]:
    verdicts = {}
    every_s = 0.1 if sys.stderr.isatty() else 60.0
    with tqdm(total=len(programs), mininterval=every_s, desc="programs") as bar:
        for name, program in programs.items():
            verdicts[name] = verdict = runner.verdict(program)
            if verdict.outcome.is_failure:
                bar.write(f"{name}: {verdict.outcome.value}: {verdict.text}", file=sys.stderr)
            bar.update()
    return verdicts


def _report(programs: dict[str, Program], verdicts: dict[str, Verdict], runner: Runner) -> bool:
    """Whether one fails. The first three that do are shrunk, and printed."""
    outcomes = Counter(
        f"{verdict.outcome.value}{f': {verdict.text}' if verdict.outcome is Outcome.KNOWN else ''}"
        for verdict in verdicts.values()
    )
    for said, count in outcomes.most_common():
        print(f"{count:6d}  {said}")
    failed = [name for name, verdict in verdicts.items() if verdict.outcome.is_failure]
    for name in failed[:3]:
        program, verdict = shrunk(programs[name], runner)
        print(f"\n# {name}, shrunk. {verdict.outcome.value}: {verdict.text}")
        print(source(program))
    return bool(failed)


if __name__ == "__main__":
    main()
