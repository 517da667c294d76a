"""What policies wrap, and what is left alone: as with torch's class."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import wrap

import fsdp2.fsdp1.wrap
from tests.harness.models import Block as ResidualBlock
from tests.harness.selection import long
from tests.parity.fsdp1.fronts import GRAD_OP, Front, as_torchs, with_ours


class Block(ResidualBlock):
    def __init__(self) -> None:
        super().__init__(8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.again = self.blocks[0]  # a shared module
        self.exit = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for block in (*self.blocks, self.again):
            x = block(x)
        return self.exit(x)


def by_size(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """A user's own policy."""
    return nonwrapped_numel >= 100


def overrides(module: nn.Module) -> bool | dict[str, object]:
    if isinstance(module, Block):
        return {"sharding_strategy": GRAD_OP}
    return isinstance(module, nn.LayerNorm)


POLICIES = {
    "module classes": wrap.ModuleWrapPolicy({Block, nn.LayerNorm}),
    "custom": wrap.CustomPolicy(overrides),
    "transformer": functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "lambda": functools.partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Linear)),
    "size": functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=100),
    "always": wrap.always_wrap_policy,
    "plain function": by_size,
}


@pytest.mark.parametrize("use_orig_params", [True, *long(False)])
@pytest.mark.parametrize("policy", POLICIES)
@as_torchs(2)
def test_policies_wrap_what_torchs_class_wraps(front: Front, policy, use_orig_params) -> Any:
    model = Model()
    model.again = nn.Identity()
    model = front.wrap(model, auto_wrap_policy=POLICIES[policy], use_orig_params=use_orig_params)
    wrapped = [name for name, module in model.named_modules() if isinstance(module, front.cls)]
    strategies = [module.sharding_strategy.name for module in front.cls.fsdp_modules(model)]
    return [wrapped, strategies, *front.train(model)]


@with_ours(2)
def test_shared_modules_are_wrapped_in_all_places(front: Front) -> None:
    """Torch's class wraps them in one place, and reads sharded parameters in the others."""
    torch.manual_seed(0)
    expected = front.train(front.wrap(Model()))
    torch.manual_seed(0)
    model = front.wrap(Model(), auto_wrap_policy=POLICIES["module classes"])
    assert model.again is model.blocks[0]
    assert isinstance(model.again, front.cls)
    assert front.train(model) == expected


@as_torchs(2)
def test_wrap_and_enable_wrap(front: Front) -> Any:
    options = {"wrapper_cls": front.cls, "device_id": torch.device("cpu"), "use_orig_params": True}
    with wrap.enable_wrap(**options):
        model = nn.Sequential(wrap.wrap(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 4))
        model = wrap.wrap(model, sharding_strategy=GRAD_OP)
    assert isinstance(model[0], front.cls)
    return [model.sharding_strategy.name, *front.train(model)]


@pytest.mark.parametrize("what", ["parameters", "modules", "ignored_modules"])
@as_torchs(2)
def test_ignored_states_stay_as_they_are(front: Front, what) -> Any:
    model = Model()
    model.again = nn.Identity()
    left_alone = model.exit
    options = {
        "parameters": {"ignored_states": list(left_alone.parameters())},
        "modules": {"ignored_states": [left_alone]},
        "ignored_modules": {"ignored_modules": [left_alone]},
    }[what]
    wrapped = front.wrap(model, auto_wrap_policy=POLICIES["module classes"], use_orig_params=True, **options)
    assert type(left_alone[1].weight) is nn.Parameter
    found = front.train(wrapped)
    return [isinstance(model.exit[0], front.cls), *found, left_alone[1].weight.detach()]


@as_torchs(2)
def test_models_on_the_meta_device(front: Front) -> Any:
    def init(module: nn.Module) -> None:
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.full_like(param, 0.1, device="cpu")))

    losses = []
    for norm, options in ((nn.ReLU, {"param_init_fn": init}), (functools.partial(nn.BatchNorm1d, 8), {})):
        torch.manual_seed(1)
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(8, 8), norm(), nn.Linear(8, 4))
        model = front.wrap(model, auto_wrap_policy=POLICIES["lambda"], use_orig_params=True, **options)
        losses += front.train(model)
    return losses


@with_ours(2)
def test_states_are_those_of_the_first_rank(front: Front) -> None:
    """Torch's class refuses CPU parameters for ``sync_module_states``; ours sends them."""
    losses = []
    for seed, options in ((0, {}), (front.ctx.rank, {"sync_module_states": True})):
        torch.manual_seed(seed)
        norm = nn.BatchNorm1d(8)
        norm.running_mean.fill_(float(seed))  # type: ignore[union-attr]
        model = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 4))
        wrapped = front.wrap(model, auto_wrap_policy=POLICIES["lambda"], **options)
        assert norm.running_mean[0] == 0  # type: ignore[index]
        losses.append(front.train(wrapped))
    assert losses[0] == losses[1]


@with_ours(2)
def test_buffers_that_nobody_has_sent_are_those_of_the_first_rank(front: Front) -> None:
    """Of ignored modules, and of wrappers that were not told to send. Torch's class does it on accelerators only."""
    ignored, inner, outer = (nn.BatchNorm1d(8) for _ in range(3))
    for norm in (ignored, inner, outer):
        for buffer in (norm.running_mean, norm.running_var):
            buffer.fill_(1.0 + front.ctx.rank)
        nn.init.constant_(norm.weight, 1.0 + front.ctx.rank)
    model = nn.Sequential(nn.Linear(8, 8), ignored, front.wrap(inner), outer)
    front.wrap(model, ignored_modules=[ignored], sync_module_states=True)
    for norm in (ignored, inner, outer):
        assert [float(buffer[0]) for buffer in (norm.running_mean, norm.running_var)] == [1.0, 1.0]
    assert float(ignored.weight.detach()[0]) == 1.0 + front.ctx.rank  # parameters that are ignored stay


@as_torchs(2, both_modes=True)
def test_what_a_wrapper_inside_ignores_stays_tied_to_parameters_outside_of_it(front: Front) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    model[1].weight = model[0].weight
    model[0] = front.wrap(model[0], ignored_states=[model[1].weight])
    wrapped = front.wrap(model)
    assert type(model[1].weight) is nn.Parameter
    assert model[1].weight is model[0].module.weight
    return [*front.train(wrapped), model[1].weight.detach()]


@with_ours(2)
def test_names_of_torchs_module_of_policies(front: Front) -> None:
    ours = fsdp2.fsdp1.wrap
    assert {name: getattr(ours, name) for name in wrap.__all__} == {name: getattr(wrap, name) for name in wrap.__all__}
    assert ours._or_policy is wrap._or_policy
