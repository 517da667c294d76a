"""Initialise a sharded model as if it were whole: each rank draws the whole tensor, and keeps its own part.

A random number depends on its position in the tensor and on all numbers drawn before, so a shard that is drawn alone
gets other values. Inside ``whole_init``, all ranks draw the same numbers in the same order as the unsharded model.

Rule: one whole tensor exists at a time. Everything that is done to a sharded tensor is done to it, until another
sharded tensor is used or the block ends; then this rank's part of it goes into the shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from fsdp2.checkpoint.pieces import reads, whole_piece
from fsdp2.checkpoint.weights import Weight, check_ready, weights_of
from fsdp2.core import find_tensors, map_tensors
from fsdp2.extras.checked import checked

_STANDS_FOR = "_fsdp2_initialises"  # on ``parameter.data``: the parameter

# In-place functions that write all entries and read none: the whole tensor needs no values before them.
_OVERWRITE = {
    "bernoulli_",
    "cauchy_",
    "constant_",
    "copy_",
    "exponential_",
    "geometric_",
    "kaiming_uniform_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
}
# What only describes a tensor.
_DESCRIBE = {
    "__deepcopy__",
    "__format__",
    "__hash__",
    "__len__",
    "__repr__",
    "dim",
    "element_size",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "ndimension",
    "nelement",
    "numel",
    "requires_grad_",
    "size",
    "storage_offset",
    "stride",
}
_ALIASES = {torch.Tensor.data.__get__, torch.Tensor.detach}  # type: ignore[attr-defined]
_VIEWS = {getattr(torch.Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag")}


@checked()
@contextmanager
def whole_init(model: nn.Module, *, seed: int) -> Iterator[None]:
    """In the block, whatever initialises ``model`` gives each rank its part of what the unsharded model gets.

    The values are those of ``torch.manual_seed(seed)`` and the same calls in the same order on the unsharded model on
    this device, bit for bit, for any mesh and number of ranks, including uneven shards and DTensors of TP and EP. This
    covers ``nn.init``, ``reset_parameters`` and all in-place functions, on parameters, on their ``data``, and on
    buffers. All ranks must run the same calls. Each rank draws whole tensors, one at a time, so the time is that of the
    unsharded model; nothing is sent, unless a function reads values that it has not drawn in the same block right
    before, as ``nn.init.orthogonal_`` does: then the tensor is gathered. Afterwards, the random state of this process
    is what it was before.

    Do not keep a view of a parameter, such as ``parameter[0]``, while another parameter is used: writes to it are lost.

    Args:
        model: a model after :func:`fully_shard`, and after ``to_empty`` if it was built on the meta device.
        seed: the same on all ranks.

    Raises:
        TypeError: ``seed`` is not an int.
        RuntimeError: a parameter is on the meta device.
        ScheduleError: a forward or backward is running, or :func:`unsharded` has lent parameters.
        ValueError: ranks hold different parameters under the same names.
    """
    weights = weights_of(model, "whole_init")
    check_ready(weights, "whole_init")
    devices = {weight.local.device for weight in weights} - {torch.device("cpu")}
    kinds = {device.type for device in devices}
    with torch.random.fork_rng([device.index for device in devices], device_type=min(kinds, default="cuda")):
        torch.manual_seed(seed)
        mode = _WholeTensors([weight for weight in weights if isinstance(weight.tensor, DTensor)])
        try:
            with mode:
                yield
        finally:
            mode.put_back()


class _WholeTensors(TorchFunctionMode):
    """Runs functions of sharded tensors on whole ones."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        super().__init__()
        self._weights = {id(weight.tensor): weight for weight in weights}
        self._current: Weight | None = None
        self._whole = torch.empty(0)  # of ``_current``

    def put_back(self) -> None:
        """Copy this rank's part of the whole tensor into the shard."""
        weight, whole = self._current, self._whole
        self._current, self._whole = None, torch.empty(0)
        if weight is not None:
            with torch.no_grad():
                for part in reads(whole_piece("", "", tuple(whole.shape)), weight.along()):
                    weight.local[part.local].copy_(whole[part.of_key])

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        weight = next(filter(None, map(self._weight_of, find_tensors((args, kwargs), []))), None)
        if weight is None or name in _DESCRIBE or (name == "__get__" and func not in _VIEWS):
            return func(*args, **kwargs)
        if weight is not self._current and func in _ALIASES:
            alias = func(*args, **kwargs)
            setattr(alias, _STANDS_FOR, weight.tensor)
            return alias
        if weight is not self._current:
            self.put_back()
            self._current, self._whole = weight, _whole_of(weight, has_values=name not in _OVERWRITE)
        whole_args, whole_kwargs = map_tensors(self._whole_for, (args, kwargs))
        result = func(*whole_args, **whole_kwargs)
        return weight.tensor if result is self._whole else result

    def _weight_of(self, found: object) -> Weight | None:
        return self._weights.get(id(getattr(found, _STANDS_FOR, found)))

    def _whole_for(self, tensor: torch.Tensor) -> torch.Tensor:
        weight = self._weight_of(tensor)
        if weight is None:
            return tensor
        return self._whole if weight is self._current else weight.whole()


def _whole_of(weight: Weight, *, has_values: bool) -> torch.Tensor:
    """The whole tensor, which is gathered if its values are needed."""
    if has_values:
        return weight.whole().clone()
    shape, dtype = weight.whole_like
    return torch.empty_strided(shape, weight.tensor.stride(), dtype=dtype, device=weight.local.device)
