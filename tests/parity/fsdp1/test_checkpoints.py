"""Checkpoints of the model travel: between torch's class and ours, to and from ``fully_shard``, to other ranks."""

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
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
import fsdp2.fsdp1
from tests.harness.distributed import RankContext, distributed
from tests.harness.pool import shared_pool
from tests.harness.runtimes import quietly_installed
from tests.parity.fsdp1.fronts import FULL, LOCAL, SHARDED, Front, assert_same, ours, same, theirs, with_ours
from tests.parity.fsdp1.test_state_dicts import Model, described, refill, wrapped_model

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
}
MORE_WAYS = {
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
@pytest.mark.parametrize(
    ("saver", "savers", "loader", "loaders"),
    [*WAYS.values(), *(pytest.param(*way, marks=pytest.mark.long) for way in MORE_WAYS.values())],
    ids=[*WAYS, *MORE_WAYS],
)
def test_files_are_loaded_elsewhere(saver: str, savers: int, loader: str, loaders: int, tmp_path: Path) -> None:
    expected = shared_pool(savers).run(_save, wrapping=saver, path=tmp_path)[0]
    for found in shared_pool(loaders).run(_load, wrapping=loader, path=tmp_path):
        for state in found:
            assert_same(expected, state)


@pytest.mark.parametrize("loader", ["ours", "torch's"])
@distributed(2, 4)
def test_state_dicts_of_one_class_are_loaded_by_the_other(ctx: RankContext, loader: str) -> None:
    """Without files in between: entries themselves are what the other class takes."""
    saver = "torch's" if loader == "ours" else "ours"
    for kind, wrapping in ((FULL, ""), (SHARDED, ""), (LOCAL, ""), (SHARDED, ", original")):
        source, target = made(ctx, saver + wrapping, seed=1), made(ctx, loader + wrapping, seed=2)
        with of_kind(ctx, source, kind), of_kind(ctx, target, kind):
            assert target.load_state_dict(source.state_dict()) == ([], [])
        assert_same(whole(target), whole(source))


@pytest.mark.every_case
@pytest.mark.parametrize("saver", ["ours", "torch's"])
@distributed(2)
def test_local_values_survive_a_file_of_each_rank(ctx: RankContext, saver: str, tmp_path: Path) -> None:
    path = tmp_path / f"{ctx.rank}.pt"
    source, target = made(ctx, saver, seed=1), made(ctx, "torch's" if saver == "ours" else "ours", seed=2)
    with of_kind(ctx, source, LOCAL), of_kind(ctx, target, LOCAL):
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
        fsdp2.save_safetensors(model, tmp_path)
    fsdp2.load_safetensors(other, tmp_path)
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
