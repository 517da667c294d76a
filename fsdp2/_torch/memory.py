"""Launches for many tensors, and who holds which memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import cast

import torch

# One launch for many tensors: copies that cast where dtypes differ, additions, divisions by one number. Names of their
# own and no functions, because a call more per launch shows.
foreach_copy: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_
foreach_add: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_add_
foreach_div: Callable[[list[torch.Tensor], float], None] = torch._foreach_div_


def foreach_norm(tensors: list[torch.Tensor], order: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """The norm of each tensor, computed in ``dtype``, in one launch."""
    return list(torch._foreach_norm(tensors, order, dtype))


def foreach_mul(targets: list[torch.Tensor], factor: torch.Tensor) -> None:
    """One launch for many in-place multiplications by a 0-dim tensor, whose value the CPU need not know."""
    torch._foreach_mul_(targets, factor)


def pack_rows(tensors: list[torch.Tensor], out: torch.Tensor) -> None:
    """Cut each tensor along its first dimension into ``out.size(0)`` rows, padded with zeros, and lay the rows of all
    tensors side by side in ``out``, casting where dtypes differ. One launch on CUDA; on CPU, tensors that need padding
    or a cast are copied twice."""
    torch._chunk_cat(tensors, 0, out.size(0), out=out)


# Only CPython's own counts say at once that nobody has references; not those of its free-threaded build.
COUNTS_REFERENCES = sys.implementation.name == "cpython" and getattr(sys, "_is_gil_enabled", lambda: True)()
_use_count = cast(Callable[[torch.Tensor], int], torch.Tensor._use_count)  # type: ignore[attr-defined]


def _python_counts_all() -> bool:
    """Whether Python's count of a tensor's references shows that C++ has some; it does from torch 2.12 on."""
    grad, param = torch.zeros(1), torch.zeros(1)
    before = sys.getrefcount(grad)
    param.grad = grad
    return sys.getrefcount(grad) > before


_PYTHON_COUNTS_ALL = _python_counts_all()


def reference_counts(tensors: Sequence[torch.Tensor], storage: torch.UntypedStorage) -> list[int]:
    """How many references exist to each of ``tensors``, from Python and from C++, and to their ``storage``. What they
    are without others' has to be found out by a call while there are none."""
    counts = [torch._C._storage_Use_Count(storage._cdata), *map(sys.getrefcount, tensors)]
    return counts if _PYTHON_COUNTS_ALL else counts + list(map(_use_count, tensors))


def can_swap_storages() -> bool:
    """Whether :func:`swap_storages` exists in this torch."""
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def swap_storages(a: torch.UntypedStorage, b: torch.UntypedStorage) -> None:
    """Exchange the memory of two storages; every tensor keeps its storage. Public API can only free and allocate."""
    a._swap_data_ptr_(b)  # type: ignore[attr-defined]


def share_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether one is a view of the other, or both of a third; 1 us less than by the addresses of their storages."""
    return bool(torch._C._is_alias_of(a, b))  # type: ignore[attr-defined]
