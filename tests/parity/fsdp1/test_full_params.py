"""``summon_full_params``, ``apply`` and ``_unshard``: whole parameters as with torch's class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from tests.parity.fsdp1.fronts import ON_TWO_RANKS, Front, as_torchs, with_ours, wrapped_mlp
from tests.parity.fsdp1.kinds import GRAD_OP, NO_SHARD


class Normed(nn.Module):
    """Two layers and a buffer in a wrapper, a tied weight, and a frozen one."""

    def __init__(self, front: Front, **options: Any) -> None:
        super().__init__()
        self.body = front.wrap(nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Linear(5, 8)), **options)
        self.head, self.again = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.again.weight = self.head.weight
        self.scale = nn.Parameter(torch.ones(3), requires_grad=not front.use_orig_params)
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.head(self.body(x))) * self.scale.sum()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def values(module: nn.Module, *, grads: bool = False) -> dict[str, object]:
    found = {name: param.detach().clone() for name, param in module.named_parameters()}
    assert not any(isinstance(value, DTensor) for value in found.values())
    if grads:
        found |= {f"{name}.grad": None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
    return dict(sorted(found.items()))


@pytest.mark.parametrize("strategy", [None, NO_SHARD])
@as_torchs(2, 4, exact=ON_TWO_RANKS, both_modes=True)
def test_whole_parameters_and_buffers_under_clean_names(front: Front, strategy) -> Any:
    model = front.wrap(Normed(front, sharding_strategy=strategy), sharding_strategy=strategy)
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    model(front.batch(3, 8)).sum().backward()
    made.step()
    found = []
    with front.cls.summon_full_params(model):
        found += [values(model), values(model.module), values(model.body), sorted(dict(model.named_buffers()))]
        with torch.no_grad():
            for i, (_, param) in enumerate(sorted(model.named_parameters())):
                param.mul_(0.5).add_(i)
    with front.cls.summon_full_params(model, writeback=False):
        found.append(values(model))
    with front.cls.summon_full_params(nn.ModuleList([model.body]), recurse=True, writeback=False):
        found.append(values(model.body))
    return [*found, model(front.batch(3, 8, seed=3)).detach()]


@as_torchs(2, both_modes=True)
def test_what_is_written_back(front: Front) -> Any:
    model = wrapped_mlp(front)
    summon = front.cls.summon_full_params
    found = []
    with summon(model, writeback=False), torch.no_grad():
        for param in model.parameters():
            param.zero_()
    with summon(model, writeback=False, rank0_only=True):
        found.append(values(model) if front.ctx.rank == 0 else None)
    with summon(model, recurse=False):
        found.append([model.module[4].weight.shape, model.module[4].bias.detach().clone()])
        with torch.no_grad():
            model.module[4].weight.mul_(2)
        with summon(model.module[0]):
            found.append(model.module[0].weight.detach().clone())
    with summon(model.module[2], recurse=False), torch.no_grad():
        model.module[2].bias.fill_(3)
    with summon(nn.Linear(2, 2)), summon(nn.Linear(2, 2), recurse=False):  # no wrapper: nothing happens
        pass
    with summon(model, writeback=False):
        found.append(values(model))
    return [*found, *front.train(model)]


@as_torchs(2)
def test_apply_initialises_whole_parameters(front: Front) -> Any:
    seen = []

    def init(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        if isinstance(module, nn.Linear):
            nn.init.kaiming_uniform_(module.weight)
            nn.init.constant_(module.bias, 0.25)

    losses = []
    for use_orig_params in (True, False):
        model = wrapped_mlp(front, use_orig_params=use_orig_params)
        torch.manual_seed(5)
        assert model.apply(init) is model
        losses += front.train(model)
    return [seen, losses]


@pytest.mark.parametrize("strategy", [None, NO_SHARD])
@as_torchs(2, 4, exact=ON_TWO_RANKS)
def test_gradients_are_read_and_written_whole(front: Front, strategy: Any) -> Any:
    model = wrapped_mlp(front, sharding_strategy=strategy, use_orig_params=True)
    made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def summon(step: int) -> list[Any]:
        # Under NO_SHARD, torch's class writes in any case.
        with front.cls.summon_full_params(model, with_grads=True, writeback=step != 2 or strategy is NO_SHARD):
            found = values(model, grads=True)
            for _, param in sorted(model.named_parameters()):
                param.grad.mul_(torch.arange(1.0, 1 + param.numel()).view_as(param) / 10)
        return [found]

    found = front.train(model, made, before_step=summon)
    with front.cls.summon_full_params(model, with_grads=True):
        return [*found, values(model, grads=True)]


@with_ours(2)
def test_gradients_made_or_removed_in_the_block_reach_the_shards(front: Front) -> None:
    model = wrapped_mlp(front, use_orig_params=True)
    model(front.batch(3, 8)).sum().backward()
    first, *rest = model.parameters()
    if front.ctx.rank == 1:
        first.grad = None  # on one rank: the others' part is still there
    with model.summon_full_params(model, with_grads=True):
        assert all(param.grad.shape == param.shape for param in model.parameters())
        assert [part.any().item() for part in model.module[0].weight.grad.chunk(2)] == [True, False]
        model.module[0].weight.grad = torch.full((16, 8), 2.0)
        model.module[4].bias.grad = None
    assert torch.equal(first.grad.full_tensor(), torch.full((16, 8), 2.0))
    assert [param.grad is None for param in rest] == [False] * 4 + [True]


@as_torchs(2, both_modes=True)
def test_refused_arguments_and_moments(front: Front) -> Any:
    model = wrapped_mlp(front)
    summon, original = front.cls.summon_full_params, front.use_orig_params
    found = []
    for options in (
        {"rank0_only": True, "writeback": True},
        {"with_grads": True, "offload_to_cpu": True, "writeback": False, "rank0_only": True},
        {"with_grads": original, "rank0_only": True},
        dict(zip(("with_grads", "writeback", "rank0_only"), (not original, original, original), strict=True)),
    ):
        with pytest.raises(NotImplementedError), summon(model, **options):
            pass
    with summon(model), pytest.raises((RuntimeError, AssertionError)), summon(model):
        pass

    def inside(*_) -> None:
        with pytest.raises((RuntimeError, AssertionError)), summon(model):
            pass
        found.append("refused")

    hook = model.module[1].register_forward_hook(inside)
    model(front.batch(3, 8)).sum().backward()
    hook.remove()
    return [*found, *front.train(model)]


def zero_and_raise(model: Any, *, with_grads: bool) -> None:
    with model.summon_full_params(model, with_grads=with_grads), torch.no_grad():
        for param in model.parameters():
            param.zero_()
            if with_grads:
                param.grad.zero_()
        raise KeyError


@with_ours(2, both_modes=True)
def test_offloaded_whole_parameters_are_written_back_and_nothing_is_if_the_block_raises(front: Front) -> None:
    """Torch's class reads freed memory where it offloads on the CPU, and writes what a block that raises has left."""
    for strategy in (None, NO_SHARD):
        model = wrapped_mlp(front, sharding_strategy=strategy)
        model(front.batch(3, 8)).sum().backward()
        grads = [None if p.grad is None else local(p.grad).clone() for p in model.parameters()]
        with model.summon_full_params(model, offload_to_cpu=True), torch.no_grad():
            for param in model.parameters():
                assert param.device.type == "cpu"
                param.fill_(1.5)
        with pytest.raises(KeyError):
            zero_and_raise(model, with_grads=front.use_orig_params)
        with model.summon_full_params(model, writeback=False):
            assert all(value.eq(1.5).all() for value in values(model).values())
        for before, param in zip(grads, model.parameters(), strict=True):
            assert before is None or torch.equal(before, local(param.grad))


@with_ours(2, both_modes=True)
def test_modules_run_on_whole_parameters_without_gradients(front: Front) -> None:
    model = wrapped_mlp(front)
    expected = model(front.batch(3, 8)).detach()
    with model.summon_full_params(model), torch.no_grad():
        assert torch.equal(model(front.batch(3, 8)), expected)
        if front.ctx.rank == 0:  # nothing is communicated
            model.module(front.batch(3, 8))


@as_torchs(2, both_modes=True)
def test_unshard_ahead_of_forward(front: Front) -> Any:
    model = wrapped_mlp(front, sharding_strategy=GRAD_OP)
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        if step or front.is_ours:  # before the first forward, torch's class raises
            handle = model._unshard(async_op=True)
            handle.wait()
            handle.wait()
            assert model._unshard() is None
        losses += front.train(model, made, num_steps=range(step, step + 1))
    return losses


@as_torchs(2)
def test_attributes_that_the_user_has_set_on_parameters_stay(front: Front) -> Any:
    found = []
    for options in ({"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}, {}):
        inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        for name, param in inner.named_parameters():
            param.tag, param._no_weight_decay = name, name.endswith("bias")
        model = front.wrap(inner, use_orig_params=True, **options)
        with front.cls.summon_full_params(model):
            found += [(param.tag, param._no_weight_decay) for param in model.parameters()]
        for change in (nn.Module.train, front.train, nn.Module.double):
            change(model)
            found += [(param.tag, param._no_weight_decay) for param in model.parameters()]
    return found


@as_torchs(2, both_modes=True)
def test_no_shard_shows_the_parameters_themselves(front: Front) -> Any:
    """What is written in place stays, without ``writeback``, too; original parameters have their gradients."""
    model = front.wrap(nn.Sequential(nn.Linear(8, 4)), sharding_strategy=NO_SHARD)
    front.train(model, num_steps=1)
    model(front.batch(3, 8)).sum().backward()
    found: list[Any] = []
    for options in ({"writeback": False}, {}, *([{"writeback": False, "with_grads": True}] * front.use_orig_params)):
        with front.cls.summon_full_params(model, **options):
            found.append(values(model, grads=True))
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(1)
                    if param.grad is not None:
                        param.grad.mul_(2)
        with front.cls.summon_full_params(model, writeback=False):
            found.append(values(model, grads=True))
    model.zero_grad()
    return found
