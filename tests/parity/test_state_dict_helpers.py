"""``torch.distributed.checkpoint.state_dict`` on sharded models: same keys, types, layouts and values as under torch.

The helpers look for torch's first FSDP class only, which neither runtime has.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
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

from tests.harness.compare import as_torchs, compare_values, hsdp
from tests.harness.distributed import RankContext, distributed
from tests.harness.messages import error_of
from tests.harness.models import MLP, Buffers, Transformer, frozen
from tests.harness.runtimes import Runtime, oracle, subject
from tests.harness.selection import long
from tests.harness.training import dtensor_adamw, shard_units_and_root
from tests.parity.setups import SETUPS, Setup, evaluate, recorded, setups, train_steps

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


def _trained(setup: Setup, runtime: Runtime, ctx: RankContext, seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
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
    theirs, ours = (_trained(HERE[setup], runtime, ctx) for runtime in (oracle(), subject()))
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
    model, optimizer = _trained(where, runtime, ctx)
    read = {key: getattr(how, key) for key in ("full_state_dict", "flatten_optimizer_state_dict")}
    saved = copy.deepcopy(get_state_dict(model, optimizer, options=StateDictOptions(**read)))
    expected = [recorded(get_state_dict(model, optimizer)), _train(ctx, model, optimizer, [5])]
    model, optimizer = _trained(where, runtime, ctx, seed=1)
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
    model, optimizer = _trained(where, runtime, ctx)
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
    model, _ = _trained(SETUPS["resting"], runtime, ctx)
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
    model, _ = _trained(SETUPS["uneven"], runtime, ctx)
    with pytest.warns(FutureWarning, match="submodules only"):
        state = get_model_state_dict(model, submodules={model.blocks[1]}, options=options)
    assert next(iter(state)).startswith("blocks.1." if keep_prefixes else "scale")
    return recorded(state)


@setups("uneven", "kept")
@distributed(2)
def test_helpers_find_the_shards_after_an_evaluation_and_reshard(ctx: RankContext, setup: str) -> None:
    """A forward without backward leaves the root unsharded, and the helpers list parameters before anything else."""
    model, optimizer = _trained(SETUPS[setup], subject(), ctx)
    expected = recorded(get_state_dict(model, optimizer))
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for _ in range(2):
        evaluate(ctx, model)
        for unit in model.modules():
            if isinstance(unit, subject().FSDPModule):
                unit.reshard()
        compare_values("optimizer", recorded(get_optimizer_state_dict(model, optimizer)), expected[1])
        _load_from_rank_0(ctx, (full,), model)
        compare_values("model", recorded(get_model_state_dict(model)), expected[0])
    dist.barrier()
