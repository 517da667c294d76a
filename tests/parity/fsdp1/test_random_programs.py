"""Programs drawn from a seed: how a model is wrapped, how it trains, and how it is saved and loaded meanwhile.

A program combines much of what the tests beside this one show one by one; sequences of steps are here only. It runs
with torch's class and with ours, and must give the same. A seed that fails is a program that can be run again: its text
is in the error.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as fsdp
from torch import Tensor, nn

from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Block
from tests.harness.selection import in_ci, long
from tests.parity.fsdp1.fronts import Front, assert_same, ours, quiet, theirs
from tests.parity.fsdp1.kinds import FULL, FULL_SHARD, GRAD_OP, LOCAL, NO_SHARD, SHARDED
from tests.parity.fsdp1.test_gradients import scaler_of
from tests.parity.fsdp1.test_state_dicts import described


class Net(MLP):
    """Blocks of sizes that do not divide, what stands for a norm, which the CPU has no mixed dtypes of, a part that can
    be left out of FSDP, and a buffer."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, 7)
        self.norm, self.aside = nn.Parameter(torch.ones(7)), nn.Linear(7, 7)
        self.register_buffer("scale", torch.full((7,), 1.1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.norm.to(x.dtype) * self.scale.to(x.dtype))


POLICIES: dict[str, Callable[..., Any] | Any | None] = {
    "none": None,
    "blocks": fsdp.wrap.ModuleWrapPolicy({Block}),
    "blocks and linears": fsdp.wrap.ModuleWrapPolicy({Block, nn.Linear}),
    "size": partial(fsdp.wrap.size_based_auto_wrap_policy, min_num_params=60),
    "always": fsdp.wrap.always_wrap_policy,
}
PRECISIONS: dict[str, fsdp.MixedPrecision | None] = {
    "fp32": None,
    "bf16": fsdp.MixedPrecision(torch.bfloat16),
    "bf16, reduced in fp32": fsdp.MixedPrecision(torch.bfloat16, torch.float32),
    "reduced in bf16": fsdp.MixedPrecision(reduce_dtype=torch.bfloat16),
    "bf16, all inputs cast": fsdp.MixedPrecision(torch.bfloat16, torch.bfloat16, cast_forward_inputs=True),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd, not foreach": partial(torch.optim.SGD, lr=0.1, foreach=False),
}


def draw(seed: int) -> dict[str, Any]:
    """How a model is wrapped, by the names of the arguments, and the rest of a program."""
    pick = random.Random(seed)
    strategy = pick.choice([FULL_SHARD, GRAD_OP, NO_SHARD])
    with_mesh, use_orig_params = pick.random() < 0.4, pick.random() < 0.5
    # otherwise, torch's class does not load its own local ones
    kinds = [FULL, SHARDED, *([LOCAL] if not with_mesh and not use_orig_params and strategy is not NO_SHARD else [])]
    precision = pick.choice(["fp32", "fp32", *PRECISIONS])
    return {
        "wrapping": {
            "sharding_strategy": strategy,
            "auto_wrap_policy": POLICIES[pick.choice(list(POLICIES))],
            "mixed_precision": PRECISIONS[precision],
            "use_orig_params": use_orig_params,
            "backward_prefetch": pick.choice([*fsdp.BackwardPrefetch, None]),
            "forward_prefetch": pick.random() < 0.5,
        },
        "optimizer": pick.choice([name for name in OPTIMIZERS if precision == "fp32" or name != "adamw"]),
        "num_blocks": pick.choice([1, 2, 3]),
        "offload": pick.random() < 0.25,
        "with_mesh": with_mesh,
        "with_aside": pick.random() < 0.3,  # ignored
        "clip_norm": pick.choice([None, None, 0.05]),
        "kind": pick.choice(kinds),
        # all of ``num_micro`` batches but the last without communication if ``no_sync``
        "steps": [
            {"num_micro": pick.choice([1, 1, 2, 3]), "no_sync": pick.random() < 0.6, "set_to_none": pick.random() < 0.7}
            | {"evaluate": pick.random() < 0.2, "summon": pick.random() < 0.3}
            | {"halve": pick.choice(["", "", "in place", "anew"])}  # gradients, before the step
            for _ in range(3)
        ],
        "scaled": pick.random() < 0.3,
        "grouped": pick.random() < 0.3,  # the first parameter has a learning rate of its own
        "gamma": pick.choice([1.0, 0.5]),  # of the schedule
        # With original parameters: the optimizer is made before wrapping; ``data`` of the parameters from before, or of
        # the wrapper's, is written after each step. With other strategies, torch's class does not see that.
        "made_before": use_orig_params and pick.random() < 0.5,
        "writes": pick.choice([None, "kept", "own"]) if use_orig_params and strategy is FULL_SHARD else None,
    }


@dataclass(frozen=True)
class Job:
    """A model, what trains it, and the parameters whose ``data`` is written."""

    model: Any
    optim: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    scaler: Any
    written: list[nn.Parameter]


def built(front: Front, program: dict[str, Any], seed: int) -> Job:
    torch.manual_seed(seed)
    net = Net(program["num_blocks"])
    kept = list(net.parameters())

    def trainers(params: list[nn.Parameter]) -> list[Any]:
        # Torch's class lists what it ignores before other parameters.
        is_grouped = program["grouped"] and not program["with_aside"]
        groups = [{"params": params[:1], "lr": 0.2}, {"params": params[1:]}] if is_grouped else params
        optim = OPTIMIZERS[program["optimizer"]](groups)
        return [optim, torch.optim.lr_scheduler.ExponentialLR(optim, program["gamma"])]

    made = trainers(kept) if program["made_before"] else None
    options: dict[str, Any] = {"ignored_states": [net.aside]} if program["with_aside"] else {}
    if program["with_mesh"]:
        options["device_mesh"] = front.mesh()
    offload = fsdp.CPUOffload(offload_params=program["offload"] and front.is_ours)  # torch's class needs an accelerator
    model = front.wrap(net, cpu_offload=offload, **options, **program["wrapping"])
    own = list(model.parameters())
    written = {None: [], "kept": kept, "own": own}[program["writes"]]
    return Job(model, *(made or trainers(own)), scaler_of(front, enabled=program["scaled"]), written)


def stepped(front: Front, program: dict[str, Any], job: Job, number: int) -> list[Any]:
    model, step, found = job.model, program["steps"][number], []
    if step["evaluate"]:
        with torch.no_grad():
            found.append(model(front.batch(2, 7, seed=100 + number)).float())
    for micro in range(step["num_micro"]):
        is_last = micro == step["num_micro"] - 1
        with model.no_sync() if step["no_sync"] and not is_last else nullcontext():
            loss = model(front.batch(3, 7, seed=10 * number + micro)).float().square().mean()
            job.scaler.scale(loss).backward()
        found.append(loss.detach())
    for param in [each for each in model.parameters() if each.grad is not None]:
        if step["halve"] == "in place":
            param.grad.mul_(0.5)
        elif step["halve"]:
            param.grad = param.grad * 0.5
    job.scaler.unscale_(job.optim)
    if program["clip_norm"] is not None:
        found.append(model.clip_grad_norm_(program["clip_norm"]).float())
    job.scaler.step(job.optim)
    job.scaler.update()
    job.schedule.step()
    job.optim.zero_grad(set_to_none=step["set_to_none"])
    for param in job.written:
        param.data = param.data * 0.9
    if step["summon"]:
        with front.cls.summon_full_params(model):
            found += [param.detach().clone() for param in model.parameters()]
    return found


def run(front: Front, program: dict[str, Any]) -> list[Any]:
    """Trains, saves after the first step, loads that into another model, and trains it to the end."""
    first, second = built(front, program, 0), built(front, program, 1)
    model, other = first.model, second.model
    found: list[Any] = stepped(front, program, first, 0)
    kind, configs = program["kind"], list[Any]()
    if kind is FULL:  # torch's class saves wrong states when it offloads: see test_optim_state_dicts.py
        configs = [fsdp.FullStateDictConfig(), fsdp.FullOptimStateDictConfig(offload_to_cpu=False)]
    with front.of_kind(model, kind, *configs), front.of_kind(other, kind, *configs):
        saved = model.state_dict()
        other.load_state_dict(saved)
        found.append(described(saved))
        if kind is not LOCAL:
            states = front.cls.optim_state_dict(model, first.optim)
            second.optim.load_state_dict(front.cls.optim_state_dict_to_load(other, second.optim, states))
            found.append({name: described(each) for name, each in sorted(states["state"].items())})
    for number in range(1, len(program["steps"])):
        found += stepped(front, program, second, number)
    with front.of_kind(other, FULL):
        return [*found, described(other.state_dict())]


LOW_PRECISION = {"rtol": 5e-2, "atol": 5e-2}  # torch's class adds up micro-batches in the parameters' dtype


def is_exact(program: dict[str, Any]) -> bool:
    """A norm is summed in another order. With ``NO_SHARD``, torch's class reduces what was accumulated once more."""
    is_accumulated = any(step["num_micro"] > 1 and not step["no_sync"] for step in program["steps"])
    is_summed_otherwise = program["wrapping"]["sharding_strategy"] is NO_SHARD and is_accumulated
    is_fp32 = program["wrapping"]["mixed_precision"] is None
    return is_fp32 and program["clip_norm"] is None and not is_summed_otherwise


SHORT = (14, 34, 50)  # which together have nearly all values


@pytest.mark.parametrize("seed", [*SHORT, *in_ci(0), *long(*sorted({*range(1, 60)} - {*SHORT}))])
@distributed(2)
def test_programs_do_the_same_with_both_classes(ctx: RankContext, seed: int) -> None:
    program = draw(seed)
    results = [quiet(run, front, program) for front in (theirs(ctx), ours(ctx))]
    tolerance = None if program["wrapping"]["mixed_precision"] is None else LOW_PRECISION
    assert_same(*results, where=f"{program}: result", exact=is_exact(program), tolerance=tolerance)
