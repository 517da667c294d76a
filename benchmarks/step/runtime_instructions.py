"""Claim: fsdp2's runtime executes a quarter of the instructions of that of torch's ``fully_shard``, for a Llama, too.
Its ``FullyShardedDataParallel`` executes those of ``fully_shard`` and 3% more at most.

The first case of runtime_overhead.py and its Llama, counted by ``valgrind --tool=callgrind`` instead of timed:
repeatable to a few parts in a thousand, on a busy machine, too. 5 steps of 8 blocks after a warm-up, without garbage
collection. Instructions are not time: they wait for memory where caches do not hold what they need. So misses are
counted, too, in simulated caches of the sizes of a server's core. It takes some minutes, because valgrind also
interprets imports. Without valgrind, it says so and writes nothing.

    python benchmarks/step/runtime_instructions.py
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, product
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
import fsdp2
from benchmarks.common import Ratios, Table, publish
from benchmarks.llama import MISSING, Llama, loss, units
from benchmarks.null_group import null_process_group
from benchmarks.step.runtime_overhead import RUNTIMES, Case, Step, model_and_input, sharded, stepper

CASE = Case("8 ranks, fp32", num_blocks=8)
NUM_STEPS = 5
CLASS = "fsdp2's class"
SUBJECTS = ("unsharded", *RUNTIMES)
LLAMA = Llama(width=32, num_layers=CASE.num_blocks, num_tokens=8)
LLAMAS = {
    "fp32": {"mixed": False, "checkpointed": False},
    "bf16/fp32": {"mixed": True, "checkpointed": False},
    "fp32, activation checkpointing": {"mixed": False, "checkpointed": True},
}


def run_counted(case: str, subject: str) -> None:
    """Warm up, then let callgrind count; to be run under it."""
    torch.set_num_threads(1)
    with null_process_group(CASE.world_size):
        step = _llama_step(subject, **LLAMAS[case]) if case in LLAMAS else _step(subject)
        gc.disable()
        for switch in ("on", "off"):
            subprocess.run(["callgrind_control", "-i", switch, str(os.getpid())], check=True, capture_output=True)
            if switch == "on":
                for _ in range(NUM_STEPS):
                    step()
    os._exit(0)  # spares the interpreter's own end, which takes a minute here


def _step(subject: str) -> Step:
    model, x = model_and_input(CASE)
    return stepper(_in_runtime(subject, model), x)


def _llama_step(subject: str, *, mixed: bool, checkpointed: bool) -> Step:
    model, tokens = LLAMA.model(checkpointed), LLAMA.tokens()
    if subject == "unsharded":
        return stepper(model.to(torch.bfloat16 if mixed else torch.float32), tokens, loss)
    return stepper(sharded(model, RUNTIMES[subject], mixed), tokens, loss)


def _in_runtime(subject: str, model: nn.Module) -> nn.Module:
    if subject in RUNTIMES:
        return sharded(model, RUNTIMES[subject], CASE.mixed)
    if subject != CLASS:
        return model
    own = {unit for unit in units(model) if unit is not model}
    return fsdp2.FullyShardedDataParallel(model, auto_wrap_policy=CustomPolicy(own.__contains__), use_orig_params=True)


# Of callgrind's events, in the order of its totals.
EVENTS = ("Ir", "Dr", "Dw", "I1mr", "D1mr", "D1mw", "ILmr", "DLmr", "DLmw")
CACHES = ["--cache-sim=yes", "--I1=32768,8,64", "--D1=49152,12,64", "--LL=2097152,16,64"]
COUNTS = {
    "instructions": ("Ir",),
    "first instruction cache": ("I1mr",),
    "first data cache": ("D1mr", "D1mw"),
    "second cache, 2 MB": ("ILmr", "DLmr", "DLmw"),
}
Counts = Mapping[str, float]


def counts(case: str, subject: str) -> Counts:
    """Instructions and misses of caches per group and step, in thousands."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={Path(folder, 'counts')}", *CACHES]
        command = ["valgrind", *options, sys.executable, __file__, "--run", case, subject]
        done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"Collected : ([\d ]+)", done.stderr)
    if done.returncode != 0 or found is None:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    totals = dict(zip(EVENTS, map(int, found[1].split()), strict=True))
    return {name: sum(totals[each] for each in of) / NUM_STEPS / CASE.num_blocks / 1e3 for name, of in COUNTS.items()}


def counted(cases: Sequence[str], subjects: Sequence[str]) -> list[dict[str, Counts]]:
    """For each case, the counts of each subject; those of runtimes are beyond the unsharded model's."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # counts do not depend on what else runs
        found = pool.map(counts, *zip(*product(cases, subjects), strict=True))
        rows = [dict(zip(subjects, islice(found, len(subjects)), strict=True)) for _ in cases]
    return [
        {name: mine if name == "unsharded" else _beyond(mine, row["unsharded"]) for name, mine in row.items()}
        for row in rows
    ]


def _beyond(mine: Counts, unsharded: Counts) -> Counts:
    return {what: count - unsharded[what] for what, count in mine.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_counted(*options.run)
    if shutil.which("valgrind") is None or shutil.which("callgrind_control") is None:
        print("runtime_instructions: there is no valgrind on this machine, so nothing is counted.")
        return
    title = "thousands of instructions; those of the runtimes are beyond the unsharded model's"
    columns = ["", *SUBJECTS, "ratio"]
    (row,) = counted([CASE.name], [*SUBJECTS, CLASS])
    of_class, ours = row[CLASS]["instructions"], row["fsdp2"]["instructions"]
    cells = [*_cells(CASE.name, row), f"{of_class:.0f}", f"{of_class / ours:.3f}"]
    named = [*columns, CLASS, "class / fsdp2"]
    tables = [Table("main", f"Blocks: {title}", named, [cells], noise=0.02, plot=Ratios(aim=0.2))]
    if MISSING is None:
        found = dict(zip(LLAMAS, counted(list(LLAMAS), SUBJECTS), strict=True))
        rows = [_cells(name, row) for name, row in found.items()]
        tables.append(Table("llama", f"Llama, width {LLAMA.width}: {title}", columns, rows, noise=0.02))
        misses = [[name, *(row["fsdp2"][what] / row["torch"][what] for what in COUNTS)] for name, row in found.items()]
        about = f"Llama, width {LLAMA.width}: fsdp2 / torch, of instructions and of misses in simulated caches"
        tables.append(Table("caches", about, ["", *COUNTS], misses, ratio=None))
    else:
        print(f"runtime_instructions: no Llama, because {MISSING}")
    publish("step/runtime_instructions", "Instructions per group of 9 parameters and step, 8 ranks", tables)


def _cells(name: str, row: Mapping[str, Counts]) -> list[object]:
    found = {subject: row[subject]["instructions"] for subject in SUBJECTS}
    return [name, *(f"{count:.0f}" for count in found.values()), found["fsdp2"] / found["torch"]]


if __name__ == "__main__":
    main()
