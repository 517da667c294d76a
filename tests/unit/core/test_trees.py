"""Tensors inside structures: both walks see the same tensors in the same order, and the identity copies nothing."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fsdp2.core.trees import find_tensors, map_tensors
from tests.harness.models import Outputs, Pair


@dataclass(frozen=True)
class Frozen:
    value: Tensor


@dataclass
class Counting:
    """Counts how often it was constructed."""

    value: Tensor
    doubled: Any = field(init=False, default=None)
    constructed: ClassVar[int] = 0

    def __post_init__(self) -> None:
        type(self).constructed += 1


class _WithNote:
    def __init__(self, note: str, **values: Any) -> None:
        super().__init__(**values)
        self.note = note


class Noted(_WithNote, dict):  # type: ignore[type-arg]
    """A dict subclass with an attribute and an ``__init__`` of its own."""


class OrderedNoted(_WithNote, OrderedDict):  # type: ignore[type-arg]
    """The same on an ``OrderedDict``, which ``copy.copy`` rebuilds by calling the class."""


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """What the models of a well-known library return: items are attributes, too, and ``update`` is forbidden."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("update() is not allowed")


class Row(list):  # type: ignore[type-arg]
    pass


def _t(value: int) -> Tensor:
    return torch.tensor(float(value))


STRUCTURES: dict[str, Any] = {
    "tensor": lambda: _t(0),
    "list": lambda: [_t(0), 1, _t(2)],
    "list subclass": lambda: Row([_t(0), _t(1)]),
    "tuple": lambda: (_t(0), (None, _t(1))),
    "dict": lambda: {"b": _t(0), "a": {"c": _t(1)}},
    "dict subclass": lambda: Noted("kept", b=_t(0), a=_t(1)),
    "namedtuple": lambda: Pair(_t(0), Pair(_t(1), "x")),
    "dataclass": lambda: Outputs(_t(0), "label", {"y": [_t(1)]}),
    "frozen dataclass": lambda: Frozen(_t(0)),
    "dataclass with post-init": lambda: Counting(_t(0)),
    "mixed": lambda: [{"o": Outputs(_t(0), "l", {"y": Pair(_t(1), [_t(2)])})}, (Frozen(_t(3)), Noted("n", x=_t(4)))],
    "same tensor twice": lambda: [shared := _t(0), {"again": shared}],
    "empty": lambda: ([], {}, ()),
}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_map_visits_the_tensors_that_find_finds_and_puts_others_in_their_place(structure: str) -> None:
    value: Any = STRUCTURES[structure]()
    visited: list[Tensor] = []
    assert map_tensors(lambda tensor: visited.append(tensor) or tensor, value) is value  # type: ignore[func-returns-value]
    before, first = find_tensors(value, []), [_t(7)]
    assert list(map(id, visited)) == list(map(id, before))
    mapped = map_tensors(lambda tensor: tensor + 10, value)
    assert type(mapped) is type(value)
    assert [float(tensor) for tensor in find_tensors(mapped, [])] == [float(tensor) + 10 for tensor in before]
    assert find_tensors(value, first) is first  # left as it was, and found behind what was found before
    assert list(map(id, first[1:])) == list(map(id, before))


@pytest.mark.parametrize("cls", [Noted, OrderedNoted])
def test_dict_subclass_keeps_class_attributes_and_order(cls: Any) -> None:
    mapped = map_tensors(lambda tensor: tensor + 1, cls("kept", b=_t(0), a=_t(1)))
    assert type(mapped) is cls
    assert mapped.note == "kept"
    assert [(key, float(tensor)) for key, tensor in mapped.items()] == [("b", 1), ("a", 2)]


def test_dict_subclass_that_mirrors_items_as_attributes_keeps_both_in_step() -> None:
    value = ModelOutput()
    value["logits"] = _t(0)
    mapped = map_tensors(lambda tensor: tensor + 1, value)
    assert type(mapped) is ModelOutput
    assert float(mapped["logits"]) == 1
    assert mapped.logits is mapped["logits"]
    assert float(value.logits) == 0


def test_dataclass_is_rebuilt_without_its_constructor() -> None:
    value = Counting(_t(0))
    value.doubled = _t(5)
    constructed = Counting.constructed
    mapped = map_tensors(lambda tensor: tensor + 1, value)
    assert Counting.constructed == constructed
    assert (float(mapped.value), float(mapped.doubled)) == (1, 6)


def test_parts_without_tensors_sets_dataclass_types_and_strangers_are_left_alone() -> None:
    for value in ({"sizes": [1, 2]}, {1, 2}, frozenset([_t(0)]), Outputs, "text", 3, None, object()):
        assert find_tensors(value, []) == []
        assert map_tensors(lambda tensor: tensor + 1, value) is value
        assert map_tensors(lambda tensor: tensor + 1, {"x": _t(0), "plain": value})["plain"] is value
