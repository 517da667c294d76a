"""Weights in and out: what is loaded from files, saved to files and streamed, for every way to shard a model.

The oracles are safetensors itself, the unsharded model, and the same model sharded from its values: bit for bit.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import resource
import shutil
import signal
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

import fsdp2
from fsdp2 import DataParallelMeshDims, MixedPrecisionPolicy, ParamPlacement, fully_shard
from fsdp2.checkpoint import open_checkpoint, save_weights
from fsdp2.checkpoint.open_checkpoint import OpenCheckpoint
from fsdp2.checkpoint.save_folder import SaveFolder
from fsdp2.core.comm.offload import StagedOffloadPolicy
from fsdp2.tensors import (
    BFloat16AllGatherTensor,
    Float8AllGatherTensor,
    NF4Tensor,
    precompute_float8_scales,
    wrap_parameters,
)
from tests.distributed.changes import step_and_zero_all, whole
from tests.distributed.support import seeded, shard_each, shard_units
from tests.harness.comms import gathers_noted
from tests.harness.compare import compare_values
from tests.harness.distributed import RankContext, distributed
from tests.harness.extensions import Halved
from tests.harness.golden import golden_on_ranks, texts_beside
from tests.harness.messages import error_of, wrapped
from tests.harness.models import MLP, Buffers, ParityModel, SharedModules, Transformer, Uneven
from tests.harness.pool import WorkerError, WorkerPool
from tests.harness.selection import long
from tests.harness.terminal import on_a_terminal
from tests.harness.training import Step, one_backward
from tests.harness.weight_files import INDEX, ONE, assert_same, bytes_of, locals_of, read, safetensors, write
from tests.parity.test_model_parallel import tensor_parallel


def _last(param: nn.Parameter) -> Shard:
    return Shard(param.ndim - 1)


def _ignored(model: Any, ctx: RankContext) -> Any:
    """A plain parameter, and one that is a DTensor but none of ours."""
    mesh, weight = ctx.mesh_1d(), model.entry.weight
    model.entry.weight = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(1)]))
    return shard_units(model, mesh=mesh, ignored_params={model.exit.weight, model.entry.weight})


def _tensor_parallel(model: Any, mesh: DeviceMesh, **options: Any) -> Any:
    tensor_parallel(model, mesh["tp"])
    return shard_units(model, mesh=mesh["dp"], **options)


def _on_full_mesh(model: Any, ctx: RankContext) -> Any:
    """All parameters on a mesh with all axes; no axis shards them, so that they stay whole on the data-parallel one."""
    mesh = ctx.mesh(dp=ctx.world_size // 2, tp=2)

    def place(name: str, module: nn.Module, of: DeviceMesh) -> None:
        for key, param in list(module.named_parameters(recurse=False)):
            placements = [Replicate(), Shard(0)]
            module.register_parameter(key, nn.Parameter(distribute_tensor(param.detach(), of, placements)))

    distribute_module(model, mesh, place)
    return shard_units(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))


def _by_torch(model: Any, ctx: RankContext) -> Any:
    """Sharded by torch's ``fully_shard``: DTensors that fsdp2 does not manage."""
    for unit in (*model.units(), model):
        torch_fully_shard(unit, mesh=ctx.mesh_1d())
    return model


def _experts(model: Any, ctx: RankContext) -> Any:
    mesh = ctx.mesh_2d(2, 2)
    experts = {block.down.weight: ParamPlacement(Shard(1), mesh["shard"]) for block in model.blocks}
    return shard_units(model, mesh=mesh._flatten("everybody"), shard_placement_fn=experts.get)


def _1d(model: Any, ctx: RankContext, **options: Any) -> Any:
    return shard_units(model, mesh=ctx.mesh_1d(), **options)


# The model, and how a rank shards it.
_Ways = dict[str, tuple[Callable[[], ParityModel], Callable[[Any, RankContext], Any]]]
ON_2: _Ways = {
    "1d": (MLP, _1d),
    "uneven": (Uneven, _1d),
    "last dim": (Uneven, functools.partial(_1d, shard_placement_fn=_last)),
    "tied": (functools.partial(Transformer, tied=True), _1d),
    "shared modules": (SharedModules, _1d),
    "buffers": (Buffers, _1d),
    "ignored": (MLP, _ignored),
    "offloaded": (MLP, functools.partial(_1d, offload_policy=StagedOffloadPolicy())),
    "bf16 compute": (MLP, functools.partial(_1d, mp_policy=MixedPrecisionPolicy(torch.bfloat16))),
    "tp": (MLP, lambda model, ctx: _tensor_parallel(model, ctx.mesh(dp=1, tp=2))),
    "replicated": (MLP, lambda model, ctx: shard_units(model, mesh=ctx.mesh_2d(2, 1))),
    "by torch": (Uneven, _by_torch),
    "unsharded": (Buffers, lambda model, ctx: model),
}
SHORT = ("uneven", "tied", "ignored", "offloaded", "bf16 compute", "tp", "replicated")
_MLP_OF_5 = functools.partial(MLP, dim=5)
ON_4: _Ways = {
    "hsdp": (Uneven, lambda model, ctx: shard_units(model, mesh=ctx.mesh_2d(2, 2))),
    "tp x fsdp": (_MLP_OF_5, lambda model, ctx: _tensor_parallel(model, ctx.mesh(dp=2, tp=2))),
    "fsdp x tp": (_MLP_OF_5, lambda model, ctx: _tensor_parallel(model, ctx.mesh(tp=2, dp=2))),
    "tp on the dim of fsdp": (
        _MLP_OF_5,
        lambda model, ctx: _tensor_parallel(model, ctx.mesh(dp=2, tp=2), shard_placement_fn=_last),
    ),
    "full mesh": (functools.partial(MLP, dim=10), _on_full_mesh),
    "experts": (MLP, _experts),
    "more ranks than rows": (Uneven, _1d),
}


NO_FORWARD = {"ignored", "full mesh", "unsharded"}  # DTensors take no plain inputs, and no rank averages buffers
WAYS = {**ON_2, **ON_4}


def _make(ctx: RankContext, place: str, device: str | None = None, seed: int = 0) -> Any:
    build, shard = WAYS[place]
    with torch.device(device or torch.get_default_device()):
        return shard(seeded(build, seed), ctx)


def _unsharded(place: str, seed: int = 0) -> nn.Module:
    with torch.device("cpu"):
        return seeded(WAYS[place][0], seed)


def _once(model: nn.Module) -> dict[str, Tensor]:
    """The state dict without further names of tied weights."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {key: value.detach().clone() for key, value in state.items() if first.setdefault(id(value), key) == key}


_same = functools.partial(compare_values, "weights")


def _batch(model: Any) -> Any:
    return model.batch(torch.Generator().manual_seed(0))


def _spoil(model: nn.Module) -> None:
    """Fill what ``to_empty`` has made, and leave non-persistent buffers as forwards need them."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            local.fill_(float("nan") if local.is_floating_point() else 0)


class _Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("inv_freq", 1 / torch.arange(1.0, 5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.inv_freq


@golden_on_ranks()
def test_buffers_that_no_file_has_are_warned_of_until_they_are_filled(ctx: RankContext, tmp_path: Path) -> str:
    """After ``to_empty``; not with one buffer written and one replaced, nor without the meta device."""
    file = tmp_path / f"model{ctx.rank}.safetensors"
    whole = seeded(lambda: nn.Sequential(_Rotary(), _Rotary()))
    safetensors.save_file(whole.state_dict(), file)
    model = nn.Sequential(_Rotary(), _Rotary()).to("meta")
    shard_each(*model, model, mesh=ctx.mesh_1d())
    model.to_empty(device=ctx.device_type).double().float()  # a cast gives no values

    def warned(loaded: nn.Module) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fsdp2.checkpoint.load_safetensors(loaded, file)
        assert all(Path(each.filename) == Path(__file__) for each in caught)
        return [wrapped(str(each.message)) for each in caught]

    (warning,) = warned(model)
    model[0].inv_freq.copy_(1 / torch.arange(1.0, 5))  # type: ignore[operator, union-attr]
    model[1].inv_freq = 1 / torch.arange(1.0, 5)
    assert warned(model) == warned(nn.Sequential(_Rotary(), _Rotary())) == []
    assert torch.equal(model(torch.ones(4)), whole(torch.ones(4)))
    return warning


def _loads_saves_and_streams(ctx: RankContext, place: str, tmp_path: Path) -> None:
    expected = _make(ctx, place)
    write(tmp_path, ctx.rank, _once(_unsharded(place)))
    for device in ("meta", None):
        model = _make(ctx, place, device, seed=1)
        if device == "meta":
            model.to_empty(device="cpu" if place == "offloaded" else ctx.device_type)
            _spoil(model)
        assert fsdp2.checkpoint.load_safetensors(model, tmp_path) == ([], [])
        _same(locals_of(model), locals_of(expected))
        if place not in NO_FORWARD:
            batch = _batch(model)
            assert torch.equal(model.loss(model(*batch), batch), expected.loss(expected(*batch), batch))
        if place == "buffers":
            expected = _make(ctx, place)  # forwards write buffers

    for size in ("5GB", 200):
        folder = tmp_path / str(size)
        fsdp2.checkpoint.save_safetensors(expected, folder, max_shard_size=size)
        assert (folder / INDEX).exists() is (size == 200)
        assert_same(read(folder), _once(_unsharded(place)))
        other = _make(ctx, place, seed=2)
        fsdp2.checkpoint.load_safetensors(other, folder)
        _same(locals_of(other), locals_of(expected))

    streamed = {}
    for name, value in fsdp2.checkpoint.stream_full_params(expected):
        streamed[name] = value.cpu().clone()
        value.zero_()  # the caller's own
    _same(locals_of(expected), locals_of(_make(ctx, place)))
    plain = {name: value.detach() for name, value in _unsharded(place).named_parameters()}
    _same(streamed, plain)
    last, ahead = ctx.world_size - 1, len(place) % 2
    for to_rank, nbytes in ((None, "3KiB"), (last, 1), (last, "1MiB")):
        stream = fsdp2.checkpoint.stream_full_params(expected, bucket_nbytes=nbytes, to_rank=to_rank, ahead=ahead)
        streamed = {name: value.cpu() for bucket in stream.buckets() for name, value in bucket.tensors}
        _same(streamed, plain if to_rank in (None, ctx.rank) else {})
    whole = _once(_unsharded(place))
    _same({name: value.cpu() for name, value in fsdp2.checkpoint.stream_full_params(expected, buffers=True)}, whole)


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
    fsdp2.checkpoint.save_safetensors(_make(ctx, "1d"), tmp_path, dtype=torch.bfloat16)
    assert_same(read(tmp_path), expected)
    model = _make(ctx, "1d", seed=1)
    fsdp2.checkpoint.load_safetensors(model, tmp_path)
    _same(locals_of(model), {key: value.bfloat16().float() for key, value in locals_of(_make(ctx, "1d")).items()})
    _same(dict(fsdp2.checkpoint.stream_full_params(model, dtype=torch.bfloat16, device="cpu")), expected)


def _without_blocks(name: str) -> str | None:
    return None if name.startswith("blocks") else f"model.{name}"


@distributed(2)
def test_names_may_differ_or_be_left_out(ctx: RankContext, tmp_path: Path) -> None:
    fsdp2.checkpoint.save_safetensors(_make(ctx, "1d"), tmp_path, rename=_without_blocks)
    assert set(read(tmp_path)) == {f"model.{part}.{kind}" for part in ("entry", "exit") for kind in ("weight", "bias")}
    model, before, expected = (_make(ctx, "1d", seed=seed) for seed in (1, 1, 0))
    back = {f"model.entry.{kind}": f"entry.{kind}" for kind in ("weight", "bias")}
    missing, unexpected = fsdp2.checkpoint.load_safetensors(model, tmp_path, rename=back, strict=False)
    assert missing == [name for name in locals_of(model) if not name.startswith("entry")]
    assert unexpected == ["model.exit.weight", "model.exit.bias"]
    for name, value in locals_of(model).items():
        assert torch.equal(value, locals_of(expected if name.startswith("entry") else before)[name]), name


@distributed(2)
def test_buffers_are_saved_as_the_first_rank_has_them(ctx: RankContext, tmp_path: Path) -> None:
    """In whichever file they are, so also in those that the other rank writes."""
    model = _make(ctx, "buffers")
    for block in model.blocks:
        block.norm.running_mean.fill_(ctx.rank + 1)
        block.norm.num_batches_tracked.fill_(ctx.rank + 1)
    fsdp2.checkpoint.save_safetensors(model, tmp_path, max_shard_size=1)
    for key, value in read(tmp_path).items():
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
    weight, bias = plain.layer.weight.detach(), plain.layer.bias.detach()
    expected = {"codes": plain.codes.dequantise(), "layer.weight": weight, "layer.bias": bias}
    fsdp2.checkpoint.save_safetensors(make(0), tmp_path)
    assert_same(read(tmp_path), expected)
    model = make(1)
    fsdp2.checkpoint.load_safetensors(model, tmp_path)
    _same(dict(fsdp2.checkpoint.stream_full_params(model)), expected)
    assert type(model.codes.to_local()) is NF4Tensor
    assert type(model.layer.weight.to_local()) is BFloat16AllGatherTensor


@distributed(2)
def test_a_rank_that_gets_no_rows_makes_its_scale_anew_like_the_others(ctx: RankContext, tmp_path: Path) -> None:
    """Else one rank would ask for the largest magnitude of all, and the other one not."""
    layer, other = (nn.Linear(16, 1, bias=False) for _ in range(2))
    fsdp2.checkpoint.save_safetensors(other, tmp_path)
    wrap_parameters(layer, Float8AllGatherTensor)
    fully_shard(layer, mesh=ctx.mesh_1d())
    precompute_float8_scales(layer)
    fsdp2.checkpoint.load_safetensors(layer, tmp_path)
    layer.unshard()
    assert torch.allclose(layer.weight, other.weight, rtol=0.07)
    _same(locals_of(layer), {"weight": other.weight.detach()[ctx.rank :]})


# In the middle of training


def _with_payload() -> Any:
    model = MLP()
    model.entry.weight = nn.Parameter(Halved(model.entry.weight.detach()))
    return model


@pytest.mark.parametrize(("build", "reshard"), [(MLP, True), (MLP, False), (_with_payload, True)])
@distributed(2)
def test_what_was_gathered_is_outdated_after_loading(
    ctx: RankContext, build: Any, reshard: bool, tmp_path: Path
) -> None:
    """Also the payload that a hook keeps."""
    expected, model = (_1d(seeded(build, seed), ctx, reshard_after_forward=reshard) for seed in (0, 1))
    fsdp2.checkpoint.save_safetensors(expected, tmp_path)
    batch = _batch(model)
    with torch.no_grad():
        assert not torch.equal(model(*batch), expected(*batch))
        for gather in (lambda: None, model.unshard):
            gather()
            fsdp2.checkpoint.load_safetensors(model, tmp_path)
            assert torch.equal(model(*batch), expected(*batch))


@distributed(2)
def test_parameters_that_the_user_has_replaced_count(ctx: RankContext, tmp_path: Path) -> None:
    expected, model = _make(ctx, "1d"), _make(ctx, "1d", seed=1)
    fsdp2.checkpoint.save_safetensors(expected, tmp_path)
    batch = _batch(model)
    with torch.no_grad():
        model(*batch)  # leaves the root unsharded
        old = model.state_dict()["entry.weight"]
        value = torch.randn(16, 16)
        model.entry.weight = nn.Parameter(distribute_tensor(value, old.device_mesh, old.placements))
        assert torch.equal(dict(fsdp2.checkpoint.stream_full_params(model))["entry.weight"], value)
        model.entry.weight = nn.Parameter(distribute_tensor(value, old.device_mesh, old.placements))
        fsdp2.checkpoint.load_safetensors(model, tmp_path)
        assert torch.equal(model(*batch), expected(*batch))


@distributed(2)
def test_training_goes_on_as_if_nothing_was_streamed_saved_or_broken_off(ctx: RankContext, tmp_path: Path) -> None:
    models = [_1d(seeded(MLP), ctx, reshard_after_forward=False) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    for index in range(3):
        assert torch.equal(*(one_backward(Step(index, ctx.rank, None), model)[0] for model in models))
        stream = fsdp2.checkpoint.stream_full_params(models[0], bucket_nbytes=600, to_rank=0, ahead=1)
        with suppress(OSError, RuntimeError):  # gradients stay
            for bucket in stream.buckets():
                bucket.flat.zero_()  # the caller's own
                if index == 1:
                    raise OSError
        step_and_zero_all(optimizers)
        with torch.no_grad():  # leaves the model unsharded
            models[0](*_batch(models[0]))
        expected = whole(models[1])
        for name, value in fsdp2.checkpoint.stream_full_params(models[0]):
            assert torch.equal(value, expected[name])
            if index == 1 and name.startswith("blocks.1"):
                break
            value.zero_()  # the caller's own
        fsdp2.checkpoint.save_safetensors(models[0], tmp_path)
    assert_same(read(tmp_path), {name: value.cpu() for name, value in expected.items()})


@distributed(2)
def test_streaming_gathers_a_unit_in_one_launch(ctx: RankContext) -> None:
    model = _make(ctx, "1d")
    units = [".".join(name.split(".")[:2]) if "blocks" in name else "root" for name, _ in model.named_parameters()]
    runs = [name for name, _ in itertools.groupby(units)]
    assert len(runs) < len(units) / 2
    with gathers_noted() as launches:
        names = [name for name, _ in fsdp2.checkpoint.stream_full_params(model)]
    assert names == [name for name, _ in model.named_parameters()]
    assert len(launches) == len(runs)


@distributed(2)
def test_during_a_pass_all_three_are_refused(ctx: RankContext, tmp_path: Path) -> None:
    model = _make(ctx, "1d")
    errors: list[str] = []

    def call(*_: Any) -> None:
        errors.append(error_of(lambda: fsdp2.checkpoint.load_safetensors(model, tmp_path)))
        errors.append(error_of(lambda: fsdp2.checkpoint.save_safetensors(model, tmp_path)))
        errors.append(error_of(lambda: fsdp2.checkpoint.stream_full_params(model)))

    handle = model.blocks[1].register_forward_hook(call)
    output = model(*_batch(model))
    handle.remove()
    output.register_hook(call)
    output.sum().backward()
    starts = [
        f"ScheduleError: {name}: a {what} of MLP is running"
        for what in ("forward", "backward")
        for name in ("load_safetensors", "save_safetensors", "stream_full_params")
    ]
    assert [error[: len(start)] for error, start in zip(errors, starts, strict=True)] == starts
    with fsdp2.unsharded(model):
        assert error_of(lambda: fsdp2.checkpoint.stream_full_params(model)).startswith("ScheduleError: ")
    assert not list(tmp_path.iterdir())


# Errors


@distributed(2)
def test_all_ranks_raise_one_error_with_all_problems_and_nothing_is_loaded(ctx: RankContext, tmp_path: Path) -> None:
    good = {**_unsharded("1d").state_dict(), "expanded": torch.ones(3, device="cpu")}
    state = {**good, "entry.weight": good["entry.weight"][:, :5].contiguous(), "exit.bias": good["exit.bias"].int()}
    state["more"] = state.pop("exit.weight")
    write(tmp_path / "good", ctx.rank, good)
    write(tmp_path / "bad", ctx.rank, state)
    model = _make(ctx, "1d", seed=1)
    model.register_buffer("expanded", torch.ones(1).expand(3))
    before = locals_of(model)
    with pytest.raises(ValueError, match="does not fit this MLP") as raised:
        fsdp2.checkpoint.load_safetensors(model, tmp_path / "bad")
    texts_beside(__file__).check("all problems", wrapped("\n".join(sorted(str(raised.value).splitlines()[1:]))))
    _same(locals_of(model), before)
    model.expanded = model.expanded.contiguous()
    fsdp2.checkpoint.load_safetensors(model, tmp_path / "good")
    _same(locals_of(model), {"expanded": good["expanded"], **locals_of(_make(ctx, "1d"))})


@distributed(2)
def test_a_problem_of_one_rank_is_an_error_on_all(ctx: RankContext, tmp_path: Path) -> None:
    """One rank sees another folder, as on a disk that is not shared, or gets another argument."""
    mine, new = tmp_path / str(ctx.rank), tmp_path / "new"
    mine.mkdir()
    if ctx.rank == 0:
        safetensors.save_file(_unsharded("1d").state_dict(), str(mine / ONE))
    else:
        (mine / ONE).write_bytes(b"cut")
    dist.barrier()
    model = _make(ctx, "1d", seed=1)
    before = locals_of(model)

    def rename(name: str) -> str:
        return {}[name] if ctx.rank == 1 else name

    load, save = (
        functools.partial(each, model)
        for each in (fsdp2.checkpoint.load_safetensors, fsdp2.checkpoint.save_safetensors)
    )
    for said, call in (
        (r"ValueError: On rank 1: load_safetensors: .* cannot be read: SafetensorError", lambda: load(mine)),
        (r"RuntimeError: On rank 1: rename\('entry.weight'\) raised KeyError", lambda: save(new, rename=rename)),
        (
            "ValueError: .*rank 1 would write other tensors than rank 0",
            lambda: save(new, dtype=torch.bfloat16 if ctx.rank else None),
        ),
        (
            "TypeError: On rank 1: save_safetensors: folder is None, of type NoneType, expected a path",
            lambda: save(None if ctx.rank else new),  # type: ignore[arg-type]
        ),
    ):
        assert re.match(said, " ".join(error_of(call).split())), said
    failing = mock.patch("safetensors.safe_open", side_effect=RuntimeError("unable to open file"))
    with failing if ctx.rank else nullcontext():  # torch opens the file once more, and has errors of its own
        assert re.search(r"(?s)On rank 1: .*\sRuntimeError:\sunable\sto", error_of(lambda: load(tmp_path / "0")))
    _same(locals_of(model), before)
    assert not new.exists() or not list(new.iterdir())


@distributed(2)
def test_a_reserved_key_is_refused_and_the_old_checkpoint_stays(ctx: RankContext, tmp_path: Path) -> None:
    model, reserved = _make(ctx, "1d"), {"exit.bias": "__metadata__"}
    fsdp2.checkpoint.save_safetensors(model, tmp_path)
    dist.barrier()
    before = bytes_of(tmp_path)
    for rename in (reserved, reserved if ctx.rank else None):
        with pytest.raises(ValueError, match=r"'exit.bias' would get the key '__metadata__', which safetensors reser"):
            fsdp2.checkpoint.save_safetensors(model, tmp_path, rename=rename)
    dist.barrier()
    assert bytes_of(tmp_path) == before


@pytest.mark.parametrize(("size", "writer", "file"), [(3000, 1, "model-"), ("5GB", 0, ONE)])
@distributed(2)
def test_a_rank_that_cannot_write_leaves_the_old_checkpoint_and_no_files(
    ctx: RankContext, tmp_path: Path, size: int | str, writer: int, file: str
) -> None:
    """No file of ``writer`` may grow beyond 500 bytes, as on a disk that is full."""
    fsdp2.checkpoint.save_safetensors(_make(ctx, "1d"), tmp_path, max_shard_size=size)
    dist.barrier()
    new, before = _make(ctx, "1d", seed=1), bytes_of(tmp_path)
    assert (len(before) > 2) is (size == 3000)
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500 if ctx.rank == writer else limit, most))
    try:
        named = re.escape(f"On rank {writer}: save_safetensors: {tmp_path / file}")
        with pytest.raises(OSError, match=rf"^{named}.* could not be written \(OSError: .* too large\).* Make room"):
            fsdp2.checkpoint.save_safetensors(new, tmp_path, max_shard_size=size)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    dist.barrier()
    assert bytes_of(tmp_path) == before


# Folders


@pytest.mark.parametrize("size", ["5GB", 3000])
@distributed(2)
def test_folders_that_ranks_do_not_share_take_only_what_rank_0_writes(
    ctx: RankContext, tmp_path: Path, size: int | str
) -> None:
    """As disks of nodes."""
    mine, model = tmp_path / str(ctx.rank), _make(ctx, "1d", seed=1)
    mine.mkdir()
    fsdp2.checkpoint.save_safetensors(_make(ctx, "1d"), mine)
    before = bytes_of(mine)
    assert (list(before) == [ONE]) is (ctx.rank == 0)
    if size == "5GB":
        fsdp2.checkpoint.save_safetensors(model, mine, max_shard_size=size)
        assert (bytes_of(mine) == before) is (ctx.rank == 1)
    else:
        with pytest.raises(FileNotFoundError, match=r"On rank 1: .* is another folder on this rank than on ran"):
            fsdp2.checkpoint.save_safetensors(model, mine, max_shard_size=size)
        dist.barrier()
        assert bytes_of(mine) == before


@distributed(2)
def test_of_two_saves_in_one_folder_one_raises_on_all_its_ranks(ctx: RankContext, tmp_path: Path) -> None:
    """Each rank saves alone, then both together while another job has the folder locked."""
    alone = [dist.new_group([rank]) for rank in range(2)][ctx.rank]
    model, original = _unsharded("1d"), save_weights._bytes_of

    def wait_for_other(tensor: Tensor) -> Any:
        save_weights._bytes_of = original
        dist.barrier()
        dist.barrier()
        return original(tensor)

    if ctx.rank == 0:
        save_weights._bytes_of = wait_for_other  # type: ignore[assignment]
        fsdp2.checkpoint.save_safetensors(model, tmp_path, max_shard_size=3000, group=alone)
    else:
        dist.barrier()
        with pytest.raises(OSError, match="another save writes to"):
            fsdp2.checkpoint.save_safetensors(model, tmp_path, max_shard_size=3000, group=alone)
        dist.barrier()
    dist.barrier()
    before, other = bytes_of(tmp_path), SaveFolder(tmp_path)
    assert_same(read(tmp_path), model.state_dict())
    dist.barrier()
    if ctx.rank == 0:
        other.lock()
    with pytest.raises(OSError, match="another save writes to"):
        fsdp2.checkpoint.save_safetensors(_make(ctx, "1d", seed=1), tmp_path, max_shard_size=3000)
    other.close()
    dist.barrier()
    assert bytes_of(tmp_path) == before


@distributed(2)
def test_ranks_that_find_different_checkpoints_load_none(ctx: RankContext, tmp_path: Path) -> None:
    """Copies are no other checkpoint."""
    saved = [tmp_path / str(seed) for seed in range(2)]
    for seed, folder in enumerate(saved):
        fsdp2.checkpoint.save_safetensors(_make(ctx, "1d", seed=seed), folder)
    mine, model = tmp_path / f"of rank {ctx.rank}", _make(ctx, "1d", seed=2)
    shutil.copytree(saved[0], mine)
    fsdp2.checkpoint.load_safetensors(model, mine)
    _same(locals_of(model), locals_of(_make(ctx, "1d")))
    shutil.copy(saved[ctx.rank] / ONE, mine)
    with (
        mock.patch.object(open_checkpoint, "_PAUSE_S", 0),
        pytest.raises(ValueError, match="rank 1 finds another chec"),
    ):
        fsdp2.checkpoint.load_safetensors(model, mine)
    _same(locals_of(model), locals_of(_make(ctx, "1d")))


@pytest.mark.parametrize("opens_first", [0, 1])
@pytest.mark.parametrize("size", ["5GB", 3000])
@distributed(2)
def test_ranks_load_one_checkpoint_though_a_save_comes_between_them(
    ctx: RankContext, tmp_path: Path, size: int | str, opens_first: int
) -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][ctx.rank]
    fsdp2.checkpoint.save_safetensors(_make(ctx, "1d"), tmp_path, max_shard_size=size)
    model, is_first, original = _make(ctx, "1d", seed=2), ctx.rank == opens_first, open_checkpoint.OpenCheckpoint
    dist.barrier()

    def opened(*args: Any) -> OpenCheckpoint:
        open_checkpoint.OpenCheckpoint = original  # type: ignore[misc]
        if is_first:
            found = original(*args)
        else:
            dist.barrier()
            fsdp2.checkpoint.save_safetensors(_unsharded("1d", seed=1), tmp_path, max_shard_size=size, group=alone)
            found = original(*args)
        if is_first:
            dist.barrier()
        return found

    open_checkpoint.OpenCheckpoint = opened  # type: ignore[assignment, misc]
    fsdp2.checkpoint.load_safetensors(model, tmp_path)
    _same(locals_of(model), locals_of(_make(ctx, "1d", seed=1)))


def _save_and_die(ctx: RankContext, folder: str, after: int, killed: int) -> None:
    """The rank ``killed`` is killed when it has written ``after`` tensors."""
    model, original, left = _make(ctx, "1d", seed=1), save_weights._bytes_of, iter(range(after))

    def counted(tensor: Tensor) -> Any:
        if ctx.rank == killed and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(tensor)

    save_weights._bytes_of = counted  # type: ignore[assignment]
    fsdp2.checkpoint.save_safetensors(model, folder, max_shard_size=3000)


@pytest.mark.parametrize("killed", [0, *long(1)])
@pytest.mark.parametrize("after", [0, *long(2)])
def test_killing_a_rank_leaves_the_old_checkpoint(after: int, killed: int, tmp_path: Path) -> None:
    """Nothing keeps the next save out: the lock has gone with the process."""
    fsdp2.checkpoint.save_safetensors(_unsharded("1d"), tmp_path, max_shard_size=3000)
    with pytest.raises(WorkerError, match="died with exit code -9"):
        WorkerPool(2).run(_save_and_die, folder=str(tmp_path), after=after, killed=killed)
    assert_same(read(tmp_path), _unsharded("1d").state_dict())
    fsdp2.checkpoint.save_safetensors(_unsharded("1d"), tmp_path)
    assert list(bytes_of(tmp_path)) == [ONE]  # nothing is left of the other two


@distributed(2)
def test_on_a_terminal_the_first_rank_shows_where_all_three_are(ctx: RankContext, tmp_path: Path) -> None:
    model = _make(ctx, "1d")
    for label, work in (
        ("save", lambda: fsdp2.checkpoint.save_safetensors(model, tmp_path)),
        ("load", lambda: fsdp2.checkpoint.load_safetensors(model, tmp_path)),
        ("stream", lambda: list(fsdp2.checkpoint.stream_full_params(model))),
    ):
        shown = on_a_terminal(work)
        assert (f"{label}: 100%" in shown) is (ctx.rank == 0), (label, shown)
