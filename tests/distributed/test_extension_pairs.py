"""A wrapper whose unsharded form, activations and gradients are wrappers, too: each half is reduced on its own.

The reference is two plain models by hand, one for each half.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fsdp2 import ExtensionError, MixedPrecisionPolicy, fully_shard
from tests.distributed.extension_support import EVEN, MIXED, UNEVEN, Net, adam, batch, loss_of, sgd, sharded
from tests.harness.distributed import RankContext, distributed
from tests.harness.extension_reference import Reference, assert_same_gradients, assert_same_losses, assert_same_shards
from tests.harness.extensions import wrap
from tests.harness.selection import long


class Pair(torch.Tensor):
    """Two tensors of one shape that go through every operation side by side."""

    a: Tensor
    b: Tensor
    aliases = True

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, a: Tensor, b: Tensor) -> Pair:
        made: Pair = torch.Tensor._make_wrapper_subclass(
            cls, a.shape, strides=a.stride(), storage_offset=a.storage_offset(), dtype=a.dtype, device=a.device
        )
        made.a, made.b = a, b
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Pair:
        return cls(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kind = next(kind for kind in types if issubclass(kind, Pair))

        def side(name: str) -> Any:
            found = tree_map_only(Pair, lambda pair: getattr(pair, name), (args, kwargs or {}))
            return func(*found[0], **found[1])

        a, b = side("a"), side("b")
        if func.__name__.partition(".")[0].endswith("_") and isinstance(a, Tensor):
            return args[0]
        if isinstance(a, Tensor):
            return kind(a, b)
        return type(a)(kind(x, y) for x, y in zip(a, b, strict=True)) if isinstance(a, (list, tuple)) else a

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.a!r}, {self.b!r})"

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        dtype = mp_policy.param_dtype if self.aliases and mp_policy.param_dtype else self.dtype
        return (self.a.to(dtype), self.b.to(dtype)), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        a, b = outputs
        if out is not None:
            if not self.aliases:
                out.a.copy_(a)
                out.b.copy_(b)
            assert self.aliases == (out.a.data_ptr() == a.data_ptr())
            return None
        if self.aliases:
            return type(self)(a, b), (a, b)
        copied = type(self)(a.to(param_dtype, copy=True), b.to(param_dtype, copy=True))
        return copied, (copied,)


class CopiedPair(Pair):
    """Does not compute on what arrived."""

    aliases = False


def _half(which: str, dim: int) -> Net:
    torch.manual_seed("ab".index(which))
    return Net(dim)


def _paired(kind: type[Pair], dim: int) -> Any:
    model, others = _half("a", dim), dict(_half("b", dim).named_parameters())
    values = {id(value): others[name] for name, value in model.named_parameters()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(kind(parameter.detach(), values[id(parameter)].detach())))
    return model


class _Pairs:
    """A model of pairs, and two references by hand."""

    def __init__(self, kind: type[Pair], mesh: Any, rank: int, dim: int, optimizer: Any, **kwargs: Any) -> None:
        self.exact, self.rank, self.num = max(mesh.shape) <= 2, rank, 0
        policy = kwargs.get("mp_policy")
        self.dtype = (policy and policy.param_dtype) or torch.float32
        self.model = sharded(_paired(kind, dim), mesh, **kwargs)
        self.optimizer = optimizer(self.model.parameters())
        self.references = {half: Reference(_half(half, dim), mesh, optimizer, policy) for half in "ab"}

    def backward(self, *, reduce: bool = True) -> None:
        x, self.num = batch(self.rank, self.num), self.num + 1
        loss = loss_of(x)(self.model)
        assert isinstance(loss, Pair)
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


@pytest.mark.parametrize("kind", [Pair, CopiedPair])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MIXED])
@distributed(2, 4)
def test_both_halves_train_as_by_hand(ctx: RankContext, policy: MixedPrecisionPolicy, kind: type[Pair]) -> None:
    for dim in (EVEN, UNEVEN) if ctx.world_size == 2 else (UNEVEN,):
        pairs = _Pairs(kind, ctx.mesh_1d(), ctx.rank, dim, adam, mp_policy=policy)
        for _ in range(2):
            pairs.backward()
            pairs.step()


@pytest.mark.long
@pytest.mark.parametrize("kind", [Pair, *long(CopiedPair)])
@distributed(4)
def test_both_halves_train_on_hsdp_and_resting_on_two_ranks(ctx: RankContext, kind: type[Pair]) -> None:
    for mesh, kwargs in ((ctx.mesh_2d(2, 2), {}), (ctx.mesh_1d(), {"reshard_after_forward": 2})):
        pairs = _Pairs(kind, mesh, ctx.rank, UNEVEN, sgd, **kwargs)
        for _ in range(2):
            pairs.backward()
            pairs.step()


@pytest.mark.parametrize("kind", [Pair, *long(CopiedPair)])
@distributed(2)
def test_both_halves_accumulate_without_communication(ctx: RankContext, kind: type[Pair]) -> None:
    for policy in (MixedPrecisionPolicy(), MIXED):
        pairs = _Pairs(kind, ctx.mesh_1d(), ctx.rank, UNEVEN, adam, mp_policy=policy)
        for _ in range(2):
            for is_last in (False, True):
                pairs.model.set_requires_gradient_sync(is_last)
                pairs.backward(reduce=is_last)
            pairs.step()


@pytest.mark.parametrize("kind", [Pair, CopiedPair])
@distributed(2)
def test_inner_tensors_are_the_same_objects_and_empty_while_resharded(ctx: RankContext, kind: type[Pair]) -> None:
    model = sharded(_paired(kind, EVEN), ctx.mesh_1d())
    seen = []
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
    model = wrap(Net(EVEN), lambda value: Pair(value, value.clone()))
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

    model = wrap(Chooses(), lambda value: Pair(torch.ones_like(value), torch.full_like(value, 2.0)))
    fully_shard(model, mesh=ctx.mesh_1d()).set_ranks_may_differ(True)
    (model(torch.ones(1, 4)) ** 2).sum().backward()
    both, alone = 2 * 8.0, 2 * 4.0  # the derivative of the square of what a row gives, for a = 1; twice that for b = 2
    average = (both + alone) / 2
    for half, factor in (("a", 1), ("b", 2)):
        grad = getattr(model.used.weight.grad._local_tensor, half)
        assert torch.equal(grad, torch.full((2, 4), factor * average))
    assert torch.equal(model.other.weight.grad._local_tensor.b, torch.full((2, 4), 2 * both / 2))
