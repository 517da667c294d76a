"""Names of what is inside wrappers of modules: everywhere those of the model without wrappers.

The oracle is the plain model. torch's ``get_model_state_dict`` gives the same names, but for some nested wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import fsdp2
from fsdp2 import FSDPModule, fully_shard, installation as install
from fsdp2.checkpoint import reshard_checks
from fsdp2.checkpoint.checkpointable import _Places
from fsdp2.core.runtime.unit import units_under
from fsdp2.core.runtime.unit_tree import tree_of
from fsdp2.extras.plain_names import plain_name
from fsdp2.fsdp1 import FullyShardedDataParallel
from fsdp2.fsdp1.auto_wrap import check_nothing_is_wrapped
from fsdp2.planner.candidates import _check_computes_once
from fsdp2.report.modules import modules_around_units
from fsdp2.tensors import wrap_parameters
from tests.distributed.support import seeded, shard_each
from tests.harness.distributed import RankContext, distributed
from tests.harness.messages import error_of
from tests.harness.weight_files import assert_same, read, safetensors
from tests.parity.setups import whole

DIM = 8
UNITS = {"(root)", "blocks.0", "blocks.1"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("scale", torch.full((DIM,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.scale


class Model(nn.Module):
    """``blocks`` are units, ``part`` is none."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Block()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.part(x)
        for block in self.blocks:
            x = block(x)
        return x


def _compiled(module: Any) -> Any:
    return torch.compile(module, backend="eager")


def _fsdp1(module: Any) -> Any:
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=next(module.parameters()).device)


def _ddp(module: Any) -> Any:
    return DistributedDataParallel(module)


def _wrapped(module: Any, *wrap: Callable[[Any], Any]) -> Any:
    """The first one of ``wrap`` is the innermost."""
    for each in wrap:
        module = each(module)
    return module


def _sharded(*wrap: Callable[[Any], Any], first: bool) -> Callable[[RankContext], Any]:
    """``part`` and ``blocks`` are wrapped. ``first``: ``fully_shard`` was given what is inside; else, it gets the
    wrappers."""

    def make(ctx: RankContext) -> Any:
        model = seeded(Model)
        for is_now in (first, not first):
            if is_now:
                shard_each(*model.blocks, mesh=ctx.mesh_1d())
            else:
                model.part = _wrapped(model.part, *wrap)
                model.blocks = nn.ModuleList(_wrapped(block, *wrap) for block in model.blocks)
        return fully_shard(model, mesh=ctx.mesh_1d())

    return make


_units_in, _units_of = partial(_sharded, first=True), partial(_sharded, first=False)


def _in_fsdp1(*wrap: Callable[[Any], Any]) -> Callable[[RankContext], Any]:
    def make(ctx: RankContext) -> Any:
        model = seeded(Model)
        model.blocks = nn.ModuleList(_wrapped(block, *wrap) for block in model.blocks)
        return _fsdp1(model)

    return make


def _beside_ddp(*wrap: Callable[[Any], Any]) -> Callable[[RankContext], Any]:
    """``part`` is in DistributedDataParallel, which averages its gradients."""

    def make(ctx: RankContext) -> Any:
        model = seeded(Model)
        model.part = _wrapped(model.part, *wrap)
        shard_each(*model.blocks, mesh=ctx.mesh_1d())
        return fully_shard(model, mesh=ctx.mesh_1d(), ignored_params=set(model.part.parameters()))

    return make


def _around(wrap: Callable[[Any], Any]) -> Callable[[RankContext], Any]:
    return lambda ctx: wrap(_units_of()(ctx))


MODELS: dict[str, Callable[[RankContext], Any]] = {
    "plain": _units_of(),
    "compiled units": _units_in(_compiled),
    "units of compiled": _units_of(_compiled),
    "checkpointed units": _units_in(checkpoint_wrapper),
    "units of checkpointed": _units_of(checkpoint_wrapper),
    "units of offloaded": _units_of(offload_wrapper),
    "units of compiled checkpointed": _units_of(checkpoint_wrapper, _compiled),
    "units of checkpointed compiled": _units_of(_compiled, checkpoint_wrapper),
    "compiled model": _around(_compiled),
    "checkpointed model": _around(checkpoint_wrapper),
    "FSDP1": _in_fsdp1(_fsdp1),
    "FSDP1 of compiled": _in_fsdp1(_compiled, _fsdp1),
    "compiled FSDP1": _in_fsdp1(_fsdp1, _compiled),
    "checkpointed FSDP1": _in_fsdp1(_fsdp1, checkpoint_wrapper),
    "DDP beside units": _beside_ddp(_ddp),
    "compiled DDP beside units": _beside_ddp(_ddp, _compiled),
}
# ``get_model_state_dict`` leaves "_orig_mod" there, as of torch 2.13.
TORCH_LEAVES_A_PART = ("units of checkpointed compiled", "FSDP1 of compiled")


class _Watching(fsdp2.core.Observer):
    def __init__(self) -> None:
        self.names: set[str] = set()

    def on_event(self, event: str, unit: str) -> None:
        self.names.add(unit)


def _names_of_tensors(ctx: RankContext, model: Any, folder: Path) -> Iterator[tuple[str, set[str]]]:
    """By what hands them out: names of all parameters and buffers."""
    buffers = {name for name, _ in Model().named_buffers()}
    fsdp2.checkpoint.save_safetensors(model, folder)
    yield "files", set(read(folder))
    stream = fsdp2.checkpoint.stream_full_params(model, buffers=True)
    yield "manifest", {each.name for bucket in stream.manifest for each in bucket.tensors}
    yield "stream", {name for name, _ in stream}
    seen: set[str] = set()
    fsdp2.optim.muon_groups(model, is_matrix=lambda name, param: bool(seen.add(name)), verbose=False)
    yield "muon_groups", seen | buffers
    places = set(_Places(model)._by_name)
    yield "to_checkpointable", places & set(Model().state_dict())
    if isinstance(model, FSDPModule):
        yield "reshard_to", {*reshard_checks.Survey(model, (), ctx.mesh_1d())._names.values()}


def _names_of_units(model: Any, watching: _Watching) -> Iterator[tuple[str, set[str]]]:
    yield "events", watching.names
    yield "memory_plan", {unit.name for unit in fsdp2.memory.memory_plan(model).units}
    around = modules_around_units(tree_of(next(unit for _, unit in units_under(model))))
    yield "report", {name for _, name in around.values()} - {"part"} | UNITS


@pytest.mark.parametrize("kind", MODELS)
@distributed(2)
def test_names_are_those_of_the_model_without_wrappers(ctx: RankContext, kind: str, tmp_path: Path) -> None:
    model, expected, watching = MODELS[kind](ctx), set(Model().state_dict()), _Watching()
    with fsdp2.report.trace.observe(model, watching), torch.compiler.set_stance("force_eager"):
        model(torch.ones(2, DIM)).sum().backward()
    model.zero_grad()
    assert (set(get_model_state_dict(model)) == expected) is (kind not in TORCH_LEAVES_A_PART)
    for what, names in _names_of_tensors(ctx, model, tmp_path):
        assert names == expected, what
    for what, names in _names_of_units(model, watching):
        assert names == UNITS, what
    sharded = {param.full_name for _, unit in units_under(model) for group in unit.groups for param in group.params}
    is_sharded = {name: "DDP" not in kind or not name.startswith("part.") for name, _ in Model().named_parameters()}
    assert sharded == {name for name, is_one in is_sharded.items() if is_one}


@distributed(2)
def test_parameters_of_a_unit_of_several_modules_have_the_names_of_these(ctx: RankContext) -> None:
    model = seeded(Model)
    model.blocks[1] = _compiled(model.blocks[1])
    fully_shard([model.blocks[0], model.blocks[1]], mesh=ctx.mesh_1d())
    model = fully_shard(model, mesh=ctx.mesh_1d())
    with torch.compiler.set_stance("force_eager"):
        model(torch.ones(2, DIM))
    found = {param.full_name for _, unit in units_under(model) for group in unit.groups for param in group.params}
    assert found == {name for name, _ in Model().named_parameters()}
    model.reshard()
    survey = reshard_checks.Survey(model, (), ctx.mesh_1d())
    assert {name for name, _, _ in survey.params} == found


@distributed(2)
def test_a_module_of_a_unit_may_leave_the_model(ctx: RankContext) -> None:
    model = seeded(Model)
    fully_shard([model.part, model.blocks[1]], mesh=ctx.mesh_1d())
    fully_shard(model, mesh=ctx.mesh_1d())
    del model.blocks[1]
    model(torch.ones(2, DIM)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@distributed(2)
def test_no_two_units_have_one_name(ctx: RankContext) -> None:
    """Reports are by names."""
    model = seeded(Model)
    fully_shard(model.part, mesh=ctx.mesh_1d())
    model.part = fully_shard(checkpoint_wrapper(model.part), mesh=ctx.mesh_1d())
    fully_shard(model, mesh=ctx.mesh_1d())
    names = [unit.name for unit in fsdp2.memory.memory_plan(model).units]
    assert names[:2] == ["(root)", "part"]
    assert len(set(names)) == len(names) == 3


@pytest.mark.parametrize("kind", MODELS)
@distributed(2)
def test_files_load_by_names_with_and_without_wrappers(ctx: RankContext, kind: str, tmp_path: Path) -> None:
    model, values = MODELS[kind](ctx), seeded(Model, 1).state_dict()
    plain, wrapped = (tmp_path / f"{name}{ctx.rank}.safetensors" for name in ("plain", "wrapped"))
    keys = {plain_name(model, key): key for key in model.state_dict()}
    safetensors.save_file(values, plain)
    safetensors.save_file({keys[name]: value for name, value in values.items()}, wrapped)
    for file in (plain, wrapped):
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        assert fsdp2.checkpoint.load_safetensors(model, file) == ([], [])
        stream = fsdp2.checkpoint.stream_full_params(model, buffers=True)
        assert_same({name: tensor.clone() for name, tensor in stream}, values)


def _with_added_parameter(model: Any) -> None:
    model.part.get_submodule("linear").added = nn.Parameter(torch.zeros(1))
    model(torch.ones(2, DIM))


def _called_outside(model: Any) -> None:
    model(torch.ones(2, DIM))
    model.blocks[0].get_submodule("linear")(torch.ones(DIM))


# What is refused or warned of, with the name in its text; of a model whose ``part`` and ``blocks`` are wrapped, with
# units and without.
MESSAGES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a parameter that was added": (lambda units, plain: _with_added_parameter(units), "'part.linear.added'"),
    "a call outside": (lambda units, plain: _called_outside(units), "'blocks.0.linear'"),
    "DDP": (lambda units, plain: _ddp(units), "'part.linear.weight'"),
    "two runtimes": (lambda units, plain: install._refuse_our_modules(nn.Sequential(units.blocks), "it"), "'0.0'"),
    "wrap_parameters": (lambda units, plain: wrap_parameters(units, torch.clone), "'part.linear.weight'"),
    "HostAdamW": (lambda units, plain: fsdp2.optim.HostAdamW(plain.named_parameters()), "'part.linear.weight'"),
    "Muon": (lambda units, plain: fsdp2.optim.Muon(plain.named_parameters()), "'part.linear.weight'"),
    "a placement": (
        lambda units, plain: fully_shard(plain, shard_placement_fn=lambda _: Shard(7)),
        "'part.linear.weight'",
    ),
    "auto_wrap_policy": (lambda units, plain: check_nothing_is_wrapped(units.blocks), "'0'"),
    "plan": (lambda units, plain: _check_computes_once(nn.Sequential(checkpoint_wrapper(plain))), "'0'"),
}


@pytest.mark.parametrize("kind", MESSAGES)
@distributed(2)
def test_messages_have_names_without_wrappers(ctx: RankContext, kind: str) -> None:
    call, name = MESSAGES[kind]
    for wrapper in (_compiled, checkpoint_wrapper):
        plain = seeded(Model)
        plain.part, plain.blocks = wrapper(plain.part), nn.ModuleList(map(wrapper, plain.blocks))
        with torch.compiler.set_stance("force_eager"):
            said = error_of(lambda: call(_units_of(wrapper)(ctx), plain))  # noqa: B023
        assert name in said, said
        assert "_mod" not in said, said
        assert "_wrapped" not in said, said


@pytest.mark.parametrize(("saved", "loaded"), [("FSDP1", "FSDP1 of compiled"), ("compiled FSDP1", "FSDP1")])
@distributed(2)
def test_states_of_fsdp1_load_by_names_of_other_wrappers(ctx: RankContext, saved: str, loaded: str) -> None:
    models = [MODELS[kind](ctx) for kind in (saved, loaded)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    with torch.compiler.set_stance("force_eager"):
        models[0](torch.ones(2, DIM)).sum().backward()
    optimizers[0].step()
    given = FullyShardedDataParallel.optim_state_dict(models[0], optimizers[0])
    made = FullyShardedDataParallel.optim_state_dict_to_load(models[1], optimizers[1], given)
    optimizers[1].load_state_dict(made)
    moments = [
        [whole(optimizer.state[param]["exp_avg"]) for param in model.parameters()]
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    assert all(map(torch.equal, *moments))
