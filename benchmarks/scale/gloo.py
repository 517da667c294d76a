"""The model against a step that this machine can run: two gloo ranks, one thread each.

Bare compute and bare collectives are measured in the same processes as the steps, both alone and at the same time:
computing and sending share the cores here, which is the contention that the model is given. From these figures alone it
predicts the step.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing
from common import Block
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2.comm.backends import PeerComm
from fsdp2.plan.dtypes import ParamDtypes
from fsdp2.plan.layout import ShardLayout
from fsdp2.plan.plan import PlanInput, Route, compile_gather, compile_reduces
from fsdp2.schedule.schedule import AfterForward, UnitRules
from fsdp2.tools.planner.groups import Flight, GroupCost
from fsdp2.tools.planner.machine import Contention, Resource, Transfer
from fsdp2.tools.planner.simulate import Cpu, StepTime, UnitCost, steady_step

NUM_RANKS = 2
_DTYPES = ParamDtypes(*4 * (torch.float32,))


@dataclass(frozen=True)
class Case:
    width: int
    num_blocks: int
    batch_size: int
    rounds: int

    def __str__(self) -> str:
        return f"width {self.width} x {self.num_blocks} blocks, batch {self.batch_size}"


@dataclass(frozen=True)
class Measured:
    """Seconds, per block but for ``step``. ``launch`` and ``finish`` keep the program busy, ``travel`` does not.

    ``computing``: a forward beside a gather that was launched before it. ``waiting``: for that gather afterwards.
    """

    forward: float
    backward: float
    gather_launch: float
    gather_travel: float
    gather_finish: float
    reduce_launch: float
    reduce_travel: float
    reduce_finish: float
    computing: float
    waiting: float
    step: float


def contention(measured: Measured) -> Contention:
    """How much slower the forward was, and how much of the gather was left when it had ended."""
    travelled = measured.gather_travel - measured.waiting
    return Contention(
        compute=_share(1 - measured.forward / measured.computing),
        transfer=_share(1 - travelled / measured.computing) if measured.waiting > measured.gather_travel / 10 else 0.0,
    )


def _share(value: float) -> float:
    return min(max(value, 0.0), 0.95)


def predict(case: Case, measured: Measured) -> StepTime:
    group = GroupCost(
        gather=Flight(_travel(measured.gather_travel), measured.gather_launch, measured.gather_finish),
        regather=None,
        reduce=(Flight(_travel(measured.reduce_travel), measured.reduce_launch, measured.reduce_finish),),
        unsharded_nbytes=0,
        grad_nbytes=0,
        reduced_nbytes=0,
        shards_nbytes=0,
        trained_nbytes=0,
    )
    units = [UnitCost("block", measured.forward, measured.backward, group)] * case.num_blocks
    rules = [UnitRules(after_forward=AfterForward.KEEP), *[UnitRules()] * case.num_blocks]
    return steady_step(Cpu(units, rules, shares_communicator=False), contention(measured))


def _travel(seconds: float) -> Transfer:
    return Transfer(0.0, max(seconds, 0.0), Resource.NETWORK)


def measure(case: Case) -> Measured:
    """Medians of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_run_rank, (f"{folder}/store", case, f"{folder}/results"), nprocs=NUM_RANKS)
        return Measured(**torch.load(f"{folder}/results"))


def _run_rank(rank: int, store: str, case: Case, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(case.width) for _ in range(case.num_blocks)))
    x = torch.randn(case.batch_size, case.width)
    bare = _Bare(model, x)
    step = _stepper(copy.deepcopy(model), x)
    rounds = []
    for _ in range(case.rounds + 2):
        step()
        rounds.append({"step": step(), **bare.measure()})
    names = rounds[0]
    medians = {name: statistics.median(taken[name] for taken in rounds[2:]) for name in names}
    if rank == 0:
        torch.save(medians, results)
    dist.barrier()
    dist.destroy_process_group()


def _stepper(model: nn.Sequential, x: Tensor) -> Callable[[], float]:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for module in [*model, model]:
        fsdp2.fully_shard(module, mesh=mesh)
    return lambda: _timed(lambda: model(x).sum().backward(), model)


def _timed(run: Callable[[], object], model: nn.Module | None = None) -> float:
    """Seconds of ``run``, which all ranks begin together; gradients of ``model`` are dropped."""
    dist.barrier()
    start = time.perf_counter()
    run()
    taken = time.perf_counter() - start
    for parameter in model.parameters() if model is not None else ():
        parameter.grad = None
    return taken


class _Bare:
    """Compute without communication, and one block's collectives as its plans have them, without compute."""

    def __init__(self, model: nn.Sequential, x: Tensor) -> None:
        self._model, self._x = model, x
        world = dist.group.WORLD
        assert world is not None
        self._comm = PeerComm(world)
        shapes = {name: tuple(parameter.shape) for name, parameter in model[0].named_parameters()}
        inputs = [PlanInput(name, ShardLayout(shape, 0, NUM_RANKS), _DTYPES) for name, shape in shapes.items()]
        plan = compile_gather(dict(enumerate(inputs)), self._comm)
        (reduce,) = compile_reduces(inputs, self._comm, NUM_RANKS)
        self._bucketed = [step.layout.padded_numel for bucket in plan.buckets for step in bucket.steps]
        direct = [step.layout.padded_numel for step in plan.on_route(Route.DIRECT)]
        numels = [sum(bucketed) for bucketed in [self._bucketed] if bucketed] + direct
        self._whole = [torch.zeros(numel) for numel in numels]
        self._unpacked = torch.zeros(sum(self._bucketed))
        self._parts = [torch.zeros(numel // NUM_RANKS) for numel in numels]
        self._packed = [torch.zeros(length * NUM_RANKS) for _, length in reduce.calls]
        self._sums = [torch.zeros(length) for _, length in reduce.calls]
        self._gather = self._comm.all_gather(self._whole, self._parts)

    def measure(self) -> dict[str, float]:
        return {**self._compute(), **self._gathers(), **self._reduces(), **self._together()}

    def _compute(self) -> dict[str, float]:
        outputs: list[Tensor] = []
        forward = _timed(lambda: outputs.append(self._model(self._x).sum()))
        backward = _timed(outputs[0].backward, self._model)
        return {"forward": forward / len(self._model), "backward": backward / len(self._model)}

    def _gathers(self) -> dict[str, float]:
        dist.barrier()
        start = time.perf_counter()
        works = self._gather()
        launched = time.perf_counter()
        for work in works:
            work.wait()
        arrived = time.perf_counter()
        self._unpack()
        return {
            "gather_launch": launched - start,
            "gather_travel": arrived - launched,
            "gather_finish": time.perf_counter() - arrived,
        }

    def _unpack(self) -> None:
        if self._bucketed:
            self._unpacked.copy_(self._whole[0])

    def _reduces(self) -> dict[str, float]:
        finish = _timed(self._finish_reduce)
        dist.barrier()
        start = time.perf_counter()
        if self._bucketed:
            self._packed[0].copy_(self._unpacked)
        works = self._comm.reduce_scatter(self._sums, self._packed)
        launched = time.perf_counter()
        for work in works:
            work.wait()  # forms the sums, too
        return {
            "reduce_launch": launched - start,
            "reduce_travel": time.perf_counter() - launched - finish,
            "reduce_finish": finish,
        }

    def _finish_reduce(self) -> None:
        """The sums of two ranks, and the division of the averages, counted as twice a pass over the sums."""
        for total in self._sums:
            total.add_(total)
            total.div_(NUM_RANKS)

    def _together(self) -> dict[str, float]:
        computing = waiting = 0.0
        dist.barrier()
        x = self._x
        for block in self._model:
            works = self._gather()
            launched = time.perf_counter()
            x = block(x)
            computed = time.perf_counter()
            for work in works:
                work.wait()
            computing += computed - launched
            waiting += time.perf_counter() - computed
        return {"computing": computing / len(self._model), "waiting": waiting / len(self._model)}
