"""``use_orig_params=True``: what users may do with parameters, including those that they held before wrapping.

Torch's class keeps the ``nn.Parameter`` objects and makes each one a view of this rank's shard. Here DTensors replace
them. So shards accept assignments to ``data``, and from then on the old objects stand for the shards: a list
of them, an EMA or an optimizer keeps working.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from fsdp2.core import ShardedParam, _torch, map_tensors, marks
from fsdp2.extras.kept_optimizers import modules_in_process, name_of, take_over_all
from fsdp2.fsdp1.search import Wrapper, params_of

_DATA: Any = torch.Tensor.data  # the descriptor


class OriginalParameter(DTensor):
    """A shard. Assigning to ``data`` writes the values into the shard, as torch's class does before a forward."""

    __slots__ = ()

    @property
    def data(self) -> torch.Tensor:
        return cast(torch.Tensor, _DATA.__get__(self))

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _write(cast(nn.Parameter, self), value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        memo[id(self)] = made = copy.deepcopy(self._as_dtensor(), memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_dtensor().__reduce_ex__(protocol)

    def _as_dtensor(self) -> nn.Parameter:
        """A parameter with the same memory, gradient and attributes, of the class that other code expects."""
        made = nn.Parameter(_torch.dtensors_like([self], [_torch.local_of(self)])[0], requires_grad=self.requires_grad)
        made.grad = self.grad
        vars(made).update(vars(self))
        return made


class KeptParameter(nn.Parameter):
    """A parameter that the user had before wrapping. Every function receives this rank's shard instead, as a plain
    tensor: operations compute with it, write to it, and propagate gradients to it. ``data``, ``grad`` and
    ``requires_grad`` are those of the shard.
    """

    _of: weakref.ref[ShardedParam]
    _shard: nn.Parameter  # the last known one, kept here because this object may outlive the model

    @property
    def _fsdp2_stands_for(self) -> nn.Parameter:
        param = self._of()
        if param is not None and isinstance(bound := param.bound(), nn.Parameter):
            self._shard = bound
        return self._shard

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        is_attribute = getattr(func, "__name__", "") == "__get__"  # such as ``shape``, and ``is_leaf``
        with torch.set_grad_enabled(torch.is_grad_enabled() and not is_attribute):
            args, kwargs = map_tensors(_shard_of_kept, (args, kwargs or {}))
        return func(*args, **kwargs)

    @property
    def data(self) -> torch.Tensor:
        return _torch.local_of(self._fsdp2_stands_for).detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _write(self._fsdp2_stands_for, value)

    @property
    def grad(self) -> torch.Tensor | None:
        grad = self._fsdp2_stands_for.grad
        return None if grad is None else _torch.local_of(grad)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            self._fsdp2_stands_for.grad = None
        else:
            _torch.set_grads([self._fsdp2_stands_for], [_part_of(self._fsdp2_stands_for, value)])

    @property
    def requires_grad(self) -> bool:
        return self._fsdp2_stands_for.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._fsdp2_stands_for.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> KeptParameter:
        """Set whether the shard is trained."""
        self._fsdp2_stands_for.requires_grad_(requires_grad)
        return self

    def register_hook(self, hook: Any) -> Any:
        """Call ``hook`` with gradients of the shard, which are DTensors."""
        return self._fsdp2_stands_for.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Call ``hook`` with the shard once it has its gradient."""
        return self._fsdp2_stands_for.register_post_accumulate_grad_hook(hook)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        memo[id(self)] = made = nn.Parameter(self.data.clone(), requires_grad=self.requires_grad)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.data, requires_grad=self.requires_grad).__reduce_ex__(protocol)


assert marks.STANDS_FOR in vars(KeptParameter)  # the name of the property, by which the core finds shards


def answer_as_originals(wrapper: Wrapper) -> None:
    """Let the shards of ``wrapper`` accept assignments to ``data``, with ``use_orig_params``."""
    for param in params_of(wrapper) if wrapper._settings.use_orig_params else ():
        bound = param.bound()
        if type(bound) is DTensor and isinstance(bound, nn.Parameter):
            bound.__class__ = OriginalParameter  # type: ignore[assignment]


def keep(originals: Iterable[nn.Parameter], params: Iterable[ShardedParam]) -> None:
    """Make each plain tensor of ``originals`` stand for the shard that replaced it, and free its memory."""
    for original, param in zip(originals, params, strict=True):
        if type(original) is nn.Parameter:
            _DATA.__set__(original, original.detach().new_empty(0))
            vars(original).update(_of=weakref.ref(param), _shard=param.sharded)
            original.__class__ = KeptParameter


def take_over_optimizers(wrappers: Iterable[Wrapper]) -> None:
    """Make optimizers that hold kept parameters of ``wrappers`` use the shards instead."""
    origins = (param.origin() for wrapper in wrappers for param in params_of(wrapper))
    kept = [origin for origin in origins if isinstance(origin, KeptParameter)]
    if kept:
        take_over_all(kept)


def _shard_of_kept(tensor: torch.Tensor) -> torch.Tensor:
    return _local(tensor) if isinstance(tensor, KeptParameter) else tensor


def _local(kept: KeptParameter) -> torch.Tensor:
    return cast(DTensor, kept._fsdp2_stands_for).to_local()


def _write(shard: nn.Parameter, value: torch.Tensor) -> None:
    part = _part_of(shard, value)
    with torch.no_grad():
        _torch.local_of(shard).copy_(part)


def _part_of(shard: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``value``, which is the whole parameter or the ``shard``, maybe flattened."""
    assert isinstance(shard, DTensor)
    local = _torch.local_of(shard)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{_named(shard)}: data must be a tensor, found a {type(value).__name__}.")
    if isinstance(value, KeptParameter):
        value = _local(value)
    if isinstance(value, DTensor) and value.shape == shard.shape and value.device_mesh == shard.device_mesh:
        if value.placements == shard.placements:
            return _torch.local_of(value)
        if all(placement == Replicate() for placement in value.placements):
            value = value.to_local()
    if not isinstance(value, DTensor):
        if value.shape == local.shape:
            return value
        if value.shape == shard.shape:
            whole = distribute_tensor(value, shard.device_mesh, shard.placements, src_data_rank=None)
            return _torch.local_of(whole)
        if value.shape == (local.numel(),):
            return value.view(local.shape)
    found = f"a DTensor with placements {value.placements}" if isinstance(value, DTensor) else "a tensor"
    raise ValueError(
        f"{_named(shard)}: its data cannot become {found} of shape {tuple(value.shape)}. Assign the whole parameter "
        f"of shape {tuple(shard.shape)}, this rank's shard of shape {tuple(local.shape)}, or a DTensor with placements "
        f"{shard.placements}."
    )


def _named(shard: nn.Parameter) -> str:
    return f"parameter {name_of(shard, modules_in_process())}"
