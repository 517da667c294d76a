"""How files store a parameter whose class has several tensors: see ``fsdp2_in_files`` of ``Shard4bit``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class FileTensor:
    """One of several tensors that files store for a parameter.

    Attributes:
        tensor: this rank's rows along dim 0 if ``is_cut``, else the whole tensor.
        shape, dtype: those in files. Further bytes of ``tensor`` are padding.
        check: describes what is wrong with values from files, which may then have another shape; ``""`` means nothing.
        write: loads such values; used instead of a copy into ``tensor``.
        dense: how to load files that store the weight itself, not its pieces.
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
        shape: the shape in files.
        row_numel: the number of its entries, in memory order, that one row of the parameter holds.
        quantise: takes the entries of this rank's rows and returns a value for each row.
        finish: takes those values of all ranks and the number of this rank's first row. None if there is nothing to do.
    """

    shape: tuple[int, ...]
    row_numel: int
    quantise: Callable[[torch.Tensor], torch.Tensor]
    finish: Callable[[torch.Tensor, int], None] | None
