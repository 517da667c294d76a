"""What a rank of a stream says when it leaves, and what it cleans up, is for ranks that are still there."""

from __future__ import annotations

from unittest import mock

import torch.distributed as dist

from fsdp2.extras import torch_names
from fsdp2.tools.stream_gate import Gate, Leaving


def test_a_stream_ends_although_the_rank_that_hosts_the_store_has_ended_before() -> None:
    store = dist.HashStore()
    with (
        mock.patch.object(torch_names, "default_store", return_value=store),
        mock.patch.object(dist, "get_rank", return_value=1),
    ):
        gate = Gate((0, 1), (1,), "stream")
    gone = mock.Mock(side_effect=dist.DistNetworkError("Connection reset by peer"))
    with mock.patch.object(gate, "_store", mock.Mock(add=gone, compare_set=gone)):
        gate.leave(Leaving.LEFT, "after 1 of 2 buckets")
        gate.close()
    assert gone.call_count == 2
