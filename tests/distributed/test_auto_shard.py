"""``auto_shard``: what a policy chooses becomes a unit, as if ``fully_shard`` had been called on each; a budget chooses
units, checkpointing and what stays unsharded."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2
from fsdp2.runtime.unit import units_under
from fsdp2.schedule.schedule import AfterForward
from fsdp2.tools.planner import recompute
from fsdp2.tools.planner.blocks import find_units
from fsdp2.tools.planner.code import code_for
from fsdp2.tools.planner.machines import MACHINES
from fsdp2.tools.planner.scenario import Choice, Precision
from fsdp2.tools.planner.work import Checkpointing
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Block
from tests.harness.terminal import on_a_terminal
from tests.unit.planner_models import LanguageModel


def units(model: nn.Module) -> list[str]:
    return [name for name, _ in units_under(model)]


@distributed(2)
def test_units_are_what_the_policy_chooses(ctx: RankContext) -> None:
    mesh = ctx.mesh_1d()
    assert units(fsdp2.auto_shard(MLP(2), ModuleWrapPolicy({Block}), mesh=mesh)) == ["", "blocks.0", "blocks.1"]
    by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=1)
    assert "blocks.0.up" in units(fsdp2.auto_shard(MLP(2), by_size, mesh=mesh))
    model = MLP(2)
    policy = CustomPolicy(lambda module: {"reshard_after_forward": False} if module is model.blocks[1] else False)
    assert units(fsdp2.auto_shard(model, policy, mesh=mesh)) == ["", "blocks.1"]


@distributed(2)
def test_it_trains_as_if_sharded_by_hand(ctx: RankContext) -> None:
    losses = []
    for by_policy in (True, False):
        torch.manual_seed(0)
        model = MLP(2)
        policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16)
        if by_policy:
            fsdp2.auto_shard(model, ModuleWrapPolicy({Block}), mesh=ctx.mesh_1d(), mp_policy=policy)
        else:
            for module in (*model.blocks, model):
                fsdp2.fully_shard(module, mesh=ctx.mesh_1d(), mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            loss = model(torch.ones(2, model.entry.in_features)).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:2] == losses[2:]


def test_a_policy_that_chooses_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"chooses no module inside this Sequential, .* classes Linear, ReLU\. Choose"):
        fsdp2.auto_shard(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), ModuleWrapPolicy({nn.LayerNorm}))
    with pytest.raises(TypeError, match="the wrapping policy is a set, expected a policy"):
        fsdp2.auto_shard(nn.Sequential(nn.Linear(2, 2)), {nn.Linear})


# A budget

WORKLOAD = fsdp2.Workload(batch=2, sequence=32, precision="fp32", loss=lambda output: output.float().square().mean())
TOKENS = torch.arange(64).remainder(32).reshape(2, 32)


def losses(model: nn.Module, num_steps: int = 2) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(num_steps):
        loss = model(TOKENS).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return LanguageModel(vocabulary=512)


@distributed(2)
def test_a_roomy_budget_shards_blocks_and_large_modules_and_computes_nothing_again(ctx: RankContext) -> None:
    model, plain = language_model(), language_model()
    done = fsdp2.auto_shard(model, budget="1GiB", workload=WORKLOAD, mesh=ctx.mesh_1d())
    assert units(model) == ["", "embedding", *(f"layers.{i}" for i in range(4)), "head"]
    assert done.applied.choice.checkpointing is Checkpointing.NONE
    assert done.model is model
    assert losses(model) == pytest.approx(losses(plain), rel=1e-5)


@distributed(2)
def test_with_a_budget_the_mesh_may_be_the_second_argument(ctx: RankContext) -> None:
    mesh = ctx.mesh_1d()
    done = fsdp2.auto_shard(language_model(), mesh, budget="1GiB", workload=WORKLOAD)
    assert done.plan.num_gpus == 2
    with pytest.raises(TypeError, match="mesh is given twice, by position and by name"):
        fsdp2.auto_shard(language_model(), mesh, mesh=mesh, budget="1GiB", workload=WORKLOAD)
    with pytest.raises(TypeError, match="pass either policy or budget"):
        fsdp2.auto_shard(language_model(), mesh)


@distributed(2)
def test_on_a_terminal_the_first_rank_shows_which_unit_is_sharded(ctx: RankContext) -> None:
    shown = on_a_terminal(
        lambda: fsdp2.auto_shard(language_model(), budget="1GiB", workload=WORKLOAD, mesh=ctx.mesh_1d())
    )
    assert ("shard: 100%" in shown and "6/6" in shown) is (ctx.rank == 0)


@distributed(2)
def test_a_tight_budget_computes_again_trains_alike_and_says_why(ctx: RankContext) -> None:
    model, plain = language_model(), language_model()
    roomy = fsdp2.auto_shard(language_model(), budget="1GiB", workload=WORKLOAD, mesh=ctx.mesh_1d())
    least = min(each.result.reserved_nbytes for each in roomy.plan.choices)
    done = fsdp2.auto_shard(model, budget=int(least) + 1, workload=WORKLOAD, mesh=ctx.mesh_1d())
    assert done.applied.choice.checkpointing is Checkpointing.FULL
    assert "MiB too much" in str(done)
    assert losses(model) == pytest.approx(losses(plain), rel=1e-5)


def after_forward(model: nn.Module) -> dict[str, AfterForward]:
    return {name: unit.config.after_forward for name, unit in units_under(model) if name}


@distributed(2)
def test_all_units_stay_unsharded_where_the_plan_keeps_them_all(ctx: RankContext) -> None:
    done = fsdp2.auto_shard(language_model(), budget="1GiB", workload=WORKLOAD, mesh=ctx.mesh_1d())
    assert done.applied.choice.after_forward is AfterForward.KEEP
    assert set(after_forward(done.model).values()) == {AfterForward.KEEP}


@distributed(2)
def test_as_many_of_the_last_blocks_stay_unsharded_as_fit_into_the_budget(ctx: RankContext) -> None:
    workload = replace(WORKLOAD, batch=1, sequence=8)  # few activations: to compute them again frees little
    roomy = fsdp2.auto_shard(language_model(), budget="1GiB", workload=workload, mesh=ctx.mesh_1d())
    resharded = next(each for each in roomy.plan.choices if each.choice.name == "FSDP, reshard")
    model = language_model()
    largest = 4 * sum(param.numel() for param in model.get_submodule("layers.0").parameters())
    budget = int(resharded.result.reserved_nbytes + 2.5 * largest)
    done = fsdp2.auto_shard(model, budget=budget, workload=workload, mesh=ctx.mesh_1d())
    num_kept = done.applied.choice.num_kept
    assert 0 < num_kept < 4
    kept = [name for name, rule in after_forward(model).items() if rule is AfterForward.KEEP]
    assert kept == [f"layers.{i}" for i in range(4 - num_kept, 4)]
    assert f"the last {num_kept} blocks stay unsharded after forward: more do not fit" in str(done)


@distributed(2)
def test_tied_embedding_and_head_stay_together_with_the_model(ctx: RankContext) -> None:
    model = LanguageModel(is_tied=True)
    done = fsdp2.auto_shard(model, budget="1GiB", workload=WORKLOAD, mesh=ctx.mesh_1d())
    assert units(model) == ["", *(f"layers.{i}" for i in range(4))]
    assert "embedding and head, which share weights, and the rest with the model" in str(done)
    assert "no prefetch lists: each unit prefetches the next one of the last forward" in str(done)


@distributed(2)
def test_a_cache_of_keys_and_values_is_switched_off(ctx: RankContext) -> None:
    """As in a Hugging Face model, whose selective checkpointing fails in backward with a cache."""
    model: Any = language_model()
    model.config = SimpleNamespace(use_cache=True)
    done = fsdp2.auto_shard(model, budget="1GiB", workload=WORKLOAD, mesh=ctx.mesh_1d())
    assert model.config.use_cache is False
    assert "use_cache of the model's config is False now" in str(done)


@distributed(2)
def test_selective_checkpointing_trains_alike(ctx: RankContext) -> None:
    model, plain = language_model(), language_model()
    for block in model.layers:
        recompute(block, "selective")
        fsdp2.fully_shard(block, mesh=ctx.mesh_1d())
    fsdp2.fully_shard(model, mesh=ctx.mesh_1d())
    assert losses(model) == pytest.approx(losses(plain), rel=1e-5)


@pytest.mark.ci
@distributed(2)
def test_what_cannot_fit_is_refused_with_what_would_and_nothing_is_sharded(ctx: RankContext) -> None:
    model = language_model()
    with pytest.raises(ValueError, match=r"auto_shard: nothing fits into 1\.0 MiB: .* MiB too much\. .* Use ") as said:
        fsdp2.auto_shard(model, budget="1MiB", workload=WORKLOAD, mesh=ctx.mesh_1d())
    assert "offload_policy" not in str(said.value)  # would not help
    assert units(model) == []
    assert not any("forward" in vars(module) for module in model.modules())


@distributed(2)
def test_offloading_is_named_where_it_helps(ctx: RankContext) -> None:
    workload = replace(WORKLOAD, batch=1, sequence=8)
    with pytest.raises(
        ValueError, match=r"Use FSDP over \d+ GPUs\. Or pass offload_policy=fsdp2\.CPUOffloadPolicy\(\)"
    ):
        fsdp2.auto_shard(language_model(), budget="2MiB", workload=workload, mesh=ctx.mesh_1d())
    policy = fsdp2.CPUOffloadPolicy()
    done = fsdp2.auto_shard(
        language_model(), budget="2MiB", workload=workload, mesh=ctx.mesh_1d(), offload_policy=policy
    )
    assert done.applied.choice.offloads


@distributed(2)
def test_wrong_options_are_refused_before_anything_changes(ctx: RankContext) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "fully_shard has no option sharding": {"sharding": "full"},
        "budget chooses reshard_after_forward. Drop one": {"reshard_after_forward": True},
        "mesh is 2, expected a DeviceMesh": {"mesh": 2},
    }
    model = language_model()
    for said, options in wrong.items():
        with pytest.raises(TypeError, match=f"auto_shard: {said}"):
            fsdp2.auto_shard(model, budget="1GiB", workload=WORKLOAD, **{"mesh": ctx.mesh_1d(), **options})
    assert not any("forward" in vars(module) for module in model.modules())
    done = fsdp2.auto_shard(model, budget="1GiB", workload=WORKLOAD, mesh=None)
    with pytest.raises(ValueError, match="this FSDPLanguageModel is sharded already"):
        fsdp2.auto_shard(done.model, budget="1GiB", workload=WORKLOAD, mesh=ctx.mesh_1d())


def test_policy_and_budget_exclude_each_other_and_a_budget_needs_a_workload() -> None:
    with pytest.raises(TypeError, match="pass either policy or budget"):
        fsdp2.auto_shard(nn.Linear(2, 2))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="budget needs workload"):
        fsdp2.auto_shard(nn.Linear(2, 2), budget="1GiB")  # type: ignore[call-overload]


class _Counted(TorchDispatchMode):
    num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_products += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def test_selective_checkpointing_keeps_every_other_product_with_a_bias() -> None:
    block = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    recompute(block, "selective")
    with _Counted() as counted:
        block(torch.ones(2, 8, requires_grad=True)).sum().backward()
    assert counted.num_products == 4 + 1  # torch does not compute what nothing reads, here the last one


def _named(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(zip(["table", "1", "2", "last"], modules, strict=False)))


NESTED: dict[str, Callable[[], nn.Module]] = {
    "numbers in the path": lambda: nn.Sequential(nn.Linear(8, 8), nn.Sequential(Block(8), Block(8), Block(8))),
    "blocks beside others": lambda: nn.Sequential(nn.Embedding(64, 8), Block(8), Block(8), nn.Linear(8, 64)),
    "beside others, by name": lambda: _named(nn.Embedding(64, 8), Block(8), Block(8), nn.Linear(8, 64)),
    "by name": lambda: _named(nn.ModuleDict({"x": Block(8), "y": Block(8), "w": nn.Embedding(64, 8)})),
}


@pytest.mark.parametrize("kind", NESTED)
@distributed(2)
def test_the_code_makes_the_units_that_were_found(ctx: RankContext, kind: str) -> None:
    model = NESTED[kind]()
    found = find_units(model)
    code = code_for(found, Choice("FSDP"), MACHINES["H100"], Precision.FP32)
    names: dict[str, Any] = {}
    exec(code, names)
    names["shard"](model, "cpu")
    assert set(units(model)) == {"", *found.block_paths, *found.large}


@pytest.mark.parametrize("node_size", [2, 8])
@distributed(2)
def test_the_code_that_reshards_to_a_node_runs_on_fewer_ranks(ctx: RankContext, node_size: int) -> None:
    model, plain = language_model(), language_model()
    choice = Choice("FSDP", after_forward=AfterForward.RESHARD_TO_SMALLER_MESH)
    machine = replace(MACHINES["H100"], node_size=node_size)
    names: dict[str, Any] = {}
    exec(code_for(find_units(model), choice, machine, Precision.FP32), names)
    names["shard"](model, "cpu")
    assert losses(model) == pytest.approx(losses(plain), rel=1e-5)


@pytest.mark.ci
@distributed(2)
def test_machine_without_a_figure_for_the_host_is_no_obstacle_unless_it_is_needed(ctx: RankContext) -> None:
    given = {"budget": "1MiB", "machine": "B200", "workload": WORKLOAD, "mesh": ctx.mesh_1d()}
    with pytest.raises(ValueError, match=r"auto_shard: nothing fits into 1\.0 MiB"):
        fsdp2.auto_shard(language_model(), **given)
    with pytest.raises(ValueError, match=r"machine 'B200 .*' has no figure for host_bandwidth"):
        fsdp2.auto_shard(language_model(), offload_policy=fsdp2.CPUOffloadPolicy(), **given)
