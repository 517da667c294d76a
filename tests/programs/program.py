"""A training program as plain data, and how one is drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

KINDS = ("mlp", "attention", "norms", "side", "odd", "itself")
DTYPES = ("bfloat16", "float32")
WIRES = ("bf16", "halved", "scaled")


@dataclass(frozen=True)
class Block:
    """One block of the model."""

    kind: str = "mlp"  # what it computes: see source._BLOCKS
    uses: int = 1  # how often a forward calls it
    checkpoint: str = ""  # or how its activations are checkpointed: one of CHECKPOINTS
    alone: bool = True  # it is a unit of its own; else a part of the next unit around it
    inner: bool = False  # its first submodule is a unit, too
    reshard: bool | int | None = None  # reshard_after_forward
    skipped: tuple[int, ...] = ()  # steps in which no rank calls it
    left_out: tuple[int, ...] = ()  # steps in which ranks with odd numbers do not call it: torch would hang
    detached: bool = False  # what it computes is used, but gradients do not flow into it
    double: bool = False  # it computes in float64, between blocks in float32
    frozen: bool = False  # its first parameter needs no gradient
    wire: str = ""  # its matrices decide how they travel: one of WIRES
    compiled: bool = False  # with torch.compile, backend "aot_eager"


@dataclass(frozen=True)
class Precision:
    """``MixedPrecisionPolicy``; names of dtypes. ``output`` is the root's."""

    param: str | None = None
    reduce: str | None = None
    output: str | None = None
    casts_inputs: bool = True


@dataclass(frozen=True)
class Micro:
    """One micro-batch: what is set before it, its forwards, and its backward."""

    sync: str = "all"  # what its backward communicates: "all", "no all-reduce", "no reduction"
    keep: bool = False  # parameters stay unsharded after backward
    by_hand: str = ""  # before forward: "unshard", "unshard async", "reshard"
    evaluates: bool = False  # a forward without gradients comes first
    fails: bool = False  # a forward that raises comes first (fsdp2 only: torch has no call to recover by)
    forwards: int = 1  # whose losses are one sum
    backwards: int = 1  # of one graph
    marks_last: bool = False  # set_is_last_backward says whether more micro-batches follow
    uses_side: bool = True  # blocks of kind "side" use all their parameters
    between: tuple[str, ...] = ()  # what happens between the forwards and the backwards, of BETWEEN
    in_thread: bool = False  # the backward runs in another thread


@dataclass(frozen=True)
class Step:
    """``before``: what happens first, of ``BEFORE``."""

    before: tuple[str, ...] = ()
    micros: tuple[Micro, ...] = (Micro(),)


BEFORE = (
    *("load state dict", "load full state dict", "load optimizer state", "copy the model", "freeze", "thaw"),
    *("reshard after forward", "keep after forward", "reset", "write whole parameters", "save and load"),
)
# tests/programs/passes.py has more of this kind, and other ways.
BETWEEN = ("reference", "freeze", "thaw", "evaluate", "state dict")


@dataclass(frozen=True)
class Program:
    """Defaults are the simplest choice: what a failing program does not need is shrunk to them."""

    blocks: tuple[Block, ...] = (Block(),)
    mesh: str = "fsdp"  # or "hsdp", "one replica", "one rank", "tp" (FSDP x TP), "experts" (block 0 on its own mesh)
    dim: int = 8  # width of the model; 10 is cut unevenly by 4 ranks
    tied: bool = False  # the last layer has the weight of the first
    listed: bool = False  # the last two blocks are one unit
    buffer: bool = False  # the model counts its forwards in a buffer
    scalar: bool = False  # the model has a parameter without dims, which torch refuses
    covered: bool = False  # the first and last layer are units, so the root has no parameters
    force_sum: bool = False  # gradients are summed, and divided beside the reduction
    reduces_unused: bool = False  # parameters that no rank used get gradients of zero
    placement_dim: int = 0  # of the tensors with so many dims, the dim that is cut
    ignored: bool = False  # the root's bias is left alone
    precision: Precision = field(default_factory=Precision)
    offload: bool = False
    prefetch: bool = False
    divide_factor: float | None = None
    root_reshard: bool | int | None = None  # reshard_after_forward of the root
    optimizer: str = "SGD"
    clip_norm: float | None = None
    set_to_none: bool = True
    way: str = "fully_shard"  # or "install": fsdp2 by torch's names
    autocast: str = ""  # or what runs under autocast to bfloat16: "forward", "step"
    saved_tensors: str = ""  # or the saved-tensor hooks around forwards: one of SAVED_TENSORS
    scaled: bool = False  # GradScaler scales the losses, and divides the gradients at the end of the step
    memory: str = ""  # or how fsdp2 keeps memory small: one of MEMORY
    steps: tuple[Step, ...] = (Step(),)

    @property
    def ranks_differ(self) -> bool:
        """Whether ranks use different units: torch's runtime would hang."""
        return any(block.left_out for block in self.blocks)

    def runs_on(self, device: str) -> bool:
        """Whether ``device`` can run it; the reasons are in ``features.RULES``."""
        has_hooks = any(block.wire for block in self.blocks)
        return device == "cpu" or not (self.autocast or (self.offload and (self.scaled or has_hooks)))


CHECKPOINTS = ("reentrant", "not reentrant", "selective")
SAVED_TENSORS = ("kept", "copied")
MEMORY = ("large limit", "tight limit", "budget")
OPTIMIZERS = ("SGD", "momentum", "AdamW", "AdamW foreach", "AdamW fused", "AdamW one by one")


def draw(seed: int, world_size: int) -> Program:
    """A program that makes sense; whether torch takes it is another matter."""
    pick = random.Random(1_000_003 * world_size + seed)

    def rarely(share: float) -> bool:
        return pick.random() < share

    meshes = ["fsdp", "fsdp", "fsdp", "hsdp", "hsdp", "one replica", "one rank", "tp"]
    mesh = pick.choice([*meshes, "experts"] if world_size == 4 else meshes)
    reshards: list[bool | int | None] = [None, None, True, False]
    if mesh == "fsdp" and world_size == 4:
        reshards.append(2)
    num_steps = pick.choice([2, 2, 3])
    is_low = rarely(0.35)
    precision = Precision()
    if is_low:
        param = pick.choice([None, "bfloat16", "bfloat16"])
        reduce, output = pick.choice([None, *DTYPES]), pick.choice([None, None, *DTYPES])
        precision = Precision(param, reduce, output, casts_inputs=param is not None or not rarely(0.2))
    compiles, hooks = rarely(0.01), rarely(0.06) and mesh != "tp"
    placement_dim = 1 if rarely(0.15) else 0
    wires = WIRES if placement_dim == 0 else WIRES[:2]  # "scaled" has a scale per row
    ranks_differ = rarely(0.05) and mesh not in ("tp", "experts", "one rank") and not hooks
    one_raises = compiles and ranks_differ  # a compiled block takes one backward, and refuses on the ranks that use it
    blocks = tuple(
        Block(
            # No rank may use a unit more often than others, nor a unit inside of one that calls itself.
            kind="mlp" if mesh == "tp" else pick.choice(KINDS[:-1] if leaves_out else KINDS),
            uses=2 if rarely(0.12) and not leaves_out else 1,
            checkpoint=pick.choice(CHECKPOINTS) if rarely(0.2) else "",
            alone=not rarely(0.2),
            inner=rarely(0.1) and mesh != "tp",
            reshard=pick.choice(reshards),
            skipped=(pick.randrange(num_steps),) if rarely(0.12) else (),
            left_out=(pick.randrange(num_steps),) if leaves_out else (),
            detached=rarely(0.06),
            double=rarely(0.06) and not hooks and mesh != "tp" and not one_raises,
            frozen=rarely(0.12),
            wire=pick.choice(wires) if hooks and rarely(0.7) else "",
            compiled=compiles,
        )
        for leaves_out in [ranks_differ and rarely(0.7) for _ in range(pick.choice([1, 2, 2, 3]))]
    )
    # Where ranks differ, torch does not run: nobody else would refuse it.
    one_backward = one_raises or (ranks_differ and any(block.checkpoint == "selective" for block in blocks))
    # A rank runs all modules of a unit, or none: see docs/advanced/ranks.md
    is_whole = len({each.left_out for each in blocks[-2:]}) == 1
    may_list = not ranks_differ or (is_whole and all(each.checkpoint != "reentrant" for each in blocks[-2:]))
    steps = []
    for index in range(num_steps):
        num_micros = pick.choice([1, 1, 1, 2, 3])
        micros = []
        uses_side = not rarely(0.3)
        for micro in range(num_micros):
            is_last = micro == num_micros - 1
            micros.append(
                Micro(
                    sync="all" if is_last else pick.choice(["all", "no all-reduce", "no reduction", "no reduction"]),
                    keep=not is_last and rarely(0.3),
                    by_hand=pick.choice(["unshard", "unshard async", "reshard"]) if rarely(0.25) else "",
                    evaluates=rarely(0.12),
                    fails=rarely(0.05) and not ranks_differ,  # see docs/advanced/ranks.md, for two forwards, too
                    forwards=2 if rarely(0.1) and not ranks_differ else 1,
                    backwards=2 if rarely(0.05) and not one_backward else 1,
                    marks_last=rarely(0.1),
                    uses_side=uses_side,
                    between=tuple(pick.sample(BETWEEN, pick.choice([1, 2]))) if rarely(0.02) and not compiles else (),
                )
            )
        before = tuple(pick.sample(BEFORE, pick.choice([1, 1, 2]))) if index and rarely(0.35) else ()
        if mesh == "one rank":  # each rank trains a model of its own, and a checkpoint holds one
            before = tuple(each for each in before if each != "save and load")
        steps.append(Step(before, tuple(micros)))
    ignored = rarely(0.1) and precision.param is None and not ranks_differ  # it keeps its dtype
    clips = mesh not in ("tp", "experts") and not ignored  # torch clips on one mesh only
    optimizers = ["SGD", "momentum", "AdamW one by one"] if ignored else OPTIMIZERS  # others take no mix with DTensors
    program = Program(
        blocks=blocks,
        mesh=mesh,
        dim=pick.choice([8, 8, 10]) if mesh != "tp" else 8,
        tied=rarely(0.15),
        listed=len(blocks) > 1 and rarely(0.12) and mesh != "experts" and may_list,
        buffer=rarely(0.15),
        scalar=rarely(0.04),
        force_sum=rarely(0.06),
        reduces_unused=rarely(0.08) and not ranks_differ,
        placement_dim=placement_dim,
        ignored=ignored,
        precision=precision,
        offload=rarely(0.15),
        prefetch=rarely(0.2),
        divide_factor=pick.choice([None, None, None, float(world_size), 1.0])
        if mesh == "fsdp" and not ranks_differ
        else None,
        root_reshard=pick.choice(reshards),
        optimizer=pick.choice(["SGD", "momentum"]) if is_low else pick.choice(optimizers),
        clip_norm=0.05 if clips and rarely(0.25) else None,
        set_to_none=not rarely(0.25),
        steps=tuple(steps),
    )
    may_cover = not (program.tied or program.ignored or program.scalar)
    program = replace(program, covered=may_cover and rarely(0.3))
    return _with_surroundings(program, pick)


def _with_surroundings(program: Program, pick: random.Random) -> Program:
    """What is around the step, now and then. A tight limit would refuse what holds more than a step must."""
    if pick.random() < 0.8:
        return program
    micros = [micro for step in program.steps for micro in step.micros]
    remembers = any(micro.evaluates or {"reference", "evaluate"} & set(micro.between) for micro in micros)
    may_cast = program.optimizer in ("SGD", "momentum") and not any(block.double for block in program.blocks)
    return replace(
        program,
        way=pick.choice(["fully_shard", "install"]),
        autocast=pick.choice(["", "forward", "forward" if remembers else "step"]) if may_cast else "",
        saved_tensors=pick.choice(["", *SAVED_TENSORS]),
        scaled=pick.random() < 0.3 and not program.ignored,
        memory=pick.choice(["", "large limit", "budget"]),
        steps=tuple(_in_threads(step, pick) for step in program.steps),
    )


def _in_threads(step: Step, pick: random.Random) -> Step:
    return replace(step, micros=tuple(replace(micro, in_thread=pick.random() < 0.3) for micro in step.micros))
