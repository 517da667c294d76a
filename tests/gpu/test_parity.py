"""On CUDA, training runs are those of torch's ``fully_shard``; communication of the user's own changes no value.

Kernels may be chosen by the alignment of their operands, which differs between the runtimes: a few roundings.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.support import BF16, batch, on_gpus, sharded as sharded_stack
from tests.harness.comms import CountingAllGather, CountingReduceScatter
from tests.harness.distributed import RankContext
from tests.harness.models import MLP, Uneven
from tests.harness.runtimes import oracle, subject
from tests.harness.training import Case, accumulate, sgd, sharded, train
from tests.parity.test_mixed_precision import Mixed, shard_and_keep_fp32

FP32, LOW = {"rtol": 1e-5, "atol": 1e-6}, {"rtol": 2e-2, "atol": 2e-3}
WIDE, MIXED = functools.partial(MLP, num_blocks=4, dim=512), functools.partial(Mixed, dim=512)
CASES: dict[str, tuple[Case, dict[str, float]]] = {
    "fp32": (Case(MLP, num_steps=5), FP32),
    "uneven": (Case(Uneven, num_steps=5), FP32),
    "wide": (Case(functools.partial(MLP, num_blocks=6, dim=512), num_steps=5), FP32),
    "accumulated, resharded": (Case(MLP, shard=sharded(reshard_after_forward=True), step=accumulate), FP32),
    "accumulated, kept": (Case(MLP, shard=sharded(reshard_after_forward=False), step=accumulate), FP32),
    "several dtypes in a unit": (Case(MIXED, shard_and_keep_fp32, optimizer=sgd, num_steps=5), LOW),
}
for _reduce_dtype in (None, torch.float32):
    _policy = {"param_dtype": torch.bfloat16, "reduce_dtype": _reduce_dtype}
    CASES[f"bf16, reduced in {_reduce_dtype}"] = (Case(WIDE, shard=sharded(policy=_policy), num_steps=5), LOW)
_in_fp32 = functools.partial(shard_and_keep_fp32, reduce_dtype=torch.float32)
CASES["several dtypes in a unit, reduced in fp32"] = (Case(MIXED, _in_fp32, optimizer=sgd, num_steps=5), LOW)


@pytest.mark.every_case
@pytest.mark.parametrize("name", CASES)
@on_gpus
def test_training_is_that_of_torch(ctx: RankContext, name: str) -> None:
    case, tolerance = CASES[name]
    close = functools.partial(torch.testing.assert_close, **tolerance)
    ours, theirs = (train(case, ctx.mesh_1d(), runtime) for runtime in (subject(), oracle()))
    for index, (actual, expected) in enumerate(zip(ours, theirs, strict=True)):
        close(actual.losses, expected.losses, msg=lambda text, index=index: f"step {index}, losses: {text}")
        assert actual.parameters.keys() == expected.parameters.keys()
        for name, snapshot in actual.parameters.items():
            other = expected.parameters[name]
            assert snapshot.spec == other.spec, name
            assert snapshot.local.device.type == "cuda", name
            where = f"step {index}, {name}"
            close(snapshot.local, other.local, msg=lambda text, where=where: f"{where}: {text}")


def _gradients(model: Any) -> list[Tensor]:
    model(batch()).square().mean().backward()
    return [parameter.grad.to_local().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("own_stream", [True, False])
@on_gpus
def test_hook_runs_in_order_with_the_reduction(ctx: RankContext, own_stream: bool) -> None:
    stream = torch.cuda.Stream() if own_stream else None
    seen: list[torch.cuda.Stream] = []

    def hook(reduced: Tensor) -> None:
        seen.append(torch.cuda.current_stream())
        torch.cuda._sleep(20_000_000)  # what does not wait for it reads too early
        reduced.mul_(3.0)

    expected = _gradients(sharded_stack(ctx, 3, mp_policy=BF16))
    model = sharded_stack(ctx, 3, mp_policy=BF16)
    for block in model:
        block.set_all_reduce_hook(hook, stream=stream)
    torch.testing.assert_close(_gradients(model), [3.0 * gradient for gradient in expected])
    assert len(seen) == 3
    if own_stream:
        assert set(seen) == {stream}


@pytest.mark.parametrize(
    "settings",
    [
        {"set_custom_all_gather": [CountingAllGather], "set_custom_reduce_scatter": [CountingReduceScatter]},
        {"set_allocate_memory_from_process_group_for_comm": [True]},
        {"set_separate_reduce_scatter_group": []},
    ],
    ids=["custom", "memory_of_the_process_group", "separate_group"],
)
@on_gpus
def test_gradients_stay_the_same(ctx: RankContext, settings: dict[str, Any]) -> None:
    expected = _gradients(sharded_stack(ctx, 3, mp_policy=BF16))
    model = sharded_stack(ctx, 3, mp_policy=BF16)
    for block in model:
        for name, given in settings.items():
            getattr(block, name)(*(each() if isinstance(each, type) else each for each in given))
    torch.testing.assert_close(_gradients(model), expected)
