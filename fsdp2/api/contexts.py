"""What holds inside a ``with`` block: whole parameters (``unsharded``), gradients that stay here (``no_sync``).

``unsharded`` lends the slots of parameters to the user. What it binds there has memory of its own and the dtype of the
shards. Forwards without gradients compute with it, and the runtime takes no part in them; others are refused, since
nobody would reduce their gradients. The shards are the truth before the block and after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.comm.backends import exchange
from fsdp2.comm.services import services_for
from fsdp2.group.all_gather import Gather, GatheredMemory, flat_shards, shard_slice
from fsdp2.group.group import ParamGroup, groups_by_slot
from fsdp2.group.param import ShardedParam, Slot
from fsdp2.plan.dtypes import ParamDtypes
from fsdp2.plan.mesh import NO_AXIS, ParallelMesh
from fsdp2.plan.plan import PlanInput, compile_gather
from fsdp2.runtime.root import units_under
from fsdp2.schedule.schedule import Pass
from fsdp2.schedule.states import GroupState, Lent
from fsdp2.types import ScheduleError


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Backwards inside the block reduce nothing: gradients of all units under ``module`` accumulate unsharded on each
    rank, in reduce dtype. The next backward outside of it reduces them with its own.

    As ``set_requires_gradient_sync(False)``; behind the block, each unit has the setting that it had before.

    Args:
        module: a sharded module, or one that contains some.

    Raises:
        ValueError: nothing under ``module`` is sharded.
    """
    units = [unit for _, unit in units_under(module)]
    if not units:
        raise ValueError(
            f"no_sync: nothing under this {type(module).__name__} was given to fully_shard. Pass the sharded model."
        )
    rules = [(unit, unit.rules.reduces) for unit in units]
    options = [(group, group.options.requires_all_reduce) for unit in units for group in unit.groups]
    for unit in units:
        unit.configure(reduces=False)
        for group in unit.groups:
            group.configure(requires_all_reduce=False)
    try:
        yield
    finally:
        for unit, reduces in rules:
            unit.configure(reduces=reduces)
        for group, requires_all_reduce in options:
            group.configure(requires_all_reduce=requires_all_reduce)


@contextmanager
def unsharded(
    module: nn.Module, writeback: bool = True, rank0_only: bool = False, offload_to_cpu: bool = False
) -> Iterator[None]:
    """Inside the block, the parameters under ``module`` are whole, plain ``nn.Parameter`` s of the shards' dtype.

    For what has to see whole parameters: initialisation, surgery on weights, ``state_dict`` of the unsharded model,
    generation of many tokens. Read them, write them in place or replace them by others of the same shape. All ranks
    enter and leave the block together. Parameters that tensor parallelism has cut are the DTensors that it made.

    Under ``torch.no_grad()``, modules under ``module`` run as if they had never been sharded: nothing is communicated,
    ranks may differ in what they run, and inputs and outputs are not cast.

    Args:
        module: any module of a sharded tree; of units around it, only its own parameters are gathered.
        writeback: copy values into the shards when the block ends. If it raises, nothing is written.
        rank0_only: only the first rank of the data-parallel mesh has whole parameters, the others see their shards.
            What that rank writes is written on all ranks.
        offload_to_cpu: whole parameters are on the host. Units are gathered one by one, so the device never has more
            than one of them.

    Memory: besides the parameters themselves, a unit's parameters twice while it is gathered. Values change, and
    nothing else: whole parameters have no gradients, and freezing them does not freeze the shards.

    Raises:
        ValueError: no parameter under ``module`` is sharded; a replacement has another shape. Nothing is written then.
        ScheduleError: a forward or backward runs; parameters are lent to another ``unsharded`` already; a forward in
            the block records gradients.
        RuntimeError: a parameter is still on the meta device; with ``rank0_only``, the block raised on another rank.

    Source: ``FullyShardedDataParallel.summon_full_params`` of PyTorch, with its arguments.
    """
    loans = _loans(module)
    meshes = dict.fromkeys(loan.group.mesh for loan in loans) if rank0_only and writeback else {}
    with ExitStack() as stack:
        for loan in loans:
            loan.group.settle()
            loan.group.lend()
            stack.callback(loan.group.take_back)
            loan.hand_out(rank0_only=rank0_only, device=torch.device("cpu") if offload_to_cpu else None)
        whole = {loan.group for loan in loans if loan.is_whole(rank0_only=rank0_only)}
        for _, unit in units_under(module):
            stack.callback(setattr, unit, "lent", unit.lent)
            unit.lent = Lent.ALL if whole.issuperset(unit.groups) else Lent.PART
        with _raising_on_all_ranks(meshes):
            yield
            values = [loan.values() for loan in loans]
    if writeback:
        for loan, found in zip(loans, values, strict=True):
            loan.write(found, rank0_only=rank0_only)


@contextmanager
def _raising_on_all_ranks(meshes: Iterable[ParallelMesh]) -> Iterator[None]:
    """If the block raises on some rank of ``meshes``, it does on all: those that did not would wait for what is
    written."""
    try:
        yield
    except Exception as error:
        _problem(meshes, f"on rank {dist.get_rank()}: {type(error).__name__}: {error}")
        raise
    problem = _problem(meshes, None)
    if problem is not None:
        raise RuntimeError(f"unsharded(rank0_only=True): nothing is written, since the block raised {problem}")


def _problem(meshes: Iterable[ParallelMesh], mine: str | None) -> str | None:
    """``mine``, or that of another rank."""
    for mesh in meshes:
        found = (each for row in exchange(mesh.replicate, exchange(mesh.shard, mine)) for each in row)
        mine = next((each for each in found if each is not None), None)
    return mine


def _loans(module: nn.Module) -> list[_Loan]:
    """What is under ``module``, by group, in the order of its tree, which is the same on all ranks."""
    _check_idle(module)
    by_slot = groups_by_slot()
    loans: dict[ParamGroup, _Loan] = {}
    for child in module.modules():
        for name in _torch.parameters_dict(child):
            found = by_slot.get(Slot(child, name))
            if found is not None:
                group, index = found
                loans.setdefault(group, _Loan(group)).params.setdefault(index, group.params[index])
    if not loans:
        raise ValueError(
            f"unsharded: no parameter under this {type(module).__name__} is sharded. Pass the model that fully_shard "
            "was called on, or a module in it."
        )
    for group in loans:
        if group.state is GroupState.LENT:
            raise ScheduleError(f"unsharded: parameters of unit '{group.name}' are lent to another unsharded(...).")
    return list(loans.values())


def _check_idle(module: nn.Module) -> None:
    running = {unit.running for _, unit in units_under(module)} - {Pass.IDLE}
    if running or _torch.in_backward():
        found = Pass.BACKWARD if _torch.in_backward() else running.pop()
        name = type(module).__name__.removeprefix("FSDP")
        raise ScheduleError(
            f"unsharded: a {found.value} of {name} is running. Call it between passes; after an exception, call "
            "reset_iter_state() first."
        )


@dataclass(eq=False)
class _Loan:
    """Parameters of one group, by their indices, that the user has whole for a while."""

    group: ParamGroup
    params: dict[int, ShardedParam] = field(default_factory=dict)

    def is_whole(self, *, rank0_only: bool) -> bool:
        """Whether this rank has all parameters of the group whole."""
        return len(self.params) == len(self.group.params) and (not rank0_only or _is_first(self.group.mesh))

    def hand_out(self, *, rank0_only: bool, device: torch.device | None) -> None:
        """Bind whole parameters on ``device``, None for that of the mesh; with ``rank0_only`` on the first rank."""
        for param, full in self._gathered(device, keep=not rank0_only or _is_first(self.group.mesh)):
            whole = nn.Parameter(param.spec.unsharded_tensor(full), requires_grad=param.sharded.requires_grad)
            for module, name in param.slots:
                setattr(module, name, whole)

    def values(self) -> list[torch.Tensor]:
        """What is bound now: this rank's part of each whole parameter, or its shard where that was left bound."""
        return [_value(param) for param in self.params.values()]

    def write(self, values: list[torch.Tensor], *, rank0_only: bool) -> None:
        """Copy ``values`` into the shards; with ``rank0_only`` those of the first rank."""
        mesh = self.group.mesh
        with torch.no_grad():
            for param, value in zip(self.params.values(), values, strict=True):
                if rank0_only:
                    value = _from_first_rank(value, param, mesh)
                _torch.local_of(param.sharded).copy_(param.shard_of(value))

    def _gathered(self, device: torch.device | None, *, keep: bool) -> list[tuple[ShardedParam, torch.Tensor]]:
        plain = set(self.group.shards.plain)
        gather = _gather(self.group, {index: param for index, param in self.params.items() if index in plain})
        whole = []
        for index, param in self.params.items():
            full = gather.outputs[index] if index in plain else _whole_subclass(param)
            if keep:
                whole.append((param, torch.empty_like(full, device=device or full.device).copy_(full)))
        gather.release()
        services_for(self.group.mesh.device).flush()
        return whole


def _gather(group: ParamGroup, params: dict[int, ShardedParam]) -> Gather:
    """All-gather ``params`` in the dtypes of their shards, in one launch; the result has arrived. The group's own
    gather casts, and moves all its parameters."""
    mesh, comm = group.mesh, group.unsharded.comm
    services = services_for(mesh.device)
    services.streams.gather_after_compute()
    with torch.no_grad(), services.streams.on_gather():
        inputs = {i: PlanInput(p.name, p.layout, ParamDtypes(*4 * (p.dtypes.orig,))) for i, p in params.items()}
        plan = compile_gather(inputs, comm)
        flats = flat_shards(plan, mesh.device)
        for step in plan.steps:
            param = params[step.index]
            shard_slice(flats, step, param.shard_shape).copy_(_torch.local_of(param.sharded))
        gather = Gather(plan, flats, GatheredMemory(plan, mesh.device), mesh.shard.rank, comm, services, None)
    gather.issue().wait()
    return gather


def _whole_subclass(param: ShardedParam) -> torch.Tensor:
    """The values of a parameter whose shard is a tensor subclass, as DTensor gathers them."""
    if param.spec.unsharded is not None:
        raise ValueError(
            f"unsharded: parameter '{param.full_name}' is a {type(_torch.local_of(param.sharded)).__name__} that model "
            "axes have cut as well. Read it with full_tensor()."
        )
    with torch.no_grad():
        return param.sharded.full_tensor()  # type: ignore[attr-defined]


def _value(param: ShardedParam) -> torch.Tensor:
    """What the user has left in the slots of ``param``; of a tie, a place where it was replaced."""
    found = [getattr(module, name, None) for module, name in param.slots]
    bound = next((each for each in found if each is not found[0]), found[0])
    local = _torch.local_of(bound) if isinstance(bound, DTensor) else bound
    expected = param.layout.shape
    if bound is param.sharded:
        return param.sharded.detach()
    if not isinstance(local, torch.Tensor) or tuple(local.shape) != expected:
        shape = tuple(local.shape) if isinstance(local, torch.Tensor) else None
        raise ValueError(
            f"unsharded: parameter '{param.full_name}' was replaced by a {type(bound).__name__}"
            f"{f' of shape {shape}' if shape is not None else ''}, expected a parameter of shape {expected}. Nothing "
            "is written; change shapes before fully_shard."
        )
    return local.detach()


# Ranks


def _is_first(mesh: ParallelMesh) -> bool:
    return mesh.shard.rank == 0 and mesh.replicate.rank == 0


def _from_first_rank(value: torch.Tensor, param: ShardedParam, mesh: ParallelMesh) -> torch.Tensor:
    """``value`` of the first rank of ``mesh``: along the replicate axis to the first of each row, then along rows."""
    if _is_first(mesh):
        value = value.to(mesh.device, param.dtypes.orig).contiguous()
    else:
        value = torch.empty(param.layout.shape, dtype=param.dtypes.orig, device=mesh.device)
    for axis in (mesh.replicate if mesh.shard.rank == 0 else NO_AXIS, mesh.shard):
        if axis.group is not None and axis.size > 1:
            dist.broadcast(value, group=axis.group, group_src=0)
    return value
