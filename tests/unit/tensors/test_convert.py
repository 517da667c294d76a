"""Which parameters of a module are wrapped. Refusals are in ``golden/convert.txt``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp2.tensors import BFloat16AllGatherTensor, Int8AllGatherTensor, wrap_parameters
from tests.harness.golden import texts_beside
from tests.unit.tensors.shards import Refused, assert_refused

TEXTS = texts_beside(__file__)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def test_matrices_are_wrapped_ties_stay_ties_and_frozen_stays_frozen() -> None:
    model = Tied()
    before = {name: param.clone() for name, param in model.named_parameters()}
    assert wrap_parameters(model, BFloat16AllGatherTensor) == ["embedding.weight", "frozen.weight"]
    assert model.head.weight is model.embedding.weight
    wrapped = {name for name, param in model.named_parameters() if isinstance(param, BFloat16AllGatherTensor)}
    assert wrapped == {"embedding.weight", "frozen.weight"}
    frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
    assert frozen == ["frozen.weight", "frozen.bias"]
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    chosen = wrap_parameters(Tied(), BFloat16AllGatherTensor, select=lambda name, param: name.endswith("bias"))
    assert chosen == ["norm.bias", "head.bias", "frozen.bias"]


def _wrapping(make: Any) -> Any:
    return Tied, lambda model: wrap_parameters(model, make, select=lambda name, param: True)


REFUSED: Refused = {
    "wrapping into nothing": _wrapping(lambda data: None),
    "wrapping into another shape": _wrapping(lambda data: data.flatten()),
    "wrapping what the class refuses": _wrapping(Int8AllGatherTensor),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_changes_nothing(name: str) -> None:
    assert_refused(TEXTS, name, REFUSED)
