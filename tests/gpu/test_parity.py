"""On CUDA, training runs are those of torch's ``fully_shard``.

Kernels may be chosen by the alignment of their operands, which differs between the runtimes: a few roundings.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.gpu.support import on_gpus
from tests.harness.distributed import RankContext
from tests.harness.models import MLP, ParityModel, Uneven
from tests.harness.runtimes import Runtime, oracle, subject
from tests.harness.training import Case, accumulate, sgd, shard_units_and_root, train
from tests.parity.test_mixed_precision import Mixed, shard_and_keep_fp32


def _assert_close(case: Case, mesh: DeviceMesh, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    close = functools.partial(torch.testing.assert_close, rtol=rtol, atol=atol)
    ours, theirs = train(case, mesh, subject()), train(case, mesh, oracle())
    for index, (actual, expected) in enumerate(zip(ours, theirs, strict=True)):
        close(actual.losses, expected.losses, msg=lambda text, index=index: f"step {index}, losses: {text}")
        assert actual.parameters.keys() == expected.parameters.keys()
        for name, snapshot in actual.parameters.items():
            other = expected.parameters[name]
            assert snapshot.spec == other.spec, name
            assert snapshot.local.device.type == "cuda", name
            where = f"step {index}, {name}"
            close(snapshot.local, other.local, msg=lambda text, where=where: f"{where}: {text}")


@pytest.mark.parametrize("model", [MLP, Uneven, functools.partial(MLP, num_blocks=6, dim=512)])
@on_gpus
def test_training_in_fp32(ctx: RankContext, model) -> None:
    _assert_close(Case(model, num_steps=5), ctx.mesh_1d())


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@on_gpus
def test_training_in_bf16(ctx: RankContext, reduce_dtype: torch.dtype | None) -> None:
    def shard(runtime: Runtime, model: ParityModel, mesh: DeviceMesh) -> None:
        policy = runtime.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        shard_units_and_root(runtime, model, mesh, mp_policy=policy)

    case = Case(functools.partial(MLP, num_blocks=4, dim=512), shard=shard, num_steps=5)
    _assert_close(case, ctx.mesh_1d(), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("policy", [{}, {"reduce_dtype": torch.float32}])
@on_gpus
def test_training_with_several_dtypes_in_one_unit(ctx: RankContext, policy: dict[str, torch.dtype]) -> None:
    shard = functools.partial(shard_and_keep_fp32, **policy)
    case = Case(functools.partial(Mixed, dim=512), shard, optimizer=sgd, num_steps=5)
    _assert_close(case, ctx.mesh_1d(), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@on_gpus
def test_training_with_accumulation(ctx: RankContext, reshard_after_forward: bool) -> None:
    shard = functools.partial(shard_units_and_root, reshard_after_forward=reshard_after_forward)
    _assert_close(Case(MLP, shard=shard, step=accumulate), ctx.mesh_1d())
