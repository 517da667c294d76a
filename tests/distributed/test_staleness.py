"""Nothing computes with parameters that were gathered before an optimizer wrote the shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import fully_shard
from fsdp2.core.comm.offload import StagedOffloadPolicy
from fsdp2.optim import flatten_optimizer
from fsdp2.report import trace
from tests.distributed.changes import GATHERS, double, evaluate
from tests.distributed.support import DIM, Stack, batch, seeded, shard, shard_each, sharded, step
from tests.harness.comms import gathers_noted
from tests.harness.distributed import RankContext, distributed


def _reference(make: Callable[[], Any] = Stack) -> Any:
    model = seeded(make)
    double(model.parameters())
    return model


def _raise_in_forward(model: Any) -> None:
    handle = model.exit.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch())
    handle.remove()


PASSES = {**GATHERS, "raised forward": _raise_in_forward}


@pytest.mark.parametrize("options", [{}, {"offload_policy": StagedOffloadPolicy()}])
@pytest.mark.parametrize("kept", [None, False, 2])
@pytest.mark.parametrize("name", list(PASSES))
@distributed(4)
def test_forward_after_the_shards_were_written_uses_them(
    ctx: RankContext, name: str, kept: bool | int | None, options: dict[str, Any]
) -> None:
    model = sharded(ctx, reshard_after_forward=kept, **options)
    shards = list(model.parameters())  # as an optimizer holds them: what is bound later may be unsharded
    PASSES[name](model)
    double(shards)
    assert torch.allclose(model(batch()), _reference()(batch()), atol=1e-5)


@pytest.mark.parametrize("kind", ["", "foreach", "fused", "flat"])
@pytest.mark.parametrize("kept", [None, False, 2])
@distributed(4)
def test_forward_after_an_optimizer_step_uses_what_it_wrote(
    ctx: RankContext, kept: bool | int | None, kind: str
) -> None:
    """torch counts no write for lists of DTensors, which ``foreach`` optimizers write."""
    model, reference = sharded(ctx, reshard_after_forward=kept), seeded(Stack)
    for each in (model, reference):
        options: dict[str, Any] = {kind: True} if kind in ("foreach", "fused") else {}
        optimizer = torch.optim.Adam(each.parameters(), lr=0.1, **options)
        if kind == "flat" and each is model:
            flatten_optimizer(optimizer)
        step(each)
        evaluate(each)  # gathers again what backward has resharded
        optimizer.step()
    assert torch.allclose(model(batch()), reference(batch()), atol=1e-4)


@pytest.mark.parametrize("how", ["to_empty", "to", "swap"])
@distributed(2)
def test_tensors_that_took_the_place_of_shards_are_known_from_the_next_forward_on(ctx: RankContext, how: str) -> None:
    """They have the memory of the shards, or none: rank 1 has nothing of the last layer. Else only that rank would
    gather this layer in every forward. Later writes are noticed all the same, of an optimizer with ``foreach``, too."""
    model, reference = (seeded(lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, 1))) for _ in range(2))
    shard_each(*model, mesh=ctx.mesh_1d(), reshard_after_forward=False)
    fully_shard(model, mesh=ctx.mesh_1d())
    if how == "to_empty":
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.to_empty(device=ctx.device_type)
        model.load_state_dict(state)
    elif how == "to":
        model.to(ctx.device_type)
    else:
        for param in model.parameters():
            torch.utils.swap_tensors(param, nn.Parameter(param.detach()))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, foreach=True) for each in (model, reference)]
    with gathers_noted() as launches:
        evaluate(model)
        assert len(launches) == 2
        evaluate(model)
    assert len(launches) == 2
    for each, optimizer in zip((model, reference), optimizers, strict=True):
        step(each)
        evaluate(each)  # gathers again what backward has resharded
        optimizer.step()
    assert torch.allclose(model(batch()), reference(batch()), atol=1e-5)


@distributed(2)
def test_unshard_after_the_shards_were_written_binds_new_values(ctx: RankContext) -> None:
    model = sharded(ctx)
    shards = list(model.parameters())
    evaluate(model)  # the root stays unsharded
    double(shards)
    model.unshard()
    assert type(model.entry.weight) is nn.Parameter
    assert torch.equal(model.entry.weight, _reference().entry.weight)


# How docs/guide/wrapping.md says that shards may be written while a unit stays unsharded, and how not
NOTICED: dict[str, Callable[[Any], object]] = {
    "parameter": lambda param: param.mul_(2.0),
    "to_local()": lambda param: param.to_local().mul_(2.0),
}
UNNOTICED: dict[str, Callable[[Any], object]] = {
    "data": lambda param: param.data.mul_(2.0),
    "detach().to_local()": lambda param: param.detach().to_local().mul_(2.0),
    "numpy": lambda param: param.to_local().numpy().__imul__(2.0),
}


@pytest.mark.parametrize("how", [*NOTICED, *UNNOTICED])
@distributed(2)
def test_writes_that_bypass_the_versions_of_shards_need_a_reshard_first(ctx: RankContext, how: str) -> None:
    """As in torch, nobody notices them. If that changes, the guide's page on wrapping does, too."""
    for reshards in (False, True):
        model = sharded(ctx)
        shards = list(model.parameters())
        evaluate(model)  # the root stays unsharded
        if reshards:
            model.reshard()
        with torch.no_grad():
            for param in shards:
                (NOTICED | UNNOTICED)[how](param)
        is_noticed = reshards or how in NOTICED
        assert torch.allclose(model(batch()), _reference()(batch()), atol=1e-5) == is_noticed


class _Detached(Stack):
    """The last block takes no part in the loss."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](self.entry(x)))
        return self.exit(x + self.blocks[2](x).detach())


@distributed(2)
def test_unused_backward_prefetch_does_not_outlive_a_write(ctx: RankContext) -> None:
    model = shard(ctx, seeded(_Detached))
    shards = list(model.parameters())
    model.set_reshard_after_backward(False)
    for _ in range(2):
        step(model)
    double(shards)
    assert torch.allclose(model(batch()), _reference(_Detached)(batch()), atol=1e-5)


@distributed(4)
def test_partial_gradients_of_a_unit_that_is_idle_later_are_reduced(ctx: RankContext) -> None:
    """Two microbatches on HSDP; a unit runs in the first only, which leaves its sums on the shard axis."""

    class Chooses(nn.Sequential):
        def forward(self, x: Tensor, chosen: tuple[int, ...]) -> Tensor:  # type: ignore[override]
            return torch.stack([self[each](x) for each in chosen]).sum(0)

    blocks = [seeded(lambda: nn.Linear(8, 8, bias=False), seed) for seed in range(2)]
    root = shard_each(*blocks, Chooses(*blocks), mesh=ctx.mesh_2d(2, 2))
    x = torch.full((2, 8), 1.0 + ctx.rank)
    for chosen, is_last in (((0, 1), False), ((0,), True)):
        root.set_requires_all_reduce(is_last)
        root(x, chosen).sum().backward()
    grads = [block.weight.grad.full_tensor() for block in blocks]
    assert torch.allclose(grads[1], torch.full((8, 8), 2 * 2.5))  # the mean of x over the ranks, two rows


@pytest.mark.parametrize("foreach", [True, False])
@distributed(2)
def test_optimizers_of_other_models_make_nobody_gather_again(ctx: RankContext, foreach: bool) -> None:
    """Not of another sharded model, nor of a plain one on one rank: ranks have to agree on what was written."""
    teacher, student = (sharded(ctx, reshard_after_forward=False) for _ in range(2))
    plain = nn.Linear(2, 2)
    teacher.requires_grad_(False)
    optimizer, other = (torch.optim.AdamW(each.parameters(), foreach=foreach) for each in (student, plain))
    evaluate(teacher)
    for _ in range(2):
        step(student)
        optimizer.step()
        if ctx.rank == 0:
            plain(torch.ones(1, 2)).sum().backward()
            other.step()
        with trace.record(teacher) as recorded:
            evaluate(teacher)
        assert [action for action in recorded.actions() if action.startswith(("unshard", "prefetch"))] == []
    evaluate(student)
    optimizer.step()
    with trace.record(student) as recorded:  # its own optimizer does
        evaluate(student)
    assert "unshard (root)" in recorded.actions()
