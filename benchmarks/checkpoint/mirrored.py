"""Claim: a checkpoint in memory at each fourth step makes a step of a Llama block on 2 gloo ranks at most 10% longer,
as ``async_save`` to memory does, and holds a rank's shards and states twice.

Each rank keeps its shards and AdamW states and those of its neighbour, in files in memory; ``async_save`` writes the
same to a folder in memory (tmpfs), which is not what a real job does: its disk is slower. Measured are steps of all
ranks, one variant after the other in each round; ms per call is how long training waits for it. On a CPU, copies,
checksums and messages take the cores that compute needs. Bytes are those of rank 0.

    python benchmarks/checkpoint/mirrored.py [--rounds N]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.checkpoint.state_dict import get_state_dict

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
from benchmarks.common import Table, publish
from benchmarks.llama import MISSING, Llama, loss, units
from fsdp2 import fully_shard
from fsdp2.checkpoint import async_save, mirrored

NUM_RANKS, EVERY, NUM_STEPS = 2, 4, 8
MODEL = Llama(width=1024, num_layers=1, num_tokens=256, head_width=64)
NAMES = ("no checkpoint", "mirrored", "async_save")


def run(rank: int, folder: str, rounds: int) -> None:
    warnings.simplefilter("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    model = MODEL.model()
    for unit in units(model):
        fully_shard(unit)
    optimizer = torch.optim.AdamW(model.parameters())
    mirror = mirrored(model, optimizer, every=EVERY, job="benchmark", folder=folder)
    mirror.restore()
    numbers = iter(range(1 << 30))
    steps = {name: [] for name in NAMES}
    calls: dict[str, list[float]] = {name: [] for name in NAMES}
    saved: list[Path] = []

    def save_by_mirror(number: int) -> None:
        mirror.after_step(number, {"step": number})

    def save_in_background(number: int) -> None:
        if number % EVERY:
            return
        states, optimizer_states = get_state_dict(model, optimizer)
        saved.append(Path(folder, f"step_{number}"))
        async_save({"model": states, "optimizer": optimizer_states}, saved[-1])

    savers: dict[str, Callable[[int], object]] = {
        "no checkpoint": lambda _: None,
        "mirrored": save_by_mirror,
        "async_save": save_in_background,
    }
    for _ in range(rounds + 1):
        for name, save in savers.items():
            dist.barrier()
            started, waited = time.perf_counter(), 0.0
            for _ in range(NUM_STEPS):
                loss(model, MODEL.tokens()).backward()
                optimizer.step()
                optimizer.zero_grad()
                before = time.perf_counter()
                save(next(numbers))
                waited += time.perf_counter() - before
            dist.barrier()
            steps[name].append((time.perf_counter() - started) / NUM_STEPS * 1000)
            calls[name].append(waited / (NUM_STEPS / EVERY) * 1000)
    mirror.wait()
    if rank == 0:
        _publish(steps, calls, mirror.nbytes, sum(_nbytes(path) for path in saved[:1]))
    mirror.close()
    dist.destroy_process_group()


def _nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("__0_*"))


def _publish(steps: dict[str, Any], calls: dict[str, Any], mirror_nbytes: int, file_nbytes: int) -> None:
    nbytes = {"no checkpoint": 0, "mirrored": mirror_nbytes, "async_save": file_nbytes}
    ms = {name: statistics.median(each[1:]) for name, each in steps.items()}  # the first round makes groups and files
    rows = [
        [
            name,
            f"{ms[name]:.0f}",
            f"{min(steps[name][1:]):.0f}",
            f"{statistics.median(calls[name][1:]):.0f}",
            f"{nbytes[name] / 1e6:.1f}",
            ms[name] / ms["no checkpoint"],
        ]
        for name in NAMES
    ]
    columns = ["", "ms / step", "min ms / step", "ms / call", "MB of rank 0", "step / no checkpoint"]
    note = (
        f"Median of {len(steps[NAMES[0]]) - 1} rounds of {NUM_STEPS} steps, with a checkpoint at each step that "
        f"{EVERY} divides. While a generation is written, a mirror takes its memory twice."
    )
    table = Table("main", "A Llama block with AdamW", columns, rows, ratio="step / no checkpoint", noise=0.3, note=note)
    publish("checkpoint/mirrored", "A checkpoint in memory, on 2 gloo ranks", [table])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if MISSING:
        raise SystemExit(MISSING)
    folder = tempfile.mkdtemp(prefix="fsdp2-mirrored-", dir="/dev/shm")
    try:
        multiprocessing.spawn(run, (folder, options.rounds), NUM_RANKS)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
