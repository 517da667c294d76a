"""``auto_shard``: what a policy chooses becomes a unit, as if ``fully_shard`` had been called on each; a budget chooses
units, checkpointing and what stays unsharded. Refusals are in ``golden/auto_shard.txt``."""

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
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2
from fsdp2.core.runtime.unit import units_under
from fsdp2.core.schedule.schedule import AfterForward
from fsdp2.extras import peers
from fsdp2.memory.plan import Held
from fsdp2.planner import recompute
from fsdp2.planner.blocks import find_units
from fsdp2.planner.code import code_for
from fsdp2.planner.machine import Link, gather, ranks_of
from fsdp2.planner.machines import MACHINES, fields_of, machine_from
from fsdp2.planner.measure import _between, measure
from fsdp2.planner.scenario import Choice
from fsdp2.planner.work import Checkpointing
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import texts_beside
from tests.harness.messages import error_of
from tests.harness.models import MLP, Block
from tests.harness.runtimes import subject
from tests.harness.terminal import on_a_terminal
from tests.harness.training import Step, one_backward, shard_units_and_root
from tests.unit.planner.models import LanguageModel

TEXTS = texts_beside(__file__)


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
    by_policy, by_hand = MLP(2), MLP(2)
    by_hand.load_state_dict(by_policy.state_dict())
    options = {"mesh": ctx.mesh_1d(), "mp_policy": fsdp2.MixedPrecisionPolicy(torch.bfloat16)}
    fsdp2.auto_shard(by_policy, ModuleWrapPolicy({Block}), **options)
    shard_units_and_root(subject(), by_hand, **options)
    found = []
    for model in (by_policy, by_hand):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for index in range(2):
            found += one_backward(Step(index, ctx.rank, None), model)
            optimizer.step()
    assert [loss.item() for loss in found[:2]] == [loss.item() for loss in found[2:]]


REFUSED: dict[str, Callable[[], object]] = {
    "a policy that chooses nothing": lambda: fsdp2.auto_shard(
        nn.Sequential(nn.Linear(2, 2), nn.ReLU()), ModuleWrapPolicy({nn.LayerNorm})
    ),
    "no policy": lambda: fsdp2.auto_shard(nn.Sequential(nn.Linear(2, 2)), {nn.Linear}),
    "neither policy nor budget": lambda: fsdp2.auto_shard(nn.Linear(2, 2)),  # type: ignore[call-overload]
    "no workload": lambda: fsdp2.auto_shard(nn.Linear(2, 2), budget="1GiB"),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_are_refused(case: str) -> None:
    TEXTS.check(case, error_of(REFUSED[case]), among=REFUSED)


# A budget

WORKLOAD = fsdp2.planner.Workload(
    batch=2, sequence=32, precision="fp32", loss=lambda output: output.float().square().mean()
)
# Kernels without a latency, and a slow link: else they would hide what so small a model sends.
SLOW_LINK = replace(MACHINES["H100"], kernel_latency=0.0, in_node=Link(1e9, 3e-6))
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


def planned(ctx: RankContext, model: Any = None, budget: str | int = "1GiB", **options: Any) -> Any:
    """``auto_shard`` of a language model, with a budget."""
    options = {"workload": WORKLOAD, "mesh": ctx.mesh_1d(), **options}
    return fsdp2.auto_shard(language_model() if model is None else model, budget=budget, **options)


def trains_alike(model: nn.Module) -> bool:
    return losses(model) == pytest.approx(losses(language_model()), rel=1e-5)


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return LanguageModel(vocabulary=512)


def after_forward(model: nn.Module) -> dict[str, AfterForward]:
    return {name: unit.config.after_forward for name, unit in units_under(model) if name}


@pytest.mark.ci
@distributed(2)
def test_a_roomy_budget_shards_blocks_and_large_modules_and_computes_nothing_again(ctx: RankContext) -> None:
    model, done = language_model(), []
    shown = on_a_terminal(lambda: done.append(planned(ctx, model, machine=SLOW_LINK)))
    assert ("shard: 100%" in shown and "6/6" in shown) is (ctx.rank == 0)
    assert units(model) == ["", "embedding", *(f"layers.{i}" for i in range(4)), "head"]
    choice = done[0].applied.choice
    assert (choice.checkpointing, choice.after_forward) == (Checkpointing.NONE, AfterForward.KEEP)
    assert set(after_forward(model).values()) == {AfterForward.KEEP}
    assert done[0].model is model
    assert trains_alike(model)


@distributed(2)
def test_ignored_parameters_are_planned_whole_and_groups_in_the_dtype_of_the_policy(ctx: RankContext) -> None:
    plain, model = planned(ctx).applied.result, language_model()
    ignored = {model.get_parameter(name) for name in ("embedding.weight", "layers.0.up.weight")}
    whole = sum(param.nbytes for param in ignored)
    found = planned(ctx, model, ignored_params=ignored).applied.result
    assert found.params_nbytes - plain.params_nbytes == found.grads_nbytes - plain.grads_nbytes == whole / 2
    assert found.optimizer_nbytes - plain.optimizer_nbytes == whole
    in_bf16 = planned(ctx, mp_policy=fsdp2.MixedPrecisionPolicy(torch.bfloat16)).applied.result
    assert 2 * in_bf16.memory[Held.PARAMETERS] == plain.memory[Held.PARAMETERS]
    assert trains_alike(model)


@distributed(2)
def test_a_tight_budget_computes_again_trains_alike_and_says_why(ctx: RankContext) -> None:
    least = min(each.result.peak_nbytes for each in planned(ctx).plan.choices)
    done = planned(ctx, budget=int(least) + 1)
    assert done.applied.choice.checkpointing is Checkpointing.FULL
    assert "not FSDP, reshard, full checkpointing: tight" not in str(done)
    assert "MiB too much" in str(done)
    assert f"On 2 x {MACHINES['H100'].name}, a step takes " in str(done)
    where = f"these are times of that machine, and this rank is on {ctx.device_type}. Pass machine=, one of H100, "
    assert where in str(done)
    assert trains_alike(done.model)


@pytest.mark.ci
@distributed(2)
def test_as_many_of_the_last_blocks_stay_unsharded_as_fit_into_the_budget(ctx: RankContext) -> None:
    workload = replace(WORKLOAD, batch=1, sequence=8)  # few activations: to compute them again frees little
    model, choices = language_model(), planned(ctx, workload=workload, machine=SLOW_LINK).plan.choices
    all_kept = min(each.result.reserved_nbytes for each in choices if each.choice.name.startswith("FSDP, keep"))
    budget = int(all_kept) - 1000  # all blocks would just not fit
    done = planned(ctx, model, budget, workload=workload, machine=SLOW_LINK)
    num_kept = done.applied.choice.num_kept
    assert 0 < num_kept <= 4
    kept = [name for name, rule in after_forward(model).items() if rule is AfterForward.KEEP]
    assert kept == [f"layers.{i}" for i in range(4 - num_kept, 4)]
    assert f"the last {num_kept} blocks stay unsharded after forward: more do not fit" in str(done)


@distributed(2)
def test_tied_embedding_and_head_stay_with_the_model_and_a_cache_is_switched_off(ctx: RankContext) -> None:
    """As in a Hugging Face model, whose selective checkpointing fails in backward with a cache."""
    model: Any = LanguageModel(is_tied=True)
    model.config = SimpleNamespace(use_cache=True)
    said = str(planned(ctx, model))
    assert units(model) == ["", *(f"layers.{i}" for i in range(4))]
    assert "embedding and head, which share weights, and the rest with the model" in said
    assert "no prefetch lists: each unit prefetches the next one of the last forward" in said
    assert model.config.use_cache is False
    assert "use_cache of the model's config is False now" in said


@pytest.mark.ci
@distributed(2)
def test_what_cannot_fit_is_refused_with_what_would_and_nothing_is_sharded(ctx: RankContext) -> None:
    model = language_model()
    with pytest.raises(ValueError, match=r"auto_shard: nothing fits into 1\.0 MiB: .* MiB too much\. .* Use ") as said:
        planned(ctx, model, "1MiB")
    assert "offload_policy" not in str(said.value)  # would not help
    assert units(model) == []
    assert not any("forward" in vars(module) for module in model.modules())
    with pytest.raises(ValueError, match=r"auto_shard: nothing fits into 1\.0 MiB"):
        planned(ctx, budget="1MiB", machine="B200")  # its figure for the host is not needed
    with pytest.raises(ValueError, match=r"machine 'B200 .*' has no figure for host_bandwidth"):
        planned(ctx, budget="1MiB", machine="B200", offload_policy=fsdp2.CPUOffloadPolicy())


@pytest.mark.ci
@distributed(2)
def test_offloading_is_named_where_it_helps(ctx: RankContext) -> None:
    given = {"budget": "2MiB", "workload": replace(WORKLOAD, batch=1, sequence=8)}
    said = r"Use FSDP over \d+ GPUs\. .* With offload_policy=fsdp2\.CPUOffloadPolicy\(\), it fits\."
    with pytest.raises(ValueError, match=said):
        planned(ctx, **given)
    assert planned(ctx, **given, offload_policy=fsdp2.CPUOffloadPolicy()).applied.choice.offloads


@distributed(2)
def test_wrong_options_are_refused_before_anything_changes(ctx: RankContext) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "fully_shard has no option sharding": {"sharding": "full"},
        "budget chooses reshard_after_forward. Drop one": {"reshard_after_forward": True},
        "mesh is 2, expected a DeviceMesh": {"mesh": 2},
    }
    model, mesh = language_model(), ctx.mesh_1d()
    for said, options in wrong.items():
        with pytest.raises(TypeError, match=f"auto_shard: {said}"):
            planned(ctx, model, **options)
    with pytest.raises(TypeError, match="mesh is given twice, by position and by name"):
        fsdp2.auto_shard(model, mesh, mesh=mesh, budget="1GiB", workload=WORKLOAD)
    with pytest.raises(TypeError, match="pass either policy or budget"):
        fsdp2.auto_shard(model, mesh)
    assert not any("forward" in vars(module) for module in model.modules())
    planned(ctx, model, mesh=None)
    assert fsdp2.auto_shard(language_model(), mesh, budget="1GiB", workload=WORKLOAD).plan.num_gpus == 2
    with pytest.raises(ValueError, match="this FSDPLanguageModel is sharded already"):
        planned(ctx, model)
    checkpointed = language_model()
    checkpointed.layers[1] = checkpoint_wrapper(checkpointed.layers[1])
    with pytest.raises(ValueError, match=r"'layers\.1' has activation checkpointing already\. A plan chooses it"):
        planned(ctx, checkpointed)
    with pytest.raises(ValueError, match=r"master_dtype is 'bf16', but the model is in float32\. Cast it first"):
        planned(ctx, workload=replace(WORKLOAD, master_dtype="bf16"))


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


def _shard_by_code(model: nn.Module, choice: Choice, node_size: int = 8) -> None:
    names: dict[str, Any] = {}
    machine = replace(MACHINES["H100"], node_size=node_size)
    exec(code_for(find_units(model), choice, machine, WORKLOAD), names)
    names["shard"](model, "cpu")


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
    _shard_by_code(model, Choice())
    assert set(units(model)) == {"", *found.block_paths, *found.large}


@pytest.mark.parametrize("node_size", [2, 8])
@distributed(2)
def test_the_code_that_reshards_to_a_node_runs_on_fewer_ranks(ctx: RankContext, node_size: int) -> None:
    model = language_model()
    _shard_by_code(model, Choice(after_forward=AfterForward.RESHARD_TO_SMALLER_MESH), node_size)
    assert trains_alike(model)


# python -m fsdp2 measure


@pytest.mark.long
@distributed(2)
def test_collectives_are_measured_by_size_alone_and_beside_products(ctx: RankContext) -> None:
    in_flight = set(peers._in_flight)
    found = measure((2**12, 2**20), width=64)
    assert [(each.name, each.nbytes) for each in found.collectives] == [
        ("all-gather", 2**12),
        ("all-gather", 2**20),
        ("reduce-scatter", 2**12),
        ("reduce-scatter", 2**20),
    ]
    assert peers._in_flight <= in_flight  # each was measured until it had arrived
    assert all(each.alone > 0 <= each.beside for each in found.collectives)
    machine = found.machine
    assert machine.in_node.bandwidth > 0
    assert 0 <= machine.contention.compute <= 0.95
    assert machine_from(fields_of(machine)) == machine
    assert machine.in_node == machine.network  # one node
    assert machine.is_made_of(f"{ctx.device_type} (gloo)")


@pytest.mark.long
@distributed(4)
def test_links_in_a_node_and_between_nodes_are_told_apart(ctx: RankContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of two ranks."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    machine = measure((2**12, 2**20), width=64).machine
    assert machine.node_size == 2
    assert machine.name == f"measured: {ctx.device_type}, 4 ranks on 2 nodes"
    assert machine.in_node != machine.network


def test_the_link_between_nodes_is_what_the_model_of_a_ring_needs_to_predict_what_was_measured() -> None:
    in_node = Link(500e9, 3e-6)  # faster than the adapters of a node together, which would else not show
    machine, num_ranks = replace(MACHINES["H100"], launch_latency=0.0, in_node=in_node), 16
    small, large = (gather(machine, ranks_of(num_ranks, 1, 8), nbytes) for nbytes in (0, 2**30))
    whole = Link(2**30 * 15 / 16 / large.seconds, small.alone / (num_ranks - 1))
    found = _between(whole, machine.in_node, num_ranks, 8)
    assert found.bandwidth == pytest.approx(machine.network.bandwidth)
    assert found.latency == pytest.approx(machine.network.latency)
