"""What trainers do besides a plain step: as with torch's class."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import MixedPrecision
from torch.utils.checkpoint import checkpoint

import fsdp2.fsdp1
from tests.harness.distributed import RankContext, distributed
from tests.harness.selection import long
from tests.parity.fsdp1.fronts import Front, as_torchs, batch, same, train
from tests.parity.fsdp1.test_training import FULL, GRAD_OP, NO_SHARD, wrapped_mlp

OURS = functools.partial(Front, names=fsdp2.fsdp1)
both_modes = pytest.mark.parametrize("use_orig_params", [True, False])


class Branches(nn.Module):
    """Two branches; a forward may use one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, which: str = "both") -> torch.Tensor:
        hidden = x
        if which in ("both", "first"):
            hidden = self.first(hidden)
        if which in ("both", "second"):
            hidden = self.second(hidden)
        return self.head(hidden)


def steps(ctx: RankContext, model: nn.Module, choices: list[str], optimizer=torch.optim.AdamW) -> list[torch.Tensor]:
    made = optimizer(model.parameters(), lr=0.1)
    losses = []
    for step, which in enumerate(choices):
        loss = model(batch(ctx, 3, 8, seed=step), which).square().mean()
        loss.backward()
        made.step()
        made.zero_grad()
        losses.append(loss.detach())
    return losses


@both_modes
@as_torchs(2)
def test_unused_parameters_of_a_unit(front: Front, use_orig_params) -> Any:
    model = front.wrap(Branches(), use_orig_params=use_orig_params)
    return steps(front.ctx, model, ["both", "first", "second", "both", "both"])


@both_modes
@as_torchs(2)
def test_unused_units(front: Front, use_orig_params) -> Any:
    model = Branches()
    model.first = front.wrap(model.first, use_orig_params=use_orig_params)
    model.second = front.wrap(model.second, use_orig_params=use_orig_params)
    model = front.wrap(model, use_orig_params=use_orig_params)
    return steps(front.ctx, model, ["both", "first", "first", "second", "both"])


@as_torchs(2)
def test_flat_parameters_in_an_optimizer_have_torchs_mark(front: Front) -> Any:
    optimizer = torch.optim.SGD(wrapped_mlp(front, use_orig_params=False).parameters())
    return [param._fsdp_flattened for group in optimizer.param_groups for param in group["params"]]


@both_modes
@as_torchs(2)
def test_modules_around_wrappers_need_no_wrapper(front: Front, use_orig_params) -> Any:
    model = nn.Sequential(
        front.wrap(nn.Linear(8, 8), use_orig_params=use_orig_params),
        front.wrap(nn.Linear(8, 4), use_orig_params=use_orig_params),
    )
    return train(front.ctx, model)


@both_modes
@as_torchs(2)
def test_gradients_can_be_scaled_and_read_before_the_step(front: Front, use_orig_params) -> Any:
    model = wrapped_mlp(front, use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(4):
        for part in range(2):
            loss = model(batch(front.ctx, 3, 8, seed=2 * step + part)).square().mean()
            loss.backward()
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)
        if step == 2:
            for param in model.parameters():
                if param.grad is not None:
                    param.grad = param.grad * 0.5
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        losses.append(loss.detach())
    return losses


@both_modes
@distributed(2)
def test_activation_checkpointing(ctx: RankContext, use_orig_params) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    def scenario(front: Front):
        options = {"use_orig_params": use_orig_params, "sharding_strategy": GRAD_OP}
        inside = front.wrap(checkpoint_wrapper(nn.Linear(8, 8)), **options)
        around = Checkpointed(front.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), **options))
        model = front.wrap(nn.Sequential(inside, around, nn.Linear(8, 4)), **options)
        assert type(inside.module) is nn.Linear
        return train(ctx, model)

    same(ctx, scenario)


@both_modes
@distributed(2)
def test_a_deepcopy_is_sharded_and_trains_alone(ctx: RankContext, use_orig_params) -> None:
    """Torch's class cannot be copied in flat mode: ours must train as the original does."""
    torch.manual_seed(0)
    model = wrapped_mlp(OURS(ctx), use_orig_params=use_orig_params)
    train(ctx, model, num_steps=1)
    copied = copy.deepcopy(model)
    assert [name for name, _ in copied.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert train(ctx, model) == train(ctx, copied)


@both_modes
@pytest.mark.parametrize("order", [1, -1])
@distributed(2)
def test_an_optimizer_copied_with_the_model_steps_the_copy(ctx: RankContext, order, use_orig_params) -> None:
    torch.manual_seed(0)
    model = wrapped_mlp(OURS(ctx), use_orig_params=use_orig_params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(ctx, model, lambda params, lr: optimizer, num_steps=1)
    copied, its_optimizer = copy.deepcopy((model, optimizer)[::order])[::order]
    assert set(its_optimizer.param_groups[0]["params"]) == set(copied.parameters())
    found = train(ctx, copied, lambda params, lr: its_optimizer)
    assert train(ctx, model, lambda params, lr: optimizer) == found


@both_modes
@as_torchs(2)
def test_dtype_conversion_reaches_the_shards(front: Front, use_orig_params) -> Any:
    model = wrapped_mlp(front, use_orig_params=use_orig_params).to(torch.float64)
    assert {param.dtype for param in model.parameters()} == {torch.float64}
    made = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        loss = model(batch(front.ctx, 3, 8, seed=step).double()).square().mean()
        loss.backward()
        made.step()
        made.zero_grad()
        losses.append(loss.detach())
    return losses


@both_modes
@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NO_SHARD])
@as_torchs(2)
def test_parameters_are_shards_after_an_evaluation(front: Front, strategy, use_orig_params) -> Any:
    """The root, or all units, stay unsharded after it."""
    model = wrapped_mlp(front, sharding_strategy=strategy, use_orig_params=use_orig_params)
    for i, param in enumerate(model.parameters()):
        param.tag = i

    def evaluate() -> torch.Tensor:
        with torch.no_grad():
            return model(batch(front.ctx, 3, 8))

    evaluate()
    tags = [param.tag for param in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(front.ctx, 3, 8, seed=1)).square().mean().backward()
    evaluate()
    model.zero_grad()
    model(batch(front.ctx, 3, 8, seed=2)).square().mean().backward()
    optimizer.step()
    return [tags, evaluate()]


@as_torchs(2)
def test_attributes_of_the_wrapped_module_are_the_wrappers_too(front: Front) -> Any:
    model = wrapped_mlp(front)
    model.module.note = "here"
    inner = front.cls.fsdp_modules(model)
    model(batch(front.ctx, 3, 8))
    roots = front.cls.fsdp_modules(model, root_only=True)
    return [
        model.note,
        model[1] is model.module[1],
        len(inner),
        inner[0] is model,
        roots == [model],
        model.check_is_root(),
        model[0].check_is_root(),
        hasattr(model, "no such attribute"),
        model.rank,
        model.world_size,
        model.sharding_strategy.name,
    ]


@both_modes
@as_torchs(2)
def test_hooks_on_a_wrapped_module_see_whole_parameters(front: Front, use_orig_params) -> Any:
    """Those that ``docs/migrating.md`` names may see shards with ours."""
    seen: list[list[object]] = []

    def note(kind: str, module: nn.Module) -> None:
        is_whole = type(module.weight) in (torch.Tensor, nn.Parameter) and module.weight.shape == (8, 8)
        seen.append([kind, is_whole])

    def register(kind: str, **options: bool) -> None:
        getattr(inner, f"register_{kind}")(lambda module, *_: note(kind, module), **options)

    inner = nn.Linear(8, 8)
    register("forward_pre_hook", prepend=True)
    register("forward_hook")
    wrapped = front.wrap(inner, use_orig_params=use_orig_params)
    model = front.wrap(nn.Sequential(nn.Linear(8, 8), wrapped), use_orig_params=use_orig_params)
    register("forward_pre_hook")
    register("forward_hook", prepend=True)
    register("full_backward_hook")
    if not front.is_ours:
        register("forward_pre_hook", prepend=True)
        register("forward_hook")
        register("full_backward_pre_hook")
    model(batch(front.ctx, 3, 8)).sum().backward()
    assert all(is_whole for _, is_whole in seen)
    return len(seen) - 3 * (not front.is_ours)


@both_modes
@as_torchs(2)
def test_frozen_units(front: Front, use_orig_params) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    model[1].requires_grad_(False)
    model[1] = front.wrap(model[1], use_orig_params=use_orig_params)
    model = front.wrap(model, use_orig_params=use_orig_params)
    assert sum(not param.requires_grad for param in model.parameters()) == (2 if use_orig_params else 1)
    return train(front.ctx, model)


@both_modes
@distributed(2)
def test_a_step_after_an_exception(ctx: RankContext, use_orig_params) -> None:
    """Torch's class needs a reset by hand; ours starts the next step as if nothing had happened."""
    torch.manual_seed(0)
    model = wrapped_mlp(OURS(ctx), use_orig_params=use_orig_params)
    expected = train(ctx, copy.deepcopy(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.ones(3, 5))
    assert train(ctx, model, lambda params, lr: optimizer) == expected


@pytest.mark.ci
@pytest.mark.parametrize("where", ["model", *long("blocks")])
@as_torchs(2)
def test_compiled(front: Front, where) -> Any:
    torch._dynamo.reset()
    model = wrapped_mlp(front, use_orig_params=True)
    if where == "model":
        model = torch.compile(model, backend="aot_eager")
    else:
        for i in (0, 2):
            model.module[i] = torch.compile(model.module[i], backend="aot_eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute")  # the compiler looks at it
        return train(front.ctx, model)


@both_modes
@as_torchs(2)
def test_activation_checkpointing_after_wrapping(front: Front, use_orig_params) -> Any:
    """Accelerate does it in this order: the checkpoint comes between the wrapper and its module."""
    model = wrapped_mlp(front, use_orig_params=use_orig_params)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    found = train(front.ctx, model)
    with torch.no_grad(), front.cls.summon_full_params(model):
        names = [name for name, _ in model.named_parameters()]
    return [*found, names, type(model[0].module)]


@both_modes
@as_torchs(2)
def test_clients_upcast_flat_parameters(front: Front, use_orig_params) -> Any:
    """As accelerate does for a model in low precision, before the first forward."""
    options = {"use_orig_params": use_orig_params, "mixed_precision": MixedPrecision(torch.bfloat16)}
    model = front.wrap(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).bfloat16(), **options)
    for module in front.cls.fsdp_modules(model):
        assert module._has_params
        param = module._flat_param
        param.data = param.data.to(torch.float32)
        module._handle._orig_param_dtype = torch.float32
    made = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        loss = model(batch(front.ctx, 3, 8, seed=step)).float().square().mean()
        loss.backward()
        made.step()
        made.zero_grad()
        losses.append(loss.detach())
    return [*losses, {str(param.dtype) for param in model.parameters()}, len(param._fqns)]
