"""Compare runtimes on programs drawn from seeds.

    python -m tests.fuzz --seeds 1000                 # on 2 ranks
    python -m tests.fuzz --seeds 200 --first 1000 --ranks 4
    python -m tests.fuzz --seeds 1 --first 17 --show  # print program 17

Each program runs under torch's ``fully_shard``, under fsdp2's, and unsharded. A program on which they differ is shrunk,
and printed as Python. The exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from tqdm import tqdm

from tests.accelerator import device
from tests.fuzz import passes
from tests.fuzz.check import Outcome
from tests.fuzz.program import draw
from tests.fuzz.runner import Runner, shrunk
from tests.fuzz.source import source
from tests.harness.cpp import build
from tests.harness.pool import WorkerPool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100, help="how many programs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--device", default="cpu", choices=("cpu", "sim"), help="sim: the simulated accelerator")
    parser.add_argument("--passes", action="store_true", help="programs of passes.py, on 2 ranks")
    parser.add_argument("--show", action="store_true", help="print the programs; run nothing")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    if options.show:
        for seed in seeds:
            print(f"# seed {seed} on {options.ranks} ranks\n{source(draw(seed, options.ranks))}")
        return
    if options.passes:
        sys.exit(_run_passes(seeds))
    if options.device == "sim":
        build(device.NAME, device.SOURCE)  # takes longer than a program may
    outcomes: Counter[str] = Counter()
    failures = []
    runner = Runner(options.ranks, options.device)
    with tqdm(total=len(seeds), disable=None, desc="programs") as bar:
        for seed in seeds:
            verdict = runner.verdict(draw(seed, options.ranks))
            said = f": {verdict.text}" if verdict.outcome is Outcome.KNOWN else ""
            outcomes[f"{verdict.outcome.value}{said}"] += 1
            if verdict.outcome.is_failure:
                failures.append(seed)
                bar.write(f"seed {seed}: {verdict.outcome.value}: {verdict.text}", file=sys.stderr)
            bar.update()
    print(f"{len(seeds)} programs from seed {seeds.start} on {options.ranks} ranks ({options.device}):")
    for said, count in outcomes.most_common():
        print(f"{count:6d}  {said}")
    for seed in failures[:3]:
        program, verdict = shrunk(draw(seed, options.ranks), runner)
        print(f"\n# seed {seed} on {options.ranks} ranks, shrunk. {verdict.outcome.value}: {verdict.text}")
        print(source(program))
    runner.close()
    sys.exit(bool(failures))


def _run_passes(seeds: range) -> bool:
    """Whether one differs."""
    pool, failed = WorkerPool(2), dict[int, str]()
    for first in seeds[::50]:
        for found in pool.run(passes.check, 120.0, seeds=range(first, min(first + 50, seeds.stop))):
            failed |= found
    pool.close()
    for seed, what in sorted(failed.items()):
        print(f"seed {seed}: {what}")
    print(f"{len(seeds)} programs from seed {seeds.start}: {len(failed)} differ")
    return bool(failed)


if __name__ == "__main__":
    main()
