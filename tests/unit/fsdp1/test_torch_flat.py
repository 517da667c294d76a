"""Where parameters lie in the flat parameter of torch's class: numbers only."""

from __future__ import annotations

import pytest

from fsdp2.fsdp1.state_values import TorchFlat, torch_flat


def test_parameters_follow_each_other_and_ranks_get_equal_parts_but_the_last() -> None:
    assert torch_flat([15, 0, 5], 4, 3, aligned=False) == TorchFlat((0, 15, 15), 20, 7)


def test_aligned_parameters_start_at_multiples_of_16_bytes_and_the_whole_divides() -> None:
    assert torch_flat([15, 5], 4, 2, aligned=True) == TorchFlat((0, 16), 22, 11)
    assert torch_flat([15, 5], 2, 3, aligned=True) == TorchFlat((0, 16), 21, 7)
    assert torch_flat([1, 1], 32, 2, aligned=True) == TorchFlat((0, 1), 2, 1)


@pytest.mark.parametrize("numel", range(7))
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("aligned", [False, True])
def test_parts_of_all_ranks_are_the_whole(numel: int, num_ranks: int, aligned: bool) -> None:
    layout = torch_flat([numel, 3], 4, num_ranks, aligned=aligned)
    parts = [layout.interval(rank) for rank in range(num_ranks)]
    assert parts[0][0] == 0
    assert parts[-1][1] == layout.numel
    assert [stop for _, stop in parts[:-1]] == [start for start, _ in parts[1:]]
