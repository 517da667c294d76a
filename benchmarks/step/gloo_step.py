"""Claim: on 2 and 4 gloo ranks of one host, a step takes 0.4 to 0.8 of the time that it takes under torch's
``fully_shard``.

Forward and backward of transformer blocks, one thread per rank; all peers take turns in the same processes. Of each
dtype, the second table says how far from the floor that is: the model's computation beside bare collectives of the same
bytes. The last table is of a Llama of Hugging Face's transformers, on two ranks.

It stays below seven minutes on two idle cores: a case has as many rounds as fit into its time, three at least.

    python benchmarks/step/gloo_step.py [--ranks N] [--case WIDTH BLOCKS TOKENS | --llama] [--dtype NAME]
        [--only NAME ...] [--direct-min-nbytes N]

DeepSpeed takes part where it is installed and finds a C++ compiler, which it calls at its first use.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
from benchmarks.common import Bars, Table, publish
from benchmarks.llama import MISSING, Llama
from benchmarks.step.gloo_peers import FLOORS, LLAMA_PEERS, PEERS, Block, Step, Waits, missing_peers
from fsdp2.extras.peers import PeerComm

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    width: int
    num_blocks: int
    num_tokens: int
    max_ranks: int = 4
    warm_ups: int = 1  # steps ahead of each that counts: the first one after another peer finds cold memory

    def model(self) -> nn.Module:
        return nn.Sequential(*(Block(self.width) for _ in range(self.num_blocks)))

    def input(self, rank: int, dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        return torch.randn(1, self.num_tokens, self.width, generator=generator).to(dtype)


class LlamaCase(Case):
    def model(self) -> nn.Module:
        return self._llama.model()

    def input(self, rank: int, dtype: torch.dtype) -> Tensor:
        return self._llama.tokens(seed=rank)

    @property
    def _llama(self) -> Llama:
        return Llama(self.width, self.num_blocks, self.num_tokens, head_width=64)


@dataclass(frozen=True)
class Options:
    dtypes: tuple[str, ...]
    subjects: tuple[str, ...]
    direct_min_nbytes: int | None


CASES = (Case(256, 8, 64), Case(1024, 3, 128), Case(2048, 2, 128, max_ranks=2, warm_ups=0))
LLAMA = LlamaCase(512, 4, 128, max_ranks=2)
MIN_ROUNDS, MAX_ROUNDS, SECONDS = 3, 15, 28  # per case and dtype


@dataclass(frozen=True)
class Taken:
    """Seconds of a step, and how many of them the main thread waited for communication."""

    step: float
    waited: float


Figures = dict[str, dict[str, Taken]]  # by dtype and subject


def stepper(prepare: Callable[[Any], Step], model: nn.Module, x: Tensor, waits: Waits) -> Callable[[], Taken]:
    step = prepare(copy.deepcopy(model))

    def timed() -> Taken:
        dist.barrier()
        before, start = waits.seconds, time.perf_counter()
        step(x)
        taken = Taken(time.perf_counter() - start, waits.seconds - before)
        getattr(step, "between", lambda: None)()
        return taken

    return timed


def is_time_left(start: float) -> bool:
    """As rank 0 sees it."""
    left = torch.tensor(time.perf_counter() - start < SECONDS)
    dist.broadcast(left, 0)
    return bool(left)


def measure_here(case: Case, dtype: torch.dtype, subjects: tuple[str, ...], waits: Waits) -> dict[str, Taken]:
    torch.manual_seed(0)
    model, x = case.model().to(dtype), case.input(dist.get_rank(), dtype)
    start = time.perf_counter()
    steps = {name: stepper((PEERS | FLOORS)[name], model, x, waits) for name in subjects}
    for step in steps.values():
        step()
    taken: dict[str, list[Taken]] = {name: [] for name in steps}
    for round_ in range(MAX_ROUNDS):
        if not is_time_left(start) and round_ >= MIN_ROUNDS:
            break
        for name, step in steps.items():
            taken[name].append([step() for _ in range(case.warm_ups + 1)][-1])
    return {
        name: Taken(statistics.median(each.step for each in all_), statistics.median(each.waited for each in all_))
        for name, all_ in taken.items()
    }


def run_rank(rank: int, store: str, num_ranks: int, case: Case, options: Options, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    if options.direct_min_nbytes is not None:
        PeerComm.routing = replace(PeerComm.routing, direct_min_nbytes=options.direct_min_nbytes)
    waits = Waits()
    figures = {name: measure_here(case, DTYPES[name], options.subjects, waits) for name in options.dtypes}
    if rank == 0:
        torch.save(figures, results)
    dist.barrier()
    os._exit(0)  # some peer's atexit handler waits for ranks that are gone


def measure(num_ranks: int, case: Case, options: Options) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", num_ranks, case, options, f"{folder}/results")
        torch.multiprocessing.spawn(run_rank, arguments, nprocs=num_ranks)
        return torch.load(arguments[-1], weights_only=False)


def hidden(taken: Taken, alone: Taken) -> str:
    """The share of the time that communication takes alone in which the main thread did not wait for it."""
    return f"{1 - taken.waited / alone.step:.0%}"


NOTE = "unsharded: no communication. ratio: fsdp2 to torch FSDP2. FSDP1 and class: FullyShardedDataParallel."
RATIOS = {
    "ratio": ("fsdp2", "torch FSDP2"),
    "class / FSDP1": ("fsdp2's class", "FSDP1"),
    "class / fsdp2": ("fsdp2's class", "fsdp2"),
}


def step_rows(found: Mapping[str, Figures], dtype: str, peers: Sequence[str]) -> list[list[object]]:
    rows: list[list[object]] = []
    for row, figures in found.items():
        seconds = {name: taken.step for name, taken in figures[dtype].items()}
        ratios = [seconds.get(ours, nan) / seconds.get(theirs, nan) for ours, theirs in RATIOS.values()]
        rows.append([row, *(f"{seconds[name] * 1e3:.1f}" for name in peers), *ratios])
    return rows


def step_table(found: Mapping[str, Figures], dtype: str, options: Options) -> Table:
    """``found`` by row."""
    peers = [name for name in PEERS if name in options.subjects]
    plot = Bars(peers[1:], unit="ms", base=peers[0]) if {"unsharded", "fsdp2"} <= set(peers) else None
    note = " ".join([NOTE, *(f"Without {name}: {reason}." for name, reason in missing_peers().items())])
    title = f"{dtype}, median ms per step"
    return Table(dtype, title, ["", *peers, *RATIOS], step_rows(found, dtype, peers), note=note, plot=plot)


def llama_table(options: Options) -> Table:
    peers = tuple(name for name in LLAMA_PEERS if name in options.subjects)
    figures = measure(LLAMA.max_ranks, LLAMA, replace(options, dtypes=("fp32",), subjects=peers))
    rows = step_rows({f"{LLAMA.max_ranks} ranks, width {LLAMA.width}": figures}, "fp32", peers)
    title = f"Llama of {LLAMA.num_blocks} layers, {LLAMA.num_tokens} tokens per rank, fp32, median ms per step"
    return Table("llama", title, ["", *peers, *RATIOS], rows, note=NOTE)


def floor_table(found: Mapping[str, Figures], dtype: str) -> Table:
    columns = ["", "compute", *FLOORS, "fsdp2", "fsdp2 / floor", "hidden", "hidden by torch"]
    rows: list[list[object]] = []
    for row, figures in found.items():
        taken = figures[dtype]
        shown = [f"{taken[name].step * 1e3:.1f}" for name in ("unsharded", *FLOORS, "fsdp2")]
        shares = [hidden(taken["fsdp2"], taken["ours alone"]), hidden(taken["torch FSDP2"], taken["gloo alone"])]
        rows.append([row, *shown, taken["fsdp2"].step / taken["floor"].step, *shares])
    note = (
        "gloo alone, ours alone: bare collectives of the same bytes, no compute. floor: compute beside ours alone. "
        "hidden: the share of that communication time in which the computing thread was not blocked waiting; below "
        "zero, it waited longer than communication takes alone."
    )
    return Table(f"{dtype}_floor", f"{dtype}, distance to the floor, ms", columns, rows, "fsdp2 / floor", note=note)


def arguments() -> tuple[tuple[int, ...], tuple[Case, ...], bool, Options]:
    """Numbers of ranks, cases, whether the Llama takes part, and the rest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="instead of 2 and 4")
    parser.add_argument("--case", type=int, nargs=3, metavar=("WIDTH", "BLOCKS", "TOKENS"), help="instead of three")
    parser.add_argument("--llama", action="store_true", help="the Llama alone")
    parser.add_argument("--dtype", choices=DTYPES, help="instead of both; the Llama is in fp32")
    parser.add_argument("--only", nargs="+", choices=[*PEERS, *FLOORS], help="of what is compared")
    parser.add_argument("--direct-min-nbytes", type=int, help="from which size of a shard on it travels without a copy")
    given = parser.parse_args()
    absent = missing_peers()
    for name, reason in absent.items():
        print(f"without {name}: {reason}")
    if MISSING:
        print(f"without the Llama: {MISSING}")
    subjects = tuple(given.only or [name for name in [*PEERS, *FLOORS] if name not in absent])
    dtypes = (given.dtype,) if given.dtype else tuple(DTYPES)
    cases = () if given.llama else (Case(*given.case),) if given.case else CASES
    has_llama = not MISSING and not given.case and given.dtype != "bf16" and given.ranks in (None, LLAMA.max_ranks)
    options = Options(dtypes, subjects, given.direct_min_nbytes)
    return (given.ranks,) if given.ranks else (2, 4), cases, has_llama, options


def main() -> None:
    ranks, cases, has_llama, options = arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = {
        f"{num_ranks} ranks, width {case.width}": measure(num_ranks, case, options)
        for num_ranks in ranks
        for case in cases
        if num_ranks <= case.max_ranks
    }
    shown = [step_table(found, dtype, options) for dtype in options.dtypes if found]
    if found and {*FLOORS, "unsharded", "torch FSDP2", "fsdp2"} <= set(options.subjects):
        shown += [floor_table(found, dtype) for dtype in options.dtypes]
    if has_llama:
        shown.append(llama_table(options))
    sizes = [f"{case.num_blocks} blocks of width {case.width} and {case.num_tokens} tokens" for case in cases]
    sizes += ["a Llama"] if has_llama else []
    publish("step/gloo_step", f"Forward and backward on gloo, one thread per rank: {', '.join(sizes)} per rank", shown)


if __name__ == "__main__":
    main()
