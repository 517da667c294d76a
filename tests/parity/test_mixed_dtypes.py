"""Parameters of one unit that differ in dtype, original or unsharded.

torch 2.13 refuses such a unit, so the oracle gets the fp32 parameters in units of their own: the numbers are the same.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from tests.harness.compare import Cases, compare, each_compared, hsdp
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import ParityModel
from tests.harness.runtimes import SUBJECT_IS_TORCH, beyond_torch, oracle, subject
from tests.harness.training import Case, Step, Tolerance, accumulate, gradients_of, one_backward, sgd, train

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BFLOAT16_ARITHMETIC = Tolerance(rtol=5e-2, atol=5e-2)


class Scale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.0, dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x.to(self.weight.dtype)


class Block(nn.Module):
    """fp32 norm and scale around weights of ``dtype``. Every module casts what it is given."""

    def __init__(self, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim, dtype=dtype)
        self.down = nn.Linear(2 * dim, dim, dtype=dtype, bias=False)
        self.scale = Scale(dim)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x.to(self.norm.weight.dtype))
        hidden = self.down(torch.tanh(self.up(hidden.to(self.up.weight.dtype))))
        return x + self.scale(hidden).to(x.dtype)


class Mixed(ParityModel):
    def __init__(self, dim: int = 16, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.dim = dim
        self.blocks = nn.ModuleList(Block(dim, dtype) for _ in range(2))
        self.exit = nn.Linear(dim, 8)

    def batch(self, generator: torch.Generator) -> tuple[Any, ...]:
        return (torch.randn(3, self.dim, generator=generator),)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.exit(x.to(self.exit.weight.dtype))

    def units(self) -> list[nn.Module]:
        return list(self.blocks)


def _fp32_modules(block: Block) -> list[nn.Module]:
    return [block.norm, block.scale]


def shard_and_keep_fp32(runtime, model: Mixed, mesh, **policy: Any) -> None:
    """``policy`` for all parameters; those in fp32 keep their dtype. The last linear layer has a unit without one."""
    kept = [p for block in model.blocks for module in _fp32_modules(block) for p in module.parameters()]
    for block in model.blocks:
        options = {} if SUBJECT_IS_TORCH or runtime is oracle() else _one_unit(kept, policy)
        if not options:
            own = {key: value for key, value in policy.items() if key != "param_dtype"}
            for module in _fp32_modules(block):
                runtime.fully_shard(
                    module, mesh=mesh, shard_placement_fn=_last_dim, mp_policy=runtime.MixedPrecisionPolicy(**own)
                )
            options = policy
        policy_of_block = runtime.MixedPrecisionPolicy(**options)
        runtime.fully_shard(block, mesh=mesh, shard_placement_fn=_last_dim, mp_policy=policy_of_block)
    runtime.fully_shard(model, mesh=mesh)


def _one_unit(kept: list[nn.Parameter], policy: dict[str, Any]) -> dict[str, Any]:
    def override(param: nn.Parameter) -> torch.dtype | None:
        return param.dtype if any(param is other for other in kept) else None

    return {**policy, "param_dtype_override_fn": override}


def _last_dim(param: nn.Parameter) -> Shard | None:
    """Matrices with twice as many columns as rows are cut along those: strided buckets, too."""
    return Shard(1) if param.dim() == 2 and param.size(1) == 2 * param.size(0) and param.size(1) % 4 == 0 else None


def _case(policy: dict[str, Any], model: Any = Mixed, **kwargs: Any) -> Case:
    shard = functools.partial(shard_and_keep_fp32, **policy)
    options = {"optimizer": sgd, "reduce_dtype": BF16, "unsharded": BFLOAT16_ARITHMETIC}
    return Case(model, shard, **{**options, **kwargs})


ALL_IN_FP32 = functools.partial(Mixed, dtype=FP32)
ALL_IN_FP16 = functools.partial(Mixed, dtype=FP16)
UNEVEN = functools.partial(Mixed, dim=7)

# Original dtypes differ; or those of unsharded parameters only.
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "fp32_norms": (Mixed, {}),
    "fp32_norms_all_reduced_in_fp32": (Mixed, {"reduce_dtype": FP32}),
    "fp32_norms_all_reduced_in_bf16": (Mixed, {"reduce_dtype": BF16}),
    "fp32_norms_beside_fp16": (ALL_IN_FP16, {}),
    "fp32_norms_uneven": (UNEVEN, {}),
    "norms_kept_in_fp32": (ALL_IN_FP32, {"param_dtype": BF16}),
    "norms_kept_in_fp32_all_reduced_in_fp32": (ALL_IN_FP32, {"param_dtype": BF16, "reduce_dtype": FP32}),
    "norms_kept_in_fp32_beside_fp16": (ALL_IN_FP32, {"param_dtype": FP16}),
}


@pytest.mark.parametrize("name", CASES)
@distributed(2, 4)
def test_unit_of_several_dtypes(ctx: RankContext, name: str) -> None:
    model, policy = CASES[name]
    compare(_case(policy, model), ctx.mesh_1d())


@pytest.mark.ci
@distributed(2)
def test_weights_that_travel_without_a_bucket(ctx: RankContext) -> None:
    compare(_case({}, functools.partial(Mixed, dim=768), num_steps=2), ctx.mesh_1d())


def _freezing(step: Step, model: Mixed) -> list[Tensor]:
    for block in model.blocks:
        block.norm.requires_grad_(step.index != 0)
        block.up.requires_grad_(step.index != 1)
    return one_backward(step, model)


SOME = ("fp32_norms", "norms_kept_in_fp32_all_reduced_in_fp32")
ROWS = ("one rank", "one shard", "accumulated", "partial sums", "HSDP")


@each_compared(2, ci=[f"{row}, {SOME[1]}" for row in ROWS])
def test_unit_of_several_dtypes_on_meshes_and_with_accumulation() -> Cases:
    step, partial = (
        functools.partial(accumulate, switch=switch, note=gradients_of)
        for switch in ("set_requires_gradient_sync", "set_requires_all_reduce")
    )
    rows: dict[str, Any] = {"frozen and thawed": _case({}, step=_freezing)}
    for name in SOME:
        model, policy = CASES[name]
        rows[f"one rank, {name}"] = (RankContext.mesh_of_one, _case(policy, model))
        rows[f"one shard, {name}"] = (hsdp, _case(policy, model))
        rows[f"accumulated, {name}"] = _case(policy, model, step=step)
        model, policy = CASES[name if name == SOME[1] else "fp32_norms_uneven"]
        rows[f"partial sums, {name}"] = (hsdp, _case(policy, model, step=partial))
        rows[f"HSDP, {name}"] = (hsdp, _case(policy, model))
    return rows


@beyond_torch("drops the gradients of what was frozen")
@distributed(2)
def test_hsdp_lands_partial_sums_when_one_dtype_is_frozen_meanwhile(ctx: RankContext) -> None:
    def step(step: Step, model: Mixed) -> list[Tensor]:
        losses = []
        for micro in range(2):
            step.control(model).set_requires_all_reduce(micro == 1)
            for block in model.blocks:
                block.norm.requires_grad_(micro == 0)
            losses.append(step.loss(model, micro))
            losses[-1].backward()
        return losses

    for mesh in (ctx.mesh_2d(2, 1), ctx.mesh_2d(1, 2)):
        case = _case({}, step=step, num_steps=1)
        (ours,), (reference,) = train(case, mesh, subject()), train(case, mesh, None)
        for name, expected in reference.gradients.items():
            found = ours.gradients[name]
            assert found is not None, name
            assert expected is not None, name
            whole = found.shard_of(expected.local)
            torch.testing.assert_close(found.local, whole, rtol=2e-2, atol=2e-3, msg=name)
