"""Arguments that the class refuses: errors of torch's types, in our words, and a model that is as it was."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp2.fsdp1
from fsdp2.runtime.unit import unit_of
from tests.harness.distributed import RankContext, distributed
from tests.parity.fsdp1.fronts import Front, as_torchs, batch, train
from tests.parity.fsdp1.test_strategies import HYBRID


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def refused(ctx: RankContext, error: type[Exception], match: str, module: nn.Module | None = None, **options) -> None:
    """Ours raises, and leaves the model as it was; torch's raises an error of the same type."""
    for names in (fsdp2.fsdp1, torch.distributed.fsdp):
        model = module or mlp()
        with pytest.raises(error) as found:
            Front(ctx, names).wrap(model, **options)
        if names is fsdp2.fsdp1:
            assert match in str(found.value), str(found.value)
            assert all(unit_of(each) is None for each in model.modules())
            assert not any(isinstance(each, fsdp2.fsdp1.FullyShardedDataParallel) for each in model.modules())


@distributed(2)
def test_contradictions_are_refused(ctx: RankContext) -> None:
    mesh, params = ctx.mesh_1d(), list(mlp().parameters())
    group = mesh.get_group()
    refused(ctx, ValueError, "Pass device_mesh only", process_group=group, device_mesh=mesh)
    refused(ctx, ValueError, "ignored_states only", ignored_modules=[], ignored_states=[])
    refused(ctx, ValueError, "has Linear and Parameter", ignored_states=[params[0], nn.Linear(1, 1)])
    refused(ctx, ValueError, "expected modules only", ignored_modules=[params[0]])
    refused(ctx, ValueError, "a pair of groups (shard, replicate)", sharding_strategy=HYBRID)
    refused(ctx, ValueError, "two process groups", sharding_strategy=HYBRID, process_group=group)
    refused(ctx, ValueError, "expects two axes", sharding_strategy=HYBRID, device_mesh=mesh)


@distributed(2)
def test_what_one_flat_parameter_cannot_hold_is_refused(ctx: RankContext) -> None:
    policy = ModuleWrapPolicy({nn.Linear})
    frozen, doubled, scalar = mlp(), mlp(), mlp()
    frozen[2].bias.requires_grad_(False)
    doubled[2].bias = nn.Parameter(doubled[2].bias.double())
    scalar[2].scale = nn.Parameter(torch.tensor(1.0))
    for options in ({}, {"auto_wrap_policy": policy}):
        refused(ctx, ValueError, "requires_grad=True and Linear.bias has requires_grad=False", frozen, **options)
        refused(ctx, ValueError, "expects one dtype. Pass use_orig_params=True", doubled, **options)
        refused(ctx, ValueError, "Linear.scale is a scalar", scalar, **options)


@distributed(2)
def test_original_parameters_may_differ(ctx: RankContext) -> None:
    """In dtype, and in what is trained. Torch's class refuses two dtypes also here."""
    model = mlp()
    model[2] = model[2].double()
    model[0].bias.requires_grad_(False)
    model.register_forward_pre_hook(lambda *_: None)
    wrapped = Front(ctx, fsdp2.fsdp1).wrap(model, use_orig_params=True)
    assert {param.dtype for param in wrapped.parameters()} == {torch.float32, torch.float64}
    model[1].register_forward_hook(lambda module, args, output: output.double())
    assert len(train(ctx, wrapped)) == 3


@distributed(2)
def test_types_are_checked(ctx: RankContext) -> None:
    wrap = Front(ctx, fsdp2.fsdp1).wrap
    for name, value in (("sharding_strategy", "FULL"), ("mixed_precision", torch.bfloat16), ("cpu_offload", True)):
        with pytest.raises(TypeError, match=f"FullyShardedDataParallel: {name} is a .*, expected a "):
            wrap(mlp(), **{name: value})
    with pytest.raises(TypeError, match=r"expected an nn\.Module"):
        wrap("model")
    with pytest.raises(TypeError, match="policy is a set"):
        wrap(mlp(), auto_wrap_policy={nn.Linear})
    with pytest.raises(
        ValueError, match=r"mixed_precision\.param_dtype is torch\.int8, expected a floating-point dtype"
    ):
        wrap(mlp(), mixed_precision=MixedPrecision(param_dtype=torch.int8))
    with pytest.raises(ValueError, match="device_id=0, but torch finds no accelerator"):
        wrap(mlp(), device_id=0)
    with pytest.raises(ValueError, match=r"is sharded already\. Wrap by the policy alone"):
        wrap(nn.Sequential(wrap(nn.Linear(2, 2))), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(2)
def test_what_torchs_class_has_sharded_is_refused(ctx: RankContext, use_orig_params) -> None:
    model = mlp()
    model[2] = Front(ctx, torch.distributed.fsdp).wrap(model[2], use_orig_params=use_orig_params)
    values = [param.detach().clone() for param in model.parameters()]
    ours = Front(ctx, fsdp2.fsdp1).wrap
    name = "weight" if use_orig_params else "_flat_param"
    for call in (
        lambda: ours(model, sync_module_states=True),
        lambda: ours(model, auto_wrap_policy=ModuleWrapPolicy({nn.ReLU}), use_orig_params=True),
        lambda: fsdp2.fully_shard(model, mesh=ctx.mesh_1d()),
        lambda: fsdp2.fully_shard([model[0], model[2]], mesh=ctx.mesh_1d()),
    ):
        with pytest.raises(ValueError, match=rf"\._fsdp_wrapped_module\.{name}' was sharded by torch"):
            call()
        assert all(unit_of(module) is None for module in model.modules())
        assert type(model) is nn.Sequential
        assert all(map(torch.equal, model.parameters(), values))


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(2)
def test_what_is_wrapped_is_refused(ctx: RankContext, use_orig_params) -> None:
    front = Front(ctx, fsdp2.fsdp1)
    model = front.wrap(mlp(), use_orig_params=use_orig_params)
    unit = unit_of(model)
    sharded = fsdp2.fully_shard(mlp(), mesh=ctx.mesh_1d())
    for module in (model, model.module, sharded):
        with pytest.raises(ValueError, match=r"is sharded already.*Wrap each module once"):
            front.wrap(module, use_orig_params=use_orig_params)
    assert unit_of(model) is unit_of(model.module) is unit
    assert len(train(ctx, model)) == 3


@distributed(2)
def test_models_that_stay_on_the_meta_device_are_refused(ctx: RankContext) -> None:
    class NoReset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2))

    wrap = Front(ctx, fsdp2.fsdp1).wrap
    with torch.device("meta"):
        model, other = nn.Sequential(NoReset()), mlp()
    partly = nn.Sequential(nn.Linear(2, 2, device="meta"), NoReset())
    for refused_model, options in ((model, {}), (partly, {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})})):
        with pytest.raises(AttributeError, match="NoReset has no reset_parameters"):
            wrap(refused_model, **options)
        assert all(unit_of(module) is None for module in refused_model.modules())
    with pytest.raises(RuntimeError, match="'weight' of a Linear is still on the meta device after param_init_fn"):
        wrap(other, param_init_fn=lambda module: None)


@distributed(2)
def test_containers_get_a_warning(ctx: RankContext) -> None:
    for names in (torch.distributed.fsdp, fsdp2.fsdp1):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            names.FullyShardedDataParallel(nn.ModuleList([nn.Linear(2, 2)]), device_id=torch.device("cpu"))
        assert any("forward" in str(each.message) for each in found)


@pytest.mark.parametrize(
    "options",
    [
        {"backward_prefetch": None},
        {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
        {"forward_prefetch": True},
        {"limit_all_gathers": False},
        {"mixed_precision": MixedPrecision()},
    ],
    ids=str,
)
@as_torchs(2)
def test_settings_of_the_schedule_change_no_value(front: Front, options) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = front.wrap(mlp(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **options)
    return train(front.ctx, model)


@distributed(2)
def test_no_backward_prefetch_gathers_one_unit_at_a_time(ctx: RankContext) -> None:
    found = {}
    for prefetch in (None, BackwardPrefetch.BACKWARD_PRE):
        model = Front(ctx, fsdp2.fsdp1).wrap(
            nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            backward_prefetch=prefetch,
        )
        for _ in range(2):
            loss = model(batch(ctx, 2, 8)).sum()
            with fsdp2.trace.record(model) as recorded:
                loss.backward()
        found[prefetch] = str(recorded).count("prefetch")
        assert "_fsdp_wrapped_module" not in str(recorded)
    assert found[None] == 0
    assert found[BackwardPrefetch.BACKWARD_PRE] == 2


@pytest.mark.long
@distributed(1)
def test_one_rank_shards_nothing(ctx: RankContext) -> None:
    model = Front(ctx, fsdp2.fsdp1).wrap(mlp())
    assert model.sharding_strategy is ShardingStrategy.NO_SHARD
    assert len(train(ctx, model)) == 3
