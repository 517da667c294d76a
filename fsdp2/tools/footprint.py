"""What the plans of a group take in bytes, while they run: arithmetic on plans, for ``budget``."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2.comm.backends import GatherComm, ReduceComm
from fsdp2.plan.layout import ShardLayout
from fsdp2.plan.plan import GatherPlan, GatherStep, Lifetime, Origin, ReducePlan, Route
from fsdp2.tools.budget import UnitBytes


def gather_bytes(
    plan: GatherPlan, comm: GatherComm, *, made_by_hooks: int, staged: int, resting_ranks: int
) -> UnitBytes:
    """What gathering takes. ``made_by_hooks``: bytes of what post-hooks fill. ``staged``: bytes of shards that travel
    to the device first. ``resting_ranks``: size of the post-forward mesh, 0 without one."""
    passing = sum(step.padded_nbytes for step in plan.steps if step.lifetime is Lifetime.ARRIVAL)
    travelling = sum(step.padded_nbytes for step in plan.steps)
    return UnitBytes(
        unsharded=plan.unsharded_nbytes + made_by_hooks,
        arriving=plan.staging_nbytes + passing + staged + comm.gather_buffer_nbytes(travelling),
        resting=sum(_resting_nbytes(step, resting_ranks) for step in plan.steps) if resting_ranks else 0,
    )


def reduce_bytes(plans: Sequence[ReducePlan], comm: ReduceComm, *, keeps_gradients: bool) -> UnitBytes:
    """What reducing takes. ``keeps_gradients``: those that were copied are held, too, while the reduction is in
    flight."""
    gradients = sum(_numel(plan) * plan.dtypes.param.itemsize for plan in plans)
    copies = sum(_copies_nbytes(plan, comm) for plan in plans)
    sent_as_they_are = sum(
        _numel(plan, Route.DIRECT) * plan.dtypes.param.itemsize for plan in plans if not _casts(plan)
    )
    return UnitBytes(
        gradients=gradients,
        copies=copies,
        early=sum(_early_nbytes(plan, comm) for plan in plans) if any(plan.num_early for plan in plans) else 0,
        sent=copies + (gradients if keeps_gradients else sent_as_they_are),
    )


def _copies_nbytes(plan: ReducePlan, comm: ReduceComm) -> int:
    """Buckets, casts, what the comm itself takes, and the sums: they are not gradients before they have landed."""
    padded = sum(step.layout.padded_numel for step in plan.steps if step.route is not Route.DIRECT)
    cast = _numel(plan, Route.DIRECT) if _casts(plan) else 0
    itemsize = plan.dtypes.reduce.itemsize
    travelling = sum(step.layout.padded_numel for step in plan.steps) * itemsize
    return (padded + cast + plan.flat_numel) * itemsize + comm.reduce_buffer_nbytes(travelling)


def _early_nbytes(plan: ReducePlan, comm: ReduceComm) -> int:
    """Of the copies, what the launch ahead of the rest takes: its casts, and all of the sums."""
    steps = plan.steps[len(plan.steps) - plan.num_early :]
    cast = sum(step.layout.numel for step in steps) if _casts(plan) else 0
    itemsize = plan.dtypes.reduce.itemsize
    travelling = sum(step.layout.padded_numel for step in steps) * itemsize
    return (cast + plan.flat_numel) * itemsize + comm.reduce_buffer_nbytes(travelling)


def _casts(plan: ReducePlan) -> bool:
    return plan.dtypes.param is not plan.dtypes.reduce


def _numel(plan: ReducePlan, route: Route | None = None) -> int:
    return sum(step.layout.numel for step in plan.steps if route is None or step.route is route)


def _resting_nbytes(step: GatherStep, num_ranks: int) -> int:
    shape, dim = (step.layout.shape, step.layout.dim) if step.origin is Origin.SHARD else ((step.layout.numel,), 0)
    return ShardLayout(shape, dim, num_ranks).chunk_numel * step.dtype.itemsize
