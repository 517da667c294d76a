"""Claim: fsdp2's runtime executes a quarter of the instructions of that of torch's ``fully_shard``, and its
``FullyShardedDataParallel`` those of ``fully_shard`` and 3% more at most.

The first case of runtime_overhead.py, counted by ``valgrind --tool=callgrind`` instead of timed: repeatable to a few
parts in a thousand, on a busy machine, too. 5 steps of 8 blocks after a warm-up, without garbage collection. It takes
some minutes, because valgrind also interprets ``import torch``. Without valgrind, it says so and writes nothing.

    python benchmarks/runtime_instructions.py
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from common import Ratios, Table, publish
from llama import units
from null_group import null_process_group
from runtime_overhead import RUNTIMES, Case, model_and_input, sharded, stepper
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy

import fsdp2

CASE = Case("8 ranks, fp32", num_blocks=8)
NUM_STEPS = 5
CLASS = "fsdp2's class"
SUBJECTS = ("unsharded", *RUNTIMES, CLASS)


def run_counted(subject: str) -> None:
    """Warm up, then let callgrind count; to be run under it."""
    torch.set_num_threads(1)
    with null_process_group(CASE.world_size):
        model, x = model_and_input(CASE)
        step = stepper(_in_runtime(subject, model), x)
        gc.disable()
        for switch in ("on", "off"):
            subprocess.run(["callgrind_control", "-i", switch, str(os.getpid())], check=True, capture_output=True)
            if switch == "on":
                for _ in range(NUM_STEPS):
                    step()
    os._exit(0)  # spares the interpreter's own end, which takes a minute here


def _in_runtime(subject: str, model: nn.Module) -> nn.Module:
    if subject in RUNTIMES:
        return sharded(model, RUNTIMES[subject], CASE.mixed)
    if subject != CLASS:
        return model
    own = {unit for unit in units(model) if unit is not model}
    return fsdp2.FullyShardedDataParallel(model, auto_wrap_policy=CustomPolicy(own.__contains__), use_orig_params=True)


def instructions(subject: str) -> float:
    """Instructions per group and step."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={Path(folder, 'counts')}"]
        command = ["valgrind", *options, sys.executable, __file__, "--run", subject]
        done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode != 0 or found is None:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return int(found[1]) / NUM_STEPS / CASE.num_blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", choices=SUBJECTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_counted(options.run)
    if shutil.which("valgrind") is None or shutil.which("callgrind_control") is None:
        print("runtime_instructions: there is no valgrind on this machine, so nothing is counted.")
        return
    with ThreadPoolExecutor() as pool:  # counts do not depend on what else runs
        counts = dict(zip(SUBJECTS, pool.map(instructions, SUBJECTS), strict=True))
    ours, theirs, wrapped = ((counts[name] - counts["unsharded"]) / 1e3 for name in (*RUNTIMES, CLASS))
    columns = ["", "unsharded", *RUNTIMES, "ratio", CLASS, "class / fsdp2"]
    plain = f"{counts['unsharded'] / 1e3:.0f}"
    row = [CASE.name, plain, f"{ours:.0f}", f"{theirs:.0f}", ours / theirs, f"{wrapped:.0f}", f"{wrapped / ours:.3f}"]
    title = "Thousands of instructions; those of the runtimes are beyond the unsharded model's"
    table = Table("main", title, columns, [row], noise=0.02, plot=Ratios(aim=0.2))
    publish("runtime_instructions", "Instructions per group of 9 parameters and step, width 16", [table])


if __name__ == "__main__":
    main()
