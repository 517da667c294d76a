"""Mixed precision: which dtype computes, reduces, and leaves the module.

On 2 ranks the runtimes agree bit for bit here too: a sum of two numbers rounds the same in either order. The
unsharded model runs in fp32 throughout, so the tolerance against it is that of the low-precision arithmetic.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness.compare import Cases, compare, each_compared
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, ParityModel, SharedModules, Transformer, Uneven
from tests.harness.training import Case, Step, Tolerance, accumulate, one_backward, sgd, shard_units_and_root

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BFLOAT16_ARITHMETIC = Tolerance(rtol=5e-2, atol=5e-2)
FLOAT16_ARITHMETIC = Tolerance(rtol=1e-2, atol=1e-2)


def shard_with_policy(
    runtime, model: ParityModel, mesh, output_dtype: torch.dtype | None = None, **policy: Any
) -> None:
    """``output_dtype`` is for the root: what leaves a unit is computed with by the next one."""
    shard_units_and_root(runtime, model, mesh, policy=policy, units=lambda model: model.units())
    shard_units_and_root(
        runtime, model, mesh, policy={"output_dtype": output_dtype, **policy}, units=lambda model: [model]
    )


def step_with_dtypes(step: Step, model: ParityModel) -> list[Tensor]:
    """Notes the dtypes of every leaf module's input, weight and output."""
    seen: list[Any] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        seen.append([args[0].dtype, module.weight.dtype, output.dtype])

    leaves = [module for module in model.modules() if isinstance(module, nn.Linear)]
    handles = [module.register_forward_hook(hook) for module in leaves]
    batch = step.batch(model)
    output = model(*batch)
    step.note("dtypes", [*seen, output.dtype])
    for handle in handles:
        handle.remove()
    loss = model.loss(output, batch)
    loss.backward()
    return [loss]


def _case(model, policy: dict[str, Any], **kwargs: Any) -> Case:
    shard = functools.partial(shard_with_policy, **policy)
    low = policy.get("param_dtype") or policy.get("reduce_dtype") or FP32
    unsharded = FLOAT16_ARITHMETIC if low == FP16 else BFLOAT16_ARITHMETIC
    # Low-precision gradients of two runtimes differ by a rounding of the bf16 sum on 4 ranks; SGD does not amplify it.
    # A rounding of parameters also moves what is computed from them in bf16, whatever the reduce dtype.
    options = {"optimizer": sgd, "step": step_with_dtypes, "reduce_dtype": low, "unsharded": unsharded}
    return Case(model, shard=shard, **{**options, **kwargs})


POLICIES = {
    "bf16": {"param_dtype": BF16},
    "bf16_reduced_in_fp32": {"param_dtype": BF16, "reduce_dtype": FP32},
    "fp32_reduced_in_bf16": {"reduce_dtype": BF16},
    "fp16": {"param_dtype": FP16},
    "fp16_reduced_in_fp32": {"param_dtype": FP16, "reduce_dtype": FP32},
    "fp32_reduced_in_fp16": {"reduce_dtype": FP16},
    "bf16_with_fp32_output": {"param_dtype": BF16, "output_dtype": FP32},
    "fp32_with_bf16_output": {"output_dtype": BF16},
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@distributed(2, 4)
def test_policy(ctx: RankContext, policy: dict[str, Any]) -> None:
    compare(_case(MLP, policy), ctx.mesh_1d())


@distributed(2, 4)
def test_transformer_in_bf16_reduced_in_fp32(ctx: RankContext) -> None:
    compare(_case(Transformer, POLICIES["bf16_reduced_in_fp32"]), ctx.mesh_1d())


@each_compared(4, mesh=lambda ctx: ctx.mesh_2d(2, 2), ci=("bf16_reduced_in_fp32", "fp16"))
def test_policy_on_hsdp() -> Cases:
    return {name: _case(MLP, POLICIES[name]) for name in ("bf16", "bf16_reduced_in_fp32", "fp16")}


class CastsItself(MLP):
    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return (super().batch(generator)[0].bfloat16().float(),)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.dtype
        return super().forward(x.to(self.entry.weight.dtype))


class Inputs(MLP):
    """Only floating-point inputs are cast."""

    def __call__(self, x: Tensor) -> Tensor:
        rest = (torch.arange(3), torch.zeros(2, dtype=torch.bool), torch.zeros(2, dtype=torch.float64))
        return super().__call__(x, *rest, flag="yes", nested={"t": (torch.ones(2), None)})

    def forward(self, x: Tensor, *rest: Tensor, flag: str, nested: dict[str, Any]) -> Tensor:  # type: ignore[override]
        self.seen = [x.dtype, *(value.dtype for value in rest), flag, nested["t"][0].dtype, nested["t"][1]]
        return super().forward(x)


def _noting_inputs(step: Step, model: Any) -> list[Tensor]:
    losses = one_backward(step, model)
    step.note("seen", model.seen)
    return losses


ON_ONE = ("bf16", "bf16_reduced_in_fp32", "fp32_reduced_in_bf16", "fp16")
IN_CI = [f"one {what}, {name}" for name in ON_ONE[1:] for what in ("rank", "shard")]
IN_CI.append("used twice, bf16_reduced_in_fp32")


@each_compared(2, 4, ci=IN_CI)
def test_models_inputs_and_meshes() -> Cases:
    not_cast = {**POLICIES["bf16_reduced_in_fp32"], "cast_forward_inputs": False}
    both = ("bf16", "bf16_reduced_in_fp32")
    on_one: dict[str, Any] = {}
    for name in ON_ONE:
        on_one[f"one rank, {name}"] = (RankContext.mesh_of_one, _case(MLP, POLICIES[name]))
        on_one[f"one shard, {name}"] = (lambda ctx: ctx.mesh_2d(ctx.world_size, 1), _case(MLP, POLICIES[name]))
    return {
        **on_one,
        # Autograd adds up two gradients of one backward, in a dtype that depends on torch's version.
        **{f"used twice, {name}": _case(SharedModules, POLICIES[name], step=accumulate) for name in both},
        "uneven": tuple(_case(Uneven, POLICIES[name], step=one_backward) for name in both),
        "inputs that are not cast": _case(CastsItself, not_cast, step=_noting_inputs),
        "inputs of other types": _case(Inputs, POLICIES["bf16"], step=_noting_inputs),
    }


@distributed(2, 4)
def test_units_may_have_different_policies(ctx: RankContext) -> None:
    def shard(runtime, model: MLP, mesh) -> None:
        policy = runtime.MixedPrecisionPolicy
        runtime.fully_shard(model.blocks[0], mesh=mesh, mp_policy=policy(param_dtype=BF16, reduce_dtype=FP32))
        runtime.fully_shard(model.blocks[1], mesh=mesh, mp_policy=policy(param_dtype=FP32, output_dtype=BF16))
        runtime.fully_shard(model, mesh=mesh, mp_policy=policy(param_dtype=BF16))

    compare(Case(MLP, shard, step_with_dtypes, sgd, reduce_dtype=BF16, unsharded=BFLOAT16_ARITHMETIC), ctx.mesh_1d())
