"""Models whose weights are tensor subclasses, and one way to train them: sharded, and by hand beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2 import MixedPrecisionPolicy
from tests.distributed.support import shard_each
from tests.harness.distributed import RankContext
from tests.harness.extension_reference import (
    Loss,
    Reference,
    assert_same,
    assert_same_gradients,
    assert_same_shards,
)
from tests.harness.extensions import Aliasing, Scaled, wrap
from tests.harness.training import OnShards

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
EVEN, UNEVEN = 8, 5  # with 5 rows, 2 and 4 ranks have uneven shards
SOME = {"scaled": Scaled, "aliasing": Aliasing}


class Block(nn.Module):
    """Two weights that are wrapped, and a bias that is not. If UNEVEN, one weight has 3 rows, so some ranks none."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim + dim % 2, dim)
        self.down = nn.Linear(dim + dim % 2, 3 if dim % 2 else dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(_widened(x, self.up.in_features)))
        return x + self.down(_widened(hidden, self.down.in_features)).sum(-1, keepdim=True)


class Net(nn.Module):
    def __init__(self, dim: int = EVEN, num_blocks: int = 2) -> None:
        super().__init__()
        self.entry = nn.Linear(6, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return x


def _widened(x: Tensor, size: int) -> Tensor:
    """4-bit rows have an even number of entries: one more of zeros."""
    return x if x.size(-1) == size else torch.cat([x, x.new_zeros((*x.shape[:-1], 1))], -1)


def built(make: Callable[[Tensor], Tensor] | None, dim: int = EVEN, model: Callable[..., Any] = Net) -> Any:
    """The same on every rank, with weights made by ``make``."""
    torch.manual_seed(0)
    net = model(dim)
    return net if make is None else wrap(net, make)


def linear(make: Callable[[Tensor], Tensor] | None, rows: int = EVEN, bias: bool = True) -> Any:
    """One layer, the same on every rank, with a weight made by ``make``."""
    torch.manual_seed(0)
    layer = nn.Linear(6, rows, bias=bias)
    return layer if make is None else wrap(layer, make)


def sharded(model: Any, mesh: DeviceMesh, **kwargs: Any) -> Any:
    return shard_each(*model.blocks, model, mesh=mesh, **kwargs)


def batch(rank: int, index: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Other inputs on every rank and in every step."""
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(100 * index + rank)).to(dtype)


def loss_of(x: Tensor) -> Loss:
    return lambda model: (model(x).float() - 0.3).square().mean()


def step(model: nn.Module, ctx: RankContext, index: int = 0) -> None:
    """Forward and backward."""
    loss_of(batch(ctx.rank, index))(model).backward()


def dtensor_adam(parameters: Any, **kwargs: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, eps=1e-3, **kwargs)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return OnShards(parameters, dtensor_adam)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return OnShards(parameters, partial(torch.optim.SGD, lr=0.05, momentum=0.9))


class Twins:
    """A sharded model and its reference, driven alike; every call compares."""

    def __init__(
        self,
        make: Callable[[Tensor], Tensor],
        mesh: DeviceMesh,
        rank: int,
        *,
        dim: int = EVEN,
        optimizer: Callable[..., torch.optim.Optimizer] = adam,
        policy: MixedPrecisionPolicy | None = None,
        model: Callable[..., Any] = Net,
        prepare: Callable[[Any], Any] = lambda model: None,
        shard: Callable[..., Any] = sharded,
        cut: Callable[[str, Tensor], int] = lambda name, value: 0,
        **kwargs: Any,
    ) -> None:
        """``prepare`` is called on both models before sharding. ``cut``, the dim to cut, is for the reference only."""
        self.rank, self.exact = rank, max(mesh.shape) <= 2
        self.dtype = (policy and policy.param_dtype) or torch.float32
        self.model, unsharded = built(make, dim, model), built(make, dim, model)
        for each in (self.model, unsharded):
            prepare(each)
        self.reference = Reference(unsharded, mesh, optimizer, policy, cut)
        shard(self.model, mesh=mesh, **({"mp_policy": policy} if policy else {}), **kwargs)
        self.num_batches = 0
        self.use(self.model, optimizer)

    def use(self, model: Any, optimizer: Callable[..., torch.optim.Optimizer] = dtensor_adam) -> None:
        """Go on with the sharded ``model``."""
        self.model, self.parameters = model, dict(model.named_parameters())  # also while others are bound
        self.optimizer = optimizer(self.parameters.values())

    def backward(self) -> None:
        """One micro-batch on both. The runtime casts inputs itself."""
        x = batch(self.rank, self.num_batches)
        self.num_batches += 1
        found = loss_of(x)(self.model)
        found.backward()
        expected = self.reference.backward(loss_of(x.to(self.dtype)))
        assert_same("loss", found.detach(), expected, self.exact)

    def step(self) -> None:
        """The optimizers; compares gradients and shards."""
        assert_same_gradients(self.parameters, self.reference, exact=self.exact)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.reference.step()
        self.check()

    def check(self) -> None:
        assert_same_shards(self.parameters, self.reference, exact=self.exact)

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.backward()
            self.step()


def twins_of(ctx: RankContext, make: Any, **kwargs: Any) -> Twins:
    """Uneven ones on all ranks. ``make``: a class, or its name in ``SOME``."""
    return Twins(SOME.get(make, make), ctx.mesh_1d(), ctx.rank, dim=UNEVEN, **kwargs)
