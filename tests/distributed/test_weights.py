"""Weights in and out: what is loaded from files, saved to files and streamed, for every way to shard a model.

The oracles are safetensors itself, the unsharded model, and the same model sharded from its values: bit for bit.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2 import DataParallelMeshDims, MixedPrecisionPolicy, ParamPlacement, fully_shard
from fsdp2.comm.offload import StagedOffloadPolicy
from fsdp2.tensors import BFloat16AllGatherTensor, NF4Tensor, wrap_parameters
from fsdp2.tools import save_weights
from tests.distributed.support import same_on_all_ranks, seeded
from tests.harness.distributed import RankContext, distributed
from tests.harness.extensions import KeptHalved
from tests.harness.messages import error_of, wrapped
from tests.harness.models import MLP, Buffers, ParityModel, SharedModules, Transformer, Uneven
from tests.harness.pool import WorkerError, WorkerPool
from tests.harness.selection import long
from tests.harness.terminal import on_a_terminal

safetensors = pytest.importorskip("safetensors.torch")

FILES = {"one": "5GB", "many": 200}


def _units(model: Any, mesh: DeviceMesh, **options: Any) -> Any:
    for unit in (*model.units(), model):
        fully_shard(unit, mesh=mesh, **options)
    return model


def _on_dim(model: Any, ctx: RankContext) -> Any:
    return _units(model, ctx.mesh_1d(), shard_placement_fn=lambda param: Shard(param.ndim - 1))


def _ignored(model: Any, ctx: RankContext) -> Any:
    """A plain parameter, and one that is a DTensor but none of ours."""
    mesh, weight = ctx.mesh_1d(), model.entry.weight
    model.entry.weight = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(1)]))
    return _units(model, mesh, ignored_params={model.exit.weight, model.entry.weight})


def _tensor_parallel(model: Any, mesh: DeviceMesh, **options: Any) -> Any:
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return _units(model, mesh["dp"], **options)


def _on_full_mesh(model: Any, ctx: RankContext) -> Any:
    """All parameters on a mesh with all axes; no axis shards them, so that they stay whole on the data-parallel one."""
    mesh = ctx.mesh(dp=ctx.world_size // 2, tp=2)

    def place(name: str, module: nn.Module, of: DeviceMesh) -> None:
        for key, param in list(module.named_parameters(recurse=False)):
            placements = [Replicate(), Shard(0)]
            module.register_parameter(key, nn.Parameter(distribute_tensor(param.detach(), of, placements)))

    distribute_module(model, mesh, place)
    return _units(model, mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))


def _by_torch(model: Any, ctx: RankContext) -> Any:
    """Sharded by torch's ``fully_shard``: DTensors that fsdp2 does not manage."""
    for unit in (*model.units(), model):
        torch_fully_shard(unit, mesh=ctx.mesh_1d())
    return model


def _experts(model: Any, ctx: RankContext) -> Any:
    mesh = ctx.mesh_2d(2, 2)
    experts = {block.down.weight for block in model.blocks}

    def place(param: nn.Parameter) -> Any:
        return ParamPlacement(Shard(1), mesh["shard"]) if param in experts else None

    return _units(model, mesh._flatten("everybody"), shard_placement_fn=place)


# The model, and how a rank shards it.
_Shard = Callable[[Any, RankContext], Any]
ON_2: dict[str, tuple[Callable[[], ParityModel], _Shard]] = {
    "1d": (MLP, lambda model, ctx: _units(model, ctx.mesh_1d())),
    "uneven": (Uneven, lambda model, ctx: _units(model, ctx.mesh_1d())),
    "last dim": (Uneven, _on_dim),
    "tied": (lambda: Transformer(tied=True), lambda model, ctx: _units(model, ctx.mesh_1d())),
    "shared modules": (SharedModules, lambda model, ctx: _units(model, ctx.mesh_1d())),
    "buffers": (Buffers, lambda model, ctx: _units(model, ctx.mesh_1d())),
    "ignored": (MLP, _ignored),
    "offloaded": (MLP, lambda model, ctx: _units(model, ctx.mesh_1d(), offload_policy=StagedOffloadPolicy())),
    "bf16 compute": (
        MLP,
        lambda model, ctx: _units(model, ctx.mesh_1d(), mp_policy=MixedPrecisionPolicy(torch.bfloat16)),
    ),
    "tp": (MLP, lambda model, ctx: _tensor_parallel(model, ctx.mesh(dp=1, tp=2))),
    "replicated": (MLP, lambda model, ctx: _units(model, ctx.mesh_2d(2, 1))),
    "by torch": (Uneven, _by_torch),
    "unsharded": (Buffers, lambda model, ctx: model),
}
SHORT = ("uneven", "tied", "ignored", "offloaded", "bf16 compute", "tp", "replicated")
ON_4: dict[str, tuple[Callable[[], ParityModel], _Shard]] = {
    "hsdp": (Uneven, lambda model, ctx: _units(model, ctx.mesh_2d(2, 2))),
    "tp x fsdp": (functools.partial(MLP, dim=5), lambda model, ctx: _tensor_parallel(model, ctx.mesh(dp=2, tp=2))),
    "fsdp x tp": (functools.partial(MLP, dim=5), lambda model, ctx: _tensor_parallel(model, ctx.mesh(tp=2, dp=2))),
    "tp on the dim of fsdp": (
        functools.partial(MLP, dim=5),
        lambda model, ctx: _tensor_parallel(
            model, ctx.mesh(dp=2, tp=2), shard_placement_fn=lambda param: Shard(param.ndim - 1)
        ),
    ),
    "full mesh": (functools.partial(MLP, dim=10), _on_full_mesh),
    "experts": (MLP, _experts),
    "more ranks than rows": (Uneven, lambda model, ctx: _units(model, ctx.mesh_1d())),
}


NO_FORWARD = {"ignored", "full mesh", "unsharded"}  # DTensors take no plain inputs, and no rank averages buffers


def _make(ctx: RankContext, place: str, device: str | None = None, seed: int = 0) -> Any:
    build, shard = {**ON_2, **ON_4}[place]
    with torch.device(device or torch.get_default_device()):
        return shard(seeded(build, seed), ctx)


def _unsharded(place: str) -> nn.Module:
    with torch.device("cpu"):
        return seeded({**ON_2, **ON_4}[place][0])


def _write(folder: Path, model: nn.Module, rank: int) -> None:
    """What transformers would write: by safetensors itself, tied weights once."""
    if rank == 0:
        safetensors.save_file(_once(model), str(folder / "model.safetensors"), metadata={"format": "pt"})
    dist.barrier()


def _once(model: nn.Module) -> dict[str, Tensor]:
    """The state dict without further names of tied weights."""
    seen: set[int] = set()
    kept = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            kept[key] = value.detach().clone()
    return kept


def _locals(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    return {key: (each.to_local() if isinstance(each, DTensor) else each).cpu() for key, each in state.items()}


def _same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for key, each in expected.items():
        assert found[key].dtype is each.dtype, key
        assert torch.equal(found[key], each), key


def _spoil(model: nn.Module) -> None:
    """Fill what ``to_empty`` has made, and leave non-persistent buffers as forwards need them."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            local.fill_(float("nan") if local.is_floating_point() else 0)


def _read(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by safetensors itself."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return safetensors.load_file(str(folder / "model.safetensors"))
    names = json.loads(index.read_text())["weight_map"]
    return {
        key: value
        for file in sorted(set(names.values()))
        for key, value in safetensors.load_file(folder / file).items()
    }


class _Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("inv_freq", 1 / torch.arange(1.0, 5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.inv_freq


def _loads_beside_empty_buffers(ctx: RankContext, path: Path) -> list[list[str]]:
    """What loading warns of: after to_empty, with one buffer written and one replaced, and without the meta device."""
    file = path / f"model{ctx.rank}.safetensors"
    safetensors.save_file(seeded(lambda: nn.Sequential(_Rotary(), _Rotary())).state_dict(), file)
    model = nn.Sequential(_Rotary(), _Rotary()).to("meta")
    for each in (*model, model):
        fully_shard(each, mesh=ctx.mesh_1d())
    model.to_empty(device=ctx.device_type).double().float()  # a cast gives no values

    def warned(loaded: nn.Module) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fsdp2.load_safetensors(loaded, file)
        assert all(Path(each.filename) == Path(__file__) for each in caught)
        return [wrapped(str(each.message)) for each in caught]

    first = warned(model)
    model[0].inv_freq.copy_(1 / torch.arange(1.0, 5))  # type: ignore[operator, union-attr]
    model[1].inv_freq = 1 / torch.arange(1.0, 5)
    again, plain = warned(model), warned(nn.Sequential(_Rotary(), _Rotary()))
    assert torch.equal(model(torch.ones(4)), seeded(lambda: nn.Sequential(_Rotary(), _Rotary()))(torch.ones(4)))
    return [first, again, plain]


def test_buffers_that_no_file_has_are_warned_of_until_they_are_filled(tmp_path: Path) -> None:
    (warning,), again, plain = same_on_all_ranks(_loads_beside_empty_buffers, path=tmp_path)
    assert_expected_inline(
        warning,
        """\
load_safetensors: no checkpoint has non-persistent buffers, and nobody has filled '0.inv_freq',
'1.inv_freq' since they were on the meta device. Fill them before the first forward:
model.get_submodule('0').inv_freq = value, with the value that the constructor of the module
computes.""",
    )
    assert (again, plain) == ([], [])


def _loads_saves_and_streams(ctx: RankContext, place: str, tmp_path: Path) -> None:
    unsharded, expected = _unsharded(place), _make(ctx, place)
    _write(tmp_path, unsharded, ctx.rank)
    for device in ("meta", None):
        model = _make(ctx, place, device, seed=1)
        if device == "meta":
            model.to_empty(device="cpu" if place == "offloaded" else ctx.device_type)
            _spoil(model)
        assert fsdp2.load_safetensors(model, tmp_path) == ([], [])
        _same(_locals(model), _locals(expected))
        if place not in NO_FORWARD:
            batch = model.batch(torch.Generator().manual_seed(0))
            assert torch.equal(model.loss(model(*batch), batch), expected.loss(expected(*batch), batch))
        if place == "buffers":
            expected = _make(ctx, place)  # forwards write buffers

    for name, size in FILES.items():
        folder = tmp_path / name
        fsdp2.save_safetensors(expected, folder, max_shard_size=size)
        names = sorted(each.name for each in folder.iterdir())
        if name == "one":
            assert names == ["model.safetensors"]
        else:
            last = names.pop()
            assert last == "model.safetensors.index.json"
            assert names == [f"model-{i + 1:05d}-of-{len(names):05d}.safetensors" for i in range(len(names))]
        _same(dict(sorted(_read(folder).items())), dict(sorted(_once(_unsharded(place)).items())))
        other = _make(ctx, place, seed=2)
        fsdp2.load_safetensors(other, folder)
        _same(_locals(other), _locals(expected))

    streamed = {}
    for name, value in fsdp2.stream_full_params(expected):
        streamed[name] = (value.cpu().clone(), value.dtype)
        value.zero_()  # the caller's own
    _same(_locals(expected), _locals(_make(ctx, place)))
    whole = {name: (value.detach(), value.dtype) for name, value in _unsharded(place).named_parameters()}
    assert list(streamed) == list(whole)
    for name, (value, dtype) in whole.items():
        assert streamed[name][1] is dtype
        assert torch.equal(streamed[name][0], value), name


@pytest.mark.parametrize("place", [*SHORT, *long(*[place for place in ON_2 if place not in SHORT])])
@distributed(2)
def test_weights_go_in_and_out_on_2_ranks(ctx: RankContext, place: str, tmp_path: Path) -> None:
    _loads_saves_and_streams(ctx, place, tmp_path)


@pytest.mark.ci
@pytest.mark.parametrize("place", [next(iter(ON_4)), *long(*list(ON_4)[1:])])
@distributed(4)
def test_weights_go_in_and_out_on_4_ranks(ctx: RankContext, place: str, tmp_path: Path) -> None:
    _loads_saves_and_streams(ctx, place, tmp_path)


# Casts, names, subclasses


@distributed(2)
def test_files_in_bf16_load_into_fp32_shards_and_back(ctx: RankContext, tmp_path: Path) -> None:
    expected = {key: value.bfloat16() for key, value in _unsharded("1d").state_dict().items()}
    fsdp2.save_safetensors(_make(ctx, "1d"), tmp_path, dtype=torch.bfloat16)
    _same(_read(tmp_path), expected)
    model = _make(ctx, "1d", seed=1)
    fsdp2.load_safetensors(model, tmp_path)
    _same(_locals(model), {key: value.bfloat16().float() for key, value in _locals(_make(ctx, "1d")).items()})
    streamed = dict(fsdp2.stream_full_params(model, dtype=torch.bfloat16, device="cpu"))
    _same(streamed, expected)


def _without_blocks(name: str) -> str | None:
    return None if name.startswith("blocks") else f"model.{name}"


@distributed(2)
def test_names_may_differ_or_be_left_out(ctx: RankContext, tmp_path: Path) -> None:
    fsdp2.save_safetensors(_make(ctx, "1d"), tmp_path, rename=_without_blocks)
    assert set(_read(tmp_path)) == {f"model.{part}.{kind}" for part in ("entry", "exit") for kind in ("weight", "bias")}
    model, before, expected = (_make(ctx, "1d", seed=seed) for seed in (1, 1, 0))
    back = {f"model.entry.{kind}": f"entry.{kind}" for kind in ("weight", "bias")}
    missing, unexpected = fsdp2.load_safetensors(model, tmp_path, rename=back, strict=False)
    assert missing == [name for name in _locals(model) if not name.startswith("entry")]
    assert unexpected == ["model.exit.weight", "model.exit.bias"]
    for name, value in _locals(model).items():
        assert torch.equal(value, _locals(expected if name.startswith("entry") else before)[name]), name


@distributed(2)
def test_buffers_are_saved_as_the_first_rank_has_them(ctx: RankContext, tmp_path: Path) -> None:
    """In whichever file they are, so also in those that the other rank writes."""
    model = _make(ctx, "buffers")
    for block in model.blocks:
        block.norm.running_mean.fill_(ctx.rank + 1)
        block.norm.num_batches_tracked.fill_(ctx.rank + 1)
    fsdp2.save_safetensors(model, tmp_path, max_shard_size=1)
    for key, value in _read(tmp_path).items():
        if key.endswith(("running_mean", "num_batches_tracked")):
            assert torch.equal(value, torch.ones_like(value)), key


class Quantised(nn.Module):
    """A frozen NF4 weight and a bf16-gathered one; a forward adds them."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(NF4Tensor.quantise(torch.randn(64, 64)), requires_grad=False)
        self.layer = nn.Linear(64, 64)


@distributed(2)
def test_subclasses_take_and_give_plain_values(ctx: RankContext, tmp_path: Path) -> None:
    """A quantised weight is quantised at load; to the same codes, since its file holds dequantised values."""

    def make(seed: int) -> nn.Module:
        model = seeded(Quantised, seed)
        wrap_parameters(model.layer, BFloat16AllGatherTensor)
        return fully_shard(model, mesh=ctx.mesh_1d())

    plain = seeded(Quantised)
    expected = {
        "codes": plain.codes.dequantise(),
        "layer.weight": plain.layer.weight.detach(),
        "layer.bias": plain.layer.bias.detach(),
    }
    fsdp2.save_safetensors(make(0), tmp_path)
    _same(_read(tmp_path), expected)
    model = make(1)
    fsdp2.load_safetensors(model, tmp_path)
    _same(dict(fsdp2.stream_full_params(model)), expected)
    assert type(model.codes.to_local()) is NF4Tensor
    assert type(model.layer.weight.to_local()) is BFloat16AllGatherTensor


@distributed(2)
def test_payloads_that_hooks_keep_are_outdated_after_loading(ctx: RankContext, tmp_path: Path) -> None:
    def make(seed: int) -> Any:
        model = seeded(MLP, seed)
        model.entry.weight = nn.Parameter(KeptHalved(model.entry.weight.detach()))
        return _units(model, ctx.mesh_1d())

    expected, model = make(0), make(1)
    fsdp2.save_safetensors(expected, tmp_path)
    batch = model.batch(torch.Generator())
    with torch.no_grad():
        assert not torch.equal(model(*batch), expected(*batch))
        fsdp2.load_safetensors(model, tmp_path)
        assert torch.equal(model(*batch), expected(*batch))


# In the middle of training


def _step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    batch = model.batch(generator)
    loss = model.loss(model(*batch), batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@distributed(2)
def test_training_goes_on_as_if_nothing_was_streamed_saved_or_broken_off(ctx: RankContext, tmp_path: Path) -> None:
    models = [_units(seeded(MLP), ctx.mesh_1d(), reshard_after_forward=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for seed in range(3):
        first, second = (_step(*pair, seed) for pair in zip(models, optimizers, strict=True))
        assert torch.equal(first, second)
        with torch.no_grad():  # leaves the model unsharded
            models[0](models[0].batch(torch.Generator())[0])
        for name, value in fsdp2.stream_full_params(models[0]):
            assert torch.equal(value, models[1].get_parameter(name).full_tensor())  # type: ignore[attr-defined]
            if seed == 1 and name.startswith("blocks.1"):
                break
            value.zero_()  # the caller's own
        fsdp2.save_safetensors(models[0], tmp_path)
    _same(_read(tmp_path), {name: p.full_tensor().cpu() for name, p in models[1].named_parameters()})


@distributed(2)
def test_streaming_gathers_a_unit_in_one_launch(ctx: RankContext) -> None:
    model = _units(seeded(MLP), ctx.mesh_1d())
    units = [".".join(name.split(".")[:2]) if "blocks" in name else "root" for name, _ in model.named_parameters()]
    runs = [name for name, _ in itertools.groupby(units)]
    assert len(runs) < len(units) / 2
    with CommDebugMode() as mode:
        names = [name for name, _ in fsdp2.stream_full_params(model)]
    assert names == [name for name, _ in model.named_parameters()]
    assert mode.get_comm_counts() == {torch.ops.c10d._allgather_base_: len(runs)}


@distributed(2)
def test_parameters_that_the_user_has_replaced_count(ctx: RankContext, tmp_path: Path) -> None:
    _write(tmp_path, _unsharded("1d"), ctx.rank)
    expected, model = _make(ctx, "1d"), _make(ctx, "1d", seed=1)
    batch = model.batch(torch.Generator())
    with torch.no_grad():
        model(*batch)  # leaves the root unsharded
        value = torch.randn(16, 16)
        old = model.state_dict()["entry.weight"]
        model.entry.weight = nn.Parameter(distribute_tensor(value, old.device_mesh, old.placements))
        assert torch.equal(dict(fsdp2.stream_full_params(model))["entry.weight"], value)
        model.entry.weight = nn.Parameter(distribute_tensor(value, old.device_mesh, old.placements))
        fsdp2.load_safetensors(model, tmp_path)
        assert torch.equal(model(*batch), expected(*batch))


@pytest.mark.parametrize("reshard", [True, False])
@distributed(2)
def test_what_was_gathered_before_is_outdated_after_loading(ctx: RankContext, reshard: bool, tmp_path: Path) -> None:
    _write(tmp_path, _unsharded("1d"), ctx.rank)
    expected = _make(ctx, "1d")
    model = _units(seeded(MLP, 1), ctx.mesh_1d(), reshard_after_forward=reshard)
    batch = model.batch(torch.Generator())
    with torch.no_grad():
        model(*batch)
        fsdp2.load_safetensors(model, tmp_path)
        assert torch.equal(model(*batch), expected(*batch))
        model.unshard()
        fsdp2.load_safetensors(model, tmp_path)
        assert torch.equal(model(*batch), expected(*batch))


@distributed(2)
def test_during_a_pass_all_three_are_refused(ctx: RankContext, tmp_path: Path) -> None:
    model = _make(ctx, "1d")
    errors: list[str] = []

    def call(*_: Any) -> None:
        for tool in (
            lambda: fsdp2.load_safetensors(model, tmp_path),
            lambda: fsdp2.save_safetensors(model, tmp_path),
            lambda: fsdp2.stream_full_params(model),
        ):
            errors.append(error_of(tool))

    handle = model.blocks[1].register_forward_hook(call)
    output = model(*model.batch(torch.Generator()))
    handle.remove()
    output.register_hook(call)
    output.sum().backward()
    names = ["load_safetensors", "save_safetensors", "stream_full_params"] * 2
    assert len(errors) == 6
    for error, name in zip(errors, names, strict=True):
        assert error.startswith(f"ScheduleError: {name}: a "), error
    assert "a forward of MLP is running" in errors[0]
    assert "a backward of MLP is running" in errors[3]
    with fsdp2.unsharded(model):
        assert error_of(lambda: fsdp2.stream_full_params(model)).startswith("ScheduleError: ")
    assert not list(tmp_path.iterdir())


# Errors


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in _locals(model).items()}


@distributed(2)
def test_all_ranks_raise_one_error_with_all_problems_and_nothing_is_loaded(ctx: RankContext, tmp_path: Path) -> None:
    state = _unsharded("1d").state_dict()
    state["entry.weight"] = state["entry.weight"][:, :5].contiguous()
    state["exit.bias"] = state["exit.bias"].int()
    state["more"] = state.pop("exit.weight")
    file = tmp_path / "model.safetensors"
    if ctx.rank == 0:
        safetensors.save_file(state, str(file))
    dist.barrier()
    model = _make(ctx, "1d", seed=1)
    before = _values(model)
    with pytest.raises(ValueError, match="does not fit this MLP") as raised:
        fsdp2.load_safetensors(model, tmp_path)
    assert sorted(str(raised.value).splitlines()[1:]) == [
        "- 'entry.weight' has shape (16, 5) in model.safetensors, expected (16, 16).",
        "- 'exit.bias' is I32 in model.safetensors, which cannot be cast to torch.float32.",
        "- Missing in the files: 'exit.weight'. Pass rename=..., or strict=False to leave them out.",
        "- Not in the model: 'more'. Pass rename=..., or strict=False to leave them out.",
    ]
    _same(_values(model), before)


@distributed(2)
def test_a_problem_of_one_rank_is_an_error_on_all(ctx: RankContext, tmp_path: Path) -> None:
    """One rank sees another folder, as on a disk that is not shared, or gets another argument."""
    mine = tmp_path / str(ctx.rank)
    mine.mkdir()
    if ctx.rank == 0:
        safetensors.save_file(_unsharded("1d").state_dict(), str(mine / "model.safetensors"))
    else:
        (mine / "model.safetensors").write_bytes(b"cut")
    dist.barrier()
    model = _make(ctx, "1d", seed=1)
    before = _values(model)
    with pytest.raises(ValueError, match=r"(?s)^On rank 1: load_safetensors: .* cannot be read: SafetensorError"):
        fsdp2.load_safetensors(model, mine)
    _same(_values(model), before)

    def rename(name: str) -> str:
        return {}[name] if ctx.rank == 1 else name

    with pytest.raises(RuntimeError, match=r"^On rank 1: rename\('entry.weight'\) raised KeyError"):
        fsdp2.save_safetensors(model, tmp_path / "new", rename=rename)
    with pytest.raises(ValueError, match="rank 1 would write other tensors than rank 0"):
        fsdp2.save_safetensors(model, tmp_path / "new", dtype=torch.bfloat16 if ctx.rank else None)
    with pytest.raises(
        TypeError, match=r"^On rank 1: save_safetensors: folder is a NoneType, expected a str or a Path"
    ):
        fsdp2.save_safetensors(model, None if ctx.rank else tmp_path / "new")  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists() or not list((tmp_path / "new").iterdir())


@distributed(2)
def test_a_reserved_key_is_refused_and_the_old_checkpoint_stays(ctx: RankContext, tmp_path: Path) -> None:
    model = _make(ctx, "1d")
    fsdp2.save_safetensors(model, tmp_path)
    dist.barrier()
    before = (tmp_path / "model.safetensors").read_bytes()
    for rename in ({"exit.bias": "__metadata__"}, {"exit.bias": "__metadata__"} if ctx.rank else None):
        with pytest.raises(
            ValueError, match=r"'exit.bias' would get the key '__metadata__', which safetensors reserves"
        ):
            fsdp2.save_safetensors(model, tmp_path, rename=rename)
    dist.barrier()
    assert [each.name for each in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


@distributed(2)
def test_buffers_whose_elements_share_memory_are_refused_before_anything_is_loaded(
    ctx: RankContext, tmp_path: Path
) -> None:
    def make(seed: int) -> nn.Module:
        model = seeded(MLP, seed)
        model.register_buffer("expanded", torch.ones(1).expand(3))
        return fully_shard(model, mesh=ctx.mesh_1d())

    model = make(1)
    before = _values(model)
    fsdp2.save_safetensors(make(0), tmp_path)
    with pytest.raises(ValueError, match=r"- 'expanded' of the model has elements that share memory"):
        fsdp2.load_safetensors(model, tmp_path)
    _same(_values(model), before)
    model.expanded = model.expanded.contiguous()
    fsdp2.load_safetensors(model, tmp_path)
    _same(_locals(model), _locals(make(0)))


@distributed(2)
def test_a_rank_that_cannot_write_leaves_the_old_checkpoint_and_no_files(ctx: RankContext, tmp_path: Path) -> None:
    old, new = _make(ctx, "1d"), _make(ctx, "1d", seed=1)
    fsdp2.save_safetensors(old, tmp_path, max_shard_size=3000)
    dist.barrier()
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    assert len(before) > 2
    original = save_weights._bytes_of
    if ctx.rank == 1:

        def full(tensor: Tensor) -> Any:
            raise OSError(28, "No space left on device")

        save_weights._bytes_of = full  # type: ignore[assignment]
    try:
        named = re.escape(f"On rank 1: save_safetensors: {tmp_path}/model-")
        with pytest.raises(OSError, match=rf"^{named}.* could not be written \(OSError: .* No space left"):
            fsdp2.save_safetensors(new, tmp_path, max_shard_size=3000)
    finally:
        save_weights._bytes_of = original
    dist.barrier()
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def _save_and_die(ctx: RankContext, folder: str, after: int) -> None:
    """Rank 1 is killed when it has written ``after`` tensors."""
    model = _make(ctx, "1d", seed=1)
    original, count = save_weights._bytes_of, 0

    def counted(tensor: Tensor) -> Any:
        nonlocal count
        count += 1
        if ctx.rank == 1 and count > after:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(tensor)

    save_weights._bytes_of = counted  # type: ignore[assignment]
    fsdp2.save_safetensors(model, folder, max_shard_size=3000)


@pytest.mark.parametrize("after", [0, *long(2)])
def test_killing_a_rank_leaves_the_old_checkpoint(after: int, tmp_path: Path) -> None:
    expected = _unsharded("1d").state_dict()
    fsdp2.save_safetensors(_unsharded("1d"), tmp_path, max_shard_size=3000)
    pool = WorkerPool(2)
    with pytest.raises(WorkerError, match="died with exit code -9"):
        pool.run(_save_and_die, folder=str(tmp_path), after=after)
    _same(dict(sorted(_read(tmp_path).items())), dict(sorted(expected.items())))
    fsdp2.save_safetensors(_unsharded("1d"), tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["model.safetensors"]  # nothing is left of the other two


@distributed(2)
def test_on_a_terminal_the_first_rank_shows_where_loading_saving_and_streaming_are(
    ctx: RankContext, tmp_path: Path
) -> None:
    model = _make(ctx, "1d")

    def stream() -> None:
        for _ in fsdp2.stream_full_params(model):
            pass

    for label, work in (
        ("save", functools.partial(fsdp2.save_safetensors, model, tmp_path)),
        ("load", functools.partial(fsdp2.load_safetensors, model, tmp_path)),
        ("stream", stream),
    ):
        shown = on_a_terminal(work)
        assert (f"{label}: 100%" in shown) is (ctx.rank == 0), (label, shown)
