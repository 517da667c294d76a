"""The model against steps that this machine can run: gloo ranks, one thread each.

Everything is measured in the same processes and rounds as the steps:

- compute, with what the runtime itself does: a step of the model sharded over one rank, which sends nothing
- collectives as the plans have them, alone
- a block's forward, with and without a gather beside it: its time, and the CPU time of the gather. Where ranks fill all
  cores, a transfer takes CPU time from compute, and its threads wait for a core
"""

from __future__ import annotations

import copy
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp2
from benchmarks.common import Block
from fsdp2.core.comm.streams import Waitable
from fsdp2.core.plan.dtypes import ParamDtypes
from fsdp2.core.plan.layout import shard_layout
from fsdp2.core.plan.plan import PlanInput, Route, compile_gather, compile_reduces
from fsdp2.core.schedule.schedule import AfterForward, UnitRules
from fsdp2.extras.peers import PeerComm
from fsdp2.memory.plan import UnitBytes
from fsdp2.planner.groups import GroupCost
from fsdp2.planner.machine import Contention, Resource, Transfer
from fsdp2.planner.queues import Op, Stream
from fsdp2.planner.simulate import Accelerator, CallCost, StepTime, steady_step

_DTYPES = ParamDtypes.uncast(torch.float32)


class Cpu(Accelerator):
    """The program computes, copies and sums: a gather starts when the program gets there, and a reduction is finished
    when half of the next backward is done."""

    def _compute_backward(self, call: CallCost) -> None:
        half = call.backward / 2
        self._program(f"backward {call.unit}, first half", half)
        self._land(call.unit)
        self._program(f"backward {call.unit}", half)

    def _arrive(self, unit: int, group: GroupCost) -> None:
        self._program(f"unpack {unit}", group.gather.behind)

    def _finish(self, group: GroupCost) -> None:
        super()._finish(group)
        self._program("land", sum(transfer.behind for transfer in group.reduce))

    def _launch(self, stream: Stream, label: str, transfer: Transfer, *, own_communicator: bool = False) -> Op:
        self.queues.wait(stream, self._program(f"launch {label}", transfer.before))
        return super()._launch(
            stream, label, replace(transfer, before=0.0, behind=0.0), own_communicator=own_communicator
        )

    def _release(self) -> None:
        """The program frees memory itself."""

    def _program(self, label: str, seconds: float) -> Op:
        return self.queues.enqueue(Stream.COMPUTE, label, work=seconds)


@dataclass(frozen=True)
class Case:
    num_ranks: int
    width: int
    num_blocks: int
    batch_size: int
    rounds: int

    def __str__(self) -> str:
        return f"{self.num_ranks} ranks, width {self.width} x {self.num_blocks} blocks, batch {self.batch_size}"


@dataclass(frozen=True)
class Measured:
    """Seconds, per block but for ``settle`` and ``step``. ``launch`` and ``finish`` keep the program busy, ``travel``
    does not. ``plain``: of a forward without the runtime; ``beside``: of the same with a gather, from launch to finish.
    ``gather_cpu``: CPU time of this gather. That is more than alone: gloo's thread polls while a message waits for its
    receive.

    ``settle``: the small all-reduce at the end of a step. ``cores``: that each rank has for itself.
    """

    forward: float
    backward: float
    gather_launch: float
    gather_travel: float
    gather_cpu: float
    gather_finish: float
    plain: float
    beside: float
    reduce_launch: float
    reduce_travel: float
    reduce_finish: float
    settle: float
    step: float
    cores: float


def contention(measured: Measured) -> Contention:
    """A rank computes on all of its share of the cores. A transfer wants some of it, too, and gets it, up to half. How
    fast a transfer is beside compute then follows from the time of both together."""
    share, spare = min(measured.cores, 1.0), max(measured.cores - 1.0, 0.0)
    busy = measured.gather_launch + measured.gather_finish
    taken = min((measured.gather_cpu - busy) / measured.gather_travel / share - spare, 0.5)
    if taken <= 0:
        return Contention()
    together, compute = measured.beside - busy, measured.plain / (1 - taken)
    if together > compute:  # compute ends first, and the rest of the transfer has the cores for itself
        rate = (compute + measured.gather_travel - together) / compute
    else:
        rate = taken * measured.gather_travel / max(together - measured.plain, 1e-9)
    return Contention(compute=taken, transfer=1 - min(max(rate, 0.01), 1.0))


def predict(case: Case, measured: Measured) -> StepTime:
    group = GroupCost(
        gather=_transfer(measured.gather_travel, measured.gather_launch, measured.gather_finish),
        regather=None,
        reduce=(_transfer(measured.reduce_travel, measured.reduce_launch, measured.reduce_finish),),
        nbytes=UnitBytes(),
        reduced_nbytes=0,
        shards_nbytes=0,
        trained_nbytes=0,
    )
    calls = [
        CallCost(block + 1, forward=measured.forward, backward=measured.backward) for block in range(case.num_blocks)
    ]
    rules = [UnitRules(after_forward=AfterForward.KEEP), *[UnitRules()] * case.num_blocks]
    groups = [None, *[group] * case.num_blocks]
    time = steady_step(Cpu(groups, calls, rules, shares_communicator=False), contention(measured))
    return StepTime(time.step + measured.settle, time.compute)


def _transfer(travel: float, launch: float, finish: float) -> Transfer:
    return Transfer(0.0, max(travel, 0.0), Resource.NETWORK, before=launch, behind=finish)


def measure(case: Case) -> Measured:
    """Medians of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", case, f"{folder}/results")
        torch.multiprocessing.spawn(_run_rank, arguments, nprocs=case.num_ranks)
        return Measured(**torch.load(f"{folder}/results"))


def _run_rank(rank: int, store: str, case: Case, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=case.num_ranks)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(case.width) for _ in range(case.num_blocks)))
    x = torch.randn(case.batch_size, case.width)
    bare = _Bare(model, x)
    mesh = init_device_mesh("cpu", (case.num_ranks, 1), mesh_dim_names=("all", "one"))
    alone, together = (_sharded(copy.deepcopy(model), mesh[name]) for name in ("one", "all"))
    rounds = []
    for _ in range(case.rounds + 2):
        _step(together, x)
        rounds.append({"step": sum(_step(together, x)), **_compute(alone, x), **bare.measure()})
    medians = {name: statistics.median(taken[name] for taken in rounds[2:]) for name in rounds[0]}
    if rank == 0:
        torch.save({**medians, "cores": len(os.sched_getaffinity(0)) / case.num_ranks}, results)
    dist.barrier()
    dist.destroy_process_group()


def _sharded(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    for module in [*model, model]:
        fsdp2.fully_shard(module, mesh=mesh)
    return model


def _compute(model: nn.Sequential, x: Tensor) -> dict[str, float]:
    forward, backward = _step(model, x)
    return {"forward": forward / len(model), "backward": backward / len(model)}


def _step(model: nn.Sequential, x: Tensor) -> tuple[float, float]:
    """Seconds of forward and of backward, which all ranks begin together; gradients are dropped."""
    dist.barrier()
    start = time.perf_counter()
    loss = model(x).sum()
    half = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    for parameter in model.parameters():
        parameter.grad = None
    return half - start, end - half


class _Bare:
    """One block's collectives as its plans have them, without compute."""

    def __init__(self, model: nn.Sequential, x: Tensor) -> None:
        self._model, self._x = model, x
        world = dist.group.WORLD
        assert world is not None
        self._num_ranks = num_ranks = world.size()
        self._comm = PeerComm(world)
        shapes = {name: tuple(parameter.shape) for name, parameter in model[0].named_parameters()}
        inputs = [PlanInput(name, shard_layout(shape, 0, num_ranks), _DTYPES) for name, shape in shapes.items()]
        plan = compile_gather(dict(enumerate(inputs)), self._comm.routing)
        (reduce,) = compile_reduces(inputs, self._comm.routing, num_ranks)
        bucketed = sum(step.layout.padded_numel for bucket in plan.buckets for step in bucket.steps)
        numels = [bucketed] * bool(bucketed) + [step.layout.padded_numel for step in plan.on_route(Route.DIRECT)]
        self._bucketed = bucketed > 0
        self._unpacked = torch.zeros(bucketed)
        self._whole = [torch.zeros(numel) for numel in numels]
        self._parts = [torch.zeros(numel // num_ranks) for numel in numels]
        self._packed = [torch.zeros(length * num_ranks) for _, length in reduce.calls]
        self._sums = [torch.zeros(length) for _, length in reduce.calls]
        self._flags = torch.zeros(len(inputs), dtype=torch.uint8)
        self._gather = self._comm.all_gather(self._whole, self._parts)

    def measure(self) -> dict[str, float]:
        plain, plain_cpu = self._forward()
        beside, beside_cpu = self._forward(gathers=True)
        pieces = {"plain": plain, "beside": beside, "gather_cpu": beside_cpu - plain_cpu}
        return {**pieces, **self._gathers(), **self._reduces(), "settle": self._settles()}

    def _forward(self, *, gathers: bool = False) -> tuple[float, float]:
        """Seconds and CPU seconds of a block's forward, and of a gather beside it. Ranks begin together, and then drift
        apart."""
        dist.barrier()
        x = self._x
        with _Clock() as clock:
            for block in self._model:
                works = self._gather() if gathers else []
                x = block(x)
                if gathers:
                    self._finish_gather(works)
        return clock.wall / len(self._model), clock.cpu / len(self._model)

    def _gathers(self) -> dict[str, float]:
        dist.barrier()
        with _Clock() as launch:
            works = self._gather()
        with _Clock() as travel:
            _wait(works)
        with _Clock() as finish:
            self._finish_gather([])
        return {"gather_launch": launch.wall, "gather_travel": travel.wall, "gather_finish": finish.wall}

    def _finish_gather(self, works: Sequence[Waitable]) -> None:
        _wait(works)
        if self._bucketed:
            self._unpacked.copy_(self._whole[0])

    def _reduces(self) -> dict[str, float]:
        with _Clock() as finish:
            for total in self._sums:  # the sum of each other rank's part, and the division by the ranks
                for _ in range(self._num_ranks - 1):
                    total.add_(total)
                total.div_(self._num_ranks)
        dist.barrier()
        with _Clock() as launch:
            if self._bucketed:
                self._packed[0].copy_(self._unpacked)
            works = self._comm.reduce_scatter()(self._sums, self._packed)
        with _Clock() as travel:
            _wait(works)  # forms the sums, too
        return {
            "reduce_launch": launch.wall,
            "reduce_travel": travel.wall - finish.wall,
            "reduce_finish": finish.wall,
        }

    def _settles(self) -> float:
        dist.barrier()
        with _Clock() as clock:
            dist.all_reduce(self._flags, dist.ReduceOp.MAX)
        return clock.wall


def _wait(works: Sequence[Waitable]) -> None:
    for work in works:
        work.wait()


class _Clock:
    """Seconds, and CPU seconds of all threads of this process, inside of a ``with``."""

    wall = cpu = 0.0

    def __enter__(self) -> _Clock:
        self._start = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall, self.cpu = time.perf_counter() - self._start[0], time.process_time() - self._start[1]
