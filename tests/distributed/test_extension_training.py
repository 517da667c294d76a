"""Training with all-gather hooks is what the same training by hand is, bit for bit on 2 ranks.

The reference (``tests/harness/extension_reference.py``) uses neither a runtime nor DTensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fsdp2 import MixedPrecisionPolicy, fully_shard
from tests.distributed.extension_support import (
    EVEN,
    MIXED,
    UNEVEN,
    Net,
    Twins,
    adam,
    batch,
    built,
    dtensor_adam,
    loss_of,
    sgd,
    sharded,
)
from tests.harness.comms import direct_from
from tests.harness.distributed import RankContext, distributed
from tests.harness.extension_reference import Reference, assert_same_shards
from tests.harness.extensions import Aliasing, AliasingHalved, Halved, Packed4, Padded, Ragged, Scaled, Silent, wrap
from tests.harness.selection import long

CLASSES: dict[str, Callable[[Tensor], Tensor]] = {
    "halved": Halved,
    "scaled": Scaled,
    "packed4": Packed4,
    "ragged": Ragged,
    "padded": Padded,
    "aliasing": Aliasing,
    "silent": Silent,
}
on_four_ranks = pytest.mark.parametrize(
    "name", ["packed4", *long("ragged", "aliasing", "halved", "scaled", "padded", "silent")]
)
POLICIES = {"full": None, "mixed": MIXED, "reduced": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}


@pytest.mark.parametrize("policy", ["full", "mixed"])
@pytest.mark.parametrize("name", list(CLASSES))
@distributed(2)
def test_uneven_shards_train_with_adam_as_by_hand(ctx: RankContext, name: str, policy: str) -> None:
    policies = POLICIES[policy]
    Twins(CLASSES[name], ctx.mesh_1d(), ctx.rank, dim=UNEVEN, policy=policies, optimizer=dtensor_adam).train(3)


@on_four_ranks
@distributed(4)
def test_uneven_and_empty_shards_train_with_adam_as_by_hand(ctx: RankContext, name: str) -> None:
    Twins(CLASSES[name], ctx.mesh_1d(), ctx.rank, dim=UNEVEN).train(3)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("name", list(CLASSES))
@distributed(2)
def test_even_shards_train_with_sgd_as_by_hand(ctx: RankContext, name: str, reshard: bool) -> None:
    twins = Twins(CLASSES[name], ctx.mesh_1d(), ctx.rank, optimizer=sgd, reshard_after_forward=reshard)
    assert twins.exact
    twins.train(3)


@on_four_ranks
@distributed(4)
def test_payloads_that_rest_on_two_of_four_ranks_train_with_sgd_as_by_hand(ctx: RankContext, name: str) -> None:
    kwargs: dict[str, Any] = {"optimizer": sgd, "policy": MIXED, "reshard_after_forward": 2}
    Twins(CLASSES[name], ctx.mesh_1d(), ctx.rank, dim=UNEVEN, **kwargs).train(2)


@pytest.mark.parametrize("policy", [*list(POLICIES)[:1], *long(*list(POLICIES)[1:])])
@pytest.mark.parametrize("name", ["packed4", *long("aliasing")])
@distributed(4)
def test_trains_on_hsdp_as_by_hand(ctx: RankContext, name: str, policy: str) -> None:
    twins = Twins(CLASSES[name], ctx.mesh_2d(2, 2), ctx.rank, dim=UNEVEN, policy=POLICIES[policy])
    assert twins.exact
    twins.train(3)


@pytest.mark.parametrize("name", list(CLASSES))
@distributed(2)
def test_world_of_one_trains_as_by_hand(ctx: RankContext, name: str) -> None:
    for policy in (None, MIXED):
        Twins(CLASSES[name], ctx.mesh_of_one(), ctx.rank, dim=UNEVEN, policy=policy).train(3)


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
    def prepare(model: nn.Module) -> None:
        wrap(model, AliasingHalved, lambda name, value: True)

    Twins(AliasingHalved, ctx.mesh_1d(), ctx.rank, model=_Cast, prepare=prepare).train(3)


class _Cast(Net):
    """Computes in bfloat16 whatever its parameters are."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


@on_four_ranks
@distributed(4)
def test_trains_as_by_hand_where_everything_travels_on_its_own(ctx: RankContext, name: str) -> None:
    with direct_from(0):
        Twins(CLASSES[name], ctx.mesh_1d(), ctx.rank, dim=UNEVEN, reshard_after_forward=2).train(2)


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
    mesh = ctx.mesh_1d()
    reference = Reference(built(make, dim), mesh, adam, dim=lambda name, value: value.dim() - 1)
    model = sharded(built(make, dim), mesh, shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))
    optimizer = adam(model.parameters())
    for index in range(3):
        loss = loss_of(batch(ctx.rank, index))
        loss(model).backward()
        reference.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        assert_same_shards(dict(model.named_parameters()), reference, exact=ctx.world_size == 2)


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
def test_classes_and_plain_parameters_share_a_group(ctx: RankContext) -> None:
    """Every second weight is plain, and the biases of a vector class."""

    def shard(model: Any, mesh: Any, **kwargs: Any) -> Any:
        return fully_shard(model, mesh=mesh, **kwargs)

    def mixed(model: Any) -> None:
        wrap(model, Scaled, lambda name, value: "up.weight" in name)
        wrap(model, Halved, lambda name, value: "bias" in name)
        wrap(model, Ragged, lambda name, value: "entry.weight" in name)

    for nbytes in (0, 512 * 1024):
        with direct_from(nbytes):
            twins = Twins(lambda value: value, ctx.mesh_1d(), ctx.rank, dim=UNEVEN, prepare=mixed, shard=shard)
            twins.train(3)
