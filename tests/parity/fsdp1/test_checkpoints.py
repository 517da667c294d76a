"""Checkpoints of models and optimizers travel: to and from torch's class, plain ones, ``fully_shard``, other ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecision

import fsdp2
import fsdp2.fsdp1
from tests.harness.distributed import RankContext, distributed
from tests.harness.pool import shared_pool
from tests.harness.runtimes import quietly_installed
from tests.harness.selection import long
from tests.parity.fsdp1.fronts import Front, as_torchs, assert_same, ours, quiet, same, theirs, with_ours
from tests.parity.fsdp1.kinds import FULL, LOCAL, SHARDED, rank0_only
from tests.parity.fsdp1.test_optim_state_dicts import OPTIMIZERS, adamw, loadable, normal, saved, trained, wrapped_net
from tests.parity.fsdp1.test_state_dicts import Model, Scaled, described, refill, wrapped_model

WHOLE = StateDictOptions(full_state_dict=True)


def with_mesh(front: Front) -> nn.Module:
    return wrapped_model(front, use_orig_params=True, device_mesh=front.mesh())


# How a model is wrapped: by a class, with flat parameters, or with a device mesh and original ones; or by fully_shard.
WRAPPINGS: dict[str, Callable[[RankContext], nn.Module]] = {
    "torch's": lambda ctx: wrapped_model(theirs(ctx)),
    "torch's, original": lambda ctx: with_mesh(theirs(ctx)),
    "ours": lambda ctx: wrapped_model(ours(ctx)),
    "ours, original": lambda ctx: with_mesh(ours(ctx)),
    "torch's fully_shard": lambda ctx: fully_sharded(torch.distributed.fsdp.fully_shard, ctx.mesh_1d()),
    "our fully_shard": lambda ctx: fully_sharded(fsdp2.fully_shard, ctx.mesh_1d()),
}


def fully_sharded(fully_shard: Callable[..., Any], mesh: DeviceMesh) -> nn.Module:
    model = Model()
    fully_shard(model.blocks[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def made(ctx: RankContext, wrapping: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return WRAPPINGS[wrapping](ctx)


def of_kind(ctx: RankContext, model: nn.Module, kind: Any = SHARDED) -> AbstractContextManager[None]:
    """Inside the block, state dicts of ``model`` are of ``kind``; those of ``fully_shard`` always are sharded."""
    front = next((each for each in (theirs(ctx), ours(ctx)) if type(model) is each.cls), None)
    return nullcontext() if front is None else front.of_kind(model, kind)


def whole(model: nn.Module) -> dict[str, Tensor]:
    return dict(sorted(get_model_state_dict(model, options=WHOLE).items()))


def _save(ctx: RankContext, wrapping: str, path: Path) -> dict[str, Tensor]:
    model = made(ctx, wrapping, seed=1)
    with of_kind(ctx, model):
        dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    expected = whole(model)
    if ctx.rank == 0:
        torch.save(expected, path / "whole.pt")
    dist.barrier()
    return expected


def _load(ctx: RankContext, wrapping: str, path: Path) -> list[dict[str, Tensor]]:
    model = made(ctx, wrapping, seed=2)
    with of_kind(ctx, model):
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=path)
        model.load_state_dict(state["model"])
    of_shards = {name: value.clone() for name, value in whole(model).items()}
    refill(model)
    set_model_state_dict(model, torch.load(path / "whole.pt"), options=WHOLE)
    return [of_shards, whole(model)]


WAYS = {
    "to torch's class": ("ours", 2, "torch's", 2),
    "from torch's class to more ranks and DTensors": ("torch's, original", 2, "ours, original", 4),
    "from torch's class": ("torch's", 2, "ours", 2),
    "from torch's class to more ranks": ("torch's", 2, "ours", 4),
    "to torch's class on more ranks": ("ours", 2, "torch's", 4),
    "to fewer ranks": ("ours", 4, "ours", 2),
    "to DTensors": ("ours", 2, "ours, original", 2),
    "from DTensors": ("ours, original", 2, "ours", 4),
    "to torch's class with DTensors": ("ours, original", 4, "torch's, original", 2),
    "from torch's fully_shard": ("torch's fully_shard", 2, "ours", 4),
    "from our fully_shard": ("our fully_shard", 2, "ours, original", 4),
    "to our fully_shard": ("ours", 2, "our fully_shard", 4),
    "to torch's fully_shard": ("ours, original", 4, "torch's fully_shard", 2),
}


@pytest.mark.ci
@pytest.mark.parametrize("way", [*[*WAYS][:2], *long(*[*WAYS][2:])])
def test_files_are_loaded_elsewhere(way: str, tmp_path: Path) -> None:
    saver, savers, loader, loaders = WAYS[way]
    expected = shared_pool(savers).run(_save, wrapping=saver, path=tmp_path)[0]
    for found in shared_pool(loaders).run(_load, wrapping=loader, path=tmp_path):
        for state in found:
            assert_same(expected, state)


@pytest.mark.every_case
@pytest.mark.parametrize("loader", ["ours", "torch's"])
@distributed(2, 4)
def test_state_dicts_of_one_class_are_loaded_by_the_other(ctx: RankContext, loader: str, tmp_path: Path) -> None:
    """Entries themselves are what the other class takes; local ones out of a file of each rank, too."""
    saver, path = "torch's" if loader == "ours" else "ours", tmp_path / f"{ctx.rank}.pt"
    for kind, wrapping in ((FULL, ""), (SHARDED, ""), (LOCAL, ""), (SHARDED, ", original")):
        source, target = made(ctx, saver + wrapping, seed=1), made(ctx, loader + wrapping, seed=2)
        with of_kind(ctx, source, kind), of_kind(ctx, target, kind):
            assert target.load_state_dict(source.state_dict()) == ([], [])
        assert_same(whole(target), whole(source))
        if kind is LOCAL:
            target = made(ctx, loader, seed=3)
            with of_kind(ctx, source, kind), of_kind(ctx, target, kind):
                torch.save(source.state_dict(), path)
                target.load_state_dict(torch.load(path, weights_only=False))
            assert_same(whole(target), whole(source))


@pytest.mark.parametrize("wrapping", ["ours", "ours, original"])
@distributed(2)
def test_torchs_checkpoint_functions_take_our_class(ctx: RankContext, wrapping: str) -> None:
    """They look for torch's class only. So they get what ``state_dict_type`` says: full values, or sharded ones."""
    model, other = made(ctx, wrapping, seed=1), made(ctx, wrapping, seed=2)
    expected = whole(model)
    assert_same(get_model_state_dict(model), dict(model.state_dict()))
    with of_kind(ctx, model), of_kind(ctx, other):
        state = get_model_state_dict(model)
        assert type(state["head.weight"]).__name__ == ("DTensor" if "original" in wrapping else "ShardedTensor")
        set_model_state_dict(other, state)
        assert_same(whole(other), expected)
        refill(other)
        on_rank_0 = expected if ctx.rank == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(other, dict(on_rank_0), options=options)
    assert_same(whole(other), expected)
    on_host = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert_same(dict(sorted(on_host.items())), expected if ctx.rank == 0 else {})


@pytest.mark.parametrize("has_mesh", [False, True])
@distributed(2)
def test_installed_class_is_torchs_for_its_checkpoint_functions(ctx: RankContext, has_mesh: bool) -> None:
    def scenario(front: Front) -> list[Any]:
        options = {"use_orig_params": True, "device_mesh": ctx.mesh_1d()} if has_mesh else {}
        model, other = wrapped_model(front, **options), wrapped_model(front, **options)
        result = []
        with quietly_installed() if front.is_ours else nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for each in (StateDictOptions(), WHOLE):
                state = get_model_state_dict(model, options=each)
                result.append(described(state))
                refill(other)
                set_model_state_dict(other, state, options=each)
                result.append(described(get_model_state_dict(other, options=each)))
        return [dict(sorted(each.items())) for each in result]

    same(ctx, scenario)


@with_ours(2)
def test_a_module_named_like_an_attribute_of_the_wrapper_keeps_its_name_in_torchs_functions(front: Front) -> None:
    inner = nn.ModuleDict({"rank": nn.Linear(2, 2)})
    inner.module = nn.Linear(2, 2)
    model = front.wrap(inner)
    state = {name: value + 1 for name, value in get_model_state_dict(model).items()}
    assert sorted(state) == ["module.bias", "module.weight", "rank.bias", "rank.weight"]
    set_model_state_dict(model, state)
    assert_same(dict(model.state_dict()), state)


@pytest.mark.parametrize("wrapping", ["ours", "ours, original"])
@distributed(2)
def test_safetensors_are_saved_and_loaded_from_shards(ctx: RankContext, wrapping: str, tmp_path: Path) -> None:
    """Our tools read the shards, whatever kind of state dicts is set."""
    model, other = made(ctx, wrapping, seed=1), made(ctx, wrapping, seed=2)
    with of_kind(ctx, model):
        fsdp2.checkpoint.save_safetensors(model, tmp_path)
    fsdp2.checkpoint.load_safetensors(other, tmp_path)
    assert_same(whole(other), whole(model))


@distributed(2)
def test_a_copy_loads_into_itself(ctx: RankContext) -> None:
    model = made(ctx, "ours", seed=1)
    expected = whole(model)
    copied = copy.deepcopy(model)
    state = {name: value + 1 for name, value in copied.state_dict().items()}
    copied.load_state_dict(state)
    assert_same(whole(model), expected)
    assert_same(dict(copied.state_dict()), state)


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


@with_ours(2, both_modes=True)
def test_states_that_are_nan_are_loaded(front: Front) -> None:
    """Also counts, which parameters of one flat parameter share."""
    model, optim = trained(front, OPTIMIZERS["AdamW"])
    for states in optim.state.values():
        for value in states.values():
            value.fill_(float("nan"))
    loadable(front, model, optim, saved(front, model, optim), load_directly=True)
    assert all(states["step"].isnan() for states in optim.state.values())


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
    """Installed only: names of parameters contain those of wrappers, as with torch's class, and they would be saved."""
    with pytest.raises(RuntimeError, match=r"Call fsdp2\.install\(\)"):
        get_optimizer_state_dict(*trained(front, use_orig_params=True))
    with quietly_installed():
        model, optim = trained(front, OPTIMIZERS["AdamW"], 2, use_orig_params=True)
        expected = normal(saved(front, model, optim))
        for options in (WHOLE, StateDictOptions()):
            found = quiet(get_optimizer_state_dict, model, optim, options=options)
            if options.full_state_dict:
                states = {name: dict(sorted(each.items())) for name, each in sorted(found["state"].items())}
                assert_same(expected["state"], states)
            for by_tools in (True, False):
                fresh, other = like(front, use_orig_params=True)
                if by_tools:
                    quiet(set_optimizer_state_dict, fresh, other, found, options=options)
                else:
                    loaded(front, fresh, other, found)
                assert_same(expected, normal(saved(front, fresh, other)))


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


def _save_states(ctx: RankContext, path: Path) -> None:
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


def _load_states(ctx: RankContext, path: Path) -> None:
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


@pytest.mark.in_turns
@pytest.mark.long
def test_states_of_two_ranks_load_on_four(tmp_path: Path) -> None:
    shared_pool(2).run(_save_states, path=tmp_path)
    shared_pool(4).run(_load_states, path=tmp_path)
