"""With ``use_orig_params=True``: optimizers and lists of parameters from before wrapping, and writes to ``data``, do
what they do with torch's class."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from fsdp2.fsdp1.orig_params import KeptParameter
from tests.harness.messages import error_of
from tests.harness.selection import long
from tests.parity.fsdp1.fronts import Front, as_torchs, assert_same, mlp, with_ours
from tests.parity.fsdp1.kinds import FULL_SHARD, GRAD_OP, NO_SHARD

STRATEGIES = [FULL_SHARD, *long(NO_SHARD)]


def _wrapped(front: Front, model: nn.Module, **options: Any) -> Any:
    policy = ModuleWrapPolicy({nn.Linear})
    return front.wrap(model, auto_wrap_policy=policy, use_orig_params=True, **options)


def _whole(front: Front, model: Any) -> dict[str, Tensor]:
    with front.cls.summon_full_params(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("strategy", STRATEGIES)
@as_torchs(2)
def test_averages_over_lists_from_before_follow(front: Front, strategy: Any) -> Any:
    """Lists from before of both models: the average is written through one, and read from the other."""
    model, teacher = mlp(), mlp()
    teacher.load_state_dict(model.state_dict())
    mine, averages = list(model.parameters()), list(teacher.parameters())
    wrapped, average = (_wrapped(front, each, sharding_strategy=strategy) for each in (model, teacher))
    outputs = []

    def update(_: int) -> None:
        with torch.no_grad():
            for into, value in zip(averages, mine, strict=True):
                into.mul_(0.5).add_(value, alpha=0.5)
            outputs.append(average(front.batch(3, 8, seed=9)).clone())

    losses = front.train(wrapped, torch.optim.SGD, lr=0.5, before_step=update)
    return losses, outputs, _whole(front, average)


WRITES: dict[str, Callable[[Any, Tensor], object]] = {
    "assigned": lambda param, value: setattr(param, "data", value),
    "copied": lambda param, value: param.data.copy_(value),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("write", ["assigned", *long("copied")])
@pytest.mark.parametrize("has_run", [True, *long(False)])
@pytest.mark.parametrize("from_before", [False, True])
@as_torchs(2)
def test_data_that_is_written_is_computed_with(
    front: Front, strategy: Any, write: str, has_run: bool, from_before: bool
) -> Any:
    return _written(front, strategy, write, has_run=has_run, from_before=from_before)


@pytest.mark.parametrize("from_before", [False, True])
@with_ours(2)
def test_data_is_computed_with_where_parameters_are_kept_between_passes(front: Front, from_before: bool) -> None:
    """Torch's class computes with old values, or raises."""
    kept, sharded = (_written(front, each, "assigned", from_before=from_before) for each in (GRAD_OP, FULL_SHARD))
    assert_same(sharded, kept)


def _written(front: Front, strategy: Any, write: str, *, has_run: bool = True, from_before: bool) -> Any:
    torch.manual_seed(0)
    model = mlp()
    before = list(model.parameters())
    wrapped = _wrapped(front, model, sharding_strategy=strategy)
    outputs = [wrapped(front.batch(3, 8)).detach()] if has_run else []
    for param in before if from_before else wrapped.parameters():
        WRITES[write](param, param.data * 0.5)
    with torch.no_grad():
        outputs.append(wrapped(front.batch(3, 8)).clone())
    return outputs, front.train(wrapped), _whole(front, wrapped)


@with_ours(2)
def test_data_takes_a_whole_parameter_a_shard_and_nothing_else(front: Front) -> None:
    model = mlp()
    (kept, *_) = list(model.parameters())
    wrapped = _wrapped(front, model)
    whole = torch.arange(128.0).view(16, 8)
    for param in (kept, wrapped.module[0].module.weight):
        local = whole.chunk(2)[front.ctx.rank]
        for value in (whole, local, local.flatten()):
            param.data = torch.zeros_like(value)
            param.data = value
            assert torch.equal(_whole(front, wrapped)["0.weight"], whole)
        with torch.no_grad():
            found = error_of(lambda param=param: setattr(param, "data", torch.ones(3, 3)))
        assert "'0.weight'" in found, found
        assert "(16, 8)" in found, found
        assert torch.equal(_whole(front, wrapped)["0.weight"], whole)


@with_ours(2)
def test_a_parameter_from_before_is_a_shard(front: Front) -> None:
    """Whatever is done with it. It has the memory of the shard, and no other."""
    model = mlp()
    kept = list(model.parameters())
    wrapped = _wrapped(front, model)
    wrapped(front.batch(3, 8)).sum().backward()
    for old, shard in zip(kept, wrapped.parameters(), strict=True):
        assert isinstance(old, nn.Parameter)
        assert isinstance(shard, DTensor)
        local = shard.to_local()
        assert (old.shape, old.dtype, old.is_leaf) == (local.shape, local.dtype, True)
        assert old.data.data_ptr() == local.data_ptr()
        assert shard.grad is not None
        assert old.grad is not None
        assert torch.equal(old.grad, shard.grad.to_local())
        for copied in (copy.deepcopy(old), _saved(old)):
            assert type(copied) is nn.Parameter
            assert torch.equal(copied, local)
    old, shard = kept[0], wrapped.module[0].module.weight
    shard.note = "mine"
    for copied in (copy.deepcopy(shard), _saved(shard)):
        assert type(copied) is DTensor
        assert copied.note == "mine"
        assert torch.equal(copied.to_local(), shard.to_local())
    assert torch.equal(copy.deepcopy(shard).grad.to_local(), shard.grad.to_local())
    before = shard.grad.clone()
    (old * 2).sum().backward()
    assert torch.equal(shard.grad.to_local(), before.to_local() + 2)
    old.grad = None
    assert shard.grad is None
    old.requires_grad = False
    assert not shard.requires_grad
    wrapped.to(torch.float64)
    assert old.dtype is torch.float64
    assert torch.equal(old, wrapped.module[0].module.weight.to_local())


def _saved(param: nn.Parameter) -> Any:
    file = io.BytesIO()
    torch.save(param, file)
    file.seek(0)
    return torch.load(file)


@with_ours(2)
def test_what_was_there_before_a_wrapper_that_raises_is_there_again(front: Front) -> None:
    model = mlp()
    before = list(model.parameters())
    values = [param.detach().clone() for param in before]

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or isinstance(module, nn.Linear)

    def fails(module: nn.Module) -> None:
        raise OSError

    model[4].weight = nn.Parameter(torch.empty(4, 7, device="meta"))
    assert "OSError" in error_of(
        lambda: front.wrap(model, auto_wrap_policy=policy, use_orig_params=True, param_init_fn=fails)
    )
    found: Sequence[nn.Parameter] = [param for param in model.parameters() if not param.is_meta]
    assert not any(isinstance(param, KeptParameter) for param in before)
    assert {id(param) for param in found} < {id(param) for param in before}
    for param, value in zip(before, values, strict=True):
        assert torch.equal(param, value)
