"""Every feature of a program with its values, and which values do not go together.

A row has one value for each feature, and becomes a program by ``program_of``: the features of a block, a micro-batch
and a step are those of one block, of the first micro-batch of each step, and of the second and third step. Other blocks
are the simplest ones.

Rule: a combination that is left out is in ``RULES`` with the reason. It is refused with an error, which is checked, or
it means nothing, or there is nothing to compare it with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from tests.programs.operations import REFUSED
from tests.programs.program import (
    AFTER,
    BEFORE,
    BETWEEN,
    CALLED,
    CHECKPOINTS,
    FAILS,
    KINDS,
    MEMORY,
    ON_HOST,
    OPTIMIZERS,
    SAVED_TENSORS,
    SETTINGS,
    STEP_IN_BACKWARD,
    WAYS,
    WIRES,
    Block,
    Micro,
    Precision,
    Program,
    Step,
)

Row = Mapping[str, Any]
Combination = Mapping[str, tuple[Any, ...]]
PARTS = {"program": Program, "block": Block, "micro": Micro, "step": Step}
PLAIN, BF16 = Precision(), Precision("bfloat16")
AS_GIVEN = Precision("bfloat16", casts_inputs=False)
PRECISIONS = (
    *(PLAIN, BF16, Precision("bfloat16", "float32", "float32"), AS_GIVEN),
    *(Precision(None, "bfloat16"), Precision(None, None, "bfloat16"), Precision("float16", "float32")),
    *(Precision("bfloat16", "float32", wire="bfloat16"), Precision(None, "float32", wire="int8")),
)
WIRED = tuple(each for each in PRECISIONS if each.wire)

# Of BEFORE, what may come after another one.
AGAIN = (
    *("load state dict", "load optimizer state", "copy the model", "thaw", "reset", "write whole parameters"),
    *("save and load", "pickle", "to one rank and back", "outer root", "initialise again"),
)

MOMENTS = ("second step", "third step", "step.after")
SAVED_ALONE = ("save and load safetensors", "save in the background", "mirror and restore")  # torch does not do so

# By part and field, the default first.
_FEATURES: dict[str, tuple[Any, ...]] = {
    "mesh": ("fsdp", "hsdp", "one replica", "one rank", "tp"),
    "place": ("alone", "first", "last", "middle"),  # of the block, among up to three
    "micros": (1, 2, 3),  # per step: the last has defaults, those before it what is asked for
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
    "micro.sync": ("all", "no all-reduce", "no reduction", "no_sync"),
    "micro.keep": (False, True),
    "micro.by_hand": ("", "unshard", "unshard async", "reshard"),
    "micro.evaluates": (False, True),
    "micro.fails": ("", *FAILS),
    "micro.refused": ("", *REFUSED),
    "micro.called": CALLED,
    "micro.forwards": (1, 2),
    "micro.apart": (False, True),
    "micro.backwards": (1, 2),
    "micro.marks_last": (False, True),
    "micro.uses_side": (True, False),
    "micro.between": ((), *((each,) for each in BETWEEN)),
    "micro.in_thread": (False, True),
    "second step": ("", *BEFORE),  # Step.before
    "third step": ("", *AGAIN),
    "step.after": ("", *AFTER),  # of the second step
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
    "program.clips_by": ("torch", "fsdp2"),
    "program.set_to_none": (True, False),
    "program.way": WAYS,
    "program.autocast": ("", "forward", "step"),
    "program.watched": ("", "forward", "step"),
    "program.compiled": (False, True),
    "program.setting": ("", *SETTINGS),
    "program.saved_tensors": ("", *SAVED_TENSORS),
    "program.scaled": (False, True),
    "program.memory": ("", *MEMORY),
}
# Most faults were between these.
RISKIEST = (
    *("mesh", "block.uses", "block.checkpoint", "block.reshard", "micro.sync", "micro.by_hand", "micro.fails"),
    *("micro.forwards", "micro.between", "program.autocast"),
)
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

    combination: Combination
    why: str
    error: str = ""

    def forbids(self, row: Row) -> bool:
        return is_in(row, self.combination)


def is_in(row: Row, combination: Combination) -> bool:
    """Whether ``row``, which may have values for some of the features only, has the combination."""
    for name, values in combination.items():  # noqa: SIM110  # asked millions of times: a generator takes twice as long
        if name not in row or row[name] not in values:
            return False
    return True


def _others(name: str, *but: Any) -> tuple[Any, ...]:
    """The values of a feature, on any number of ranks, but for some."""
    return tuple(value for value in (*_FEATURES[name], *_ON_FOUR_RANKS.get(name, ())) if value not in but)


def _not_default(name: str) -> tuple[Any, ...]:
    return _others(name, _FEATURES[name][0])


def _joined(first: Combination, others: Combination) -> Iterator[Combination]:
    """``first`` with each of ``others``."""
    for name, values in others.items():
        yield {**first, name: values}


def _each(first: Combination, others: Combination, why: str) -> Iterator[Rule]:
    for combination in _joined(first, others):
        yield Rule(combination, why)


LOW = PRECISIONS[1:]
CASTS = tuple(each for each in PRECISIONS if each.param)
LEFT_OUT = {"block.left_out": _not_default("block.left_out")}
HOOKS = {"block.wire": WIRES}
# Of BEFORE, methods of units.
OF_UNITS = (
    "to one rank and back",
    "outer root",
    "another root",
    "reshard after forward",
    "keep after forward",
    "reset",
)
WRAPPED = {"program.way": ("FSDP1",)}
# Torch refuses these, hangs, or is known to differ, so they get rows of their own: all others are compared with torch
# bit for bit.
BEYOND_TORCH: tuple[dict[str, tuple[Any, ...]], ...] = (
    LEFT_OUT,
    {"program.precision": WIRED},
    {"program.scalar": (True,)},
    {"block.double": (True,), "block.alone": (False,)},  # two dtypes in one unit
    {"block.wire": ("halved", "scaled")},
    {"block.wire": ("bf16", "float8"), "program.placement_dim": (1,)},
    {"block.kind": ("odd",), "program.placement_dim": (1,)},  # a dim that is cut unevenly
    {"program.listed": (True,), "block.detached": (True,)},  # freed too early
    {"program.reduces_unused": (True,), "block.skipped": _not_default("block.skipped")},  # from here on: see known.py
    {"program.autocast": ("step",), "micros": (2, 3)},
    {"micro.between": tuple((each,) for each in ("freeze", "freeze listed", "another root"))},
    {"block.checkpoint": ("reentrant",), "block.uses": (2,)},
    {"block.checkpoint": ("reentrant",), "micro.forwards": (2,)},
    {"program.divide_factor": (1.0,), "program.force_sum": (False,)},  # gloo multiplies in no reduction
    {"block.wire": ("int8", "mxfp8", "nf4"), "mesh": ("hsdp", "one rank")},  # two tensors from one rank
    {"block.wire": ("mxfp8",), "block.kind": ("odd",)},  # a rank without rows
    {"program.clips_by": ("fsdp2",)},  # adds up squares in another order
    {"program.setting": ("finalized by hand",), "micro.apart": (True,)},
    # Torch's class takes no second backward, hangs, and moves to an accelerator what it offloads.
    *_joined(WRAPPED, {"micro.backwards": (2,), "micro.between": (("state dict",),), "program.offload": (True,)}),
    # It gives frozen parameters zeros, and adds up norms and, in less than fp32, micro-batches in another order.
    *_joined(
        WRAPPED,
        {"block.frozen": (True,), "block.kind": ("adapters",), "second step": ("freeze",)},
    ),
    *_joined(WRAPPED, {"program.clip_norm": (0.05,), "program.optimizer": ("AdamW fused",), "program.tied": (True,)}),
    *_joined(WRAPPED, {"program.optimizer": ("Muon",), "step.after": ("evaluate", "infer")}),
    *(
        {name: values}
        for name, values in {
            "second step": ("another root", "evaluate an average"),
            "step.after": ("evaluate an average",),
            "program.optimizer": ON_HOST,
        }.items()
    ),
    *(
        {**WRAPPED, **low, **several}
        for low in ({"program.precision": LOW}, {"program.autocast": ("forward", "step")})
        for several in ({"micros": (2, 3)}, {"micro.forwards": (2,)}, {"block.uses": (2,)})
    ),
    {**WRAPPED, "mesh": ("hsdp", "one rank")},  # where one rank has all shards, it does not shard at all
)
# The unsharded model computes something else, or rounds too differently: see source.has_reference.
NO_REFERENCE: tuple[dict[str, tuple[Any, ...]], ...] = (
    {"program.divide_factor": (1.0,)},
    {"mesh": ("experts",)},
    {"program.ignored": (True,)},
    {"block.wire": ("nf4",)},
    {"program.reduces_unused": (True,)},
    # A wrapper has gradients for all of its parameters, or for none.
    *_joined(WRAPPED, {"block.skipped": _not_default("block.skipped"), "block.detached": (True,)}),
    {**WRAPPED, "block.kind": ("side",), "micro.uses_side": (False,)},
    *(
        {**low, **rounded}
        for low in ({"program.precision": LOW}, {"program.autocast": _not_default("program.autocast")}, HOOKS)
        for rounded in (
            {"program.clip_norm": (0.05,)},
            {"program.optimizer": tuple(each for each in OPTIMIZERS if each.startswith("AdamW"))},
        )
    ),
)


def _both(first: Combination, second: Combination) -> dict[str, tuple[Any, ...]]:
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
    *_each(
        WRAPPED,
        {
            "mesh": ("tp", "experts"),
            "block.left_out": _not_default("block.left_out"),
            "block.wire": WIRES,
            "micro.sync": ("no all-reduce", "no_sync"),
            "micro.keep": (True,),
            "micro.by_hand": _not_default("micro.by_hand"),
            "micro.fails": FAILS,
            "micro.marks_last": (True,),
            "second step": OF_UNITS,
            "third step": OF_UNITS,
            "step.after": ("to one rank and back", "reset"),
            "program.listed": (True,),
            "program.force_sum": (True,),
            "program.reduces_unused": (True,),
            "program.placement_dim": (1,),
            "program.precision": tuple(
                each for each in PRECISIONS if each.output or each.wire or not each.casts_inputs
            ),
            "program.prefetch": (True,),
            "program.divide_factor": (1.0,),
            "program.memory": MEMORY,
            "program.optimizer": STEP_IN_BACKWARD,
            "program.setting": SETTINGS,
            "program.compiled": (True,),
            "micro.called": ("method",),
            "micro.refused": REFUSED,
            "program.clips_by": ("fsdp2",),
        },
        "FSDP1's class has no such option, or no such method",
    ),
    *(
        rule
        for name in ("second step", "third step")
        for rule in _each(
            {name: ("initialise again",)},
            {"program.way": ("FSDP1",), "block.wire": WIRES, "device": ("sim",), "program.ignored": (True,)},
            "not drawn alike: flat parameters, subclasses, another random generator, a plain tensor beside shards",
        )
    ),
    Rule({**WRAPPED, "program.ignored": (True,)}, "torch's class lists what it ignores before other parameters"),
    *(
        Rule(
            {name: ("switch adapters", "merge adapters"), "block.kind": _others("block.kind", "adapters")},
            "no adapters",
        )
        for name in ("second step", "third step")
    ),
    Rule(
        {"second step": ("another root",), "block.alone": (False,)},
        "a root around a part of a unit",
        error="is already sharded, by a call on a module around this one",
    ),
    *(
        Rule(
            {name: values, step: ("outer root",)},
            "what is set on a root must be taken from it before another root surrounds it",
            error="but the root is",
        )
        for name, values in {
            "program.memory": ("large limit", "tight limit"),
            "program.setting": ("finalized by hand",),
        }.items()
        for step in ("second step", "third step")
    ),
    *(
        Rule(
            {"program.setting": ("report",), step: ("outer root",)},
            "a report is about the units of one root",
            error="as the root ran inside the block",
        )
        for step in ("second step", "third step")
    ),
    Rule({"micro.apart": (True,), "micro.forwards": (2,)}, "two forwards already"),
    *_each(
        {"micros": (3,), "micro.fails": tuple(each for each in FAILS if each.startswith("backward"))},
        {"micro.sync": _not_default("micro.sync"), "micro.keep": (True,), "micro.marks_last": (True,)},
        "a backward that fails drops the gradients that earlier micro-batches have kept",
    ),
    Rule({"micro.between": (("another adapter",),), "block.kind": _others("block.kind", "adapters")}, "no adapters"),
    Rule(
        {"micro.between": (("thaw all",),), "block.wire": ("nf4",)}, "weights of 4 bits are frozen", error="NF4Tensor"
    ),
    *_each(
        {"micro.between": (("another root",),)},
        {"block.alone": (False,), "program.way": ("FSDP1",), "block.left_out": _not_default("block.left_out")},
        "a root around a part of a unit, or of what only some ranks use",
    ),
    *_each(WRAPPED, {"micro.between": (("reshard",), ("unshard",))}, "FSDP1's class has no such method"),
    *_each(
        WRAPPED,
        {"micro.between": (("freeze a block",), ("freeze listed",), ("thaw all",), ("another adapter",))},
        "a wrapper has gradients for all of its parameters, or for none",
    ),
    Rule(
        {**WRAPPED, "second step": ("freeze",), "micro.between": (("thaw",),)},
        "a wrapper has gradients for all of its parameters, or for none",
    ),
    *_each(
        {"block.checkpoint": CHECKPOINTS},
        {"micro.between": (("freeze a block",), ("freeze listed",), ("thaw all",), ("another adapter",))},
        "what is computed again must be what was computed before",
    ),
    *_each(
        {"program.optimizer": STEP_IN_BACKWARD},
        {"second step": ("another root", "outer root"), "third step": ("outer root",)},
        "a step in backward begins in that of the first root",
    ),
    Rule(
        {
            "program.optimizer": ON_HOST,
            "program.listed": (True,),
            "place": ("last", "middle"),
            "block.checkpoint": ("reentrant",),
            "block.uses": (2,),
            "micro.apart": (True,),
        },
        "each use of each module of the unit has a backward of its own, more than there were forwards of the unit",
        error="after an earlier one has begun",
    ),
    Rule({"program.optimizer": ("Muon in backward",), "micro.between": (("another root",),)}, "as in the second step"),
    Rule(
        {"program.optimizer": ON_HOST, "micro.between": (("another root",),)},
        "the other root's backward begins the step, since nothing tells it that it is not the last one",
        error="after an earlier one has begun",
    ),
    *(
        Rule({**combination, name: ("to one rank and back",)}, "reshard_to refuses it, as its page says", error=error)
        for combination, error in (
            ({"program.optimizer": ON_HOST}, "a HostAdamW steps this model"),
            (WRAPPED, "was made by FullyShardedDataParallel"),
        )
        for name in MOMENTS
    ),
    *(
        Rule(
            {"second step": ("outer root",), name: ("to one rank and back",)},
            "the model is a part of another one by then",
            error="Pass that root",
        )
        for name in ("third step", "step.after")
    ),
    *(
        Rule(
            {"micros": (1,), "micro.between": (("another root",),), name: ("to one rank and back",)},
            "the other root has a unit of the model until the model's next forward",
            error="Pass that root",
        )
        for name in MOMENTS
    ),
    *_each(
        {"micro.refused": tuple(name for name, (place, _, _) in REFUSED.items() if place)},
        {"block.compiled": (True,), "program.compiled": (True,)},
        "the hook that tries it would be compiled, too",
    ),
    Rule(
        {"program.optimizer": ON_HOST, "program.set_to_none": (False,)},
        "it takes gradients, so none are left to be zero",
    ),
    Rule({"second step": ("float8 scales",), "block.wire": _others("block.wire", "float8")}, "no float8"),
    Rule(
        {"program.setting": ("entry is not gathered in backward",), "program.covered": (False,)}, "no unit of its own"
    ),
    Rule({"program.clips_by": ("fsdp2",), "program.clip_norm": (None,)}, "nothing is clipped"),
    *_each(
        {"program.optimizer": STEP_IN_BACKWARD},
        {"program.clip_norm": (0.05,), "program.scaled": (True,), "step.after": AFTER},
        "the step begins in backward, before anything that comes after it",
    ),
    Rule({"program.optimizer": ON_HOST, "micro.marks_last": (True,)}, "it always marks the last backward"),
    *_each({"mesh": ("tp", "experts")}, {"program.clip_norm": (0.05,)}, "torch clips on one mesh only"),
    *_each(
        {"mesh": ("tp", "experts", "one rank")},
        dict.fromkeys(MOMENTS, ("to one rank and back",)),
        "a model moves from one mesh of all ranks to another",
    ),
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
            "micro.fails": FAILS,
            "micro.forwards": (2,),
            "micro.apart": (True,),
            "program.listed": (True,),
        },
        "docs/advanced/ranks.md: ranks run the same forwards, and use a unit at most once more than others",
    ),
    Rule({**LEFT_OUT, **HOOKS}, "a hook speaks for all ranks"),
    Rule({**LEFT_OUT, "program.optimizer": ("Muon in backward",)}, "all ranks use the same parameters then"),
    Rule({**LEFT_OUT, "block.compiled": (True,), "block.double": (True,)}, "refused on the ranks that use the block"),
    Rule({**HOOKS, "block.double": (True,)}, "the tests' hooks are for float32"),
    Rule({"block.wire": ("scaled",), "program.placement_dim": (1,)}, "the scales are of rows"),
    *(
        Rule(
            {"program.precision": WIRED, "program.setting": (setting,)},
            "a wire decides what travels, in memory of its own",
            error="because of reduce_wire",
        )
        for setting in ("own reduce-scatter", "memory of the group")
    ),
    Rule(
        {"block.wire": ("int8", "mxfp8", "nf4"), "program.placement_dim": (1,)},
        "blocks of values that share a scale are in rows",
        error="was cut into shards of shape",
    ),
    *(
        Rule(
            {"block.wire": ("nf4",), name: ("evaluate an average",)}, "weights of 4 bits are frozen", error="NF4Tensor"
        )
        for name in ("second step", "third step")
    ),
    *_each(
        {"block.wire": ("nf4",)},
        dict.fromkeys(MOMENTS, ("write whole parameters", "merge adapters")),
        "only fsdp2 has whole weights to write: elsewhere, they are of 4 bits, and frozen",
    ),
    Rule({"block.wire": ("nf4",), "block.kind": ("odd",)}, "torch refuses it, and shards have blocks of their own"),
    Rule(
        {"block.wire": ("nf4",), "program.memory": ("tight limit",)},
        "what hooks make is in a memory plan after the first gather",
        error="MemoryLimitError",
    ),
    Rule(
        {"program.precision": (AS_GIVEN,), "block.double": (True,)},
        "the input of a block in float64 is not cast",
        error="same dtype",
    ),
    Rule(
        {**WRAPPED, "program.precision": CASTS, "block.double": (True,)},
        "FSDP1's class casts the inputs of the root only",
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
        {
            "micro.fails": _not_default("micro.fails"),
            "micro.evaluates": (True,),
            "micro.between": (("reference",), ("evaluate",), ("infer",), ("forward in vain",), ("another root",)),
            "second step": ("evaluate an average", "outer root", "another root"),
            "third step": ("outer root",),
            "step.after": ("evaluate", "infer", "evaluate an average", "copy the model"),
        },
        "autocast remembers what is cast, also without gradients, and later forwards read that",
    ),
    *_each(
        {"mesh": ("one rank",)},
        dict.fromkeys(MOMENTS, ("save and load", *SAVED_ALONE)),
        "each rank trains a model of its own, and a checkpoint holds one",
    ),
    *_each(
        {"mesh": ("experts",)},
        dict.fromkeys(MOMENTS, ("save and load safetensors", "save in the background")),
        "replicas train a block of their own, and a file holds one",
    ),
    Rule(
        {"program.memory": ("tight limit",), "micro.keep": (True,)},
        "the limit is what a step needs that reshards after backward",
        error="MemoryLimitError",
    ),
    *_each(
        {"program.ignored": (True,)},
        dict.fromkeys(MOMENTS, (*SAVED_ALONE, "to one rank and back")),
        "each rank trains a bias of its own, which only fsdp2 replaces by that of one rank",
    ),
    Rule(
        {"block.compiled": (True,), "micro.backwards": (2,)}, "a compiled graph takes one backward, if it keeps buffers"
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


def is_allowed(row: Row, name: str | None = None) -> bool:
    """Whether no rule forbids the values of ``row``, which may be those of some features only. ``name``: the only
    feature whose value has not been asked about before."""
    return not any(rule.forbids(row) for rule in (RULES if name is None else _ABOUT[name]))


def broken_rule(row: Row, chosen: Iterable[str]) -> Rule | None:
    """The first rule that forbids the complete ``row``, in which all but ``chosen`` have their defaults."""
    numbers = {number for name in chosen for number in _WITH_VALUE.get((name, row[name]), ())}
    return next((RULES[number] for number in sorted(numbers) if RULES[number].forbids(row)), None)


# By a feature and a value that is no default: the numbers of the rules with it. No rule has defaults only.
_WITH_VALUE: dict[tuple[str, Any], list[int]] = defaultdict(list)
for _number, _rule in enumerate(RULES):
    for _name, _values in _rule.combination.items():
        for _value in _values:
            if _value != _FEATURES.get(_name, ("cpu",))[0]:
                _WITH_VALUE[_name, _value].append(_number)
_ABOUT = {name: [rule for rule in RULES if name in rule.combination] for name in (*_FEATURES, "device")}


def is_for_torch(row: Row) -> bool:
    """Whether torch runs the values of ``row``, which may be those of some features only."""
    return not any(is_in(row, combination) for combination in BEYOND_TORCH)


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
    last = Micro(uses_side=micro.uses_side, marks_last=micro.marks_last)
    micros = (micro,) * (row["micros"] - 1) + (last,) if row["micros"] > 1 else (micro,)
    before = [(), *((row[name],) if row[name] else () for name in ("second step", "third step"))]
    steps = tuple(Step(each, micros, after) for each, after in zip(before, ("", row["step.after"], ""), strict=True))
    return Program(blocks=blocks, mesh=row["mesh"], steps=steps, **part["program"])


def _other(block: Block) -> Block:
    """A block next to ``block``; torch wants one dtype per unit, so it is of the same."""
    return Block(double=block.double)


def fields_without_feature() -> set[str]:
    """Fields of a part of a program that are neither features nor excused."""
    names = {f"{part}.{each.name}" for part, cls in PARTS.items() for each in fields(cls)}
    return names - set(_FEATURES) - set(NOT_FEATURES)
