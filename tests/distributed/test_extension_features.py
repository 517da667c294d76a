"""All-gather hooks beside everything else that a sharded module does: each run is compared with one by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from fsdp2 import fully_shard
from tests.distributed.extension_support import MIXED, UNEVEN, Net, Twins, batch, dtensor_adam
from tests.harness.distributed import RankContext, distributed
from tests.harness.extensions import KeptAliasing, Scaled, recorded
from tests.harness.selection import long

SOME = {"scaled": Scaled, "kept": KeptAliasing}
some = pytest.mark.parametrize("name", ["scaled", *long("kept")])


def _twins(ctx: RankContext, name: str, **kwargs: Any) -> Twins:
    return Twins(SOME[name], ctx.mesh_1d(), ctx.rank, dim=UNEVEN, **kwargs)


# Frozen


def _freeze(*prefixes: str) -> Callable[[nn.Module], None]:
    def prepare(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name.startswith(prefixes):
                parameter.requires_grad_(False)

    return prepare


@pytest.mark.parametrize("frozen", [("blocks.0",), ("blocks.1.up.weight", "entry.bias"), ("entry", "blocks.0")])
@some
@distributed(2)
def test_frozen_and_trainable_parameters_train(ctx: RankContext, name: str, frozen: tuple[str, ...]) -> None:
    _twins(ctx, name, prepare=_freeze(*frozen)).train(3)


@some
@distributed(2)
def test_parameters_frozen_between_steps(ctx: RankContext, name: str) -> None:
    model = Twins(SOME[name], ctx.mesh_1d(), ctx.rank, dim=UNEVEN)
    weight, rest = model.model.blocks[0].up.weight, model.model.blocks[1].parameters()
    model.train(1)
    for parameter in (weight, *rest):
        parameter.requires_grad_(False)
    model.reference._trainable -= {
        "blocks.0.up.weight",
        *(f"blocks.1.{n}" for n, _ in model.model.blocks[1].named_parameters()),
    }
    model.train(1)
    assert weight.grad is None


class _Integers(Scaled):
    """Stays integers when it is unsharded: fit for a frozen parameter only."""

    @classmethod
    def decode(cls, outputs: tuple[Tensor, ...], size: torch.Size, num_ranks: int, dtype: torch.dtype) -> Tensor:
        return outputs[0].clone()


@distributed(2, 4)
def test_frozen_parameter_may_become_integers(ctx: RankContext) -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(_Integers(torch.arange(30.0).view(UNEVEN, 6)), requires_grad=False)
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            assert self.table.dtype is torch.int8
            return x * self.scale * self.table.float().sum(0)

    model = fully_shard(Looks(), mesh=ctx.mesh_1d())
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
    rows = torch.arange(30.0).view(UNEVEN, 6)
    expected = (rows / (rows.abs().amax(1, keepdim=True) / 127)).round().sum(0)
    assert torch.equal(model.scale.grad.full_tensor(), 2 * 2 * expected)
    assert model.table.grad is None


# Accumulation


@some
@distributed(2)
def test_gradients_accumulate_without_communication(ctx: RankContext, name: str) -> None:
    for policy in (None, MIXED):
        twins = _twins(ctx, name, policy=policy)
        for _ in range(2):
            twins.model.set_requires_gradient_sync(False)
            twins.backward(reduce=False)
            twins.backward(reduce=False)
            twins.model.set_requires_gradient_sync(True)
            twins.backward()
            twins.step()


@some
@distributed(2)
def test_gradients_accumulate_over_reduced_micro_batches(ctx: RankContext, name: str) -> None:
    twins = _twins(ctx, name)
    for _ in range(2):
        for _ in range(3):
            twins.backward()
        twins.step()


@some
@distributed(2)
def test_parameters_stay_unsharded_between_micro_batches(ctx: RankContext, name: str) -> None:
    twins = _twins(ctx, name, reshard_after_forward=False)
    for _ in range(2):
        for is_last in (False, False, True):
            twins.model.set_reshard_after_backward(is_last)
            twins.backward()
        twins.step()


@pytest.mark.ci
@some
@distributed(4)
def test_hsdp_reduces_over_the_replicas_in_the_last_micro_batch_only(ctx: RankContext, name: str) -> None:
    twins = Twins(SOME[name], ctx.mesh_2d(2, 2), ctx.rank, dim=UNEVEN)
    twins.exact = False  # the sums are added in another order
    for _ in range(2):
        for is_last in (False, True):
            twins.model.set_requires_all_reduce(is_last)
            twins.backward(reduce=is_last)
        twins.step()


# When parameters are gathered


@some
@distributed(2)
def test_evaluation_between_steps_and_before_the_first(ctx: RankContext, name: str) -> None:
    twins = _twins(ctx, name)
    twins.evaluate()
    for _ in range(2):
        twins.backward()
        twins.evaluate()
        twins.step()
        twins.evaluate()


@pytest.mark.parametrize("guard", [torch.inference_mode, torch.no_grad])
@some
@distributed(2)
def test_first_use_without_gradients_then_training(ctx: RankContext, name: str, guard: Any) -> None:
    twins = _twins(ctx, name)
    with guard():
        twins.model(batch(ctx.rank, 77))
    twins.train(2)
    with guard():
        twins.model(batch(ctx.rank, 77))
    twins.train(1)


@some
@distributed(2)
def test_unshard_and_reshard_by_hand(ctx: RankContext, name: str) -> None:
    twins = _twins(ctx, name)
    for _ in range(3):
        handles = [block.unshard(async_op=True) for block in twins.model.blocks]
        twins.model.unshard()
        handles[1].wait()
        assert torch.equal(twins.model.blocks[1].up.weight, twins.reference.unsharded("blocks.1.up.weight"))
        twins.model.blocks[0].reshard()
        twins.backward()
        twins.step()


@pytest.mark.parametrize("optimizer", [{}, {"foreach": True}], ids=str)
@some
@distributed(2)
def test_what_was_unsharded_by_hand_is_gathered_again_after_a_step(
    ctx: RankContext, name: str, optimizer: dict[str, bool]
) -> None:
    twins = _twins(ctx, name, optimizer=lambda parameters: dtensor_adam(parameters, **optimizer))
    for _ in range(3):
        twins.backward()
        for unit in (*twins.model.blocks, twins.model):
            unit.unshard()
        twins.step()


@some
@distributed(2)
def test_explicit_prefetch_lists(ctx: RankContext, name: str) -> None:
    twins = Twins(SOME[name], ctx.mesh_1d(), ctx.rank, dim=UNEVEN, model=lambda dim: Net(dim, num_blocks=4))
    blocks = twins.model.blocks
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(list(blocks[index + 1 : index + 3]))
        block.set_modules_to_backward_prefetch(list(blocks[max(index - 2, 0) : index]))
    twins.train(3)


class _Skips(Net):
    """Runs the second block in every other forward only, so that its prefetch is in vain."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        self.calls += 1
        for block in self.blocks if self.calls % 2 else (self.blocks[0], self.blocks[2]):
            x = block(x)
        return x


@some
@distributed(2)
def test_prefetch_in_vain_is_dropped(ctx: RankContext, name: str) -> None:
    twins = Twins(SOME[name], ctx.mesh_1d(), ctx.rank, dim=UNEVEN, model=lambda dim: _Skips(dim, num_blocks=3))
    local = twins.model.blocks[1].up.weight._local_tensor
    twins.backward()
    twins.step()
    with recorded() as calls:
        twins.backward()
    assert [call.hook for call in calls if call.on is local] in ([], ["pre"])  # kept ones are not made again
    twins.step()
    twins.train(2)


# Activation checkpointing


class _Checkpointed(Net):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class _Reentrant(_Checkpointed):
    reentrant = True


@pytest.mark.parametrize("model", [_Checkpointed, _Reentrant])
@some
@distributed(2)
def test_checkpointed_blocks_train(ctx: RankContext, name: str, model: Any) -> None:
    for policy in (None, MIXED):
        _twins(ctx, name, model=model, by_hand=Net, policy=policy).train(3)


@pytest.mark.parametrize("kind", list(CheckpointImpl))
@some
@distributed(2)
def test_wrapped_checkpoints_inside_of_units_train(ctx: RankContext, name: str, kind: CheckpointImpl) -> None:
    def checkpointed(model: Any, mesh: Any, **kwargs: Any) -> None:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block, checkpoint_impl=kind)
            fully_shard(model.blocks[index], mesh=mesh, **kwargs)
        fully_shard(model, mesh=mesh, **kwargs)

    _twins(ctx, name, shard=checkpointed).train(3)
