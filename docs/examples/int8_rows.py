"""A tensor subclass with all-gather hooks: shards stay in float32, and int8 travels, with one float32 scale per row.

    python docs/examples/int8_rows.py

Four parts make such a class. A wrapper subclass holds the plain tensor in ``_data``. ``__torch_dispatch__`` gives the
class back after the operations of sharding, optimizers and checkpoints. The two hooks convert what travels.
``add_safe_globals`` allows checkpoints to read the class. ``fsdp2.tensors`` has more formats.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fsdp2.testing import check_all_gather_extension

aten = torch.ops.aten


class Int8Rows(torch.Tensor):
    """A float32 matrix ``[rows, columns]`` that is gathered as int8; an entry is off by at most half a scale."""

    KEEPS_CLASS = frozenset(
        {
            *(aten.new_zeros.default, aten.split.Tensor, aten.slice.Tensor, aten.view.default),
            *(aten.detach.default, aten.clone.default, aten._to_copy.default, aten.empty_like.default),
        }
    )
    __torch_function__ = nn.Parameter.__torch_function__

    @staticmethod
    def __new__(cls, data: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device=data.device)

    def __init__(self, data: Tensor) -> None:
        self._data = data

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_data"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, outer_size: Any, outer_stride: Any) -> Int8Rows:
        return Int8Rows(inner["_data"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain_args, plain_kwargs = tree_map_only(cls, lambda wrapper: wrapper._data, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        if func in cls.KEEPS_CLASS:
            return tree_map_only(torch.Tensor, cls, result)
        in_place = args and isinstance(args[0], cls) and result is args[0]._data
        return args[0] if in_place else result

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, Tensor], None]:
        scales = self._data.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
        return ((self._data / scales).round().to(torch.int8), scales), None

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, Tensor], metadata: None, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        values, scales = all_gather_outputs  # int8 [rows, columns] and float32 [rows, 1]
        unsharded = (values * scales).to(param_dtype)
        if out is None:
            return unsharded, (unsharded,)
        out.copy_(unsharded)
        return None

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True  # the unsharded tensor does not alias the outputs


torch.serialization.add_safe_globals([Int8Rows])  # checkpoints are read with torch.load(weights_only=True)


if __name__ == "__main__":
    check_all_gather_extension(Int8Rows, shapes=[(8, 6), (5, 3), (2, 4)])
    print("fully_shard can use Int8Rows")
