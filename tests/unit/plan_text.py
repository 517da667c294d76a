"""Plans as text, for tests that show whole plans."""

from __future__ import annotations

import torch

from fsdp2.plan.plan import GatherPlan, Origin, ReducePlan


def text_of_gather(plan: GatherPlan) -> str:
    rows = [
        f"  {step.name}: {step.route.value}, {_arrow(step.source, step.dtype)}, "
        f"{step.layout.num_shards} x {step.chunk_nbytes} bytes "
        + (f"at {step.offset_nbytes}" if step.origin is Origin.SHARD else f"for a hook, {step.lifetime.value}")
        for step in plan.steps
    ]
    return "\n".join([f"all-gather into {plan.unsharded_nbytes} bytes", *rows])


def text_of_reduce(plan: ReducePlan) -> str:
    rows = [
        f"  {step.name}: {step.route.value}, {step.layout.num_shards} x {step.layout.chunk_numel} elements"
        for step in plan.steps
    ]
    divide = f"divide by {plan.factors.before:g} before, {plan.factors.after:g} after"
    if plan.factors.averages:
        divide = "averaged by the collectives"
    dtypes = f"{_arrow(plan.dtypes.param, plan.dtypes.reduce)} -> {_name(plan.dtypes.grad)}"
    return "\n".join([f"reduce-scatter {dtypes}, {divide}", *rows])


def _arrow(before: torch.dtype, after: torch.dtype) -> str:
    return _name(before) if before is after else f"{_name(before)} -> {_name(after)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
