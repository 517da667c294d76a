"""A small model with round sizes, and a way to bring what the ranks saw to the test's own process."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2
from fsdp2.report.trace import Trace
from tests.harness.distributed import RankContext
from tests.harness.golden import same_on_all_ranks as same_on_all_ranks

# fp32 weights of 4096 bytes and biases of 128: whole shards on 2 and 4 ranks, whole cache lines, so that the bytes in
# traces are the parameters' own, without any padding.
DIM = 32
BLOCK_NBYTES = 4096 + 128
ROOT_NBYTES = 2 * BLOCK_NBYTES


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Stack(nn.Module):
    """Blocks, and parameters of the root before and behind them."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.entry = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.exit = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.exit(x)


class Scaled(Stack):
    """With a scalar parameter in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def seeded(model: Callable[[], Any], seed: int = 0) -> Any:
    """``model()`` with the same values on every rank."""
    torch.manual_seed(seed)
    return model()


def shard_each(*modules: Any, **options: Any) -> Any:
    """``fully_shard`` of each on its own, in this order; returns the last one."""
    for module in modules:
        fsdp2.fully_shard(module, **options)
    return modules[-1]


def shard_units(model: Any, **options: Any) -> Any:
    """The units of a model of ``tests/harness/models.py``, then the root."""
    return shard_each(*model.units(), model, **options)


def shard(ctx: RankContext, model: Any, **options: Any) -> Any:
    """Every block on its own, then the root; over all ranks if no other mesh is given."""
    return shard_each(*model.blocks, model, **{"mesh": ctx.mesh_1d(), **options})


def sharded(ctx: RankContext, num_blocks: int = 3, **kwargs: Any) -> Any:
    """A new ``Stack``, sharded."""
    return shard(ctx, seeded(lambda: Stack(num_blocks)), **kwargs)


def batch(seed: int = 0) -> Tensor:
    """The same on every rank, so that averaged gradients are those of one rank."""
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, seed: int = 0) -> Tensor:
    """Forward and backward; returns the loss."""
    loss = model(batch(seed)).square().mean()
    loss.backward()
    return loss.detach()


def shards(model: nn.Module) -> list[Tensor]:
    """Copies, on the host, of what this rank has of the parameters."""
    return [param.to_local().detach().cpu().clone() for param in model.parameters()]  # type: ignore[operator]


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: range = range(3)) -> list[Tensor]:
    """Steps on batches number ``steps``, of all ``optimizers`` each; returns the shards."""
    for seed in steps:
        step(model, seed)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for optimizer in optimizers:
        if isinstance(optimizer, fsdp2.optim.HostAdamW):
            optimizer.wait()
    return shards(model)


class InjectedError(Exception):
    """Raised by what tests put into a step, and by nothing else."""


class RaiseInBackward(torch.autograd.Function):
    """``RaiseInBackward.apply(x)`` is ``x``, and its gradient an ``InjectedError``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise InjectedError


class Faulty(Stack):
    """Raises behind its first block, in the pass that ``fault`` names."""

    fault: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.entry(x))
        if self.fault == "forward":
            raise InjectedError
        if self.fault == "backward":
            x = RaiseInBackward.apply(x)
        return self.exit(self.blocks[2](self.blocks[1](x)))


def fail(model: Any, fault: str) -> None:
    """A step of ``Faulty`` that raises."""
    model.fault = fault
    with pytest.raises(InjectedError):
        step(model, seed=5)
    model.fault = None


def fail_now(*_: object) -> None:
    """A hook."""
    raise InjectedError


class UnshardedStorages:
    """The memory of the unsharded parameters that the linear layers of ``model`` have computed with so far."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters: dict[int, nn.Parameter] = {}
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(self._note)

    def _note(self, module: nn.Module, args: Any) -> None:
        for parameter in module.parameters(recurse=False):
            assert not isinstance(parameter, DTensor)
            self._parameters[id(parameter)] = parameter

    @property
    def nbytes(self) -> int:
        """Parameters of one group share a storage; it counts once."""
        assert self._parameters, "no forward has run"
        storages = [parameter.untyped_storage() for parameter in self._parameters.values()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class NewMemory(TorchDispatchMode):
    """In the block, ``peak`` is the most memory of tensors that operations have made in it, and that live; ``total`` is
    that of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.total = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in args if isinstance(each, Tensor)}
        for each in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(each, Tensor) and each.untyped_storage()._cdata not in given:
                storage = each.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.total += storage.nbytes()
        self._storages = {key: each for key, each in self._storages.items() if not each[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._storages.values()))
        return result


_EVENTS = {"pre_forward": "f", "post_forward": "/f", "pre_backward": "b", "post_backward": "/b", "end_backward": "/b"}
_ACTIONS = {
    "unshard": "U",
    "wait": "W",
    "prefetch": "P",
    "reshard": "R",
    "reshard_post_forward": "S",
    "reduce": "D",
    "land": "L",
}


def compact(trace: Trace) -> str:
    """The trace of a ``Stack`` with a line for each forward and backward of the root, as goldens have it.

    An event and its actions: ``f0 W0 P1`` is the forward of block 0, which waits for it and prefetches block 1; ``/f0``
    is its end, and ``r`` is the root. Actions: unshard, wait, prefetch, reshard, S for a reshard to the smaller mesh, D
    for reduce, land. What gathers or frees a unit must say the bytes of its parameters.
    """
    lines: list[list[str]] = []
    for entry in trace.entries:
        unit = entry.unit.removeprefix("blocks.").replace("(root)", "r")
        if entry.kind == "action":
            sizes = {"reduce": 0, "land": 0, **dict.fromkeys(("withhold", "make_room"), entry.nbytes)}
            assert entry.nbytes == sizes.get(entry.name, ROOT_NBYTES if unit == "r" else BLOCK_NBYTES), entry
            name = _ACTIONS.get(entry.name)
            lines[-1][-1] += f" {name}{unit}" if name else f" {entry.name}({unit}, {entry.nbytes})"
        else:
            name = _EVENTS.get(entry.name, f"{entry.name} ")
            if not lines or (unit == "r" and not name.startswith("/")):
                lines.append([])
            lines[-1].append(f"{name}{unit}")
    return "\n".join(textwrap.fill(" | ".join(line), 110, subsequent_indent="    ") for line in lines)
