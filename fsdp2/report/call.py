"""``fsdp2.report.report`` records steps inside a block; at its end, all ranks send their records to rank 0, which
writes."""

from __future__ import annotations

import os
import platform
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp2.core import (
    AfterForward,
    CommunicationError,
    ParallelMesh,
    ParamGroup,
    ScheduleError,
    Unit,
    UnitTree,
    _torch,
    comms,
    expect,
    plans,
    schedules,
    tree_of,
)
from fsdp2.extras.checked import AT_LEAST_1, check
from fsdp2.extras.exchange import exchange, together
from fsdp2.extras.units import sharded_unit
from fsdp2.memory.plan import TEMPORARY, trainable_of, unit_bytes
from fsdp2.optim.host_adamw.jobs import observe_host_steps
from fsdp2.planner.choose_units import AutoShard
from fsdp2.planner.machine import Machine
from fsdp2.planner.machines import MACHINES
from fsdp2.planner.measure import device_name
from fsdp2.planner.plans import Plan
from fsdp2.report import files
from fsdp2.report.data import RankRecord, RankStep, report_data
from fsdp2.report.figures import Prediction, StepFigures, Work
from fsdp2.report.findings import UnitInfo
from fsdp2.report.held import HeldBytes
from fsdp2.report.memory import memory
from fsdp2.report.modules import inputs_noted, watched
from fsdp2.report.operators import busy, operators
from fsdp2.report.recorder import DeviceClock, HostClock, Operations, Recorder, Step
from fsdp2.report.timeline import ALL_REDUCE, OF_HOST, Mark, spans, transfers, with_idle
from fsdp2.report.trace import observe

_CALLER = "fsdp2.report"
_recording: list[str] = []  # the class of the model that is recorded


class Report:
    """The result of :func:`fsdp2.report.report`.

    Attributes:
        data: the whole report after the block, on rank 0, as in the JSON file and the page; None on other ranks. Its
            fields are listed in docs/debugging.md.
    """

    def __init__(self) -> None:
        self.data: dict[str, Any] | None = None

    def __str__(self) -> str:
        """The step, the time it lost, the changes to make first, and what holds the memory."""
        return "no report: only rank 0 has one, after the block" if self.data is None else files.text_of(self.data)


@contextmanager
def report(
    model: nn.Module,
    *paths: str | os.PathLike[str],
    steps: int = 3,
    plan: Plan | AutoShard | None = None,
    profile: bool = False,
    tokens_per_rank: int | None = None,
    flops_per_rank: float | None = None,
    activations: bool = True,
) -> Iterator[Report]:
    """Record the first ``steps`` training steps of the block, and report on the typical one: a timeline of each rank,
    every unit's bytes and times, what holds the memory, the order of collectives, and what to change first.

    A step ends where the next forward begins after gradients were reduced. All ranks enter and leave the block
    together; rank 0 writes. Only ranks on the data-parallel mesh of rank 0 are in the report. If the block raises,
    nothing is written or sent.

    Args:
        model: the root of a sharded model.
        paths: the files to write: ``.html`` is one self-contained page, ``.trace.json`` a Chrome trace; or ``.json``.
        steps: how many steps to record; the rest of the block runs as without a report.
        plan: the result of :func:`fsdp2.planner.plan` or :func:`fsdp2.auto_shard`. The prediction for its recommended
            choice is shown next to the measurements, with ratios if the machine is the same. For another choice, pass
            ``dataclasses.replace(plan, recommended=choice)``.
        profile: also run torch.profiler, which makes the steps longer. The page then lists the time of each operation
            (on an accelerator, of each kernel) within each unit, and shows gaps in compute: *idle* is when no operation
            ran; on an accelerator, the host was late. A warning tells if torch.profiler saw no operations.
        tokens_per_rank: how many tokens this rank trains on per step, for tokens per second. The sum of all ranks is
            global, so ranks that share tokens pass their part.
        flops_per_rank: the floating-point operations of this rank per step, forward and backward, for MFU, the share
            of the device's bf16 peak. MFU is not reported on devices whose peak is unknown, such as CPUs.
        activations: on a device whose allocator has no statistics, such as the CPU, count what autograd saves in
            forward, with ``saved_tensors_hooks``. Turn it off if the forward uses transforms of ``torch.func``, which
            refuse such hooks. On other devices, activations are allocated memory that nothing else accounts for.

    Raises:
        ValueError: ``model`` is not sharded; ``steps``, tokens or FLOPs are less than 1; a path has another suffix, or
            rank 0 cannot write there; ``plan`` recommends nothing. All ranks raise.
        TypeError: an argument is of the wrong type.
        ScheduleError: inside another report, or inside torch.profiler with ``profile``; or no forward ran in the block
            on some rank.
        CommunicationError: another rank has not reached the end of the block.
    """
    expect(isinstance(model, nn.Module), f"{_CALLER}: model", model, "the root of a sharded model")
    unit = sharded_unit(model, _CALLER)
    tree = tree_of(unit)
    mesh = _mesh_of(tree)
    on_device = tree.executor.streams.runs_ahead
    with together(mesh.replicate), together(mesh.shard):
        for path in paths:
            check(f"{_CALLER}: paths", path, "path")
        for name, number, kind in (
            ("steps", steps, "int"),
            ("tokens_per_rank", tokens_per_rank, "int | None"),
            ("flops_per_rank", flops_per_rank, "float | None"),
        ):
            check(f"{_CALLER}: {name}", number, kind, AT_LEAST_1)
        for name, flag in (("profile", profile), ("activations", activations)):
            check(f"{_CALLER}: {name}", flag, "bool")
        plan = None if plan is None else _checked_plan(plan)
        _check_nothing_records(profile=profile)
        targets = [Path(path) for path in paths]
        if dist.get_rank() == 0:
            _check_targets(targets)
    operations = Operations(on_device=on_device) if profile else None
    synced, is_first_use, found = time.perf_counter(), not tree.schedule.tape.expected, Report()
    held = HeldBytes(tree, saves=activations)
    recorder = Recorder(DeviceClock(mesh.device, tree.units) if on_device else HostClock(), steps, held)
    modules = watched(tree, recorder.on_module, recorder.on_optimizer)
    profiled = nullcontext() if operations is None else operations.profiled()
    inputs: list[str] = []
    with attached(recorder, model, tree.class_name, held.watched(), modules, inputs_noted(tree, inputs), profiled):
        yield found
    recorder.end()
    record = RankRecord(
        rank=dist.get_rank(),
        host=platform.node(),
        synced=synced,
        is_first_use=is_first_use,
        steps=_rank_steps(recorder.steps(), held.units, operations, on_device=on_device),
        knows_activations=held.knows_activations,
        work=Work(tokens_per_rank, flops_per_rank),
        inputs=inputs,
        **_device_memory(mesh.device),
    )
    records = sorted(_exchange(mesh, record), key=lambda each: each.rank)
    idle = [each.rank for each in records if not each.steps]
    if idle:
        raise ScheduleError(
            f"{_CALLER}: no forward of {tree.class_name} as the root ran inside the block on ranks {idle}. Run at "
            "least one training step of that model in the block, on every rank. If another sharded module is around "
            "it, pass that one, and add no units inside the block."
        )
    with together(mesh.replicate), together(mesh.shard):
        if dist.get_rank() == 0:
            found.data = _data(tree, mesh, held, records, plan)
            for target in targets:
                files.write(target, found.data)


def _data(
    tree: UnitTree, mesh: ParallelMesh, held: HeldBytes, records: Sequence[RankRecord], plan: Plan | None
) -> dict[str, Any]:
    """The whole report. The tree may have other rules than before the block."""
    rules = tree_of(tree.root).schedule.rules
    return report_data(
        tree.class_name.removeprefix("FSDP"),
        _device_name(mesh),
        [_unit_info(name, each, rules[each.index]) for name, each in held.units.items() if each.tree is tree.root.tree],
        records,
        None if plan is None else _prediction(plan, mesh),
        _known_machine(mesh.device),
        (mesh.replicate.size, mesh.shard.size),
    )


@contextmanager
def attached(
    recorder: Recorder, model: nn.Module, class_name: str, *watching: AbstractContextManager[None]
) -> Iterator[None]:
    """Let ``recorder`` observe ``model``, inside of ``watching``, until it is done or the block ends."""
    _recording.append(class_name)
    try:
        with ExitStack() as stack:
            recorder.on_done = stack.close
            for each in watching:
                stack.enter_context(each)
            stack.enter_context(observe(model, recorder))
            stack.callback(comms.observe_activities, None)
            stack.callback(observe_host_steps, None)
            comms.observe_activities(recorder.on_activity)
            observe_host_steps(recorder.on_host_step)
            yield
    finally:
        _recording.clear()


def _check_nothing_records(*, profile: bool) -> None:
    if _recording:
        raise ScheduleError(
            f"{_CALLER}: a report on {_recording[0]} is being recorded. Leave its block before the next one begins."
        )
    if profile and _torch.is_profiling():
        raise ScheduleError(f"{_CALLER}: torch.profiler runs already. End it before the block, or leave profile out.")


def _check_targets(paths: Sequence[Path]) -> None:
    problems = (files.problem(each, files.PAGE, files.JSON, files.CHROME_TRACE) for each in paths)
    problem = next(filter(None, problems), None)
    if problem is not None:
        raise ValueError(f"{_CALLER}: {problem}")


def _checked_plan(plan: object) -> Plan:
    """Check that ``plan`` is a plan that recommends a choice."""
    if isinstance(plan, AutoShard):
        plan = plan.plan
    if not isinstance(plan, Plan):
        raise TypeError(
            f"{_CALLER}: plan is a {type(plan).__name__}, expected what fsdp2.planner.plan or "
            "fsdp2.auto_shard with a budget returned."
        )
    if plan.recommended is None:
        raise ValueError(
            f"{_CALLER}: this plan recommends nothing, since nothing fits. Pass dataclasses.replace(plan, "
            "recommended=choice) with the one of plan.choices that was applied."
        )
    return plan


def _prediction(plan: Plan, mesh: ParallelMesh) -> Prediction:
    """The prediction of ``plan`` for its recommended choice."""
    assert plan.recommended is not None  # _checked_plan has checked it
    choice, result = plan.recommended.choice, plan.recommended.result
    figures = StepFigures(
        step_ms=1e3 * result.time.step,
        compute_ms=1e3 * result.time.compute,
        exposed_ms=1e3 * result.time.exposed,
        temporary_nbytes=int(sum(result.memory[held] for held in TEMPORARY)),
        allocated_nbytes=int(result.peak_nbytes),
        reserved_nbytes=int(result.reserved_nbytes),
    )
    same_machine = plan.machine.is_made_of(device_name(mesh.device)) and plan.num_gpus == mesh.data_parallel_size
    return Prediction(choice.name, plan.machine.name, plan.num_gpus, str(plan.workload), same_machine, figures)


def _known_machine(device: torch.device) -> Machine | None:
    return next((each for each in MACHINES.values() if each.is_made_of(device_name(device))), None)


def _mesh_of(tree: UnitTree) -> ParallelMesh:
    """The largest mesh of the units, whose ranks are in the report."""
    meshes = [tree.root.mesh, *(group.mesh for unit in tree.units for group in unit.groups)]
    return max(meshes, key=lambda mesh: mesh.data_parallel_size)


def _exchange(mesh: ParallelMesh, value: object) -> list[Any]:
    """``value`` of every rank of ``mesh``."""
    try:
        return [each for row in exchange(mesh.replicate, exchange(mesh.shard, value)) for each in row]
    except RuntimeError as error:
        raise CommunicationError(
            f"{_CALLER}: rank {dist.get_rank()} waited for the other ranks in vain: {error}\n"
            "All ranks enter and leave the block together. Look for an exception on another rank."
        ) from error


def _rank_steps(
    steps: Sequence[Step], units: Mapping[str, Unit], operations: Operations | None, *, on_device: bool
) -> list[RankStep]:
    ran = [] if operations is None else operations.found()
    if operations is not None and not ran:
        warnings.warn(
            f"{_CALLER}: torch.profiler saw no operations on this rank's device, so nothing counts as idle. It may "
            "lack the permission to see them.",
            stacklevel=2,
        )
    sizes = {name: unit_bytes(unit) for name, unit in units.items()}
    replicated = {name for name, unit in units.items() if _replicas(unit) > 1}
    local = {name for name, unit in units.items() if all(group.mesh.shard.size == 1 for group in unit.groups)}
    found, intervals = [], busy(ran)
    marks: list[Mark] = []  # of all steps so far
    for step in steps:
        marks += step.marks
        did = spans(step.marks, step.start, step.stop, on_device=on_device)
        sent = [
            each
            for each in transfers(step.marks, replicated, on_device=on_device)
            if each.unit not in local or each.kind in (ALL_REDUCE, *OF_HOST)  # else nothing is sent
        ]
        held = memory(marks, sizes, step.start, step.stop)
        drawn = with_idle(did, intervals) if intervals else did
        found.append(RankStep(step.start, step.stop, drawn, sent, held, operators(did, ran)))
    return found


def _unit_info(name: str, unit: Unit, rules: schedules.UnitRules) -> UnitInfo:
    sizes, groups = unit_bytes(unit), unit.groups
    params = [param for group in groups for param in group.params]
    by_module: Counter[nn.Module] = Counter()
    for param in params:
        by_module[param.slots[0].module] += param.layout.numel * param.dtypes.param.itemsize
    gather, reduce = [0, 0], [0, 0]  # sent directly, and in buckets
    for group in groups:
        if group.mesh.shard.size == 1:
            continue
        for step in group.unsharded.plan().steps:
            gather[step.route is not plans.Route.DIRECT] += step.padded_nbytes
        for plan in group.gradients.plans(trainable_of(group))[0]:
            for part in plan.steps:
                reduce[part.route is not plans.Route.DIRECT] += part.layout.padded_numel * plan.dtypes.reduce.itemsize
    least = [group.comm.routing.direct_min_nbytes * group.mesh.shard.size for group in groups]
    return UnitInfo(
        name=name,
        shard_nbytes=sum(_torch.local_of(param.sharded).nbytes for param in params),
        unsharded_nbytes=sizes.unsharded,
        held_nbytes=sizes.alone,
        gather_direct_nbytes=gather[0],
        gather_bucket_nbytes=gather[1],
        reduce_direct_nbytes=reduce[0],
        reduce_bucket_nbytes=reduce[1],
        largest_module_nbytes=max(by_module.values(), default=0),
        is_small=bool(groups) and all(map(_is_small, groups)),
        bucket_nbytes=min(least, default=0),
        keeps_after_forward=rules.after_forward is AfterForward.KEEP,
        replicas=_replicas(unit),
        dtype=", ".join(sorted({str(param.dtypes.param).removeprefix("torch.") for param in params})),
    )


def _is_small(group: ParamGroup) -> bool:
    travelling = sum(step.layout.chunk_numel * step.dtype.itemsize for step in group.unsharded.plan().steps)
    return group.mesh.shard.size > 1 and travelling < group.comm.routing.direct_min_nbytes


def _replicas(unit: Unit) -> int:
    return max((group.mesh.replicate.size for group in unit.groups), default=1)


def _device_name(mesh: ParallelMesh) -> str:
    backend = "no collectives" if mesh.shard.group is None else _torch.backend_name(mesh.shard.group, mesh.device)
    return f"{device_name(mesh.device)} ({backend})"


def _device_memory(device: torch.device) -> dict[str, int | None]:
    """The allocator's peaks and the device's free memory; None for a device without such statistics."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    names = ("max_memory_allocated", "max_memory_reserved", "mem_get_info")
    allocated, reserved, info = (ask(device) if (ask := getattr(module, name, None)) else None for name in names)
    return {"allocated_nbytes": allocated, "reserved_nbytes": reserved, "free_nbytes": info and info[0]}
