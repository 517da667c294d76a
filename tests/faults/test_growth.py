"""Nothing that a rank holds grows with the number of steps."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from unittest import mock

import pytest
import torch

from fsdp2.core.group import gradients
from fsdp2.core.schedule import schedule
from fsdp2.extras import torch_names
from tests.distributed.support import Stack, shard, step
from tests.faults.growth import MIB, VARIANTS, Variant, growth, train
from tests.harness.distributed import RankContext, distributed
from tests.harness.pool import WorkerPool
from tests.harness.selection import long

MANY_STEPS = (3_000, 10_000)  # see growth.py for why no earlier
# Of 7,000 steps. A leak in every step, or in every tenth one, is more than all of these.
MOST_OBJECTS = 500  # a few are made late: caches, and what the compiler drops
MOST_MALLOC_NBYTES = MIB // 2  # 75 bytes per step
MOST_RESIDENT_NBYTES = 8 * MIB  # the allocator returns pages late, and cuts freed ones into pieces
MOST_MAPPINGS = 8  # of such pages


def _assert_flat(found: list[Counter[str]], what: str) -> None:
    most = {"resident_nbytes": MOST_RESIDENT_NBYTES, "malloc_nbytes": MOST_MALLOC_NBYTES, "mappings": MOST_MAPPINGS}
    most |= dict.fromkeys(("tensors", "threads", "descriptors", "entries"), 0)
    too_much = {name: by for name, by in growth(found).items() if by > most.get(name, MOST_OBJECTS)}
    assert not too_much, f"{what} has grown: {too_much}"


@pytest.mark.long
@pytest.mark.in_turns
@pytest.mark.timeout(1800)
def test_nothing_grows_in_10_000_steps() -> None:
    """``python -m tests.faults.growth`` runs the other variants, too: they are too long for a suite."""
    with closing(WorkerPool(2)) as pool:
        for rank, found in enumerate(pool.run(train, 1800, variant="tensors kept by the user", at=MANY_STEPS)):
            _assert_flat(found, f"rank {rank}")


FEW = ("forwards without a backward", "a frozen model", "no last backward")


@pytest.mark.parametrize(
    "variant", [*FEW, *long(*(name for name, each in VARIANTS.items() if not each.compiled and name not in FEW))]
)
@distributed(2)
def test_no_container_of_the_runtime_grows(ctx: RankContext, variant: str) -> None:
    """Limits are small here: in 10,000 steps, the model would be far beyond those of the package."""
    with mock.patch.object(schedule, "MAX_ENDED", 32), mock.patch.object(gradients, "MAX_USED", 32):
        found = train(ctx, variant, (20, 40))
    assert found[1]["entries"] <= found[0]["entries"]  # models of earlier tests may go meanwhile


@distributed(2)
def test_keys_in_the_store_go_with_their_model(ctx: RankContext) -> None:
    """All but those of the last one."""
    counts = []
    for _ in range(4):
        step(shard(ctx, Stack(1)))
        gc.collect()
        torch.distributed.barrier()
        counts.append(torch_names.default_store().num_keys())
        torch.distributed.barrier()
    assert counts[3] == counts[1], counts


_kept: list[object] = []
LEAKS: dict[str, Callable[[], object]] = {
    "descriptors": lambda: os.open(os.devnull, os.O_RDONLY),
    "malloc_nbytes": lambda: bytes(1000),
    "tensors": lambda: torch.empty(1),
}


def _train_leaking(ctx: RankContext, name: str) -> None:
    with mock.patch.dict(VARIANTS, {name: Variant(step=lambda *_: _kept.append(LEAKS[name]()))}):
        found = train(ctx, name, (100, 1_100))
    with pytest.raises(AssertionError, match=name):
        _assert_flat(found, "this rank")


@pytest.mark.long
@pytest.mark.parametrize("name", LEAKS)
def test_what_leaks_in_every_step_is_noticed(name: str) -> None:
    with closing(WorkerPool(2)) as pool:
        pool.run(_train_leaking, name=name)
