"""Two tensors: every op on both, views and writes included. Refusals are in ``golden/two_tensor.txt``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp2.tensors import TwoTensor
from tests.harness.extensions import wrap
from tests.harness.golden import texts_beside
from tests.unit.tensors.shards import Refused, assert_refused

TEXTS = texts_beside(__file__)


def two_of(*shape: int, seed: int = 0) -> TwoTensor:
    generator = torch.Generator().manual_seed(seed)
    return TwoTensor(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))


def _plain_mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def _mlp() -> nn.Sequential:
    return wrap(_plain_mlp(), lambda value: two_of(*value.shape, seed=value.numel()), lambda *_: True)


def _linear(x: torch.Tensor) -> torch.Tensor:
    return F.linear(torch.arange(6.0).view(2, 3), x).relu()


def _write_into_views(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[1].mul_(3)
    y[2:].add_(x[2:])
    y.view(-1)[3:5].mul_(x.view(-1)[:2])
    return y * y


def _write_into_as_strided(x: torch.Tensor) -> torch.Tensor:
    y = (x * 1)[2:]
    y.as_strided((2, 2), (2, 1), y.storage_offset()).mul_(3)
    return y * y


def _join_and_cut(x: torch.Tensor) -> torch.Tensor:
    pieces = torch.cat([x, x * x]).split([1, 3, 4])
    return torch.stack([pieces[1].t(), pieces[2][:3].t()])


@pytest.mark.parametrize("fn", [_linear, _write_into_views, _write_into_as_strided, _join_and_cut])
def test_values_and_gradients_are_those_of_either_inner_tensor(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    both = two_of(4, 3)
    leaf = both.clone().requires_grad_()
    result = fn(leaf)
    result.sum().backward()
    assert isinstance(leaf.grad, TwoTensor)
    for which in "ab":
        expected_leaf = getattr(both, which).clone().requires_grad_()
        expected = fn(expected_leaf)
        expected.sum().backward()
        assert torch.equal(getattr(result.detach(), which), expected)
        assert torch.equal(getattr(leaf.grad, which), expected_leaf.grad)


def test_plain_tensors_meet_both_inner_tensors() -> None:
    both, plain = two_of(4, 3), torch.arange(12.0).view(4, 3)
    assert torch.equal(plain * both, TwoTensor(plain * both.a, plain * both.b))
    assert both.copy_(plain) is both
    assert torch.equal(both, TwoTensor(plain, plain))
    assert both.add_(1) is both
    assert torch.equal(both, TwoTensor(plain + 1, plain + 1))
    assert not torch.equal(both, TwoTensor(plain, plain + 1))
    assert not torch.equal(both, TwoTensor(plain + 1, plain))


def test_ops_on_lists_write_and_return_plain_tensors_among_them_once() -> None:
    both, step = two_of(4, 3), torch.zeros(())
    torch._foreach_add_([both, step], 1.0)
    assert torch.equal(both, two_of(4, 3) + 1)
    assert step.item() == 1

    products = torch._foreach_mul([two_of(4, 3), torch.ones(2)], [2.0, 3.0])
    assert torch.equal(products[0], two_of(4, 3) * 2)
    assert type(products[1]) is torch.Tensor
    assert products[1].tolist() == [3, 3]


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_adam_updates_each_inner_tensor_as_if_it_were_alone(options: dict[str, bool]) -> None:
    models = [_mlp(), _plain_mlp(), _plain_mlp()]
    for half, which in zip(models[1:], "ab", strict=True):
        half.load_state_dict({name: getattr(value, which) for name, value in models[0].state_dict().items()})
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1, **options) for each in models]
    for step in range(3):
        x = torch.randn(7, 3, generator=torch.Generator().manual_seed(step))
        for each, optimizer in zip(models, optimizers, strict=True):
            each(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for both, a, b in zip(*(each.parameters() for each in models), strict=True):
        assert torch.equal(both, TwoTensor(a, b))


@pytest.mark.parametrize("copied", [copy.deepcopy, torch.clone, lambda given: given.to(torch.float32, copy=True)])
def test_copies_share_no_memory(copied: Callable[[Any], Any]) -> None:
    both = two_of(4, 3)[1:]  # deepcopy refuses tensors with a storage offset
    made = copied(both)
    assert torch.equal(made, both)
    made.zero_()
    assert torch.equal(both, two_of(4, 3)[1:])


@pytest.mark.ci
def test_compiled_block_gives_the_same_values_and_gradients() -> None:
    x, model = torch.randn(7, 3), _mlp()
    expected = model(x)
    expected.sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    result = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    result.sum().backward()
    assert torch.equal(result, expected)
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), gradients, strict=True))


def test_unsharded_tensor_of_the_gathered_dtype_is_the_gathered_memory() -> None:
    shard = two_of(4, 3)
    outputs, _ = shard.fsdp_pre_all_gather(None, shard.size(), (), nn.Module(), None)  # type: ignore[arg-type]
    made = shard.fsdp_post_all_gather(outputs, None, torch.float32)
    assert made is not None
    assert made[1] == ()
    assert [made[0].a.data_ptr(), made[0].b.data_ptr()] == [output.data_ptr() for output in outputs]


REFUSED: Refused = {
    "two of unlike strides": (lambda: torch.zeros(2, 3), lambda a: TwoTensor(a, torch.zeros(3, 2).t())),
    "two values into a plain tensor": (lambda: torch.zeros(4, 3), lambda plain: plain.add_(two_of(4, 3))),
    "two values into plain tensors of a list": (
        lambda: torch.zeros(4, 3),
        lambda plain: torch._foreach_add_([plain, plain], [two_of(4, 3), two_of(4, 3)]),
    ),
    "two as one number": (lambda: TwoTensor(torch.tensor(1.0), torch.tensor(2.0)), lambda both: both.item()),
    "two transposed in place": (lambda: two_of(4, 3), lambda both: both.t_()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_changes_nothing(name: str) -> None:
    assert_refused(TEXTS, name, REFUSED)
