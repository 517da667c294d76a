"""Training with hooks is that by hand (``extension_reference.py``: no runtime, no DTensor), bit for bit on 2 ranks."""

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
from fsdp2.tensors import TwoTensor
from tests.distributed.extension_support import (
    EVEN,
    MIXED,
    UNEVEN,
    Net,
    Twins,
    adam,
    batch,
    dtensor_adam,
    loss_of,
    sgd,
    sharded,
)
from tests.harness.comms import direct_from, gathers_noted
from tests.harness.distributed import RankContext, distributed
from tests.harness.extension_reference import Reference, assert_same, assert_same_gradients, assert_same_shards
from tests.harness.extensions import Aliasing, AliasingHalved, Halved, Packed4, Padded, Ragged, Scaled, Silent, wrap
from tests.harness.selection import in_ci, long

CLASSES: dict[str, Callable[[Tensor], Tensor]] = {
    each.__name__.lower(): each for each in (Halved, Scaled, Packed4, Ragged, Padded, Aliasing, Silent)
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


@pytest.mark.ci
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


@pytest.mark.parametrize("make", [Halved, Aliasing])
@pytest.mark.parametrize("dim", [EVEN, UNEVEN])
@distributed(2, 4)
def test_shards_of_columns_train_as_by_hand(ctx: RankContext, make: Any, dim: int) -> None:
    """The payload keeps the dims, so it is joined along the second one."""
    shard = partial(sharded, shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))
    Twins(make, ctx.mesh_1d(), ctx.rank, dim=dim, shard=shard, cut=lambda name, value: value.dim() - 1).train(3)


@distributed(2, 4)
def test_classes_and_plain_parameters_travel_in_one_launch(ctx: RankContext) -> None:
    """Every second weight is plain, and the biases are of a vector class."""

    def mixed(model: Any) -> None:
        wrap(model, Scaled, lambda name, value: "0.up.weight" in name)
        wrap(model, Aliasing, lambda name, value: "1.up.weight" in name)
        wrap(model, Halved, lambda name, value: "bias" in name)
        wrap(model, Ragged, lambda name, value: "entry.weight" in name)

    for nbytes in (0, 512 * 1024):
        with direct_from(nbytes), gathers_noted() as noted:
            twins = Twins(lambda value: value, ctx.mesh_1d(), ctx.rank, dim=UNEVEN, prepare=mixed, shard=fully_shard)
            twins.train(3)
            if ctx.device_type == "cpu":  # one gather for each step, since the root stays unsharded after forward
                kinds = {"torch.bfloat16", "torch.float32", "torch.int8"}
                assert [kinds <= set(dtypes) for dtypes in noted] == [True] * 3, noted


# Pairs whose unsharded form, activations and gradients are pairs, too: each half is one plain model by hand. Where the
# policy names a dtype, they compute on a copy of what arrived, and else on what arrived.


def _half(which: str, dim: int) -> Net:
    torch.manual_seed("ab".index(which))
    return Net(dim)


def _paired(dim: int) -> Any:
    model, others = _half("a", dim), dict(_half("b", dim).named_parameters())
    values = {id(value): others[name] for name, value in model.named_parameters()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(TwoTensor(parameter.detach(), values[id(parameter)].detach())))
    return model


class _Pairs:
    """A model of pairs, and two references by hand."""

    def __init__(self, mesh: Any, rank: int, dim: int, optimizer: Any, **kwargs: Any) -> None:
        self.exact, self.rank, self.num = max(mesh.shape) <= 2, rank, 0
        policy = kwargs.get("mp_policy")
        self.dtype = (policy and policy.param_dtype) or torch.float32
        self.model = sharded(_paired(dim), mesh, **kwargs)
        self.optimizer = optimizer(self.model.parameters())
        self.references = {half: Reference(_half(half, dim), mesh, optimizer, policy) for half in "ab"}

    def backward(self, *, reduce: bool = True) -> None:
        x, self.num = batch(self.rank, self.num), self.num + 1
        loss = loss_of(x)(self.model)
        assert isinstance(loss, TwoTensor)
        loss.backward()
        for half, reference in self.references.items():
            expected = reference.backward(loss_of(x.to(self.dtype)), reduce=reduce)
            assert_same(f"loss of {half}", getattr(loss.detach(), half), expected, self.exact)

    def step(self) -> None:
        assert all(
            type(parameter.grad._local_tensor) is type(parameter._local_tensor) for parameter in self.model.parameters()
        )
        for half, reference in self.references.items():
            assert_same_gradients(self._halves(half), reference, exact=self.exact)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for half, reference in self.references.items():
            reference.step()
            assert_same_shards(self._halves(half), reference, exact=self.exact)

    def _halves(self, half: str) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = getattr(parameter._local_tensor, half)
            grad = parameter.grad
            found[name].grad = None if grad is None else getattr(grad._local_tensor, half)
        return found

    def train(self) -> None:
        """A step, and one that accumulates without communication."""
        for flags in ((True,), (False, True)):
            for flag in flags:
                self.model.set_requires_gradient_sync(flag)
                self.backward(reduce=flag)
            self.step()


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MIXED])
@distributed(2, 4)
def test_both_halves_train_as_by_hand(ctx: RankContext, policy: MixedPrecisionPolicy) -> None:
    for dim in (EVEN, UNEVEN) if ctx.world_size == 2 else (UNEVEN,):
        _Pairs(ctx.mesh_1d(), ctx.rank, dim, adam, mp_policy=policy).train()


@pytest.mark.long
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), *long(MIXED)])
@distributed(4)
def test_both_halves_train_on_hsdp_and_resting_on_two_ranks(ctx: RankContext, policy: MixedPrecisionPolicy) -> None:
    _Pairs(ctx.mesh_2d(2, 2), ctx.rank, UNEVEN, sgd, mp_policy=policy).train()
    _Pairs(ctx.mesh_1d(), ctx.rank, UNEVEN, sgd, mp_policy=policy, reshard_after_forward=2).train()


def _copies(self: TwoTensor, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
    """Lists the pair itself to be freed."""
    if out is not None:
        out.a.copy_(outputs[0])
        out.b.copy_(outputs[1])
        return None
    made = TwoTensor(*(output.clone() for output in outputs))
    return made, (made,)


@pytest.mark.parametrize("kind", ["aliased", "copied"])
@distributed(2)
def test_inner_tensors_are_the_same_objects_and_empty_while_resharded(ctx: RankContext, kind: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if kind == "copied":
            patch.setattr(TwoTensor, "fsdp_post_all_gather", _copies)
        model, seen = sharded(_paired(EVEN), ctx.mesh_1d()), []
        for _ in range(3):
            model.unshard()
            weight = model.entry.weight
            seen.append((weight, weight.a, weight.b))
            assert all(tensor.untyped_storage().nbytes() == weight.a.nbytes for tensor in (weight.a, weight.b))
            model.reshard()
            assert [tensor.untyped_storage().nbytes() for tensor in (weight.a, weight.b)] == [0, 0]
    assert all(later is first for others in seen[1:] for later, first in zip(others, seen[0], strict=True))


@distributed(2)
def test_pairs_without_a_gradient_on_one_rank_get_the_mean_of_both_halves(ctx: RankContext) -> None:
    """The other rank has one: both of its halves are averaged with zeros, on both ranks."""

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(4, 4, bias=False)
            self.other = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x) + self.other(x) if ctx.rank == 0 else self.used(x)

    model = wrap(Chooses(), lambda value: TwoTensor(torch.ones_like(value), torch.full_like(value, 2.0)))
    fully_shard(model, mesh=ctx.mesh_1d()).set_ranks_may_differ(True)
    (model(torch.ones(1, 4)) ** 2).sum().backward()
    both, alone = 2 * 8.0, 2 * 4.0  # the derivative of the square of what a row gives, for a = 1; twice that for b = 2
    average = (both + alone) / 2
    for half, factor in (("a", 1), ("b", 2)):
        grad = getattr(model.used.weight.grad._local_tensor, half)
        assert torch.equal(grad, torch.full((2, 4), factor * average))
    assert torch.equal(model.other.weight.grad._local_tensor.b, torch.full((2, 4), 2 * both / 2))
