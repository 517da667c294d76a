"""Watched parameters: what their users see of it, which is nothing but the class."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2 import _torch
from fsdp2.group.direct_uses import WatchedParameter, WatchedView, unwatch, watch


class _Watched:
    """A watched parameter, and how often its hook was called."""

    def __init__(self) -> None:
        self.param = nn.Parameter(torch.rand(2, 3))
        self.num_gradients = 0
        watch(self.param, _torch.GradientHook(self._count))

    def _count(self, _: Tensor) -> None:
        self.num_gradients += 1


def test_what_an_operation_returns_is_plain_and_hooked() -> None:
    watched = _Watched()
    product = torch.rand(2, 3) * watched.param
    assert type(product) is Tensor
    product.relu().sum().backward()
    assert watched.num_gradients == 1
    assert type(watched.param.grad) is Tensor


def test_views_are_watched_as_well() -> None:
    watched = _Watched()
    left, right = watched.param.t().unbind(1)
    assert type(left) is type(right) is WatchedView
    (left * right).sum().backward()
    assert watched.num_gradients == 2  # each view tells of it


def test_nothing_is_hooked_without_gradients() -> None:
    watched = _Watched()
    with torch.no_grad():
        assert type(watched.param * 2) is Tensor
        assert type(watched.param[0]) is Tensor
    assert type(watched.param.detach()) is type(watched.param.data) is Tensor
    watched.param.requires_grad_(False)
    assert not (watched.param * 2).requires_grad


@pytest.mark.parametrize(
    "use",
    [
        lambda p: copy.deepcopy(p) * 2,
        lambda p: pickle.loads(pickle.dumps(p)) * 2,
        lambda p: nn.Parameter(p.detach().clone()) * 2,
    ],
    ids=["deepcopy", "pickle", "clone"],
)
def test_copies_are_not_watched(use: Callable[[Tensor], Tensor]) -> None:
    watched = _Watched()
    made = use(watched.param)
    made.sum().backward()
    assert torch.equal(made, watched.param.data * 2)
    assert watched.num_gradients == 0


def test_unwatched_parameter_is_what_it_was() -> None:
    watched = _Watched()
    param = watched.param
    assert isinstance(param, nn.Parameter)
    assert param.is_leaf
    unwatch(param)
    assert type(param) is nn.Parameter
    assert param is watched.param
    assert vars(param) == {}
    (param * 2).sum().backward()
    assert watched.num_gradients == 0


def test_parameters_of_other_classes_are_left_alone() -> None:
    class Other(Tensor):
        pass

    param = nn.Parameter(torch.rand(2).as_subclass(Other))
    watch(param, _torch.GradientHook(lambda _: None))
    assert type(param) is Other


def test_functions_in_python_meet_plain_parameters() -> None:
    """They may call back: gradients taken inside run as they would without us."""
    watched = _Watched()
    seen: list[type] = []

    def note(_: Tensor) -> None:
        seen.append(type(watched.param))

    output = F.layer_norm(torch.rand(2, 3), (3,), watched.param[0], bias=None)
    output.register_hook(note)
    torch.autograd.grad(output.sum(), [watched.param])
    assert seen == [nn.Parameter]
    assert type(watched.param) is WatchedParameter


def test_function_that_raises_leaves_the_class() -> None:
    watched = _Watched()
    with pytest.raises(RuntimeError):
        F.layer_norm(torch.rand(2, 3), (5,), watched.param)
    assert type(watched.param) is WatchedParameter


def _attention(weight: Any) -> Tensor:
    x = torch.ones(1, 4, 3, requires_grad=True)
    out = F.multi_head_attention_forward(
        *(x,) * 3, 3, 1, weight, None, None, None, False, 0.0, torch.eye(3), None, need_weights=False
    )
    return out[0]


def test_result_is_that_of_a_plain_parameter() -> None:
    plain, watched = nn.Parameter(torch.rand(9, 3)), nn.Parameter(torch.empty(9, 3))
    watched.data.copy_(plain.data)
    watch(watched, _torch.GradientHook(lambda _: None))
    for param in (plain, watched):
        _attention(param).square().sum().backward()
    assert torch.equal(plain.grad, watched.grad)
    assert str(plain.data) == str(watched.data)
    assert plain.tolist() == watched.tolist()
