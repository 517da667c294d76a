"""What ``flatten_optimizer`` refuses, and which tensors count as neighbours in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn, optim

import fsdp2
from fsdp2.tools.flat_optimizer import ELEMENTWISE
from fsdp2.tools.neighbours import Apart, Buffers, Code, codes_of, cuts_of, joined, spanned, spans
from tests.harness.messages import error_of


def _params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4))]


def test_an_optimizer_that_may_not_be_elementwise_is_refused() -> None:
    assert_expected_inline(
        error_of(lambda: fsdp2.flatten_optimizer(optim.LBFGS(_params()))),
        """\
ValueError: flatten_optimizer: LBFGS is not known to be element-wise; these are: ASGD, Adadelta,
Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop, SGD. If its update of an element depends
on that element's value, gradient and states alone, pass is_elementwise=True. If it depends on the
shape of a parameter, or on norms, use the optimizer as it is.""",
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
ValueError: flatten_optimizer: the step of this SGD has been replaced, as learning rate schedulers
do, and would bypass the flat one. Call flatten_optimizer first, then make the scheduler.""",
    )
    assert type(optimizer) is optim.SGD
    assert scheduler.optimizer is optimizer


def test_a_differentiable_optimizer_is_refused() -> None:
    optimizer = optim.SGD(_params(), lr=0.1, differentiable=True)
    assert_expected_inline(
        error_of(lambda: fsdp2.flatten_optimizer(optimizer)),
        """\
ValueError: flatten_optimizer: this SGD has differentiable=True, and its states are written in
place. Use the optimizer as it is.""",
    )


def test_anything_but_an_optimizer_is_refused() -> None:
    value: Any = nn.Linear(1, 1)
    assert_expected_inline(
        error_of(lambda: fsdp2.flatten_optimizer(value)),
        """\
TypeError: flatten_optimizer: got a Linear, expected a torch.optim.Optimizer. Pass the optimizer
that it wraps, if it wraps one.""",
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


def test_parts_of_one_flat_tensor_join_and_others_do_not() -> None:
    flat, other = torch.arange(8.0), torch.arange(8.0)
    buffers = Buffers([flat, other])
    first, second, last = flat.narrow(0, 1, 2), flat.narrow(0, 3, 2), flat.narrow(0, 6, 2)
    found = buffers.join([first, second])
    assert found is not None
    assert found.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert found.data_ptr() == first.data_ptr()
    assert buffers.join([second, last]) is None  # a gap
    assert buffers.join([second, first]) is None
    assert Buffers([other]).join([first, second]) is None
    assert Buffers([flat.view(torch.int32)]).join([first, second]) is None
    assert Buffers([flat[:4]]).join([first, second]) is None  # ends within


FLOAT, HALF = torch.float32, torch.float16


def _codes(*grads: Tensor | None) -> list[Code]:
    return codes_of(grads, grads)


def test_codes_say_which_gradients_touch() -> None:
    flat, other = torch.zeros(8), torch.zeros(4, dtype=HALF)
    codes = _codes(flat[0:2], flat[2:5], flat[6:8], None, flat[5:6], flat[6:8], other)
    assert codes == [(False, FLOAT), (True, FLOAT), (False, FLOAT), None, (False, FLOAT), (True, FLOAT), (False, HALF)]
    assert codes_of([flat], [None]) == [Apart.APART]


def test_a_transposed_gradient_touches_nothing() -> None:
    flat = torch.zeros(8)
    transposed = flat[2:6].view(2, 2).t()
    assert _codes(flat[0:2], transposed, flat[6:8]) == [(False, FLOAT)] * 3
    assert spanned(transposed, 4) is None


def test_gradients_that_touch_are_one_view_within_one_storage_only() -> None:
    flat = torch.arange(6.0)
    view = spanned(flat[1:3], 5)
    assert view is not None
    assert view.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert view.data_ptr() == flat[1:].data_ptr()
    assert spanned(flat[1:3], 6) is None


def test_runs_end_where_keys_change_and_where_large_gradients_lie_apart() -> None:
    touching, apart = (True, FLOAT), (False, FLOAT)
    large = 32 * 1024
    cases: list[tuple[list[object], list[Code], list[int]]] = [
        (["a"] * 4, [touching] * 4, [large] * 4),
        (["a", "a", "b", "b"], [touching] * 4, [1] * 4),
        (["a", None, "a", "a"], [touching, None, apart, touching], [1] * 4),
        (["a"] * 4, [apart] * 4, [1] * 4),
        (["a"] * 4, [apart] * 4, [large, 1, 1, large]),
        (["a"] * 4, [apart, touching, apart, apart], [10 * 1024, 10 * 1024, 1, 1]),
        ([None] * 2, [None] * 2, [1] * 2),
    ]
    found = [[(span.start, span.stop) for span in spans(*case)] for case in cases]
    assert found == [
        [(0, 4)],
        [(0, 2), (2, 4)],
        [(0, 1), (2, 4)],
        [(0, 4)],
        [(0, 1), (1, 3), (3, 4)],
        [(0, 2), (2, 4)],
        [],
    ]


def test_tensors_that_touch_in_one_storage_are_joined() -> None:
    flat = torch.arange(12.0)
    a, b, c = flat[0:3], flat[3:7].view(2, 2), flat[9:12]
    alone, half = torch.ones(2), torch.ones(4, dtype=torch.bfloat16)
    tensors = [c, b, torch.empty(0), a, half[:2], alone, half[2:]]
    found = joined(tensors, cuts_of(tensors))
    assert found is not None
    assert {(str(tensor.dtype), tuple(tensor.flatten().tolist())) for tensor in found} == {
        ("torch.float32", tuple(range(7))),
        ("torch.float32", (9, 10, 11)),
        ("torch.float32", (1, 1)),
        ("torch.bfloat16", (1, 1, 1, 1)),
    }
    for tensor in found:
        tensor.zero_()
    assert flat.tolist() == [0.0] * 7 + [7.0, 8.0] + [0.0] * 3  # views
    assert cuts_of([flat.view(3, 4).t(), flat[12:]]) == [(0, 12)]
    assert joined([a.clone(), b], [(0, 7)]) is None  # they touch no more
