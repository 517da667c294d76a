"""``clip_grad_norm_`` of the class, in both modes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from tests.parity.fsdp1.fronts import FULL_SHARD, NO_SHARD, Front, as_torchs, with_ours, wrapped_mlp


class Sum(nn.Module):
    """The sum of the outputs of three parts, the first in its own dtype."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.third = parts

    def forward(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.first(x.to(dtype)).float().sum() + self.second(x).sum() + self.third(x).sum()


CLIPS: list[tuple[float, float]] = [(0.1, 2), (0.1, math.inf), (0.5, 1), (100, 3.0), (0, 2.0)]


@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@as_torchs(2, 4, exact=False, both_modes=True)
def test_clipping_by_all_norms(front: Front, strategy: Any) -> Any:
    model = wrapped_mlp(front, sharding_strategy=strategy)
    made = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    return front.train(model, made, num_steps=5, before_step=lambda step: [model.clip_grad_norm_(*CLIPS[step])])


@as_torchs(2, exact=False, both_modes=True)
def test_a_mix_of_strategies_and_dtypes(front: Front) -> Any:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(1)
        inner, other = nn.Linear(8, 6).to(dtype), front.wrap(nn.Linear(8, 6), sharding_strategy=NO_SHARD)
        model = front.wrap(Sum(front.wrap(inner), other, nn.Linear(8, 6)))
        model(front.batch(3, 8), dtype).backward()
        found.append(model.clip_grad_norm_(0.5))
    low = front.wrap(nn.Linear(8, 6).to(torch.bfloat16))
    low(front.batch(3, 8).bfloat16()).sum().backward()
    return [*found, low.clip_grad_norm_(0.5)]


@as_torchs(2, both_modes=True)
def test_clipping_without_gradients_or_not_on_the_root(front: Front) -> Any:
    model = wrapped_mlp(front)
    model(front.batch(3, 8))
    with pytest.raises(RuntimeError, match=r"root|outermost"):
        model.module[0].clip_grad_norm_(1.0)
    with pytest.warns(UserWarning, match="gradients"):
        return model.clip_grad_norm_(1.0)


@with_ours(2, both_modes=True)
def test_gradients_that_the_user_made_are_clipped(front: Front) -> None:
    # A flat parameter's gradient may be the user's own tensor, whose parts become the shards' gradients.
    model = wrapped_mlp(front)
    model(front.batch(3, 8)).sum().backward()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    numel = sum(p.numel() for p in nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 7), nn.Linear(7, 4)).parameters())
    norm = model.clip_grad_norm_(1.0)
    torch.testing.assert_close(norm, torch.tensor(float(numel)).sqrt())
    for param in model.parameters():
        parts = [grad for _, grad in param.parts(param.grad)] if not front.use_orig_params else [param.grad.to_local()]
        for grad in parts:
            torch.testing.assert_close(grad, torch.full_like(grad, 1 / math.sqrt(numel)))


@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@with_ours(2)
def test_the_function_takes_flat_parameters_for_their_shards(front: Front, strategy: Any) -> None:
    found = []
    for by_function in (True, False):
        torch.manual_seed(0)
        model = wrapped_mlp(front, sharding_strategy=strategy)
        model(front.batch(3, 8)).sum().backward()
        norm = fsdp2.clip_grad_norm_(model.parameters(), 0.5) if by_function else model.clip_grad_norm_(0.5)
        found.append([norm, *(param.grad for param in model.parameters())])
    assert all(map(torch.equal, *found))
