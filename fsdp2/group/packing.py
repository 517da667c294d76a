"""How gradients are laid into a bucket where no operation of torch does it, or not without copies of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp2 import _torch
from fsdp2.group.all_gather import pieces
from fsdp2.plan.layout import Layout, ShardLayout


class CopiedRows:
    """``_torch.pack_rows`` without copies that are padded or cast first. Of ``[rows, n]``, what a gradient fills whole
    is copied at once, and its last, partial row after that."""

    def __init__(self, layouts: Sequence[ShardLayout]) -> None:
        self._sizes = [layout.chunk_numel for layout in layouts]
        self._whole = [(layout.numel // layout.chunk_numel, layout.chunk_numel) for layout in layouts]
        self._heights = sorted({rows for rows, _ in self._whole})
        rests = [layout.numel % layout.chunk_numel for layout in layouts]
        starts = [sum(self._sizes[:i]) for i in range(len(layouts))]
        self._partial = [(i, starts[i], rest) for i, rest in enumerate(rests) if rest > 0]
        # With as many ranks as rows, or more, most gradients have the shape already.
        self._reshaped = [
            i for i, layout in enumerate(layouts) if rests[i] == 0 and tuple(layout.shape) != self._whole[i]
        ]
        self._is_padded = not all(layout.is_even for layout in layouts)

    def __call__(self, grads: list[torch.Tensor], out: torch.Tensor) -> None:
        if self._is_padded:
            out.zero_()
        columns = {rows: out.narrow(0, 0, rows).split_with_sizes(self._sizes, dim=1) for rows in self._heights}
        targets = [columns[rows][i] for i, (rows, _) in enumerate(self._whole)]
        sources = grads.copy()
        for i in self._reshaped:
            sources[i] = grads[i].reshape(self._whole[i])
        for i, start, numel in self._partial:
            values, (rows, n) = grads[i].reshape(-1), self._whole[i]
            sources[i] = values[: rows * n].view(rows, n)
            sources.append(values[rows * n :])
            targets.append(out[rows, start : start + numel])
        _torch.foreach_copy(targets, sources)


def pack_strided(grads: Sequence[tuple[torch.Tensor, Layout]], dtype: torch.dtype) -> torch.Tensor:
    """Rank-major ``[W * n]``: each rank's piece of every gradient, padded to the chunk."""
    num_shards = grads[0][1].num_shards
    packed = grads[0][0].new_zeros((num_shards, sum(layout.chunk_numel for _, layout in grads)), dtype=dtype)
    offset = 0
    for grad, layout in grads:
        for row, piece in zip(packed, pieces(grad, layout), strict=True):
            row.narrow(0, offset, piece.numel()).view(piece.shape).copy_(piece)
        offset += layout.chunk_numel
    return packed.view(-1)
