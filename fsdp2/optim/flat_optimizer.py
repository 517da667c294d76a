"""Element-wise optimizers that step flat memory: a few long tensors instead of many small DTensors.

During its step, the optimizer sees **runs** instead of parameters. Between steps, it looks unchanged: param groups,
states, hooks and state dicts are per parameter.

A **segment** consists of the parameters of one param group whose shards lie in one flat buffer. A **run** consists of
neighbours in a segment that have gradients and the same kinds of states, and whose gradients are adjacent or small
enough to be copied. A run is one 1-D tensor with one 1-D state per name; the states of its parameters are parts of the
run's states. Padding lies between runs, so no step writes padding (I8).

Rule: the parameters and their states are the source of truth (I13). If they have changed since the last step, the
segment is cut into new runs.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, TypeVar, cast

import torch
from torch import optim
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from fsdp2.core import _torch, comms, groups_by_slot, plans
from fsdp2.extras import torch_names
from fsdp2.extras.checked import checked

# In these classes, the update of an element depends only on the values of that element. A subclass may do anything.
ELEMENTWISE: tuple[type[optim.Optimizer], ...] = (
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)

# Gradients that are not adjacent are copied into one tensor up to this total size. A copy of 64 KiB costs about as much
# as one more tensor in an optimizer step.
COPY_MAX_NBYTES = 64 * 1024

_O = TypeVar("_O", bound=optim.Optimizer)
State = MutableMapping[torch.Tensor, Any]  # names and values, by parameter

_NOTHING: dict[str, Any] = {}


@checked()
def flatten_optimizer(optimizer: _O, *, is_elementwise: bool = False) -> _O:
    """Make ``optimizer`` step neighbouring parameters in memory, such as a ``fully_shard`` group, as one tensor.

    Values, ``state_dict``, ``param_groups``, hooks, schedulers and checkpoints stay the same, bit for bit. Exception:
    on the CPU, the kernels of ``fused=True`` and those of bfloat16 round the last elements of a tensor differently.
    Parameters outside flat memory are stepped as before. Nothing is communicated.

    Args:
        optimizer: from ``torch.optim``: SGD, Adam, AdamW, Adamax, NAdam, RAdam, Adagrad, Adadelta, RMSprop, Rprop or
            ASGD. Call this function before you create a learning rate scheduler for it.
        is_elementwise: pass True for another optimizer if it updates each element only from the value, gradient and
            states of that element, in a step that reads ``param_groups``, ``.grad`` and ``state``.

    Returns:
        ``optimizer``, the same object. Its new class ``Flat...`` derives from its old class.

    Raises:
        TypeError: ``optimizer`` is not a ``torch.optim.Optimizer``.
        ValueError: it is not known to be element-wise, is differentiable, or its ``step`` has been replaced.
    """
    if not isinstance(optimizer, optim.Optimizer):
        raise TypeError(
            f"flatten_optimizer: got a {type(optimizer).__name__}, expected a torch.optim.Optimizer. "
            "If the object wraps an optimizer, pass that optimizer."
        )
    if isinstance(optimizer, FlatOptimizer):
        return optimizer
    _check(optimizer, is_elementwise)
    optimizer.__class__ = _flat_class(type(optimizer))  # type: ignore[assignment, arg-type]
    return optimizer


def _check(optimizer: optim.Optimizer, is_elementwise: bool) -> None:
    name = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE and not is_elementwise:
        known = ", ".join(cls.__name__ for cls in ELEMENTWISE)
        raise ValueError(
            f"flatten_optimizer: {name} is not known to be element-wise. Known optimizers: {known}. If {name} updates "
            "each element only from the value, gradient and states of this element, pass is_elementwise=True. If the "
            f"update depends on norms or on the shape of a parameter, do not flatten {name}."
        )
    if optimizer.defaults.get("differentiable") or any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            f"flatten_optimizer: this {name} has differentiable=True, but the flat step writes states in place. "
            f"Do not flatten this {name}."
        )
    if "step" in vars(optimizer):
        raise ValueError(
            f"flatten_optimizer: the step of this {name} was replaced, for example by a learning rate scheduler, and "
            "would bypass the flat step. Call flatten_optimizer first, then make the scheduler."
        )


@functools.cache
def _flat_class(cls: type[optim.Optimizer]) -> type[FlatOptimizer]:
    body = {"__module__": __name__, "__doc__": FlatOptimizer.__doc__, "_step_as_before": torch_names.unhooked_step(cls)}
    return type(f"Flat{cls.__name__}", (FlatOptimizer, cls), body)


def _without_values(cls: type[optim.Optimizer]) -> FlatOptimizer:
    flat = _flat_class(cls)  # type: ignore[arg-type]
    return flat.__new__(flat)


class FlatOptimizer(optim.Optimizer):
    """An optimizer that ``flatten_optimizer`` has changed."""

    _layout: Layout | None = None
    _step_as_before: Callable[[], Any]

    @torch_names.hooked_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call ``closure``, then update all parameters that have a gradient. Return the result of ``closure``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step_flat()
        return loss

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by remaking the class, which is not an attribute of any module."""
        return _without_values, type(self).__bases__[1:], self.__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Drop the layout, which holds old states. ``load_state_dict`` ends with this call, too."""
        self._layout = None
        super().__setstate__(state)

    def _step_flat(self) -> None:
        layout, self._layout = self._layout, None  # so that an exception leads to a new layout
        if layout is None or not layout.is_that_of(self.param_groups):
            layout = Layout(self.param_groups)
        for segment in layout.segments:
            segment.take_gradients(self.state)
        num_known = len(self.state)
        with self._runs_for_params(layout):
            self._step_as_before()
        for segment in layout.segments:
            segment.hand_back(self.state)
        if len(self.state) > num_known:  # order new states by param groups, as torch does
            new = set(islice(self.state, num_known, None))
            self.state.update([(param, self.state.pop(param)) for param in layout.params if param in new])
        self._layout = layout

    @contextmanager
    def _runs_for_params(self, layout: Layout) -> Iterator[None]:
        """Show the optimizer runs instead of their parameters, next to the other parameters of each param group."""
        groups, outer = self.param_groups, self.state
        lists = [group["params"] for group in groups]
        runs: list[list[torch.Tensor]] = [[] for _ in groups]
        alone = [list(params) for params in layout.others]
        inner: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for segment in layout.segments:
            runs[segment.group] += [run.flat for run in segment.runs]
            alone[segment.group] += segment.apart
            inner.update((run.flat, run.state) for run in segment.runs)
        inner.update((param, outer[param]) for params in alone for param in params if param in outer)
        self.param_groups, self.state = [], inner
        try:
            for group, flat, params in zip(groups, runs, alone, strict=True):
                if flat and params:  # two groups: one launch cannot mix plain tensors and DTensors
                    self.param_groups.append({**group, "params": params})
                if flat or params:
                    group["params"] = flat or params
                    self.param_groups.append(group)  # the same object: an optimizer may keep its own values in it
            yield
        finally:
            for group, params in zip(groups, lists, strict=True):
                group["params"] = params
            self.param_groups, self.state = groups, outer
        outer.update((param, inner[param]) for params in alone for param in params if param in inner)


def flat_buffers() -> list[torch.Tensor]:
    """The flat shard buffers of all groups that exist, with the padding between shards."""
    groups = dict.fromkeys(group for group, _ in groups_by_slot().values())
    return [flat for group in groups for flat in group.shards.flats.values()]


class Layout:
    """How the parameters of an optimizer lie in memory: in ``segments``, or as ``others``, per param group."""

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self._found = _layout_of(groups)
        self.params: list[torch.Tensor] = [param for group in groups for param in group["params"]]
        self.others = [[param for param in group["params"] if not _is_flat(param)] for group in groups]
        self.segments: list[Segment] = []
        buffers = flat_buffers()
        for index, group in enumerate(groups):
            found: dict[object, tuple[torch.Tensor, list[DTensor]]] = {}
            for param in filter(_is_flat, group["params"]):
                flat = _flat_around(_torch.local_of(param), buffers)
                key = (flat.dtype, flat.device, flat.data_ptr())  # empty shards have no address; they form one segment
                found.setdefault(key, (flat, []))[1].append(param)
            self.segments += [Segment(index, flat, members) for flat, members in found.values()]

    def is_that_of(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether ``groups`` have the same parameters as before, at the same addresses."""
        return _are_same(_layout_of(groups), self._found) and all(map(Segment.is_in_place, self.segments))


def _layout_of(groups: Sequence[dict[str, Any]]) -> list[object]:
    """Each group followed by its parameters, then the local tensors of all parameters."""
    found = list(chain.from_iterable((group, *group["params"]) for group in groups))
    return [*found, *torch_names.locals_of([param for param in found if isinstance(param, DTensor)])]


def _are_same(now: Sequence[object], before: Sequence[object]) -> bool:
    """Whether both hold the same objects."""
    return len(now) == len(before) and all(map(operator.is_, now, before))


class Segment:
    """Parameters of one param group (``group`` is its index) whose shards lie in one buffer. They are stepped in
    ``runs``; those in ``apart`` are stepped by DTensor's own operations."""

    def __init__(self, group: int, flat: torch.Tensor, params: list[DTensor]) -> None:
        self.group = group
        self.runs: list[Run] = []
        self.apart: list[DTensor] = []
        self._flat, self._params = flat, sorted(params, key=lambda param: _torch.local_of(param).data_ptr())
        self._locals = torch_names.locals_of(self._params)
        self._starts = list(map(torch.Tensor.data_ptr, self._locals))
        self._grads: list[Grad | None] = []
        self._seen: list[object] = []

    def is_in_place(self) -> bool:
        """Whether the segment still has the same memory, since local tensors may have moved."""
        return self._locals[0].data_ptr() == self._starts[0]

    def take_gradients(self, state: State) -> None:
        """Give the runs the gradients of this step. Cut new runs if the gradients or the states require it."""
        tensors = torch_names.grads_of(self._params)
        locals_ = torch_names.locals_placed_like(self._params, tensors)
        grads = _described(tensors, locals_)
        is_cut = grads == self._grads and _are_same(self._now(state), self._seen)
        if not is_cut or not all(run.is_current() for run in self.runs):
            self._cut(grads, [state.get(param, _NOTHING) for param in self._params])
            self._grads, self._seen = grads, self._now(state)
        for run in self.runs:
            run.take_gradient(locals_)

    def hand_back(self, state: State) -> None:
        """After a step: copy new entries from the states of runs to ``state``."""
        new = [(param, entry) for run in self.runs for param, entry in run.hand_back()]
        for param, entry in new:
            state.setdefault(param, {}).update(entry)
        if new:
            self._seen = self._now(state)

    def _now(self, state: State) -> list[object]:
        """All state entries and their values. If an object differs in the next step, other code has replaced it."""
        entries = [state.get(param, _NOTHING) for param in self._params]
        return [*entries, *(value for entry in entries for value in entry.values())]

    def _cut(self, grads: list[Grad | None], entries: list[dict[str, Any]]) -> None:
        kinds = [
            None if grad is None else _kind_of(grad, param, entry)
            for grad, param, entry in zip(grads, self._params, entries, strict=True)
        ]
        found = zip(self._params, grads, kinds, strict=True)
        self.apart = [param for param, grad, kind in found if grad is not None and kind is None]
        nbytes = [local.nbytes for local in self._locals]
        follows = [False, *map(operator.eq, map(operator.add, self._starts, nbytes), self._starts[1:])]
        touch = [grad is not None and grad[0] for grad in grads]
        self.runs = []
        for mine in cut_runs(kinds, follows, touch, nbytes):
            start = (self._starts[mine.start] - self._flat.data_ptr()) // self._flat.itemsize
            flat = self._flat.narrow(0, start, sum(map(torch.Tensor.numel, self._locals[mine])))
            _torch.set_grad_dtype(flat, cast(Grad, grads[mine.start])[1])
            self.runs.append(Run(self._params[mine], entries[mine], mine, flat, all(touch[mine][1:])))


# Whether a gradient touches the gradient of the parameter before, and its dtype. The dtype is None if the gradient is
# not contiguous or not placed like the parameter: DTensor's own operations then step the parameter.
Grad = tuple[bool, torch.dtype | None]


def _described(grads: Sequence[torch.Tensor | None], locals_: Sequence[torch.Tensor | None]) -> list[Grad | None]:
    """Describe ``grads``. ``locals_``: their local tensors; None if a gradient is not placed like its parameter."""
    found: list[Grad | None] = []
    end = -1
    for grad, local in zip(grads, locals_, strict=True):
        if local is None or not local.is_contiguous():
            found.append(None if grad is None else (False, None))
            end = -1
        else:
            start = local.data_ptr()
            found.append((start == end, local.dtype))
            end = start + local.nbytes
    return found


def cut_runs(
    kinds: Sequence[object], follows: Sequence[bool], touch: Sequence[bool], nbytes: Sequence[int]
) -> list[slice]:
    """Which neighbours are stepped as one. In a run, each parameter but the first ``follows`` the one before in memory
    and has the same kind, which is not None. Gradients ``touch``, or are copied if their total ``nbytes`` is small."""
    found: list[slice] = []
    total, is_view = 0, True  # of the last run
    for i, kind in enumerate(kinds):
        goes_on = i > 0 and follows[i] and kind == kinds[i - 1]
        if kind is None:
            continue
        if goes_on and ((is_view and touch[i]) or total + nbytes[i] <= COPY_MAX_NBYTES):
            found[-1] = slice(found[-1].start, i + 1)
            total, is_view = total + nbytes[i], is_view and touch[i]
        else:
            found.append(slice(i, i + 1))
            total, is_view = nbytes[i], True
    return found


class Run:
    """Parameters that are stepped as one 1-D tensor ``flat``. ``state`` is the optimizer's state for it, by name."""

    def __init__(
        self, params: Sequence[DTensor], entries: Sequence[dict[str, Any]], mine: slice, flat: torch.Tensor, touch: bool
    ) -> None:
        """Take over ``entries``, one per parameter, all of one kind. ``mine`` is the slice of the segment that holds
        ``params``; ``touch`` says whether their gradients are adjacent."""
        self.flat = flat
        self.state: dict[str, Any] = {}
        self._params, self._mine, self._touch = params, mine, touch
        # Values such as the number of steps: state dicts have one per parameter, the step uses one per run.
        self._copies: dict[str, torch.Tensor] = {}
        for name, first in entries[0].items():
            self.state[name] = first
            if isinstance(first, DTensor):
                parts = torch_names.locals_of([entry[name] for entry in entries])
                joined = _joined(parts)
                self.state[name] = torch.cat([part.view(-1) for part in parts]) if joined is None else joined
                if joined is None:
                    self._distribute(name, entries)
            elif isinstance(first, torch.Tensor):
                self.state[name] = first.clone()
                self._distribute(name, entries)
        self._handed_back = self.state.copy()
        self._versions = _torch.versions_of(self._copies.values())

    def is_current(self) -> bool:
        """Whether nothing has written to the per-parameter copies since the last step."""
        return _torch.versions_of(self._copies.values()) == self._versions

    def take_gradient(self, locals_: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients from ``locals_`` of the segment. Copy them if they are not adjacent in one storage."""
        mine: list[Any] = list(locals_[self._mine])
        flat = spanned(mine[0], self.flat.numel()) if self._touch else None
        self.flat.grad = torch.cat([local.view(-1) for local in mine]) if flat is None else flat

    def hand_back(self) -> Iterable[tuple[DTensor, dict[str, Any]]]:
        """After a step: return new entries for the states of the parameters. Write older entries in place."""
        self.flat.grad = None
        new: dict[DTensor, dict[str, Any]] = {}
        for name, value in self.state.items():
            if value is not self._handed_back.get(name, self):
                self._distribute(name, [new.setdefault(param, {}) for param in self._params])
                self._handed_back[name] = value
            elif name in self._copies:
                self._copies[name].fill_(value)
        self._versions = _torch.versions_of(self._copies.values())
        return new.items()

    def _distribute(self, name: str, entries: Sequence[dict[str, Any]]) -> None:
        """In each of ``entries``, one per parameter, set ``name`` to the parameter's part of the run's value."""
        value = self.state[name]
        parts: Sequence[Any] = [value] * len(entries)
        if isinstance(value, torch.Tensor) and value.shape == self.flat.shape:
            parts = self._parts(value)
        elif isinstance(value, torch.Tensor):
            self._copies[name] = value.expand(len(entries), *value.shape).clone()
            parts = self._copies[name].unbind()
        for entry, part in zip(entries, parts, strict=True):
            entry[name] = part

    def _parts(self, whole: torch.Tensor) -> list[DTensor]:
        parts, offset = [], 0
        for param, local in zip(self._params, torch_names.locals_of(self._params), strict=True):
            part = comms.alias(whole, offset, local.shape, plans.contiguous_stride(local.shape))
            _whole_of[part] = whole, offset
            parts += _torch.dtensors_like([param], [part])
            offset += local.numel()
        return parts


# Maps each part of a state to the tensor that it was cut from and its offset, so that parts are joined without a copy.
_whole_of: MutableMapping[torch.Tensor, tuple[torch.Tensor, int]] = WeakIdKeyDictionary()


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Contiguous ``parts`` as one 1-D tensor, or None if they are not adjacent parts of one tensor."""
    if len(parts) == 1:
        return parts[0].view(-1)
    first, start = _whole_of.get(parts[0], (None, 0))
    end = start
    for part in parts:
        whole, offset = _whole_of.get(part, (None, 0))
        if whole is None or whole is not first or offset != end:
            return None
        end += part.numel()
    return None if first is None else first.narrow(0, start, end - start)


def spanned(first: torch.Tensor, numel: int) -> torch.Tensor | None:
    """``numel`` elements starting at the first element of ``first``; None if its storage is too short."""
    offset = int(first.storage_offset())
    if (offset + numel) * first.itemsize > first.untyped_storage().nbytes():
        return None
    return first.as_strided((numel,), (1,), offset)


def _is_flat(param: torch.Tensor) -> bool:
    """Whether ``param`` is a DTensor whose local tensor is plain, contiguous, and not on the meta device."""
    if not isinstance(param, DTensor):
        return False
    local = _torch.local_of(param)
    return type(local) is torch.Tensor and not local.is_meta and local.is_contiguous()


def _flat_around(local: torch.Tensor, buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    """The one of ``buffers`` that contains ``local``; if none does, ``local`` as a 1-D tensor."""
    start = local.data_ptr()
    for flat in buffers if local.numel() else ():
        is_alike = flat.dtype is local.dtype and flat.device == local.device
        if is_alike and flat.data_ptr() <= start < flat.data_ptr() + flat.nbytes:
            return flat
    return local.view(-1)


def _kind_of(grad: Grad, param: DTensor, entry: Mapping[str, Any]) -> tuple[object, ...] | None:
    """What the parameters of a run have in common: the gradient's dtype, and the state ``entry`` without per-element
    values. None if DTensor's own operations have to step ``param``."""
    _, dtype = grad
    if dtype is None:
        return None
    kind: list[object] = [dtype]
    for name, value in entry.items():
        if isinstance(value, DTensor):
            local = torch_names.locals_placed_like([param], [value])[0]
            if local is None or not local.is_contiguous():
                return None
            kind.append((name, local.dtype, local.device))
        elif isinstance(value, torch.Tensor):
            if value.numel() != 1:
                return None
            kind.append((name, value.dtype, value.device, value.item()))
        else:
            kind.append((name, value))
    return tuple(kind)
