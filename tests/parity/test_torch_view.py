"""Private names of torch's ``FSDPState``, ``FSDPParamGroup`` and ``FSDPParam``: they read and do the same on a unit of
ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_post_forward_mesh_info
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.core.types import ScheduleError
from tests.harness.compare import as_torchs, hsdp
from tests.harness.distributed import RankContext, distributed
from tests.harness.extensions import Halved, wrap
from tests.harness.runtimes import Runtime, beyond_torch
from tests.harness.selection import long

BF16 = torch.bfloat16


def _sharded(runtime: Runtime, mesh: DeviceMesh, **options: Any) -> tuple[nn.Sequential, Any]:
    """Two blocks and a root without parameters of its own, and the root's state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6, bias=False), nn.ReLU())
    for block in model[:2]:
        runtime.fully_shard(block, mesh=mesh, **options)
    runtime.fully_shard(model, mesh=mesh, **options)
    return model, runtime.fully_shard.state(model)  # type: ignore[attr-defined]


def _described(group: Any) -> Any:
    infos = [
        info and [type(info).__name__, info.shard_mesh_size, info.shard_mesh_dim, info.replicate_mesh_dim]
        for info in (group.mesh_info, group.post_forward_mesh_info)
    ]
    params = [
        [
            param._param_fqn,
            param.sharded_param.placements,
            param._module_info.param_name,
            type(param._module_info.module).__name__.removeprefix("FSDP"),
            [str(dtype) for dtype in (param.orig_dtype, param.param_dtype, param.reduce_dtype)],
            [param.mesh_info == group.mesh_info, param.offload_to_cpu, param.is_dtensor, param.fsdp_placement],
            [param._orig_size, param.sharded_size, param._sharding_spec.placements, param.sharded_state.name],
            param._sharded_param_data,
            param._sharded_local_tensor,
        ]
        for param in group.fsdp_params
    ]
    flags = [group.reshard_after_backward, group.reduce_grads, group.all_reduce_grads, group.unshard_in_backward]
    others = [group.reduce_scatter_unused_params, group.force_sum_reduction_for_comms, group.gradient_divide_factor]
    forms = [group.is_sharded, group.is_sharded_post_forward, group.is_unsharded, group._sharded_state.name]
    passes = [group._training_state.name, group._reshard_after_forward, group._use_post_forward_mesh]
    names = [group._module_fqn, group._with_fqn("label"), group._is_hsdp, str(group.device)]
    groups = [group._all_gather_process_group.size(), group._reduce_scatter_process_group.size()]
    replicas = group._all_reduce_process_group.size() if group._is_hsdp else 0
    return [infos, params, flags, others, forms, passes, names, groups, replicas, group.mp_policy.param_dtype]


@pytest.mark.parametrize("on", [RankContext.mesh_1d, *long(hsdp)], ids=["1D", "2D"])
@as_torchs(2)
def test_a_unit_is_described_by_the_same_names(
    ctx: RankContext, runtime: Runtime, on: Callable[[RankContext], DeviceMesh]
) -> Any:
    policy = runtime.MixedPrecisionPolicy(param_dtype=BF16)
    model, root = _sharded(runtime, on(ctx), mp_policy=policy)
    assert isinstance(root, FSDPState)  # ours says so
    early = root._is_root
    model(torch.ones(2, 6))
    states = root._state_ctx.all_states
    assert states[0] == root
    model[1].set_requires_gradient_sync(False)
    model[1].set_reshard_after_backward(False)
    model[1].set_unshard_in_backward(False)
    model[0].set_gradient_divide_factor(3.0)
    found = [None if state._fsdp_param_group is None else _described(state._fsdp_param_group) for state in states]
    of_states = [[state._is_root, state._mp_policy.param_dtype, str(state._device)] for state in states]
    assert [state._modules for state in states] == [(model,), (model[0],), (model[1],)]
    return [early, found, of_states, [len(state._fsdp_param_groups) for state in states]]


@as_torchs(2)
def test_parameters_are_gathered_and_freed_by_a_group(ctx: RankContext, runtime: Runtime) -> Any:
    model, _ = _sharded(runtime, ctx.mesh_1d())
    group = runtime.fully_shard.state(model[0])._fsdp_param_group  # type: ignore[attr-defined]
    found: list[Any] = []

    def note() -> None:
        weight = model[0].weight
        seen = [hasattr(param, "_unsharded_param") for param in group.fsdp_params]
        found.append([group.is_sharded, group.is_unsharded, isinstance(weight, DTensor), seen])

    note()
    group.lazy_init()  # torch has no streams before
    group.wait_for_unshard()  # nothing is in flight
    group.unshard()
    note()
    group.wait_for_unshard()
    note()
    found += [param.unsharded_param.detach().clone() for param in group.fsdp_params]
    group.reshard()
    note()
    return found


@as_torchs(2)
def test_passes_are_told_by_the_same_states(ctx: RankContext, runtime: Runtime) -> Any:
    model, _ = _sharded(runtime, ctx.mesh_1d())
    state = runtime.fully_shard.state(model[1])  # type: ignore[attr-defined]
    seen = []

    def note(where: str) -> None:
        seen.append((where, state._training_state.name, state._fsdp_param_group._training_state.name))

    note("before")
    model[1].register_forward_pre_hook(lambda *_: note("pre-forward"))
    output = model(torch.ones(2, 6, requires_grad=True))
    note("after forward")
    model[1].weight.register_hook(lambda _: note("weight"))
    output.sum().backward()
    note("after backward")
    state._fsdp_param_group._training_state = TrainingState.IDLE
    return seen


class Asking(Halved):
    """Asks before each gather which pass it is for, as weights of Transformer Engine do, which have two forms."""

    ask: ClassVar[Callable[[nn.Module], None]]

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        type(self).ask(module)
        return super().fsdp_pre_all_gather(mesh, size, stride, module, policy)

    def write(self, out: Tensor, made: Tensor) -> None:
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):  # torch leaves both to hooks
            super().write(out, made)


@as_torchs(2)
def test_hooks_learn_for_which_pass_they_gather(ctx: RankContext, runtime: Runtime) -> Any:
    model = wrap(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3))), Asking)
    for block in (*model, model):
        runtime.fully_shard(block, mesh=ctx.mesh_1d())
    seen: dict[int, list[Any]] = {index: [] for index in range(3)}

    def ask(module: nn.Module) -> None:
        group = runtime.fully_shard.state(module)._fsdp_param_group  # type: ignore[attr-defined]
        seen[list(model).index(module)].append([group._training_state.name, group._reshard_after_forward])

    Asking.ask = ask
    for _ in range(2):  # the order of units is known the second time, so that they are prefetched
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    return seen


@pytest.mark.parametrize("accumulates_in_groups", [False, True])
@as_torchs(2)
def test_a_pipeline_reduces_by_the_groups_and_the_final_callback(
    ctx: RankContext, runtime: Runtime, accumulates_in_groups: bool
) -> list[Tensor]:
    policy = runtime.MixedPrecisionPolicy(BF16, torch.float32)
    model, root = _sharded(runtime, ctx.mesh_1d(), mp_policy=policy, reshard_after_forward=False)
    generator = torch.Generator().manual_seed(ctx.rank)

    def configure(*, is_last: bool) -> None:
        model.set_is_last_backward(is_last)
        model.set_reshard_after_backward(is_last)
        model.set_requires_gradient_sync(is_last)

    configure(is_last=False)
    for _ in range(3):
        model(torch.randn(3, 6, generator=generator)).square().sum().backward()
    configure(is_last=True)
    for state in root._state_ctx.all_states:
        group = state._fsdp_param_group
        if group:
            for param in group.fsdp_params if accumulates_in_groups else ():
                param.accumulate_unsharded_grad_if_needed()
                param.to_accumulated_grad_if_needed()
            group.post_backward()
            assert group.is_sharded
    root._root_post_backward_final_callback()
    return [param.grad.full_tensor() for param in model.parameters()]


@as_torchs(2)
def test_what_happens_after_forward_can_be_set_by_private_names(ctx: RankContext, runtime: Runtime) -> Any:
    """A copy of ``set_reshard_after_forward`` for torch without it is in several clients."""
    model, root = _sharded(runtime, ctx.mesh_1d())
    block = runtime.fully_shard.state(model[0])  # type: ignore[attr-defined]
    found = []
    for reshards in (False, True, False):
        block._auto_reshard_after_forward = False
        group = block._fsdp_param_group
        group.post_forward_mesh_info = _get_post_forward_mesh_info(reshards, group.mesh_info)
        model(torch.ones(2, 6)).sum().backward()
        with torch.no_grad():
            model(torch.ones(2, 6))
        found.append([block._auto_reshard_after_forward, group._reshard_after_forward, group.is_sharded])
        model[0].reshard()
    states = root._state_ctx.all_states
    states[1]._states_to_forward_prefetch = [states[2]]
    states[2]._states_to_backward_prefetch = [states[1]]
    model(torch.ones(2, 6)).sum().backward()
    return [found, [len(s._states_to_forward_prefetch) + len(s._states_to_backward_prefetch) for s in states]]


@as_torchs(4)
def test_a_smaller_mesh_is_told_and_set(ctx: RankContext, runtime: Runtime) -> Any:
    model, _ = _sharded(runtime, ctx.mesh_1d(), reshard_after_forward=2)
    group = runtime.fully_shard.state(model[0])._fsdp_param_group  # type: ignore[attr-defined]
    model(torch.ones(2, 6)).sum().backward()
    smaller = group.post_forward_mesh_info
    found = [[type(smaller).__name__, smaller.shard_mesh_size, smaller.mesh.shape, group._use_post_forward_mesh]]
    for info in (None, group.mesh_info, smaller):
        group.post_forward_mesh_info = info
        model(torch.ones(2, 6))
        found.append([group._use_post_forward_mesh, group.is_sharded, group.is_sharded_post_forward])
        model.reshard()
    return found


@beyond_torch("it acts on its own objects")
@distributed(2)
def test_what_a_unit_cannot_show_says_which_call_does_it(ctx: RankContext) -> None:
    model, root = _sharded(fsdp2, ctx.mesh_1d())  # type: ignore[arg-type]
    model(torch.ones(2, 6)).sum().backward()
    block = fsdp2.fully_shard.state(model[0])  # type: ignore[attr-defined]
    group = block._fsdp_param_group
    param = group.fsdp_params[0]
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: group._all_gather_comm, r"FSDPParamGroup does not have '_all_gather_comm'.*set_custom_all_gather"),
        (lambda: setattr(group, "_all_reduce_hook", print), r"cannot set '_all_reduce_hook'.*set_all_reduce_hook"),
        (lambda: setattr(group, "fsdp_params", []), r"cannot set 'fsdp_params'.*ways to replace parameters"),
        (lambda: setattr(group, "_training_state", TrainingState.FORWARD), r"can set '_training_state' to IDLE only"),
        (lambda: group._all_reduce_process_group, r"'_all_reduce_process_group' is for a unit with a replicate axis"),
        (lambda: root._pre_forward, r"FSDPState does not have '_pre_forward'.*register_forward_pre_hook"),
        (lambda: setattr(root, "mark", 1), r"FSDPState cannot set 'mark'.*methods of fsdp2\.FSDPModule"),
        (lambda: param.to_sharded, r"FSDPParam does not have 'to_sharded'.*reshard\(\)"),
        (lambda: root._state_ctx.unknown, r"FSDPStateContext does not have 'unknown'.*private-names"),
    ]
    for call, text in refused:
        with pytest.raises(AttributeError, match=text):
            call()
    other = fsdp2.fully_shard(nn.Linear(3, 3), mesh=ctx.mesh_1d())
    own = fsdp2.fully_shard.state(other)._fsdp_param_group  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="'unsharded_param' was never unsharded"):
        _ = own.fsdp_params[0].unsharded_param
    if ctx.rank == 1:  # 3 rows on 2 ranks
        with pytest.raises(AttributeError, match="'_sharded_param_data' has no padding here"):
            _ = own.fsdp_params[0]._sharded_param_data
    assert not hasattr(group, "anything")
    inside: list[str] = []

    def reduce_inside(*_: object) -> None:
        with pytest.raises(ScheduleError, match="a backward is running"):
            group.post_backward()
        inside.append("refused")

    hook = model[1].register_full_backward_hook(reduce_inside)
    model(torch.ones(2, 6, requires_grad=True)).sum().backward()
    hook.remove()
    assert inside


@beyond_torch("it refuses scalars")
@distributed(2)
def test_scalars_belong_to_the_group_of_their_mesh(ctx: RankContext) -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.scale = nn.Parameter(torch.ones(()))

    unit = fsdp2.fully_shard(Scaled(), mesh=ctx.mesh_1d())
    state = fsdp2.fully_shard.state(unit)  # type: ignore[attr-defined]
    (group,) = state._fsdp_param_groups
    assert state._fsdp_param_group is group
    assert {param._module_info.param_name for param in group.fsdp_params} == {"weight", "bias", "scale"}
    assert group.mesh_info.shard_mesh_size == 2
