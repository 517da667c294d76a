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
from tests.harness.compare import compare, trains_alike
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, ParityModel, Transformer, Uneven
from tests.harness.selection import long
from tests.harness.training import Case, Step, Tolerance, accumulate, one_backward, sgd, shard_units_and_root
from tests.parity.test_expert_meshes import same_data_for_all, with_torch_mesh_info
from tests.parity.test_model_parallel import case as case_with_model_axes, shard as shard_tensor_parallel

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOW_PRECISION = Tolerance(rtol=5e-2, atol=5e-2)


def _fsdp_modules(model: ParityModel) -> list[Any]:
    return [*model.units(), model]


def _with_comms(runtime, model: ParityModel, mesh: DeviceMesh, comms: dict[str, Any], **kwargs: Any) -> None:
    """Every unit has its own comms; the model keeps them for the step to read."""
    shard_units_and_root(runtime, model, mesh, **kwargs)
    _set_comms(model, comms)


def _set_comms(model: Any, comms: dict[str, Any]) -> None:
    model.comms = []
    for module in _fsdp_modules(model):
        gather, reduce = CountingAllGather(**comms), CountingReduceScatter(**comms)
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(reduce)
        model.comms.append((gather, reduce))


def _counting(step: Callable[[Step, Any], list[Tensor]]) -> Callable[[Step, Any], list[Tensor]]:
    @functools.wraps(step)
    def counted(current: Step, model: ParityModel) -> list[Tensor]:
        losses = step(current, model)
        if current.runtime is not None:
            assert any(gather.messages for gather, _ in model.comms) or current.index > 0
            assert any(reduce.messages for _, reduce in model.comms)
            for name, index in (("gathers", 0), ("reductions", 1)):
                current.note(name, [comms[index].take() for comms in model.comms])
        return losses

    return counted


def _case(model: Any, comms: dict[str, Any] | None = None, **options: Any) -> Case:
    kwargs = {name: options.pop(name) for name in ("reshard_after_forward", "mp_policy") if name in options}
    shard = functools.partial(_with_comms, comms=comms or {}, **kwargs)
    return Case(model, shard, _counting(options.pop("step", one_backward)), **options)


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


@pytest.mark.parametrize("reshard", [False, 2])
@distributed(2)
def test_custom_collectives_under_reshard_after_forward(ctx: RankContext, reshard: bool | int) -> None:
    compare(_case(MLP, {"persistent": True}, reshard_after_forward=reshard), ctx.mesh_1d())


@distributed(2)
def test_custom_collectives_on_hsdp_and_on_one_rank(ctx: RankContext) -> None:
    compare(_case(MLP), ctx.mesh_2d(2, ctx.world_size // 2) if ctx.world_size == 4 else ctx.mesh_2d(1, 2))

    def step(step: Step, model: ParityModel) -> list[Tensor]:
        losses = one_backward(step, model)
        if step.runtime is not None:
            step.note("messages", [comm.take() for comms in model.comms for comm in comms])
        return losses

    compare(Case(MLP, functools.partial(_with_comms, comms={}), step), ctx.mesh_of_one())


@distributed(2)
def test_custom_collectives_in_mixed_precision(ctx: RankContext) -> None:
    def shard(runtime, model: ParityModel, mesh: DeviceMesh) -> None:
        policy = runtime.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
        _with_comms(runtime, model, mesh, {"persistent": True}, mp_policy=policy)

    case = Case(MLP, shard, _counting(one_backward), sgd, reduce_dtype=BF16, unsharded=LOW_PRECISION)
    compare(case, ctx.mesh_1d())


class _TwoDtypes(MLP):
    """The root's group has a frozen weight of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 9).bfloat16(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale.float().mean())


@distributed(2)
def test_several_dtypes_travel_as_bytes(ctx: RankContext) -> None:
    def step(step: Step, model: ParityModel) -> list[Tensor]:
        losses = one_backward(step, model)
        if step.runtime is not None:
            gather, _ = model.comms[-1]
            assert {dtype for dtype, *_ in gather.messages} == {"torch.uint8"}
        return losses

    compare(_case(_TwoDtypes, step=step), ctx.mesh_1d())


@distributed(2)
def test_custom_collectives_with_accumulation(ctx: RankContext) -> None:
    sync = functools.partial(accumulate, switch="set_requires_gradient_sync")
    compare(_case(MLP, {"persistent": True}, step=sync), ctx.mesh_1d())
    if ctx.world_size == 4:
        all_reduce = functools.partial(accumulate, switch="set_requires_all_reduce")
        compare(_case(Uneven, step=all_reduce), ctx.mesh_2d(2, 2))


@pytest.mark.parametrize("reshard", [True, False])
@distributed(2)
def test_custom_collectives_set_between_forward_and_backward(ctx: RankContext, reshard: bool) -> None:
    def step(step: Step, model: ParityModel) -> list[Tensor]:
        loss = step.loss(model)
        if step.runtime is not None:
            gathers, reductions = [], []
            for module in _fsdp_modules(model):
                gathers.append(CountingAllGather())
                reductions.append(CountingReduceScatter())
                module.set_custom_all_gather(gathers[-1])
                module.set_custom_reduce_scatter(reductions[-1])
        loss.backward()
        if step.runtime is not None:
            assert any(comm.messages for comm in gathers) == reshard
            step.note("messages", [comm.take() for comm in gathers + reductions])
        return [loss]

    shard = functools.partial(shard_units_and_root, reshard_after_forward=reshard)
    compare(Case(MLP, shard, step), ctx.mesh_1d())


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


def _shard(
    runtime,
    model: ParityModel,
    mesh: DeviceMesh,
    force_sum: bool = False,
    factor: float | None = None,
    policy: dict[str, Any] | None = None,
) -> None:
    mp_policy = runtime.MixedPrecisionPolicy(**(policy or {}))
    shard_units_and_root(runtime, model, mesh, mp_policy=mp_policy)
    for module in _fsdp_modules(model):
        module.set_force_sum_reduction_for_comms(force_sum)
        if factor is not None:
            module.set_gradient_divide_factor(factor)


def _meshes(ctx: RankContext) -> list[DeviceMesh]:
    if ctx.world_size == 2:
        return [ctx.mesh_1d(), ctx.mesh_2d(2, 1), ctx.mesh_2d(1, 2)]
    return [ctx.mesh_1d(), ctx.mesh_2d(2, 2)]


@pytest.mark.every_case
@pytest.mark.parametrize("force_sum", [False, True])
@distributed(2)
def test_hook_sees_the_average_or_the_sum(ctx: RankContext, force_sum: bool) -> None:
    shard = functools.partial(_shard, force_sum=force_sum)
    for mesh in _meshes(ctx):
        compare(Case(MLP, shard, functools.partial(_hooked, scale=1.0)), mesh)
        compare(Case(Uneven, shard, functools.partial(_hooked, scale=0.5), unsharded=None), mesh)


@pytest.mark.parametrize("force_sum", [False, True])
@distributed(2)
def test_hook_on_a_mesh_of_one_rank(ctx: RankContext, force_sum: bool) -> None:
    shard = functools.partial(_shard, force_sum=force_sum)
    compare(Case(MLP, shard, functools.partial(_hooked, scale=0.5), unsharded=None), ctx.mesh_of_one())


@pytest.mark.parametrize("force_sum", [False, True])
@pytest.mark.parametrize(
    "policy",
    [{"param_dtype": BF16}, {"param_dtype": BF16, "reduce_dtype": FP32}, {"param_dtype": FP16}],
    ids=["bf16", "bf16_reduced_in_fp32", "fp16"],
)
@distributed(2)
def test_hook_sees_reduce_dtype(ctx: RankContext, policy: dict[str, Any], force_sum: bool) -> None:
    shard = functools.partial(_shard, force_sum=force_sum, policy=policy)
    step = functools.partial(_hooked, scale=0.5)
    compare(Case(MLP, shard, step, sgd, reduce_dtype=policy["param_dtype"], unsharded=None), ctx.mesh_1d())


@distributed(2)
def test_divide_factor_comes_behind_the_hook_with_sums_only(ctx: RankContext) -> None:
    shard = functools.partial(_shard, force_sum=True, factor=3.0)
    for mesh in _meshes(ctx)[:: 2 if ctx.world_size == 2 else 1]:  # torch divides twice where the shard axis is 1
        compare(Case(MLP, shard, functools.partial(_hooked, scale=2.0), unsharded=None), mesh)


@distributed(2)
def test_divide_factor_comes_ahead_of_the_hook(ctx: RankContext) -> None:
    """gloo has no multiplication ahead of the sum, so the factor is the one that torch averages with."""
    shard = functools.partial(_shard, factor=float(ctx.world_size))
    compare(Case(MLP, shard, functools.partial(_hooked, scale=2.0), unsharded=None), ctx.mesh_1d())


@pytest.mark.parametrize("setter", ["set_requires_all_reduce", *long("set_requires_gradient_sync")])
@distributed(2)
def test_hook_is_called_when_gradients_are_complete(ctx: RankContext, setter: str) -> None:
    inner = functools.partial(accumulate, switch=setter)
    for mesh in _meshes(ctx):
        compare(Case(MLP, _shard, functools.partial(_hooked, scale=0.5, inner=inner), unsharded=None), mesh)


@trains_alike(2, model=MLP, unsharded=None)
def test_hook_that_is_taken_away_is_not_called(step: Step, model: ParityModel) -> list[Tensor]:
    hook = _Hook(0.5)
    for module in _fsdp_modules(model):
        step.control(module).set_all_reduce_hook(hook if step.index != 1 else None)
    losses = one_backward(step, model)
    assert step.runtime is None or bool(hook.seen) == (step.index != 1)
    return losses


@pytest.mark.parametrize("enable", [True, *long(False)])
@distributed(2)
def test_force_sum_changes_no_result(ctx: RankContext, enable: bool) -> None:
    for mesh in _meshes(ctx):
        compare(Case(MLP, functools.partial(_shard, force_sum=enable)), mesh)
    policy = {"param_dtype": FP16}
    shard = functools.partial(_shard, force_sum=enable, policy=policy)
    compare(Case(MLP, shard, one_backward, sgd, reduce_dtype=FP16, unsharded=LOW_PRECISION), ctx.mesh_1d())


# Groups and memory


@pytest.mark.parametrize("recurse", [True, *long(False)])
@distributed(2)
def test_separate_reduce_scatter_group(ctx: RankContext, recurse: bool) -> None:
    def step(step: Step, model: ParityModel) -> list[Tensor]:
        step.control(model).set_separate_reduce_scatter_group(step.index != 1, recurse=recurse)
        return one_backward(step, model)

    for mesh in _meshes(ctx):
        compare(Case(MLP, step=step, num_steps=4), mesh)


@distributed(2)
def test_separate_reduce_scatter_group_carries_the_reductions(ctx: RankContext) -> None:
    def step(step: Step, model: ParityModel) -> list[Tensor]:
        step.control(model).set_separate_reduce_scatter_group(step.index != 1)
        losses = one_backward(step, model)
        if step.runtime is not None:
            gathered = {group for gather, _ in model.comms for group in gather.groups}
            reduced = {group for _, reduce in model.comms for group in reduce.groups}
            ranks = {tuple(torch.distributed.get_process_group_ranks(group)) for group in gathered | reduced}
            step.note("groups", [len(gathered), len(reduced), reduced == gathered, ranks])
            for comm in (comm for comms in model.comms for comm in comms):
                comm.groups.clear()
        return losses

    for mesh in _meshes(ctx)[-1:]:
        compare(Case(MLP, functools.partial(_with_comms, comms={}), step), mesh)


@distributed(2)
def test_memory_from_the_process_group(ctx: RankContext) -> None:
    def step(step: Step, model: ParityModel) -> list[Tensor]:
        for unit in _fsdp_modules(model):
            step.control(unit).set_allocate_memory_from_process_group_for_comm(step.index != 1)
        return one_backward(step, model)

    for mesh in _meshes(ctx):
        compare(Case(Uneven, step=step), mesh)


@distributed(4)
def test_communication_of_ones_own_beside_tensor_parallelism(ctx: RankContext) -> None:
    mesh = ctx.mesh(dp=2, tp=2)

    def shard(runtime, model: MLP, mesh: DeviceMesh) -> None:
        shard_tensor_parallel(runtime, model, mesh)
        _set_comms(model, {"persistent": True})

    step = functools.partial(_hooked, scale=0.5, inner=_counting(one_backward))
    compare(case_with_model_axes(mesh, shard=shard, step=step, unsharded=None), mesh)


@pytest.mark.long
@distributed(4)
def test_units_whose_parameters_have_several_meshes(ctx: RankContext) -> None:
    def shard(runtime, model: MLP, mesh: DeviceMesh) -> None:
        with_torch_mesh_info(runtime, model, mesh, kind="hsdp")
        model.set_separate_reduce_scatter_group()
        for module in _fsdp_modules(model):
            module.set_allocate_memory_from_process_group_for_comm(True)
            module.set_force_sum_reduction_for_comms(True)

    compare(Case(MLP, shard=shard, step=same_data_for_all, longest_axis=4), ctx.mesh_2d(2, 2))


@distributed(2)
def test_deprecated_divide_factor(ctx: RankContext) -> None:
    def shard(runtime, model: ParityModel, mesh: DeviceMesh) -> None:
        shard_units_and_root(runtime, model, mesh)
        for module in _fsdp_modules(model):
            with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
                module.set_reduce_scatter_divide_factor(2.0)

    compare(Case(MLP, shard), ctx.mesh_1d())
