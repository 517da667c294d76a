"""Where parameters lie in the flat parameter of torch's class."""

from __future__ import annotations

import pytest

from fsdp2.fsdp1.state_values import torch_flat


@pytest.mark.parametrize(
    ("numels", "itemsize", "num_ranks", "aligned", "expected"),
    [
        ([15, 0, 5], 4, 3, False, ([0, 15, 15], 20, 7)),  # ranks get equal parts, but the last
        ([15, 5], 4, 2, True, ([0, 16], 22, 11)),  # aligned to 16 bytes, and the whole divides
        ([15, 5], 2, 3, True, ([0, 16], 21, 7)),
        ([1, 1], 32, 2, True, ([0, 1], 2, 1)),
    ],
)
def test_parameters_follow_each_other(
    numels: list[int], itemsize: int, num_ranks: int, aligned: bool, expected: tuple[list[int], int, int]
) -> None:
    offsets, layout = torch_flat(numels, itemsize, num_ranks, aligned=aligned)
    assert (offsets, layout.numel, layout.chunk_numel) == expected


@pytest.mark.parametrize("aligned", [False, True])
def test_parts_of_all_ranks_are_the_whole(aligned: bool) -> None:
    for numel in range(7):
        for num_ranks in (1, 2, 3, 4):
            _, layout = torch_flat([numel, 3], 4, num_ranks, aligned=aligned)
            starts, stops = zip(*(layout.interval(rank) for rank in range(num_ranks)), strict=True)
            assert (0, *stops) == (*starts, layout.numel)
