"""Two models with the same values: one is stepped by an optimizer as torch made it, one by the same, flattened."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim

import fsdp2
from tests.harness.compare import compare_values
from tests.harness.distributed import RankContext
from tests.harness.models import DIM, ParityModel, PartlyUsed, freeze
from tests.harness.runtimes import subject
from tests.harness.training import Step, shard_units_and_root, snapshot

Make = Callable[[Any], optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": functools.partial(optim.SGD, lr=0.05),
    "SGD with momentum": functools.partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": functools.partial(optim.Adam, lr=0.01, weight_decay=0.1),
    "AdamW": functools.partial(optim.AdamW, lr=0.01, maximize=True),
    "AdamW with amsgrad": functools.partial(optim.AdamW, lr=0.01, amsgrad=True),
    "Adamax": functools.partial(optim.Adamax, weight_decay=0.1),
    "NAdam": functools.partial(optim.NAdam, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam": functools.partial(optim.RAdam, lr=0.01),
    "Adagrad": functools.partial(optim.Adagrad, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adadelta": functools.partial(optim.Adadelta, weight_decay=0.1),
    "RMSprop": functools.partial(optim.RMSprop, momentum=0.9, centered=True),
    "ASGD": functools.partial(optim.ASGD, t0=1),
}

adamw = functools.partial(optim.AdamW, lr=0.01)

Shard = Callable[..., Any]


class Mixed(PartlyUsed):
    """Blocks with a path that may go unused, a frozen parameter between others, uneven and empty shards."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.scale = nn.Parameter(torch.ones(1))
            block.register_forward_hook(lambda block, args, output: output * block.scale)
        self.exit = nn.Linear(DIM, 7)
        freeze(self, "blocks.1.main.bias")

    def forward(self, x: Tensor, use_side: bool = True) -> Tensor:
        return self.exit(super().forward(x, use_side=use_side))


def sharded(ctx: RankContext, build: Callable[[], ParityModel], shard: Shard = shard_units_and_root) -> Any:
    torch.manual_seed(0)
    model = build()
    shard(subject(), model, ctx.mesh_1d())
    return model


class Twins:
    """Models ``plain`` and ``flat``, and their optimizers. ``step`` does the same with both and compares."""

    def __init__(
        self, ctx: RankContext, build: Callable[[], ParityModel], make: Make, shard: Shard = shard_units_and_root
    ) -> None:
        self._rank = ctx.rank
        self.plain, self.flat = (sharded(ctx, build, shard) for _ in range(2))
        self.plain_optimizer = make(self.plain.parameters())
        self.flat_optimizer = fsdp2.flatten_optimizer(make(self.flat.parameters()))
        self.index = 0

    @property
    def both(self) -> tuple[tuple[Any, optim.Optimizer], tuple[Any, optim.Optimizer]]:
        return (self.plain, self.plain_optimizer), (self.flat, self.flat_optimizer)

    def backward(self, micro: int = 0, **kwargs: Any) -> None:
        step = Step(self.index, self._rank, None)
        for model, _ in self.both:
            step.loss(model, micro, **kwargs).backward()

    def update(self) -> None:
        """Let the optimizers step, and compare what they made."""
        self.index += 1
        for _, optimizer in self.both:
            optimizer.step()
        self.compare()
        for _, optimizer in self.both:
            optimizer.zero_grad()

    def step(self, **kwargs: Any) -> None:
        self.backward(**kwargs)
        self.update()

    def compare(self) -> None:
        plain, flat = (
            {"parameters": records(dict(model.named_parameters())), "optimizer": records(optimizer.state_dict())}
            for model, optimizer in self.both
        )
        compare_values(f"step {self.index}", flat, plain)


def records(state: Any) -> Any:
    """``state`` with copies of its tensors and how they lie."""
    if isinstance(state, dict):
        return {key: records(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [records(value) for value in state]
    return snapshot(state) if isinstance(state, Tensor) else state


class Seen(optim.Optimizer):
    """Adds ``lr`` to every element, and writes down how many elements the tensors have that it is given, and where
    their gradients lie."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})
        self.numels: list[int] = []
        self.grad_addresses: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        self.numels = [param.numel() for param in params]
        self.grad_addresses = [param.grad.data_ptr() for param in params]  # type: ignore[union-attr]
        for param in params:
            self.state[param].setdefault("sum", torch.zeros_like(param)).add_(param.grad)
            param.add_(self.param_groups[0]["lr"])


def seen_steps(model: nn.Module) -> Seen:
    return fsdp2.flatten_optimizer(Seen(model.parameters()), is_elementwise=True)
