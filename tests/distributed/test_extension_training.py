"""Training with all-gather hooks is what the same training by hand is, bit for bit on 2 ranks.

The reference (``tests/harness/extension_reference.py``) uses neither a runtime nor DTensor.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fsdp2 import MixedPrecisionPolicy, fully_shard
from tests.distributed.extension_support import EVEN, MIXED, UNEVEN, Net, Twins, dtensor_adam, sgd, sharded
from tests.harness.comms import direct_from, gathers_noted
from tests.harness.distributed import RankContext, distributed
from tests.harness.extensions import Aliasing, AliasingHalved, Halved, Packed4, Padded, Ragged, Scaled, Silent, wrap
from tests.harness.selection import in_ci, long

CLASSES: dict[str, Callable[[Tensor], Tensor]] = {
    "halved": Halved,
    "scaled": Scaled,
    "packed4": Packed4,
    "ragged": Ragged,
    "padded": Padded,
    "aliasing": Aliasing,
    "silent": Silent,
}
REDUCED = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
ON_TWO: dict[str, dict[str, Any]] = {
    "uneven, Adam": {"dim": UNEVEN, "optimizer": dtensor_adam},
    "uneven, mixed precision": {"dim": UNEVEN, "optimizer": dtensor_adam, "policy": MIXED},
    "even, SGD": {"optimizer": sgd, "reshard_after_forward": True},
    "even, SGD, kept": {"optimizer": sgd, "reshard_after_forward": False},
}
ON_FOUR: dict[str, dict[str, Any]] = {
    "uneven and empty": {"dim": UNEVEN},
    "resting on two": {"dim": UNEVEN, "optimizer": sgd, "policy": MIXED, "reshard_after_forward": 2},
    "travelling alone": {"dim": UNEVEN, "reshard_after_forward": 2},
}


@pytest.mark.every_case
@pytest.mark.parametrize("way", ["uneven, Adam", "even, SGD", *in_ci("uneven, mixed precision", "even, SGD, kept")])
@pytest.mark.parametrize("name", ["halved", *in_ci(*list(CLASSES)[1:])])
@distributed(2)
def test_trains_as_by_hand_bit_for_bit(ctx: RankContext, name: str, way: str) -> None:
    twins = Twins(CLASSES[name], ctx.mesh_1d(), ctx.rank, **ON_TWO[way])
    assert twins.exact
    twins.train(3)


@pytest.mark.every_case
@pytest.mark.parametrize("way", list(ON_FOUR))
@pytest.mark.parametrize("name", ["packed4", *long("ragged", "aliasing", "halved", "scaled", "padded", "silent")])
@distributed(4)
def test_trains_on_four_ranks_as_by_hand(ctx: RankContext, name: str, way: str) -> None:
    with direct_from(0) if way == "travelling alone" else nullcontext():
        Twins(CLASSES[name], ctx.mesh_1d(), ctx.rank, **ON_FOUR[way]).train(3)


@pytest.mark.parametrize("policy", [None, *long(MIXED, REDUCED)])
@pytest.mark.parametrize("name", ["packed4", *long("aliasing")])
@distributed(4)
def test_trains_on_hsdp_as_by_hand(ctx: RankContext, name: str, policy: MixedPrecisionPolicy | None) -> None:
    twins = Twins(CLASSES[name], ctx.mesh_2d(2, 2), ctx.rank, dim=UNEVEN, policy=policy)
    assert twins.exact
    twins.train(3)


@pytest.mark.parametrize("name", list(CLASSES))
@distributed(2)
def test_world_of_one_trains_as_by_hand(ctx: RankContext, name: str) -> None:
    for policy in (None, MIXED):
        Twins(CLASSES[name], ctx.mesh_of_one(), ctx.rank, dim=UNEVEN, policy=policy).train(3)


class _Cast(Net):
    """Computes in bfloat16 whatever its parameters are."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


@pytest.mark.long
@pytest.mark.parametrize("reshard", [2, *long(True, False)])
@distributed(4)
def test_what_arrives_in_another_dtype_than_the_bias_is_reduced_in_its_own(
    ctx: RankContext, reshard: bool | int
) -> None:
    """The unsharded weights are bfloat16, the biases float32."""
    Twins(AliasingHalved, ctx.mesh_1d(), ctx.rank, model=_Cast, reshard_after_forward=reshard).train(3)


@distributed(2)
def test_what_arrives_in_another_dtype_than_the_policy_asks_for_is_reduced_in_it(ctx: RankContext) -> None:
    prepare = partial(wrap, make=AliasingHalved, select=lambda name, value: True)
    Twins(AliasingHalved, ctx.mesh_1d(), ctx.rank, model=_Cast, prepare=prepare).train(3)


class _Large(nn.Module):
    """Shards of 512 KiB of bfloat16 on 2 ranks, and a small weight."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 1024), nn.Linear(1024, 513, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


@pytest.mark.parametrize("make", [Halved, Scaled, Aliasing])
@distributed(2)
def test_large_payloads_train_as_by_hand(ctx: RankContext, make: Any) -> None:
    Twins(make, ctx.mesh_1d(), ctx.rank, model=_Large, optimizer=sgd).train(2)


@pytest.mark.parametrize("make", [Halved, Aliasing])
@pytest.mark.parametrize("dim", [EVEN, UNEVEN])
@distributed(2, 4)
def test_shards_of_columns_train_as_by_hand(ctx: RankContext, make: Any, dim: int) -> None:
    """The payload keeps the dims, so it is joined along the second one."""
    shard = partial(sharded, shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))
    Twins(make, ctx.mesh_1d(), ctx.rank, dim=dim, shard=shard, cut=lambda name, value: value.dim() - 1).train(3)


@distributed(2, 4)
def test_payloads_of_fp8_bits_arrive(ctx: RankContext) -> None:
    class Float8(Halved):
        @classmethod
        def encode(cls, shard: Tensor, rank: int, size: torch.Size, num_ranks: int) -> tuple[Tensor, ...]:
            return (shard.contiguous().to(torch.float8_e4m3fn),)

    weight = torch.randn(UNEVEN, 6, generator=torch.Generator().manual_seed(1))
    model = nn.Linear(6, UNEVEN, bias=False)
    model.weight = nn.Parameter(Float8(weight))
    fully_shard(model, mesh=ctx.mesh_1d())
    model.unshard()
    assert torch.equal(model.weight, weight.to(torch.float8_e4m3fn).float())


@distributed(2, 4)
def test_classes_and_plain_parameters_travel_in_one_launch(ctx: RankContext) -> None:
    """Every second weight is plain, and the biases are of a vector class."""

    def mixed(model: Any) -> None:
        wrap(model, Scaled, lambda name, value: "up.weight" in name)
        wrap(model, Halved, lambda name, value: "bias" in name)
        wrap(model, Ragged, lambda name, value: "entry.weight" in name)

    for nbytes in (0, 512 * 1024):
        with direct_from(nbytes), gathers_noted() as noted:
            twins = Twins(lambda value: value, ctx.mesh_1d(), ctx.rank, dim=UNEVEN, prepare=mixed, shard=fully_shard)
            twins.train(3)
            if ctx.device_type == "cpu":  # one gather for each step, since the root stays unsharded after forward
                kinds = {"torch.bfloat16", "torch.float32", "torch.int8"}
                assert [kinds <= set(dtypes) for dtypes in noted] == [True] * 3, noted
