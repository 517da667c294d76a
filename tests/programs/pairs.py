"""Arrays of programs in which each pair of values occurs, and how they are run: ``python -m tests.programs pairs``.

``allpairspy`` makes the rows. It stops when its next row would add nothing, which can be before the last pair that the
rules allow: programs into which the missing ones are packed follow.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from allpairspy import AllPairs

from tests.programs.features import RULES, Row, features, is_allowed, is_for_torch

Pair = frozenset[tuple[str, Any]]
Values = Mapping[str, tuple[Any, ...]]


def pairs_of(row: Mapping[str, Any]) -> set[Pair]:
    """The pairs of values in ``row``."""
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def allowed_pairs(world_size: int, device: str = "cpu") -> set[Pair]:
    """The pairs of values that some row has."""
    values = features(world_size, device)
    named = [(name, value) for name in values for value in values[name]]
    found = set[Pair]()
    for first, second in itertools.combinations(named, 2):
        pair = frozenset((first, second))
        if pair not in found and first[0] != second[0] and (row := _simplest(dict(pair), values)) is not None:
            found |= pairs_of(row)
    return found


@functools.cache
def array(world_size: int, device: str = "cpu") -> tuple[dict[str, Any], ...]:
    """Rows with every pair that is allowed: first those that torch runs, then those with what it refuses."""
    values = features(world_size, device)
    rows = list(_rows(values, lambda row: is_allowed(row) and is_for_torch(row)))
    rows += packed(allowed_pairs(world_size, device).difference(*map(pairs_of, rows)), values, len(values))
    return tuple(rows)


def _rows(values: Values, may_be: Callable[[Row], bool]) -> Iterator[dict[str, Any]]:
    """Rows with all pairs of values, as far as ``allpairspy`` gets. ``may_be``: asked about their first values, too."""
    names = sorted(values, key=lambda name: (len(values[name]) > 1, -len(values[name])))  # then rows fill best

    def may_begin(row: list[Any]) -> bool:
        return may_be(dict(zip(names, row, strict=False)))

    for row in AllPairs([values[name] for name in names], filter_func=may_begin):
        found = dict(zip(names, row, strict=True))
        yield {name: found[name] for name in values}


def _simplest(fixed: Mapping[str, Any], values: Values) -> dict[str, Any] | None:
    """A row with the values ``fixed``, and as few others that are no defaults as the rules allow; None if there is
    none."""
    row = {name: fixed.get(name, values[name][0]) for name in values}
    broken = next((rule for rule in RULES if rule.forbids(row)), None)
    if broken is None:
        return row
    for name in (name for name in broken.combination if name not in fixed):
        for value in values[name]:
            found = _simplest({**fixed, name: value}, values) if value not in broken.combination[name] else None
            if found is not None:
                return found
    return None


def packed(missing: set[Pair], values: Values, most: int) -> Iterator[dict[str, Any]]:
    """Rows with the pairs ``missing``, in each as many as go together, but no more than ``most`` values that are no
    defaults, unless one pair takes them."""
    waiting = sorted(missing, key=lambda pair: sorted(map(repr, pair)))
    while waiting:
        row, fixed = dict[str, Any](), dict[str, Any]()
        for pair in waiting:
            wanted = {**fixed, **dict(pair)}
            if all(wanted[name] == value for name, value in fixed.items()):
                found = _simplest(wanted, values)
                if found is not None and (not row or _num_others(found, values) <= most):
                    row, fixed = found, wanted
        yield row
        held = pairs_of(row)
        waiting = [pair for pair in waiting if pair not in held]


def _num_others(row: Row, values: Values) -> int:
    """How many values are no defaults."""
    return sum(row[name] != values[name][0] for name in row)
