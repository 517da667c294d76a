"""What policies wrap, and what is left alone: as with torch's class."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy, wrap

import fsdp2.fsdp1
from tests.harness.distributed import RankContext, distributed
from tests.harness.selection import long
from tests.parity.fsdp1.fronts import Front, as_torchs, same, train


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


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
        return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
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
    options = {"auto_wrap_policy": POLICIES[policy], "use_orig_params": use_orig_params}
    model = front.wrap(model, **options)
    wrapped = [name for name, module in model.named_modules() if isinstance(module, front.cls)]
    strategies = [module.sharding_strategy.name for module in front.cls.fsdp_modules(model)]
    return [wrapped, strategies, *train(front.ctx, model)]


@distributed(2)
def test_shared_modules_are_wrapped_in_all_places(ctx: RankContext) -> None:
    """Torch's class wraps them in one place, and reads sharded parameters in the others."""
    front = Front(ctx, fsdp2.fsdp1)
    torch.manual_seed(0)
    expected = train(ctx, front.wrap(Model()))
    torch.manual_seed(0)
    model = front.wrap(Model(), auto_wrap_policy=POLICIES["module classes"])
    assert model.again is model.blocks[0]
    assert isinstance(model.again, front.cls)
    assert train(ctx, model) == expected


@as_torchs(2)
def test_wrap_and_enable_wrap(front: Front) -> Any:
    options = {"wrapper_cls": front.cls, "device_id": torch.device("cpu"), "use_orig_params": True}
    with wrap.enable_wrap(**options):
        model = nn.Sequential(wrap.wrap(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 4))
        model = wrap.wrap(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    assert isinstance(model[0], front.cls)
    return [model.sharding_strategy.name, *train(front.ctx, model)]


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
    found = train(front.ctx, wrapped)
    return [isinstance(model.exit[0], front.cls), *found, left_alone[1].weight.detach()]


@distributed(2)
def test_models_on_the_meta_device(ctx: RankContext) -> None:
    def init(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            value = torch.full_like(param, 0.1, device="cpu")
            setattr(module, next(n for n, p in module.named_parameters() if p is param), nn.Parameter(value))

    def scenario(front: Front):
        losses = []
        for options in ({"param_init_fn": init}, {}):
            torch.manual_seed(1)
            with torch.device("meta"):
                model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
            if options:
                model[1] = nn.ReLU()
            model = front.wrap(model, auto_wrap_policy=POLICIES["lambda"], use_orig_params=True, **options)
            losses += train(ctx, model)
        return losses

    same(ctx, scenario)


@distributed(2)
def test_states_are_those_of_the_first_rank(ctx: RankContext) -> None:
    """Torch's class refuses CPU parameters for ``sync_module_states``; ours sends them."""
    front = Front(ctx, fsdp2.fsdp1)
    losses = []
    for seed, options in ((0, {}), (ctx.rank, {"sync_module_states": True})):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        model[1].running_mean.fill_(float(seed))
        wrapped = front.wrap(model, auto_wrap_policy=POLICIES["lambda"], **options)
        assert model[1].running_mean[0] == 0
        losses.append(train(ctx, wrapped))
    assert losses[0] == losses[1]


@distributed(2)
def test_names_of_torchs_module_of_policies(ctx: RankContext) -> None:
    from fsdp2.fsdp1 import wrap as ours

    assert {name: getattr(ours, name) for name in wrap.__all__} == {name: getattr(wrap, name) for name in wrap.__all__}
    assert ours._or_policy is wrap._or_policy
