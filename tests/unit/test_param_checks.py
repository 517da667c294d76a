"""What a group refuses of its parameters, in words."""

from __future__ import annotations

import pytest
import torch

from fsdp2.comm.offload import Home
from fsdp2.group.param import check_device
from tests.harness.golden import Check
from tests.harness.messages import error_of


def test_shard_on_another_device_is_refused_by_name(golden: Check) -> None:
    golden(error_of(lambda: check_device("blocks.0.weight", torch.device("cpu"), Home(torch.device("cuda", 1)))))


def test_shard_on_another_device_of_the_same_type_is_refused() -> None:
    with pytest.raises(ValueError, match="is on cuda:0, but its mesh is on cuda:1"):
        check_device("weight", torch.device("cuda", 0), Home(torch.device("cuda", 1)))


def test_shard_on_the_meshs_device_is_accepted() -> None:
    check_device("weight", torch.device("cpu"), Home(torch.device("cpu")))
    check_device("weight", torch.device("cuda", 1), Home(torch.device("cuda", 1)))
