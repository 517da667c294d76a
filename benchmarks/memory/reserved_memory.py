"""Claim: where the host runs ahead of the device, a step under ``fsdp2.FullyShardedDataParallel`` reserves 0.4 to 1
times the memory that it reserves under torch's class, but for two of 22 rows: gradients that add up in fp32 instead of
bf16, and a large tied embedding in fp32. Of torch's ``fully_shard``, it is 0.7 to 1.07.

On an accelerator, memory that was freed serves the stream that had it, and no other: an allocator reserves, for each
stream, the most that it held at once. peak_memory.py cannot see that, since the CPU has no streams. So the same steps
run here on the simulated accelerator of ``tests/accelerator``; this process is rank 0 of ranks that are not there.
Counted from a warm step on, minus the shards. Counts are exact.

torch's class marks gradients as used by its stream of reductions, which gives their memory back when the device comes
to that mark. So its figure depends on how far the host runs ahead:

- in step: the host waits for the device behind each block, as on the CPU;
- late: the device does reductions last.

The other runtimes let streams wait before they give memory back, so their figures do not depend on it.

    python benchmarks/memory/reserved_memory.py [--cases plain HSDP]

A C++ compiler is needed.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
from benchmarks.common import Block, Table, publish
from benchmarks.memory.peak_memory import CASES, KIB, PEERS, Case, Model, stepper
from benchmarks.step.launches import alone
from tests.accelerator import device

REDUCTIONS = ("reduce-scatter", "all-reduce")
COLUMNS = {
    "fsdp2": ("fsdp2", False),
    "torch FSDP2": ("torch FSDP2", False),
    "FSDP1 in step": ("FSDP1", True),
    "FSDP1 late": ("FSDP1", False),
    "class": ("class", False),
}


def reserved_nbytes(case: Case, peer: str, in_step: bool) -> int:
    """Most that the streams hold in a step beyond the shards, each of them at its own time; run in a process of its
    own."""
    warnings.simplefilter("ignore")
    extension = device.load()
    torch.set_num_threads(1)
    device.schedule(late=() if in_step else REDUCTIONS)
    with alone(case.mesh) as mesh:
        torch.manual_seed(0)
        model = PEERS[peer](Model(case).to(device.DEVICE), case, mesh)
        if in_step:
            _wait_behind_blocks(model)
        shards_nbytes = sum(getattr(each, "_local_tensor", each).nbytes for each in model.parameters())
        step = stepper(model, case)
        for _ in range(2):
            step()
            extension.drop_all()  # nobody asks for values
        gc.collect()
        extension.reset_peak_memory()
        step()
        found: int = extension.max_memory_reserved()
        extension.drop_all()
    return found - shards_nbytes


def _wait_behind_blocks(model: nn.Module) -> None:
    def wait(*_: object) -> None:
        device.load().drop_all()

    def behind(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        wait()
        if output.requires_grad:
            output.register_hook(wait)

    for module in model.modules():
        if isinstance(module, Block):
            module.register_forward_hook(behind)


def row(case: Case) -> list[object]:
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        found = pool.starmap(reserved_nbytes, [(case, *each) for each in COLUMNS.values()], chunksize=1)
    ours, theirs, in_step, late, cls = found
    ratios = (cls / in_step, cls / late, ours / theirs)
    return [case.name, *(f"{nbytes / KIB:.0f}" for nbytes in found), *ratios]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=[""], help="only rows whose name starts like one of these")
    names = tuple(parser.parse_args().cases)
    cases = [case for case in CASES if case.name.startswith(names) and not case.hooks]
    columns = ["", *COLUMNS, "class / in step", "class / late", "ratio"]
    note = "FSDP1, class: FullyShardedDataParallel of torch and of fsdp2. ratio: fsdp2 to torch FSDP2."
    rows = [row(case) for case in cases]
    table = Table("main", "KiB", columns, rows, noise=0, note=note)
    publish(
        "memory/reserved_memory", "What streams reserve in one step beyond the shards, simulated accelerator", [table]
    )


if __name__ == "__main__":
    main()
