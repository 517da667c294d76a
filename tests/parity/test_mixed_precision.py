"""Mixed precision: which dtype computes, reduces, and leaves the module; several dtypes in one unit; casts.

On 2 ranks the runtimes agree bit for bit here too: a sum of two numbers rounds the same in either order. The
unsharded model runs in fp32 throughout, so the tolerance against it is that of the low-precision arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from tests.harness.compare import Cases, compare_losses_with_unsharded, each_compared, hsdp, trains_alike
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, ParityModel, Transformer, Uneven
from tests.harness.runtimes import SUBJECT_IS_TORCH, Runtime, beyond_torch, oracle, subject
from tests.harness.training import (
    Case,
    Step,
    Tolerance,
    accumulate,
    gradients_of,
    one_backward,
    sgd,
    shard_units_and_root,
    train,
)
from tests.parity.setups import SETUPS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BFLOAT16_ARITHMETIC = Tolerance(rtol=5e-2, atol=5e-2)
FLOAT16_ARITHMETIC = Tolerance(rtol=1e-2, atol=1e-2)


def shard_with_policy(
    runtime: Runtime, model: ParityModel, mesh: Any, output_dtype: torch.dtype | None = None, **policy: Any
) -> None:
    """``output_dtype`` is for the root: what leaves a unit is computed with by the next one."""
    for_root = {"output_dtype": output_dtype, **policy}
    shard_units_and_root(runtime, model, mesh, policy=policy, units=lambda model: model.units())
    shard_units_and_root(runtime, model, mesh, policy=for_root, units=lambda model: [model])


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
    shard = partial(shard_with_policy, **policy)
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


@each_compared(2, 4, ci=[*POLICIES][1:])
def test_policy() -> Cases:
    return {name: _case(MLP, policy) for name, policy in POLICIES.items()}


def _with_torchs_policies(runtime: Runtime, model: ParityModel, mesh: Any) -> None:
    """As in a program that has changed the import of ``fully_shard`` only."""
    theirs, policy = oracle(), POLICIES["bf16_reduced_in_fp32"]
    mp_policy, offload = theirs.MixedPrecisionPolicy(**policy), theirs.CPUOffloadPolicy(pin_memory=False)
    for unit in model.units():
        runtime.fully_shard(unit, mesh=mesh, mp_policy=mp_policy, offload_policy=offload)
    whole = theirs.MixedPrecisionPolicy(output_dtype=FP32, **policy)
    runtime.fully_shard(model, mesh=mesh, mp_policy=whole, offload_policy=theirs.OffloadPolicy())


@each_compared(2)
def test_policies_of_torch_are_taken_as_they_are() -> Cases:
    options = {"optimizer": sgd, "step": step_with_dtypes, "reduce_dtype": FP32, "unsharded": BFLOAT16_ARITHMETIC}
    return {"torch's": Case(MLP, shard=_with_torchs_policies, **options)}


@each_compared(2, 4)
def test_transformer_in_bf16_reduced_in_fp32() -> Cases:
    return {"transformer": _case(Transformer, POLICIES["bf16_reduced_in_fp32"])}


@each_compared(4, mesh=hsdp)
def test_policy_on_hsdp() -> Cases:
    return {"fp16": _case(MLP, POLICIES["fp16"])}


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


@each_compared(2, 4, ci=("one shard, fp16",))
def test_models_inputs_and_meshes() -> Cases:
    """Programs have bf16 on each mesh, with uneven parameters, and with units that run twice."""
    in_fp16 = _case(MLP, POLICIES["fp16"])
    not_cast = {**POLICIES["bf16_reduced_in_fp32"], "cast_forward_inputs": False}
    return {
        "one rank, fp16": (RankContext.mesh_of_one, in_fp16),
        "one shard, fp16": (lambda ctx: ctx.mesh_2d(ctx.world_size, 1), in_fp16),
        "inputs that are not cast": _case(CastsItself, not_cast, step=_noting_inputs),
        "inputs of other types": _case(Inputs, POLICIES["bf16"], step=_noting_inputs),
    }


def _different_policies(runtime: Runtime, model: MLP, mesh: Any) -> None:
    policy = runtime.MixedPrecisionPolicy
    runtime.fully_shard(model.blocks[0], mesh=mesh, mp_policy=policy(param_dtype=BF16, reduce_dtype=FP32))
    runtime.fully_shard(model.blocks[1], mesh=mesh, mp_policy=policy(param_dtype=FP32, output_dtype=BF16))
    runtime.fully_shard(model, mesh=mesh, mp_policy=policy(param_dtype=BF16))


@each_compared(2, 4)
def test_units_may_have_different_policies() -> Cases:
    case = Case(MLP, _different_policies, step_with_dtypes, sgd, reduce_dtype=BF16, unsharded=BFLOAT16_ARITHMETIC)
    return {"three": case}


# torch 2.13 refuses a unit whose parameters differ in dtype, original or unsharded: the oracle gets the fp32 parameters
# in units of their own, for the same numbers.


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


def _mixed_case(policy: dict[str, Any], model: Any = Mixed, **kwargs: Any) -> Case:
    shard = partial(shard_and_keep_fp32, **policy)
    options = {"optimizer": sgd, "reduce_dtype": BF16, "unsharded": BFLOAT16_ARITHMETIC}
    return Case(model, shard, **{**options, **kwargs})


ALL_IN_FP32 = partial(Mixed, dtype=FP32)
ALL_IN_FP16 = partial(Mixed, dtype=FP16)
UNEVEN = partial(Mixed, dim=7)

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


@each_compared(2, 4, ci=[*CASES][1:])
def test_unit_of_several_dtypes() -> Cases:
    return {name: _mixed_case(policy, model) for name, (model, policy) in CASES.items()}


@pytest.mark.ci
@each_compared(2)
def test_weights_that_travel_without_a_bucket() -> Cases:
    return {"wide": _mixed_case({}, partial(Mixed, dim=768), num_steps=2)}


def _freezing(step: Step, model: Mixed) -> list[Tensor]:
    for block in model.blocks:
        block.norm.requires_grad_(step.index != 0)
        block.up.requires_grad_(step.index != 1)
    return one_backward(step, model)


SOME = ("fp32_norms", "norms_kept_in_fp32_all_reduced_in_fp32")
ROWS = ("one rank", "one shard", "accumulated", "partial sums", "HSDP")


@each_compared(2, ci=[f"{row}, {SOME[1]}" for row in ROWS])
def test_unit_of_several_dtypes_on_meshes_and_with_accumulation() -> Cases:
    step, partly = (
        partial(accumulate, switch=switch, note=gradients_of)
        for switch in ("set_requires_gradient_sync", "set_requires_all_reduce")
    )
    rows: dict[str, Any] = {"frozen and thawed": _mixed_case({}, step=_freezing)}
    for name in SOME:
        model, policy = CASES[name]
        rows[f"one rank, {name}"] = (RankContext.mesh_of_one, _mixed_case(policy, model))
        rows[f"one shard, {name}"] = (hsdp, _mixed_case(policy, model))
        rows[f"accumulated, {name}"] = _mixed_case(policy, model, step=step)
        model, policy = CASES[name if name == SOME[1] else "fp32_norms_uneven"]
        rows[f"partial sums, {name}"] = (hsdp, _mixed_case(policy, model, step=partly))
        rows[f"HSDP, {name}"] = (hsdp, _mixed_case(policy, model))
    return rows


@beyond_torch("drops the gradients of what was frozen")
@distributed(2)
def test_hsdp_lands_partial_sums_when_one_dtype_is_frozen_meanwhile(ctx: RankContext) -> None:
    def step(step: Step, model: Mixed) -> list[Tensor]:
        def freeze(micro: int) -> None:
            for block in model.blocks:
                block.norm.requires_grad_(micro == 0)

        return accumulate(step, model, "set_requires_all_reduce", num=2, before=freeze)

    for mesh in (ctx.mesh_2d(2, 1), ctx.mesh_2d(1, 2)):
        case = _mixed_case({}, step=step, num_steps=1)
        (ours,), (reference,) = train(case, mesh, subject()), train(case, mesh, None)
        for name, expected in reference.gradients.items():
            found = ours.gradients[name]
            assert found is not None, name
            assert expected is not None, name
            whole = found.shard_of(expected.local)
            torch.testing.assert_close(found.local, whole, rtol=2e-2, atol=2e-3, msg=name)


CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bfloat16": nn.Module.bfloat16,
    "half": nn.Module.half,
    "double": nn.Module.double,
    "to bfloat16": lambda model: model.to(torch.bfloat16),
}
ANY_DTYPE = Tolerance(rtol=5e-2, atol=5e-2)


class AnyDtype(Uneven):
    def batch(self, generator: torch.Generator) -> tuple[Any, ...]:
        return (super().batch(generator)[0].to(self.exit.weight.dtype),)


def _cast_at(step_index: int, cast: Callable[[nn.Module], nn.Module], evaluates: bool = False) -> Any:
    def step(step: Step, model: Any) -> list[Tensor]:
        if step.index == step_index:
            if evaluates:
                with torch.no_grad():
                    step.loss(model)
            model.zero_grad()
            assert cast(model) is model
        losses = one_backward(step, model)
        if step.index >= step_index:
            expected = cast(nn.Linear(1, 1)).weight.dtype
            assert all(parameter.dtype is parameter.grad.dtype is expected for parameter in model.parameters())
        return losses

    return step


# without state, which would keep its dtype
STATELESS = partial(torch.optim.SGD, lr=0.02)


@each_compared(2, 4, ci=[*CASTS][1:])
def test_cast_before_the_first_step() -> Cases:
    cases = {}
    for name, cast in CASTS.items():
        dtype = cast(nn.Linear(1, 1)).weight.dtype
        case = Case(AnyDtype, step=_cast_at(0, cast), optimizer=STATELESS, reduce_dtype=dtype, unsharded=ANY_DTYPE)
        cases[name] = case
    return cases


@beyond_torch("gathers into memory of the dtype before, and raises")
@each_compared(2, by=compare_losses_with_unsharded, ci=[*CASTS][1:])
def test_cast_in_the_middle_of_training() -> Cases:
    """After a step, and after an evaluation."""
    case = partial(Case, AnyDtype, optimizer=STATELESS, unsharded=ANY_DTYPE)
    return {
        name: tuple(case(step=_cast_at(1, cast, evaluates)) for evaluates in (False, True))
        for name, cast in CASTS.items()
    }


def _cast_and_back(step: Step, model: Any) -> list[Tensor]:
    return one_backward(step, model.double().float())


@each_compared(2, 4, long=("resting", "hsdp", "kept"))
def test_cast_to_double_and_back_between_steps() -> Cases:
    """Optimizers keep their parameters: what is cast is the memory behind them."""
    places = {name: SETUPS[name] for name in ("fsdp", "resting", "hsdp", "kept")}
    return {name: (each.mesh, Case(each.build, each.shard, _cast_and_back)) for name, each in places.items()}


@trains_alike(2, model=MLP, mesh=hsdp)
def test_move_to_the_device_that_it_is_on_changes_nothing(step: Step, model: Any) -> list[Tensor]:
    before = list(model.parameters())
    model.to("cpu").cpu().to(torch.zeros(1))
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    return one_backward(step, model)
