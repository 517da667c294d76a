"""One scenario, run with torch's ``FullyShardedDataParallel`` and with ours: what it returns must be equal."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed.fsdp
import torch.distributed.fsdp.wrap
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp2.fsdp1
from tests.harness.distributed import RankContext, distributed

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Front:
    """One of the two implementations. ``names`` is the module with all of its names."""

    ctx: RankContext
    names: ModuleType

    def wrap(self, module: nn.Module, **options: Any) -> Any:
        """``module`` in the class, on the CPU."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", message="FSDP will not all-gather|.* has no forward")
            return self.names.FullyShardedDataParallel(module, **{"device_id": CPU, **options})

    @property
    def cls(self) -> Any:
        return self.names.FullyShardedDataParallel

    @property
    def is_ours(self) -> bool:
        return self.names is fsdp2.fsdp1


def same(ctx: RankContext, scenario: Callable[[Front], Any], *, exact: bool = True) -> None:
    """Run ``scenario`` with both, from the same seeds. What it returns must be equal, bit for bit if ``exact``."""
    results = []
    for names in (torch.distributed.fsdp, fsdp2.fsdp1):
        torch.manual_seed(0)
        results.append(scenario(Front(ctx, names)))
    assert_same(*results, exact=exact)


ON_TWO_RANKS = "on two ranks"


def as_torchs(*world_sizes: int, exact: bool | str = True) -> Callable[[Callable[..., Any]], Any]:
    """A function of a ``Front`` becomes a test on pools of ranks: see ``same``. Other arguments are parameters.

    ``exact``: may be ``ON_TWO_RANKS``; on more, sums are added up in another order.
    """

    def decorate(scenario: Callable[..., Any]) -> Any:
        @functools.wraps(scenario)
        def body(ctx: RankContext, **parameters: Any) -> None:
            is_exact = ctx.world_size == 2 if exact == ON_TWO_RANKS else bool(exact)
            same(ctx, lambda front: scenario(front, **parameters), exact=is_exact)

        return distributed(*world_sizes)(body)

    return decorate


def assert_same(
    theirs: Any,
    ours: Any,
    where: str = "result",
    *,
    exact: bool = True,
    tolerance: Mapping[str, float] | None = None,
) -> None:
    """Compare nested lists, mappings, tensors and plain values. ``tolerance``: of values that are not ``exact``;
    default: that of their dtype."""
    if isinstance(theirs, Mapping):
        assert list(theirs) == list(ours), f"{where}: keys {list(theirs)} and {list(ours)}"
        for key in theirs:
            assert_same(theirs[key], ours[key], f"{where}[{key!r}]", exact=exact, tolerance=tolerance)
    elif isinstance(theirs, Tensor):
        assert type(theirs) is type(ours) or not isinstance(ours, DTensor), f"{where}: {type(theirs)}, {type(ours)}"
        assert (theirs.dtype, theirs.shape) == (ours.dtype, ours.shape), f"{where}: {theirs} and {ours}"
        if isinstance(theirs, DTensor):
            assert theirs.placements == ours.placements, f"{where}: {theirs.placements}, {ours.placements}"
            theirs, ours = theirs.to_local(), ours.to_local()
        bounds = {"rtol": 0, "atol": 0} if exact else tolerance or {}
        torch.testing.assert_close(ours, theirs, **bounds, msg=lambda text: f"{where}: {text}")
    elif isinstance(theirs, Sequence) and not isinstance(theirs, str):
        assert len(theirs) == len(ours), f"{where}: {theirs} and {ours}"
        for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
            assert_same(a, b, f"{where}[{i}]", exact=exact, tolerance=tolerance)
    else:
        assert theirs == ours, f"{where}: {theirs} and {ours}"


def batch(ctx: RankContext, *shape: int, seed: int = 0) -> Tensor:
    """Another batch on each rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * seed + ctx.rank))


def train(
    ctx: RankContext,
    model: nn.Module,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    num_steps: int = 3,
    shape: Sequence[int] = (3, 8),
) -> list[Tensor]:
    """The losses of some steps."""
    made = optimizer(model.parameters(), lr=1e-2)
    losses = []
    for step in range(num_steps):
        loss = model(batch(ctx, *shape, seed=step)).square().mean()
        loss.backward()
        made.step()
        made.zero_grad()
        losses.append(loss.detach())
    return losses
