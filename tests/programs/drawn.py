"""Programs drawn from seeds: rows of values that the rules allow, with more blocks, and other micro-batches."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

from tests.programs.features import Row, features, is_allowed, program_of
from tests.programs.program import Program

SHARE, OFTEN = 0.12, 0.6  # of values that are no defaults
CHANGES = ("block.kind", "micro.between", "micro.apart", "micro.sync")


def draw(seed: int, world_size: int, often: tuple[str, ...] = ()) -> Program:
    """A program that makes sense; whether torch takes it is another matter. ``often``: features that are no defaults
    most of the time."""
    pick = random.Random(1_000_003 * world_size + seed)
    row = drawn_row(pick, world_size, {}, often)
    of_blocks = [name for name in row if name.startswith("block.")]
    of_micros = [name for name in row if name.startswith("micro.")]
    rows = [
        row,
        *(drawn_row(pick, world_size, _without(row, of_blocks), often) for _ in range(pick.choice([0, 0, 1, 2]))),
    ]
    program = program_of(row)
    steps = list(program.steps)
    for index in range(len(steps)):
        micros = drawn_row(pick, world_size, _without(row, of_micros), often)
        if all(is_allowed({**each, **{name: micros[name] for name in of_micros}}) for each in rows):
            steps[index] = program_of(micros).steps[index]
        change = pick.choice(features(world_size)["micro.between"])
        is_changed = pick.random() < (OFTEN if "micro.between" in often else SHARE)
        if is_changed and all(is_allowed({**each, "micro.between": change}) for each in rows):
            first, *others = steps[index].micros
            # Flags of shards that were listed, and of what is bound, would contradict each other.
            if "freeze listed" not in (*first.between, *change):
                first = replace(first, between=(*first.between, *change))
            steps[index] = replace(steps[index], micros=(first, *others))
    more = tuple(program_of({**each, "place": "alone"}).blocks[0] for each in rows[1:])
    blocks = (*more, *program.blocks) if pick.random() < 0.5 and not program.listed else program.blocks
    return replace(program, blocks=blocks, steps=tuple(steps))


def drawn_row(pick: random.Random, world_size: int, fixed: Row, often: tuple[str, ...] = ()) -> dict[str, object]:
    """A row with the values ``fixed`` that the rules allow, most others being defaults."""
    values = features(world_size)
    names = [name for name in values if name not in fixed]
    while True:
        pick.shuffle(names)
        row = dict(fixed)
        for name in names:
            wanted = (
                pick.choice(values[name]) if pick.random() < (OFTEN if name in often else SHARE) else values[name][0]
            )
            for value in (wanted, *values[name]):
                row[name] = value
                if is_allowed(row, name):
                    break
            else:
                break  # no value goes with those before it
        else:
            return {name: row[name] for name in values}


def _without(row: Row, names: Iterable[str]) -> dict[str, object]:
    left_out = set(names)
    return {name: value for name, value in row.items() if name not in left_out}
