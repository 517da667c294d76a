"""The algebra of fused and split checkpoints: pieces beside torch's own stack, cat and transpose, and what is refused.

The words of refusals are in ``golden/pieces.txt``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2.checkpoint.mapping import Concat, Expression, Stack, Transpose, WeightRule, parts_of
from fsdp2.checkpoint.pieces import Box, reads, resolve, resolved_to_load, runs, whole_piece
from tests.harness.golden import texts_beside
from tests.harness.messages import error_of

TEXTS = texts_beside(__file__)
Shapes = dict[str, tuple[int, ...]]


def _value(expression: Expression, tensors: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Tensor:
    """By torch; ``sizes``: how many parts stacks with placeholders have."""
    if isinstance(expression, str):
        return tensors[expression]
    if isinstance(expression, Transpose):
        return _value(expression.part, tensors, sizes).transpose(expression.dim0, expression.dim1)
    parts = list(parts_of(expression))
    if isinstance(expression, Concat):
        return torch.cat([_value(part, tensors, sizes) for part in parts], expression.dim)
    if expression.over is not None:
        (name,) = parts
        over = expression.over
        assert isinstance(name, str)
        parts = [name.replace(f"{{{over}}}", str(number)) for number in range(sizes[over])]
    return torch.stack([_value(part, tensors, sizes) for part in parts], expression.dim)


# The rule, the shapes of the model, and the number of parts of stacks.
RULES: dict[str, tuple[WeightRule, Shapes, dict[str, int]]] = {
    "rename": (WeightRule("a", "b"), {"a": (3, 2)}, {}),
    "scalar": (WeightRule("a", "b"), {"a": ()}, {}),
    "no entries": (WeightRule("a", Concat(["b", "c"])), {"a": (0, 2)}, {}),
    "stack": (WeightRule("up", Stack("e.{i}.up", over="i")), {"up": (3, 4, 2)}, {"i": 3}),
    "stack on the last dim": (WeightRule("up", Stack("e.{i}.up", over="i", dim=-1)), {"up": (4, 2, 3)}, {"i": 3}),
    "stack of one": (WeightRule("up", Stack("e.{i}.up", over="i")), {"up": (1, 4)}, {"i": 1}),
    "stack of scalars": (WeightRule("all", Stack(["a", "b"])), {"all": (2,)}, {}),
    "stack by the model": (
        WeightRule(Stack("e.{i}", over="i", dim=1), "all"),
        {f"e.{i}": (4, 2) for i in (10, *range(10))},
        {"i": 11},
    ),
    "concat": (WeightRule("qkv", Concat(["q", "k", "v"], sizes=(4, 1, 1))), {"qkv": (12, 5)}, {}),
    "concat of equals": (WeightRule("gu", Concat(["gate", "up"], dim=1)), {"gu": (3, 8)}, {}),
    "split": (WeightRule(Concat(["q", "k", "v"]), "qkv"), {"q": (8, 5), "k": (2, 5), "v": (3, 5)}, {}),
    "transpose": (WeightRule("w", Transpose("w.t")), {"w": (4, 3)}, {}),
    "transpose of three": (WeightRule(Transpose("w", 0, -1), "w.t"), {"w": (4, 3, 2)}, {}),
    "experts": (
        WeightRule("gu", Concat([Stack("e.{i}.gate", over="i"), Stack("e.{i}.up", over="i")], dim=1)),
        {"gu": (4, 6, 5)},
        {"i": 4},
    ),
    "experts, turned": (
        WeightRule("gu", Transpose(Concat([Stack("e.{i}.gate", over="i"), Stack("e.{i}.up", over="i")], dim=-2))),
        {"gu": (4, 5, 6)},
        {"i": 4},
    ),
    "both sides": (WeightRule(Concat(["a", "b"]), Concat(["c", "d", "e"])), {"a": (5, 2), "b": (4, 2)}, {}),
    "stack beside concat": (WeightRule(Stack(["a", "b"], dim=1), Concat(["c", "d"])), {"a": (4, 3), "b": (4, 3)}, {}),
}


def _fill(into: Tensor, box: Box, values: Tensor, order: tuple[int, ...]) -> None:
    into[box] = values.permute(order).reshape(into[box].shape)


@pytest.mark.parametrize("case", RULES)
def test_pieces_are_what_torch_makes_of_the_tensors_and_back(case: str) -> None:
    rule, shapes, sizes = RULES[case]
    (resolved,) = resolve([rule], shapes, "test")
    files = {key: torch.randn(shape) for key, shape in resolved.keys.items()}
    model = {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}
    for piece in resolved.pieces:
        _fill(model[piece.name], piece.box, files[piece.key][piece.key_box], piece.key_order)
    assert torch.equal(_value(rule.model, model, sizes), _value(rule.files, files, sizes))
    saved = {key: torch.full_like(value, float("nan")) for key, value in files.items()}
    for piece in resolved.pieces:
        _fill(saved[piece.key], piece.key_box, model[piece.name][piece.box], piece.order)
    assert all(torch.equal(saved[key], files[key]) for key in files)
    assert sum(value.numel() for value in files.values()) == sum(value.numel() for value in model.values())


@pytest.mark.parametrize("case", RULES)
@pytest.mark.parametrize("seed", range(4))
def test_what_ranks_read_is_their_entries_and_nothing_else(case: str, seed: int) -> None:
    """For entries of a rank in any order along every dim."""
    rule, shapes, _ = RULES[case]
    (resolved,) = resolve([rule], shapes, "test")
    numbers = random.Random(seed)
    files = {key: torch.randn(shape) for key, shape in resolved.keys.items()}
    for name, shape in shapes.items():
        whole = torch.empty(shape)
        for piece in (each for each in resolved.pieces if each.name == name):
            _fill(whole, piece.box, files[piece.key][piece.key_box], piece.key_order)
        along = [_some(numbers, size) for size in shape]
        expected = whole
        for dim, entries in enumerate(along):
            expected = expected.index_select(dim, torch.tensor(entries, dtype=torch.int64))
        found, numel = torch.full(expected.shape, float("nan")), 0
        for piece in (each for each in resolved.pieces if each.name == name):
            for read in reads(piece, [runs(entries) for entries in along]):
                values = files[piece.key][read.of_key]
                _fill(found, read.local, values, piece.key_order)
                numel += values.numel()
        assert torch.equal(found, expected)
        assert numel == expected.numel()


def _some(numbers: random.Random, size: int) -> list[int] | range:
    if numbers.random() < 0.5:
        return range(numbers.randint(0, size), size)
    return sorted(numbers.sample(range(size), numbers.randint(0, size)), key=lambda entry: (entry % 2, entry))


def test_runs_have_no_gaps_and_a_plain_piece_is_the_whole_tensor() -> None:
    assert runs(range(2, 5)) == [(0, 2, 3)]
    assert runs([2, 3, 4, 8, 9, 1]) == [(0, 2, 3), (3, 8, 2), (5, 1, 1)]
    assert runs([]) == runs(range(3, 3)) == []
    (resolved,) = resolve([WeightRule("a", "b")], {"a": (3, 2)}, "test")
    assert resolved.pieces == (whole_piece("a", "b", (3, 2)),)


def test_a_rule_is_for_all_that_its_placeholders_may_stand_for() -> None:
    rule = WeightRule("{part}.{n}.up", Stack("old.{part}.{n}.e.{i}.up_{n}", over="i"))
    shapes = {"left.0.up": (2, 3), "left.10.up": (1, 3), "right.0.up": (1, 3), "left.0.1.up": (2, 3), "up": (2,)}
    found = {tuple(each.names): list(each.keys) for each in resolve([rule], shapes, "test")}
    assert found == {
        ("left.0.up",): ["old.left.0.e.0.up_0", "old.left.0.e.1.up_0"],
        ("left.10.up",): ["old.left.10.e.0.up_10"],
        ("right.0.up",): ["old.right.0.e.0.up_0"],
    }


SHAPES = {"a": (4, 2), "b": (3, 2), "c": (4, 3), "e.0.up": (4, 2), "e.2.up": (4, 2), "gu": (3, 7)}


def _resolve(*rules: tuple[Any, Any]) -> object:
    return resolve([WeightRule(*rule) for rule in rules], SHAPES, "load_safetensors")


REFUSED: dict[str, Callable[[], object]] = {
    "no such tensor": lambda: _resolve(("layers.{i}.x", "{i}.x")),
    "a part that is not there": lambda: _resolve((Concat(["a", "d"]), "k")),
    "an expert that is not there": lambda: _resolve((Stack("e.{i}.up", over="i"), "k")),
    "parts that do not fit": lambda: _resolve((Concat(["a", "c"]), "k")),
    "parts that do not stack": lambda: _resolve((Stack(["a", "b"]), "k")),
    "sizes of the model that differ": lambda: _resolve((Concat(["a", "b"], sizes=(1, 1)), "k")),
    "a size that is not split": lambda: _resolve(("gu", Concat(["g", "u"], dim=1))),
    "a stack of another size": lambda: _resolve(("a", Stack(["x", "y"]))),
    "a dim that is not there": lambda: _resolve(("a", Stack("x.{i}", over="i", dim=2))),
    "dims that are not swapped": lambda: _resolve(("a", Transpose("x", 0, 2))),
    "two rules": lambda: _resolve(("a", "k"), (Concat(["a", "b"]), "l")),
    "one tensor twice": lambda: _resolve((Concat(["a", "a"]), "k")),
    "a mapping that is none": lambda: resolved_to_load({"a": "b"}, {}, SHAPES, "load_safetensors"),  # type: ignore[arg-type]
    "one rule alone": lambda: resolved_to_load(WeightRule("a", "b"), {}, SHAPES, "load_safetensors"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", REFUSED)
def test_rule_is_refused(case: str) -> None:
    TEXTS.check(case, error_of(REFUSED[case]), among=REFUSED)
