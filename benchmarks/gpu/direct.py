"""From which size on tensors should travel direct: what one GPU can say about ``CollectiveComm``.

A block of Llama 3 8B in bf16 is gathered and reduced as on 8 and on 64 ranks, with a plan for each threshold. Buckets
are filled and emptied whole. NCCL, with one rank, is given this rank's chunk of each message, all in one launch. So
what launches and copies cost is there. What small messages cost on the wire is not: that takes several GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.common import Bars, Table, medians_in_turns
from benchmarks.gpu.device import device
from benchmarks.gpu.groups import real_group
from benchmarks.gpu.subjects import BF16, Block, Shape
from fsdp2.core.comm.backends import CollectiveComm, Launch, ReduceLaunch
from fsdp2.core.comm.streams import Waitable, streams_for, wait_for
from fsdp2.core.group.all_gather import Gather, GatheredMemory, flat_shards
from fsdp2.core.group.reduce_scatter import Reduce
from fsdp2.core.plan.dtypes import ParamDtypes
from fsdp2.core.plan.layout import shard_layout
from fsdp2.core.plan.mesh import NO_AXIS, Axis, AxisRole, ParallelMesh
from fsdp2.core.plan.plan import PlanInput, Route, compile_gather, compile_reduces

THRESHOLDS = {"16 KiB": 16 << 10, "256 KiB": 256 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20, "infinite": 1 << 62}
OURS, BUCKET = "1 MiB", "infinite"  # OURS: that of CollectiveComm.routing; a test holds the two together
RANKS = (8, 64)

# By numbers of ranks and names of thresholds, of a block: how many of its tensors travel direct; ms of the device for
# its gather and for its reduction; ms of the host to enqueue both.
Costs = dict[str, dict[str, dict[str, float]]]
Clock = Callable[[Callable[[], None], torch.device], float]


class ChunkComm(CollectiveComm):
    """Sends this rank's chunk of each tensor, and no other, to this rank."""

    def __init__(self, group: dist.ProcessGroup, where: torch.device, direct_min_nbytes: int) -> None:
        super().__init__(group, on_stream=streams_for(where).runs_ahead)
        self.routing = replace(CollectiveComm.routing, direct_min_nbytes=direct_min_nbytes)

    def all_gather(self, outputs: list[Tensor], inputs: list[Tensor]) -> Launch:
        chunks = [output[: mine.numel()] for output, mine in zip(outputs, inputs, strict=True)]
        return super().all_gather(chunks, inputs)

    def reduce_scatter(self, *, averages: bool = False) -> ReduceLaunch:
        launch = super().reduce_scatter(averages=averages)

        def launch_chunks(outputs: list[Tensor], inputs: list[Tensor]) -> Sequence[Waitable]:
            chunks = [values[: output.numel()] for output, values in zip(outputs, inputs, strict=True)]
            return launch(outputs, chunks)

        return launch_chunks


def inputs_of(shape: Shape, num_ranks: int) -> list[PlanInput]:
    """A block, of which each rank has a shard in bf16."""
    with torch.device("meta"):
        block = Block(shape, has_gains=True)
    return [
        PlanInput(name, shard_layout(tuple(parameter.shape), 0, num_ranks), ParamDtypes.uncast(BF16))
        for name, parameter in block.named_parameters()
    ]


class OneBlock:
    """A block as rank 0 of ``num_ranks`` has it. ``gather`` and ``reduce`` end where compute may go on."""

    def __init__(self, shape: Shape, where: torch.device, num_ranks: int, direct_min_nbytes: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        inputs = inputs_of(shape, num_ranks)
        comm, self._streams = ChunkComm(group, where, direct_min_nbytes), streams_for(where)
        plan = compile_gather(dict(enumerate(inputs)), comm.routing)
        self.num_direct = len(plan.on_route(Route.DIRECT))
        memory = GatheredMemory(plan, where)
        with self._streams.on_gather:
            self._gather = Gather(plan, flat_shards(plan, where), memory, 0, comm, self._streams, None)
        plans = compile_reduces(inputs, comm.routing, num_ranks)  # NCCL averages in a kernel if it has one rank only
        one_rank = init_device_mesh(where.type, (1,))
        mesh = ParallelMesh(one_rank, (AxisRole.SHARD,), Axis(group, num_ranks, 0), NO_AXIS, where)
        self._reduce = Reduce(plans, mesh, comm, self._streams, None)
        self._grads = [
            torch.zeros(step.layout.shape, dtype=BF16, device=where) for each in plans for step in each.steps
        ]

    def gather(self) -> None:
        self._gather.issue()
        self._gather.wait()
        self._gather.release()

    def reduce(self) -> None:
        launched = self._reduce.launch(list(self._grads))
        wait_for(launched.works)
        self._streams.wait_here(launched.read)


def measure(name: str, shape: Shape, rounds: int) -> Costs:
    """Runs in a process of its own, on the device of that name."""
    on = device(name)
    where = torch.device(on.type) if name == "cpu" else torch.device(on.type, 0)
    with real_group(on), torch.no_grad():
        return {str(num_ranks): _measure(where, shape, num_ranks, rounds) for num_ranks in RANKS}


def _measure(where: torch.device, shape: Shape, num_ranks: int, rounds: int) -> dict[str, dict[str, float]]:
    blocks = {text: OneBlock(shape, where, num_ranks, nbytes) for text, nbytes in THRESHOLDS.items()}

    def medians(clock: Clock, what: str) -> dict[str, float]:
        subjects = {text: partial(clock, getattr(block, what), where) for text, block in blocks.items()}
        for subject in subjects.values():
            subject()  # loads kernels, and allocates memory that is used again
        return medians_in_turns(subjects, rounds)

    gather_ms, reduce_ms = (medians(_device_ms, what) for what in ("gather", "reduce"))
    host_ms = [medians(_host_ms, what) for what in ("gather", "reduce")]
    return {
        text: {
            "num_direct": block.num_direct,
            "gather_ms": gather_ms[text],
            "reduce_ms": reduce_ms[text],
            "host_ms": sum(each[text] for each in host_ms),
        }
        for text, block in blocks.items()
    }


def _device_ms(call: Callable[[], None], where: torch.device, count: int = 10) -> float:
    """Of each of ``count`` calls in a row, by the device's clock."""
    if where.type == "cpu":
        return _host_ms(call, where, count)
    before, after = (torch.Event(where, enable_timing=True) for _ in range(2))
    torch.accelerator.synchronize()
    before.record()
    for _ in range(count):
        call()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / count


def _host_ms(call: Callable[[], None], where: torch.device, count: int = 10) -> float:
    """Until each of ``count`` calls is enqueued."""
    if where.type != "cpu":
        torch.accelerator.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) * 1e3 / count


def device_ms(cost: Mapping[str, float]) -> float:
    return cost["gather_ms"] + cost["reduce_ms"]


def table(costs: Costs) -> Table:
    cells: list[list[object]] = []
    for text in THRESHOLDS:
        row: list[object] = [text]
        for by_threshold in costs.values():
            cost = by_threshold[text]
            row += [cost["num_direct"], *(float(cost[name]) for name in ("gather_ms", "reduce_ms", "host_ms"))]
        cells.append(row)
    names = ("direct", "gather ms", "reduction ms", "host ms")
    columns = ["direct from", *(f"{num_ranks} ranks: {name}" for num_ranks in costs for name in names)]
    title = "CollectiveComm.routing.direct_min_nbytes: a block of Llama 3 8B in bf16, gathered and reduced"
    note = (
        "direct: how many of nine tensors. Launches of NCCL, which with one rank copies the chunk that it would send, "
        "and copies of whole buckets. Nothing of the wire, where small messages cost most: that takes several GPUs."
    )
    drawn = [column for column in columns if column.endswith(("gather ms", "reduction ms"))]
    return Table("thresholds", title, columns, cells, ratio=None, note=note, plot=Bars(drawn, "ms"))
