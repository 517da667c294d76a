"""Checkpoints of optimizers travel: between torch's class and ours, to and from plain ones, and to other ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
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
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, MixedPrecision, OptimStateKeyType

import fsdp2
from tests.harness.distributed import RankContext, distributed
from tests.harness.pool import shared_pool
from tests.harness.selection import long
from tests.parity.fsdp1.fronts import Front, assert_same, batch, same
from tests.parity.fsdp1.test_optim_state_dicts import OPTIMIZERS, Net, normal, ours, quiet, saved, steps, wrapped_net
from tests.parity.fsdp1.test_state_dicts import FULL, LOCAL, SHARDED, described, of_kind

RANK0_ONLY = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)


@contextmanager
def quietly_installed() -> Iterator[None]:
    """Modules of the tests hold torch's names, which a warning says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with fsdp2.installed():
            yield


def fronts(ctx: RankContext) -> dict[str, Front]:
    return {"torch's": Front(ctx, torch.distributed.fsdp), "ours": ours(ctx)}


def loaded(front: Front, model: nn.Module, optim: Any, given: Any, kind: Any = FULL, *configs: Any) -> None:
    with of_kind(front, model, kind, *configs):
        optim.load_state_dict(quiet(front.cls.optim_state_dict_to_load, model, optim, given))


def trained(ctx: RankContext, front: Front, optimizer: str = "AdamW", **options: Any) -> tuple[Any, Any]:
    model = wrapped_net(front, **options)
    optim = OPTIMIZERS[optimizer](model.parameters())
    steps(ctx, model, optim, range(2))
    return model, optim


def resumed(ctx: RankContext, front: Front, weights: Any, given: Any, kind: Any, optimizer: str, **options: Any) -> Any:
    """The losses and states after two more steps of a new model, with what was loaded."""
    model = wrapped_net(front, **options)
    with of_kind(front, model, FULL):
        quiet(model.load_state_dict, weights)
    optim = OPTIMIZERS[optimizer](model.parameters())
    loaded(front, model, optim, given, kind)
    losses = steps(ctx, model, optim, range(2, 4))
    return losses, normal(saved(front, model, optim))


@pytest.mark.parametrize("optimizer", long("AdamW", "SGD"))
@distributed(2)
def test_training_resumes_bit_for_bit_in_each_mode_from_each_mode_and_class(ctx: RankContext, optimizer: str) -> None:
    for name, front in fronts(ctx).items():
        for saved_orig in (True, False):
            model, optim = trained(ctx, front, optimizer, use_orig_params=saved_orig)
            with of_kind(front, model, FULL):
                weights = {key: value.clone() for key, value in quiet(model.state_dict).items()}
            given = [(FULL, saved(front, model, optim)), (SHARDED, saved(front, model, optim, SHARDED))]
            expected = steps(ctx, model, optim, range(2, 4)), normal(saved(front, model, optim))
            for loads, other in fronts(ctx).items():
                if "ours" not in (name, loads):
                    continue
                for loaded_orig in (True, False):
                    for kind, each in given:
                        fresh = _with_values(each)
                        found = resumed(ctx, other, weights, fresh, kind, optimizer, use_orig_params=loaded_orig)
                        where = f"{name} {saved_orig}, {loads} {loaded_orig}, {kind}"
                        assert_same(expected[0], found[0], where)
                        assert_same(expected[1]["state"], found[1]["state"], where)


def _with_values(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A copy to load from: torch's class loads counts without a copy, and later steps change them."""
    state = {
        key: {name: value.clone() if type(value) is torch.Tensor else value for name, value in states.items()}
        for key, states in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(2, 4)
def test_the_first_rank_alone_has_the_states(ctx: RankContext, use_orig_params: bool) -> None:
    front = ours(ctx)
    model, optim = trained(ctx, front, use_orig_params=use_orig_params)
    expected = saved(front, model, optim)
    for tensors in (True, False):
        given = saved(front, model, optim, FULL, *RANK0_ONLY)
        assert bool(given) == (ctx.rank == 0)
        if given:
            given["state"]["mine"] = {"seen": torch.arange(3)}
        fresh = wrapped_net(front, use_orig_params=use_orig_params)
        other = torch.optim.AdamW(fresh.parameters(), lr=0.3, amsgrad=True)
        if tensors:
            loaded(front, fresh, other, given, FULL, *RANK0_ONLY)
        else:
            scatter = front.cls.scatter_full_optim_state_dict
            other.load_state_dict(scatter(given if ctx.rank == 0 else None, fresh, optim=other))
        assert torch.equal(other.state.pop("mine")["seen"], torch.arange(3))
        assert_same(normal(expected), normal(saved(front, fresh, other)))
        with of_kind(front, fresh, FULL, *RANK0_ONLY), pytest.raises(ValueError, match="expected a dict with 'state'"):
            front.cls.optim_state_dict_to_load(fresh, other, {})


@distributed(2)
def test_sharded_states_flatten_and_named_keys(ctx: RankContext) -> None:
    front = ours(ctx)
    for use_orig_params in (True, False):
        model, optim = trained(ctx, front, use_orig_params=use_orig_params)
        expected = normal(saved(front, model, optim))
        found = front.cls.sharded_optim_state_dict(model, optim)
        optim.load_state_dict(front.cls.flatten_sharded_optim_state_dict(found, model, optim))
        assert_same(expected, normal(saved(front, model, optim)))
        named = front.cls.optim_state_dict_to_load(model, optim, found, is_named_optimizer=True)
        names = [name for name, _ in model.named_parameters()]
        assert named["param_groups"][0]["params"] == names
        assert set(named["state"]) == set(names)
        assert_same(expected, normal(front.cls.optim_state_dict(model, optim, named)))


@distributed(2)
def test_groups_in_another_order_get_their_own_states(ctx: RankContext) -> None:
    """``Optimizer.load_state_dict`` goes by positions. Torch's class keeps the saved order, and mixes states up."""
    front = ours(ctx)
    model = wrapped_net(front, use_orig_params=True)

    def made(model: nn.Module, names: tuple[str, str], decays: tuple[float, float]) -> torch.optim.Optimizer:
        groups = [[p for name, p in model.named_parameters() if name.endswith(end)] for end in names]
        return torch.optim.AdamW(
            [{"params": group, "weight_decay": decay} for group, decay in zip(groups, decays, strict=True)]
        )

    optim = made(model, ("weight", "bias"), (0.1, 0.0))
    steps(ctx, model, optim, range(2))
    expected = saved(front, model, optim)
    other = made(model, ("bias", "weight"), (0.5, 0.7))
    front.cls.optim_state_dict_to_load(model, other, expected, load_directly=True)
    assert [group["weight_decay"] for group in other.param_groups] == [0.0, 0.1]
    assert_same(normal(expected)["state"], normal(saved(front, model, other))["state"])
    joint = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="group 0 of the optimizer has parameters of 2 saved groups"):
        front.cls.optim_state_dict_to_load(model, joint, expected)


@distributed(2)
def test_plain_optimizers_take_our_states_and_give_theirs(ctx: RankContext) -> None:
    front = ours(ctx)
    model, optim = trained(ctx, front)
    torch.manual_seed(3)
    plain = Net()
    other = torch.optim.AdamW(plain.parameters(), lr=0.1, amsgrad=True)
    found = saved(front, model, optim)
    rekey = front.cls.rekey_optim_state_dict
    other.load_state_dict(rekey(found, OptimStateKeyType.PARAM_ID, plain, optim=other))
    names = rekey(other.state_dict(), OptimStateKeyType.PARAM_NAME, plain, optim=other)
    assert_same(normal(found)["state"], normal(names)["state"])


@distributed(2)
def test_tools_of_torch_read_and_write_optimizers_over_original_parameters(ctx: RankContext) -> None:
    front = ours(ctx)
    with quietly_installed():
        model, optim = trained(ctx, front, use_orig_params=True)
        expected = saved(front, model, optim)
        for options in (StateDictOptions(full_state_dict=True), StateDictOptions()):
            found = quiet(get_optimizer_state_dict, model, optim, options=options)
            states = {
                name: {key: _whole(value) for key, value in sorted(states.items())}
                for name, states in sorted(found["state"].items())
            }
            if options.full_state_dict:
                assert_same(normal(expected)["state"], states)
            fresh = wrapped_net(front, use_orig_params=True)
            other = torch.optim.AdamW(fresh.parameters(), lr=0.3, amsgrad=True)
            quiet(set_optimizer_state_dict, fresh, other, found, options=options)
            assert_same(normal(expected), normal(saved(front, fresh, other)))
            other = torch.optim.AdamW(fresh.parameters(), lr=0.3, amsgrad=True)
            loaded(front, fresh, other, found)
            assert_same(normal(expected), normal(saved(front, fresh, other)))


@distributed(2)
def test_tools_of_torch_say_that_they_need_install(ctx: RankContext) -> None:
    """Names of parameters contain those of wrappers, as with torch's class. The tools would save these."""
    model, optim = trained(ctx, ours(ctx), use_orig_params=True)
    with pytest.raises(RuntimeError, match=r"Call fsdp2\.install\(\)"):
        get_optimizer_state_dict(model, optim)


@distributed(2)
def test_tools_of_torch_take_wrappers_in_checkpoint_wrappers(ctx: RankContext) -> None:
    front = ours(ctx)
    with quietly_installed():
        layer = checkpoint_wrapper(front.wrap(nn.Linear(4, 4), use_orig_params=True))
        model = front.wrap(nn.Sequential(layer, nn.Linear(4, 2)), use_orig_params=True)
        optim = torch.optim.AdamW(model.parameters())
        model(batch(ctx, 3, 4)).square().mean().backward()
        optim.step()
        options = StateDictOptions(full_state_dict=True)
        found = quiet(get_optimizer_state_dict, model, optim, options=options)
        quiet(set_optimizer_state_dict, model, optim, found, options=options)
    assert sorted(found["state"]) == ["0.bias", "0.weight", "1.bias", "1.weight"]


@distributed(2)
def test_tools_of_torch_read_models_with_flat_wrappers_in_checkpoint_wrappers(ctx: RankContext) -> None:
    """They go through the wrapped module by the name of its flat parameter, and cannot load what they have read."""
    front = ours(ctx)
    with quietly_installed():
        layer = checkpoint_wrapper(front.wrap(nn.Linear(4, 4)))
        model = front.wrap(nn.Sequential(layer, nn.Linear(4, 2)))
        found = quiet(get_model_state_dict, model, options=StateDictOptions(full_state_dict=True))
        assert_same(dict(model.state_dict()), dict(found))


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, torch.distributed.tensor.DTensor) else value


class Buffered(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("scale", torch.ones(4))


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("order", ["inside", "outside", "after"])
@distributed(2)
def test_checkpoint_wrappers_leave_no_names_in_state_dicts(ctx: RankContext, order: str, use_orig_params: bool) -> None:
    """Neither in state dicts of optimizers and of the model, nor where buffers and flat parameters are looked up."""

    def made(front: Front, order: str = order) -> Any:
        precision = MixedPrecision(buffer_dtype=torch.float64)
        options = {"use_orig_params": use_orig_params, "mixed_precision": precision}
        layer = Buffered()
        if order == "inside":
            layer = front.wrap(checkpoint_wrapper(layer), **options)
        elif order == "outside":
            layer = checkpoint_wrapper(front.wrap(layer, **options))
        else:
            layer = front.wrap(layer, **options)
        model = front.wrap(nn.Sequential(layer, nn.Linear(4, 2)), **options)
        if order == "after":
            apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Buffered))
        return model

    def scenario(front: Front) -> Any:
        model = made(front)
        optim = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(batch(ctx, 3, 4)).square().mean().backward()
        optim.step()
        states = saved(front, model, optim)
        kinds = (FULL,) if use_orig_params else (FULL, LOCAL)  # torch's does not load local ones of original parameters
        for kind in kinds:
            other = made(front)
            with of_kind(front, model, kind), of_kind(front, other, kind):
                other.load_state_dict(model.state_dict())
                assert_same(described(other.state_dict()), described(model.state_dict()))
        plain = made(front, "without")
        adamw = torch.optim.AdamW(plain.parameters(), lr=0.1)
        loaded(front, plain, adamw, states)
        assert_same(normal(states), normal(saved(front, plain, adamw)))
        return normal(states), dict(sorted(described(model.state_dict()).items()))

    same(ctx, scenario)


# Other numbers of ranks


def _save(ctx: RankContext, path: Path) -> None:
    """With two ranks: full states in a file, sharded ones by DCP, in each way to wrap."""
    for name, front in fronts(ctx).items():
        for mesh in (None, ctx.mesh_1d()):
            for orig in (True, False):
                model, optim = trained(ctx, front, use_orig_params=orig, device_mesh=mesh)
                where = path / f"{name} {mesh is None} {orig}"
                if ctx.rank == 0:
                    where.mkdir(parents=True)
                torch.distributed.barrier()
                full = saved(front, model, optim)
                if ctx.rank == 0:
                    torch.save(full, where / "full.pt")
                quiet(dcp.save, {"optim": saved(front, model, optim, SHARDED)}, checkpoint_id=where / "dcp")


def _load(ctx: RankContext, path: Path) -> None:
    front = ours(ctx)
    for where in sorted(path.iterdir()):
        full = torch.load(where / "full.pt", weights_only=False)
        _, has_no_mesh, _ = where.name.rsplit(" ", 2)
        for orig in (True, False):
            mesh = None if has_no_mesh == "True" else ctx.mesh_1d()
            model = wrapped_net(front, use_orig_params=orig, device_mesh=mesh)
            optim = torch.optim.AdamW(model.parameters(), lr=0.3, amsgrad=True)
            loaded(front, model, optim, full)
            assert_same(normal(full)["state"], normal(saved(front, model, optim))["state"], where.name)
            assert optim.param_groups[0]["lr"] == 0.1
            model = wrapped_net(front, use_orig_params=orig, device_mesh=mesh)
            optim = torch.optim.AdamW(model.parameters(), lr=0.3, amsgrad=True)
            steps(ctx, model, optim, range(1))
            target = saved(front, model, optim, SHARDED)
            if mesh is None:  # DCP fails if there are groups and ShardedTensors of which a rank has no part
                groups = target.pop("param_groups")
                quiet(dcp.load, {"optim": target}, checkpoint_id=where / "dcp")
                target["param_groups"] = groups
            else:
                quiet(dcp.load, {"optim": target}, checkpoint_id=where / "dcp")
            loaded(front, model, optim, target, SHARDED)
            assert_same(normal(full)["state"], normal(saved(front, model, optim))["state"], where.name)
            assert optim.param_groups[0]["lr"] == (0.3 if mesh is None else 0.1)


@pytest.mark.long
def test_states_of_two_ranks_load_on_four(tmp_path: Path) -> None:
    shared_pool(2).run(_save, path=tmp_path)
    shared_pool(4).run(_load, path=tmp_path)
