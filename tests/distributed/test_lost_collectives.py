"""When ranks part, the collective that nobody joins fails after the timeout, and every rank says what it did last."""

from __future__ import annotations

from typing import NoReturn
from unittest import mock

import pytest
import torch
from torch import Tensor

import fsdp2
from fsdp2.extras.peers import PeerComm
from tests.distributed.support import batch, sharded, step
from tests.harness.distributed import RankContext, distributed
from tests.harness.selection import long


class _Lost:
    """A collective that fails."""

    def wait(self) -> None:
        raise RuntimeError("connection closed")


@distributed(2)
def test_reduction_that_is_lost_names_the_unit_and_its_last_events(ctx: RankContext) -> None:
    model = sharded(ctx)
    step(model)
    with (
        mock.patch.object(PeerComm, "reduce_scatter", return_value=[_Lost()]),
        pytest.raises(fsdp2.CommunicationError) as raised,
    ):
        step(model)
    found = str(raised.value)
    assert found.startswith(f"reduction of unit 'blocks.2' failed on rank {ctx.rank}: connection closed"), found
    assert found.endswith(
        "pre_backward blocks.2, post_backward blocks.2, pre_backward blocks.1, post_backward blocks.1.\n"
        "Compare the last events of all ranks: the ranks diverged at the first difference."
    )
    model.reset_iter_state()


def _refuse(*args: object, **kwargs: object) -> NoReturn:
    raise RuntimeError("connection closed")


def _lack_memory(*args: object, **kwargs: object) -> Tensor:
    return torch.empty(1 << 60)


@distributed(2)
def test_all_gather_that_cannot_be_launched_names_the_unit_and_keeps_its_memory(ctx: RankContext) -> None:
    model = sharded(ctx)
    with (
        mock.patch.object(PeerComm, "all_gather", return_value=_refuse),
        pytest.raises(fsdp2.CommunicationError) as raised,
    ):
        model(batch())
    found = str(raised.value)
    assert found.startswith(f"all-gather of unit '(root)' failed on rank {ctx.rank}: connection closed"), found
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert model._unit().groups[0].unsharded.gather.gathered.is_lost  # others of its messages might be in flight


@pytest.mark.parametrize("collective", ["all_gather", *long("reduce_scatter")])
@distributed(2)
def test_memory_that_a_launch_lacks_is_no_lost_collective(ctx: RankContext, collective: str) -> None:
    model = sharded(ctx)
    fault = {"return_value" if collective == "all_gather" else "side_effect": _lack_memory}
    with mock.patch.object(PeerComm, collective, **fault), pytest.raises(RuntimeError, match="memory") as raised:
        step(model)
    assert type(raised.value) is RuntimeError, raised.value
    model.reset_iter_state()
