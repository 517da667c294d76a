"""Each row of the table for ZeRO's options. DeepSpeed is not installed: our side has the effect that the row claims."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.tensors import Int8AllGatherTensor, wrap_parameters
from fsdp2.tools import trace
from tests.docs.migrating.rows import (
    Rows,
    actions,
    adamw,
    backward,
    by_fsdp2,
    close,
    forward,
    gathers,
    gradients,
    model,
    sgd,
    train,
    unsharded,
    wrap,
)
from tests.harness.distributed import RankContext
from tests.harness.models import MLP

ROWS = Rows("ZeRO's options", omits_some=True)


@pytest.mark.parametrize("cell", ROWS)
def test_row(cell: str) -> None:
    ROWS.run(cell)


def test_every_row_is_tried() -> None:
    ROWS.check()


def _sharded_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether all states of ``optimizer`` that are as large as a parameter are shards of it."""
    return all(
        isinstance(value, DTensor) and value.to_local().numel() < value.numel()
        for parameter in module.parameters()
        for name, value in optimizer.state[parameter].items()
        if name.startswith("exp_avg")
    )


def _gathered_per_step(ctx: RankContext, wrapped: nn.Module) -> list[str]:
    return sorted(gathers(wrapped, lambda: backward(ctx, wrapped)))


@ROWS('`"stage": 0`')
def stage_0(ctx: RankContext) -> None:
    wrapped: Any = wrap(fsdp2, ctx.mesh_2d(ctx.world_size, 1))
    close(train(ctx, wrapped), unsharded(ctx))
    assert wrapped.entry.weight.to_local().shape == (16, 16)


@ROWS('`"stage": 1`')
def stage_1(ctx: RankContext) -> None:
    wrapped = by_fsdp2(ctx, reshard_after_forward=False)
    optimizer = adamw(wrapped)
    wrapped.set_requires_gradient_sync(False)
    wrapped.set_reshard_after_backward(False)
    backward(ctx, wrapped)
    assert all(parameter.grad is not None for parameter in wrapped.parameters())  # whole, on this rank
    assert not any(isinstance(parameter, DTensor) for parameter in wrapped.parameters())
    wrapped.set_requires_gradient_sync(True)
    wrapped.set_reshard_after_backward(True)
    assert gathers(wrapped, lambda: backward(ctx, wrapped)) == []
    optimizer.step()
    assert _sharded_state(wrapped, optimizer)


@ROWS('`"stage": 2`')
def stage_2(ctx: RankContext) -> None:
    wrapped = by_fsdp2(ctx, reshard_after_forward=False)
    optimizer = adamw(wrapped)
    for micro in range(2):
        backward(ctx, wrapped, micro)
        assert all(isinstance(parameter.grad, DTensor) for parameter in wrapped.parameters())
    assert _gathered_per_step(ctx, wrapped) == ["(root)", "blocks.0", "blocks.1"]
    optimizer.step()
    assert _sharded_state(wrapped, optimizer)


@ROWS('`"stage": 3`')
def stage_3(ctx: RankContext) -> None:
    wrapped = by_fsdp2(ctx)
    optimizer = adamw(wrapped)
    loss = forward(ctx, wrapped)
    assert all(isinstance(parameter, DTensor) for parameter in wrapped.blocks.parameters())
    loss.backward()
    assert _gathered_per_step(ctx, wrapped) == ["(root)", *2 * ["blocks.0"], *2 * ["blocks.1"]]
    optimizer.step()
    assert _sharded_state(wrapped, optimizer)


@ROWS("`offload_optimizer`, `offload_param`")
def offload(ctx: RankContext) -> None:
    wrapped = by_fsdp2(ctx, offload_policy=fsdp2.CPUOffloadPolicy())
    optimizer = sgd(wrapped)
    close(train(ctx, wrapped, make_optimizer=lambda _: optimizer), unsharded(ctx))
    held = [*wrapped.parameters(), *(state["momentum_buffer"] for state in optimizer.state.values())]
    assert {tensor.device.type for tensor in held} == {"cpu"}


@ROWS("`overlap_comm`")
def overlap_comm(ctx: RankContext) -> None:
    wrapped = by_fsdp2(ctx)
    backward(ctx, wrapped)
    with trace.record(wrapped) as recorded:
        backward(ctx, wrapped)
    lines = [f"{entry.name} {entry.unit}" for entry in recorded.entries]
    assert lines.index("prefetch blocks.1") < lines.index("post_forward blocks.0")
    assert lines.index("reduce blocks.1") < lines.index("pre_backward blocks.0")


@ROWS("`reduce_bucket_size`, `allgather_bucket_size`")
def bucket_size(ctx: RankContext) -> None:
    whole = model()
    fsdp2.fully_shard([*whole.blocks], mesh=ctx.mesh_1d())
    as_one: Any = fsdp2.fully_shard(whole, mesh=ctx.mesh_1d())
    close(train(ctx, as_one), unsharded(ctx))
    found = actions(as_one, lambda: backward(ctx, as_one))
    assert len([action for action in found if action.startswith("reduce")]) == 2
    by_block = by_fsdp2(ctx)
    found = actions(by_block, lambda: backward(ctx, by_block))
    assert len([action for action in found if action.startswith("reduce")]) == 3


@ROWS("`reduce_scatter`, `contiguous_gradients`")
def contiguous_gradients(ctx: RankContext) -> None:
    wrapped = by_fsdp2(ctx)
    whole: list[nn.Parameter] = []
    wrapped.entry.register_forward_pre_hook(lambda module, args: whole.extend(module.parameters()))
    backward(ctx, wrapped)
    assert len(whole) == 2
    assert all(parameter.grad is None for parameter in whole)  # reduced, and freed
    assert wrapped.entry.weight.grad.to_local().shape == (8, 16)


@ROWS("`stage3_prefetch_bucket_size`")
def prefetch_bucket_size(ctx: RankContext) -> None:
    wrapped = by_fsdp2(ctx, model(3))
    wrapped.blocks[0].set_modules_to_forward_prefetch([*wrapped.blocks[1:]])
    found = actions(wrapped, lambda: forward(ctx, wrapped))
    behind = found.index("wait blocks.0")
    assert found[behind + 1 : behind + 3] == ["prefetch blocks.1", "prefetch blocks.2"]


@ROWS("`stage3_param_persistence_threshold`")
def persistence_threshold(ctx: RankContext) -> None:
    whole = model()
    small: Any = fsdp2.fully_shard([whole.blocks[0].down, whole.entry], mesh=ctx.mesh_1d(), reshard_after_forward=False)
    wrapped: Any = fsdp2.fully_shard(whole, mesh=ctx.mesh_1d(), reshard_after_forward=True)
    loss = forward(ctx, wrapped)
    assert not isinstance(small[0].weight, DTensor)
    assert isinstance(whole.exit.weight, DTensor)
    loss.backward()
    small[0].set_reshard_after_backward(False)
    backward(ctx, wrapped)
    assert not isinstance(small[0].weight, DTensor)


@ROWS("`stage3_max_live_parameters`, `stage3_max_reuse_distance`")
def max_live_parameters(ctx: RankContext) -> None:
    wrapped = by_fsdp2(ctx, model(4))
    backward(ctx, wrapped)
    live, most = set(), 0
    for action in actions(wrapped, lambda: backward(ctx, wrapped)):
        name, unit = action.split()
        if name in ("unshard", "prefetch"):
            live.add(unit)
        elif name == "reshard":
            live.discard(unit)
        most = max(most, len(live - {"(root)"}))
    assert most == 2


@ROWS("`zero_hpz_partition_size`", world_size=4)
def hierarchical_partitioning(ctx: RankContext) -> None:
    wrapped = by_fsdp2(ctx, reshard_after_forward=2)
    loss = forward(ctx, wrapped)
    weight = wrapped.blocks[0].up.weight
    assert (weight.to_local().shape, weight.device_mesh.shape) == ((16, 16), (2, 2))
    loss.backward()
    assert wrapped.blocks[0].up.weight.to_local().shape == (8, 16)
    close(train(ctx, by_fsdp2(ctx, reshard_after_forward=2)), unsharded(ctx))


@ROWS("`zero_quantized_weights`")
def quantized_weights(ctx: RankContext) -> None:
    whole = model()
    names = wrap_parameters(whole, Int8AllGatherTensor)
    wrapped = by_fsdp2(ctx, whole)
    weight = wrapped.blocks[0].up.weight
    payloads = weight.to_local().fsdp_pre_all_gather(ctx.mesh_1d(), weight.size(), weight.stride(), None, None)[0]
    assert "blocks.0.up.weight" in names
    assert payloads[0].element_size() == 1
    found, expected = train(ctx, wrapped), unsharded(ctx)
    torch.testing.assert_close(found[0], expected[0], rtol=2e-2, atol=2e-3)


@ROWS("`zero_quantized_gradients`")
def quantized_gradients(ctx: RankContext) -> None:
    """Sent in the reduce dtype, which a custom reduce-scatter may send in fewer bits still."""
    seen: list[torch.dtype] = []

    class Counting:
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
        ) -> Any:
            seen.append(input_tensor.dtype)
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)

    wrapped = by_fsdp2(ctx, mp_policy=fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    wrapped.set_custom_reduce_scatter(Counting())
    backward(ctx, wrapped)
    assert seen == [torch.bfloat16]


@ROWS("`mics_shard_size`", world_size=4)
def mics(ctx: RankContext) -> None:
    wrapped: Any = wrap(fsdp2, ctx.mesh_2d(2, 2))
    assert wrapped.entry.weight.to_local().shape == (8, 16)
    close(train(ctx, wrapped), unsharded(ctx))


@ROWS("`set_z3_leaf_modules(model, [Block])`")
def leaf_modules(ctx: RankContext) -> None:
    wrapped = by_fsdp2(ctx)
    assert gathers(wrapped, lambda: forward(ctx, wrapped)).count("blocks.0") == 1
    wrapped.blocks[0].unshard()
    assert not any(isinstance(parameter, DTensor) for parameter in wrapped.blocks[0].parameters())


@ROWS("`round_robin_gradients`, `sub_group_size`, `ignore_unused_parameters`")
def nothing_to_set(ctx: RankContext) -> None:
    class Partly(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[1](x)

    torch.manual_seed(0)
    wrapped = by_fsdp2(ctx, Partly(2))
    backward(ctx, wrapped)
    found = gradients(wrapped)
    assert found["blocks.0.up.weight"] is None
    assert found["blocks.1.up.weight"] is not None
