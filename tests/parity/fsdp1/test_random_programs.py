"""Programs drawn from a seed: how a model is wrapped, how it trains, and how it is saved and loaded meanwhile.

A program combines what the tests beside this one show one by one. It runs with torch's class and with ours, and must
give the same. A seed that fails is a program that can be run again: its text is in the error.
"""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    wrap,
)

import fsdp2.fsdp1
from tests.harness.distributed import RankContext, distributed
from tests.harness.selection import long
from tests.parity.fsdp1.fronts import Front, assert_same, batch
from tests.parity.fsdp1.test_state_dicts import described, of_kind

FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)


class Scale(nn.Module):
    """Stands for a norm, which the CPU has no mixed dtypes of."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.to(x.dtype)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = Scale(width), nn.Linear(width, 9), nn.Linear(9, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks of sizes that do not divide, a part that can be left out of FSDP, and a buffer."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.entry = nn.Linear(8, 7)
        self.blocks = nn.ModuleList(Block(7) for _ in range(num_blocks))
        self.aside = nn.Linear(7, 7)
        self.exit = nn.Linear(7, 3)
        self.register_buffer("scale", torch.full((7,), 1.1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x * self.scale.to(x.dtype))
        return self.exit(x)


POLICIES: dict[str, Callable[..., Any] | Any | None] = {
    "none": None,
    "blocks": wrap.ModuleWrapPolicy({Block}),
    "blocks and linears": wrap.ModuleWrapPolicy({Block, nn.Linear}),
    "size": functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=60),
    "always": wrap.always_wrap_policy,
}
PRECISIONS: dict[str, MixedPrecision | None] = {
    "fp32": None,
    "bf16": MixedPrecision(torch.bfloat16),
    "bf16, reduced in fp32": MixedPrecision(torch.bfloat16, torch.float32),
    "reduced in bf16": MixedPrecision(reduce_dtype=torch.bfloat16),
    "bf16, all inputs cast": MixedPrecision(torch.bfloat16, torch.bfloat16, cast_forward_inputs=True),
}
STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd, not foreach": functools.partial(torch.optim.SGD, lr=0.1, foreach=False),
}


@dataclass(frozen=True)
class Step:
    """``num_micro`` batches, all but the last without communication if ``no_sync``."""

    num_micro: int
    no_sync: bool
    set_to_none: bool
    evaluate: bool
    summon: bool


@dataclass(frozen=True)
class Program:
    strategy: ShardingStrategy
    policy: str
    precision: str
    optimizer: str
    num_blocks: int
    use_orig_params: bool
    offload: bool
    with_mesh: bool
    with_aside: bool  # ignored
    prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    clip_norm: float | None
    kind: StateDictType
    steps: tuple[Step, ...]


def draw(seed: int) -> Program:
    pick = random.Random(seed)
    strategy, with_mesh, use_orig_params = pick.choice(STRATEGIES), pick.random() < 0.4, pick.random() < 0.5
    kinds = [FULL, SHARDED]
    if not with_mesh and not use_orig_params and strategy is not ShardingStrategy.NO_SHARD:
        kinds.append(LOCAL)  # otherwise, torch's class does not load its own
    precision = pick.choice(["fp32", "fp32", *PRECISIONS])
    return Program(
        strategy=strategy,
        policy=pick.choice(list(POLICIES)),
        precision=precision,
        optimizer=pick.choice([name for name in OPTIMIZERS if precision == "fp32" or name != "adamw"]),
        num_blocks=pick.choice([1, 2, 3]),
        use_orig_params=use_orig_params,
        offload=pick.random() < 0.25,
        with_mesh=with_mesh,
        with_aside=pick.random() < 0.3,
        prefetch=pick.choice([*BackwardPrefetch, None]),
        forward_prefetch=pick.random() < 0.5,
        clip_norm=pick.choice([None, None, 0.05]),
        kind=pick.choice(kinds),
        steps=tuple(
            Step(
                num_micro=pick.choice([1, 1, 2, 3]),
                no_sync=pick.random() < 0.6,
                set_to_none=pick.random() < 0.7,
                evaluate=pick.random() < 0.2,
                summon=pick.random() < 0.3,
            )
            for _ in range(3)
        ),
    )


def built(ctx: RankContext, front: Front, program: Program, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net(program.num_blocks)
    options: dict[str, Any] = {"ignored_states": [net.aside]} if program.with_aside else {}
    if program.with_mesh:
        options["device_mesh"] = ctx.mesh_1d()
    model = front.wrap(
        net,
        sharding_strategy=program.strategy,
        auto_wrap_policy=POLICIES[program.policy],
        mixed_precision=PRECISIONS[program.precision],
        cpu_offload=CPUOffload(offload_params=program.offload and front.is_ours),  # torch's class needs an accelerator
        use_orig_params=program.use_orig_params,
        backward_prefetch=program.prefetch,
        forward_prefetch=program.forward_prefetch,
        **options,
    )
    return model, OPTIMIZERS[program.optimizer](model.parameters())


def stepped(ctx: RankContext, front: Front, program: Program, model: Any, optim: Any, number: int) -> list[Any]:
    step, found = program.steps[number], []
    if step.evaluate:
        with torch.no_grad():
            found.append(model(batch(ctx, 2, 8, seed=100 + number)).float())
    for micro in range(step.num_micro):
        is_last = micro == step.num_micro - 1
        with model.no_sync() if step.no_sync and not is_last else nullcontext():
            loss = model(batch(ctx, 3, 8, seed=10 * number + micro)).float().square().mean()
            loss.backward()
        found.append(loss.detach())
    if program.clip_norm is not None:
        found.append(model.clip_grad_norm_(program.clip_norm).float())
    optim.step()
    optim.zero_grad(set_to_none=step.set_to_none)
    if step.summon:
        with front.cls.summon_full_params(model):
            found += [param.detach().clone() for param in model.parameters()]
    return found


def run(ctx: RankContext, front: Front, program: Program) -> list[Any]:
    """Trains, saves after the first step, loads that into another model, and trains it to the end."""
    model, optim = built(ctx, front, program, 0)
    other, fresh = built(ctx, front, program, 1)
    found: list[Any] = stepped(ctx, front, program, model, optim, 0)
    configs: tuple[Any, ...] = ()
    if program.kind is FULL:  # torch's class saves wrong states when it offloads: see test_optim_state_dicts.py
        configs = (FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False))
    with of_kind(front, model, program.kind, *configs), of_kind(front, other, program.kind, *configs):
        saved = model.state_dict()
        other.load_state_dict(saved)
        found.append(described(saved))
        if program.kind is not LOCAL:
            states = front.cls.optim_state_dict(model, optim)
            fresh.load_state_dict(front.cls.optim_state_dict_to_load(other, fresh, states))
            found.append({name: described(each) for name, each in sorted(states["state"].items())})
    for number in range(1, len(program.steps)):
        found += stepped(ctx, front, program, other, fresh, number)
    with of_kind(front, other, FULL):
        found.append(described(other.state_dict()))
    return found


LOW_PRECISION = {"rtol": 5e-2, "atol": 5e-2}  # torch's class adds up micro-batches in the parameters' dtype


def is_exact(program: Program) -> bool:
    """A norm is summed in another order. With ``NO_SHARD``, torch's class reduces what was accumulated once more."""
    is_accumulated = any(step.num_micro > 1 and not step.no_sync for step in program.steps)
    is_summed_otherwise = program.strategy is ShardingStrategy.NO_SHARD and is_accumulated
    return PRECISIONS[program.precision] is None and program.clip_norm is None and not is_summed_otherwise


@pytest.mark.parametrize("seed", [0, *long(*range(1, 60))])
@distributed(2)
def test_programs_do_the_same_with_both_classes(ctx: RankContext, seed) -> None:
    program = draw(seed)
    results = []
    for names in (torch.distributed.fsdp, fsdp2.fsdp1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.append(run(ctx, Front(ctx, names), program))
    tolerance = None if PRECISIONS[program.precision] is None else LOW_PRECISION
    assert_same(*results, where=f"{program}: result", exact=is_exact(program), tolerance=tolerance)
