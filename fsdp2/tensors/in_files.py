"""What files have of a parameter whose class has more than one tensor: see ``fsdp2_in_files`` of ``Shard4bit``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class FileTensor:
    """One of several tensors that files have of a parameter.

    Attributes:
        tensor: if ``is_cut``, this rank's rows along dim 0, else all of it.
        shape, dtype: in files. Bytes of ``tensor`` behind these are padding.
        check: says what is wrong with values of files, which may have another shape then, and of ``""``, nothing is.
        write: loads such values, instead of a copy into ``tensor``.
        dense: how files that have the weight itself, not in pieces, are loaded.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_cut: bool = False
    check: Callable[[torch.Tensor], str] | None = None
    write: Callable[[torch.Tensor], None] | None = None
    dense: DenseWeight | None = None


@dataclass(frozen=True)
class DenseWeight:
    """A weight that is quantised when it is loaded.

    Attributes:
        shape: in files.
        row_numel: how many of its entries, in their order in memory, one row of the parameter has.
        quantise: gets the entries of this rank's rows, and returns something for each row.
        finish: gets that of all ranks, and the number of this rank's first row. None: there is nothing left to do.
    """

    shape: tuple[int, ...]
    row_numel: int
    quantise: Callable[[torch.Tensor], torch.Tensor]
    finish: Callable[[torch.Tensor, int], None] | None
