"""What a parameter that is sent in bfloat16 sends, and when its memory is released."""

from __future__ import annotations

import pytest
import torch

from fsdp2.tensors import BFloat16AllGatherTensor
from tests.unit.tensors.shards import pre


@pytest.mark.parametrize("num_ranks", [4, 5, 8])
def test_padding_in_the_hook_gives_every_rank_the_same_size(num_ranks: int, master: torch.Tensor) -> None:
    full = BFloat16AllGatherTensor(master, pad=True)
    shards = [*torch.chunk(full, num_ranks), full[:0], full[:0], full[:0]][:num_ranks]  # empty ones for the last ranks
    payloads = [pre(shard, num_ranks, master)[0][0] for shard in shards]
    assert {payload.shape for payload in payloads} == {torch.Size([-(-6 // num_ranks), 8])}
    assert not torch.cat(payloads)[6:].any()


@pytest.mark.parametrize(("param_dtype", "released"), [(None, True), (torch.float16, True), (torch.bfloat16, False)])
def test_bfloat16_outputs_are_released_only_where_they_are_copied_from(
    param_dtype: torch.dtype | None, released: bool, master: torch.Tensor
) -> None:
    wrapper = BFloat16AllGatherTensor(master)
    assert not wrapper.fsdp_should_release_all_gather_outputs_after_post_all_gather()  # not known yet
    pre(wrapper, 1, master, param_dtype)
    assert wrapper.fsdp_should_release_all_gather_outputs_after_post_all_gather() is released
