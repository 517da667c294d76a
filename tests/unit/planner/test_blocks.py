"""Which modules become units, and what is said where there are none."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2.planner.blocks import Stack, Units, find_units
from tests.harness.golden import texts_beside
from tests.harness.messages import error_of
from tests.unit.planner.models import Block, LanguageModel, Repeated, Translator, with_large_parts
from tests.unit.planner.plans import LAYERS, WORKLOAD, on_meta, plan_of

TEXTS = texts_beside(__file__)


def _dict(**modules: nn.Module) -> nn.Module:
    return nn.ModuleDict(modules)


def _blocks() -> nn.ModuleList:
    return nn.ModuleList([Block(32), Block(32)])


MAPPING = Stack("layers", ("a", "b"), is_mapping=True)
STACKS = Stack("encoder", ("0", "1")), Stack("decoder", ("0", "1"))
ENCODER, DECODER = Stack("encoder.layers", ("0", "1")), Stack("decoder.layers", ("0", "1", "2"))


@pytest.mark.parametrize(
    ("build", "units"),
    [
        (LanguageModel, Units((LAYERS,), ("embedding", "head"))),
        (functools.partial(LanguageModel, is_tied=True), Units((LAYERS,), (), ("embedding", "head"))),
        (functools.partial(LanguageModel, vocabulary=8), Units((LAYERS,), ())),  # small ones stay with the model
        (lambda: _dict(layers=_dict(a=Block(32), b=Block(32))), Units((MAPPING,), ())),
        (lambda: nn.Sequential(Block(32), Block(32)), Units((Stack("", ("0", "1")),), ())),  # the model itself
        (lambda: _dict(encoder=_blocks(), decoder=_blocks()), Units(STACKS, ())),
        (Repeated, Units((Stack("layers", ("0",), is_whole=False),), ("embedding", "head"))),  # one unit
        (Translator, Units((ENCODER, DECODER), ("shared", "head"))),  # a module at several paths is a unit at one
        (with_large_parts, Units((Stack("layers", ("0", "1", "2")),), ("embedding", "head"))),  # with what is inside
        (  # what lies inside of blocks is no stack of its own
            lambda: _dict(layers=nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4))),
            Units((LAYERS,), ()),
        ),
    ],
)
def test_units_are_repeated_blocks_and_large_modules(build: Callable[[], nn.Module], units: Units) -> None:
    assert find_units(on_meta(build)) == units


def _in_compiled(part: str) -> nn.Module:
    """``part`` of a model, or the model itself, is compiled."""
    model, compiled = LanguageModel(), functools.partial(torch.compile, backend="eager")
    if part == "blocks":
        model.layers = nn.ModuleList(map(compiled, model.layers))
        return model
    return nn.Sequential(OrderedDict({part: compiled(model)})) if part else compiled(model)


@pytest.mark.long
@pytest.mark.parametrize("part", ["", "blocks", "inner"])
def test_a_plan_names_what_is_in_compiled_modules_without_these(part: str) -> None:
    found = fsdp2.planner.plan(functools.partial(_in_compiled, part), "H100", WORKLOAD, num_gpus=16)
    if part == "inner":
        assert found.units == Units((replace(LAYERS, path="inner.layers"),), ("inner.embedding", "inner.head"))
    else:
        assert (str(found), found.code) == (str(plan_of()), plan_of().code)


WRONG: dict[str, Callable[[], object]] = {
    "model without repeated blocks": lambda: find_units(nn.Linear(2, 2)),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named_with_what_is_expected(case: str) -> None:
    TEXTS.check(case, error_of(WRONG[case]), among=WRONG)
