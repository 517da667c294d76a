"""State: what is saved and loaded has torch's keys, layouts and values, also by the helpers of
``torch.distributed.checkpoint.state_dict``, and goes to other meshes and ranks. The helpers look for torch's first FSDP
class only, which neither runtime has.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from tests.harness.compare import Cases, as_torchs, compare_values, each_compared, hsdp
from tests.harness.distributed import RankContext, distributed
from tests.harness.messages import error_of
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


ON_DEVICE, ON_HOST = SETUPS["fsdp"], Setup(Transformer, shard=shard_offloaded)
WAYS: dict[str, tuple[Callable[[], Runtime], Setup, Callable[[], Runtime], Setup]] = {
    "from torch": (oracle, ON_DEVICE, subject, ON_DEVICE),
    "to torch": (subject, ON_DEVICE, oracle, ON_DEVICE),
    "from the host": (subject, ON_HOST, subject, ON_DEVICE),
    "to the host": (subject, ON_DEVICE, subject, ON_HOST),
}


@pytest.mark.parametrize("way", WAYS)
@distributed(2, 4)
def test_distributed_checkpoint_travels(ctx: RankContext, way: str, tmp_path: Path) -> None:
    saver, saved, loader, loaded = WAYS[way]
    model = saved.sharded(saver(), ctx)
    optimizer = dtensor_adamw(model.parameters())
    train_steps(ctx, model, optimizer, range(2))
    states = states_of(model, optimizer)
    dcp.save(states, checkpoint_id=tmp_path / "checkpoint")
    other = loaded.sharded(loader(), ctx, seed=1)
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


FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
GETTERS = {
    "shards": StateDictOptions(),
    "shards on the CPU": StateDictOptions(cpu_offload=True),
    "whole": StateDictOptions(full_state_dict=True),
    "whole on rank 0": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "whole and flat": StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True),
    "without frozen": StateDictOptions(ignore_frozen_params=True),
}


def _ignoring(runtime: Runtime, model: MLP, mesh: Any) -> None:
    shard_units_and_root(runtime, model, mesh, ignored_params={model.blocks[0].up.weight, model.exit.bias})


HERE = {
    **{name: SETUPS[name] for name in ("uneven", "hsdp", "tied")},
    "buffers": Setup(Buffers),
    "frozen": Setup(frozen(Transformer, "blocks.0.mlp", "embedding")),
    "ignored": Setup(MLP, hsdp, _ignoring),
}
here = pytest.mark.parametrize("setup", ["uneven", "hsdp", *long("tied", "buffers", "frozen"), "ignored"])


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, rest = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]
    return dtensor_adamw([{"params": matrices}, {"params": rest, "weight_decay": 0.0}])


# All ranks draw the same data, so that they agree on buffers and ignored parameters, too.
_train = partial(train_steps, alike=True)


def _trained_here(setup: Setup, runtime: Runtime, ctx: RankContext, seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    model = setup.sharded(runtime, ctx, seed)
    optimizer = _optimizer(model)
    _train(ctx, model, optimizer, range(seed, seed + 2))
    return model, optimizer


def _kinds(state: Any) -> Any:
    """The structure of ``state``, with the type, layout and dtype of each tensor, and other values."""
    if isinstance(state, dict):
        return {key: _kinds(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [_kinds(value) for value in state]
    if isinstance(state, DTensor):
        return [type(state), state.placements, state.shape, state.dtype, state.device, state.requires_grad]
    if isinstance(state, torch.Tensor):
        return [type(state), state.shape, state.dtype, state.device, state.requires_grad]
    return state


def _tensors(state: Any) -> list[torch.Tensor]:
    """What this rank holds of the tensors in ``state``."""
    leaves = [leaf.detach() for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    return [leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in leaves]


def _check_like_torch(ctx: RankContext, ours: Any, theirs: Any) -> None:
    assert _kinds(ours) == _kinds(theirs)
    exact = {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(
        _tensors(ours), _tensors(theirs), **(exact if ctx.world_size == 2 else {"rtol": 1e-4, "atol": 1e-5})
    )


@here
@distributed(2, 4)
def test_states_are_read_as_under_torch(ctx: RankContext, setup: str) -> None:
    theirs, ours = (_trained_here(HERE[setup], runtime, ctx) for runtime in (oracle(), subject()))
    for options in GETTERS.values():
        for get in (get_state_dict, get_optimizer_state_dict):
            _check_like_torch(ctx, *(get(*each, options=copy.copy(options)) for each in (ours, theirs)))
        _check_like_torch(ctx, *(get_model_state_dict(each[0], options=options) for each in (ours, theirs)))


@distributed(2)
def test_whole_states_are_those_of_the_unsharded_model(ctx: RankContext) -> None:
    setup = SETUPS["tied"]
    sharded = setup.sharded(subject(), ctx)
    torch.manual_seed(0)
    unsharded = setup.build()
    found = []
    for model in (sharded, unsharded):
        optimizer = _optimizer(model)
        _train(ctx, model, optimizer, range(2))
        found.append(get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)))
    assert _kinds(found[0]) == _kinds(found[1])
    torch.testing.assert_close(_tensors(found[0]), _tensors(found[1]), rtol=1e-4, atol=1e-5)


# Loading


def _load_from_rank_0(ctx: RankContext, states: tuple[Any, ...], model: Any, optimizer: Any = None) -> None:
    """Rank 0 has a checkpoint, the others have nothing. ``set_state_dict`` would take that for "optimizer only"."""
    given = copy.deepcopy(states) if ctx.rank == 0 else ({}, {})  # it is written to
    set_model_state_dict(model, given[0], options=copy.copy(FROM_RANK_0))
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, given[1], options=copy.copy(FROM_RANK_0))


SETTERS = {
    "shards": StateDictOptions(),
    "whole": StateDictOptions(full_state_dict=True),
    "whole from rank 0": FROM_RANK_0,
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
}


@pytest.mark.parametrize("options", list(SETTERS))
@here
@as_torchs(2)
def test_states_make_a_round_trip(ctx: RankContext, runtime: Runtime, setup: str, options: str) -> Any:
    """States of a trained model, set on another one; then one more step."""
    how, where = SETTERS[options], HERE[setup]
    model, optimizer = _trained_here(where, runtime, ctx)
    read = {key: getattr(how, key) for key in ("full_state_dict", "flatten_optimizer_state_dict")}
    saved = copy.deepcopy(get_state_dict(model, optimizer, options=StateDictOptions(**read)))
    expected = [recorded(get_state_dict(model, optimizer)), _train(ctx, model, optimizer, [5])]
    model, optimizer = _trained_here(where, runtime, ctx, seed=1)
    evaluate(ctx, model)
    model.reshard()
    if how.broadcast_from_rank0:
        _load_from_rank_0(ctx, saved, model, optimizer)
    else:
        given = dict(zip(("model_state_dict", "optim_state_dict"), saved, strict=True))
        set_state_dict(model, optimizer, **given, options=copy.copy(how))
    found = [recorded(get_state_dict(model, optimizer)), _train(ctx, model, optimizer, [5])]
    compare_values("round trip", found, expected)
    return found


def _empty(setup: Setup, runtime: Runtime, ctx: RankContext) -> Any:
    """A model on the meta device; what is not in a checkpoint has been initialised."""
    model = setup.on_meta(runtime, ctx)
    assert all(parameter.is_meta for parameter in model.parameters())
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name in module._non_persistent_buffers_set:
                module.register_buffer(name, torch.zeros_like(buffer, device=ctx.device_type), persistent=False)
    return model


@pytest.mark.parametrize("setup", ["hsdp", "tied", "buffers", *long("uneven", "resting")])
@as_torchs(2)
def test_meta_model_is_loaded_from_rank_0(ctx: RankContext, runtime: Runtime, setup: str) -> Any:
    where = HERE["buffers"] if setup == "buffers" else SETUPS[setup]
    model, optimizer = _trained_here(where, runtime, ctx)
    states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    states, losses = copy.deepcopy(states), _train(ctx, model, optimizer, [5])
    empty = _empty(where, runtime, ctx)
    _load_from_rank_0(ctx, states, empty)
    if setup == "tied":
        empty.output.weight = empty.embedding.weight  # meta parameters are replaced, each of a tie by its own
    empty_optimizer = _optimizer(empty)
    given = copy.deepcopy(states[1]) if ctx.rank == 0 else {}
    set_optimizer_state_dict(empty, empty_optimizer, given, options=copy.copy(FROM_RANK_0))
    after = get_state_dict(empty, empty_optimizer, options=StateDictOptions(full_state_dict=True))
    compare_values("loaded", after, states)
    compare_values("losses", _train(ctx, empty, empty_optimizer, [5]), losses)
    return recorded(get_state_dict(empty, empty_optimizer))


@pytest.mark.ci
@as_torchs(2)
def test_checkpoint_with_other_keys_is_loaded_if_not_strict(ctx: RankContext, runtime: Runtime) -> Any:
    found: list[Any] = []
    model, _ = _trained_here(SETUPS["resting"], runtime, ctx)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    full = {key: value.clone() + 1 for key, value in full.items() if key != "exit.bias"}
    full["unknown"] = torch.ones(3)
    for from_rank_0 in (False, True):
        options = StateDictOptions(full_state_dict=True, strict=True, broadcast_from_rank0=from_rank_0)
        given = copy.deepcopy(full) if ctx.rank == 0 or not from_rank_0 else {}
        found.append(error_of(partial(set_model_state_dict, model, dict(given), options=options)))
        options.strict = False
        keys = set_model_state_dict(model, dict(given), options=options)
        found.append([list(keys.missing_keys), list(keys.unexpected_keys), recorded(model.state_dict())])
    return found


@pytest.mark.parametrize("keep_prefixes", [True, False])
@as_torchs(2)
def test_state_of_a_submodule_alone(ctx: RankContext, runtime: Runtime, keep_prefixes: bool) -> Any:
    options = StateDictOptions(keep_submodule_prefixes=keep_prefixes)
    model, _ = _trained_here(SETUPS["uneven"], runtime, ctx)
    with pytest.warns(FutureWarning, match="submodules only"):
        state = get_model_state_dict(model, submodules={model.blocks[1]}, options=options)
    assert next(iter(state)).startswith("blocks.1." if keep_prefixes else "scale")
    return recorded(state)
