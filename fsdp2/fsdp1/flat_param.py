"""``use_orig_params=False``: one flat parameter per unit, on the memory that the unit's shards occupy anyway.

The shards remain the source of truth. The flat parameter is an alias of their memory, and its gradient is an alias of
their gradients. An optimizer that is given the flat parameters steps once per unit.
"""

from __future__ import annotations

import operator
from typing import Any, NoReturn, cast

import torch
from torch import nn

from fsdp2.core import ParamGroup, ShardedParam, _torch, comms, plans
from fsdp2.extras.plain_names import saved_name
from fsdp2.optim.clip import joined_neighbours

_DATA: Any = torch.Tensor.data  # the descriptor
IN_BACKWARD = "_in_backward_optimizers"  # where torch's _apply_optimizer_in_backward stores them


class FlatParameter(nn.Parameter):
    """The shards of one unit on this rank as one 1-D parameter of shape ``[numel]``, in the dtype of the parameters.

    The shards lie one after another, with zeros in the gaps. ``grad`` is made when it is read: it is
    None if no shard has a gradient; otherwise zeros stand for missing gradients.

    Attributes:
        is_away: the user has moved it away from where the shards of the unit live. It holds their values meanwhile.
    """

    _is_flat_param = True  # isinstance checks against torch's FlatParameter ask for it
    _fsdp_flattened = True  # torch's mark; trainers check whether the parameters of an optimizer have it
    _group: ParamGroup
    _flat: torch.Tensor
    _seen: list[torch.Tensor | None]
    _flat_grad: torch.Tensor | None
    _has_run = False
    _local: torch.Tensor | None = None
    is_away = False

    @property
    def grad(self) -> torch.Tensor | None:
        self.follow_shards()
        grads = [param.sharded.grad for param in self._group.params]
        if all(grad is None for grad in grads):
            self._flat_grad = None
        elif self._flat_grad is None or any(map(operator.is_not, grads, self._seen)):
            self._join(grads)
        return self._flat_grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            for param in self._group.params:
                param.sharded.grad = None
            self._flat_grad = None
        else:
            self._use(value.detach())

    @property
    def requires_grad(self) -> bool:
        return any(param.sharded.requires_grad for param in self._group.params)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> FlatParameter:
        """Freeze or unfreeze all parameters of the unit."""
        for param in self._group.params:
            param.sharded.requires_grad_(requires_grad)
        return self

    @property
    def data(self) -> torch.Tensor:
        return cast(torch.Tensor, _DATA.__get__(self))

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Give the shards other values. The dtype may differ: clients of torch's class upcast parameters this way. The
        device may differ while the unit is unused: clients move models to the host between two phases this way."""
        group, is_moving = self._group, value.device != self.device
        value = value.contiguous()
        with torch.no_grad():
            for param, part in self.parts(value):
                grad = param.sharded.grad
                (made,) = _torch.dtensors_like([param.sharded], [part])
                torch.utils.swap_tensors(param.sharded, nn.Parameter(made, param.sharded.requires_grad))
                if is_moving and grad is not None:
                    _torch.set_grads([param.sharded], [_torch.local_of(grad).to(value.device)])
        group.is_stale = True
        if is_moving or self.is_away:
            self._lie_in(value)
            self.is_away = value.device.type != group.home.device.type
        if self.is_away:
            self._free_shards()
        else:
            group.take_replaced()
            self.follow_shards()

    def _free_shards(self) -> None:
        """Free the memory of the shards. They get new memory when they return. Until then they are tensors without
        memory, so that the new memory counts as a move, whatever address it has."""
        shards = self._group.shards
        for flat in shards.flats.values():
            flat.untyped_storage().resize_(0)
        shards.locals = [local.to("meta") for local in shards.locals]
        self._flat, self._flat_grad = self.detach(), None

    def _lie_in(self, value: torch.Tensor) -> None:
        """Use the memory of ``value``, on any type of device. The object stays the same, since optimizers hold it."""
        other = nn.Parameter(value)
        other.__class__ = FlatParameter
        vars(other).update(vars(self))
        torch.utils.swap_tensors(self, other)

    @property
    def _local_shard(self) -> torch.Tensor:
        """Torch's name for a tensor on the same memory. It is the same object as long as the memory stays the same."""
        data = self.data
        if self._local is None or (self._local.data_ptr(), self._local.device) != (data.data_ptr(), data.device):
            self._local = data
        return self._local

    @_local_shard.setter
    def _local_shard(self, value: torch.Tensor) -> None:
        if (value.data_ptr(), value.device) != (self.data.data_ptr(), self.device):
            self.data = value
            value = self.data
        self._local = value

    def register_hook(self, hook: Any) -> Any:
        """Raises always: autograd sees the unit's parameters, not this one, so ``hook`` would never be called."""
        self._refuse_hook("register_hook")

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Always raises, as ``register_hook`` does."""
        self._refuse_hook("register_post_accumulate_grad_hook")

    @property
    def _in_backward_optimizers(self) -> list[Any]:
        """Optimizers that ``_apply_optimizer_in_backward`` registers for this parameter. As with torch's class, the
        first forward refuses them; after it, they are refused at once."""
        if IN_BACKWARD not in vars(self):
            raise AttributeError(f"'FlatParameter' object has no attribute '{IN_BACKWARD}'")
        return cast("list[Any]", vars(self)[IN_BACKWARD])

    @_in_backward_optimizers.setter
    def _in_backward_optimizers(self, value: list[Any]) -> None:
        if self._has_run:
            self._refuse_optimizers()
        vars(self)[IN_BACKWARD] = value

    def close_to_optimizers_in_backward(self) -> None:
        """From now on, refuse optimizers that step inside backward.

        Raises:
            RuntimeError: such optimizers are registered already.
        """
        if IN_BACKWARD in vars(self):
            self._refuse_optimizers()
        self._has_run = True

    def _refuse_optimizers(self) -> NoReturn:
        raise RuntimeError(
            f"FullyShardedDataParallel: _apply_optimizer_in_backward was given {self._named}, which "
            "takes no part in backward, so its optimizer would never step. An optimizer in backward is only supported "
            "with use_orig_params=True: pass that to FullyShardedDataParallel, or step after backward."
        )

    def _refuse_hook(self, method: str) -> NoReturn:
        raise NotImplementedError(
            f"FlatParameter.{method}: {self._named} takes no part in backward, so the hook would never be called. Pass "
            "use_orig_params=True to FullyShardedDataParallel, and give hooks to its parameters."
        )

    @property
    def _named(self) -> str:
        names = (f"'{saved_name(param.full_name)}'" for param in self._group.params)
        return f"the flat parameter of {', '.join(names)}"

    @property
    def _fqns(self) -> tuple[str, ...]:
        return tuple(saved_name(param.name) for param in self._group.params)

    def follow_shards(self) -> None:
        """Adopt the memory of the shards, if the shards have moved or were cast."""
        (flat,) = self._group.shards.flats.values()
        if flat is not self._flat and flat.device.type == self.device.type:
            self._flat, self._flat_grad = flat, None
            _DATA.__set__(self, flat.detach())
            self._group.shards.share(self)

    def parts(self, flat: torch.Tensor) -> list[tuple[ShardedParam, torch.Tensor]]:
        """Each parameter of the unit with its part of ``flat``, which has the layout of this parameter, such as its
        gradient or an optimizer state. A part has the shape of the shard, and shares the memory of ``flat``."""
        start, made = int(flat.storage_offset()), []
        for param, offset in zip(self._group.params, self._offsets(), strict=True):
            made.append(
                (
                    param,
                    comms.alias(flat, start + offset, param.shard_shape, plans.contiguous_stride(param.shard_shape)),
                )
            )
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copy to a plain parameter with the same values, which the copy of the wrapper later turns into a flat one."""
        memo[id(self)] = made = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
        return made

    def _offsets(self) -> list[int]:
        """Where the shard of each parameter begins in this one."""
        start, itemsize = self._flat.data_ptr(), self._flat.itemsize
        locals_ = [_torch.local_of(param.sharded) for param in self._group.params]
        return [(local.data_ptr() - start) // itemsize if local.numel() else 0 for local in locals_]

    def _join(self, grads: list[torch.Tensor | None]) -> None:
        """Make ``grads`` parts of one flat gradient. They stay in place if they are laid out as the shards are."""
        flat = self._memory_of(grads)
        if flat is not None:
            self._seen, self._flat_grad = grads, flat
            return
        dtype = next(grad.dtype for grad in grads if grad is not None)
        flat = torch.zeros_like(self._flat, dtype=dtype)
        for (_, part), grad in zip(self.parts(flat), grads, strict=True):
            if grad is not None:
                part.copy_(_torch.local_of(grad))
        self._use(flat)

    def _memory_of(self, grads: list[torch.Tensor | None]) -> torch.Tensor | None:
        """The memory of ``grads`` as one tensor, if they are laid out in it as the shards are, without gaps."""
        present = [_torch.local_of(grad) for grad in grads if grad is not None]
        joined = joined_neighbours(present)
        if len(present) < len(grads) or len(joined) != 1 or joined[0].numel() != self._flat.numel():
            return None
        (flat,) = joined
        are_there = all(
            not local.numel() or local.data_ptr() - flat.data_ptr() == offset * local.itemsize
            for local, offset in zip(present, self._offsets(), strict=True)
        )
        return flat.view(-1) if are_there and flat.is_contiguous() else None

    def _use(self, flat: torch.Tensor) -> None:
        """Make parts of ``flat`` the gradients of the shards."""
        params, parts = zip(*((param.sharded, part) for param, part in self.parts(flat)), strict=True)
        _torch.set_grads(params, parts)
        self._seen, self._flat_grad = [param.grad for param in params], flat


def flat_parameter(group: ParamGroup, before: nn.Parameter | None = None) -> FlatParameter:
    """Return the flat parameter of ``group``, whose parameters share one dtype. ``before`` is the current one; it is
    kept unless the shards have moved to another type of device. One made by ``deepcopy`` becomes that of ``group``."""
    (flat,) = group.shards.flats.values()
    if isinstance(before, FlatParameter) and before._group is group and before.device.type == flat.device.type:
        made = before
    else:
        plain = before if type(before) is nn.Parameter else nn.Parameter(flat.detach())
        plain.__class__ = FlatParameter
        made = cast(FlatParameter, plain)
        made._group, made._flat, made._seen, made._flat_grad = group, flat.new_empty(0), [], None
    made.follow_shards()
    return made
