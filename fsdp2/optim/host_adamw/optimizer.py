"""``HostAdamW`` decides what is stepped when, with which options.

A step has three parts. In ``_take``, gradients of a unit are ready and their copies start. In ``_start``, the host's
thread steps the unit. After ``wait``, the parameters have their new values. The first happens during backward, or in
``step`` for gradients that no backward has announced. The second follows at once, or in ``step`` if the norm of all
gradients must be known first. The third happens in ``step``, or before the next all-gather of the unit.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import chain
from typing import Any, Literal, NoReturn, cast

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fsdp2.core import GroupState, ParamGroup, ScheduleError, _torch, comms, groups_by_slot, is_plain, marks, plans
from fsdp2.extras import torch_names
from fsdp2.extras.checked import NOT_NEGATIVE, POSITIVE_OR_INF, checked
from fsdp2.extras.plain_names import without
from fsdp2.optim.adamw_options import check_adamw_options
from fsdp2.optim.clip import factor_of, norm_of_gradients
from fsdp2.optim.host_adamw.jobs import MASTER, MOMENTS, Factor, HostUnit, Job, Options
from fsdp2.optim.host_adamw.memory import HostParam, master_dtype
from fsdp2.optim.own_states import States, loading_itself

ClipBy = Literal["this step", "step before"]

_LAST_NORM = "last_norm"  # a key in param groups, in addition to AdamW's


class HostAdamW(optim.Optimizer):
    """AdamW on the host, for parameters of ``fully_shard``: each unit is stepped in a thread as soon as its gradients
    are ready, while backward continues.

    Options, values and checkpoints are those of ``torch.optim.AdamW(fused=True)``. The states live on the host; so do
    masters of shards that are on a device, or that are not fp32 (fp64). ``CPUOffloadPolicy`` for a unit puts its shards
    there, too. An fp32 shard of n elements on a device takes 16 n bytes of host memory, of which 8 n are pinned.

    Stepping begins in the last backward of a step: call ``set_is_last_backward(False)`` for earlier ones. A backward
    that does not reduce gradients steps nothing. ``.grad`` is ``None`` once a parameter has been stepped. Parameters
    change during backward, so access them only after ``step``. Options are read when gradients become ready.

    Args:
        params: sharded parameters, named ones, or param groups.
        lr, betas, eps, weight_decay, amsgrad, maximize: as in ``torch.optim.AdamW``. ``lr`` may be a host tensor.
        max_norm: clip gradients to this norm over all ranks, as ``fsdp2.clip_grad_norm_`` before the step would; all
            ranks then call ``step`` with the same parameters. ``float("inf")`` only measures ``grad_norm``.
        clip_by: the norm that the factor is computed from. "this step" uses the exact norm, which is known only once
            all gradients are ready, so only copies overlap with backward. With "step before", steps overlap, too, and
            each is scaled according to the norm of the previous step; the first step uses its own norm.
        overlap_forward: ``step`` does not wait for the host; each unit's next all-gather, state dicts of modules,
            ``fsdp2.unsharded`` and ``fsdp2.weights_of`` do. Call ``wait`` before you access parameters in another way.

    Raises:
        ValueError: a parameter is not managed by ``fully_shard``, its shard is a tensor subclass or complex; a unit
            is stepped by another HostAdamW; an option is out of range.
        TypeError: ``max_norm`` is not a number.
        RuntimeError: raised by ``step`` or the next all-gather if the host's step has failed on this rank.

    Source: Ren et al., "ZeRO-Offload", USENIX ATC 2021; a step per unit in backward, and the norm of the step before,
    as in its delayed update.
    """

    @checked(lr=NOT_NEGATIVE, eps=NOT_NEGATIVE, weight_decay=NOT_NEGATIVE, max_norm=POSITIVE_OR_INF)
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        max_norm: float | None = None,
        clip_by: ClipBy = "this step",
        overlap_forward: bool = False,
    ) -> None:
        _check_clipping(max_norm, clip_by)
        options: dict[str, Any] = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        # torch checks the options, and knows which keys the checkpoints of this version have.
        plain = optim.AdamW([torch.zeros(1, device="cpu")], lr=lr, maximize=maximize, fused=True, **options)
        self._measures = max_norm is not None
        self._max_norm = None if max_norm is None or math.isinf(max_norm) else max_norm
        self._clip_by, self._overlaps_forward = clip_by, overlap_forward
        self._homes: dict[nn.Parameter, HostParam] = {}
        self._groups: list[ParamGroup] = []
        self._hooks: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._hooks)
        self._is_settled = False
        self._unit_of: dict[nn.Parameter, HostUnit] = {}
        self._group_of: dict[nn.Parameter, int] = {}  # index of the param group
        self._streams: comms.Streams | None = None
        # Parameters stepped, or to be stepped, with this step's gradients: these, if they stay, and their versions.
        self._begun: dict[nn.Parameter, tuple[Tensor | None, list[int]]] = {}
        self._held: list[tuple[HostUnit, Job]] = []  # jobs that wait until the norm is known
        self._factor: Factor | None = None  # from the previous step
        self._norm: Tensor | None = None
        defaults = dict(plain.defaults)
        if clip_by == "step before":
            defaults[_LAST_NORM] = None
        try:
            super().__init__(params, defaults)
        except Exception:
            self.remove()  # units of earlier param groups
            raise

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "HostAdamW cannot be copied or pickled: its thread steps parameters in place. Use state_dict()."
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of ``fully_shard``.

        Raises:
            ValueError: for the same reasons as in the constructor.
            ScheduleError: backward has begun a step.
        """
        if self._begun:
            raise ScheduleError("HostAdamW.add_param_group: backward has begun a step. Call step() first.")
        super().add_param_group(param_group)
        try:
            check_adamw_options("HostAdamW", self.param_groups[-1])
            self._manage(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        """A single thread, since AdamW's kernel itself uses all threads of torch. It ends with the optimizer."""
        return ThreadPoolExecutor(1, thread_name_prefix="HostAdamW")

    # Which parameters

    def _manage(self, group: Mapping[str, Any]) -> None:
        """Manage the parameters of ``group``, which is the last param group."""
        _take_replaced(group["params"])
        managed = _managed()
        names = group.get("param_names", [None] * len(group["params"]))
        found: list[HostParam] = []
        for position, (name, param) in enumerate(zip(names, group["params"], strict=True)):
            if param not in managed:
                where = f"parameter '{without(name)}'" if name else f"parameter {position} of a param group"
                raise ValueError(f"HostAdamW: {where} is {_why_not_managed(param)}.")
            unit, full_name = managed[param]
            _check_shard(full_name, param)
            if stepped_by(unit) not in (None, self):
                raise ValueError(
                    f"HostAdamW: another HostAdamW steps parameters of the unit of parameter '{full_name}'. Pass param "
                    "groups to one HostAdamW, or call remove() of the other one."
                )
            found.append(HostParam(param, full_name))
        self._homes.update((each.param, each) for each in found)
        self._group_of.update((each.param, len(self.param_groups) - 1) for each in found)
        self._follow_units()

    def _follow_units(self) -> None:
        """Find the units that the parameters are in now, and subscribe to their gradients. The first forward may move
        tied parameters to other units."""
        self._leave_units()
        managed = _managed()
        members: dict[ParamGroup | None, list[HostParam]] = {}
        for param, home in self._homes.items():
            group, home.name = managed.get(param, (None, home.name))
            members.setdefault(group, []).append(home)
        for group, homes in members.items():
            device = homes[0].param.device if group is None else group.mesh.device
            self._streams = comms.streams_for(device)
            unit = HostUnit(group, self._streams)
            self._unit_of.update((home.param, unit) for home in homes)
            if group is not None:
                self._groups.append(group)
                group.gradients.on_landed = _Weakly(self._land)
                group.on_gather = _Weakly(unit.wait_before_gather)
                self._hooks += _hooks_of_state_dicts(unit, group)
        self._is_settled = False

    def _settle(self) -> None:
        """Update the units if a forward has run since the parameters were added."""
        if not self._is_settled:
            self._follow_units()
            self._is_settled = True

    def remove(self) -> None:
        """Stop stepping during backward. ``step`` still steps parameters that have gradients."""
        self._leave_units()
        self._is_settled = True

    def _leave_units(self) -> None:
        self.wait()
        for group in self._groups:
            if stepped_by(group) is self:
                group.gradients.on_landed = group.on_gather = None
        self._groups.clear()
        _remove(self._hooks)

    # In backward

    @torch.no_grad()
    def _land(self, params: Iterable[nn.Parameter], ends_step: bool) -> None:
        """Called when the gradients of ``params``, the parameters of a unit, are ready."""
        mine = [param for param in params if param in self._homes]
        again = next((param for param in mine if param in self._begun), None)
        if again is not None:
            self._refuse_another_gradient(again)
        if ends_step:
            self._settle()
            self._take(mine)

    def _refuse_another_gradient(self, param: nn.Parameter) -> NoReturn:
        raise ScheduleError(
            f"HostAdamW: parameter '{self._homes[param].name}' has got another gradient after the backward that began "
            "the step. Call step() after each backward; or, if gradients of several backwards add up, call "
            "set_is_last_backward(False) on the root of each but the last, or do not reduce in them (no_sync). If the "
            "loss has a term on the parameters themselves, compute that term after the forward."
        )

    def _check_begun(self) -> None:
        """Check that gradients have not changed since they were taken: later contributions would be lost."""
        for (param, (taken, versions)), grad in zip(
            self._begun.items(), torch_names.grads_of(list(self._begun)), strict=True
        ):
            if grad is not taken or versions != _versions_of(grad):
                self._refuse_another_gradient(param)

    def _forget_begun(self) -> None:
        for param in self._begun:
            self._unit_of[param].is_begun = False
        self._begun.clear()

    def _take(self, params: Iterable[nn.Parameter]) -> None:
        """Begin the step of the ``params`` that have a gradient."""
        of_unit: dict[HostUnit, list[nn.Parameter]] = {}
        for param, grad in zip(params := list(params), torch_names.grads_of(params), strict=True):
            if grad is not None:
                of_unit.setdefault(self._unit_of[param], []).append(param)
        for unit, mine in of_unit.items():
            unit.wait()
            homes, streams = [self._homes[param] for param in mine], cast(comms.Streams, self._streams)
            keeps_gradients = self._clip_by == "step before"  # whose norm is computed at the end of the step
            job = Job(homes, *self._states_of(mine), streams, keeps_gradients=keeps_gradients)
            if not self._measures:
                _drop_gradients(mine)
            unit.is_begun = True
            taken = torch_names.grads_of(mine)
            self._begun.update((param, (grad, _versions_of(grad))) for param, grad in zip(mine, taken, strict=True))
            if self._max_norm is None or self._factor is not None:
                unit.start(job, self._factor, self._thread)
            else:
                self._held.append((unit, job))

    def _states_of(self, params: Sequence[nn.Parameter]) -> tuple[list[dict[str, Any]], list[Options]]:
        """The states and the options of ``params``, which have gradients."""
        groups = [self._group_of[param] for param in params]
        options = {index: Options.of(self.param_groups[index]) for index in set(groups)}
        for param, index in zip(params, groups, strict=True):
            if not self.state.get(param):
                self._make_moments(param, has_maximum=options[index].amsgrad)
        self._make_masters(params)
        return [self.state[param] for param in params], [options[index] for index in groups]

    def _make_moments(self, param: nn.Parameter, *, has_maximum: bool) -> None:
        names = MOMENTS if has_maximum else MOMENTS[:2]
        shape, dtype = _torch.local_of(param).shape, master_dtype(param.dtype)
        zeros = [torch.zeros(shape, dtype=dtype, device="cpu") for _ in names]
        values = _torch.dtensors_like([param] * len(names), zeros)
        self.state[param] = {"step": torch.zeros((), device="cpu"), **dict(zip(names, values, strict=True))}

    @torch.no_grad()
    def _make_masters(self, params: Iterable[nn.Parameter]) -> None:
        """Add missing masters to the states of shards that need one, and remove others: the model may have been cast
        since the last step."""
        for home in (self._homes[param] for param in params):
            state = self.state[home.param]
            if home.is_narrow == (MASTER in state):
                continue
            home.forget_versions()
            state.pop(MASTER, None)
            if home.is_narrow:
                dtype = master_dtype(home.param.dtype)
                master = home.local.to("cpu", dtype, memory_format=torch.contiguous_format)
                (state[MASTER],) = _torch.dtensors_like([home.param], [master])

    # The step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step parameters that have gradients and were not stepped in backward. Then wait for the host, unless
        ``overlap_forward``; the current stream waits for the results. Returns the result of ``closure``, called first.

        Raises:
            ScheduleError: a backward is running; a parameter got another gradient after its step had begun.
            RuntimeError: the host's step has failed.
        """
        if _torch.in_backward():
            raise ScheduleError(
                "HostAdamW.step() was called while a backward is running. HostAdamW steps in backward by itself: call "
                "step() when backward() has returned."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._settle()
            self._check_begun()
            params = [param for group in self.param_groups for param in group["params"]]
            self._take(param for param in params if param not in self._begun)
            if self._measures:
                self._norm = norm_of_gradients(params)
                if self._max_norm is not None:
                    self._clip(self._norm, self._max_norm)
            _drop_gradients(self._begun)
            self._forget_begun()
            if not self._overlaps_forward or not self._groups:  # after ``remove``, no all-gather waits
                self.wait()
        return loss

    def _clip(self, total: Tensor, max_norm: float) -> None:
        """Start the jobs that need ``total``, the norm of all gradients. Only the host's thread waits for its value."""
        factor = Factor(factor_of(total, max_norm), cast(comms.Streams, self._streams))
        held, self._held = self._held, []
        for unit, job in reversed(held):  # the next forward first needs the unit whose gradients came last
            unit.start(job, factor, self._thread)
        if self._clip_by == "step before":
            self._factor = factor

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of all gradients of the last step before clipping, a 0-dim fp64 tensor on the device; None without
        ``max_norm``."""
        return self._norm

    def wait(self) -> None:
        """Wait until the host has stepped all units. The current stream waits for the results in the shards.

        Raises:
            RuntimeError: the host's step has failed.
        """
        units = dict.fromkeys(self._unit_of.values())
        try:
            for unit in units:
                unit.wait()
        except Exception:
            for unit in units:
                unit.drop()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that were not stepped. Steps taken during backward are not undone. Call this to continue
        after a backward that raised."""
        self._forget_begun()
        self._held.clear()
        super().zero_grad(set_to_none)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """As in ``torch.optim.AdamW``. Shards that are not in their master's dtype also have a state ``master``; with
        ``clip_by="step before"``, param groups also have the norm of the last step. Waits for the host. Between a
        backward and ``step``, it includes what that backward has already stepped.

        Raises:
            ScheduleError: a backward is running.
            RuntimeError: the host's step has failed.
        """
        _check_outside_of_backward("state_dict")
        self.wait()
        if self._clip_by == "step before" and self._norm is not None:
            for group in self.param_groups:
                group[_LAST_NORM] = self._norm.item()
        params = [param for param in self._homes if param in self.state]
        self._make_masters(params)
        self.state.update([(param, self.state.pop(param)) for param in params])  # in torch's order
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of ``torch.optim.AdamW``. Load the model first.

        Raises:
            ValueError: a state has another shape or placement than its parameter, or is unknown. Nothing has changed.
            ScheduleError: a backward is running.
            RuntimeError: the host's step has failed.
        """
        _check_outside_of_backward("load_state_dict")
        self.wait()
        states = {key: state for key, state in state_dict["state"].items() if state}  # some write {} for no state
        with loading_itself(self, lambda *_: True, self._check_states, self._load_states):
            super().load_state_dict({**state_dict, "state": states})

    @torch.no_grad()
    def _load_states(self, found: States) -> None:
        for param, state in found.items():
            self._make_moments(param, has_maximum=MOMENTS[2] in state)
        self._make_masters(found)
        for param, state in found.items():
            mine = self.state[param]
            mine["step"].fill_(float(state["step"]))
            for key in (*MOMENTS, MASTER):
                if key in mine and key in state:
                    _torch.local_of(mine[key]).copy_(plans.local_part(state[key]))
        for home in self._homes.values():
            home.forget_versions()
        # An optimizer that measures no norm would keep this one and save it after later steps.
        norms = [group.pop(_LAST_NORM, None) for group in self.param_groups]
        self._forget_begun()
        self._held.clear()
        self._factor = self._norm = None
        if self._clip_by != "step before":
            return
        for group in self.param_groups:
            group[_LAST_NORM] = norms[0]
        if norms[0] is not None:
            self._norm = torch.tensor(norms[0], dtype=torch.float64, device="cpu")
            if self._max_norm is not None:
                self._factor = Factor(factor_of(self._norm, self._max_norm), cast(comms.Streams, self._streams))

    def _check_states(self, found: States) -> None:
        for param, state in found.items():
            name = self._homes[param].name
            if not {"step", *MOMENTS[:2]} <= set(state) <= {"step", *MOMENTS, MASTER}:
                raise ValueError(
                    f"HostAdamW.load_state_dict: the state of parameter '{name}' has the entries {sorted(state)}, "
                    f"expected those of AdamW: {['step', *MOMENTS[:2]]}."
                )
            for key, value in ((key, state[key]) for key in (*MOMENTS, MASTER) if state.get(key) is not None):
                local = torch_names.locals_placed_like([param], [value])[0] if isinstance(value, DTensor) else value
                if local is None or local.shape != _torch.local_of(param).shape:
                    where = f"placements {value.placements}" if isinstance(value, DTensor) else "no placements"
                    raise ValueError(
                        f"HostAdamW.load_state_dict: '{key}' of parameter '{name}' has shape {tuple(value.shape)} and "
                        f"{where}, expected a DTensor of shape {tuple(param.shape)} placed like the parameter. Load "
                        "with torch.distributed.checkpoint, which cuts states as this model is cut."
                    )


def _check_outside_of_backward(method: str) -> None:
    if _torch.in_backward():
        raise ScheduleError(
            f"HostAdamW.{method}() was called while a backward is running, so parameters are stepped in part. Call it "
            "when backward() has returned."
        )


class _Weakly:
    """A bound method that does not keep its object alive. Calls do nothing once the object is gone."""

    def __init__(self, method: Any) -> None:
        self.owner, self._function = weakref.ref(method.__self__), method.__func__

    def __call__(self, *args: object) -> None:
        owner = self.owner()
        if owner is not None:
            self._function(owner, *args)


def _managed() -> dict[nn.Parameter, tuple[ParamGroup, str]]:
    """The unit and the full name of every sharded parameter."""
    found = groups_by_slot().values()
    return {group.params[i].sharded: (group, group.params[i].full_name) for group, i in found}


def _take_replaced(params: Iterable[nn.Parameter]) -> None:
    """Tell units about ``params`` that have replaced sharded ones, as happens when a model on the meta device is
    loaded."""
    given = set(map(id, params))
    for group, i in groups_by_slot().values():
        param = group.params[i]
        if id(param.sharded) not in given and id(param.bound()) in given and group.state is GroupState.SHARDED:
            group.take_replaced()


def _why_not_managed(param: nn.Parameter) -> str:
    found = f"(a {type(param).__name__} of shape {tuple(param.shape)})"
    if marks.STANDS_FOR in vars(param):
        return (
            f"unsharded {found}. Build the optimizer while parameters are sharded: before the first forward, or after "
            "model.reshard()"
        )
    return (
        f"not managed by fully_shard {found}. Call fully_shard before you build the optimizer, and step other "
        "parameters with torch.optim.AdamW"
    )


def stepped_by(group: ParamGroup) -> HostAdamW | None:
    """The optimizer that steps parameters of ``group`` in backward."""
    landing = group.gradients.on_landed
    return landing.owner() if isinstance(landing, _Weakly) else None


def _hooks_of_state_dicts(unit: HostUnit, group: ParamGroup) -> list[RemovableHandle]:
    """State dicts wait until the host has stepped ``unit``, since they access its shards."""
    modules = dict.fromkeys(slot.module for param in group.params for slot in param.slots)
    registered = ((each.register_state_dict_pre_hook, each.register_load_state_dict_pre_hook) for each in modules)
    return [register(_Weakly(unit.wait)) for register in chain.from_iterable(registered)]


def _remove(hooks: list[RemovableHandle]) -> None:
    while hooks:
        hooks.pop().remove()


def _versions_of(grad: Tensor | None) -> list[int]:
    return [] if grad is None else _torch.versions_of([grad, plans.local_part(grad)])


def _drop_gradients(params: Iterable[nn.Parameter]) -> None:
    with _torch.plain_access():
        for param in params:
            param.grad = None


def _check_clipping(max_norm: float | None, clip_by: str) -> None:
    if max_norm is None and clip_by != "this step":
        raise ValueError(f"HostAdamW: clip_by={clip_by!r} without max_norm. Pass max_norm, or leave clip_by out.")


def _check_shard(name: str, param: nn.Parameter) -> None:
    local = _torch.local_of(param)
    if not is_plain(local):
        raise ValueError(
            f"HostAdamW: the shard of parameter '{name}' is a {type(local).__name__}, expected a plain tensor. Step "
            "this parameter with torch.optim.AdamW."
        )
    if not local.is_floating_point():
        raise ValueError(
            f"HostAdamW: parameter '{name}' is {local.dtype}, expected a floating-point dtype. Do not pass it."
        )
