"""State: what is saved and loaded has torch's keys, layouts and values, and goes to other meshes and ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.harness.compare import Cases, as_torchs, compare_values, each_compared
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, Buffers, ParityModel, SharedModules, Transformer, Uneven, frozen
from tests.harness.offload import shard_offloaded
from tests.harness.pool import shared_pool
from tests.harness.runtimes import Runtime, oracle, subject
from tests.harness.selection import long
from tests.harness.training import Case, Step, dtensor_adamw, one_backward, shard_units_and_root
from tests.parity.setups import (
    SETUPS,
    Setup,
    cut_like,
    evaluate,
    load_states,
    recorded,
    setups,
    states_of,
    train_steps,
    whole,
)

tied = partial(Transformer, tied=True)


@pytest.mark.parametrize("build", [MLP, Uneven, tied, SharedModules, Buffers, frozen(MLP, "blocks.1", "entry.bias")])
@as_torchs(2, 4)
def test_state_dict_has_the_keys_layouts_and_values_of_torch(ctx: RankContext, runtime: Runtime, build) -> Any:
    """Also that of a unit, and after a forward."""
    model = Setup(build).sharded(runtime, ctx)
    records = [recorded(each.state_dict()) for each in (model, model.units()[1])]
    for guard in (torch.no_grad, torch.enable_grad):
        with guard():
            Step(0, ctx.rank, runtime).loss(model)
        records.append(recorded(model.state_dict()))
    return records


def _loaded(runtime: Runtime, model: Any, mesh: Any, after: str, assign: bool, shard: Any) -> None:
    """With what a model of another seed would have, cut as ``model`` is."""
    shard(runtime, model, mesh)
    step = Step(9, torch.distributed.get_rank(), runtime)
    if after == "backward":
        one_backward(step, model)
        model.zero_grad()
    elif after == "evaluation":
        with torch.no_grad():
            step.loss(model)
    generator = torch.Generator().manual_seed(77)
    state = {name: torch.randn(value.shape, generator=generator) * 0.2 for name, value in model.state_dict().items()}
    state = {name: cut_like(state[name], value) for name, value in model.state_dict().items()}
    if shard is shard_offloaded:
        state = {name: value.cpu() for name, value in state.items()}
    model.load_state_dict(state, assign=assign)


LOADED = {
    f"{model.__name__}, {after}{', assigned' * assign}{', offloaded' * (shard is shard_offloaded)}": Case(
        model, partial(_loaded, after=after, assign=assign, shard=shard), unsharded=None
    )
    for model, after, shard in (
        (MLP, "at first", shard_units_and_root),
        (Uneven, "at first", shard_units_and_root),
        (MLP, "backward", shard_units_and_root),
        (MLP, "evaluation", shard_units_and_root),
        (Uneven, "at first", shard_offloaded),
        (Uneven, "backward", shard_offloaded),
    )
    for assign in (False, True)
}
SHORT = ("MLP, at first", "MLP, backward", "Uneven, at first, offloaded")


@each_compared(2, 4, ci=[name for name in LOADED if name not in SHORT])
def test_load_state_dict() -> Cases:
    return LOADED


def _materialised(runtime: Runtime, model: ParityModel, mesh: Any, shard: Any, by: str) -> None:
    """Sharded on the meta device, then filled with its initial values."""
    source = {name: value.detach().clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    model.to("meta")
    if isinstance(model, Transformer):
        model.output.weight = model.embedding.weight  # nn.Module.to("meta") unties
    shard(runtime, model, mesh)
    assert all(parameter.is_meta for parameter in model.parameters())
    values = {
        name: cut_like(source[name], value) for name, value in [*model.named_parameters(), *model.named_buffers()]
    }
    if by == "assign":
        model.load_state_dict(values, assign=True)
        return
    model.to_empty(device="cpu" if shard is shard_offloaded else mesh.device_type)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            value.copy_(values[name])


def _from_meta(model: Any, shard: Any = shard_units_and_root, by: str = "copy") -> Case:
    return Case(model, partial(_materialised, shard=shard, by=by))


OTHERS = {"Uneven": Uneven, "tied": tied, "Buffers": Buffers}


@each_compared(2, 4, ci=[*OTHERS, "Uneven, offloaded", "tied, offloaded"])
def test_meta_model_is_sharded_then_materialised() -> Cases:
    models = {"MLP": MLP, **OTHERS}
    return {
        **{name: _from_meta(model) for name, model in models.items()},
        **{f"{name}, offloaded": _from_meta(models[name], shard_offloaded) for name in ("MLP", "Uneven", "tied")},
        "by load with assign": _from_meta(MLP, by="assign"),
    }


WAYS: dict[str, Setup] = {"kept on the device": SETUPS["fsdp"], "offloaded": Setup(Transformer, shard=shard_offloaded)}


@pytest.mark.parametrize(
    "way",
    [
        (oracle, "kept on the device", subject, "kept on the device"),
        (subject, "kept on the device", oracle, "kept on the device"),
        (subject, "offloaded", subject, "kept on the device"),
        (subject, "kept on the device", subject, "offloaded"),
    ],
    ids=["from torch", "to torch", "from the host", "to the host"],
)
@distributed(2, 4)
def test_distributed_checkpoint_travels(
    ctx: RankContext, way: tuple[Callable[[], Runtime], str, Callable[[], Runtime], str], tmp_path: Path
) -> None:
    saver, saved, loader, loaded = way
    model = WAYS[saved].sharded(saver(), ctx)
    optimizer = dtensor_adamw(model.parameters())
    train_steps(ctx, model, optimizer, range(2))
    states = states_of(model, optimizer)
    dcp.save(states, checkpoint_id=tmp_path / "checkpoint")
    other = WAYS[loaded].sharded(loader(), ctx, seed=1)
    other_optimizer = dtensor_adamw(other.parameters())
    train_steps(ctx, other, other_optimizer, [0])
    load_states(other, other_optimizer, tmp_path / "checkpoint")
    compare_values("loaded", recorded(states_of(other, other_optimizer)), recorded(states))
    expected, actual = (train_steps(ctx, m, o, range(2, 4)) for m, o in ((model, optimizer), (other, other_optimizer)))
    if ctx.world_size == 2:
        compare_values("losses after loading", actual, expected)


Saved = tuple[dict[str, Any], list[Tensor]]  # what a run held when it was saved, and the losses of the steps after


def _trained(ctx: RankContext, setup: str) -> tuple[Any, Any]:
    """All ranks see the same data, so that any number of them computes the same."""
    model = SETUPS[setup].sharded(subject(), ctx)
    optimizer = dtensor_adamw(model.parameters())
    train_steps(ctx, model, optimizer, range(2), alike=True)
    evaluate(ctx, model)  # leaves the root unsharded
    return model, optimizer


def _save(ctx: RankContext, setup: str, path: Path) -> Saved:
    model, optimizer = _trained(ctx, setup)
    states = states_of(model, optimizer)
    dcp.save(states, checkpoint_id=path)
    return whole(states), train_steps(ctx, model, optimizer, range(2, 4), alike=True)


def _load(ctx: RankContext, setup: str, path: Path) -> Saved:
    """Into a model of other values, which has gathered them for a forward already."""
    model = SETUPS[setup].sharded(subject(), ctx, seed=1)
    optimizer = dtensor_adamw(model.parameters())
    train_steps(ctx, model, optimizer, [7])
    evaluate(ctx, model)
    model.reshard()
    load_states(model, optimizer, path)
    found = whole(states_of(model, optimizer))
    return found, train_steps(ctx, model, optimizer, range(2, 4), alike=True)


def _check(saved: Saved, loaded: list[Saved]) -> None:
    for states, losses in loaded:
        compare_values("states", states, saved[0])
        torch.testing.assert_close(losses, saved[1], rtol=1e-4, atol=1e-5)


ELSEWHERE = {
    "from HSDP": ("hsdp", 4, "uneven", 2),
    "onto tensor parallelism": ("kept", 2, "tp", 4),
    "more ranks, tied": ("tied", 2, "tied", 4),
    "from a smaller mesh between passes": ("resting", 4, "kept", 4),
    "more ranks": ("uneven", 2, "uneven", 4),
    "fewer ranks": ("uneven", 4, "uneven", 2),
    "fewer ranks, tied": ("tied", 4, "tied", 2),
    "onto HSDP": ("uneven", 2, "hsdp", 4),
    "from HSDP onto FSDP of the same ranks": ("hsdp", 4, "uneven", 4),
    "onto a smaller mesh between passes": ("kept", 2, "resting", 4),
    "from tensor parallelism": ("tp", 4, "kept", 2),
}


@pytest.mark.ci
@pytest.mark.parametrize("way", ["from HSDP", *long(*[*ELSEWHERE][1:])])
def test_checkpoint_is_loaded_elsewhere(way: str, tmp_path: Path) -> None:
    saver, savers, loader, loaders = ELSEWHERE[way]
    saved = shared_pool(savers).run(_save, setup=saver, path=tmp_path)
    _check(saved[0], shared_pool(loaders).run(_load, setup=loader, path=tmp_path))


def _save_asynchronously(ctx: RankContext, setup: str, path: Path) -> Saved:
    """Training goes on while the checkpoint is written."""
    model, optimizer = _trained(ctx, setup)
    states = states_of(model, optimizer)
    expected = whole(states)
    group = dist.new_group(backend="gloo")  # the writing thread's, beside the training's collectives
    future = dcp.async_save(states, checkpoint_id=path, process_group=group)
    losses = train_steps(ctx, model, optimizer, range(2, 4), alike=True)
    future.result()
    dist.destroy_process_group(group)
    return expected, losses


@pytest.mark.ci
@pytest.mark.parametrize("setup", ["hsdp", *long("uneven", "resting", "tied")])
def test_asynchronous_save_writes_what_was_there_when_it_was_called(setup: str, tmp_path: Path) -> None:
    saved = shared_pool(4).run(_save_asynchronously, setup=setup, path=tmp_path)
    _check(saved[0], shared_pool(2).run(_load, setup=setup, path=tmp_path))


@setups("uneven", "tied")
@distributed(2)
def test_shards_of_each_rank_are_saved_and_loaded_by_torch_save(ctx: RankContext, setup: str, tmp_path: Path) -> None:
    model, optimizer = _trained(ctx, setup)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    file = tmp_path / f"rank{ctx.rank}.pt"
    torch.save(saved, file)
    other = SETUPS[setup].sharded(subject(), ctx, seed=1)
    other_optimizer = dtensor_adamw(other.parameters())
    loaded = torch.load(file, weights_only=False)
    other.load_state_dict(loaded["model"])
    other_optimizer.load_state_dict(loaded["optimizer"])
    compare_values("model", whole(other.state_dict()), whole(model.state_dict()))
    expected, found = (train_steps(ctx, m, o, range(2, 4)) for m, o in ((model, optimizer), (other, other_optimizer)))
    compare_values("losses", found, expected)
