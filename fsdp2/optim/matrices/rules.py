"""Rules that define which matrices a tensor consists of.

A rule is about the whole tensor, never about ranks. It divides the tensor into boxes; each box is one matrix, which one
rank receives whole. Integers in, integers out. Rule: the boxes of a tensor do not overlap and together cover it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fsdp2.extras.checked import AT_LEAST_1, checked

Interval = tuple[int, int]  # start, stop
Box = tuple[Interval, ...]  # an interval for each dim of the tensor


@dataclass(frozen=True)
class MatrixBox:
    """One matrix of a tensor: the entries in ``box``, in order, as ``rows`` x ``columns``. ``label`` distinguishes it
    from the other matrices of the tensor, like an index."""

    box: Box
    rows: int
    columns: int
    label: str = ""


@checked()
@dataclass(frozen=True)
class MatrixRule:
    """Defines which matrices a tensor consists of. Make one with a class method.

    ``MatrixRule.whole()`` is the default for tensors of two dims.
    """

    kind: Literal["whole", "rows", "columns", "heads", "batch", "flattened"]
    sizes: tuple[int, ...] = ()
    inner: MatrixRule | None = None

    @classmethod
    def whole(cls) -> MatrixRule:
        """A tensor of two dims is one matrix."""
        return cls("whole")

    @classmethod
    @checked(sizes=AT_LEAST_1)
    def rows(cls, *sizes: int) -> MatrixRule:
        """Matrices with these numbers of rows, on top of each other: a fused QKV weight ``[q + k + v, n]`` is three."""
        return cls("rows", sizes)

    @classmethod
    @checked(sizes=AT_LEAST_1)
    def columns(cls, *sizes: int) -> MatrixRule:
        """Matrices with these numbers of columns, side by side: GPT-2's fused QKV weight is ``[n, q + k + v]``."""
        return cls("columns", sizes)

    @classmethod
    @checked(num_heads=AT_LEAST_1)
    def heads(cls, num_heads: int) -> MatrixRule:
        """``num_heads`` matrices with equal numbers of rows, stacked vertically."""
        return cls("heads", (num_heads,))

    @classmethod
    def batch(cls, inner: MatrixRule | None = None) -> MatrixRule:
        """Each index into the dims before the last two is a separate tensor: experts ``[E, m, n]`` are E matrices.
        ``inner`` is the rule for each of them."""
        return cls("batch", (), inner)

    @classmethod
    def flattened(cls) -> MatrixRule:
        """All dims after the first form the columns: a convolution ``[out, in, height, width]`` is one matrix."""
        return cls("flattened")

    def boxes(self, shape: Sequence[int]) -> list[MatrixBox]:
        """The matrices of a tensor of ``shape``.

        Raises:
            ValueError: the rule does not fit the shape. The text continues a sentence after the tensor's name.
        """
        full = tuple((0, size) for size in shape)
        if self.kind == "batch":
            return self._batched(shape)
        if self.kind == "flattened":
            self._expect(len(shape) >= 2, shape, "two dims or more")
            return [MatrixBox(full, shape[0], math.prod(shape[1:]))]
        self._expect(len(shape) == 2, shape, "two dims")
        rows, columns = shape
        if self.kind == "whole":
            return [MatrixBox(full, rows, columns)]
        sizes, dim = self.sizes, 1 if self.kind == "columns" else 0
        if self.kind == "heads":
            (num_heads,) = self.sizes
            self._expect(num_heads > 0 and rows % num_heads == 0, shape, f"rows that {num_heads} heads divide")
            sizes = (rows // num_heads,) * num_heads
        boxes = [(full[0], piece) if dim else (piece, full[1]) for piece in self._pieces(shape, dim, sizes)]
        return [
            MatrixBox((down, across), down[1] - down[0], across[1] - across[0], f"[{index}]")
            for index, (down, across) in enumerate(boxes)
        ]

    def _batched(self, shape: Sequence[int]) -> list[MatrixBox]:
        self._expect(len(shape) >= 3, shape, "three dims or more")
        inner = (self.inner or MatrixRule.whole()).boxes(shape[-2:])
        return [
            MatrixBox(
                (*[(at, at + 1) for at in index], *each.box),
                each.rows,
                each.columns,
                f"[{', '.join(map(str, index))}]{each.label}",
            )
            for index in itertools.product(*map(range, shape[:-2]))
            for each in inner
        ]

    def _pieces(self, shape: Sequence[int], dim: int, sizes: Sequence[int]) -> list[Interval]:
        is_cover = all(size > 0 for size in sizes) and sum(sizes) == shape[dim]
        self._expect(is_cover, shape, f"positive sizes whose sum is {shape[dim]}, instead of {tuple(sizes)}")
        stops = list(itertools.accumulate(sizes))
        return [(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]

    def _expect(self, is_met: bool, shape: Sequence[int], expected: str) -> None:
        if not is_met:
            raise ValueError(f"has shape {tuple(shape)}, but MatrixRule.{self.kind} expects {expected}.")
