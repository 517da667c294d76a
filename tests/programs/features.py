"""Every feature of a program with its values, and which values do not go together.

A row has one value for each feature, and becomes a program by ``program_of``: the features of a block, a micro-batch
and a step are those of one block, of the first micro-batch of each step, and of the second and third step. Other blocks
are the simplest ones.

Rule: a combination that is left out is in ``RULES`` with the reason. It is refused with an error, which is checked, or
it means nothing, or there is nothing to compare it with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from tests.programs.program import (
    BEFORE,
    BETWEEN,
    CHECKPOINTS,
    KINDS,
    MEMORY,
    OPTIMIZERS,
    SAVED_TENSORS,
    WIRES,
    Block,
    Micro,
    Precision,
    Program,
    Step,
)

Row = Mapping[str, Any]
PARTS = {"program": Program, "block": Block, "micro": Micro, "step": Step}
PLAIN, BF16 = Precision(), Precision("bfloat16")
AS_GIVEN = Precision("bfloat16", casts_inputs=False)
PRECISIONS = (
    *(PLAIN, BF16, Precision("bfloat16", "float32", "float32"), AS_GIVEN),
    *(Precision(None, "bfloat16"), Precision(None, None, "bfloat16")),
)

# By part and field, the default first.
_FEATURES: dict[str, tuple[Any, ...]] = {
    "mesh": ("fsdp", "hsdp", "one replica", "one rank", "tp"),
    "place": ("alone", "first", "last", "middle"),  # of the block, among up to three
    "micros": (1, 2),  # per step
    "block.kind": KINDS,
    "block.uses": (1, 2),
    "block.checkpoint": ("", *CHECKPOINTS),
    "block.alone": (True, False),
    "block.inner": (False, True),
    "block.reshard": (None, True, False),
    "block.skipped": ((), (0,), (1,)),
    "block.left_out": ((), (0,), (1,)),
    "block.detached": (False, True),
    "block.double": (False, True),
    "block.frozen": (False, True),
    "block.wire": ("", *WIRES),
    "block.compiled": (False, True),
    "micro.sync": ("all", "no all-reduce", "no reduction"),
    "micro.keep": (False, True),
    "micro.by_hand": ("", "unshard", "unshard async", "reshard"),
    "micro.evaluates": (False, True),
    "micro.fails": (False, True),
    "micro.forwards": (1, 2),
    "micro.backwards": (1, 2),
    "micro.marks_last": (False, True),
    "micro.uses_side": (True, False),
    "micro.between": ((), *((each,) for each in BETWEEN)),
    "micro.in_thread": (False, True),
    "second step": ("", *BEFORE),  # Step.before
    "third step": ("", *BEFORE),
    "program.dim": (8, 10),
    "program.tied": (False, True),
    "program.listed": (False, True),
    "program.buffer": (False, True),
    "program.scalar": (False, True),
    "program.covered": (False, True),
    "program.force_sum": (False, True),
    "program.reduces_unused": (False, True),
    "program.placement_dim": (0, 1),
    "program.ignored": (False, True),
    "program.precision": PRECISIONS,
    "program.offload": (False, True),
    "program.prefetch": (False, True),
    "program.divide_factor": (None, 1.0),
    "program.root_reshard": (None, True, False),
    "program.optimizer": OPTIMIZERS,
    "program.clip_norm": (None, 0.05),
    "program.set_to_none": (True, False),
    "program.way": ("fully_shard", "install"),
    "program.autocast": ("", "forward", "step"),
    "program.saved_tensors": ("", *SAVED_TENSORS),
    "program.scaled": (False, True),
    "program.memory": ("", *MEMORY),
}
# Values that are possible on 4 ranks only.
_ON_FOUR_RANKS = {"mesh": ("experts",), "block.reshard": (2,), "program.root_reshard": (2,)}
# Fields that are no feature by themselves.
NOT_FEATURES = {
    "program.blocks": "the feature `place` says how many there are",
    "program.mesh": "the feature `mesh`",
    "program.steps": "there are always three, so that something can happen between them twice",
    "step.before": "the features `second step` and `third step`",
    "step.micros": "the feature `micros` says how many there are",
}


@dataclass(frozen=True)
class Rule:
    """A combination that no program has. ``error``: what fsdp2 refuses it with; if empty, ``why`` says why not."""

    combination: Mapping[str, tuple[Any, ...]]
    why: str
    error: str = ""

    def forbids(self, row: Row) -> bool:
        """Whether ``row``, which may have values for some of the features only, has the combination."""
        return _is_in(row, self.combination)


def _is_in(row: Row, combination: Mapping[str, tuple[Any, ...]]) -> bool:
    return all(name in row and row[name] in values for name, values in combination.items())


def _others(name: str, *but: Any) -> tuple[Any, ...]:
    """The values of a feature, on any number of ranks, but for some."""
    return tuple(value for value in (*_FEATURES[name], *_ON_FOUR_RANKS.get(name, ())) if value not in but)


def _not_default(name: str) -> tuple[Any, ...]:
    return _others(name, _FEATURES[name][0])


def _each(first: Mapping[str, tuple[Any, ...]], others: Mapping[str, tuple[Any, ...]], why: str) -> Iterator[Rule]:
    """``first`` with each of ``others``."""
    for name, values in others.items():
        yield Rule({**first, name: values}, why)


LOW = tuple(each for each in PRECISIONS if "bfloat16" in (each.param, each.reduce, each.output))
CASTS = tuple(each for each in PRECISIONS if each.param)
LEFT_OUT = {"block.left_out": _not_default("block.left_out")}
HOOKS = {"block.wire": WIRES}
# Torch refuses these, hangs, or is known to differ, so they get rows of their own: all others are compared with torch
# bit for bit.
BEYOND_TORCH: tuple[dict[str, tuple[Any, ...]], ...] = (
    LEFT_OUT,
    {"program.scalar": (True,)},
    {"block.double": (True,), "block.alone": (False,)},  # two dtypes in one unit
    {"block.wire": ("halved", "scaled")},
    {"block.wire": ("bf16",), "program.placement_dim": (1,)},
    {"block.kind": ("odd",), "program.placement_dim": (1,)},  # a dim that is cut unevenly
    {"program.listed": (True,), "block.detached": (True,)},  # freed too early
    {"program.reduces_unused": (True,), "block.skipped": _not_default("block.skipped")},  # from here on: see known.py
    {"program.autocast": ("step",), "micros": (2,)},
    {"micro.between": (("freeze",),)},
    {"block.checkpoint": ("reentrant",), "block.uses": (2,)},
    {"block.checkpoint": ("reentrant",), "micro.forwards": (2,)},
    {"program.divide_factor": (1.0,), "program.force_sum": (False,)},  # gloo multiplies in no reduction
)
# The unsharded model computes something else, or rounds too differently: see source.has_reference.
NO_REFERENCE: tuple[dict[str, tuple[Any, ...]], ...] = (
    {"program.divide_factor": (1.0,)},
    {"mesh": ("experts",)},
    {"program.ignored": (True,)},
    {"program.reduces_unused": (True,)},
    *(
        {**low, **rounded}
        for low in ({"program.precision": LOW}, {"program.autocast": _not_default("program.autocast")}, HOOKS)
        for rounded in (
            {"program.clip_norm": (0.05,)},
            {"program.optimizer": tuple(each for each in OPTIMIZERS if each.startswith("AdamW"))},
        )
    ),
)


def _both(first: Mapping[str, tuple[Any, ...]], second: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """The combination of two combinations."""
    joined = {**first, **second}
    for name in first.keys() & second.keys():
        joined[name] = tuple(value for value in first[name] if value in second[name])
    return joined


RULES = (
    *_each(
        {"mesh": ("tp",)},
        {
            "block.kind": _others("block.kind", "mlp"),
            "block.inner": (True,),
            "block.double": (True,),
            "block.wire": WIRES,
            "program.dim": (10,),
        },
        "the plan of tensor parallelism is that of a block of kind mlp in float32, cut evenly",
    ),
    *_each({"mesh": ("tp", "experts")}, {"program.clip_norm": (0.05,)}, "torch clips on one mesh only"),
    *_each({"mesh": ("tp", "experts", "one rank")}, LEFT_OUT, "all ranks of a layer run it"),
    Rule({"mesh": ("experts",), "program.listed": (True,)}, "modules of one unit are on one mesh"),
    Rule({"place": ("alone",), "program.listed": (True,)}, "one block"),
    *_each(
        {"mesh": _others("mesh", "fsdp")},
        {"program.divide_factor": (1.0,), "block.reshard": (2,), "program.root_reshard": (2,)},
        "for one axis of ranks",
    ),
    *_each(
        {"micros": (1,)},
        {"micro.sync": _not_default("micro.sync"), "micro.keep": (True,)},
        "the last backward of a step reduces and reshards",
    ),
    *_each(
        LEFT_OUT,
        {
            "block.kind": ("itself",),
            "block.uses": (2,),
            "micro.fails": (True,),
            "micro.forwards": (2,),
            "program.listed": (True,),
        },
        "docs/advanced/ranks.md: ranks run the same forwards, and use a unit at most once more than others",
    ),
    Rule({**LEFT_OUT, **HOOKS}, "a hook speaks for all ranks"),
    Rule({**LEFT_OUT, "block.compiled": (True,), "block.double": (True,)}, "refused on the ranks that use the block"),
    Rule({**LEFT_OUT, "block.compiled": (True,), "micro.backwards": (2,)}, "refused on the ranks that use the block"),
    Rule({**HOOKS, "block.double": (True,)}, "the tests' hooks are for float32"),
    Rule({"block.wire": ("scaled",), "program.placement_dim": (1,)}, "the scales are of rows"),
    Rule(
        {"program.precision": (AS_GIVEN,), "block.double": (True,)},
        "the input of a block in float64 is not cast",
        error="same dtype",
    ),
    Rule(
        {"block.checkpoint": ("selective",), "micro.backwards": (2,)},
        "torch keeps what is saved for one backward",
        error="Trying to backward an extra time",
    ),
    *(
        Rule(
            {"block.checkpoint": ("selective",), "program.autocast": ("forward",), name: (2,)},
            "the second time, autocast has the casts of weights that the checkpoint repeats",
            error="not found in storage",
        )
        for name in ("block.uses", "micro.forwards")
    ),
    Rule(
        {"program.ignored": (True,), "program.scaled": (True,)},
        "GradScaler steps tensors of one kind",
        error="got mixed torch.Tensor and DTensor",
    ),
    *_each(
        {"program.autocast": ("step",)},
        {"micro.evaluates": (True,), "micro.between": (("reference",), ("evaluate",))},
        "autocast remembers what is cast without gradients, and models then get none",
    ),
    *_each(
        {"mesh": ("one rank",)},
        {"second step": ("save and load",), "third step": ("save and load",)},
        "each rank trains a model of its own, and a checkpoint holds one",
    ),
    Rule(
        {"program.memory": ("tight limit",), "micro.keep": (True,)},
        "the limit is what a step needs that reshards after backward",
        error="MemoryLimitError",
    ),
    Rule({"block.compiled": (True,), "micro.between": _not_default("micro.between")}, "a graph is for fixed flags"),
    *_each(
        {"program.ignored": (True,)},
        {
            "program.precision": CASTS,
            "program.clip_norm": (0.05,),
            "program.optimizer": ("AdamW", "AdamW foreach", "AdamW fused"),
            "program.covered": (True,),
        },
        "the bias is a plain tensor in float32 beside DTensors",
    ),
    *_each(
        {"program.covered": (True,)},
        {"program.tied": (True,), "program.scalar": (True,)},
        "a parameter of the root, which covered roots have none of",
    ),
    Rule(
        {"device": ("sim",), "program.autocast": _not_default("program.autocast")},
        "the simulated device has no autocast, and its results are compared with those of the CPU",
    ),
    Rule(
        {"device": ("sim",), "program.scaled": (True,), "program.offload": (True,)},
        "GradScaler copies its scale to the gradients on the host, and reads the copy before it has arrived",
    ),
    Rule({"device": ("sim",), "program.offload": (True,), **HOOKS}, "the tests' hooks do not support pinned memory"),
    *(
        Rule(_both(refused, different), "neither torch nor the unsharded model to compare with")
        for refused in BEYOND_TORCH
        for different in NO_REFERENCE
    ),
)


def features(world_size: int, device: str = "cpu") -> dict[str, tuple[Any, ...]]:
    """Every feature with its values on that many ranks, the default first. A device other than the CPU is a feature
    with one value, so that rules can name it."""
    more = _ON_FOUR_RANKS if world_size == 4 else {}
    found = {name: (*values, *more.get(name, ())) for name, values in _FEATURES.items()}
    return found if device == "cpu" else {**found, "device": (device,)}


def is_allowed(row: Row) -> bool:
    """Whether no rule forbids the values of ``row``, which may be those of some features only."""
    return not any(rule.forbids(row) for rule in RULES)


def is_for_torch(row: Row) -> bool:
    """Whether torch runs the values of ``row``, which may be those of some features only."""
    return not any(_is_in(row, combination) for combination in BEYOND_TORCH)


def program_of(row: Row) -> Program:
    """The program that has the values of ``row``; features that it does not name have their defaults."""
    row = {name: row.get(name, values[0]) for name, values in _FEATURES.items()}
    part = {part: {n.partition(".")[2]: v for n, v in row.items() if n.startswith(f"{part}.")} for part in PARTS}
    block, micro = Block(**part["block"]), Micro(**part["micro"])
    blocks = {
        "alone": (block,),
        "first": (block, _other(block)),
        "last": (_other(block), block),
        "middle": (_other(block), block, _other(block)),
    }[row["place"]]
    micros = (micro, Micro(uses_side=micro.uses_side, marks_last=micro.marks_last))[: row["micros"]]
    before = [(), *((row[name],) if row[name] else () for name in ("second step", "third step"))]
    steps = tuple(Step(each, micros) for each in before)
    return Program(blocks=blocks, mesh=row["mesh"], steps=steps, **part["program"])


def _other(block: Block) -> Block:
    """A block next to ``block``; torch wants one dtype per unit, so it is of the same."""
    return Block(double=block.double)


def fields_without_feature() -> set[str]:
    """Fields of a part of a program that are neither features nor excused."""
    names = {f"{part}.{each.name}" for part, cls in PARTS.items() for each in fields(cls)}
    return names - set(_FEATURES) - set(NOT_FEATURES)
