"""A model of one runtime given to the other, and torch's own users of ``fully_shard``, while fsdp2 is installed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed._composable.contract import REGISTRY_KEY

import fsdp2
from tests.harness.distributed import RankContext, distributed

torchs_fully_shard: Callable[..., Any] = theirs.fully_shard
TorchsModule = theirs.FSDPModule


@contextmanager
def quietly_installed() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fsdp2.install: these modules imported")
        fsdp2.install()
    try:
        yield
    finally:
        fsdp2.uninstall()


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


@distributed(2)
def test_a_client_trains_with_our_runtime(ctx: RankContext) -> None:
    with quietly_installed():
        model = theirs.fully_shard(_model(), mesh=ctx.mesh_1d(), mp_policy=theirs.MixedPrecisionPolicy())
        assert isinstance(model, theirs.FSDPModule)
        assert isinstance(model, fsdp2.FSDPModule)
        model(torch.ones(2, 4)).sum().backward()
        assert model[0].weight.grad is not None
    assert not isinstance(model, theirs.FSDPModule)


@distributed(2)
def test_torchs_fully_shard_refuses_our_module_and_leaves_no_trace(ctx: RankContext) -> None:
    model = _model()
    fsdp2.fully_shard(model[1], mesh=ctx.mesh_1d())
    before = dict(model.named_parameters())
    with quietly_installed():
        for refuse in (torchs_fully_shard, replicate_with_fsdp.replicate):
            message = rf"{refuse.__name__} of torch\.distributed: module '1', a FSDPLinear.* fsdp2\.fully_shard before"
            with pytest.raises(ValueError, match=message):
                refuse(model, mesh=ctx.mesh_1d())
            assert model.__dict__.get(REGISTRY_KEY, {}) == {}
            assert dict(model.named_parameters()) == before
        fsdp2.fully_shard(model, mesh=ctx.mesh_1d())  # the refused call left nothing behind


@distributed(2)
def test_our_fully_shard_refuses_torchs_module(ctx: RankContext) -> None:
    model = _model()
    torchs_fully_shard(model[1], mesh=ctx.mesh_1d())
    with quietly_installed(), pytest.raises(ValueError, match=r"module '1'.*torch\.distributed\.fsdp\.fully_shard"):
        theirs.fully_shard(model, mesh=ctx.mesh_1d())


@distributed(2)
def test_torchs_runtime_still_works_by_its_old_name(ctx: RankContext) -> None:
    def gradients() -> list[torch.Tensor]:
        model = _model()
        for layer in model:
            torchs_fully_shard(layer, mesh=ctx.mesh_1d())
        torchs_fully_shard(model, mesh=ctx.mesh_1d())
        assert isinstance(model, TorchsModule)
        model.set_requires_gradient_sync(True)  # visits all modules of torch's class
        model(torch.ones(2, 4) * (ctx.rank + 1)).sum().backward()
        return [param.grad.to_local() for param in model.parameters()]

    expected = gradients()
    with quietly_installed():
        found = gradients()
    assert all(map(torch.equal, found, expected))


@distributed(2)
def test_torchs_replicate_still_works(ctx: RankContext) -> None:
    with quietly_installed():
        model = replicate_with_fsdp.replicate(_model(), mesh=ctx.mesh_1d())
        assert isinstance(model, replicate_with_fsdp.ReplicateModule)
        model(torch.ones(2, 4) * (ctx.rank + 1)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
