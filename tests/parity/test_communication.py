"""What the user sends: custom collectives, all-reduce hooks, wrapper tensors; where sums are divided, further groups.

Training with all-gather hooks is compared with a model by hand, bit for bit: ``tests/distributed/test_extension_*.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.two_tensor import TwoTensor

from tests.harness.comms import CountingAllGather, CountingReduceScatter
from tests.harness.compare import Cases, each_compared, hsdp, one_replica, trains_alike
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import MLP, ParityModel, Transformer, Uneven
from tests.harness.runtimes import Runtime, oracle, subject
from tests.harness.training import Case, Step, Tolerance, accumulate, one_backward, sgd, sharded
from tests.parity.test_model_parallel import by_data, on, shard as shard_tensor_parallel
from tests.parity.test_placement import same_data_for_all, with_experts

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


_messages = partial(_counting, may_be_none=True)


def _case(model: Any, comms: dict[str, Any] | None = None, inner: Any = one_backward, **options: Any) -> Case:
    kwargs = {name: options.pop(name) for name in ("reshard_after_forward", "policy") if name in options}
    shard = sharded(then=partial(_set_comms, comms=comms or {}), **kwargs)
    return Case(model, shard, partial(_counting, inner=inner), **options)


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


MODELS = {model.__name__: model for model in (MLP, Uneven, Transformer)}
KINDS: dict[str, dict[str, Any]] = {"new": {}, "persistent": {"persistent": True}}


@each_compared(2, 4, ci=("reshard_after_forward=2",))
def test_custom_collectives_carry_every_message() -> Cases:
    kept, policy = KINDS["persistent"], {"param_dtype": BF16, "reduce_dtype": FP32}
    on_one_rank = Case(MLP, sharded(then=partial(_set_comms, comms={})), _messages)
    return {
        **{f"{name}, {kind}": _case(model, KINDS[kind]) for name, model in MODELS.items() for kind in KINDS},
        "reshard_after_forward=False": _case(MLP, kept, reshard_after_forward=False),
        "reshard_after_forward=2": _case(MLP, kept, reshard_after_forward=2),
        "replicate axis of one": (one_replica, _case(MLP)),
        "one rank": (RankContext.mesh_of_one, on_one_rank),
        "mixed precision": _case(MLP, kept, policy=policy, optimizer=sgd, reduce_dtype=BF16, unsharded=LOW_PRECISION),
        "accumulation": _case(MLP, kept, accumulate),
        "several dtypes, as bytes": _case(_TwoDtypes, inner=_gathering_bytes),
    }


def _set_between(step: Step, model: Any, *, gathers: bool) -> list[Tensor]:
    loss = step.loss(model)
    if step.runtime is not None:
        _set_comms(model, {})
    loss.backward()
    assert step.runtime is None or any(gather.messages for gather, _ in model.comms) == gathers
    return [loss]


@each_compared(2, ci=("kept",))
def test_custom_collectives_set_between_forward_and_backward() -> Cases:
    return {
        name: Case(
            MLP, sharded(reshard_after_forward=is_one), partial(_messages, inner=partial(_set_between, gathers=is_one))
        )
        for name, is_one in (("resharded", True), ("kept", False))
    }


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


@each_compared(2, mesh=_meshes)
def test_hook_sees_the_average_or_the_sum() -> Cases:
    once, half = partial(_hooked, scale=1.0), partial(_hooked, scale=0.5)
    return {
        name: (Case(MLP, _shard(is_sum), once), Case(Uneven, _shard(is_sum), half, unsharded=None))
        for name, is_sum in (("average", False), ("sum", True))
    }


_hooked_case = partial(Case, MLP, unsharded=None)
HALF, TWICE = partial(_hooked, scale=0.5), partial(_hooked, scale=2.0)
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
    return partial(_hooked, scale=0.5, inner=partial(accumulate, switch=switch))


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


@each_compared(2, mesh=_meshes, long=("separate group of the root",))
def test_settings_change_no_result() -> Cases:
    low = partial(Case, MLP, optimizer=sgd, reduce_dtype=FP16, unsharded=LOW_PRECISION)
    separate = partial(_set_in_units, setter="set_separate_reduce_scatter_group")
    memory = partial(_set_in_units, setter="set_allocate_memory_from_process_group_for_comm")
    return {
        "forced sum": Case(MLP, _shard(True)),
        "forced sum, fp16": (RankContext.mesh_1d, low(_shard(True, policy={"param_dtype": FP16}))),
        "separate group": Case(MLP, step=partial(separate, recurse=True), num_steps=4),
        "separate group of the root": Case(MLP, step=partial(separate, recurse=False), num_steps=4),
        "memory from the process group": Case(Uneven, step=memory),
        "deprecated divide factor": (RankContext.mesh_1d, Case(MLP, sharded(then=_deprecated))),
    }


@trains_alike(2, model=MLP, shard=sharded(then=partial(_set_comms, comms={})), mesh=one_replica)
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


def _tensor_parallel_with_comms(runtime: Runtime, model: MLP, mesh: DeviceMesh) -> None:
    shard_tensor_parallel(runtime, model, mesh)
    _set_comms(model, {"persistent": True})


def _experts_with_settings(runtime: Runtime, model: MLP, mesh: DeviceMesh) -> None:
    with_experts(runtime, model, mesh, kind="hsdp")
    model.set_separate_reduce_scatter_group()  # type: ignore[operator]
    for module in _fsdp_modules(model):
        module.set_allocate_memory_from_process_group_for_comm(True)
        module.set_force_sum_reduction_for_comms(True)


@each_compared(4, by=by_data, ci=("tensor parallelism",), long=("experts",))
def test_communication_of_ones_own_where_parameters_have_several_meshes() -> Cases:
    hooked = partial(_hooked, scale=0.5, inner=_counting)
    experts = Case(MLP, _experts_with_settings, same_data_for_all, longest_axis=4)
    return {
        "tensor parallelism": on(Case(MLP, _tensor_parallel_with_comms, hooked, unsharded=None), dp=2, tp=2),
        "experts": (lambda ctx: ctx.mesh_2d(2, 2), experts),
    }


def _patched(model: nn.Module, pre: Any, post: Any) -> None:
    """Give the shards of all matrices hooks of their own; the class has none."""
    for param in model.parameters():
        local = param._local_tensor  # to_local() makes another object
        if param.dim() == 2:
            local.fsdp_pre_all_gather = pre.__get__(local)
            local.fsdp_post_all_gather = post.__get__(local)


def _two_tensor_losses(ctx: RankContext, mesh: Any, hooks: Any, num_forwards: int) -> Any:
    """Pairs of losses: of the oracle, and of the subject."""
    results = []
    for runtime in (oracle(), subject()):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
        for layer in model:
            layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach().clone()))
        for module in (*model, model):
            runtime.fully_shard(module, mesh=mesh)
        _patched(model, *hooks)
        torch.manual_seed(ctx.rank)
        results.append([model(torch.randn(2, 8)).square().sum() for _ in range(num_forwards)])
    return zip(*results, strict=True)


@torch.no_grad()
def _from_bfloat16(self: Any, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
    (gathered,) = outputs
    assert gathered.dtype is torch.bfloat16
    if out is None:
        made = gathered.to(param_dtype)
        return made, (gathered, made)
    with torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(gathered)
    return None


@torch.no_grad()
def _as_it_came(self: Any, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
    assert metadata == 2
    return None if out is not None else (outputs[0], outputs)


HOOKS: dict[str, Any] = {
    "in bf16": (lambda self, mesh, size, stride, module, policy: ((self.to(torch.bfloat16),), None), _from_bfloat16),
    "itself": (lambda self, mesh, size, stride, module, policy: ((self,), mesh.size()), _as_it_came),
}


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("hooks", HOOKS)
@distributed(4)
def test_payload_that_is_a_wrapper_tensor(ctx: RankContext, hooks: str, axes: int) -> None:
    """torch writes all inner tensors of the payload to one place, so that the last one arrives. Here they are equal."""
    mesh = ctx.mesh_2d(2, 2) if axes == 2 else ctx.mesh_2d(2, 2)["shard"]
    for theirs, ours in _two_tensor_losses(ctx, mesh, HOOKS[hooks], 2):
        assert isinstance(ours, TwoTensor)
        assert torch.equal(ours.a, theirs)
        assert torch.equal(ours.b, theirs)


def _first_half(self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
    return (self.a,), torch.full((8, 8), 2.0)


def _with_metadata(self: Any, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
    if out is None:
        return TwoTensor(outputs[0], metadata), outputs
    out.b = metadata  # torchao's float8 replaces the scale of a weight so
    return None


@distributed(2)
def test_a_post_hook_may_replace_what_was_not_gathered(ctx: RankContext) -> None:
    for theirs, ours in _two_tensor_losses(ctx, ctx.mesh_1d(), (_first_half, _with_metadata), 3):
        assert torch.equal(ours.a, theirs.a)
        assert torch.equal(ours.b, theirs.b)
