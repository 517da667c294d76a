"""Optimizer state dicts of every kind, entry by entry as with torch's class."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.tensor.debug import CommDebugMode

import fsdp2
from tests.harness.distributed import RankContext, distributed
from tests.harness.selection import long
from tests.parity.fsdp1.fronts import ON_TWO_RANKS, Front, as_torchs, assert_same, batch
from tests.parity.fsdp1.test_state_dicts import FULL, LOCAL, SHARDED, described, of_kind


class Counting(torch.optim.SGD):
    """Its states have no tensors: a count, and a text."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["count"] = self.state[param].get("count", 0) + 1
                    self.state[param]["kind"] = "counting"


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.5),
    "no tensors": lambda params: Counting(params, lr=0.1),
}


class Net(nn.Module):
    """Sizes that do not divide; a parameter with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.inner = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 5))
        self.head = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.first(x)))


def wrapped_net(front: Front, **options: Any) -> Any:
    torch.manual_seed(3)
    model = Net()
    model.inner = front.wrap(model.inner, **options)
    return front.wrap(model, **options)


def steps(ctx: RankContext, model: nn.Module, optim: torch.optim.Optimizer, seeds: range) -> list[torch.Tensor]:
    losses = []
    for seed in seeds:
        loss = model(batch(ctx, 3, 4, seed=seed)).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.detach())
    return losses


def normal(state_dict: dict[str, Any]) -> dict[str, Any]:
    """For ``assert_same``: states in one order, ShardedTensors described."""
    if not state_dict:
        return {}
    state = {
        key: described(dict(sorted(states.items()))) if isinstance(states, dict) else states
        for key, states in sorted(state_dict["state"].items())
    }
    return {**state_dict, "state": state}


def quiet(call: Callable[..., Any], *args: Any, **given: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args, **given)


def saved(front: Front, model: nn.Module, optim: Any, kind: StateDictType = FULL, *configs: Any) -> dict[str, Any]:
    """Torch's class saves wrong values on the CPU with ``offload_to_cpu``, its default, and original parameters: all
    states of a parameter share one buffer, and have the values of the last. So it must not offload here."""
    if not front.is_ours and kind is FULL:
        rank0_only = bool(configs) and configs[1].rank0_only
        configs = (FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=rank0_only, offload_to_cpu=False))
    with of_kind(front, model, kind, *configs):
        return quiet(front.cls.optim_state_dict, model, optim)


def ours(ctx: RankContext) -> Front:
    return Front(ctx, fsdp2.fsdp1)


def trained(ctx: RankContext, *, use_orig_params: bool) -> tuple[Front, nn.Module, torch.optim.AdamW]:
    """Our class around a ``Net``, after one step."""
    front = ours(ctx)
    model = wrapped_net(front, use_orig_params=use_orig_params)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    steps(ctx, model, optim, range(1))
    return front, model, optim


@pytest.mark.ci
@pytest.mark.parametrize("use_orig_params", [False, *long(True)])
@as_torchs(2, 4, exact=ON_TWO_RANKS)
def test_every_kind_of_every_optimizer_is_torchs(front: Front, use_orig_params: bool) -> Any:
    results = []
    for make in OPTIMIZERS.values():
        for mesh in (None, front.ctx.mesh_1d()):
            model = wrapped_net(front, use_orig_params=use_orig_params, device_mesh=mesh)
            optim = make(model.parameters())
            before = saved(front, model, optim)
            steps(front.ctx, model, optim, range(2))
            each = [
                before,
                saved(front, model, optim),
                saved(front, model, optim, FULL, FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=True)),
                saved(front, model, optim, FULL, FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False)),
                saved(front, model, optim, SHARDED),
                saved(
                    front,
                    model,
                    optim,
                    SHARDED,
                    ShardedStateDictConfig(),
                    ShardedOptimStateDictConfig(offload_to_cpu=True),
                ),
            ]
            for rank0_only in (True, False):
                config = FullOptimStateDictConfig(rank0_only=rank0_only)
                each.append(
                    quiet(front.cls.full_optim_state_dict, model, optim, rank0_only=rank0_only)
                    if front.is_ours or not use_orig_params
                    else saved(front, model, optim, FULL, FullStateDictConfig(), config)
                )
            if mesh is None:
                each += [saved(front, model, optim, LOCAL), quiet(front.cls.sharded_optim_state_dict, model, optim)]
            results.append([normal(result) for result in each])
    return results


@pytest.mark.parametrize("use_orig_params", [True, False])
@as_torchs(2, 4, exact=ON_TWO_RANKS)
def test_groups_frozen_tied_and_ignored_parameters_are_torchs(front: Front, use_orig_params: bool) -> Any:
    torch.manual_seed(5)
    model = Net()
    model.head.weight.data.normal_()
    model.second = nn.Linear(4, 5)
    model.second.weight = model.first.weight
    model.extra = nn.Linear(5, 5)
    model.forward = lambda x: model.head(model.inner(model.extra(model.first(x) + model.second(x))))
    for param in model.inner.parameters():
        param.requires_grad_(False)
    model.inner = front.wrap(model.inner, use_orig_params=use_orig_params)
    model.head = front.wrap(model.head, use_orig_params=use_orig_params)
    wrapped = front.wrap(model, use_orig_params=use_orig_params, ignored_modules=[model.extra])
    params = list(wrapped.parameters())
    optim = torch.optim.AdamW(
        [{"params": params[1:], "weight_decay": 0.3}, {"params": params[:1], "lr": torch.tensor(0.2)}], lr=0.1
    )
    for seed in range(2):
        wrapped(batch(front.ctx, 3, 4, seed=seed)).square().mean().backward()
        for param in model.extra.parameters():
            dist.all_reduce(param.grad)
        optim.step()
        optim.zero_grad()
    return [normal(saved(front, wrapped, optim)), normal(saved(front, wrapped, optim, SHARDED))]


@pytest.mark.parametrize("use_orig_params", [True, False])
@as_torchs(4, exact=False)
@pytest.mark.long
def test_no_shard_and_hybrid_are_torchs(front: Front, use_orig_params: bool) -> Any:
    results = []
    for options in (
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
        {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": front.ctx.mesh_2d(2, 2)},
    ):
        model = wrapped_net(front, use_orig_params=use_orig_params, **options)
        optim = torch.optim.AdamW(model.parameters(), lr=0.1)
        steps(front.ctx, model, optim, range(2))
        results += [quiet(saved, front, model, optim, kind) for kind in (FULL, SHARDED)]
        made = [quiet(front.cls.optim_state_dict_to_load, model, optim, copy.deepcopy(results[-2]))]
        made.append(quiet(front.cls.optim_state_dict_to_load, model, optim, results[-1]))
        other = wrapped_net(front, use_orig_params=use_orig_params, **options)
        for each in made:
            optim = torch.optim.AdamW(other.parameters(), lr=0.1)
            optim.load_state_dict(each)
            results.append(saved(front, other, optim))
    return [normal(each) for each in results]


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(2)
def test_a_frozen_wrapper_and_an_unused_parameter_have_no_states(ctx: RankContext, use_orig_params: bool) -> None:
    """Torch's class refuses original parameters without states, when others of their unit have some."""
    front = ours(ctx)
    model = Net()
    model.unused = front.wrap(nn.Linear(2, 2), use_orig_params=use_orig_params)
    model.inner.requires_grad_(False)
    model.inner = front.wrap(model.inner, use_orig_params=use_orig_params)
    model = front.wrap(model, use_orig_params=use_orig_params)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    steps(ctx, model, optim, range(1))
    found = saved(front, model, optim)
    assert sorted(found["state"]) == ["first.bias", "first.weight", "head.bias", "head.weight"]
    assert set(found["param_groups"][0]["params"]) >= {"inner.0.weight", "unused.weight"}
    optim.load_state_dict(front.cls.optim_state_dict_to_load(model, optim, found))
    assert_same(normal(found), normal(saved(front, model, optim)))


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(2)
def test_saved_values_are_copies_and_loading_leaves_them_alone(ctx: RankContext, use_orig_params: bool) -> None:
    front, model, optim = trained(ctx, use_orig_params=use_orig_params)
    found = [saved(front, model, optim, kind) for kind in (FULL, SHARDED)]
    before = [copy.deepcopy(normal(each)) for each in found]
    for each in found:
        front.cls.optim_state_dict_to_load(model, optim, each, load_directly=True)
        steps(ctx, model, optim, range(2))
    assert_same(before, [normal(each) for each in found])


@distributed(2)
def test_a_unit_is_gathered_in_one_launch_per_state(ctx: RankContext) -> None:
    front, model, optim = trained(ctx, use_orig_params=True)
    with CommDebugMode() as comm:
        saved(front, model, optim)
    assert sum(comm.get_comm_counts().values()) <= 2 * 2  # units, states


@distributed(2)
def test_states_that_only_some_ranks_have_are_saved_if_the_others_have_no_elements(ctx: RankContext) -> None:
    """An optimizer may skip empty shards. The same collectives run on all ranks."""
    front, model, optim = trained(ctx, use_orig_params=True)
    expected = saved(front, model, optim)
    for param in [each for each in optim.state if not each.to_local().numel()]:
        del optim.state[param]
    assert_same(normal(expected), normal(saved(front, model, optim)))
    if ctx.rank == 0:
        del optim.state[next(iter(optim.state))]
    with pytest.raises(RuntimeError, match=r"ranks lack optimizer states.*'first.weight' \(ranks 0\)"):
        saved(front, model, optim)


@as_torchs(2)
def test_states_of_no_parameter_are_saved_and_loaded_as_they_are(front: Front) -> Any:
    model = wrapped_net(front, use_orig_params=True)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps(front.ctx, model, optim, range(1))
    given = optim.state_dict()
    given["state"]["mine"] = {"calls": 3}
    found = quiet(front.cls.optim_state_dict, model, optim, given)
    return found["state"]["mine"], quiet(front.cls.optim_state_dict_to_load, model, optim, found)["state"]["mine"]


@as_torchs(2)
def test_rekeying_is_torchs_and_plain_optimizers_load_and_save_for_us(front: Front) -> Any:
    torch.manual_seed(3)
    plain = Net()
    plain_optim = torch.optim.AdamW(plain.parameters(), lr=0.1)
    plain(torch.ones(2, 4)).sum().backward()
    plain_optim.step()
    ids = plain_optim.state_dict()
    rekey = front.cls.rekey_optim_state_dict
    names = quiet(rekey, ids, OptimStateKeyType.PARAM_NAME, plain, optim=plain_optim)
    back = quiet(rekey, names, OptimStateKeyType.PARAM_ID, plain, optim=plain_optim)
    by_input = quiet(rekey, names, OptimStateKeyType.PARAM_ID, plain, list(plain.parameters()))
    assert rekey(names, OptimStateKeyType.PARAM_NAME, plain) is names
    results = [names, back, by_input]
    for use_orig_params in (True, False):
        model = wrapped_net(front, use_orig_params=use_orig_params)
        optim = torch.optim.AdamW(model.parameters(), lr=0.1)
        optim.load_state_dict(quiet(front.cls.shard_full_optim_state_dict, names, model, optim=optim))
        found = saved(front, model, optim)
        results.append(normal(found))
        results.append(quiet(rekey, found, OptimStateKeyType.PARAM_ID, plain, optim=plain_optim)["state"])
        plain_optim.load_state_dict(quiet(rekey, found, OptimStateKeyType.PARAM_ID, plain, optim=plain_optim))
        results.append(plain_optim.state_dict()["state"])
    return [dict(sorted(each.items(), key=lambda item: str(item[0]))) for each in results]


@distributed(2)
def test_sharded_states_are_no_whole_states_of_rank_0(ctx: RankContext) -> None:
    front, model, optim = trained(ctx, use_orig_params=True)
    given = saved(front, model, optim, StateDictType.SHARDED_STATE_DICT)
    whole_on_rank_0 = FullOptimStateDictConfig(rank0_only=True)
    with (
        of_kind(front, model, FULL, FullStateDictConfig(), whole_on_rank_0),
        pytest.raises(ValueError, match=r"with rank0_only, the first rank has whole states, but '.*' is sharded"),
    ):
        front.cls.optim_state_dict_to_load(model, optim, given)


@distributed(2)
def test_rekeying_before_the_first_step_also_changes_the_groups(ctx: RankContext) -> None:
    """Torch's class gives back numbers when there are no states."""
    plain = Net()
    optim = torch.optim.AdamW(plain.parameters())
    rekey = ours(ctx).cls.rekey_optim_state_dict
    found = rekey(optim.state_dict(), OptimStateKeyType.PARAM_NAME, plain, optim=optim)
    assert found["param_groups"][0]["params"] == sorted(name for name, _ in plain.named_parameters())
    other = nn.Linear(1, 1)
    other_optim = torch.optim.AdamW(other.parameters())
    with pytest.raises(ValueError, match=r"no parameters 'first.bias', 'first.weight'"):
        rekey(found, OptimStateKeyType.PARAM_ID, other, optim=other_optim)
    mixed = {"state": {0: {}, "a": {}}, "param_groups": []}
    with pytest.raises(ValueError, match="all names or all numbers"):
        rekey(mixed, OptimStateKeyType.PARAM_ID, plain)


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(2)
def test_what_does_not_fit_raises_on_all_ranks_and_loads_nothing(ctx: RankContext, use_orig_params: bool) -> None:
    front, model, optim = trained(ctx, use_orig_params=use_orig_params)
    good = saved(front, model, optim)
    before = normal(good)

    def fails(match: str, given: Any, *, with_optim: Any = None, everywhere: bool = True) -> None:
        given = given if everywhere or ctx.rank == 1 else good
        with pytest.raises(ValueError, match=match):
            front.cls.optim_state_dict_to_load(model, with_optim or optim, given, load_directly=True)
        assert_same(before, normal(saved(front, model, optim)))

    other = copy.deepcopy(good)
    other["state"]["strange.weight"] = other["state"].pop("head.weight")
    other["param_groups"][0]["params"] += ["strange.weight", "strange.bias"]
    fails("the model does not have: strange.weight, strange.bias", other)
    fails("(?s)^On rank 1: .*the model does not have: strange.weight", other, everywhere=False)
    shapes = copy.deepcopy(good)
    shapes["state"]["first.weight"]["exp_avg"] = torch.zeros(2, 2)
    shapes["state"]["head.bias"]["exp_avg_sq"] = torch.zeros(2)
    fails(r"'exp_avg' of 'first.weight' has shape \(2, 2\), expected \(5, 4\), 'exp_avg_sq' of 'head.bias'", shapes)
    fails("(?s)^On rank 1: .*has shape", shapes, everywhere=False)
    lacking = copy.deepcopy(good)
    lacking["param_groups"][0]["params"].remove("first.bias")
    lacking["param_groups"][0]["params"].remove("head.bias")
    fails("are not in the state dict: first.bias, head.bias", lacking)
    fails("the keys are numbers", Net() and optim.state_dict() | {"state": {0: {}}})
    fails("expected a dict with 'state'", {"model": 3})
    plain = Net()
    fails(r"parameter 0 of group 0 with shape \(5, 4\)", good, with_optim=torch.optim.AdamW(plain.parameters()))
    with pytest.raises(ValueError, match="Pass the model whose parameters"):
        front.cls.optim_state_dict(model, torch.optim.AdamW(plain.parameters()))
    some = torch.optim.AdamW(list(model.parameters())[:1], lr=0.1)
    fails("the optimizer does not have", good, with_optim=some)
    with pytest.raises(ValueError, match="no FullyShardedDataParallel"):
        front.cls.optim_state_dict(plain, torch.optim.AdamW(plain.parameters()))


@distributed(2)
def test_sharded_states_that_one_rank_lacks_raise_on_all_ranks(ctx: RankContext) -> None:
    """Each is gathered when it is loaded."""
    front, model, optim = trained(ctx, use_orig_params=True)
    given = saved(front, model, optim, SHARDED)
    if ctx.rank == 1:
        del given["state"]["inner.0.weight"]
    with (
        of_kind(front, model, SHARDED),
        pytest.raises(ValueError, match=r"ranks 0 and 1 have different sharded states of inner\.0\.weight"),
    ):
        front.cls.optim_state_dict_to_load(model, optim, given)


@distributed(2)
def test_malformed_states_of_one_rank_raise_on_all_ranks(ctx: RankContext) -> None:
    front, model, optim = trained(ctx, use_orig_params=True)
    given = saved(front, model, optim)
    if ctx.rank == 1:
        given["param_groups"] = [{}]
    with pytest.raises(RuntimeError, match=r"^On rank 1: KeyError: 'params'"):
        front.cls.optim_state_dict_to_load(model, optim, given)


@distributed(2)
def test_a_named_optimizer_without_states_is_saved(ctx: RankContext) -> None:
    front = ours(ctx)
    model = wrapped_net(front, use_orig_params=True)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    names = [name for name, _ in model.named_parameters()]
    given = {"state": {}, "param_groups": [{**optim.state_dict()["param_groups"][0], "params": names}]}
    found = front.cls.optim_state_dict(model, optim, given)
    assert found["state"] == {}
    assert sorted(found["param_groups"][0]["params"]) == sorted(name for name, _ in Net().named_parameters())


@distributed(2)
def test_a_key_type_of_another_kind_is_refused(ctx: RankContext) -> None:
    front, model, optim = trained(ctx, use_orig_params=True)
    with pytest.raises(TypeError, match="rekey_optim_state_dict: expected an OptimStateKeyType, not 'names'"):
        front.cls.rekey_optim_state_dict(saved(front, model, optim), "names", model, optim=optim)
