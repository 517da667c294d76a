"""Parameters that an optimizer can step as one tensor, with their gradients and states.

A **segment** is parameters of one param group whose shards touch each other in memory. In each step it is cut into
**runs**: neighbours that have a gradient, whose gradients touch each other too or are small enough to be copied, and
whose states are alike. A run is one 1-D tensor with one 1-D state per name, of which the states of its parameters are
parts. Padding and alignment lie between segments, so nothing writes them (I8).

Rule: the parameters and their states are the truth. What a step finds there is compared with what the last step left,
and whatever users have replaced is taken over.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.comm.memory import alias
from fsdp2.plan.layout import contiguous_stride
from fsdp2.tools.neighbours import Buffers, Code, codes_of, is_flat, kind_of, spanned, spans, touch_throughout, touching

State = MutableMapping[torch.Tensor, Any]  # names and values, by parameter
NewState = dict[torch.Tensor, dict[str, Any]]


_is_none = partial(operator.is_, None)
_NOTHING: dict[str, Any] = {}
_values_of: Callable[[dict[str, Any]], Iterable[object]] = dict.values


class _Values:
    """The states of some parameters as the last step left them, to be compared with what is there now."""

    def __init__(self, state: State, params: Sequence[torch.Tensor]) -> None:
        self._state, self._params = state, params
        self._entries = self._now()
        self._values = [value for entry in self._entries for value in entry.values()]

    def are_there(self, state: State) -> bool:
        """Whether ``state`` has the same objects still."""
        entries = self._now()
        return (
            state is self._state
            and all(map(operator.is_, entries, self._entries))
            and sum(map(len, entries)) == len(self._values)
            and all(map(operator.is_, chain.from_iterable(map(_values_of, entries)), self._values))
        )

    def _now(self) -> list[dict[str, Any]]:
        return list(map(self._state.get, self._params, repeat(_NOTHING)))


class Run:
    """Parameters that are stepped as one tensor.

    Attributes:
        flat: their shards, 1-D; ``flat.grad`` holds their gradients during a step.
        state: what the optimizer keeps for ``flat``, by name.
    """

    def __init__(self, params: Sequence[DTensor], flat: torch.Tensor, state: State, slabs: Buffers) -> None:
        """Take over what ``state`` has of ``params``, all of one kind; without a copy where it lies in ``slabs``."""
        self.flat = flat
        self._params = params
        self.state: dict[str, Any] = {}
        # Values that each parameter has one of, such as the number of steps: one of its own per parameter, so that
        # state dicts may be loaded into other optimizers, and one per run to step with.
        self._copies: dict[str, torch.Tensor] = {}
        self._made: dict[str, torch.Tensor] = {}  # states per element whose memory is this run's own
        entries = [state.get(param, {}) for param in params]
        for name, first in entries[0].items():
            if isinstance(first, DTensor):
                self._adopt([entry[name] for entry in entries], name, entries, slabs)
            elif isinstance(first, torch.Tensor) and len(entries) > 1:
                self.state[name] = first.clone()
                self._distribute(name, entries)
            else:
                self.state[name] = first
        self._handed_back = self.state.copy()
        self._note_versions()

    def is_current(self) -> bool:
        """Whether nobody has written what each parameter has one of since the last step."""
        return _torch.versions_of(self._copies.values()) == self._versions

    def hand_back(self) -> NewState:
        """After a step: what is new in the states of the parameters. What existed before is written in place."""
        self.flat.grad = None
        new: NewState = {}
        for name, value in self.state.items():
            if name not in self._handed_back or value is not self._handed_back[name]:
                self._distribute(name, [new.setdefault(param, {}) for param in self._params])
                self._handed_back[name] = value
            elif name in self._copies:
                self._copies[name].fill_(value)
        self._note_versions()
        return new

    def slabs(self) -> Iterable[torch.Tensor]:
        """Memory that this run has made, which states of the parameters are parts of."""
        return self._made.values()

    def _is_per_element(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.shape == self.flat.shape

    def _note_versions(self) -> None:
        self._versions = _torch.versions_of(self._copies.values())

    def _adopt(self, values: list[DTensor], name: str, entries: Sequence[dict[str, Any]], slabs: Buffers) -> None:
        locals_ = _torch.locals_of(values)
        found = slabs.join(locals_)
        self.state[name] = torch.cat([local.view(-1) for local in locals_]) if found is None else found
        if found is None:
            self._distribute(name, entries)

    def _distribute(self, name: str, entries: Sequence[dict[str, Any]]) -> None:
        """Set ``name`` in ``entries``, one per parameter, to its part of the run's value."""
        value = self.state[name]
        parts: Iterable[Any] = [value] * len(entries)
        if self._is_per_element(value):
            self._made[name] = value
            parts = self._parts(value)
        elif isinstance(value, torch.Tensor) and len(entries) > 1:
            self._copies[name] = value.expand(len(entries), *value.shape).clone()
            parts = self._copies[name].unbind()
        for entry, part in zip(entries, parts, strict=True):
            entry[name] = part

    def _parts(self, value: torch.Tensor) -> Iterator[DTensor]:
        offset = 0
        for param, local in zip(self._params, _torch.locals_of(self._params), strict=True):
            part = alias(value, offset, local.shape, contiguous_stride(local.shape))
            placed = _torch.dtensors_like if part.dtype is param.dtype else _torch.dtensors_placed_like
            yield placed([param], [part])[0]
            offset += local.numel()


class Segment:
    """Parameters whose shards touch each other, and the runs that the last step has cut them into.

    Attributes:
        group: the index of their param group.
        runs: what is stepped as one tensor each.
        apart: parameters that DTensor's own operations have to step this time.
    """

    def __init__(self, group: int, params: Sequence[DTensor], flat: torch.Tensor, slabs: list[torch.Tensor]) -> None:
        self.group, self.params = group, params
        self.runs: list[Run] = []
        self.apart: list[DTensor] = []
        self._flat, self._slabs = flat, slabs
        self._numels = [local.numel() for local in _torch.locals_of(params)]
        self._slices: list[tuple[slice, int, bool]] = []  # per run: of the parameters; elements; gradients touch
        self._codes: list[Code] = []
        self._values = _Values({}, ())
        # Gradients that lie as codes say. Weak, since those that somebody holds are not used again (I13).
        self._seen: list[weakref.ref[torch.Tensor]] = []

    def take_gradients(self, state: State) -> None:
        """Give the runs this step's gradients; cut anew if those, or the states, ask for it."""
        grads: list[Any] = _torch.grads_of(self.params)
        codes = self._codes
        if not self._were_seen(grads):
            locals_ = _torch.locals_placed_like(self.params, grads)
            codes = codes_of(grads, locals_)
            self._seen = [] if any(map(_is_none, locals_)) else list(map(weakref.ref, grads))
        if codes != self._codes or not self._is_current(state):
            self._cut(codes, state)
        for (mine, numel, touch), run in zip(self._slices, self.runs, strict=True):
            flat = spanned(_torch.local_of(grads[mine.start]), numel) if touch else None
            if flat is None:  # they lie apart, or touch by chance
                flat = torch.cat([local.reshape(-1) for local in _torch.locals_of(grads[mine])])
            run.flat.grad = flat

    def slabs(self) -> list[torch.Tensor]:
        """Memory that states of the parameters are parts of."""
        return [*self._slabs, *(slab for run in self.runs for slab in run.slabs())]

    def note_values(self, state: State) -> None:
        """From here on, values of ``state`` that are other objects are somebody else's."""
        self._values = _Values(state, self.params)

    def _were_seen(self, grads: Sequence[torch.Tensor | None]) -> bool:
        return bool(self._seen) and all(map(operator.is_, grads, [ref() for ref in self._seen]))

    def _is_current(self, state: State) -> bool:
        return self._values.are_there(state) and all(run.is_current() for run in self.runs)

    def _cut(self, codes: list[Code], state: State) -> None:
        slabs = Buffers(self.slabs())
        entries = [state.get(param, _NOTHING) for param in self.params]
        values = [value for entry in entries for value in entry.values() if isinstance(value, DTensor)]
        used = {id(slab): slab for slab in map(slabs.find, _torch.locals_of(values)) if slab is not None}
        found = list(zip(self.params, codes, map(kind_of, self.params, entries), strict=True))
        keys = [(code[1], kind) if isinstance(code, tuple) and kind is not None else None for _, code, kind in found]
        self.apart = [p for (p, code, _), key in zip(found, keys, strict=True) if key is None and code is not None]
        self._slices, self.runs = [], []
        for span in spans(keys, codes, self._numels):
            mine = slice(span.start, span.stop)
            start, numel = sum(self._numels[: span.start]), sum(self._numels[mine])
            flat = self._flat.narrow(0, start, numel)
            _torch.set_grad_dtype(flat, cast(tuple[bool, torch.dtype], codes[span.start])[1])
            self._slices.append((mine, numel, touch_throughout(codes[mine])))
            self.runs.append(Run(self.params[mine], flat, state, slabs))
        self._slabs = list(used.values())
        self._codes = codes
        self.note_values(state)


class FlatParams:
    """All parameters of an optimizer: which are stepped in segments, and which one by one.

    Attributes:
        segments: in the order of their param groups.
        others: per param group, the parameters that are in no segment: plain ones, and shards of tensor subclasses.
    """

    def __init__(
        self, groups: Sequence[Mapping[str, Any]], flats: Iterable[torch.Tensor], slabs: list[torch.Tensor]
    ) -> None:
        """``flats``: the flat buffers that shards may lie in. ``slabs``: memory that states may lie in."""
        self._lists: list[list[torch.Tensor]] = [list(group["params"]) for group in groups]
        buffers = Buffers(flats)
        self.others = [[param for param in params if not is_flat(param)] for params in self._lists]
        self.segments = [
            Segment(index, members, flat, slabs)
            for index, params in enumerate(self._lists)
            for members, flat in touching(cast(list[DTensor], list(filter(is_flat, params))), buffers)
        ]
        self._params = [param for segment in self.segments for param in segment.params]
        self._locals = _torch.locals_of(self._params)
        self._addresses = _first_addresses(self.segments)
        self._is_final = not any(param.is_meta for params in self.others for param in params)

    def are_those_of(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether ``groups`` have the same parameters as before, and those lie where they did."""
        lists = [group["params"] for group in groups]
        return (
            self._is_final
            and list(map(len, lists)) == list(map(len, self._lists))
            and all(all(map(operator.is_, *pair)) for pair in zip(lists, self._lists, strict=True))
            and all(map(operator.is_, map(_torch.get_local, self._params), self._locals))
            and _first_addresses(self.segments) == self._addresses
        )

    def slabs(self) -> list[torch.Tensor]:
        """Memory that states of the parameters are parts of."""
        return [slab for segment in self.segments for slab in segment.slabs()]

    def one_by_one(self) -> list[list[torch.Tensor]]:
        """Per param group, the parameters that are in no run in this step."""
        found = [list(params) for params in self.others]
        for segment in self.segments:
            found[segment.group] += segment.apart
        return found

    def hand_back(self, state: State, new: NewState) -> None:
        """After a step: bring ``new`` states, and what is new in those of runs, to ``state``. New parameters follow in
        the order of the param groups, as in torch."""
        changed = []
        for segment in self.segments:
            found = [run.hand_back() for run in segment.runs]
            if any(found):
                changed.append(segment)
                for each in found:
                    new.update(each)
        if new:
            for param in (param for params in self._lists for param in params):
                if param in new:
                    state.setdefault(param, {}).update(new[param])
        for segment in changed:
            segment.note_values(state)


def _first_addresses(segments: Iterable[Segment]) -> list[int]:
    """Where segments start: giving a local tensor hooks of its own moves it, but leaves the object."""
    return [_torch.local_of(segment.params[0]).data_ptr() for segment in segments]
