"""Arrays of programs in which each pair of values occurs, and how they are run: ``python -m tests.programs pairs``.

``allpairspy`` makes the rows. It stops when its next row would add nothing, which can be before the last pair that the
rules allow: programs into which the missing ones are packed follow.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from allpairspy import AllPairs

from tests.programs.features import (
    BEYOND_TORCH,
    RISKIEST,
    RULES,
    Combination,
    Row,
    broken_rule,
    features,
    is_allowed,
    is_in,
)

Pair = frozenset[tuple[str, Any]]
Values = Mapping[str, tuple[Any, ...]]


def pairs_of(row: Mapping[str, Any]) -> set[Pair]:
    """The pairs of values in ``row``."""
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def triples(world_size: int) -> list[dict[str, Any]]:
    """Rows with every triple of values of the riskiest features that the rules allow; others have defaults, and a step
    has two micro-batches. ``allpairspy`` would stop long before the last one."""
    values = features(world_size)
    base = {"micros": 2}
    named = [[(name, value) for value in values[name]] for name in RISKIEST]
    waiting = dict.fromkeys(
        frozenset(found)
        for three in itertools.combinations(named, 3)
        for found in itertools.product(*three)
        if is_allowed(base | dict(found))
    )
    rows = []
    while waiting:
        row, first = dict(base), next(iter(waiting))
        row |= dict(first)
        for name in (name for name in RISKIEST if name not in row):
            allowed = [value for value in values[name] if is_allowed({**row, name: value}, name)]
            row[name] = max(allowed, key=lambda value: sum(each in waiting for each in _triples({**row, name: value})))
        for each in (first, *_triples(row)):
            waiting.pop(each, None)
        rows.append({name: row.get(name, default) for name, (default, *_) in values.items()})
    return rows


def _triples(row: Row) -> Iterator[frozenset[tuple[str, Any]]]:
    risky = [(name, row[name]) for name in RISKIEST if name in row]
    return map(frozenset, itertools.combinations(risky, 3))


def allowed_pairs(world_size: int, device: str = "cpu") -> set[Pair]:
    """The pairs of values that some row has."""
    values = features(world_size, device)
    named = [(name, value) for name in values for value in values[name]]
    pairs = (dict(pair) for pair in itertools.combinations(named, 2) if pair[0][0] != pair[1][0])
    return {frozenset(pair.items()) for pair in pairs if _simplest(pair, values) is not None}


@functools.cache
def array(world_size: int, device: str = "cpu") -> tuple[dict[str, Any], ...]:
    """Rows with every pair that is allowed: first those that torch runs, then those with what it refuses."""
    values = features(world_size, device)
    rows = list(_rows(values, [*(rule.combination for rule in RULES), *BEYOND_TORCH]))
    rows += packed(allowed_pairs(world_size, device).difference(*map(pairs_of, rows)), values, len(values))
    return tuple(rows)


def _rows(values: Values, excluded: Sequence[Combination]) -> Iterator[dict[str, Any]]:
    """Rows with all pairs of values, as far as ``allpairspy`` gets, and without ``excluded``."""
    names = sorted(values, key=lambda name: (len(values[name]) > 1, -len(values[name])))  # then rows fill best

    def may_begin(row: list[Any]) -> bool:
        found = dict(zip(names, row, strict=False))  # all but its last value has passed already
        return not any(is_in(found, each) for each in by_last[names[len(row) - 1]])

    by_last = {name: [each for each in excluded if name in each] for name in names}
    for row in AllPairs([values[name] for name in names], filter_func=may_begin):
        found = dict(zip(names, row, strict=True))
        yield {name: found[name] for name in values}


def _simplest(fixed: Mapping[str, Any], values: Values) -> dict[str, Any] | None:
    """A row with the values ``fixed``, and as few others that are no defaults as the rules allow; None if there is
    none."""
    row = {name: fixed.get(name, values[name][0]) for name in values}
    broken = broken_rule(row, fixed)
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
            if all(fixed.get(name, value) == value for name, value in pair):
                wanted = {**fixed, **dict(pair)}
                found = _simplest(wanted, values)
                if found is not None and (not row or _num_others(found, values) <= most):
                    row, fixed = found, wanted
        yield row
        held = pairs_of(row)
        waiting = [pair for pair in waiting if pair not in held]


def _num_others(row: Row, values: Values) -> int:
    """How many values are no defaults."""
    return sum(row[name] != values[name][0] for name in row)
