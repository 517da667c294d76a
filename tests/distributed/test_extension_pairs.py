"""A wrapper whose unsharded form, activations and gradients are wrappers, too: each half is reduced on its own.

The reference is two plain models by hand, one for each half.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import ExtensionError, MixedPrecisionPolicy, fully_shard
from fsdp2.tensors import TwoTensor
from tests.distributed.extension_support import EVEN, MIXED, UNEVEN, Net, adam, batch, loss_of, sgd, sharded
from tests.harness.distributed import RankContext, distributed
from tests.harness.extension_reference import Reference, assert_same_gradients, assert_same_losses, assert_same_shards
from tests.harness.extensions import wrap
from tests.harness.selection import long


def _sends_what_is_computed_with(
    self: TwoTensor, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
) -> Any:
    dtype = mp_policy.param_dtype or self.dtype
    return (self.a.to(dtype), self.b.to(dtype)), None


def _copies(self: TwoTensor, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
    if out is not None:
        out.a.copy_(outputs[0])
        out.b.copy_(outputs[1])
        return None
    made = TwoTensor(*(output.to(param_dtype, copy=True) for output in outputs))
    return made, (made,)


@contextmanager
def _hooks(kind: str) -> Iterator[None]:
    """Hooks of pairs that always compute on what arrived, or always on a copy."""
    with pytest.MonkeyPatch.context() as patch:
        if kind == "aliased":
            patch.setattr(TwoTensor, "fsdp_pre_all_gather", _sends_what_is_computed_with)
        else:
            patch.setattr(TwoTensor, "fsdp_post_all_gather", _copies)
        yield


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
            assert_same_losses([getattr(loss.detach(), half)], [expected], exact=self.exact)

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

    def train(self, control: str = "", flags: tuple[bool, ...] = (True,)) -> None:
        for _ in range(2):
            for flag in flags:
                if control:
                    getattr(self.model, control)(flag)
                self.backward(reduce=flag)
            self.step()


@pytest.mark.parametrize("kind", ["aliased", "copied"])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MIXED])
@distributed(2, 4)
def test_both_halves_train_as_by_hand(ctx: RankContext, policy: MixedPrecisionPolicy, kind: str) -> None:
    with _hooks(kind):
        for dim in (EVEN, UNEVEN) if ctx.world_size == 2 else (UNEVEN,):
            _Pairs(ctx.mesh_1d(), ctx.rank, dim, adam, mp_policy=policy).train()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["aliased", *long("copied")])
@distributed(4)
def test_both_halves_train_on_hsdp_and_resting_on_two_ranks(ctx: RankContext, kind: str) -> None:
    with _hooks(kind):
        _Pairs(ctx.mesh_2d(2, 2), ctx.rank, UNEVEN, sgd).train()
        _Pairs(ctx.mesh_1d(), ctx.rank, UNEVEN, sgd, reshard_after_forward=2).train()


@pytest.mark.parametrize("kind", ["aliased", *long("copied")])
@distributed(2)
def test_both_halves_accumulate_without_communication(ctx: RankContext, kind: str) -> None:
    with _hooks(kind):
        for policy in (MixedPrecisionPolicy(), MIXED):
            pairs = _Pairs(ctx.mesh_1d(), ctx.rank, UNEVEN, adam, mp_policy=policy)
            pairs.train("set_requires_gradient_sync", (False, True))


@pytest.mark.parametrize("kind", ["aliased", "copied"])
@distributed(2)
def test_inner_tensors_are_the_same_objects_and_empty_while_resharded(ctx: RankContext, kind: str) -> None:
    with _hooks(kind):
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
def test_gradient_that_is_a_pair_of_a_plain_parameter_is_refused(ctx: RankContext) -> None:
    model = wrap(Net(EVEN), lambda value: TwoTensor(value, value.clone()))
    fully_shard(model, mesh=ctx.mesh_1d())
    with pytest.raises(ExtensionError, match=r"'(entry|blocks\.\d\.up)\.bias'"):
        loss_of(batch(ctx.rank, 0))(model).backward()


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
