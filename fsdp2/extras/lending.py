"""Whole parameters for the duration of a ``with`` block.

``unsharded`` lends the slots of parameters to the user. The whole parameters have their own memory. Forwards that
record gradients are refused, since nothing would reduce the gradients. Outside the block, the shards are the source of
truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from types import TracebackType
from typing import ParamSpec

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.core import (
    Axis,
    GroupState,
    ParallelMesh,
    ParamGroup,
    ScheduleError,
    ShardedParam,
    Slot,
    Unit,
    _torch,
    comms,
    door,
    groups_by_slot,
    is_plain,
    plans,
    units_under,
)
from fsdp2.extras.checked import checked
from fsdp2.extras.exchange import exchange, mark_alone

WHOLE = "fsdp2_whole"  # a method that a tensor subclass may have: see whole_subclass

_P = ParamSpec("_P")


class _Block(AbstractContextManager[None]):
    def __init__(self, around: AbstractContextManager[None]) -> None:
        self._around = around

    @door.entry
    def __enter__(self) -> None:
        self._around.__enter__()

    @door.entry
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._around.__exit__(kind, error, traceback)


def entered_and_left(
    make: Callable[_P, AbstractContextManager[None]],
) -> Callable[_P, AbstractContextManager[None]]:
    """Decorate a ``contextmanager`` so that the compiler and the user's modes see neither its entry nor its exit."""

    @wraps(make)
    def block(*args: _P.args, **kwargs: _P.kwargs) -> AbstractContextManager[None]:
        return _Block(make(*args, **kwargs))

    return door.entry(block)


@checked()
@entered_and_left
@contextmanager
def unsharded(
    module: nn.Module, writeback: bool = True, rank0_only: bool = False, offload_to_cpu: bool = False
) -> Iterator[None]:
    """Inside the block, the parameters under ``module`` are whole, plain ``nn.Parameter`` s of the shards' dtype.

    Read them, write them in place, or replace them with parameters of the same shape. All ranks must enter and leave
    the block together. Parameters cut by tensor parallelism are the DTensors that tensor parallelism made. Parameters
    are gathered one by one, on the device; during its gather, a parameter takes twice its memory. Whole parameters have
    no gradients, and freezing them does not freeze the shards.

    Under ``torch.no_grad()``, modules under ``module`` run as if they were not sharded: nothing is communicated, ranks
    may run different modules, and inputs and outputs are not cast.

    Args:
        module: any module of a sharded tree. Only parameters under ``module`` are gathered, even if its unit has more.
        writeback: copy values into the shards when the block ends. If the block raises, nothing is written.
        rank0_only: only the first rank of the data-parallel mesh has whole parameters; other ranks see their shards.
            The values of the first rank are written on all ranks.
        offload_to_cpu: keep whole parameters on the host; the device holds one at a time.

    Raises:
        ValueError: no parameter under ``module`` is sharded; a replacement has another shape. Nothing is written then.
        ScheduleError: a forward or backward is running; parameters are already lent to another ``unsharded``; a forward
            in the block records gradients.
        RuntimeError: a parameter is still on the meta device; with ``rank0_only``, the block raised on another rank.

    Source: ``FullyShardedDataParallel.summon_full_params`` of PyTorch, with its arguments.
    """
    units = [unit for _, unit in units_under(module)]
    with lent_whole(params_under(module), units, writeback, rank0_only, offload_to_cpu):
        yield


@contextmanager
def lent_whole(
    lent: Mapping[ParamGroup, Sequence[ShardedParam]],
    units: Sequence[Unit],
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
) -> Iterator[None]:
    """``unsharded`` for the parameters ``lent``. Those of ``units`` that are lent completely run as if not sharded."""
    ranks = {mesh: all_ranks(mesh) for mesh in dict.fromkeys(group.mesh for group in lent)} if rank0_only else {}
    with ExitStack() as stack:
        whole = set()  # groups that this rank gets completely
        handed_out: dict[ShardedParam, nn.Parameter] = {}
        for group, params in lent.items():
            take_shards(group)
            group.lend()
            stack.callback(group.take_back)
            is_here = not rank0_only or ranks[group.mesh].rank == 0
            if is_here and len(params) == len(group.params):
                whole.add(group)
            for param in params:
                device = torch.device("cpu") if offload_to_cpu else None
                handed_out[param] = _hand_out(group, param, is_here=is_here, device=device)
        for unit in units:
            stack.callback(setattr, unit, "is_whole", unit.is_whole)
            unit.is_whole = whole.issuperset(unit.groups)
        with _raising_on_all_ranks(ranks.values() if writeback else ()):
            yield
            values = {param: _value(param, bound) for param, bound in handed_out.items()}
    if writeback:
        with torch.no_grad():
            for group, params in lent.items():
                for param in params:
                    value = _from_first_rank(values[param], param, ranks[group.mesh]) if rank0_only else values[param]
                    _torch.local_of(param.sharded).copy_(param.shard_of(value))


def take_shards(group: ParamGroup) -> None:
    """Bind the shards of ``group``, to read and write them, when no step on the host writes them any more."""
    if group.on_gather is not None:
        group.on_gather()
        streams = group.unsharded.streams
        with streams.on_gather:
            written = streams.record()
        streams.wait_here(written)  # compute waits for copies from the host, like gathers: it accesses the shards
    group.take_replaced()


def all_ranks(mesh: ParallelMesh) -> Axis:
    """All data-parallel ranks: the shard and replicate axes combined into one. Collective on a 2D mesh."""
    return plans.replicated(mesh).replicate


@contextmanager
def _raising_on_all_ranks(axes: Iterable[Axis]) -> Iterator[None]:
    """If the block raises on one rank of ``axes``, raise on all: the others would wait for the values to write."""
    try:
        yield
    except Exception as error:
        _problem(axes, f"on rank {dist.get_rank()}: {type(error).__name__}: {error}")
        raise
    problem = _problem(axes, None)
    if problem is not None:
        raise RuntimeError(f"unsharded(rank0_only=True): no shard was written, because the block raised {problem}")


def _problem(axes: Iterable[Axis], mine: str | None) -> str | None:
    """The first problem that a rank of ``axes`` has; without ``axes``, ``mine``."""
    for axis in axes:
        found = exchange(axis, mine)
        mine = next((each for each in found if each is not None), None)
    return mine


def params_under(module: nn.Module, caller: str = "unsharded") -> dict[ParamGroup, list[ShardedParam]]:
    """The sharded parameters under ``module``, by group, in the order of the module tree (the same on all ranks).
    Refuses a module without any, and parameters that are in use."""
    check_idle(module, caller)
    by_slot = groups_by_slot()
    found: dict[ParamGroup, list[ShardedParam]] = {}
    slots = [Slot(child, name) for child in module.modules() for name in _torch.parameters_dict(child)]
    for group, index in (by_slot[slot] for slot in slots if slot in by_slot):
        params = found.setdefault(group, [])
        if group.params[index] not in params:
            params.append(group.params[index])
    if not found:
        raise ValueError(
            f"{caller}: no parameter under this {type(module).__name__} is sharded. Pass the model that fully_shard "
            "was called on, or a module in it."
        )
    check_not_lent(found, caller)
    _refuse_running({group.running for group in found}, module, caller)  # of units around ``module``
    for group in found:
        if not group.mesh.has_this_rank:
            raise ValueError(
                f"{caller}: rank {dist.get_rank()} is not in the mesh of unit '{group.name or type(module).__name__}', "
                f"so its shards are empty. Call {caller} only on the ranks of the mesh."
            )
    return found


def check_not_lent(groups: Iterable[ParamGroup], caller: str) -> None:
    """Refuse parameters that another block holds."""
    for group in groups:
        if group.state is GroupState.LENT:
            raise ScheduleError(
                f"{caller}: another {caller}(...) block already holds parameters of unit '{group.name}'. Leave that "
                "block first."
            )


def check_idle(module: nn.Module, caller: str) -> None:
    """Refuse a call that would read or write shards while a forward or backward of ``module`` runs. If the call was
    made inside of it, ranks raise alone: they may run different units."""
    trees = {unit.tree for _, unit in units_under(module) if unit.tree is not None}
    forwards = (tree.passes for tree in trees if tree.passes.running == "forward")
    is_inside = _torch.in_backward() or any(not passes.root_raised for passes in forwards)
    try:
        _refuse_running({tree.passes.running for tree in trees}, module, caller)
    except ScheduleError as error:
        if is_inside:
            mark_alone(error)
        raise


def _refuse_running(passes: Iterable[str], module: nn.Module, caller: str) -> None:
    running = {*passes} - {""}
    if running or _torch.in_backward():
        found = "backward" if _torch.in_backward() else running.pop()
        name = type(module).__name__.removeprefix("FSDP")
        raise ScheduleError(
            f"{caller}: a {found} of {name} is running. Call {caller} when no forward or backward runs. After "
            "an exception, call reset_iter_state() first."
        )


def _hand_out(group: ParamGroup, param: ShardedParam, *, is_here: bool, device: torch.device | None) -> nn.Parameter:
    """Gather ``param``. If ``is_here``, bind it whole on ``device``; None means the mesh's. Returns what is bound."""
    with torch.no_grad():
        local = _torch.local_of(param.sharded)
        full = gathered(group, param, local) if is_plain(local) else _gathered_subclass(param, local)
        if not is_here:
            return param.sharded
        own = torch.empty_like(full, device=device or full.device).copy_(full)
        whole = param.spec.unsharded_parameter(own, requires_grad=param.sharded.requires_grad)
        for module, name in param.slots:
            setattr(module, name, whole)
        return whole


def gathered(group: ParamGroup, param: ShardedParam, local: torch.Tensor) -> torch.Tensor:
    """The values of ``param`` of ``group``, gathered from ``local``, this rank's shard as a plain tensor of any dtype.
    If model axes have cut the parameter, only this rank's part. May share the memory of ``local``."""
    return gathered_together(group, [param], [local])[0]


def gathered_together(
    group: ParamGroup, params: Sequence[ShardedParam], locals_: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Gather ``params`` of ``group`` in one launch. Values are sent as bytes: backends do not support all dtypes."""
    found = []
    inputs, outputs = [], []
    for param, local in zip(params, locals_, strict=True):
        whole = sent = packed(param, local)
        if param.layout.num_shards > 1:
            whole = sent.new_empty(param.layout.padded_numel)
            if sent.numel():
                inputs.append(sent.view(torch.uint8))
                outputs.append(whole.view(torch.uint8))
        found.append((param, whole))
    if inputs:
        comms.wait_for(group.comm.all_gather(outputs, inputs)())
    return [joined(param, whole) for param, whole in found]


def packed(param: ShardedParam, local: torch.Tensor) -> torch.Tensor:
    """``local``, the values of this rank's shard, as a message: flat, padded, on the mesh's device."""
    layout, device = param.layout, param.mesh.device
    if local.numel() == layout.chunk_numel:
        return local.to(device).reshape(-1)
    sent = torch.empty(layout.chunk_numel, dtype=local.dtype, device=device)
    sent[: local.numel()].view(local.shape).copy_(local)
    return sent


def joined(param: ShardedParam, got: torch.Tensor) -> torch.Tensor:
    """The values of ``param`` from ``got``, the concatenated messages of all ranks."""
    layout = param.layout
    if layout.is_contiguous:
        return got[: layout.numel].view(layout.shape)
    shapes = [layout.shard_shape(rank) for rank in range(layout.num_shards)]
    pieces = zip(got.view(layout.num_shards, layout.chunk_numel), shapes, strict=True)
    return torch.cat([piece[: math.prod(shape)].view(shape) for piece, shape in pieces], layout.dim)


def _gathered_subclass(param: ShardedParam, local: torch.Tensor) -> torch.Tensor:
    if param.spec.unsharded is not None:
        raise ValueError(
            f"unsharded: parameter '{param.full_name}' is a {type(local).__name__} that is "
            "also sharded over model axes. Read this parameter with full_tensor()."
        )
    return whole_subclass(param, local.detach())


def whole_subclass(param: ShardedParam, local: torch.Tensor) -> torch.Tensor:
    """All of ``param``, of which this rank has the tensor subclass ``local``. Collective. By default, DTensor gathers
    what the operations of the class read. A class may instead define ``fsdp2_whole(gather)``: ``gather`` joins a plain
    tensor that is cut like the parameter, and the method returns a wrapper around such tensors."""
    like = param.spec.sharded.dtensor(local)
    if not hasattr(local, WHOLE):
        return like.full_tensor()
    whole: torch.Tensor = getattr(local, WHOLE)(partial(joined_along_dim_0, like))
    return whole


def joined_along_dim_0(like: DTensor, inner: torch.Tensor) -> torch.Tensor:
    """The whole of a plain tensor that is cut along dim 0 like ``like``; this rank has ``inner``. Collective."""
    shape = torch.Size((like.shape[0], *inner.shape[1:]))
    mesh, placements, strides = like.device_mesh, like.placements, plans.contiguous_stride(shape)
    return DTensor.from_local(inner, mesh, placements, run_check=False, shape=shape, stride=strides).full_tensor()


def _value(param: ShardedParam, handed_out: nn.Parameter) -> torch.Tensor:
    """The value that the user left in the slots of ``param``: the replacement, if the user replaced one of them."""
    found = (getattr(module, name, None) for module, name in param.slots)
    bound = next((each for each in found if each is not handed_out), handed_out)
    local = _torch.local_of(bound) if isinstance(bound, DTensor) else bound
    if bound is param.sharded:
        return param.sharded.detach()
    if not isinstance(local, torch.Tensor) or local.shape != param.layout.shape:
        shape = f" of shape {tuple(local.shape)}" if isinstance(local, torch.Tensor) else ""
        raise ValueError(
            f"unsharded: parameter '{param.full_name}' was replaced by a {type(bound).__name__}{shape}, expected a "
            f"parameter of shape {param.layout.shape}. No shard was written. Change shapes before fully_shard."
        )
    return local.detach()


def _from_first_rank(value: torch.Tensor, param: ShardedParam, ranks: Axis) -> torch.Tensor:
    """The ``value`` of the first rank, on every rank."""
    device, local = param.mesh.device, _torch.local_of(param.sharded)
    if hasattr(local, WHOLE):
        value = value.to(device) if ranks.rank == 0 else local.new_zeros(param.layout.shape, device=device)
        sent = [leaf for leaf in _torch.leaves(value) if leaf.numel()]
    else:
        if ranks.rank == 0:
            value = value.to(device, param.dtypes.orig).contiguous()
        else:
            value = torch.empty(param.layout.shape, dtype=param.dtypes.orig, device=device)
        sent = [value]
    for each in sent if ranks.size > 1 else ():
        dist.broadcast(each, group=ranks.group, group_src=0)
    return value


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Backwards inside the block reduce nothing. The next backward after the block reduces their gradients along with
    its own.

    All units under ``module`` get ``set_requires_gradient_sync(False)``; the block restores their settings at its end.

    Raises:
        ValueError: nothing under ``module`` is sharded.
    """
    units = [unit for _, unit in units_under(module)]
    if not units:
        raise ValueError(
            f"no_sync: nothing under this {type(module).__name__} was given to fully_shard. Pass the sharded model."
        )
    with ExitStack() as stack:
        for unit in units:
            stack.callback(unit.configure, reduces=unit.config.reduces)
            unit.configure(reduces=False)
            for group in unit.groups:
                stack.callback(group.configure, requires_all_reduce=group.options.requires_all_reduce)
                group.configure(requires_all_reduce=False)
        yield
