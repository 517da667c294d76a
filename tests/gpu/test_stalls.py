"""On CUDA: a rank whose device does not get on says what it did last, while this thread waits for the device."""

from __future__ import annotations

import threading

import torch

from fsdp2.extras.stalls import StallWatch
from fsdp2.runtime.unit_tree import tree_of
from tests.gpu.support import batch, on_gpus, sharded
from tests.harness.distributed import RankContext
from tests.harness.messages import Heard

TIMEOUT_S = 4


@on_gpus
def test_device_that_does_not_get_on_is_told_of_before_the_timeout(ctx: RankContext) -> None:
    model = sharded(ctx, num_blocks=2)
    model(batch())
    tree = tree_of(model._unit())  # type: ignore[attr-defined]
    with Heard() as heard:
        watch = StallWatch(ctx.rank, tree.executor.streams.is_idle, TIMEOUT_S)
        watch.add(tree)
        threading.Thread(target=watch.run, daemon=True).start()
        with tree.executor.streams.on_gather:
            torch.cuda._sleep(10_000_000_000)  # cycles: about 5 s, in the place of a collective that waits
        torch.cuda.synchronize()
    assert len(heard.messages) == 1
    assert f"The timeout of the backend is {TIMEOUT_S} s." in heard.messages[0]
    assert f"Last events on rank {ctx.rank}: {tree.story()}." in heard.messages[0]
