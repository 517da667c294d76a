"""What ``mirrored`` keeps of a model and its optimizers on one rank, as tensors in one block of memory and a text.

The model's tensors are those of this rank: shards, parameters that are not sharded, and all buffers. Optimizers are
taken as their ``state_dict`` has them; each tensor in it is replaced by its number. Rule: what is written is read again
bit for bit, and nothing of the model changes before all of it has been read.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

from fsdp2.core import Slot, _torch, find_tensors, groups_by_slot, is_plain, plans
from fsdp2.extras import torch_names
from fsdp2.extras.lending import check_idle
from fsdp2.extras.plain_names import bound_state, plain_name

CALLER = "mirrored"
_LIKE_PARAM, _ON_DEVICE, _ON_HOST, _VALUE = "like the parameter", "on the device", "on the host", "value"
_OF_ITS_CLASS = "of the parameter's class"
_ALIGNMENT_NBYTES = 16  # the item size of the widest dtype


class Described(NamedTuple):
    """A tensor in the block of memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Taken(NamedTuple):
    """What is to be written: ``tensors``, the indices of those that only a step of an optimizer changes, and the rest,
    which has their numbers."""

    tensors: list[torch.Tensor]
    steady: Collection[int]
    rest: list[Any]

    @property
    def places(self) -> list[Described]:
        return [Described(each.dtype, tuple(each.shape)) for each in self.tensors]

    @property
    def nbytes(self) -> int:
        return plans.pack([each.nbytes for each in self.tensors], _ALIGNMENT_NBYTES)[1]

    def described(self) -> dict[str, Any]:
        """What the text says of them."""
        return {"tensors": [tuple(each) for each in self.places], "rest": self.rest}


def placed(memory: torch.Tensor, tensors: Sequence[Described]) -> Iterator[torch.Tensor]:
    """Each of ``tensors`` in ``memory``, a block of bytes."""
    offsets, _ = plans.pack([each.nbytes for each in tensors], _ALIGNMENT_NBYTES)
    for offset, each in zip(offsets, tensors, strict=True):
        yield memory[offset : offset + each.nbytes].view(each.dtype).view(each.shape)


class State:
    """A model and its optimizers, on this rank.

    Raises:
        TypeError: a tensor is of a class whose memory cannot be copied, or is on the meta device.
        ScheduleError: a forward or backward is running.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[optim.Optimizer]) -> None:
        self.model, self._optimizers = model, optimizers

    def taken(self) -> Taken:
        """What this rank has now. The tensors are the model's own: parameters, buffers, optimizer states."""
        named = self._named()
        tensors = [leaf for name, tensor in named for leaf in _leaves(name, tensor)]
        params = [leaf for name, each in named if isinstance(each, nn.Parameter) for leaf in _leaves(name, each)]
        num_params, first_state = len(params), len(tensors)
        rest = self._optimizer_states(tensors)
        return Taken(tensors, {*range(num_params), *range(first_state, len(tensors))}, rest)

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        check_idle(self.model, CALLER)
        by_slot = groups_by_slot()
        slots = [Slot(module, name) for module in self.model.modules() for name in _torch.parameters_dict(module)]
        for group in dict.fromkeys(by_slot[slot][0] for slot in slots if slot in by_slot):
            group.take_replaced()
        bound = {name: each for name, each in bound_state(self.model).items() if isinstance(each, torch.Tensor)}
        # Buffers that are not persistent, too.
        found = [*bound.items(), *((plain_name(self.model, name), each) for name, each in self.model.named_buffers())]
        first_names: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in found:
            first_names.setdefault(id(tensor), (name, tensor))
        return sorted(first_names.values(), key=lambda each: not isinstance(each[1], nn.Parameter))

    def digest(self) -> int:
        """A number that differs, in all likelihood, if a state that was written does not fit this rank's model."""
        lines = []
        for name, each in self._named():
            leaves = [(leaf.dtype, tuple(leaf.shape)) for leaf in _leaves(name, each)]
            lines.append(f"{name} {tuple(each.shape)} {getattr(each, 'placements', None)} {leaves}")
        for optimizer in self._optimizers:
            lines.append(f"{type(optimizer).__name__} {[len(group['params']) for group in optimizer.param_groups]}")
        return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")

    def _optimizer_states(self, tensors: list[torch.Tensor]) -> list[Any]:
        """The state dicts of the optimizers, in which numbers replace tensors, which are appended to ``tensors``."""
        rest = []
        for optimizer in self._optimizers:
            saved, owners = optimizer.state_dict(), _owners(optimizer)
            states = {
                key: {name: _coded(optimizer, name, value, owners[key], tensors) for name, value in state.items()}
                for key, state in saved["state"].items()
            }
            rest.append({**saved, "state": states})
        return rest

    @torch.no_grad()
    def load(self, tensors: Sequence[torch.Tensor], rest: Sequence[Any]) -> None:
        """Set the model and the optimizers to what ``tensors``, on the host, and ``rest`` have. Ranks call it together,
        since optimizers may communicate."""
        mine = [leaf for name, tensor in self._named() for leaf in _leaves(name, tensor)]
        for target, values in zip(mine, tensors, strict=False):  # states follow
            target.copy_(values)
        for optimizer, saved in zip(self._optimizers, rest, strict=True):
            owners = _owners(optimizer)
            states = {
                key: {name: _decoded(each, owners[key], tensors) for name, each in state.items()}
                for key, state in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": states})
            if type(optimizer).load_state_dict is optim.Optimizer.load_state_dict:
                _keep_dtypes(optimizer, owners, states)


def _leaves(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    local = plans.local_part(tensor)
    leaves = [leaf.detach() for leaf in _torch.leaves(local)]
    for leaf in leaves:
        if leaf.is_meta or not (is_plain(leaf) or type(leaf) is nn.Parameter):
            found = "on the meta device" if leaf.is_meta else f"a {type(leaf).__name__}"
            raise TypeError(
                f"{CALLER}: '{name}' is {found}, expected tensors with memory of their own, or subclasses that say by "
                "__tensor_flatten__ what they consist of. Load the model first, or save it with async_save."
            )
    return leaves


def _owners(optimizer: optim.Optimizer) -> dict[Any, torch.Tensor]:
    """Each parameter, by its key in the state dict."""
    return dict(enumerate(param for group in optimizer.param_groups for param in group["params"]))


def _coded(
    optimizer: optim.Optimizer, name: str, value: Any, param: torch.Tensor, tensors: list[torch.Tensor]
) -> tuple[str, Any]:
    kind = _VALUE
    if isinstance(value, DTensor) and isinstance(param, DTensor):
        (local,) = torch_names.locals_placed_like([param], [value])
        if local is not None and is_plain(local):
            tensors.append(local.detach())
            return _LIKE_PARAM, len(tensors) - 1
        mine, like = plans.local_part(value), plans.local_part(param)
        is_there = (value.placements, value.device_mesh) == (param.placements, param.device_mesh)
        inner = _inner(mine) if is_there and type(mine) is type(like) else {}
        if inner and all(map(is_plain, inner.values())) and _form(mine) == _form(like):
            tensors.extend(each.detach() for each in inner.values())
            return _OF_ITS_CLASS, [*range(len(tensors) - len(inner), len(tensors))]
    elif isinstance(value, torch.Tensor) and is_plain(value):
        tensors.append(value.detach())
        kind = _ON_HOST if value.device.type == "cpu" else _ON_DEVICE
        return kind, len(tensors) - 1
    if find_tensors(value, []):
        raise TypeError(
            f"{CALLER}: {type(optimizer).__name__} has the state '{name}', a {type(value).__name__}, expected numbers, "
            "plain tensors, and DTensors that are placed like their parameter: plain ones, or of its class and dtypes. "
            "Save it with async_save."
        )
    return kind, value


def _inner(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that a subclass consists of, by their names; none of a plain one."""
    return {name: getattr(tensor, name) for name in _torch.inner_names(tensor)}


def _form(tensor: Any) -> tuple[Any, ...]:
    """What a subclass is beside the values of its inner tensors: its context, and their dtypes and shapes."""
    return tensor.__tensor_flatten__()[1], [(each.dtype, each.shape) for each in _inner(tensor).values()]


def _decoded(coded: tuple[str, Any], param: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Any:
    kind, found = coded
    if kind == _VALUE:
        return found
    if kind == _OF_ITS_CLASS:
        like = plans.local_part(param)
        inner = {
            name: torch.empty_like(mine).copy_(tensors[number])
            for (name, mine), number in zip(_inner(like).items(), found, strict=True)
        }
        return _torch.dtensors_like([param], [_torch.rewrapped(like, inner)])[0]
    values = tensors[found]
    device = torch.device("cpu") if kind == _ON_HOST else plans.local_part(param).device
    made = torch.empty(values.shape, dtype=values.dtype, device=device).copy_(values)
    return _torch.dtensors_like([param], [made])[0] if kind == _LIKE_PARAM else made


def _keep_dtypes(optimizer: optim.Optimizer, owners: dict[Any, torch.Tensor], states: dict[Any, Any]) -> None:
    """Put back states that torch has cast to the dtype of their parameter."""
    for key, state in states.items():
        mine = optimizer.state[owners[key]]
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and mine[name].dtype is not value.dtype:
                mine[name] = value


def as_text(value: Any) -> bytes:
    """``value``, which consists of numbers, strings, tensors and containers of them, as ``loaded_text`` reads it.

    Raises:
        TypeError: it has something else in it.
    """
    out = io.BytesIO()
    try:
        torch.save(value, out)
        text = out.getvalue()
        loaded_text(text)
    except Exception as error:
        raise TypeError(
            f"{CALLER}: the state has something other than numbers, strings, tensors, and lists, tuples and dicts of "
            f"them ({type(error).__name__}: {str(error).splitlines()[0]}). Pass, for example, state_dict() of an "
            "object, or tolist() of an array."
        ) from error
    return text


def loaded_text(text: bytes) -> Any:
    return torch.load(io.BytesIO(text), map_location="cpu", weights_only=True)
