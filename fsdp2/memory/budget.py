"""``offload_by_budget``: choose what to keep on the host for each unit, so that the rest fits on the device.

Sizes come from plans, and are those of the rank with the longest shards, so all ranks make the same choice without
communicating. Rule: optimizer states leave before parameters, since no forward or backward waits for states.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from torch import nn

from fsdp2.checkpoint.reshard import restore_settings, successor
from fsdp2.checkpoint.reshard_checks import check_nothing_in_flight
from fsdp2.core import (
    AfterForward,
    CPUOffloadPolicy,
    FSDPModule,
    GroupState,
    MemoryLimitError,
    ParamGroup,
    ShardedParam,
    Unit,
    UnitTree,
    _torch,
    comms,
    is_plain,
    tree_of,
)
from fsdp2.extras import torch_names
from fsdp2.extras.arguments import as_ours
from fsdp2.extras.lending import check_idle
from fsdp2.extras.output import aligned
from fsdp2.extras.sizes import nbytes_of
from fsdp2.extras.units import sharded_unit
from fsdp2.memory.plan import peak_if_staged
from fsdp2.optim.host_adamw.memory import host_nbytes_of
from fsdp2.tensors.cut import pinned

_CALLER = "offload_by_budget"


class Offloaded(Enum):
    """Which part of a unit lives on the host."""

    NOTHING = "nothing"
    STATES = "states"
    PARAMETERS = "parameters"  # with their gradients and states, as under CPUOffloadPolicy


@dataclass(frozen=True)
class UnitOffload:
    """Where the parts of one unit live, in bytes per rank.

    Attributes:
        name: the name of the unit.
        offloaded: what lives on the host.
        device: the shards, gradients, and states that live on the device.
        host: those that live on the host, including memory for copies in flight.
        link: what a step copies between the two, in both directions together.
    """

    name: str
    offloaded: Offloaded
    device: int
    host: int
    link: int


@dataclass(frozen=True)
class OffloadChoice:
    """What ``offload_by_budget`` has chosen, in bytes per rank; ``str()`` shows a table.

    Attributes:
        units: the units in the order of the model's modules, the root first.
        temporary: what a step takes on the device besides shards and their gradients, without activations.
        host_params: the trainable parameters for ``HostAdamW``.
        device_params: the trainable parameters for an AdamW on the device.
    """

    units: tuple[UnitOffload, ...]
    temporary: int
    host_params: tuple[nn.Parameter, ...] = field(repr=False)
    device_params: tuple[nn.Parameter, ...] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """The bytes on the device, without activations."""
        return self.temporary + sum(unit.device for unit in self.units)

    @property
    def host_nbytes(self) -> int:
        """The bytes on the host."""
        return sum(unit.host for unit in self.units)

    @property
    def link_nbytes(self) -> int:
        """The bytes that a step copies between host and device."""
        return sum(unit.link for unit in self.units)

    @property
    def on_device(self) -> tuple[str, ...]:
        """The names of the units that live on the device."""
        return tuple(unit.name for unit in self.units if unit.offloaded is Offloaded.NOTHING)

    @property
    def on_host(self) -> tuple[str, ...]:
        """The names of the units whose states live on the host, with or without parameters."""
        return tuple(unit.name for unit in self.units if unit.offloaded is not Offloaded.NOTHING)

    @property
    def params_on_host(self) -> tuple[str, ...]:
        """The names of the units whose parameters live on the host, too."""
        return tuple(unit.name for unit in self.units if unit.offloaded is Offloaded.PARAMETERS)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("unit", "on the host", "device", "host", "link")]
        for unit in self.units:
            rows.append((unit.name, unit.offloaded.value, *map(str, (unit.device, unit.host, unit.link))))
        rows.append(("(temporary)", "", str(self.temporary), "0", "0"))
        rows.append(("bytes of a rank", "", *map(str, (self.nbytes, self.host_nbytes, self.link_nbytes))))
        return aligned(rows, num_left=2)


def offload_by_budget(
    module: nn.Module,
    device_nbytes: int | str,
    host_nbytes: int | str | None = None,
    *,
    offload_policy: CPUOffloadPolicy = CPUOffloadPolicy(),  # noqa: B008 (frozen)
) -> OffloadChoice:
    """Move as little of each unit to the host as lets a step fit into ``device_nbytes``, not counting activations.
    Call it after ``fully_shard`` and loading, and before you build optimizers.

    AdamW's states go first, since no forward or backward waits for them, starting with the units that run last: their
    gradients land first, so that backward hides their steps. If that is not enough, parameters go too, with their
    gradients, starting with the units that add the fewest copied bytes per freed byte, later units before earlier ones;
    states of other units then stay if there is room. Shards that ``CPUOffloadPolicy`` has already put on the host move
    to the device if they fit there. Parameters stay the same objects.

    Args:
        module: the root of a sharded model.
        device_nbytes: what shards, gradients, states and temporary memory may take on the device of each rank: bytes,
            or text such as ``"70GiB"``.
        host_nbytes: how much host memory the rank may take; None means no limit. Ranks on a node share that memory.
        offload_policy: the policy for units whose parameters move to the host; it says whether they are pinned.

    Returns:
        What was chosen. States take twice the bytes of trainable shards.

    Raises:
        TypeError: ``offload_policy`` is of the wrong type.
        ValueError: ``device_nbytes`` or ``host_nbytes`` is not a size; ``module`` is not sharded; or shards have to
            move and cannot, because the model was trained before, an optimizer steps it, or a parameter has a gradient
            or hooks.
        MemoryLimitError: a step does not fit even with all parameters on the host; or ``host_nbytes`` is too small.
        ScheduleError: shards have to move while a pass is running or a unit is unsharded.
        RuntimeError: shards have to move but are on the meta device.

        Whenever it raises, the model is unchanged.
    """
    on_device = nbytes_of(device_nbytes, f"{_CALLER}: device_nbytes", "70GiB")
    on_host = None if host_nbytes is None else nbytes_of(host_nbytes, f"{_CALLER}: host_nbytes", "70GiB")
    offload_policy = as_ours(offload_policy)
    if not isinstance(offload_policy, CPUOffloadPolicy):
        raise TypeError(
            f"{_CALLER}: offload_policy is a {type(offload_policy).__name__}, expected an fsdp2.CPUOffloadPolicy."
        )
    tree = tree_of(sharded_unit(module, f"fsdp2.memory.{_CALLER}"))
    for group in (group for unit in tree.units for group in unit.groups):
        if group.state is GroupState.SHARDED:
            group.take_replaced()  # takes what loading has bound in place of parameters on the meta device
    found = _chosen(tree, on_device, on_host)
    _move(module, tree.units, found, offload_policy)
    return found


# Sizes


def _places(tree: UnitTree, unit: Unit) -> dict[Offloaded, UnitOffload]:
    """What ``unit`` takes, by what is offloaded. Gradients take the bytes of the trained shards, AdamW's states twice
    that."""
    shards = trained = 0
    host = dict.fromkeys(Offloaded, 0)
    for param in (param for group in unit.groups for param in group.params):
        numel, dtype = param.layout.chunk_numel, param.sharded.dtype
        shards += numel * dtype.itemsize
        if param.sharded.requires_grad:
            trained += numel * dtype.itemsize
            host[Offloaded.STATES] += numel * host_nbytes_of(dtype, is_on_host=False)
            host[Offloaded.PARAMETERS] += numel * host_nbytes_of(dtype, is_on_host=True)
        else:
            host[Offloaded.PARAMETERS] += numel * dtype.itemsize
    rules = tree.rules_of(unit)
    regathers = rules.unshard_in_backward and rules.after_forward is AfterForward.RESHARD
    gathered = 2 * shards if regathers else shards
    device = {Offloaded.NOTHING: shards + 3 * trained, Offloaded.STATES: shards + trained, Offloaded.PARAMETERS: 0}
    # Gradients go to the host. Updated shards come back, except those that the host updates in place.
    link = {Offloaded.NOTHING: 0, Offloaded.STATES: 2 * trained, Offloaded.PARAMETERS: gathered + trained}
    return {each: UnitOffload(unit.name or "(root)", each, device[each], host[each], link[each]) for each in Offloaded}


def _cost(places: dict[Offloaded, UnitOffload]) -> float:
    """How many more bytes a step copies per freed byte, if parameters leave after states."""
    before, after = places[Offloaded.STATES], places[Offloaded.PARAMETERS]
    return (after.link - before.link) / before.device


# The choice


def _chosen(tree: UnitTree, device_nbytes: int, host_nbytes: int | None) -> OffloadChoice:
    """The first of ``_choices`` that fits."""
    choices = []
    for choice in _choices(tree, device_nbytes):
        if choice.nbytes <= device_nbytes and (host_nbytes is None or choice.host_nbytes <= host_nbytes):
            return choice
        choices.append(choice)
    fitting = [each for each in choices if each.nbytes <= device_nbytes]
    if fitting:
        raise MemoryLimitError(
            f"{_CALLER}: to fit into device_nbytes={device_nbytes}, a rank takes "
            f"{min(each.host_nbytes for each in fitting)} bytes or more of the host's memory, but host_nbytes is "
            f"{host_nbytes}. Raise one of the two, or shard over more ranks."
        )
    smallest = min(choices, key=lambda each: each.nbytes)
    raise MemoryLimitError(
        f"{_CALLER}: with all states and as many parameters on the host as helps, a step takes {smallest.nbytes} bytes "
        f"on the device without activations, of which {smallest.temporary} are temporary memory, but device_nbytes is "
        f"{device_nbytes}. Split large units, or shard over more ranks."
    )


def _choices(tree: UnitTree, device_nbytes: int) -> Iterator[OffloadChoice]:
    """Choices with the parameters of zero units on the host, of one, and so on. States of other units are on the host
    only as far as necessary."""
    places = [_places(tree, unit) for unit in tree.units]
    movable = [index for index, each in enumerate(places) if each[Offloaded.STATES].device]
    order = sorted(movable, key=lambda index: (_cost(places[index]), -index))
    for number in range(len(order) + 1):
        away = set(order[:number])
        temporary = peak_if_staged(tree, [index in away for index in range(len(places))])
        found = [
            each[Offloaded.PARAMETERS if index in away else Offloaded.NOTHING] for index, each in enumerate(places)
        ]
        nbytes = temporary + sum(each.device for each in found)
        for index in reversed(range(len(found))):
            freed = found[index].device - places[index][Offloaded.STATES].device
            if nbytes > device_nbytes and freed > 0:
                found[index] = places[index][Offloaded.STATES]
                nbytes -= freed
        yield OffloadChoice(
            tuple(found), temporary, _trained(tree, found, on_host=True), _trained(tree, found, on_host=False)
        )


def _trained(tree: UnitTree, found: Sequence[UnitOffload], *, on_host: bool) -> tuple[nn.Parameter, ...]:
    """The trainable parameters whose states live on the host, or those whose states live on the device."""
    pairs = zip(tree.units, found, strict=True)
    units = [unit for unit, each in pairs if (each.offloaded is not Offloaded.NOTHING) is on_host]
    params = (param.sharded for unit in units for group in unit.groups for param in group.params)
    return tuple(param for param in params if param.requires_grad)


# Moving shards

_FIRST = f"Call {_CALLER} after fully_shard and after loading, and before you build optimizers."


def _move(module: nn.Module, units: Sequence[Unit], choice: OffloadChoice, policy: CPUOffloadPolicy) -> None:
    """Move shards to where ``choice`` wants them. ``units`` are all units under the root ``module``, in its order.

    All are checked before the first one moves. It gets new groups of the same sharded parameters, with the user's
    settings.
    """
    homes: dict[ParamGroup, comms.Home] = {}  # of the groups that move
    for unit, found in zip(units, choice.units, strict=True):
        for group in unit.groups:
            is_away = found.offloaded is Offloaded.PARAMETERS
            home = comms.home_for(policy, group.mesh.device) if is_away else comms.Home(group.mesh.device)
            if home.is_staged is not group.home.is_staged:
                homes[group] = home
    moving = [unit for unit in units if any(group in homes for group in unit.groups)]
    if not moving:
        return
    check_idle(module, _CALLER)
    counts = Counter(id(param.sharded) for unit in units for group in unit.groups for param in group.params)
    for unit in moving:
        _check_unit(unit, counts)
    subclasses = {
        param: pinned(param.full_name, local.to(home.device), home)
        for group, home in homes.items()
        for param in group.params
        if not is_plain(local := _torch.local_of(param.sharded))
    }
    tree = moving[0].tree
    for unit in units:
        groups = [_moved(unit, g, homes[g], subclasses) if g in homes else g for g in unit.groups]
        unit.move_to(unit.mesh, tuple(groups))  # all units, since their root knows groups that are gone
    if tree is not None:
        restore_settings(tree)


def _check_unit(unit: Unit, counts: Mapping[int, int]) -> None:
    if not all(isinstance(module, FSDPModule) for module in unit.modules):
        raise ValueError(
            f"{_CALLER}: the shards of unit '{unit.name}' have to move, but FullyShardedDataParallel has made it. "
            "Shard with fully_shard."
        )
    check_nothing_in_flight(_CALLER, unit.name, unit)
    for group in unit.groups:
        group.take_replaced()
        if group.gradients.on_landed is not None or group.shards.num_steps:
            found = "has been stepped" if group.shards.num_steps else "is stepped by a HostAdamW"
            raise ValueError(
                f"{_CALLER}: the shards of unit '{unit.name}' have to move, but it {found}, and optimizer states would "
                f"stay where they are. {_FIRST}"
            )
        for param in group.params:
            _check_param(param, counts[id(param.sharded)])


def _check_param(param: ShardedParam, num_groups: int) -> None:
    name, sharded = param.full_name, param.sharded
    if _torch.local_of(sharded).is_meta:
        raise RuntimeError(
            f"{_CALLER}: the shard of parameter '{name}' has to move, but it is on the meta device. Materialise the "
            "model first: pass offload_policy=CPUOffloadPolicy() to each fully_shard, and call "
            "model.to_empty(device='cpu')."
        )
    hooks = torch_names.way_of_hooks(sharded)
    problems = {
        "is in several units": num_groups > 1,
        "has a gradient": sharded.grad is not None,
        f"has hooks of {hooks}": hooks is not None,
        "is held by weak references": weakref.getweakrefcount(sharded) > 0,
    }
    problem = next((text for text, applies in problems.items() if applies), None)
    if problem is not None:
        raise ValueError(
            f"{_CALLER}: the shard of parameter '{name}' has to move, but the parameter {problem}. {_FIRST}"
        )


@torch.no_grad()
def _moved(
    unit: Unit, group: ParamGroup, home: comms.Home, subclasses: Mapping[ShardedParam, torch.Tensor]
) -> ParamGroup:
    """A new group of the same parameters, whose shards are at ``home``."""
    params = [_moved_param(param, home, subclasses.get(param)) for param in group.params]
    return successor(unit, group, params, home, group.mesh, group.unsharded.post_forward_mesh)


def _moved_param(param: ShardedParam, home: comms.Home, subclass: torch.Tensor | None) -> ShardedParam:
    """``param`` on another device, with the same sharded parameter. Its new group copies a plain shard."""
    before = _torch.local_of(param.sharded)
    if subclass is not None:
        _swap(param, subclass)
        return replace(param, local=subclass, is_cut=True)
    _swap(param, torch.zeros((), dtype=before.dtype, device=home.device).expand(before.shape))  # takes no memory
    return replace(param, local=before, is_cut=True)


def _swap(param: ShardedParam, local: torch.Tensor) -> None:
    """Move the sharded parameter to the device of ``local``. Attributes that users have set on it stay."""
    sharded = param.sharded
    noted = dict(vars(sharded))
    with torch.inference_mode(False):
        made = param.sharded_parameter(local, requires_grad=sharded.requires_grad)
        torch.utils.swap_tensors(sharded, made)
    vars(sharded).update({name: value for name, value in noted.items() if name not in vars(sharded)})
