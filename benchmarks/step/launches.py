"""Claim: beyond the unsharded model, a step under fsdp2 has fewer copies and fewer waits of streams than under torch's
``fully_shard``, no kernels of its own, and as many collectives but for one. Where a matrix is cut along dim 1, it has
as many copies.

One warm step of 16 blocks with the shapes of Llama 3 8B at an eighth of its width: 9 parameters each. The size from
which tensors travel direct is scaled alike, so each of them travels as it does at full width. The device is the
simulated accelerator of ``tests/accelerator``, which runs both runtimes on streams; this process is rank 0 of ranks
that are not there. What is counted is what the host asks for, so nothing has to be computed, and counts are exact: the
same on every run.

- copies: operations that only move or cast; a list of tensors is one where CUDA has one kernel for it. The addresses
  that such a kernel gets in a small copy of their own are left out;
- other kernels: operations that compute, and fills;
- collectives: launches of NCCL, a coalesced one as one;
- stream waits: one stream waits for an event of another, those inside NCCL included;
- host waits: the host waits for the device.

Per block: what 8 more blocks add, divided by 8. "bf16/fp32": parameters travel and compute in bf16, gradients are
reduced in fp32; the unsharded model is then bf16. The optimizer is left out.

    python benchmarks/step/launches.py [--list CASE]

``--list`` prints instead which lines of the runtimes ask for what in ``CASE``. A C++ compiler is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
from benchmarks.common import Table, publish, table as text_table
from benchmarks.gpu.subjects import BF16, FP32, RUNTIMES, Block, Shape
from benchmarks.null_group import NullGroup
from fsdp2.core.comm.backends import CollectiveComm
from tests.accelerator import device, group

SCALE = 8  # of 8B's width
SHAPE = Shape(dim=512, num_heads=32, num_kv_heads=8, hidden=1792)
NUM_BLOCKS = 16
FEWER_BLOCKS = 8  # the first and the last blocks of a step are special; those between them are not
NUM_TOKENS = 2
BACKEND = "simalone"
KERNELS, ALL_KERNELS = ("copies", "other kernels"), "copies and other kernels"
MEASURES = (*KERNELS, ALL_KERNELS, "collectives", "stream waits", "host waits")
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "broadcast", "scatter")
COPIES = ("copy_", "_foreach_copy_", "split_with_sizes_copy", "_chunk_cat", "cat")
FOLDERS = {name: f"{Path(str(runtime.__file__)).parent}/" for name, runtime in RUNTIMES.items()}
MODULES = f"{Path(nn.__file__).parent}/"
NUM_FRAMES = 3  # of the runtime, that a line of the list shows

Counts = Counter[tuple[str, str]]  # by what is asked for, and by the lines that ask
Step = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """``shape``: of the mesh. ``is_mixed``: bf16/fp32. ``num_backwards``: of a step, the last of which reduces.
    ``second_dim``: whether one matrix of each block is cut along dim 1."""

    name: str
    title: str
    shape: tuple[int, ...] = (8,)
    is_mixed: bool = True
    num_backwards: int = 1
    second_dim: bool = False


CASES = {
    case.name: case
    for case in (
        Case("fp32", "8 ranks, fp32", is_mixed=False),
        Case("mixed", "8 ranks, bf16/fp32"),
        Case("hsdp", "HSDP on 2x2 ranks, bf16/fp32", shape=(2, 2)),
        Case("accumulation", "8 ranks, bf16/fp32, two backwards, the first without communication", num_backwards=2),
        Case("dim_1", "8 ranks, bf16/fp32, one matrix cut along dim 1", second_dim=True),
    )
}


# Ranks that are not there


class AloneGroup(group.SimNCCL):
    """Orders streams as NCCL does, and moves nothing."""

    def __init__(self, store: object, rank: int, size: int, timeout: object) -> None:
        dist.ProcessGroup.__init__(self, rank, size)
        self._size, self._rank = size, rank
        self._on_host = NullGroup(rank, size)
        self._stream: torch.Stream | None = None
        self._last_tag = 0

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return BACKEND

    def _launch(self, message: Any, opts: Any, written: Any, read: Any) -> Any:
        return super()._launch(_Nothing(message.name), opts, written, read)


class _Nothing:
    """A message that no rank waits for."""

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self) -> None: ...
    def finish(self) -> None: ...
    def arrived(self, seconds: float) -> bool:
        return True


@contextmanager
def alone(shape: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """The mesh of rank 0."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, AloneGroup, devices=[device.DEVICE, "cpu"])
    world_size = torch.Size(shape).numel()
    dist.init_process_group(BACKEND, rank=0, world_size=world_size, store=dist.HashStore())
    try:
        yield init_device_mesh(device.DEVICE, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    finally:
        dist.destroy_process_group()


# A step


def model_on_device(subject: str, case: Case, num_blocks: int, mesh: DeviceMesh) -> nn.Sequential:
    """``num_blocks`` blocks, unsharded or under a runtime."""
    runtime: Any = RUNTIMES.get(subject)
    with torch.device("meta"):
        model = nn.Sequential(*(Block(SHAPE, has_gains=True) for _ in range(num_blocks)))
    model.to(BF16 if case.is_mixed and runtime is None else FP32).to_empty(device=device.DEVICE)
    for unit in (*model, model) if runtime else ():
        _shard(unit, runtime, case, mesh)
    return model


def stepper(model: nn.Module, case: Case) -> Step:
    """A warm step of ``model``."""
    x = torch.empty(1, NUM_TOKENS, SHAPE.dim, dtype=BF16 if case.is_mixed else FP32, device=device.DEVICE)
    parameters = list(model.parameters())
    syncs = getattr(model, "set_requires_gradient_sync", None)

    def step() -> None:
        for index in range(case.num_backwards):
            if syncs is not None:
                syncs(index == case.num_backwards - 1)
            model(x).sum().backward()
        for parameter in parameters:
            parameter.grad = None
        device.load().drop_all()  # nobody asks for values

    for _ in range(3):
        step()
    return step


def _shard(unit: nn.Module, runtime: Any, case: Case, mesh: DeviceMesh) -> None:
    policy = runtime.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    cut = {block.gate.weight for block in unit.modules() if isinstance(block, Block) and case.second_dim}
    runtime.fully_shard(
        unit,
        mesh=mesh,
        mp_policy=policy if case.is_mixed else runtime.MixedPrecisionPolicy(),
        shard_placement_fn=lambda parameter: Shard(1 if parameter in cut else 0),
    )


def counts_of_a_step(subject: str, case: Case, num_blocks: int, mesh: DeviceMesh) -> Counts:
    step = stepper(model_on_device(subject, case, num_blocks, mesh), case)
    found: Counts = Counter()
    folder = FOLDERS.get(subject, "")

    def note(what: str) -> None:
        found[what.removeprefix("aten::"), lines_of(folder)] += 1

    device.host_syncs.clear()
    with device.on_launch(note):
        step()
    found.update(("host wait", sync) for sync in device.host_syncs)
    return found


def lines_of(folder: str) -> str:
    """Who in ``folder`` asks, the innermost line first; nobody, where a module does."""
    lines: list[str] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None and len(lines) < NUM_FRAMES and not frame.f_code.co_filename.startswith(MODULES):
        if folder and frame.f_code.co_filename.startswith(folder):
            lines.append(f"{frame.f_code.co_filename.removeprefix(folder)}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)


def measure_of(what: str) -> str:
    if what in COLLECTIVES:
        return "collectives"
    return {"wait": "stream waits", "host wait": "host waits"}.get(what, KERNELS[what not in COPIES])


def totals(counts: Counts) -> Counter[str]:
    found: Counter[str] = Counter()
    for (what, _), count in counts.items():
        found[measure_of(what)] += count
    found[ALL_KERNELS] = sum(found[each] for each in KERNELS)
    return found


# Tables


def table(case: Case) -> Table:
    with alone(case.shape) as mesh:
        taken = {
            (subject, num_blocks): totals(counts_of_a_step(subject, case, num_blocks, mesh))
            for subject in ("unsharded", *RUNTIMES)
            for num_blocks in (FEWER_BLOCKS, NUM_BLOCKS)
        }
    rows: list[list[object]] = []
    for measure in MEASURES:
        fewer, all_ = (
            {name: taken[name, num][measure] - taken["unsharded", num][measure] for name in RUNTIMES}
            for num in (FEWER_BLOCKS, NUM_BLOCKS)
        )
        per_block = [_whole((all_[name] - fewer[name]) / (NUM_BLOCKS - FEWER_BLOCKS)) for name in RUNTIMES]
        ratio = all_["fsdp2"] / all_["torch"] if all_["torch"] else None
        rows.append([measure, *per_block, *all_.values(), ratio])
    columns = ["", "fsdp2, a block", "torch, a block", "fsdp2, a step", "torch, a step", "ratio"]
    return Table(case.name, case.title, columns, rows, noise=0)


def _whole(value: float) -> int | float:
    return int(value) if value.is_integer() else value


def print_list(case: Case) -> None:
    """What a step asks for under either runtime, without the model."""
    for subject in RUNTIMES:
        with alone(case.shape) as mesh:
            fewer, all_ = (counts_of_a_step(subject, case, num, mesh) for num in (FEWER_BLOCKS, NUM_BLOCKS))
        print(f"{case.title}: {subject}, in {FOLDERS[subject]}\n")
        lines = []
        for (what, asking), count in all_.items():
            if asking:
                per_block = _whole((count - fewer[what, asking]) / (NUM_BLOCKS - FEWER_BLOCKS))
                lines.append((measure_of(what), per_block, count, what, asking))
        lines.sort(key=lambda line: (MEASURES.index(line[0]), line[3:]))
        print(text_table(["", "a block", "a step", "what", "the runtime's lines, the innermost first"], lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", choices=CASES, help="print which lines ask for what in this case instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device.load()
    routing = CollectiveComm.routing
    CollectiveComm.routing = replace(routing, direct_min_nbytes=routing.direct_min_nbytes // SCALE**2)
    if options.list:
        print_list(CASES[options.list])
        return
    publish(
        "step/launches", "What a step asks the device for, beyond the unsharded model", list(map(table, CASES.values()))
    )


if __name__ == "__main__":
    main()
