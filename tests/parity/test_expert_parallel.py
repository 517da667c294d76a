"""Experts on ranks of their own, beside the unsharded model: tokens of all ranks, one loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import (
    ExpertMeshes,
    clip_grad_norm_,
    expert_meshes,
    fully_shard,
    save_safetensors,
    stream_full_params,
)
from tests.harness.distributed import RankContext, distributed
from tests.harness.messages import error_of

DIM, NUM_EXPERTS, NUM_TOKENS = 6, 4, 8  # tokens of a rank


class Exchange(torch.autograd.Function):
    """An all-to-all of equal parts. Its backward is the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Exchange.apply(grad.contiguous(), ctx.group), None


class Experts(nn.Module):
    """Those that this rank holds. ``x``: ``[experts here, tokens, DIM]``."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, DIM, DIM) / DIM)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


class Moe(nn.Module):
    """Token i of a rank goes to expert i modulo the number of experts; the gate is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.gate = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)
        self.experts = Experts(NUM_EXPERTS)
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        by_expert = x.view(-1, NUM_EXPERTS, DIM).transpose(0, 1)  # [experts, tokens, DIM]
        if self.group is None:
            y = self.experts(by_expert)
        else:
            size = self.group.size()
            here = Exchange.apply(by_expert.contiguous(), self.group)
            here = here.view(size, NUM_EXPERTS // size, -1, DIM).transpose(0, 1).flatten(1, 2)
            back = self.experts(here).view(NUM_EXPERTS // size, size, -1, DIM).transpose(0, 1).contiguous()
            y = Exchange.apply(back, self.group).view(NUM_EXPERTS, -1, DIM)
        return x + torch.sigmoid(self.gate(x)) * y.transpose(0, 1).reshape(-1, DIM)


def seeded() -> Any:
    torch.manual_seed(0)
    return Moe()


def tokens(rank: int) -> Tensor:
    return torch.randn(NUM_TOKENS, DIM, generator=torch.Generator().manual_seed(rank))


def sharded(ctx: RankContext, meshes: ExpertMeshes) -> Any:
    model = seeded().to(ctx.device_type)
    model.group = meshes.experts.get_group()
    size, rank = meshes.experts.size(), meshes.experts.get_local_rank()
    model.experts.weight = nn.Parameter(model.experts.weight.detach().chunk(size)[rank].clone())
    meshes.shard_experts(model.experts)
    return fully_shard(model, mesh=meshes.dense)


def meshes_of(ctx: RankContext, shape: tuple[int, ...]) -> ExpertMeshes:
    names = ("replicas", "shards", "experts")[-len(shape) :]
    mesh = ctx.mesh(**dict(zip(names, shape, strict=True)))
    return expert_meshes(mesh, experts="experts", shard="shards", replicate="replicas" if len(shape) == 3 else None)


@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (2, 1, 2)], ids=str)
@distributed(4)
def test_gradients_are_those_of_the_unsharded_model(ctx: RankContext, shape: tuple[int, ...]) -> None:
    meshes = meshes_of(ctx, shape)
    model, reference = sharded(ctx, meshes), seeded()
    meshes.check(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, foreach=False) for each in (model, reference)]
    for step in range(2):
        model(tokens(step * 4 + ctx.rank).to(ctx.device_type)).square().mean().backward()
        reference(torch.cat([tokens(step * 4 + rank) for rank in range(4)])).square().mean().backward()
        for name, param in model.named_parameters():
            expected = reference.get_parameter(name).grad
            if name.startswith("experts"):
                expected = expected.chunk(meshes.experts.size())[meshes.experts.get_local_rank()]
            assert isinstance(param, DTensor)
            found = param.grad.full_tensor()  # type: ignore[union-attr]
            torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=1e-5, atol=1e-6, msg=lambda t, n=name: n + t)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@distributed(4)
def test_norm_has_the_experts_of_all_ranks_and_no_file_or_stream_takes_them_for_one(ctx: RankContext) -> None:
    """They have the same names on ranks that hold other ones."""
    meshes = meshes_of(ctx, (2, 2))
    model, reference = sharded(ctx, meshes), seeded()
    model(tokens(ctx.rank).to(ctx.device_type)).square().mean().backward()
    reference(torch.cat([tokens(rank) for rank in range(4)])).square().mean().backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    norm = clip_grad_norm_(model.parameters(), 0.01)
    torch.testing.assert_close(norm.cpu(), expected.cpu(), rtol=1e-5, atol=0)
    mine = reference.experts.weight.grad.chunk(2)[meshes.experts.get_local_rank()]
    torch.testing.assert_close(model.experts.weight.grad.full_tensor().cpu(), mine.cpu(), rtol=1e-5, atol=1e-8)
    for use in (stream_full_params, lambda model: save_safetensors(model, "unused")):
        assert "'experts.weight' is of experts that differ between ranks" in error_of(lambda use=use: use(model))


def _refusal(meshes: ExpertMeshes, model: nn.Module) -> str:
    return error_of(lambda: meshes.check(model)).replace("\n", " ")


@distributed(4)
def test_what_is_on_other_ranks_or_divided_by_another_number_is_found(ctx: RankContext) -> None:
    meshes = meshes_of(ctx, (2, 2))
    model = seeded().to(ctx.device_type)
    fully_shard(model.experts, mesh=meshes.shards)  # as people write it
    fully_shard(model, mesh=meshes.dense)
    assert _refusal(meshes, model) == (
        "ValueError: ExpertMeshes.check: unit 'experts', with 'weight', divides gradients by 2, expected 4: they come "
        "from tokens of so many ranks. Call set_gradient_divide_factor(4) on it, or meshes.shard_experts."
    )
    model.experts.set_gradient_divide_factor(4)
    meshes.check(model)
    elsewhere = fully_shard(nn.Linear(4, 4).to(ctx.device_type), mesh=meshes.experts)
    if ctx.rank == 0:
        assert _refusal(meshes, elsewhere) == (
            "ValueError: ExpertMeshes.check: unit '(root)', with 'weight', 'bias', is sharded over the ranks [0, 1], "
            "expected [0, 1, 2, 3] (dense) or [0, 2] (experts). Pass mesh=meshes.dense to fully_shard, or call "
            "meshes.shard_experts."
        )
    assert "expected different names of axes of the mesh" in error_of(
        lambda: expert_meshes(ctx.mesh(shards=2, experts=2), experts="experts", shard="dp")
    )
    assert "got a mesh" in error_of(lambda: meshes.shard_experts(nn.Linear(4, 4), mesh=meshes.dense))
