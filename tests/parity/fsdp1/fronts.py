"""One scenario, run with torch's ``FullyShardedDataParallel`` and with ours: what it returns must be equal."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.fsdp.wrap
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

import fsdp2.fsdp1
from tests.harness.distributed import RankContext, distributed

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Front:
    """One of the two implementations. ``names`` is the module with all of its names. ``use_orig_params`` is given to
    all wrappers, unless it is None."""

    ctx: RankContext
    names: ModuleType
    use_orig_params: bool | None = None

    def wrap(self, module: nn.Module, **options: Any) -> Any:
        """``module`` in the class, on the CPU."""
        if self.use_orig_params is not None:
            options = {"use_orig_params": self.use_orig_params, **options}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", message="FSDP will not all-gather|.* has no forward")
            return self.cls(module, **{"device_id": CPU, **options})

    @property
    def cls(self) -> Any:
        return self.names.FullyShardedDataParallel

    @property
    def is_ours(self) -> bool:
        return self.names is fsdp2.fsdp1

    def mesh(self) -> DeviceMesh:
        return self.ctx.mesh_1d()

    def batch(self, *shape: int, seed: int = 0) -> Tensor:
        """Another batch on each rank."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * seed + self.ctx.rank))

    def train(
        self,
        model: nn.Module,
        optimizer: Any = torch.optim.AdamW,
        *,
        num_steps: int | range = 3,
        shape: Sequence[int] = (3, 8),
        lr: float = 1e-2,
        dtype: torch.dtype = torch.float32,
        choices: Sequence[Any] = (),
        before_step: Callable[[int], Any] = lambda step: None,
    ) -> list[Any]:
        """The losses of some steps, and what ``before_step`` returns between backward and step.

        ``optimizer``: a class, or one that is made already. ``choices``: what the model gets beside the batch.
        """
        made = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(model.parameters(), lr=lr)
        found = []
        for step in range(len(choices) or num_steps) if isinstance(num_steps, int) else num_steps:
            output = model(self.batch(*shape, seed=step).to(dtype), *choices[step : step + 1])
            loss = output.to(torch.promote_types(output.dtype, torch.float32)).square().mean()
            loss.backward()
            found += [loss.detach(), *(before_step(step) or ())]
            made.step()
            made.zero_grad()
        return found

    @contextmanager
    def of_kind(self, model: nn.Module, kind: StateDictType, *configs: Any) -> Iterator[None]:
        """``state_dict_type`` without torch's warnings that its class and ShardedTensors are deprecated."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            with self.cls.state_dict_type(model, kind, *configs):
                yield


def theirs(ctx: RankContext) -> Front:
    return Front(ctx, torch.distributed.fsdp)


def ours(ctx: RankContext) -> Front:
    return Front(ctx, fsdp2.fsdp1)


def same(
    ctx: RankContext, scenario: Callable[[Front], Any], *, exact: bool = True, use_orig_params: bool | None = None
) -> None:
    """Run ``scenario`` with both, from the same seeds. What it returns must be equal, bit for bit if ``exact``."""
    results = []
    for names in (torch.distributed.fsdp, fsdp2.fsdp1):
        torch.manual_seed(0)
        results.append(scenario(Front(ctx, names, use_orig_params)))
    assert_same(*results, exact=exact)


ON_TWO_RANKS = "on two ranks"
_Decorator = Callable[[Callable[..., Any]], Any]
_MODE = "use_orig_params"


def as_torchs(*world_sizes: int, exact: bool | str = True, both_modes: bool = False) -> _Decorator:
    """A function of a ``Front`` becomes a test on pools of ranks: see ``same``. Other arguments are parameters.

    ``exact``: may be ``ON_TWO_RANKS``; on more, sums are added up in another order. ``both_modes``: flat parameters,
    and original ones.
    """

    def run(ctx: RankContext, scenario: Callable[[Front], Any], mode: bool | None) -> None:
        is_exact = ctx.world_size == 2 if exact == ON_TWO_RANKS else bool(exact)
        same(ctx, scenario, exact=is_exact, use_orig_params=mode)

    return _as_test(world_sizes, run, both_modes)


def with_ours(*world_sizes: int, both_modes: bool = False) -> _Decorator:
    """The same with our class only, for what torch's does not do."""
    return _as_test(world_sizes, lambda ctx, scenario, mode: scenario(Front(ctx, fsdp2.fsdp1, mode)), both_modes)


def _as_test(world_sizes: Sequence[int], run: Callable[..., Any], both_modes: bool) -> _Decorator:
    def decorate(scenario: Callable[..., Any]) -> Any:
        @functools.wraps(scenario)
        def body(ctx: RankContext, **parameters: Any) -> None:
            mode = parameters.pop(_MODE) if both_modes else None
            run(ctx, lambda front: scenario(front, **parameters), mode)

        names = [*inspect.signature(scenario).parameters, *([_MODE] if both_modes else [])]
        keyword = inspect.Parameter.KEYWORD_ONLY
        body.__signature__ = inspect.Signature([inspect.Parameter(name, keyword) for name in names])  # type: ignore[attr-defined]
        test = distributed(*world_sizes)(body)
        return pytest.mark.parametrize(_MODE, [True, False])(test) if both_modes else test

    return decorate


def assert_same(
    theirs: Any, ours: Any, where: str = "result", *, exact: bool = True, tolerance: Mapping[str, float] | None = None
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


def mlp() -> nn.Sequential:
    """Three layers, whose rows do not divide by the number of ranks."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 7), nn.ReLU(), nn.Linear(7, 4))


def wrapped_mlp(front: Front, **options: Any) -> Any:
    """The first two layers are wrappers of their own."""
    model = mlp()
    for i in (0, 2):
        model[i] = front.wrap(model[i], **options)
    return front.wrap(model, **options)


def quiet(call: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """What ``call`` returns, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args, **given)
