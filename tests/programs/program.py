"""A training program as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.programs import operations

KINDS = ("mlp", "attention", "norms", "side", "odd", "adapters", "itself")
WIRES = tuple(operations.WIRES)


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
    """``MixedPrecisionPolicy``; names of dtypes. ``output`` is the root's. ``wire``: of gradients; "int8" keeps what it
    loses for the next step."""

    param: str | None = None
    reduce: str | None = None
    output: str | None = None
    casts_inputs: bool = True
    wire: str | None = None


@dataclass(frozen=True)
class Micro:
    """One micro-batch: what is set before it, its forwards, and its backward."""

    sync: str = "all"  # what its backward communicates: "all", "no all-reduce", "no reduction", or "no_sync" (that)
    keep: bool = False  # parameters stay unsharded after backward
    by_hand: str = ""  # before forward: "unshard", "unshard async", "reshard"
    evaluates: bool = False  # a forward without gradients comes first
    fails: str = ""  # or what raises in a pass that comes first: one of FAILS
    refused: str = ""  # or what is tried, and refused with an error: one of REFUSED
    called: str = ""  # or how forwards call the model: one of CALLED
    forwards: int = 1  # whose losses are one sum
    apart: bool = False  # two forwards, of which each has its own backward, the last one first
    backwards: int = 1  # of one graph
    marks_last: bool = False  # set_is_last_backward says whether more micro-batches follow
    uses_side: bool = True  # blocks of kind "side" use all their parameters
    between: tuple[str, ...] = ()  # what happens between the forwards and the backwards, of BETWEEN
    in_thread: bool = False  # the backward runs in another thread


@dataclass(frozen=True)
class Step:
    """``before``: what happens first, of ``BEFORE``; ``after``: what, of ``AFTER``, when all gradients are there."""

    before: tuple[str, ...] = ()
    micros: tuple[Micro, ...] = (Micro(),)
    after: str = ""


BEFORE, BETWEEN, AFTER = tuple(operations.BEFORE), tuple(operations.BETWEEN), tuple(operations.AFTER)


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
    clips_by: str = "torch"  # or "fsdp2"
    set_to_none: bool = True
    way: str = "fully_shard"  # or another of WAYS
    autocast: str = ""  # or what runs under autocast to bfloat16: "forward", "step"
    watched: str = ""  # or what runs under a dispatch mode that changes nothing: "forward", "step"
    compiled: bool = False  # the model, with backend "aot_eager"
    setting: str = ""  # or what fsdp2 does besides: one of SETTINGS
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


WAYS = ("fully_shard", "install", "FSDP1")  # the second: fsdp2 by torch's names; the third: wrappers of FSDP1's class
FAILS, CALLED, REFUSED = tuple(operations.FAILS), tuple(operations.CALLED), tuple(operations.REFUSED)
SETTINGS = (*operations.SETTINGS, *operations.CONTEXTS)
# Optimizers that begin their step in the last backward, or take its gradients there.
ON_HOST = ("AdamW on the host", "AdamW on the host, overlapped")
STEP_IN_BACKWARD = (*ON_HOST, "Muon in backward")
CHECKPOINTS, SAVED_TENSORS = tuple(operations.CHECKPOINTS), tuple(operations.SAVED_TENSORS)
MEMORY, OPTIMIZERS = tuple(operations.MEMORY), tuple(operations.OPTIMIZERS)
