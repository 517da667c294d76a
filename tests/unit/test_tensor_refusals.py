"""What the tensor classes refuse, in words: ``golden/tensor_refusals.txt``. Nothing has changed by it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fsdp2 import _torch
from fsdp2.tensors import (
    BFloat16AllGatherTensor,
    Float8AllGatherTensor,
    Float8Scaling,
    Int8AllGatherTensor,
    NF4Tensor,
    TwoTensor,
    wrap_parameters,
)
from tests.harness.golden import texts_beside
from tests.harness.messages import error_of
from tests.unit.test_nf4_tensor import nf4_of
from tests.unit.test_two_tensor import two_of
from tests.unit.test_wire_tensors import MAKERS, Tied, pre, unsharded

TEXTS = texts_beside(__file__)
ROWS = Float8Scaling.PER_ROW
FLOAT8, NF4 = partial(unsharded, torch.ones(4, 8), ROWS), partial(nf4_of, 7, 20)


def _frozen() -> nn.Parameter:
    weight = nn.Parameter(nf4_of(7, 20), requires_grad=False)
    weight.grad = torch.ones(7, 20)
    return weight


def _of_columns(shard: Any) -> Any:
    return pre(shard, 2, torch.ones(6, 8))


def _wrapping(make: Any) -> Any:
    return Tied, lambda model: wrap_parameters(model, make, select=lambda name, param: True)


def _quantising(weight: torch.Tensor, **options: int) -> Any:
    return lambda: weight, lambda given: NF4Tensor.quantise(given, **options)


# What is made, and the call on it that is refused.
REFUSED: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "wire format of a list": (lambda: None, lambda _: BFloat16AllGatherTensor([1.0])),  # type: ignore[arg-type]
    "wire format twice": (lambda: BFloat16AllGatherTensor(torch.ones(2, 2)), BFloat16AllGatherTensor),
    "wire format of integers": (lambda: torch.ones(2, dtype=torch.int32), BFloat16AllGatherTensor),
    "wire format of a scalar": (lambda: torch.ones(()), BFloat16AllGatherTensor),
    "wire format of complex numbers": (lambda: torch.ones(2, dtype=torch.complex64), BFloat16AllGatherTensor),
    **{f"{name} cut into columns": (partial(make, torch.ones(6, 4)), _of_columns) for name, make in MAKERS.items()},
    "wrapping into nothing": _wrapping(lambda data: None),
    "wrapping into another shape": _wrapping(lambda data: data.flatten()),
    "wrapping what the class refuses": _wrapping(Int8AllGatherTensor),
    "int8 of single elements": (lambda: torch.ones(4), Int8AllGatherTensor),
    "int8 without blocks": (lambda: torch.ones(4, 4), partial(Int8AllGatherTensor, block_size=0)),
    "float8 rows of single elements": (lambda: torch.ones(4), partial(Float8AllGatherTensor, scaling=ROWS)),
    "float8 scaling in words": (lambda: torch.ones(4), partial(Float8AllGatherTensor, scaling="per row")),
    "float8 written": (FLOAT8, lambda weight: weight.add_(1)),
    "float8 as out": (FLOAT8, lambda weight: torch.add(torch.ones(4, 8), 1, out=weight)),
    "two of unlike strides": (lambda: torch.zeros(2, 3), lambda a: TwoTensor(a, torch.zeros(3, 2).t())),
    "two values into a plain tensor": (lambda: torch.zeros(4, 3), lambda plain: plain.add_(two_of(4, 3))),
    "two values into plain tensors of a list": (
        lambda: torch.zeros(4, 3),
        lambda plain: torch._foreach_add_([plain, plain], [two_of(4, 3), two_of(4, 3)]),
    ),
    "two as one number": (lambda: TwoTensor(torch.tensor(1.0), torch.tensor(2.0)), lambda both: both.item()),
    "two transposed in place": (lambda: two_of(4, 3), lambda both: both.t_()),
    "NF4 parameter that is trained": (NF4, nn.Parameter),
    "NF4 requires_grad_": (NF4, lambda weight: weight.requires_grad_()),
    "NF4 requires_grad": (NF4, lambda weight: setattr(weight, "requires_grad", True)),
    "NF4 in a module that is trained": (lambda: nn.ParameterList([_frozen()]), lambda module: module.requires_grad_()),
    "NF4 columns": (NF4, lambda weight: weight[:, :8]),
    "NF4 chunks of columns": (NF4, lambda weight: weight.chunk(2, dim=-1)),
    "NF4 narrow columns": (NF4, lambda weight: weight.narrow(1, 8, 8)),
    "NF4 cut of a flattened view": (NF4, lambda weight: weight.view(-1)[:20]),
    "NF4 as_strided": (NF4, lambda weight: weight.as_strided((3, 20), (20, 1), 40)),
    "NF4 written": (NF4, lambda weight: weight.add_(1)),
    "NF4 zeroed": (NF4, lambda weight: weight.zero_()),
    "NF4 as out": (NF4, lambda weight: torch.add(torch.ones(7, 20), 1, out=weight)),
    "NF4 in a list": (NF4, lambda weight: torch._foreach_add_([torch.ones(7, 20), weight], 1)),
    "NF4 slice filled": (NF4, lambda weight: weight[1:2].fill_(0)),
    "NF4 in an optimizer": (_frozen, lambda weight: torch.optim.SGD([weight], lr=0.1, foreach=False).step()),
    "NF4 of a vector": _quantising(torch.zeros(7)),
    "NF4 of empty rows": _quantising(torch.zeros(7, 0)),
    "NF4 odd blocks": _quantising(torch.zeros(7, 20), block_size=7),
    "NF4 without blocks": _quantising(torch.zeros(7, 20), block_size=0),
    "NF4 of NaN": _quantising(torch.full((7, 20), float("nan"))),
    "NF4 beyond float32": _quantising(torch.full((7, 20), 1e300, dtype=torch.float64)),
    "NF4 of int8": _quantising(torch.zeros(7, 20, dtype=torch.int8)),
    "NF4 of NF4": _quantising(NF4()),
}


def _held(subject: Any) -> list[Any]:
    tensors = [subject] if isinstance(subject, torch.Tensor) else list(subject.parameters() if subject else [])
    return [(id(t), t.shape, t.requires_grad, [str(leaf.tolist()) for leaf in _torch.leaves(t)]) for t in tensors]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_changes_nothing(name: str) -> None:
    make, call = REFUSED[name]
    subject = make()
    before = _held(subject)
    TEXTS.check(name, error_of(lambda: call(subject)), among=REFUSED)
    assert _held(subject) == before
