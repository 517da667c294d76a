"""The arrays have every feature, and every pair of values that the rules allow; their programs notice defects."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import pytest

from tests.accelerator.device import DEVICE
from tests.harness.distributed import RankContext, distributed
from tests.harness.selection import SHARES
from tests.programs.check import Outcome, check
from tests.programs.features import (
    NOT_FEATURES,
    PARTS,
    RULES,
    features,
    fields_without_feature,
    is_allowed,
    program_of,
)
from tests.programs.pairs import array, packed, pairs_of
from tests.programs.program import Program, Step
from tests.programs.runner import Runner
from tests.programs.source import source
from tests.programs.test_random import _check_with_lost_partial_sums


def test_each_field_of_a_program_is_a_feature_or_says_why_not() -> None:
    assert fields_without_feature() == set()
    for name in NOT_FEATURES:
        part, _, field = name.partition(".")
        assert field in PARTS[part].__dataclass_fields__, f"{name} is gone"


def test_a_row_of_defaults_is_the_simplest_program_in_three_steps() -> None:
    assert program_of({}) == Program(steps=(Step(), Step(), Step()))


def test_each_value_makes_another_program_that_is_python() -> None:
    values = features(4)
    base = {"micros": 2, "place": "middle"}  # without which some values mean nothing
    for name, (default, *others) in values.items():
        for value in others:
            texts = [source(program_of({**base, name: each})) for each in (default, value)]
            assert texts[0] != texts[1] or value is base.get(name), f"{name}={value!r} changes nothing"
            compile(texts[1], name, "exec")


def test_values_are_told_apart_from_equal_ones() -> None:
    for name, values in features(4).items():
        assert len(set(values)) == len(values), name


@pytest.mark.in_turns
@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_array_has_each_pair_that_the_rules_allow(world_size: int) -> None:
    values = features(world_size)
    held = set().union(*map(pairs_of, array(world_size)))
    assert all(map(is_allowed, array(world_size)))
    named = [(name, value) for name in values for value in values[name]]
    for first, second in itertools.combinations(named, 2):
        if first[0] != second[0] and frozenset((first, second)) not in held:
            assert not _completes(dict((first, second)), values), f"no program has {first} and {second}"


def _completes(row: dict[str, Any], values: Mapping[str, tuple[Any, ...]], name: str | None = None) -> bool:
    """Whether some values of the other features go with those of ``row``, of which only ``name`` is new: tries all
    values of features that rules speak of together with what is chosen. If no such rule is left, the others can have
    their defaults."""
    if not is_allowed(row, name):
        return False
    undecided = [
        rule.combination.keys() - row.keys()
        for rule in RULES
        if "device" not in rule.combination  # these are about the CPU
        and (chosen := rule.combination.keys() & row.keys())
        and all(row[name] in rule.combination[name] for name in chosen)
    ]
    if undecided:
        name = min(min(undecided, key=lambda names: (len(names), sorted(names))))  # the fewest ways out first
        return any(_completes({**row, name: value}, values, name) for value in values[name])
    return True


def test_rows_for_missing_pairs_are_as_simple_as_asked() -> None:
    wanted = {
        frozenset({("block.uses", 2), ("program.offload", True)}),
        frozenset({("micro.keep", True), ("mesh", "hsdp")}),
    }
    rows = list(packed(wanted, features(2), 2))
    assert wanted <= set().union(*map(pairs_of, rows))
    assert [row["program.offload"] for row in rows].count(True) == 1
    assert len(rows) == 2
    assert len(list(packed(wanted, features(2), 5))) == 1


@pytest.mark.parametrize("share", range(3))
@distributed(2)
def test_refused_combinations_raise_the_error_of_their_rule(ctx: RankContext, share: int) -> None:
    for rule in [rule for rule in RULES if rule.error][share::3]:
        program = program_of({name: values[0] for name, values in rule.combination.items()})
        found = check(ctx, [program])[0]
        assert found.outcome in (Outcome.RAISES, Outcome.BOTH_REFUSE, Outcome.OVER_LIMIT), (
            f"{rule.combination}: {found.outcome}"
        )
        assert rule.error in found.text.splitlines()[-1], found.text


@pytest.mark.in_turns
@pytest.mark.long
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize(("world_size", "device_type"), [(2, "cpu"), (4, "cpu"), (2, DEVICE)])
def test_programs_of_the_array(world_size: int, device_type: str, share: int) -> None:
    if device_type == DEVICE and shutil.which("c++") is None:
        pytest.skip("no C++ compiler: the simulated accelerator cannot be built")
    with closing(Runner(world_size, device_type)) as runner:
        for row in array(world_size, device_type)[share::SHARES]:
            program = program_of(row)
            found = runner.verdict(program)
            assert not found.outcome.is_failure, f"{found.outcome.value}: {found.text}\n{source(program)}"


@pytest.mark.long
@pytest.mark.in_turns
def test_a_defect_is_noticed_in_the_array() -> None:
    with closing(Runner(2, body=_check_with_lost_partial_sums)) as runner:
        rows = (row for row in array(2) if (row["mesh"], row["micro.sync"]) == ("hsdp", "no all-reduce"))
        assert any(runner.verdict(program_of(row)).outcome is Outcome.DIFFERS for row in rows)
