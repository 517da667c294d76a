"""Programs drawn from a seed: a model, a mesh, a policy, settings of each unit, and what each step does.

A program combines features that the tests beside this one show one by one. It trains under all runtimes, as each of
their cases does. A seed that fails is a program that can be run again: its text is in the error.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from tests.harness.compare import compare
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Buffers, PartlyUsed, SharedModules, Transformer, Uneven
from tests.harness.offload import offload_policy
from tests.harness.runtimes import Runtime
from tests.harness.selection import long
from tests.harness.training import Case, Step, Tolerance, adamw, sgd

MODELS: dict[str, Callable[[], Any]] = {
    "MLP": functools.partial(MLP, num_blocks=2),
    "Uneven": Uneven,
    "Transformer": Transformer,
    "tied Transformer": functools.partial(Transformer, tied=True),
    "SharedModules": SharedModules,
    "Buffers": Buffers,
    "PartlyUsed": PartlyUsed,
}
POLICIES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"param_dtype": torch.bfloat16},
    "bf16 reduced in fp32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "fp32 reduced in bf16": {"reduce_dtype": torch.bfloat16},
}
LOW_PRECISION = Tolerance(rtol=5e-2, atol=5e-2)


@dataclass
class Micro:
    """One micro-batch."""

    sync: str  # "all", "no reduction", "no all-reduce"
    keep: bool  # unsharded after backward
    by_hand: str  # "", "unshard", "unshard async": before forward
    evaluate: bool  # a forward without gradients comes first


@dataclass
class Program:
    model: str
    mesh: str
    policy: str
    optimizer: str
    set_to_none: bool
    clip_norm: float | None
    offload: bool
    last_dim: bool  # shards of the last dim in place of the first
    frozen: set[int]  # parameters, by number
    reshard: list[bool | int | None]  # of each unit, then of the root; None is the default
    alone: list[bool]  # whether the unit is sharded apart from the root
    prefetch: bool  # the order of backward by hand
    divide_factor: float | None
    steps: list[list[Micro]] = field(default_factory=list)


def draw(seed: int, world_size: int) -> Program:
    """A program that both runtimes take."""
    pick = random.Random(1000 * world_size + seed)
    mesh = pick.choice(["fsdp", "fsdp", "hsdp", "one replica", "one rank"])
    model = pick.choice(list(MODELS))
    policy = pick.choice(["fp32", "fp32", *POLICIES])
    if model == "Buffers":
        policy = "fp32"  # statistics in fp32 do not go with activations in bf16
    reshards: list[bool | int | None] = [True, False, None]
    if mesh == "fsdp" and world_size == 4:
        reshards.append(2)
    program = Program(
        model=model,
        mesh=mesh,
        policy=policy,
        optimizer="sgd" if policy != "fp32" else pick.choice(["adamw", "sgd"]),
        set_to_none=pick.random() < 0.7,
        clip_norm=pick.choice([None, None, 0.1]),
        offload=pick.random() < 0.25,
        last_dim=pick.random() < 0.2 and 2 not in reshards,  # torch raises IndexError
        frozen={index for index in range(40) if pick.random() < 0.1},
        reshard=[pick.choice(reshards) for _ in range(4)],
        alone=[pick.random() < 0.8 for _ in range(3)],
        prefetch=pick.random() < 0.3,
        divide_factor=pick.choice([None, None, float(world_size)]) if mesh == "fsdp" else None,  # gloo has no other
    )
    syncs = ["all", "no all-reduce", "no reduction"]
    if model == "SharedModules":  # test_without_all_reduce_of_a_block_that_is_used_twice
        syncs.remove("no all-reduce")
    for _ in range(2):
        num_micro = pick.choice([1, 1, 2, 3])
        program.steps.append(
            [
                Micro(
                    sync="all" if index == num_micro - 1 else pick.choice(syncs),
                    keep=index < num_micro - 1 and pick.random() < 0.4,
                    by_hand=pick.choice(["", "", "unshard", "unshard async"]),
                    evaluate=pick.random() < 0.15,
                )
                for index in range(num_micro)
            ]
        )
    return program


def _mesh(ctx: RankContext, program: Program) -> DeviceMesh:
    if program.mesh == "fsdp":
        return ctx.mesh_1d()
    if program.mesh == "one rank":
        return ctx.mesh_of_one()
    replicas = 1 if program.mesh == "one replica" else 2
    return ctx.mesh_2d(replicas, ctx.world_size // replicas)


def _build(program: Program) -> Any:
    model = MODELS[program.model]()
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index not in program.frozen)
    return model


def _shard(runtime: Runtime, model: Any, mesh: DeviceMesh, program: Program) -> None:
    kwargs: dict[str, Any] = {"mesh": mesh, "mp_policy": runtime.MixedPrecisionPolicy(**POLICIES[program.policy])}
    if program.offload:
        kwargs["offload_policy"] = offload_policy(runtime)
    if program.last_dim and program.model != "Uneven":  # torch wants even sizes there
        kwargs["shard_placement_fn"] = lambda parameter: Shard(parameter.dim() - 1)
    units = [unit for unit, is_alone in zip(model.units(), program.alone, strict=False) if is_alone]
    for unit, reshard in zip([*units, model], program.reshard, strict=False):
        runtime.fully_shard(unit, reshard_after_forward=reshard, **kwargs)
    if program.prefetch:
        for first, second in zip(units[1:], units[:-1], strict=True):
            first.set_modules_to_backward_prefetch([second])
            second.set_modules_to_forward_prefetch([first])
    if program.divide_factor is not None:
        for unit in [*units, model]:
            unit.set_gradient_divide_factor(program.divide_factor)


def _run(step: Step, model: Any, program: Program) -> list[Tensor]:
    losses = []
    control = step.control(model)
    for index, micro in enumerate(program.steps[step.index]):
        control.set_requires_gradient_sync(micro.sync != "no reduction")
        control.set_requires_all_reduce(micro.sync == "all")
        control.set_reshard_after_backward(not micro.keep)
        if micro.evaluate and program.model != "Buffers":  # its forwards write statistics, which are not averaged
            with torch.no_grad():
                losses.append(step.loss(model, 50 + index))
        if micro.by_hand:
            handle = control.unshard(async_op=micro.by_hand == "unshard async")
            if step.runtime is not None and handle is not None:
                handle.wait()
        # torch adds up partial sums of one size only, so all micro-batches of a step use the same parameters.
        kwargs = {"use_side": step.index % 2 == 0} if program.model == "PartlyUsed" else {}
        losses.append(step.loss(model, index, **kwargs))
        losses[-1].backward()
    return losses


def _case(program: Program) -> Case:
    is_low = program.policy != "fp32"
    # Where the sum is not divided by the number of ranks, or is cut by its own norm in bf16, the unsharded reference,
    # which averages in fp32, is another computation.
    has_reference = program.divide_factor is None and not (is_low and program.clip_norm)
    unsharded = LOW_PRECISION if is_low else Tolerance(rtol=1e-4, atol=1e-5)
    return Case(
        functools.partial(_build, program),
        functools.partial(_shard, program=program),
        functools.partial(_run, program=program),
        adamw if program.optimizer == "adamw" else sgd,
        num_steps=len(program.steps),
        set_to_none=program.set_to_none,
        clip_norm=program.clip_norm,
        reduce_dtype=torch.bfloat16 if is_low else torch.float32,
        unsharded=unsharded if has_reference else None,
    )


def _check(ctx: RankContext, seeds: range) -> None:
    for seed in seeds:
        program = draw(seed, ctx.world_size)
        try:
            torch.manual_seed(0)
            compare(_case(program), _mesh(ctx, program))
        except Exception as error:
            raise AssertionError(f"seed {seed} on {ctx.world_size} ranks, {program}: {error}") from error


@pytest.mark.parametrize(
    "seeds", [range(12), *long(range(12, 24), *(range(i, i + 24) for i in range(24, 120, 24)))], ids=str
)
@distributed(2)
def test_programs_on_two_ranks(ctx: RankContext, seeds: range) -> None:
    _check(ctx, seeds)


@pytest.mark.parametrize(
    "seeds", [range(5), *long(range(5, 10), *(range(i, i + 10) for i in range(10, 50, 10)))], ids=str
)
@distributed(4)
def test_programs_on_four_ranks(ctx: RankContext, seeds: range) -> None:
    """Where a sum has more than two terms, and units rest on two of four ranks."""
    _check(ctx, seeds)


def test_programs_of_the_short_suite_have_every_feature() -> None:
    programs = [draw(seed, 2) for seed in range(24)] + [draw(seed, 4) for seed in range(10)]
    micros = [micro for program in programs for step in program.steps for micro in step]
    for name, values in {
        "model": set(MODELS),
        "mesh": {"fsdp", "hsdp", "one replica", "one rank"},
        "policy": set(POLICIES),
        "offload": {True, False},
        "last_dim": {True, False},
        "prefetch": {True, False},
    }.items():
        assert {getattr(program, name) for program in programs} == values, name
    assert {reshard for program in programs for reshard in program.reshard} == {True, False, None, 2}
    assert {micro.sync for micro in micros} == {"all", "no reduction", "no all-reduce"}
    assert {micro.by_hand for micro in micros} == {"", "unshard", "unshard async"}
    assert {micro.evaluate for micro in micros} == {micro.keep for micro in micros} == {True, False}
