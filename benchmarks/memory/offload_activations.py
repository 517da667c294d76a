"""Claim: with ``offload_activations``, a step computes nothing twice, and takes as much memory as with a checkpoint
around each block, and what one block saves.

One warm step of 16 blocks with the shapes of Llama 3 8B at an eighth of its width, in bf16 with reduction in fp32, as
rank 0 of 8 that are not there, on the simulated accelerator of ``tests/accelerator``. Counts are exact: the same on
every run.

- after forward, peak: KiB on the device, beyond what it held before the step;
- copied: KiB that forward copies to the host, and backward back. ``save_on_cpu`` copies parameters, too, and memory
  once for each tensor that is saved of it, all on the stream of compute, which waits meanwhile;
- operations: what compute runs, without copies;
- host waits: how often the host waits for the device;
- host ms: processor time of the host to ask for a step, of which nothing is computed, median of 5. On a GPU, it is
  hidden where it is shorter than the step.

How long copies take on a link, and how much of that compute hides, cannot be measured without a device.

    python benchmarks/memory/offload_activations.py

A C++ compiler is needed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
import fsdp2
from benchmarks.common import Table, publish
from benchmarks.gpu.subjects import BF16, Block
from benchmarks.step.launches import COLLECTIVES, NUM_BLOCKS, SCALE, SHAPE, alone
from fsdp2.core.comm.backends import CollectiveComm
from fsdp2.memory import offload_activations
from tests.accelerator import device

BATCH, LENGTH = 16, 16  # short, since this device's attention saves what a GPU's does not: each pair of tokens
NUM_ROUNDS = 5
KIB = 1024
MIN_NBYTES = 32 * KIB  # a key has 64


class CountedSaveOnCPU(save_on_cpu):
    """torch's, which counts what it copies."""

    nbytes = 0

    def __init__(self) -> None:
        super().__init__(pin_memory=True, device_type=device.DEVICE)
        pack = self.pack_hook

        def counted(tensor: Tensor) -> Any:
            CountedSaveOnCPU.nbytes += tensor.nbytes
            return pack(tensor)

        self.pack_hook = counted


class Model(nn.Module):
    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(SHAPE, has_gains=True) for _ in range(NUM_BLOCKS))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x


@dataclass(frozen=True)
class Way:
    """``around``: the context of forwards. ``budget_units``: for ``offload_activations``, in blocks; None: without."""

    name: str
    checkpoints: bool = False
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    budget_units: int | None = None


WAYS = (
    Way("all stay on the device"),
    Way("checkpoints", checkpoints=True),
    Way("torch's save_on_cpu, pinned", around=CountedSaveOnCPU),
    Way("offload_activations", budget_units=0),
    Way("offload_activations, budget of 4 blocks", budget_units=4),
    Way("offload_activations of checkpoints", checkpoints=True, budget_units=0),
)


def sharded(way: Way, mesh: Any) -> nn.Module:
    with torch.device("meta"):
        model = Model(checkpoints=way.checkpoints)
    model.to_empty(device=device.DEVICE)
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    for unit in (*model.blocks, model):
        fsdp2.fully_shard(unit, mesh=mesh, mp_policy=policy)
    return model


def row(way: Way, block_nbytes: int) -> list[Any]:
    with alone((8,)) as mesh:
        model = sharded(way, mesh)
        offload = None
        if way.budget_units is not None:
            offload = offload_activations(model, way.budget_units * block_nbytes, min_nbytes=MIN_NBYTES)
        x = torch.empty(BATCH, LENGTH, SHAPE.dim, dtype=BF16, device=device.DEVICE)
        after_forward = 0

        def step() -> float:
            nonlocal after_forward
            start = time.process_time()
            with way.around():
                loss = model(x).sum()
            after_forward = device.load().memory_allocated()
            loss.backward()
            seconds = time.process_time() - start
            model.zero_grad()
            device.load().drop_all()  # nobody asks for values
            return seconds

        for _ in range(3):
            step()
        before = device.load().memory_allocated()
        device.load().reset_peak_memory()
        device.host_syncs.clear()
        CountedSaveOnCPU.nbytes = 0
        asked: Counter[str] = Counter()
        with device.on_launch(lambda what: asked.update([what])):
            step()
        held, peak = after_forward - before, device.load().max_memory_allocated() - before
        waits, sent = len(device.host_syncs), CountedSaveOnCPU.nbytes
        ms = 1e3 * statistics.median(step() for _ in range(NUM_ROUNDS))
    if offload is not None:
        sent = sum(unit.sent for unit in offload.units)
    num_operations = sum(count for what, count in asked.items() if what not in (*COLLECTIVES, "wait", "aten::copy_"))
    return [way.name, held // KIB, peak // KIB, sent // KIB or None, num_operations, waits, f"{ms:.0f}"]


def main() -> None:
    torch.set_num_threads(1)
    device.load()
    routing = CollectiveComm.routing
    CollectiveComm.routing = replace(routing, direct_min_nbytes=routing.direct_min_nbytes // SCALE**2)
    rows: list[list[Any]] = []
    for way in WAYS:
        rows.append(row(way, rows[0][1] * KIB // NUM_BLOCKS if rows else 0))
    (_, _, least, *_) = rows[1]
    columns = ["", "after forward", "peak", "copied", "operations", "host waits", "host ms", "ratio"]
    note = f"A block saves {rows[0][1] // NUM_BLOCKS} KiB. ratio: peak to that with checkpoints."
    table = Table("main", "KiB and counts", columns, [[*each, each[2] / least] for each in rows], noise=0, note=note)
    publish("memory/offload_activations", "Activations on the host, simulated accelerator", [table])


if __name__ == "__main__":
    main()
