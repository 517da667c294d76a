"""Sharded models get the weights of the unsharded model, and replicas get the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2 import fully_shard
from tests.harness.distributed import RankContext, distributed
from tests.harness.messages import error_of, one_line


class Layers(nn.Module):
    """Sizes that no number of ranks divides, a scalar, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(10, 37)
        self.exit = nn.Linear(37, 10, bias=False)
        self.tokens = nn.Embedding(13, 10, padding_idx=3)
        self.norm = nn.LayerNorm(10)
        self.image = nn.Conv2d(3, 5, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("table", torch.zeros(7))
        self.register_buffer("unsaved", torch.zeros(7), persistent=False)


def network() -> nn.Sequential:
    return nn.Sequential(Layers(), Layers())


def reset(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.sparse_(module.weight, 0.3)
    if isinstance(module, nn.Conv2d):
        nn.init.orthogonal_(module.weight)
        nn.init.kaiming_normal_(module.weight)


def like_hugging_face(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(mean=0.0, std=0.02)
        if module.bias is not None:
            module.bias.data.zero_()
    if isinstance(module, nn.Embedding):
        module.weight.data.normal_(mean=0.0, std=1.0)
        module.weight.data[module.padding_idx].zero_()


@torch.no_grad()
def by_hand(module: nn.Module) -> None:
    if isinstance(module, Layers):
        module.scale.uniform_()
        module.table.normal_()
        module.unsaved.normal_()
        module.exit.weight.copy_(torch.randn(module.exit.weight.shape)).mul_(0.5)
        module.entry.weight.bernoulli_(0.3, generator=torch.Generator().manual_seed(3))
        module.entry.bias[5:20].fill_(2.0)
        nn.init.eye_(module.tokens.weight)
        nn.init.orthogonal_(module.image.weight)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard(model: nn.Sequential, kind: str, world_size: int) -> nn.Sequential:
    mesh = init_device_mesh("cpu", (world_size,))
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world_size // 2))
    if kind == "tp":
        world = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
        mesh = world["dp"]
        for layers in model:
            parallelize_module(layers, world["tp"], {"entry": ColwiseParallel(), "exit": RowwiseParallel()})
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return model


@pytest.mark.parametrize("init", [reset, like_hugging_face, by_hand])
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "tp"])
@distributed(2, 4, 1, 3)
def test_shards_are_those_of_the_unsharded_model(
    ctx: RankContext, kind: str, init: Callable[[nn.Module], None]
) -> None:
    if kind != "fsdp" and ctx.world_size % 2:
        return
    plain = network().to_empty(device="cpu")
    with torch.no_grad():
        for tensor in plain.state_dict().values():
            tensor.zero_()
    torch.manual_seed(5)
    plain.apply(init)

    with torch.device("meta"):
        model = network()
    shard(model, kind, ctx.world_size).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    torch.manual_seed(ctx.rank)
    before = torch.get_rng_state()
    with fsdp2.whole_init(model, seed=5):
        model.apply(init)
    assert torch.equal(torch.get_rng_state(), before)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, expected in {**dict(plain.named_parameters()), **dict(plain.named_buffers())}.items():
        if name.endswith("unsaved") and init is not by_hand:
            continue  # nothing has set it
        assert torch.equal(whole(tensors[name]), expected), name


@distributed(2)
def test_what_cannot_be_initialised_is_refused(ctx: RankContext) -> None:
    with torch.device("meta"):
        model = shard(network(), "fsdp", 2)
    for error, seed, text in (
        (RuntimeError, 0, "whole_init: '0.scale' is still on the meta device. Call model.to_empty"),
        (TypeError, "1", "whole_init: seed is '1', of type str, expected an int"),
    ):

        def enter(seed: Any = seed) -> None:
            with fsdp2.whole_init(model, seed=seed):
                pass

        assert one_line(error_of(enter)).startswith(f"{error.__name__}: {text}"), error_of(enter)


@pytest.mark.parametrize("kind", ["plain", "fsdp", "hsdp", "tp"])
@distributed(2, 4)
def test_replicas_that_differ_are_named_and_made_equal(ctx: RankContext, kind: str) -> None:
    if kind == "tp" and ctx.world_size == 2:
        return
    torch.manual_seed(ctx.rank)
    model = network()
    for layers in model:
        layers.unsaved.normal_()
    if kind != "plain":
        shard(model, kind, ctx.world_size)
    of_last = {name: whole(tensor).clone() for name, tensor in model.named_parameters()}
    message = one_line(error_of(lambda: fsdp2.check_replicas(model)))
    first = {"plain": "0.entry.weight", "fsdp": "0.unsaved", "hsdp": "0.entry.weight", "tp": "0.tokens.weight"}[kind]
    others = {
        "hsdp": list(range(ctx.world_size // 2, ctx.world_size)),
        "tp": [rank for rank in range(ctx.world_size) if rank % 2],
    }
    ranks = ", ".join(map(str, others.get(kind, range(1, ctx.world_size))))
    assert message.startswith(f"RuntimeError: check_replicas: replicas differ in '{first}' (ranks {ranks})")
    assert "fsdp2.broadcast_from(model)" in message

    last = ctx.world_size - 1
    fsdp2.broadcast_from(model, rank=last)
    fsdp2.check_replicas(model)
    if ctx.rank == last:
        assert all(torch.equal(whole(tensor), of_last[name]) for name, tensor in model.named_parameters())
    else:
        [whole(tensor) for tensor in model.parameters()]  # as collective as above


@distributed(2)
def test_a_rank_that_is_not_there_is_refused(ctx: RankContext) -> None:
    found = one_line(error_of(lambda: fsdp2.broadcast_from(network(), rank=2)))
    assert "broadcast_from: rank is 2, expected 0 to 1" in found
