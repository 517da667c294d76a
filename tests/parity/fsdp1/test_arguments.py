"""Arguments that the class refuses: errors of torch's types, in our words, and a model that is as it was."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp2
from fsdp2.runtime.unit import unit_of
from tests.harness.distributed import RankContext, distributed
from tests.parity.fsdp1.fronts import CPU, HYBRID, NO_SHARD, Front, as_torchs, ours, theirs, with_ours

BY_LINEARS = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def refused(ctx: RankContext, error: type[Exception], match: str, module: nn.Module | None = None, **options) -> None:
    """Ours raises, and leaves the model as it was; torch's raises an error of the same type."""
    for front in (ours(ctx), theirs(ctx)):
        model = module or mlp()
        with pytest.raises(error) as found:
            front.wrap(model, **options)
        if front.is_ours:
            assert match in str(found.value), str(found.value)
            assert all(unit_of(each) is None for each in model.modules())
            assert not any(isinstance(each, front.cls) for each in model.modules())


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
    frozen, doubled, scalar = mlp(), mlp(), mlp()
    frozen[2].bias.requires_grad_(False)
    doubled[2].bias = nn.Parameter(doubled[2].bias.double())
    scalar[2].scale = nn.Parameter(torch.tensor(1.0))
    for options in ({}, BY_LINEARS):
        refused(ctx, ValueError, "requires_grad=True and Linear.bias has requires_grad=False", frozen, **options)
        refused(ctx, ValueError, "expects one dtype. Pass use_orig_params=True", doubled, **options)
        refused(ctx, ValueError, "Linear.scale is a scalar", scalar, **options)


@with_ours(2)
def test_original_parameters_may_differ(front: Front) -> None:
    """In dtype, and in what is trained. Torch's class refuses two dtypes also here."""
    model = mlp()
    model[2] = model[2].double()
    model[0].bias.requires_grad_(False)
    wrapped = front.wrap(model, use_orig_params=True)
    assert {param.dtype for param in wrapped.parameters()} == {torch.float32, torch.float64}
    model[1].register_forward_hook(lambda module, args, output: output.double())
    assert len(front.train(wrapped)) == 3


@with_ours(2)
def test_types_are_checked(front: Front) -> None:
    named = "FullyShardedDataParallel: {} is a .*, expected a "
    integers = MixedPrecision(param_dtype=torch.int8)
    model: Any
    refusals: list[tuple[Any, dict[str, Any], str]] = [
        (mlp(), {"sharding_strategy": "FULL"}, named.format("sharding_strategy")),
        (mlp(), {"mixed_precision": torch.bfloat16}, named.format("mixed_precision")),
        (mlp(), {"cpu_offload": True}, named.format("cpu_offload")),
        ("model", {}, r"expected an nn\.Module"),
        (mlp(), {"auto_wrap_policy": {nn.Linear}}, "policy is a set"),
        (
            mlp(),
            {"mixed_precision": integers},
            r"mixed_precision\.param_dtype is torch\.int8, expected a floating-point",
        ),
        (mlp(), {"device_id": 0}, "device_id=0, but torch finds no accelerator"),
        (nn.Sequential(front.wrap(nn.Linear(2, 2))), BY_LINEARS, r"is sharded already\. Wrap by the policy alone"),
    ]
    for i, (model, options, match) in enumerate(refusals):
        with pytest.raises(TypeError if i < 5 else ValueError, match=match):
            front.wrap(model, **options)


@with_ours(2, both_modes=True)
def test_what_torchs_class_has_sharded_is_refused(front: Front) -> None:
    model = mlp()
    model[2] = theirs(front.ctx).wrap(model[2], use_orig_params=front.use_orig_params)
    values = [param.detach().clone() for param in model.parameters()]
    name = "weight" if front.use_orig_params else "_flat_param"
    for call in (
        lambda: front.wrap(model, use_orig_params=False, sync_module_states=True),
        lambda: front.wrap(model, use_orig_params=True, auto_wrap_policy=ModuleWrapPolicy({nn.ReLU})),
        lambda: fsdp2.fully_shard(model, mesh=front.mesh()),
        lambda: fsdp2.fully_shard([model[0], model[2]], mesh=front.mesh()),
    ):
        with pytest.raises(ValueError, match=rf"\._fsdp_wrapped_module\.{name}' was sharded by torch"):
            call()
        assert all(unit_of(module) is None for module in model.modules())
        assert type(model) is nn.Sequential
        assert all(map(torch.equal, model.parameters(), values))


@with_ours(2, both_modes=True)
def test_what_is_wrapped_is_refused(front: Front) -> None:
    model = front.wrap(mlp())
    unit = unit_of(model)
    for module in (model, model.module, fsdp2.fully_shard(mlp(), mesh=front.mesh())):
        with pytest.raises(ValueError, match=r"is sharded already.*Wrap each module once"):
            front.wrap(module)
    assert unit_of(model) is unit_of(model.module) is unit
    assert len(front.train(model)) == 3


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))


@with_ours(2)
def test_models_that_stay_on_the_meta_device_are_refused(front: Front) -> None:
    with torch.device("meta"):
        model, other = nn.Sequential(NoReset()), mlp()
    partly = nn.Sequential(nn.Linear(2, 2, device="meta"), NoReset())
    for refused_model, options in ((model, {}), (partly, BY_LINEARS)):
        with pytest.raises(AttributeError, match="NoReset has no reset_parameters"):
            front.wrap(refused_model, **options)
        assert all(unit_of(module) is None for module in refused_model.modules())
    with pytest.raises(RuntimeError, match="'weight' of a Linear is still on the meta device after param_init_fn"):
        front.wrap(other, param_init_fn=lambda module: None)


@as_torchs(2)
def test_containers_get_a_warning(front: Front) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        front.cls(nn.ModuleList([nn.Linear(2, 2)]), device_id=CPU)
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
def test_settings_of_the_schedule_change_no_value(front: Front, options: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return front.train(front.wrap(mlp(), **BY_LINEARS, **options))


@with_ours(2)
def test_no_backward_prefetch_gathers_one_unit_at_a_time(front: Front) -> None:
    for prefetch, num_prefetches in ((None, 0), (BackwardPrefetch.BACKWARD_PRE, 2)):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        model = front.wrap(model, backward_prefetch=prefetch, **BY_LINEARS)
        for _ in range(2):
            loss = model(front.batch(2, 8)).sum()
            with fsdp2.trace.record(model) as recorded:
                loss.backward()
        assert str(recorded).count("prefetch") == num_prefetches
        assert "_fsdp_wrapped_module" not in str(recorded)


@pytest.mark.long
@with_ours(1)
def test_one_rank_shards_nothing(front: Front) -> None:
    model = front.wrap(mlp())
    assert model.sharding_strategy is NO_SHARD
    assert len(front.train(model)) == 3
