"""``AdamW8bit`` on one rank: which parameters it quantises, how well, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from fsdp2.optim import AdamW8bit
from fsdp2.optim.adamw8bit.blocks import dim_of_blocks
from fsdp2.optim.adamw8bit.states import MEAN, ROOT, Code
from tests.harness.messages import error_of


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((1024, 1000), 1),
        ((1024, 128), 1),
        ((1024, 127), 0),  # half a block at least
        ((4096, 16), 0),
        ((8, 512, 3, 3), 1),
        ((100, 100), None),
        ((32, 127), None),  # small
        ((1 << 20,), None),
        ((), None),
    ],
)
def test_blocks_run_along_the_last_long_dim(shape: tuple[int, ...], dim: int | None) -> None:
    assert dim_of_blocks(shape, 256) == dim


@pytest.mark.parametrize("code", [MEAN, ROOT], ids=lambda code: code.name)
@pytest.mark.parametrize("scale", [0.7, 3e4, "least"])
def test_codes_are_found_again_in_their_values(code: Code, scale: float | str) -> None:
    """So states that were saved and loaded are the same; the squares of roots, too."""
    codes = torch.arange(-127 if code is MEAN else 1, code.levels + 1).to(code.dtype).view(1, 1, -1, 1)
    scales = torch.full((1, 1, 1, 1), code.least_scale if scale == "least" else float(scale))
    values = code.decoded(codes, scales)
    values = values.square().sqrt() if code is ROOT else values
    found = torch.empty_like(codes)
    code.encode(values, code.scale_of(values), 0.5, into=found)
    assert torch.equal(found, codes)
    assert torch.equal(code.scale_of(values), scales)


def _param(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def _gradient(step: int, faded: Tensor) -> Tensor:
    noise = torch.randn(16, 256, generator=torch.Generator().manual_seed(step))
    return torch.where(faded & (step > 100), noise * 0.05, noise)


def test_updates_follow_adamw_and_slow_averages_move() -> None:
    """Rounding to the nearest code would leave the second moments of gradients that fade where they are."""
    found, expected = _param(16, 256), _param(16, 256)
    optimizers = AdamW8bit([found], betas=(0.9, 0.97)), optim.AdamW([expected], betas=(0.9, 0.97))
    faded = torch.arange(256) % 2 == 0
    for step in range(1, 221):
        for param, optimizer in zip((found, expected), optimizers, strict=True):
            param.grad = _gradient(step, faded)
            optimizer.step()
    roots = [each.state_dict()["state"][0]["exp_avg_sq"][:, faded].sqrt() for each in optimizers]
    assert (roots[0] / roots[1] - 1).mean().abs() < 0.03
    assert (found - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize("shape", [(1024, 300), (300, 16), (2, 257, 10)])
def test_states_take_at_most_2_1_bytes_per_element(shape: tuple[int, ...]) -> None:
    param = _param(*shape)
    param.grad = torch.ones(shape)
    optimizer = AdamW8bit([param])
    optimizer.step()
    assert sum(each.nbytes for each in optimizer.state[param].values() if each.dim()) <= 2.1 * param.numel()


def test_vectors_are_stepped_as_by_adamw_and_copies_go_on() -> None:
    found, expected = [_param(5000), _param(16, 256)], [_param(5000), _param(16, 256)]
    optimizers: list[Any] = [AdamW8bit(found, weight_decay=0.1), optim.AdamW(expected, weight_decay=0.1)]
    for params, optimizer in zip((found, expected), optimizers, strict=True):
        for param in params:
            param.grad = torch.arange(float(param.numel())).view_as(param)
        optimizer.step()
    assert torch.equal(found[0], expected[0])
    assert optimizers[0].state_dict()["param_groups"] == optimizers[1].state_dict()["param_groups"]
    for other in (copy.deepcopy(optimizers[0]), pickle.loads(pickle.dumps(optimizers[0]))):
        for param, original in zip(other.param_groups[0]["params"], found, strict=True):
            param.grad = original.grad
        other.step()
        assert other.block_size == 256
        assert float(other.state[other.param_groups[0]["params"][1]]["step"]) == 2.0


class _Flat(nn.Parameter):
    _is_flat_param = True


REFUSED: dict[str, Callable[[], Any]] = {
    "block_size is 8, expected an int of at least 16": lambda: AdamW8bit([_param(2)], block_size=8),
    "block_size is 32.0, of type float": lambda: AdamW8bit([_param(2)], block_size=32.0),  # type: ignore[arg-type]
    "amsgrad=True": lambda: AdamW8bit([{"params": [_param(2)], "amsgrad": True}]),
    "betas is (1.0, 0.9), expected two numbers": lambda: AdamW8bit([_param(2)], betas=(1.0, 0.9)),
    "use_orig_params=True": lambda: AdamW8bit([_Flat(torch.zeros(2))]),
    "parameter 'codes', of shape (64, 256), is a Tensor of torch.int8": lambda: AdamW8bit(
        [("codes", nn.Parameter(torch.zeros(64, 256, dtype=torch.int8), requires_grad=False))]
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_stepped_is_refused(text: str) -> None:
    said = error_of(REFUSED[text])
    assert text in said, said
