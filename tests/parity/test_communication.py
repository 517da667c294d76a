"""Communication of the user's own: custom collectives, all-reduce hooks, where sums are divided, further groups."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.harness.comms import CountingAllGather, CountingReduceScatter
from tests.harness.compare import Cases, compare, each_compared, hsdp, one_replica, trains_alike
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, ParityModel, Transformer, Uneven
from tests.harness.training import Case, Step, Tolerance, accumulate, one_backward, sgd, sharded
from tests.parity.test_expert_meshes import same_data_for_all, with_experts
from tests.parity.test_model_parallel import case as case_with_model_axes, shard as shard_tensor_parallel

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOW_PRECISION = Tolerance(rtol=5e-2, atol=5e-2)


def _fsdp_modules(model: ParityModel) -> list[Any]:
    return [*model.units(), model]


def _set_comms(model: Any, comms: dict[str, Any]) -> None:
    """Every unit has its own comms; the model keeps them for the step to read."""
    model.comms = []
    for module in _fsdp_modules(model):
        gather, reduce = CountingAllGather(**comms), CountingReduceScatter(**comms)
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(reduce)
        model.comms.append((gather, reduce))


def _counting(
    step: Step, model: Any, inner: Callable[[Step, Any], list[Tensor]] = one_backward, may_be_none: bool = False
) -> list[Tensor]:
    losses = inner(step, model)
    if step.runtime is not None:
        gathers, reductions = ([comms[index].take() for comms in model.comms] for index in (0, 1))
        assert may_be_none or (any(reductions) and (any(gathers) or step.index > 0))
        step.note("messages", [gathers, reductions])
    return losses


_messages = functools.partial(_counting, may_be_none=True)


def _case(model: Any, comms: dict[str, Any] | None = None, inner: Any = one_backward, **options: Any) -> Case:
    kwargs = {name: options.pop(name) for name in ("reshard_after_forward", "policy") if name in options}
    shard = sharded(then=functools.partial(_set_comms, comms=comms or {}), **kwargs)
    return Case(model, shard, functools.partial(_counting, inner=inner), **options)


KINDS = {
    "new_memory": {},
    "persistent": {"persistent": True},
    "persistent_and_sync": {"persistent": True, "is_sync": True},
}


@pytest.mark.parametrize("comms", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("model", [MLP, Uneven, Transformer])
@distributed(2, 4)
def test_custom_collectives_carry_every_message(ctx: RankContext, model, comms: dict[str, bool]) -> None:
    compare(_case(model, comms), ctx.mesh_1d())


class _TwoDtypes(MLP):
    """The root's group has a frozen weight of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 9).bfloat16(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale.float().mean())


def _gathering_bytes(step: Step, model: Any) -> list[Tensor]:
    losses = one_backward(step, model)
    if step.runtime is not None:
        assert {dtype for dtype, *_ in model.comms[-1][0].messages} == {"torch.uint8"}
    return losses


@each_compared(2, 4, ci=("reshard_after_forward=2",))
def test_custom_collectives() -> Cases:
    kept, policy = {"persistent": True}, {"param_dtype": BF16, "reduce_dtype": FP32}
    on_one_rank = Case(MLP, sharded(then=functools.partial(_set_comms, comms={})), _messages)
    return {
        "reshard_after_forward=False": _case(MLP, kept, reshard_after_forward=False),
        "reshard_after_forward=2": _case(MLP, kept, reshard_after_forward=2),
        "replicate axis of one": (one_replica, _case(MLP)),
        "one rank": (RankContext.mesh_of_one, on_one_rank),
        "mixed precision": _case(MLP, kept, policy=policy, optimizer=sgd, reduce_dtype=BF16, unsharded=LOW_PRECISION),
        "accumulation": _case(MLP, kept, accumulate),
        "several dtypes, as bytes": _case(_TwoDtypes, inner=_gathering_bytes),
    }


@pytest.mark.parametrize("reshard", [True, False])
@distributed(2)
def test_custom_collectives_set_between_forward_and_backward(ctx: RankContext, reshard: bool) -> None:
    def step(step: Step, model: ParityModel) -> list[Tensor]:
        loss = step.loss(model)
        if step.runtime is not None:
            _set_comms(model, {})
        loss.backward()
        assert step.runtime is None or any(gather.messages for gather, _ in model.comms) == reshard
        return [loss]

    shard = sharded(reshard_after_forward=reshard)
    compare(Case(MLP, shard, functools.partial(_messages, inner=step)), ctx.mesh_1d())


# All-reduce hooks


class _Hook:
    """Notes what it sees, without the zeros of padding and in an order of its own, and scales it."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.seen: list[Tensor] = []

    def __call__(self, reduced: Tensor) -> None:
        self.seen.append(reduced[reduced != 0].sort().values)
        reduced.mul_(self.scale)


def _hooked(
    step: Step, model: ParityModel, scale: float, inner: Callable[[Step, Any], list[Tensor]] = one_backward
) -> list[Tensor]:
    hooks = [_Hook(scale) for _ in _fsdp_modules(model)]
    for module, hook in zip(_fsdp_modules(model), hooks, strict=True):
        step.control(module).set_all_reduce_hook(hook)
    losses = inner(step, model)
    step.note("seen by hooks", [hook.seen for hook in hooks])
    return losses


def _shard(force_sum: bool = False, factor: float | None = None, policy: dict[str, Any] | None = None) -> Any:
    def configure(model: ParityModel) -> None:
        for module in _fsdp_modules(model):
            module.set_force_sum_reduction_for_comms(force_sum)
            if factor is not None:
                module.set_gradient_divide_factor(factor)

    return sharded(policy=policy or {}, then=configure)


def _meshes(ctx: RankContext) -> list[DeviceMesh]:
    return [ctx.mesh_1d(), hsdp(ctx), one_replica(ctx)]


@pytest.mark.every_case
@pytest.mark.parametrize("force_sum", [False, True])
@distributed(2)
def test_hook_sees_the_average_or_the_sum(ctx: RankContext, force_sum: bool) -> None:
    for mesh in _meshes(ctx):
        compare(Case(MLP, _shard(force_sum), functools.partial(_hooked, scale=1.0)), mesh)
        compare(Case(Uneven, _shard(force_sum), functools.partial(_hooked, scale=0.5), unsharded=None), mesh)


_hooked_case = functools.partial(Case, MLP, unsharded=None)
HALF, TWICE = functools.partial(_hooked, scale=0.5), functools.partial(_hooked, scale=2.0)
LOW: dict[str, dict[str, Any]] = {
    "bf16": {"param_dtype": BF16},
    "bf16 reduced in fp32": {"param_dtype": BF16, "reduce_dtype": FP32},
    "fp16": {"param_dtype": FP16},
}


@each_compared(2, ci=[f"{name}, {sums}" for name in LOW for sums in (False, True)][1:])
def test_hook_sees_reduce_dtype() -> Cases:
    return {
        f"{name}, {sums}": _hooked_case(_shard(sums, policy=policy), HALF, sgd, reduce_dtype=policy["param_dtype"])
        for name, policy in LOW.items()
        for sums in (False, True)
    }


def _when_complete(switch: str) -> Any:
    return functools.partial(_hooked, scale=0.5, inner=functools.partial(accumulate, switch=switch))


@each_compared(2, ci=("one rank, summing",), long=("called when reduced",))
def test_hooks_and_divide_factors() -> Cases:
    """gloo has no multiplication ahead of the sum, so the factor there is the one that torch averages with. torch
    divides twice where sums are divided behind the hook and the shard axis is 1."""
    behind = _hooked_case(_shard(True, factor=3.0), TWICE)
    return {
        "one rank": (RankContext.mesh_of_one, _hooked_case(_shard(), HALF)),
        "one rank, summing": (RankContext.mesh_of_one, _hooked_case(_shard(True), HALF)),
        "divided behind the hook": behind,
        "divided behind the hook, one replica": (one_replica, behind),
        "divided ahead of the hook": _hooked_case(_shard(factor=2.0), TWICE),
        "called when all-reduced": (_meshes, _hooked_case(_shard(), _when_complete("set_requires_all_reduce"))),
        "called when reduced": (_meshes, _hooked_case(_shard(), _when_complete("set_requires_gradient_sync"))),
    }


@trains_alike(2, model=MLP, unsharded=None)
def test_hook_that_is_taken_away_is_not_called(step: Step, model: ParityModel) -> list[Tensor]:
    hook = _Hook(0.5)
    for module in _fsdp_modules(model):
        step.control(module).set_all_reduce_hook(hook if step.index != 1 else None)
    losses = one_backward(step, model)
    assert step.runtime is None or bool(hook.seen) == (step.index != 1)
    return losses


# Groups and memory


def _set_in_units(step: Step, model: ParityModel, setter: str, **options: Any) -> list[Tensor]:
    for unit in [model] if options else _fsdp_modules(model):
        getattr(step.control(unit), setter)(step.index != 1, **options)
    return one_backward(step, model)


def _deprecated(model: ParityModel) -> None:
    for module in _fsdp_modules(model):
        with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
            module.set_reduce_scatter_divide_factor(2.0)


@each_compared(2, mesh=_meshes, long=("no forced sum", "no forced sum, fp16", "separate group of the root"))
def test_settings_change_no_result() -> Cases:
    low = functools.partial(Case, MLP, optimizer=sgd, reduce_dtype=FP16, unsharded=LOW_PRECISION)
    separate = functools.partial(_set_in_units, setter="set_separate_reduce_scatter_group")
    memory = functools.partial(_set_in_units, setter="set_allocate_memory_from_process_group_for_comm")
    in_fp16 = {"param_dtype": FP16}
    return {
        "forced sum": Case(MLP, _shard(True)),
        "forced sum, fp16": (RankContext.mesh_1d, low(_shard(True, policy=in_fp16))),
        "no forced sum": Case(MLP, _shard(False)),
        "no forced sum, fp16": (RankContext.mesh_1d, low(_shard(False, policy=in_fp16))),
        "separate group": Case(MLP, step=functools.partial(separate, recurse=True), num_steps=4),
        "separate group of the root": Case(MLP, step=functools.partial(separate, recurse=False), num_steps=4),
        "memory from the process group": Case(Uneven, step=memory),
        "deprecated divide factor": (RankContext.mesh_1d, Case(MLP, sharded(then=_deprecated))),
    }


@trains_alike(2, model=MLP, shard=sharded(then=functools.partial(_set_comms, comms={})), mesh=one_replica)
def test_separate_reduce_scatter_group_carries_the_reductions(step: Step, model: ParityModel) -> list[Tensor]:
    step.control(model).set_separate_reduce_scatter_group(step.index != 1)
    losses = one_backward(step, model)
    if step.runtime is not None:
        comms: Any = model.comms
        gathered = {group for gather, _ in comms for group in gather.groups}
        reduced = {group for _, reduce in comms for group in reduce.groups}
        ranks = {tuple(torch.distributed.get_process_group_ranks(group)) for group in gathered | reduced}
        step.note("groups", [len(gathered), len(reduced), reduced == gathered, ranks])
        for comm in (comm for pair in comms for comm in pair):
            comm.groups.clear()
    return losses


@pytest.mark.ci
@distributed(4)
def test_communication_of_ones_own_beside_tensor_parallelism(ctx: RankContext) -> None:
    mesh = ctx.mesh(dp=2, tp=2)

    def shard(runtime, model: MLP, mesh: DeviceMesh) -> None:
        shard_tensor_parallel(runtime, model, mesh)
        _set_comms(model, {"persistent": True})

    step = functools.partial(_hooked, scale=0.5, inner=_counting)
    compare(case_with_model_axes(mesh, shard=shard, step=step, unsharded=None), mesh)


@pytest.mark.long
@distributed(4)
def test_units_whose_parameters_have_several_meshes(ctx: RankContext) -> None:
    def shard(runtime, model: MLP, mesh: DeviceMesh) -> None:
        with_experts(runtime, model, mesh, kind="hsdp")
        model.set_separate_reduce_scatter_group()
        for module in _fsdp_modules(model):
            module.set_allocate_memory_from_process_group_for_comm(True)
            module.set_force_sum_reduction_for_comms(True)

    compare(Case(MLP, shard=shard, step=same_data_for_all, longest_axis=4), ctx.mesh_2d(2, 2))
