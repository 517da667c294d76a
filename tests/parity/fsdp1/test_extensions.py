"""``FSDPExtensions``: a user's extension, refused results, and tensor parallelism without one, as torch's class."""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fsdp2.fsdp1
from tests.docs.markdown import ROOT
from tests.harness.distributed import RankContext, distributed
from tests.harness.selection import long
from tests.parity.fsdp1.fronts import Front, as_torchs, assert_same, ours, same, with_ours
from tests.parity.fsdp1.kinds import FULL, FULL_SHARD, GRAD_OP, SHARDED
from tests.parity.setups import whole


@cache
def example() -> Any:
    with mock.patch.object(sys, "path", [str(ROOT / "docs" / "examples"), *sys.path]):
        return importlib.import_module("log_weights")


@contextmanager
def extension_set(extensions: Any) -> Iterator[Counter]:
    """Inside the block, wrappers get ``extensions``. Counts the calls of its methods."""
    calls: Counter[str] = Counter()

    class Counted:
        def __getattr__(self, name: str) -> Any:
            calls[name] += 1
            return getattr(extensions, name)

    counted = Counted()
    fsdp2.fsdp1.set_fsdp_extensions(counted)
    calls.clear()
    try:
        yield calls
    finally:
        fsdp2.fsdp1.set_fsdp_extensions(None)


class Plain(nn.Module):
    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_outputs, num_inputs))
        self.bias = nn.Parameter(torch.zeros(num_outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.exp(), self.bias)


def model_of(layer: Any, front: Front, **options: Any) -> Any:
    torch.manual_seed(0)
    return front.wrap(nn.Sequential(front.wrap(layer(8, 5), **options), nn.ReLU(), layer(5, 3)), **options)


@with_ours(2, both_modes=True)
def test_a_users_type_trains_as_plain_parameters_do(front: Front) -> None:
    expected = front.train(model_of(Plain, front), num_steps=4)
    with extension_set(example().LogExtensions()) as calls:
        model = model_of(example().PositiveLinear, front)
    assert calls == {"pre_flatten_transform": 4, "post_unflatten_transform": 2}  # the latter to check it
    assert_same(expected, front.train(model, num_steps=4))
    assert calls["post_unflatten_transform"] <= 2 + 4 * 2 * 2
    other = copy.deepcopy(model)
    assert_same(front.train(model), front.train(other))


@pytest.mark.parametrize("with_mesh", [True, False])
@with_ours(2, both_modes=True)
def test_a_users_type_is_shown_whole_saved_and_loaded(front: Front, with_mesh) -> None:
    log, options = example(), {"device_mesh": init_device_mesh("cpu", (2,))} if with_mesh else {}
    with extension_set(log.LogExtensions()) as calls:
        model, other = (model_of(log.PositiveLinear, front, **options) for _ in range(2))
    front.train(model)
    with model.summon_full_params(model), torch.no_grad():
        weights = {name: param.detach().clone() for name, param in model.named_parameters()}
        assert isinstance(model.module[0].weight, log.LogTensor)
        assert isinstance(model.module[2].weight, log.LogTensor)
        inside = model.state_dict()
        model.module[2].weight.add_(1)
    for kind in (FULL, SHARDED):
        calls.clear()
        with front.of_kind(model, kind), front.of_kind(other, kind):
            saved = model.state_dict()
            for param in other.parameters():
                param.detach().zero_()
            other.load_state_dict(saved)
            again = other.state_dict()
        assert list(saved) == list(inside) == list(again)
        if kind is FULL:
            assert type(saved["0.weight"]) is type(inside["0.weight"]) is log.LogTensor
            assert torch.equal(saved["2.weight"], weights["2.weight"] + 1)
            assert torch.equal(inside["2.weight"], weights["2.weight"])
            assert_same(*({k: v.as_subclass(torch.Tensor) for k, v in each.items()} for each in (saved, again)))
        else:
            assert isinstance(saved["0.weight"], DTensor) == with_mesh
            assert (calls[CUTTING[with_mesh]], calls[LOADING[with_mesh]]) == (8, 4)  # two were saved, one was loaded
    assert_same(front.train(model), front.train(other))


CUTTING, LOADING = ("chunk_tensor", "chunk_dtensor"), ("pre_load_state_dict_transform", "all_gather_dtensor")
NUM_NOTED = {"post_unflatten_transform": 1, "chunk_tensor": 2, "chunk_dtensor": 1}  # arguments behind the tensor


def cut_otherwise(tensor: torch.Tensor, rank: int, mesh: Any) -> DTensor:
    return distribute_tensor(tensor.as_subclass(torch.Tensor), mesh, [Shard(tensor.dim() - 1)], src_data_rank=None)


@contextmanager
def recording() -> Iterator[list[tuple[Any, ...]]]:
    """Inside the block, wrappers of both fronts get an extension that notes its calls, and cuts along the last dim."""
    log, calls = example().LogExtensions(), []

    class Recording:
        def __getattr__(self, name: str) -> Any:
            def noted(tensor: torch.Tensor, *given: Any, **options: Any) -> Any:
                kind = type(tensor) if name in CUTTING else ""
                calls.append((name, kind, tensor.shape, *given[: NUM_NOTED.get(name, 0)]))
                method = cut_otherwise if name == "chunk_dtensor" else getattr(log, name)
                return method(tensor, *given, **options)

            return noted

    made = Recording()

    def set_on(state: Any, device_mesh: Any = None) -> None:
        state._fsdp_extension = made

    # torch's class itself takes an extension only for tensor parallelism
    with mock.patch("torch.distributed.fsdp.fully_sharded_data_parallel._init_extension", set_on), extension_set(made):
        yield calls


def plain_states(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain_states(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [plain_states(each) for each in value]
    if isinstance(value, DTensor):
        return [str(value.placements), value.to_local()]
    if isinstance(value, ShardedTensor):
        return [value.shape, *(shard.tensor for shard in value.local_shards())]
    return [type(value).__name__, value.as_subclass(torch.Tensor)] if isinstance(value, example().LogTensor) else value


@pytest.mark.parametrize("with_mesh", [True, *long(False)])
@pytest.mark.parametrize("kind", [SHARDED, *long(FULL)])
@pytest.mark.parametrize("use_orig_params", [False, *long(True)])
@as_torchs(2)
def test_optimizer_states_go_through_the_extension_as_with_torchs_class(
    front: Front, kind, with_mesh, use_orig_params
) -> Any:
    mesh = init_device_mesh("cpu", (2,)) if with_mesh else None
    with recording() as calls:
        model, other = (
            front.wrap(example().PositiveLinear(8, 6), use_orig_params=use_orig_params, device_mesh=mesh)
            for _ in range(2)
        )
    made, fresh = (torch.optim.Adam(each.parameters(), lr=1e-2) for each in (model, other))
    for param in model.parameters():  # torch's class does not train parameters that an extension has transformed
        param.grad = param.detach().clone()
    made.step()
    calls.clear()
    # Torch's class saves wrong values on the CPU when it offloads: see test_optim_state_dicts.py.
    configs = (FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False)) if kind is FULL else ()
    with front.of_kind(model, kind, *configs), front.of_kind(other, kind, *configs), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        saved = front.cls.optim_state_dict(model, made)
        while_saving, while_loading = list(calls), []
        calls.clear()
        if front.is_ours or kind is SHARDED:  # torch's class cannot load what it has saved
            fresh.load_state_dict(front.cls.optim_state_dict_to_load(other, fresh, saved))
            while_loading = [call for call in calls if call[0] in LOADING]
            assert_same(plain_states(saved), plain_states(front.cls.optim_state_dict(other, fresh)))
        return [sorted(map(str, while_saving)), while_loading, plain_states(saved)]


@with_ours(2)
def test_wrong_results_at_construction_change_nothing(front: Front) -> None:
    log = example()
    for method, wrong in [
        ("pre_flatten_transform", lambda tensor: tensor),
        ("pre_flatten_transform", lambda tensor: (tensor, "log")),  # not plain
        ("post_unflatten_transform", lambda tensor, extension: None),
        ("post_unflatten_transform", lambda tensor, extension: tensor[1:]),
    ]:
        extensions, layer = log.LogExtensions(), log.PositiveLinear(4, 4)
        setattr(extensions, method, wrong)
        before = dict(layer.named_parameters())
        with extension_set(extensions), pytest.raises(fsdp2.ExtensionError, match=f"{method}.*'weight'"):
            front.wrap(layer)
        assert all(param is before[name] for name, param in layer.named_parameters())
        with extension_set(log.LogExtensions()):  # nothing has been left behind
            front.train(front.wrap(layer, use_orig_params=True), shape=(3, 4))


@with_ours(2)
def test_wrong_results_in_states_name_method_and_parameter(front: Front) -> None:
    mesh, log = init_device_mesh("cpu", (2,)), example()
    for device_mesh, what, method, wrong in [
        (mesh, "save", "chunk_dtensor", lambda tensor, rank, mesh: torch.zeros(4, 4)),
        (None, "save", "chunk_tensor", lambda tensor, *rest: torch.zeros(3)),
        (None, "save optimizer", "chunk_tensor", lambda *_: torch.zeros(3)),
        (mesh, "load", "all_gather_dtensor", lambda tensor, mesh: tensor),
        (None, "load", "pre_load_state_dict_transform", lambda tensor: tensor),
    ]:
        extensions = log.LogExtensions()
        with extension_set(extensions):
            model = front.wrap(log.PositiveLinear(4, 4), use_orig_params=True, device_mesh=device_mesh)
        made = torch.optim.Adam(model.parameters())
        front.train(model, made, num_steps=1, shape=(3, 4))
        before = [param.to_local().clone() for param in model.parameters()]
        with front.of_kind(model, SHARDED):
            saved = model.state_dict()
            setattr(extensions, method, wrong)
            calls = {
                "save": model.state_dict,
                "save optimizer": partial(model.optim_state_dict, model, made),
                "load": partial(model.load_state_dict, saved),
            }
            with pytest.raises((fsdp2.ExtensionError, RuntimeError), match=f"{method}.*'weight'"):
                calls[what]()
        assert all(map(torch.equal, before, (param.to_local() for param in model.parameters())))
        front.train(model, shape=(3, 4))


def test_what_is_no_extension_is_refused() -> None:
    with pytest.raises(TypeError, match="chunk_dtensor"):
        fsdp2.fsdp1.set_fsdp_extensions(object())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a class"):
        fsdp2.fsdp1.set_fsdp_extensions(example().LogExtensions)
    with pytest.raises(TypeError):
        fsdp2.fsdp1.FSDPExtensions()  # type: ignore[abstract]


def tensor_parallel(front: Front, use_orig_params: bool) -> nn.Module:
    """TP inside of FSDP; two of four layers are cut by TP."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4), nn.Linear(4, 4))
    model = parallelize_module(plain, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return front.wrap(model, device_mesh=mesh["dp"], use_orig_params=use_orig_params)


@pytest.mark.long
@pytest.mark.parametrize("use_orig_params", [False, *long(True)])
@distributed(4)
def test_tensor_parallelism_needs_no_extension(ctx: RankContext, use_orig_params) -> None:
    saved = []

    def scenario(front: Front):
        model = tensor_parallel(front, use_orig_params)
        pair = replace(front, ctx=replace(ctx, rank=ctx.rank // 2))  # ranks of one model get the same data
        results = pair.train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for kind in (FULL, SHARDED):
            with front.of_kind(model, kind):
                saved.append(model.state_dict())
                results.append(whole(saved[-1]))
                model.load_state_dict(saved[-1])
        return [*results, model(pair.batch(3, 8, seed=9)).detach()]

    same(ctx, scenario, exact=False)
    theirs, mine = saved[1]["0.weight"], saved[3]["0.weight"]  # both cut it along dim 0: see docs/migrating.md
    assert theirs.placements == (Shard(0), Shard(0))
    assert type(mine.placements[0]).__name__ == "_StridedShard"
    for kind, theirs in zip((FULL, SHARDED), saved, strict=False):  # the first two are those of torch's class
        model = tensor_parallel(ours(ctx), use_orig_params)
        with ours(ctx).of_kind(model, kind):
            model.load_state_dict(theirs)
            assert_same(whole(theirs), whole(model.state_dict()))


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = example().PositiveLinear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


@pytest.mark.parametrize("strategy", [FULL_SHARD, GRAD_OP])
@with_ours(2)
def test_a_users_type_is_there_when_a_forward_is_repeated_or_recomputed(front: Front, strategy) -> None:
    losses = []
    for log in (False, True):
        torch.manual_seed(0)
        with extension_set(example().LogExtensions()) as calls:
            inner = front.wrap(Reading() if log else Plain(4, 4), sharding_strategy=strategy)
            model = front.wrap(nn.Sequential(inner, nn.Linear(4, 2)), sharding_strategy=strategy)
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.no_grad():
            model(front.batch(3, 4))
        calls.clear()
        for step in range(3):
            both = model(front.batch(3, 4, seed=step)).sum() + model(front.batch(3, 4, seed=step + 5)).square().sum()
            both.backward()
            made.step()
            made.zero_grad()
            losses.append(both.detach())
        assert not log or calls["post_unflatten_transform"] <= 3 * 3  # two forwards, and a backward
    assert_same(losses[:3], losses[3:])
