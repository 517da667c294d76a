"""On which device a shard may be bound. The words of refusals are in ``golden/replaced.txt``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fsdp2.core.comm.offload import HOST, Home
from fsdp2.extras.replaced import check_device
from tests.harness.golden import texts_beside
from tests.harness.messages import error_of

TEXTS = texts_beside(__file__)
CUDA = torch.device("cuda", 1)
PINNED = Home(HOST, is_staged=True, pin_memory=True)


REFUSED: dict[str, Callable[[], object]] = {
    "on the device where shards are offloaded": lambda: check_device("blocks.0.weight", CUDA, PINNED),
    "on another device": lambda: check_device("blocks.0.weight", HOST, Home(CUDA)),
    "on another device of the same type": lambda: check_device("weight", torch.device("cuda", 0), Home(CUDA)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_shard_is_refused(case: str) -> None:
    TEXTS.check(case, error_of(REFUSED[case]), among=REFUSED)


def test_shard_on_its_device_or_on_none_is_accepted() -> None:
    for device, home in ((HOST, PINNED), (torch.device("meta"), PINNED), (HOST, Home(HOST)), (CUDA, Home(CUDA))):
        check_device("weight", device, home)
