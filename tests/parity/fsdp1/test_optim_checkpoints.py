"""Checkpoints of optimizers travel: between torch's class and ours, to and from plain ones, and to other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.tensor import DTensor

from tests.harness.distributed import RankContext, distributed
from tests.harness.pool import shared_pool
from tests.harness.runtimes import quietly_installed
from tests.harness.selection import long
from tests.parity.fsdp1.fronts import FULL, LOCAL, SHARDED, Front, as_torchs, assert_same, ours, theirs, with_ours
from tests.parity.fsdp1.test_optim_state_dicts import (
    OPTIMIZERS,
    adamw,
    loadable,
    normal,
    quiet,
    rank0_only,
    saved,
    trained,
    wrapped_net,
)
from tests.parity.fsdp1.test_state_dicts import Scaled, described

WHOLE = StateDictOptions(full_state_dict=True)


def fronts(ctx: RankContext) -> dict[str, Front]:
    return {"torch's": theirs(ctx), "ours": ours(ctx)}


def loaded(front: Front, model: nn.Module, optim: Any, given: Any, kind: Any = FULL, *configs: Any) -> None:
    with front.of_kind(model, kind, *configs):
        optim.load_state_dict(loadable(front, model, optim, given))


def like(front: Front, make: Any = OPTIMIZERS["AdamW"], **options: Any) -> tuple[Any, Any]:
    """A new model and its optimizer, with another learning rate."""
    model, optim = trained(front, make, 0, **options)
    optim.param_groups[0]["lr"] = 0.3
    return model, optim


def resumed(front: Front, weights: Any, given: Any, kind: Any, optimizer: str, **options: Any) -> Any:
    """The losses and states after two more steps of a new model, with what was loaded."""
    model, optim = like(front, OPTIMIZERS[optimizer], **options)
    with front.of_kind(model, FULL):
        quiet(model.load_state_dict, weights)
    loaded(front, model, optim, given, kind)
    return front.train(model, optim, shape=(3, 4), num_steps=range(2, 4)), normal(saved(front, model, optim))


@pytest.mark.parametrize("optimizer", long("AdamW", "SGD"))
@distributed(2)
def test_training_resumes_bit_for_bit_in_each_mode_from_each_mode_and_class(ctx: RankContext, optimizer: str) -> None:
    ways = [(name, front, orig) for name, front in fronts(ctx).items() for orig in (True, False)]
    for name, front, saved_orig in ways:
        model, optim = trained(front, OPTIMIZERS[optimizer], 2, use_orig_params=saved_orig)
        with front.of_kind(model, FULL):
            weights = {key: value.clone() for key, value in quiet(model.state_dict).items()}
        given = [(FULL, saved(front, model, optim)), (SHARDED, saved(front, model, optim, SHARDED))]
        losses = front.train(model, optim, shape=(3, 4), num_steps=range(2, 4))
        states = normal(saved(front, model, optim))["state"]
        for loads, other, loaded_orig in ways:
            for kind, each in given if "ours" in (name, loads) else ():
                fresh = _with_values(each)
                found = resumed(other, weights, fresh, kind, optimizer, use_orig_params=loaded_orig)
                where = f"{name} {saved_orig}, {loads} {loaded_orig}, {kind}"
                assert_same(losses, found[0], where)
                assert_same(states, found[1]["state"], where)


def _with_values(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A copy to load from: torch's class loads counts without a copy, and later steps change them."""
    state = {
        key: {name: value.clone() if type(value) is torch.Tensor else value for name, value in states.items()}
        for key, states in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


@with_ours(2, 4, both_modes=True)
def test_the_first_rank_alone_has_the_states(front: Front) -> None:
    model, optim = trained(front, OPTIMIZERS["AdamW"], 2)
    expected = saved(front, model, optim)
    for tensors in (True, False):
        given = saved(front, model, optim, FULL, *rank0_only())
        assert bool(given) == (front.ctx.rank == 0)
        if given:
            given["state"]["mine"] = {"seen": torch.arange(3)}
        fresh, other = like(front)
        if tensors:
            loaded(front, fresh, other, given, FULL, *rank0_only())
        else:
            scatter = front.cls.scatter_full_optim_state_dict
            other.load_state_dict(scatter(given if front.ctx.rank == 0 else None, fresh, optim=other))
        assert torch.equal(other.state.pop("mine")["seen"], torch.arange(3))
        assert_same(normal(expected), normal(saved(front, fresh, other)))
        with front.of_kind(fresh, FULL, *rank0_only()), pytest.raises(ValueError, match="expected a dict with 'state'"):
            front.cls.optim_state_dict_to_load(fresh, other, {})


@pytest.mark.every_case
@with_ours(2, both_modes=True)
def test_sharded_states_flatten_and_named_keys(front: Front) -> None:
    model, optim = trained(front, OPTIMIZERS["AdamW"], 2)
    expected = normal(saved(front, model, optim))
    found = front.cls.sharded_optim_state_dict(model, optim)
    optim.load_state_dict(front.cls.flatten_sharded_optim_state_dict(found, model, optim))
    assert_same(expected, normal(saved(front, model, optim)))
    named = front.cls.optim_state_dict_to_load(model, optim, found, is_named_optimizer=True)
    names = [name for name, _ in model.named_parameters()]
    assert named["param_groups"][0]["params"] == names
    assert set(named["state"]) == set(names)
    assert_same(expected, normal(front.cls.optim_state_dict(model, optim, named)))


@with_ours(2)
def test_groups_in_another_order_get_their_own_states(front: Front) -> None:
    """``Optimizer.load_state_dict`` goes by positions. Torch's class keeps the saved order, and mixes states up."""

    def made(model: nn.Module, **decays: float) -> torch.optim.Optimizer:
        groups = {end: [p for name, p in model.named_parameters() if name.endswith(end)] for end in decays}
        return torch.optim.AdamW([{"params": groups[end], "weight_decay": decay} for end, decay in decays.items()])

    model = wrapped_net(front, use_orig_params=True)
    optim = made(model, weight=0.1, bias=0.0)
    front.train(model, optim, shape=(3, 4), num_steps=2)
    expected = saved(front, model, optim)
    other = made(model, bias=0.5, weight=0.7)
    loadable(front, model, other, expected, load_directly=True)
    assert [group["weight_decay"] for group in other.param_groups] == [0.0, 0.1]
    assert_same(normal(expected)["state"], normal(saved(front, model, other))["state"])
    with pytest.raises(ValueError, match="group 0 of the optimizer has parameters of 2 saved groups"):
        loadable(front, model, adamw(model.parameters()), expected)


@with_ours(2)
def test_tools_of_torch_read_and_write_optimizers_over_original_parameters(front: Front) -> None:
    with quietly_installed():
        model, optim = trained(front, OPTIMIZERS["AdamW"], 2, use_orig_params=True)
        expected = normal(saved(front, model, optim))
        for options in (WHOLE, StateDictOptions()):
            found = quiet(get_optimizer_state_dict, model, optim, options=options)
            states = {
                name: {key: _whole(value) for key, value in sorted(states.items())}
                for name, states in sorted(found["state"].items())
            }
            if options.full_state_dict:
                assert_same(expected["state"], states)
            for by_tools in (True, False):
                fresh, other = like(front, use_orig_params=True)
                if by_tools:
                    quiet(set_optimizer_state_dict, fresh, other, found, options=options)
                else:
                    loaded(front, fresh, other, found)
                assert_same(expected, normal(saved(front, fresh, other)))


@with_ours(2)
def test_tools_of_torch_say_that_they_need_install(front: Front) -> None:
    """Names of parameters contain those of wrappers, as with torch's class. The tools would save these."""
    with pytest.raises(RuntimeError, match=r"Call fsdp2\.install\(\)"):
        get_optimizer_state_dict(*trained(front, use_orig_params=True))


@pytest.mark.every_case
@with_ours(2, both_modes=True)
def test_tools_of_torch_take_wrappers_in_checkpoint_wrappers(front: Front) -> None:
    """They go through flat ones by the name of the flat parameter, and cannot load what they have read."""
    with quietly_installed():
        model = front.wrap(nn.Sequential(checkpoint_wrapper(front.wrap(nn.Linear(4, 4))), nn.Linear(4, 2)))
        if not front.use_orig_params:
            assert_same(dict(model.state_dict()), dict(quiet(get_model_state_dict, model, options=WHOLE)))
            return
        optim = adamw(model.parameters())
        front.train(model, optim, shape=(3, 4), num_steps=1)
        found = quiet(get_optimizer_state_dict, model, optim, options=WHOLE)
        quiet(set_optimizer_state_dict, model, optim, found, options=WHOLE)
    assert sorted(found["state"]) == ["0.bias", "0.weight", "1.bias", "1.weight"]


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.parametrize("order", ["inside", "outside", "after"])
@as_torchs(2, both_modes=True)
def test_checkpoint_wrappers_leave_no_names_in_state_dicts(front: Front, order: str) -> Any:
    """Neither in state dicts of optimizers and of the model, nor where buffers and flat parameters are looked up."""
    options = {"mixed_precision": MixedPrecision(buffer_dtype=torch.float64)}

    def made(order: str) -> Any:
        layer: nn.Module = Scaled(4, 4)
        layer = front.wrap(checkpoint_wrapper(layer) if order == "inside" else layer, **options)
        layer = checkpoint_wrapper(layer) if order == "outside" else layer
        model = front.wrap(nn.Sequential(layer, nn.Linear(4, 2)), **options)
        if order == "after":
            apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Scaled))
        return model

    model, plain = made(order), made("without")
    optim, other_optim = adamw(model.parameters()), adamw(plain.parameters())
    front.train(model, optim, shape=(3, 4), num_steps=1)
    states = saved(front, model, optim)
    for kind in (FULL,) if front.use_orig_params else (FULL, LOCAL):  # torch's loads no local ones of original ones
        other = made(order)
        with front.of_kind(model, kind), front.of_kind(other, kind):
            other.load_state_dict(model.state_dict())
            assert_same(described(other.state_dict()), described(model.state_dict()))
    loaded(front, plain, other_optim, states)
    assert_same(normal(states), normal(saved(front, plain, other_optim)))
    return normal(states), dict(sorted(described(model.state_dict()).items()))


# Other numbers of ranks


def _save(ctx: RankContext, path: Path) -> None:
    """With two ranks: full states in a file, sharded ones by DCP, in each way to wrap."""
    for name, front in fronts(ctx).items():
        for mesh in (None, ctx.mesh_1d()):
            for orig in (True, False):
                model, optim = trained(front, OPTIMIZERS["AdamW"], 2, use_orig_params=orig, device_mesh=mesh)
                where = path / f"{name} {mesh is None} {orig}"
                full = saved(front, model, optim)
                if ctx.rank == 0:
                    where.mkdir(parents=True)
                    torch.save(full, where / "full.pt")
                torch.distributed.barrier()
                quiet(dcp.save, {"optim": saved(front, model, optim, SHARDED)}, checkpoint_id=where / "dcp")


def _load(ctx: RankContext, path: Path) -> None:
    front = ours(ctx)
    for where in sorted(path.iterdir()):
        full = torch.load(where / "full.pt", weights_only=False)
        mesh = None if where.name.split(" ")[-2] == "True" else ctx.mesh_1d()
        for orig in (True, False):
            model, optim = like(front, use_orig_params=orig, device_mesh=mesh)
            loaded(front, model, optim, full)
            assert_same(normal(full)["state"], normal(saved(front, model, optim))["state"], where.name)
            assert optim.param_groups[0]["lr"] == 0.1
            model, optim = like(front, use_orig_params=orig, device_mesh=mesh)
            front.train(model, optim, shape=(3, 4), num_steps=1)
            target = saved(front, model, optim, SHARDED)
            # DCP fails if there are groups and ShardedTensors of which a rank has no part
            groups = {"param_groups": target.pop("param_groups")} if mesh is None else {}
            quiet(dcp.load, {"optim": target}, checkpoint_id=where / "dcp")
            loaded(front, model, optim, target | groups, SHARDED)
            assert_same(normal(full)["state"], normal(saved(front, model, optim))["state"], where.name)
            assert optim.param_groups[0]["lr"] == (0.3 if mesh is None else 0.1)


@pytest.mark.long
def test_states_of_two_ranks_load_on_four(tmp_path: Path) -> None:
    shared_pool(2).run(_save, path=tmp_path)
    shared_pool(4).run(_load, path=tmp_path)
