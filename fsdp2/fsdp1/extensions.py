"""``FSDPExtensions``, a class of torch: six methods that define how a user's tensor type is sharded, shown, saved and
loaded. docs/advanced/fsdp1_extensions.md says when each of them is called.

A wrapper keeps the extension that was set when it was made. Without one, nothing here runs: the runtime itself handles
DTensors of tensor parallelism and the all-gather hooks of tensor subclasses. Rule: each result of a user's method is
checked here, and an error names the method and the parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.core import ExtensionError, GroupState, ParamGroup, ShardedParam, Slot, _torch, groups_by_slot
from fsdp2.extras.torch_names import is_sharded_tensor
from fsdp2.fsdp1 import torch_names
from fsdp2.fsdp1.optim_values import whole_of_pieces
from fsdp2.fsdp1.search import Wrapper, named_slots
from fsdp2.fsdp1.torch_names import FSDPExtensions

_PLAIN = (torch.Tensor, nn.Parameter)
_TRANSFORMED = "_fsdp2_transformed_as"  # attribute of the original parameter; holds its name
_EXTENDED = "_fsdp2_extended"  # attribute of a module; has an Extended for the name of each parameter made plain
_METHODS = tuple(sorted(FSDPExtensions.__abstractmethods__))
_current: FSDPExtensions | None = None


def set_fsdp_extensions(extensions: FSDPExtensions | None) -> None:
    """Let wrappers that are made from now on use ``extensions``; None restores the default. Existing wrappers keep the
    extension that was set when they were made.

    Raises:
        TypeError: ``extensions`` lacks methods.
    """
    global _current
    missing = [name for name in _METHODS if not callable(getattr(extensions, name, None))]
    if extensions is not None and (missing or inspect.isclass(extensions)):
        raise TypeError(
            f"set_fsdp_extensions: expected an instance of FSDPExtensions or None, found {extensions!r}"
            + (f" without {', '.join(missing)}." if missing else ", a class. Pass an instance.")
        )
    _current = extensions


# When a wrapper is made


@dataclass(frozen=True)
class Extended:
    """One parameter that the user's extension has made plain.

    Attributes:
        param_extension: what ``pre_flatten_transform`` returned next to the plain tensor.
        shape: the shape of the tensor that compute reads.
    """

    name: str
    user: FSDPExtensions
    param_extension: Any
    shape: torch.Size

    def __deepcopy__(self, memo: dict[int, Any]) -> Extended:
        return self

    def show(self, plain: torch.Tensor) -> torch.Tensor:
        """``post_unflatten_transform``."""
        made = self.user.post_unflatten_transform(plain, self.param_extension)
        if not isinstance(made, torch.Tensor) or made.shape != self.shape:
            _refuse("post_unflatten_transform", self.name, made, f"a tensor of shape {tuple(self.shape)}")
        return made

    def plain(self, value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Convert ``value``, which the user has written or loaded, to the plain tensor of ``shape``."""
        if type(value) in _PLAIN and tuple(value.shape) == tuple(shape):
            return value.detach()
        plain, extension = _flatten(self.user, self.name, value)
        if extension is None or tuple(plain.shape) != tuple(shape):
            _refuse("pre_flatten_transform", self.name, plain, f"a plain tensor of shape {tuple(shape)}")
        return plain


def _flatten(user: FSDPExtensions, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, Any | None]:
    """``pre_flatten_transform``."""
    result = user.pre_flatten_transform(tensor)
    if not isinstance(result, tuple) or len(result) != 2:
        _refuse("pre_flatten_transform", name, result, "a tuple (tensor, param_extension)")
    plain, extension = result
    if extension is not None and type(plain) not in _PLAIN:
        _refuse("pre_flatten_transform", name, plain, "a plain torch.Tensor in front of the param_extension")
    return plain.detach() if extension is not None else tensor, extension


def _refuse(method: str, name: str, found: object, expected: str) -> NoReturn:
    text = f"a {type(found).__name__}"
    if isinstance(found, torch.Tensor):
        text += f" of shape {tuple(torch_names.shape_of(found) or ())}"
    raise ExtensionError(f"FSDPExtensions.{method} returned {text} for parameter '{name}', expected {expected}.")


def flatten(module: nn.Module, ignored: Collection[nn.Parameter]) -> FSDPExtensions | None:
    """Let the current extension, which is returned, make plain those parameters under ``module`` that belong to no unit
    yet. If it returns something wrong, this raises before anything has changed."""
    if _current is None:
        return None
    found: dict[nn.Parameter, dict[Slot, str]] = {}
    taken = groups_by_slot()
    for name, slot in named_slots(module):
        param = slot.module._parameters[slot.name]
        if param is not None and slot not in taken and param not in ignored:
            found.setdefault(param, {}).setdefault(slot, name)
    made: dict[nn.Parameter, tuple[nn.Parameter, Extended]] = {}
    for param, slots in found.items():
        name = next(iter(slots.values()))
        earlier = getattr(param, _TRANSFORMED, None)
        if earlier is not None:
            raise ValueError(
                f"FullyShardedDataParallel: parameter '{name}' is tied to '{earlier}', which an extension has "
                "transformed in an inner wrapper. Put both into one wrapper."
            )
        with torch.no_grad():
            plain, param_extension = _flatten(_current, name, param)
            if param_extension is not None:
                known = Extended(name, _current, param_extension, param.shape)
                known.show(plain)  # refuses wrong results before anything has changed
                made[param] = nn.Parameter(plain, requires_grad=param.requires_grad), known
    for param, (plain_param, known) in made.items():
        setattr(param, _TRANSFORMED, known.name)
        for slot in found[param]:
            _torch.parameters_dict(slot.module)[slot.name] = plain_param
            vars(slot.module).setdefault(_EXTENDED, {})[slot.name] = known
    return _current


def install(wrapper: Wrapper, user: FSDPExtensions | None) -> None:
    """Let ``wrapper`` use the extension, and its groups show the parameters that it makes."""
    wrapper._extension = user
    groups = [group for group in wrapper._unit.groups if any(map(extended, group.params))]
    shows = [_Shows(group) for group in groups]

    def before_forward(*_: Any) -> None:
        for each in shows:
            each.before_forward()

    for each in shows:
        each.group.shows = each
    if shows:
        wrapper._fsdp_wrapped_module.register_forward_pre_hook(before_forward)


def extended(param: ShardedParam) -> Extended | None:
    """The record of ``param``; None if no extension has made it plain."""
    found = (vars(module).get(_EXTENDED, {}).get(name) for module, name in param.slots)
    return next((each for each in found if each is not None), None)


class _Shows:
    """Makes the tensors that compute reads from one group's unsharded parameters: once per gather, and again for each
    further forward on parameters that were kept, since a backward frees what its forward recorded."""

    def __init__(self, group: ParamGroup) -> None:
        self.group, self._is_new = group, False

    def __call__(self, parameters: Sequence[nn.Parameter]) -> list[Any]:
        self._is_new = True
        shown: list[Any] = []
        with torch.enable_grad():  # a forward is recomputed in backward, where gradients are disabled
            for param, parameter in zip(self.group.params, parameters, strict=True):
                known = extended(param)
                shown.append(parameter if known is None else known.show(parameter))
        return shown

    def before_forward(self) -> None:
        if self.group.state is GroupState.UNSHARDED and not self._is_new:
            self.group.show()
        self._is_new = False


# For whole parameters and state dicts


def shown_shape(param: ShardedParam) -> torch.Size:
    """The shape of ``param`` in a full state dict."""
    known = extended(param)
    return torch.Size(param.spec.sharded.shape) if known is None else known.shape


def shown_value(param: ShardedParam, whole: torch.Tensor) -> torch.Tensor:
    """Convert ``whole``, the value of ``param`` or of an optimizer state of it, to the form of full state dicts."""
    known = extended(param)
    return whole if known is None else known.show(whole).detach()


def plain_value(param: ShardedParam, value: torch.Tensor) -> torch.Tensor:
    """Convert ``value``, which was bound or loaded for ``param``, to what it would be without an extension."""
    known = extended(param)
    return value if known is None else known.plain(value, param.layout.shape)


def chunked_value(
    wrapper: Wrapper, param: ShardedParam, whole: torch.Tensor, device: torch.device | None
) -> torch.Tensor:
    """Convert ``whole``, the value of ``param`` or of an optimizer state of it, to the form that sharded state dicts
    of a wrapper with an extension have: by ``chunk_dtensor``, or ``chunk_tensor`` without a device mesh. If ``device``
    is given, the result is moved there."""
    user: FSDPExtensions = wrapper._extension
    shown, mesh, group = shown_value(param, whole), wrapper._settings.device_mesh, wrapper.process_group
    cls: type[torch.Tensor]
    if mesh is not None:
        method, cls, kind = "chunk_dtensor", DTensor, "a DTensor"
        made = user.chunk_dtensor(shown, group.rank(), mesh)
    else:
        method, cls, kind = "chunk_tensor", torch.Tensor, "a ShardedTensor"
        per_node = max(torch.get_device_module(shown.device.type).device_count(), 1)
        made = user.chunk_tensor(shown, group.rank(), group.size(), per_node, group)
    shapes = {shown.shape, whole.shape}
    if not isinstance(made, cls) or torch_names.shape_of(made) not in shapes:
        whole_shapes = " or ".join(str(tuple(shape)) for shape in shapes)
        _refuse(method, param.full_name, made, f"{kind} whose whole shape is {whole_shapes}")
    return made if device is None else made.to(device)


def loaded_value(wrapper: Wrapper, param: ShardedParam, value: object) -> object:
    """Undo the extension in a loaded ``value`` of ``param``. Returns a whole plain value, or a ShardedTensor."""
    user: FSDPExtensions | None = wrapper._extension
    if user is None or not isinstance(value, torch.Tensor):
        return value
    name, shape = param.full_name, torch.Size(param.layout.shape)
    if is_sharded_tensor(value):
        result = user.pre_load_state_dict_transform(value)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], list):
            _refuse("pre_load_state_dict_transform", name, result, "a tuple (tensor, list of its local shards)")
        if torch_names.shape_of(result[0]) != shape:
            _refuse("pre_load_state_dict_transform", name, result[0], f"a ShardedTensor of shape {tuple(shape)}")
        return result[0]
    if not isinstance(value, DTensor):
        return plain_value(param, value)
    if extended(param) is None and param.spec.unsharded is not None:
        return value
    made = user.all_gather_dtensor(value, wrapper._settings.device_mesh)
    if type(made) not in _PLAIN or made.shape != shape:
        _refuse("all_gather_dtensor", name, made, f"a plain tensor of shape {tuple(shape)}")
    return made.detach()


def loaded_state(wrapper: Wrapper, param: ShardedParam, value: object) -> object:
    """Make a loaded optimizer state of ``param`` whole and plain, however it is sharded. Collective if sharded.
    As in torch's class, sharded states are not passed to any method of an extension."""
    if wrapper._extension is None or not isinstance(value, torch.Tensor):
        return value
    if is_sharded_tensor(value):
        return whole_of_pieces(value, wrapper)
    if isinstance(value, DTensor):
        return value if param.spec.unsharded is not None else value.full_tensor().detach()
    return plain_value(param, value)


def bind_shown(params: Mapping[ShardedParam, Extended]) -> None:
    """Replace the bound whole plain parameters by what the extensions make from them."""
    _bind_made({param: known.show for param, known in params.items()})


def bind_plain(params: Mapping[ShardedParam, Extended]) -> None:
    """Reverse :func:`bind_shown`: bind plain tensors made from the values that the user has left."""
    _bind_made({param: partial(known.plain, shape=param.layout.shape) for param, known in params.items()})


@torch.no_grad()
def _bind_made(make: Mapping[ShardedParam, Callable[[torch.Tensor], torch.Tensor]]) -> None:
    for param in make:
        bound = param.bound()
        if isinstance(bound, torch.Tensor) and bound is not param.sharded:  # else it is whole on another rank only
            made = nn.Parameter(make[param](bound.detach()).detach(), requires_grad=bound.requires_grad)
            for module, name in param.slots:
                setattr(module, name, made)
