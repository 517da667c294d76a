"""What ``flatten_optimizer`` refuses, and which parameters it steps as one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn, optim

import fsdp2
from fsdp2.tools.flat_optimizer import COPY_MAX_NBYTES, ELEMENTWISE, cut_runs, spanned
from tests.harness.messages import error_of


def _params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4))]


def test_an_optimizer_that_may_not_be_elementwise_is_refused() -> None:
    assert_expected_inline(
        error_of(lambda: fsdp2.flatten_optimizer(optim.LBFGS(_params()))),
        """\
ValueError: flatten_optimizer: LBFGS is not known to be element-wise. Known optimizers: ASGD,
Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop, SGD. If LBFGS updates each
element only from the value, gradient and states of this element, pass is_elementwise=True. If the
update depends on norms or on the shape of a parameter, do not flatten LBFGS.""",
    )


def test_what_is_derived_from_a_known_optimizer_may_do_anything() -> None:
    class Mine(optim.AdamW):
        pass

    optimizer = Mine(_params())
    with pytest.raises(ValueError, match="Mine is not known to be element-wise"):
        fsdp2.flatten_optimizer(optimizer)
    assert type(fsdp2.flatten_optimizer(optimizer, is_elementwise=True)).__mro__[2] is Mine


def test_a_scheduler_made_before_is_refused() -> None:
    optimizer = optim.SGD(_params(), lr=0.1)
    scheduler = optim.lr_scheduler.ConstantLR(optimizer)
    assert_expected_inline(
        error_of(lambda: fsdp2.flatten_optimizer(optimizer)),
        """\
ValueError: flatten_optimizer: the step of this SGD was replaced, for example by a learning rate
scheduler, and would bypass the flat step. Call flatten_optimizer first, then make the scheduler.""",
    )
    assert type(optimizer) is optim.SGD
    assert scheduler.optimizer is optimizer


def test_a_differentiable_optimizer_is_refused() -> None:
    optimizer = optim.SGD(_params(), lr=0.1, differentiable=True)
    assert_expected_inline(
        error_of(lambda: fsdp2.flatten_optimizer(optimizer)),
        """\
ValueError: flatten_optimizer: this SGD has differentiable=True, but the flat step writes states in
place. Do not flatten this SGD.""",
    )


def test_anything_but_an_optimizer_is_refused() -> None:
    value: Any = nn.Linear(1, 1)
    assert_expected_inline(
        error_of(lambda: fsdp2.flatten_optimizer(value)),
        """\
TypeError: flatten_optimizer: got a Linear, expected a torch.optim.Optimizer. If the object wraps an
optimizer, pass that optimizer.""",
    )


def test_the_optimizer_stays_the_same_object_of_a_derived_class() -> None:
    optimizer = optim.AdamW(_params())
    flat = fsdp2.flatten_optimizer(optimizer)
    assert flat is optimizer
    assert fsdp2.flatten_optimizer(flat) is flat
    assert isinstance(flat, optim.AdamW)
    assert repr(flat).startswith("FlatAdamW (")
    assert type(optim.AdamW(_params())) is optim.AdamW


def test_optimizers_of_torch_that_need_more_than_elements_are_not_in_the_table() -> None:
    known = {value for value in vars(optim).values() if isinstance(value, type) and issubclass(value, optim.Optimizer)}
    others = {cls.__name__ for cls in known - {optim.Optimizer} - set(ELEMENTWISE)}
    assert others >= {"Adafactor", "LBFGS", "SparseAdam"}


def test_plain_parameters_are_stepped_as_before() -> None:
    values = []
    for change in (lambda optimizer: optimizer, fsdp2.flatten_optimizer):
        param = nn.Parameter(torch.arange(3.0))
        optimizer = change(optim.AdamW([param], lr=0.1))
        for _ in range(3):
            param.square().sum().backward()
            optimizer.step()
        values.append([param, *optimizer.state[param].values()])
    assert all(map(torch.equal, *values))


def test_gradients_that_touch_are_one_view_within_one_storage_only() -> None:
    flat = torch.arange(6.0)
    view = spanned(flat[1:3], 5)
    assert view is not None
    assert view.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert view.data_ptr() == flat[1:].data_ptr()
    assert spanned(flat[1:3], 6) is None


def test_runs_end_where_kinds_change_and_where_large_gradients_lie_apart() -> None:
    large, small = COPY_MAX_NBYTES + 1, COPY_MAX_NBYTES // 3
    yes, no = [True] * 4, [False] * 4
    cases: list[tuple[list[object], list[bool], list[bool], list[int]]] = [  # kinds, follows, touch, nbytes
        (["a"] * 4, yes, yes, [large] * 4),
        (["a"] * 4, [True, True, False, True], yes, [1] * 4),
        (["a", "a", "b", "b"], yes, yes, [1] * 4),
        (["a", None, "a", "a"], yes, [True, False, False, True], [1] * 4),
        (["a"] * 4, yes, no, [small] * 4),
        (["a"] * 4, yes, no, [large, 1, 1, large]),
        (["a"] * 4, yes, [False, True, False, True], [large, large, 1, 1]),
        (["a"] * 4, yes, [False, False, True, True], [1, 1, 1, large]),
        ([None] * 4, yes, no, [1] * 4),
    ]
    found = [[(run.start, run.stop) for run in cut_runs(*case)] for case in cases]
    assert found == [
        [(0, 4)],
        [(0, 2), (2, 4)],
        [(0, 2), (2, 4)],
        [(0, 1), (2, 4)],
        [(0, 3), (3, 4)],
        [(0, 1), (1, 3), (3, 4)],
        [(0, 2), (2, 4)],
        [(0, 3), (3, 4)],
        [],
    ]
