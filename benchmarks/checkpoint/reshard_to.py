"""Claim: from 2 gloo ranks to 4 and back, ``reshard_to`` takes 0.25 to 0.45 of the time, and 0.4 of the CPU time, that
it takes to save a model through DCP and load it on the other ranks, and half to three quarters of the memory.

A random Llama of 0.5 GB in fp32 with AdamW states, 1.5 GB in all. Each measurement has four processes of its own. It
begins with a sharded model and states on the old ranks, and ends with both on the new ones, whose sums must be equal.
DCP saves to a folder in memory (tmpfs) or on the disk, and loads from there at once, so from the page cache; its new
model is sharded, on the meta device, before the clock starts. Memory is what a process allocates beyond what it had at
the beginning, new shards and states included; files in memory are not in it. The parent process samples it every 5 ms.

    python benchmarks/checkpoint/reshard_to.py [--rounds N]
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
from benchmarks.checkpoint.weights import SAMPLE_S, anonymous_mb, tell
from benchmarks.common import Table, publish
from benchmarks.llama import MISSING, Llama, units
from fsdp2 import fully_shard
from fsdp2.checkpoint import reshard_to

NUM_RANKS = 4
MODEL = Llama(width=1024, num_layers=13, num_tokens=128, head_width=64)
MOVES = {"2 to 4": ([0, 1], [0, 1, 2, 3]), "4 to 2": ([0, 1, 2, 3], [0, 1])}
OURS = "fsdp2.checkpoint.reshard_to"
FOLDERS = {OURS: None, "DCP, tmpfs": "/dev/shm", "DCP, disk": None}  # None is the system's own for temporary files


@dataclass
class Job:
    model: nn.Module
    optimizer: optim.Optimizer

    def total(self) -> torch.Tensor:
        """The sum of all values and states of this rank."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        cut = [each.to_local() for each in [*self.model.parameters(), *states] if isinstance(each, DTensor)]
        return torch.stack([local.detach().double().sum() for local in cut]).sum()


def sharded(ranks: list[int]) -> Job:
    """On the meta device, on all ranks; other ranks have empty shards."""
    with torch.device("meta"):
        model = MODEL.model()
    mesh = DeviceMesh("cpu", ranks)
    for unit in units(model):
        fully_shard(unit, mesh=mesh)
    return Job(model, optim.AdamW(model.parameters()))


def materialised(job: Job) -> Job:
    """The same with memory. The optimizer is a new one: parameters on the meta device have been replaced."""
    job.model.to_empty(device="cpu")
    return Job(job.model, optim.AdamW(job.model.parameters()))


def trained(job: Job) -> Job:
    """With values, and with states as after a step: other ones for each parameter."""
    job = materialised(job)
    for index, param in enumerate(job.model.parameters()):
        param.to_local().detach().fill_(index + dist.get_rank() / 8)  # type: ignore[attr-defined]
        averages = {name: torch.full_like(param, index + 0.5).detach() for name in ("exp_avg", "exp_avg_sq")}
        job.optimizer.state[param] = {"step": torch.ones(()), **averages}
    return job


def by_dcp(old: Job, new: Job, move: str, groups: list[dist.ProcessGroup], folder: str) -> Job:
    """``new`` with what ``old`` has."""
    old_ranks, new_ranks = MOVES[move]
    if dist.get_rank() in old_ranks:
        model, states = get_state_dict(old.model, old.optimizer)
        dcp.save({"model": model, "optimizer": states}, checkpoint_id=folder, process_group=groups[0])
    dist.barrier()
    if dist.get_rank() in new_ranks:
        new = materialised(new)
        model, states = get_state_dict(new.model, new.optimizer)
        found = {"model": model, "optimizer": states}
        dcp.load(found, checkpoint_id=folder, process_group=groups[1])
        set_state_dict(new.model, new.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    return new


# One measurement


class Taken(NamedTuple):
    """Seconds of the slowest rank; CPU seconds of all; MB of the rank that takes most; the sum of values and states."""

    seconds: float
    cpu_seconds: float
    most_mb: float
    total: float


def rank_main(rank: int, name: str, move: str, folder: str, store: str, connection: Connection) -> None:
    """One rank of one measurement. It says when it is ready, waits for the word, and says what it took."""
    warnings.simplefilter("ignore")  # torch's own, about names that torch deprecates
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    old_ranks, new_ranks = MOVES[move]
    groups = [dist.new_group(ranks) for ranks in (old_ranks, new_ranks)]
    torch.manual_seed(rank)
    job, other = sharded(old_ranks), sharded(new_ranks)
    if rank in old_ranks:
        job = trained(job)
    mesh = DeviceMesh("cpu", new_ranks)
    dist.barrier()
    connection.send("ready")
    connection.recv()
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    if name == OURS:
        reshard_to(job.model, job.optimizer, mesh)
    else:
        job = by_dcp(job, other, move, groups, folder)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    connection.send("done")
    connection.recv()
    total = job.total() if rank in new_ranks else torch.zeros((), dtype=torch.float64)
    dist.all_reduce(total)
    connection.send((seconds, cpu_seconds, total.item()))
    connection.recv()
    os._exit(0)


def measure(name: str, move: str) -> Taken:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.checkpoint.reshard_to", "transformers.models.llama.modeling_llama"])
    place = Path(tempfile.mkdtemp(prefix="fsdp2-reshard-", dir=FOLDERS[name]))
    try:
        ends, processes = [], []
        for rank in range(NUM_RANKS):
            end, other = context.Pipe()
            arguments = (rank, name, move, str(place / "checkpoint"), str(place / "store"), other)
            processes.append(context.Process(target=rank_main, args=arguments, daemon=True))
            processes[-1].start()
            other.close()
            ends.append(end)
        pids = [process.pid or 0 for process in processes]
        assert [end.recv() for end in ends] == ["ready"] * NUM_RANKS
        os.sync()
        before = [anonymous_mb(pid) for pid in pids]
        peaks = list(before)
        tell(ends)
        done = 0
        while done < NUM_RANKS:
            peaks = [max(peak, anonymous_mb(pid)) for peak, pid in zip(peaks, pids, strict=True)]
            done += sum(end.recv() == "done" for end in wait(ends, SAMPLE_S))  # type: ignore[union-attr]
        tell(ends)
        answers = [end.recv() for end in ends]
        tell(ends)
        for process in processes:
            process.join()
    finally:
        shutil.rmtree(place)
    most_mb = max(peak - start for peak, start in zip(peaks, before, strict=True))
    seconds, cpu_seconds, totals = zip(*answers, strict=True)
    return Taken(max(seconds), sum(cpu_seconds), most_mb, totals[0])


# All of them


def row(move: str, name: str, taken: dict[str, list[Taken]]) -> list[object]:
    seconds = {each: statistics.median(one.seconds for one in taken[each]) for each in taken}
    ratio = None if name == OURS else seconds[OURS] / seconds[name]
    least = min(one.seconds for one in taken[name])
    cpu_seconds = statistics.median(one.cpu_seconds for one in taken[name])
    most_mb = max(one.most_mb for one in taken[name])
    return [f"{move}: {name}", f"{least:.2f}", seconds[name], cpu_seconds, f"{most_mb:.0f}", ratio]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    if MISSING:
        raise SystemExit(MISSING)
    rows = []
    for move in MOVES:
        taken: dict[str, list[Taken]] = {name: [] for name in FOLDERS}
        for _ in range(options.rounds):
            for name in FOLDERS:
                taken[name].append(measure(name, move))
        totals = [one.total for each in taken.values() for one in each]
        assert math.isclose(min(totals), max(totals), rel_tol=1e-9), f"different values have arrived: {totals}"
        rows += [row(move, name, taken) for name in FOLDERS]
    columns = ["", "min s", "s", "CPU s", "MB", "fsdp2 / peer"]
    note = (
        f"Median and minimum of {options.rounds} rounds, in turns. CPU s: of all ranks. MB: the most that a rank "
        "allocates. DCP waits until the disk has the data (`fsync`)."
    )
    table = Table("main", "From ranks to ranks", columns, rows, ratio="fsdp2 / peer", noise=0.3, note=note)
    publish("checkpoint/reshard_to", "A Llama of 0.5 GB and its AdamW states to other gloo ranks", [table])


if __name__ == "__main__":
    main()
