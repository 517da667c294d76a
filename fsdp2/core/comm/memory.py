"""Creates tensors on existing storages."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def tensor_on(
    storage: torch.UntypedStorage, offset_nbytes: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """A tensor on ``storage`` with its own version counter (a view would share its base's counter).

    Collectives write through such tensors after autograd saves a parameter and before backward reads it. Autograd does
    not count these writes as in-place modifications of the parameter (I2).
    """
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    return tensor.set_(storage, offset_nbytes // dtype.itemsize, tuple(shape), tuple(stride))


def alias(flat: torch.Tensor, offset: int, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Elements of the storage of ``flat`` from ``offset`` on, as a tensor whose own storage starts there. The tensor
    keeps the memory alive.

    A view would do, except for two effects that users see: ``copy.deepcopy`` of a DTensor refuses a local tensor with a
    storage offset, and ``torch.save`` writes the whole storage of a view.
    """
    if flat.is_meta or 0 in shape:  # no memory to share
        return flat.new_empty_strided(shape, stride)
    numel = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    part = flat.untyped_storage()[offset * flat.itemsize : (offset + numel) * flat.itemsize]
    return tensor_on(part, 0, shape, stride, flat.dtype)
