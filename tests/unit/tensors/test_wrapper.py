"""Which operations write a tensor."""

from __future__ import annotations

import torch

from fsdp2.tensors import BFloat16AllGatherTensor
from fsdp2.tensors.wrapper import written_by


def test_collectives_that_read_a_shard_do_not_count_as_writes(master: torch.Tensor) -> None:
    """Else only the ranks whose shards need no padding would count ``full_tensor()``, and ranks would disagree."""
    shard = BFloat16AllGatherTensor(master)
    gather, broadcast = torch.ops._c10d_functional.all_gather_into_tensor.default, torch.ops.c10d.broadcast_.default
    assert written_by(gather, (shard, 2, "group"), {}) == []
    (written,) = written_by(broadcast, ([shard],), {})
    assert written is shard
