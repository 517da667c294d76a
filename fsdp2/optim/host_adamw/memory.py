"""Where the values of parameters lie on the host: masters, optimizer states, and staging memory.

A shard that is on the host already, in the dtype of its master, is its own master. Any other shard has pinned staging
memory for its gradient and its values, so that copies overlap with compute. If that has the dtype of the master, fp32
(fp64 for fp64), the staged values are the master. Otherwise the master is one of the optimizer's states, which own
everything that a checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

from fsdp2.core import _torch, comms, plans

_ALIGNMENT_NBYTES = 64  # a cache line


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a shard of ``dtype`` is stepped."""
    return torch.promote_types(dtype, torch.float32)


def host_nbytes_of(dtype: torch.dtype, *, is_on_host: bool) -> int:
    """The host memory that ``HostAdamW`` and the shard take, in bytes per element of a shard of ``dtype``: states,
    staging memory, and, if the shard ``is_on_host``, shard and gradient."""
    master = master_dtype(dtype)
    travelling = dtype.itemsize + master.itemsize + (dtype.itemsize if dtype is not master else 0)
    if is_on_host and dtype is master:
        travelling = 0  # the shard is its own master
    return 2 * master.itemsize + travelling + (2 * dtype.itemsize if is_on_host else 0)


def in_one_buffer(like: Sequence[tuple[Sequence[int], torch.dtype]], *, pin_memory: bool) -> list[Tensor]:
    """Host tensors of these shapes and dtypes, filled with zeros: one buffer per dtype."""
    made: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(dtype for _, dtype in like):
        mine = [i for i, (_, each) in enumerate(like) if each is dtype]
        starts, numel = plans.pack([prod(like[i][0]) for i in mine], _ALIGNMENT_NBYTES // dtype.itemsize)
        buffer = torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=pin_memory)  # whatever the default device is
        for i, start in zip(mine, starts, strict=True):
            made[i] = comms.alias(buffer, start, like[i][0], plans.contiguous_stride(like[i][0]))
    return [made[i] for i in range(len(like))]


class HostParam:
    """What the host keeps for one parameter in addition to its states.

    Attributes:
        param: the sharded parameter.
        name: its full name.
        gradient, staged: staging memory on the host, for the gradient and for values that are copied to and from the
            shard, in their dtypes; None if the shard is its own master.
    """

    def __init__(self, param: nn.Parameter, name: str) -> None:
        self.param, self.name = param, name
        self.gradient: Tensor | None = None
        self.staged: Tensor | None = None
        self._local: Tensor | None = None
        self._target: Tensor | None = None
        self._versions: list[int] | None = None

    @property
    def local(self) -> Tensor:
        """The shard."""
        return _torch.local_of(self.param)

    @property
    def is_narrow(self) -> bool:
        """Whether the shard has lower precision than its master."""
        dtype = self.param.dtype
        return dtype is not master_dtype(dtype)

    @property
    def is_own_master(self) -> bool:
        return self.local.device.type == "cpu" and not self.is_narrow

    def target(self) -> Tensor:
        """The shard's memory with a version of its own, so that a step's writes are not taken for the user's."""
        local = self.local
        if self._target is None or local is not self._local or local.data_ptr() != self._target.data_ptr():
            offset = int(local.storage_offset())
            self._local, self._target, self._versions = (
                local,
                comms.alias(local, offset, local.shape, local.stride()),
                None,
            )
        return self._target

    def lacks_memory(self, gradient: Tensor) -> bool:
        """Whether the shard and a gradient like ``gradient`` need other staging memory."""
        if self.is_own_master:
            return False
        found = [(each.shape, each.dtype) for each in (self.gradient, self.staged) if each is not None]
        return found != [(self.local.shape, each.dtype) for each in (gradient, self.local)]

    def take_changes(self) -> bool:
        """Whether other code may have written the shard or the master since the last call."""
        now = _torch.versions_of([self.param, self.local])
        before, self._versions = self._versions, now
        return now != before

    def forget_versions(self) -> None:
        """Forget the versions, since the master no longer has the values that the last step left there."""
        self._versions = None


def take_over(master: Tensor, shard: Tensor) -> None:
    """Copy ``shard`` to ``master``, except where the master rounds to the shard's value: it is more precise there."""
    if master is not shard:
        differs = master.to(shard.dtype) != shard
        master.copy_(torch.where(differs, shard.to(master.dtype), master))


def make_staging(params: Sequence[HostParam], gradients: Sequence[Tensor]) -> None:
    """Allocate staging memory for all ``params`` that need it."""
    pairs = zip(params, gradients, strict=True)
    needing = [(each, each.local, grad) for each, grad in pairs if each.lacks_memory(grad)]
    pin_memory = any(local.device.type != "cpu" for _, local, _ in needing)
    grads = in_one_buffer([(local.shape, grad.dtype) for _, local, grad in needing], pin_memory=pin_memory)
    shards = in_one_buffer([(local.shape, local.dtype) for _, local, _ in needing], pin_memory=pin_memory)
    for (each, *_), grad, shard in zip(needing, grads, shards, strict=True):
        each.gradient, each.staged = grad, shard
        each.forget_versions()
