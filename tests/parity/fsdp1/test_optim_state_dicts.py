"""Optimizer state dicts of every kind, entry by entry as with torch's class."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn

from tests.harness.comms import gathers_noted
from tests.harness.selection import long
from tests.parity.fsdp1.fronts import ON_TWO_RANKS, Front, as_torchs, assert_same, quiet, with_ours
from tests.parity.fsdp1.kinds import FULL, HYBRID, LOCAL, NO_SHARD, SHARDED, rank0_only
from tests.parity.fsdp1.test_state_dicts import described


class Counting(torch.optim.SGD):
    """Its states have no tensors: a count, and a text."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for param in (param for group in self.param_groups for param in group["params"]):
            if param.grad is not None:
                self.state[param]["count"] = self.state[param].get("count", 0) + 1
                self.state[param]["kind"] = "counting"


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.5),
    "no tensors": lambda params: Counting(params, lr=0.1),
}


def adamw(params: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr)


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


def trained(front: Front, optimizer: Any = adamw, num_steps: int = 1, **options: Any) -> tuple[Any, Any]:
    model = wrapped_net(front, **options)
    optim = optimizer(model.parameters())
    front.train(model, optim, shape=(3, 4), num_steps=num_steps)
    return model, optim


def normal(state_dict: dict[str, Any]) -> dict[str, Any]:
    """For ``assert_same``: states in one order, ShardedTensors described."""
    state = {
        key: described(dict(sorted(states.items()))) if isinstance(states, dict) else states
        for key, states in sorted(state_dict.get("state", {}).items())
    }
    return {**state_dict, "state": state} if state_dict else {}


def saved(front: Front, model: nn.Module, optim: Any, kind: fsdp.StateDictType = FULL, *configs: Any) -> dict[str, Any]:
    """Torch's class saves wrong values on the CPU with ``offload_to_cpu``, its default, and original parameters: all
    states of a parameter share one buffer, and have the values of the last. So it must not offload here."""
    if not front.is_ours and kind is FULL:
        on_rank_0 = bool(configs) and configs[1].rank0_only
        configs = (
            fsdp.FullStateDictConfig(),
            fsdp.FullOptimStateDictConfig(rank0_only=on_rank_0, offload_to_cpu=False),
        )
    with front.of_kind(model, kind, *configs):
        return quiet(front.cls.optim_state_dict, model, optim)


def loadable(front: Front, model: nn.Module, optim: Any, given: Any, **options: Any) -> Any:
    return quiet(front.cls.optim_state_dict_to_load, model, optim, given, **options)


def configs() -> list[Any]:
    """New ones: torch's class notes in them whether it has DTensors."""
    return [
        (FULL,),
        (FULL, *rank0_only()),
        (FULL, fsdp.FullStateDictConfig(), fsdp.FullOptimStateDictConfig(offload_to_cpu=False)),
        (SHARDED,),
        (SHARDED, fsdp.ShardedStateDictConfig(), fsdp.ShardedOptimStateDictConfig(offload_to_cpu=True)),
    ]


@pytest.mark.ci
@pytest.mark.parametrize("use_orig_params", [False, *long(True)])
@as_torchs(2, 4, exact=ON_TWO_RANKS)
def test_every_kind_of_every_optimizer_is_torchs(front: Front, use_orig_params: bool) -> Any:
    results = []
    for make in OPTIMIZERS.values():
        for mesh in (None, front.mesh()):
            model, optim = trained(front, make, 0, use_orig_params=use_orig_params, device_mesh=mesh)
            each = [saved(front, model, optim)]
            front.train(model, optim, shape=(3, 4), num_steps=2)
            each += [saved(front, model, optim, *config) for config in configs()]
            for on_rank_0 in (True, False):
                config = fsdp.FullOptimStateDictConfig(rank0_only=on_rank_0)
                each.append(
                    quiet(front.cls.full_optim_state_dict, model, optim, rank0_only=on_rank_0)
                    if front.is_ours or not use_orig_params
                    else saved(front, model, optim, FULL, fsdp.FullStateDictConfig(), config)
                )
            if mesh is None:
                each += [saved(front, model, optim, LOCAL), quiet(front.cls.sharded_optim_state_dict, model, optim)]
            results.append([normal(result) for result in each])
    return results


@as_torchs(2, 4, exact=ON_TWO_RANKS, both_modes=True)
def test_groups_frozen_tied_and_ignored_parameters_are_torchs(front: Front) -> Any:
    torch.manual_seed(5)
    model = Net()
    model.head.weight.data.normal_()
    model.second, model.extra = nn.Linear(4, 5), nn.Linear(5, 5)
    model.second.weight = model.first.weight
    model.forward = lambda x: model.head(model.inner(model.extra(model.first(x) + model.second(x))))
    model.inner = front.wrap(model.inner.requires_grad_(False))
    model.head = front.wrap(model.head)
    wrapped = front.wrap(model, ignored_modules=[model.extra])
    params = list(wrapped.parameters())
    groups = [{"params": params[1:], "weight_decay": 0.3}, {"params": params[:1], "lr": torch.tensor(0.2)}]
    optim = torch.optim.AdamW(groups, lr=0.1)

    def average(step: int) -> None:
        for param in model.extra.parameters():
            dist.all_reduce(param.grad)

    front.train(wrapped, optim, shape=(3, 4), num_steps=2, before_step=average)
    return [normal(saved(front, wrapped, optim)), normal(saved(front, wrapped, optim, SHARDED))]


@as_torchs(4, exact=False, both_modes=True)
@pytest.mark.long
def test_no_shard_and_hybrid_are_torchs(front: Front) -> Any:
    results = []
    hybrid = {"sharding_strategy": HYBRID, "device_mesh": front.ctx.mesh_2d(2, 2)}
    for options in ({"sharding_strategy": NO_SHARD}, hybrid):
        model, optim = trained(front, num_steps=2, **options)
        states = [quiet(saved, front, model, optim, kind) for kind in (FULL, SHARDED)]
        results += states
        made = [loadable(front, model, optim, each) for each in (copy.deepcopy(states[0]), states[1])]
        other = wrapped_net(front, **options)
        for each in made:
            optim = adamw(other.parameters())
            optim.load_state_dict(each)
            results.append(saved(front, other, optim))
    return [normal(each) for each in results]


@with_ours(2, both_modes=True)
def test_a_frozen_wrapper_and_an_unused_parameter_have_no_states(front: Front) -> None:
    """Torch's class refuses original parameters without states, when others of their unit have some."""
    model = Net()
    model.unused = front.wrap(nn.Linear(2, 2))
    model.inner = front.wrap(model.inner.requires_grad_(False))
    model = front.wrap(model)
    optim = adamw(model.parameters())
    front.train(model, optim, shape=(3, 4), num_steps=1)
    found = saved(front, model, optim)
    assert sorted(found["state"]) == ["first.bias", "first.weight", "head.bias", "head.weight"]
    assert set(found["param_groups"][0]["params"]) >= {"inner.0.weight", "unused.weight"}
    optim.load_state_dict(loadable(front, model, optim, found))
    assert_same(normal(found), normal(saved(front, model, optim)))


@with_ours(2)
def test_states_are_gathered_in_one_launch_per_unit_and_only_empty_shards_may_lack_them(front: Front) -> None:
    """An optimizer may skip empty shards. The same collectives run on all ranks."""
    model, optim = trained(front, use_orig_params=True)
    with gathers_noted() as launches:
        expected = saved(front, model, optim)
    assert 0 < len(launches) <= 2 * 2  # units, states
    for param in [each for each in optim.state if not each.to_local().numel()]:
        del optim.state[param]
    assert_same(normal(expected), normal(saved(front, model, optim)))
    if front.ctx.rank == 0:
        del optim.state[next(iter(optim.state))]
    with pytest.raises(RuntimeError, match=r"ranks lack optimizer states.*'first.weight' \(ranks 0\)"):
        saved(front, model, optim)


@as_torchs(2)
def test_rekeying_is_torchs_and_plain_optimizers_load_and_save_for_us(front: Front) -> Any:
    torch.manual_seed(3)
    plain = Net()
    plain_optim = adamw(plain.parameters())
    plain(torch.ones(2, 4)).sum().backward()
    plain_optim.step()
    rekey = front.cls.rekey_optim_state_dict
    names = quiet(rekey, plain_optim.state_dict(), fsdp.OptimStateKeyType.PARAM_NAME, plain, optim=plain_optim)
    back = quiet(rekey, names, fsdp.OptimStateKeyType.PARAM_ID, plain, optim=plain_optim)
    by_input = quiet(rekey, names, fsdp.OptimStateKeyType.PARAM_ID, plain, list(plain.parameters()))
    assert rekey(names, fsdp.OptimStateKeyType.PARAM_NAME, plain) is names
    results = [names, back, by_input]
    for use_orig_params in (True, False):
        model = wrapped_net(front, use_orig_params=use_orig_params)
        optim = adamw(model.parameters())
        optim.load_state_dict(quiet(front.cls.shard_full_optim_state_dict, names, model, optim=optim))
        found = saved(front, model, optim)
        by_id = quiet(rekey, found, fsdp.OptimStateKeyType.PARAM_ID, plain, optim=plain_optim)
        results += [normal(found), by_id["state"]]
        plain_optim.load_state_dict(by_id)
        results.append(plain_optim.state_dict()["state"])
    model, optim = trained(front, OPTIMIZERS["SGD"], use_orig_params=True)
    given = optim.state_dict()
    given["state"]["mine"] = {"calls": 3}  # of no parameter: saved and loaded as it is
    found = quiet(front.cls.optim_state_dict, model, optim, given)
    results += [found["state"]["mine"], loadable(front, model, optim, found)["state"]["mine"]]
    return [dict(sorted(each.items(), key=lambda item: str(item[0]))) for each in results]


@with_ours(2)
def test_before_the_first_step_names_are_saved_and_rekeyed_all_the_same(front: Front) -> None:
    """Torch's class gives back numbers when there are no states."""
    plain, other = Net(), nn.Linear(1, 1)
    optim, other_optim = adamw(plain.parameters()), adamw(other.parameters())
    rekey, names = front.cls.rekey_optim_state_dict, sorted(name for name, _ in plain.named_parameters())
    found = rekey(optim.state_dict(), fsdp.OptimStateKeyType.PARAM_NAME, plain, optim=optim)
    assert found["param_groups"][0]["params"] == names
    with pytest.raises(ValueError, match=r"no parameters 'first.bias', 'first.weight'"):
        rekey(found, fsdp.OptimStateKeyType.PARAM_ID, other, optim=other_optim)
    mixed = {"state": {0: {}, "a": {}}, "param_groups": []}
    with pytest.raises(ValueError, match="all names or all numbers"):
        rekey(mixed, fsdp.OptimStateKeyType.PARAM_ID, plain)
    with pytest.raises(TypeError, match="rekey_optim_state_dict: expected an OptimStateKeyType, not 'names'"):
        rekey(found, "names", plain, optim=optim)
    model, optim = trained(front, OPTIMIZERS["SGD"], 0, use_orig_params=True)
    named = {**optim.state_dict()["param_groups"][0], "params": [name for name, _ in model.named_parameters()]}
    saved_ones = front.cls.optim_state_dict(model, optim, {"state": {}, "param_groups": [named]})
    assert saved_ones["state"] == {}
    assert sorted(saved_ones["param_groups"][0]["params"]) == names


@with_ours(2, both_modes=True)
def test_saved_values_are_copies_and_what_does_not_fit_raises_on_all_ranks_and_loads_nothing(front: Front) -> None:
    model, optim = trained(front)
    kept = [saved(front, model, optim, kind) for kind in (FULL, SHARDED)]
    copies = [copy.deepcopy(normal(each)) for each in kept]
    for each in kept:  # what was saved is a copy, and loading leaves it alone
        loadable(front, model, optim, each, load_directly=True)
        front.train(model, optim, shape=(3, 4), num_steps=2)
    assert_same(copies, [normal(each) for each in kept])
    good = saved(front, model, optim)
    before = normal(good)

    def fails(match: str, given: Any, *, with_optim: Any = None, everywhere: bool = True, error: Any = ValueError):
        given = given if everywhere or front.ctx.rank == 1 else good
        with pytest.raises(error, match=match):
            loadable(front, model, with_optim or optim, given, load_directly=True)
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
    malformed = {**good, "param_groups": [{}]}
    fails("^On rank 1: KeyError: 'params'", malformed, everywhere=False, error=RuntimeError)
    fails("the keys are numbers", optim.state_dict() | {"state": {0: {}}})
    fails("expected a dict with 'state'", {"model": 3})
    plain = Net()
    of_plain = adamw(plain.parameters())
    fails(r"parameter 0 of group 0 with shape \(5, 4\)", good, with_optim=of_plain)
    fails("the optimizer does not have", good, with_optim=adamw(list(model.parameters())[:1]))
    for of, match in ((model, "Pass the model whose parameters"), (plain, "no FullyShardedDataParallel")):
        with pytest.raises(ValueError, match=match):
            front.cls.optim_state_dict(of, of_plain)


@with_ours(2)
def test_sharded_states_of_one_rank_only_or_where_whole_ones_are_due_raise_on_all_ranks(front: Front) -> None:
    """Each is gathered when it is loaded."""
    model, optim = trained(front, use_orig_params=True)
    given = saved(front, model, optim, SHARDED)
    no_whole = r"with rank0_only, the first rank has whole states, but '.*' is sharded"
    with front.of_kind(model, FULL, *rank0_only()), pytest.raises(ValueError, match=no_whole):
        front.cls.optim_state_dict_to_load(model, optim, given)
    if front.ctx.rank == 1:
        del given["state"]["inner.0.weight"]
    unlike = r"ranks 0 and 1 have different sharded states of inner\.0\.weight"
    with front.of_kind(model, SHARDED), pytest.raises(ValueError, match=unlike):
        front.cls.optim_state_dict_to_load(model, optim, given)


@as_torchs(2, both_modes=True)
def test_each_rank_may_list_parameters_in_its_own_order(front: Front) -> Any:
    """What is gathered and fetched follows the model, which is the same on all ranks."""
    model = wrapped_net(front)

    def made() -> torch.optim.Optimizer:
        params = list(model.parameters())
        return adamw(params if front.ctx.rank == 0 else params[::-1])

    optim = made()
    front.train(model, optim, shape=(3, 4), num_steps=1)
    found = []
    for each in configs():
        given = saved(front, model, optim, *each)
        found.append(normal(given))
        if front.is_ours:  # torch's class gives one parameter's states to another here
            other = made()
            with front.of_kind(model, *each):
                other.load_state_dict(loadable(front, model, other, given))
            assert_same(normal(given), normal(saved(front, model, other, *each)))
    return found


@as_torchs(2, both_modes=True)
def test_states_of_parameters_outside_of_wrappers_may_be_added_by_the_user(front: Front) -> Any:
    """Such a parameter is not in the state dict, and its number is left out."""
    model, optim = trained(front)
    given = quiet(front.cls.full_optim_state_dict, model, optim, rank0_only=False)
    alone = nn.Module()
    alone.model, alone.extra = wrapped_net(front), nn.Parameter(torch.ones(3))
    given = {
        "state": {f"model.{name}": states for name, states in given["state"].items()},
        "param_groups": [
            {**each, "params": [f"model.{name}" for name in each["params"]]} for each in given["param_groups"]
        ],
    }
    other = adamw(alone.parameters())
    number = [param is alone.extra for param in other.param_groups[0]["params"]].index(True)
    made = quiet(front.cls.shard_full_optim_state_dict, given, alone, optim=other)
    numbers = made["param_groups"][0]["params"]
    assert number not in numbers
    made["state"][number] = {name: torch.ones(3) for name in ("exp_avg", "exp_avg_sq")} | {"step": torch.tensor(1.0)}
    made["param_groups"][0]["params"] = sorted([*numbers, number])
    other.load_state_dict(made)
    return [numbers, other.state[alone.extra]]
