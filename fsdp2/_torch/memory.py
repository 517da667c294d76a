"""Launches for many tensors."""

from __future__ import annotations

from collections.abc import Callable

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
