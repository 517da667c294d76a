"""A plan: the choices that were compared, as text, as plain data and as code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch

from fsdp2.core import DOCS
from fsdp2.extras.output import aligned
from fsdp2.extras.sizes import text_of, unit_of
from fsdp2.memory.plan import Held
from fsdp2.planner.blocks import Units
from fsdp2.planner.code import code_for
from fsdp2.planner.groups import shard_dim
from fsdp2.planner.machine import Machine
from fsdp2.planner.scenario import Choice, Precision, Result
from fsdp2.planner.workload import Workload

_NUM_BEST = 10  # rows of the table, besides the recommended one and the smallest
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_NOT_PLANNED = (
    "Tensor and context parallelism cut more than FSDP does: see --tensor-parallel and --context-parallel, and "
    f"{DOCS}/guide/meshes.md#tensor-parallelism."
)
_HOST_UNKNOWN = "whose size is not known: pass --host-memory, or Machine(host_memory_nbytes=...)"


@dataclass(frozen=True)
class Candidate:
    """One way to shard, and its cost; all figures are per GPU.

    Attributes:
        choice: the way to shard.
        result: step time and peak memory.
        budget_nbytes: the memory that may be used.
        host_budget_nbytes: the host memory of a node that may be used; None where it is not known.
    """

    choice: Choice
    result: Result
    budget_nbytes: int
    host_budget_nbytes: int | None = None

    @property
    def fits(self) -> bool:
        return self.result.reserved_nbytes <= self.budget_nbytes and not self.host_missing_nbytes

    @property
    def may_fit(self) -> bool:
        """Whether what is held fits. The allocator usually reserves more, but gives it back if memory runs out."""
        return not self.missing_nbytes and not self.host_missing_nbytes

    @property
    def missing_nbytes(self) -> int:
        """The memory that is missing on a GPU for what is held."""
        return max(0, int(self.result.peak_nbytes) - self.budget_nbytes)

    @property
    def host_missing_nbytes(self) -> int:
        """The host memory that is missing on a node."""
        return 0 if self.host_budget_nbytes is None else max(0, int(self.result.host_nbytes) - self.host_budget_nbytes)


@dataclass(frozen=True)
class Plan:
    """The result of :func:`plan`; ``str()`` shows a table.

    Attributes:
        model: the name of the model's class.
        num_params: elements of all parameters.
        units: the modules that get their own ``fully_shard`` call.
        shapes: the shapes of its parameters.
        choices: all ways that were considered: those that fit first, by speed. The time of those that offload is not
            known, so they come after the others.
        recommended: the simplest of those that fit and are about as fast as the fastest; None if none fits.
        enough_gpus: if none fits, the number of GPUs on which FSDP would, without offloading; None if there is none.
        enough: if none fits, the largest batch with which one would, or, with a batch of 1, the longest sequences, up
            to 1%; None if there is neither.
        caches: paths of modules whose config has ``use_cache``, as in Hugging Face: ``code`` switches it off.
        scores_nbytes: what the scores of attention that is not fused take of the activations, without checkpointing.
        left_nbytes: what a forward leaves on a GPU until the step ends, in caches that the workload's inputs ask for,
            or in attributes of modules. It counts as activations.
        has_initializer: it has ``initialize_weights``, as in transformers: ``code`` calls it before it loads weights.
        built_in, sharded_in: the dtypes of trained parameters, as the model is built, and of their shards.
        host_budget_nbytes: the host memory of a node that may be used; None where it is not known.
        num_samples: those of a micro-batch of a model that takes no tokens; None if it does.
    """

    model: str
    num_params: int
    units: Units
    shapes: frozenset[tuple[int, ...]]
    machine: Machine
    num_gpus: int
    workload: Workload
    budget_nbytes: int
    choices: tuple[Candidate, ...]
    recommended: Candidate | None
    enough_gpus: int | None = None
    enough: Workload | None = None
    caches: tuple[str, ...] = ()
    left_nbytes: float = 0.0
    scores_nbytes: float = 0.0
    has_initializer: bool = False
    built_in: tuple[torch.dtype, ...] = ()
    sharded_in: tuple[torch.dtype, ...] = ()
    host_budget_nbytes: int | None = None
    num_samples: int | None = None

    @cached_property
    def smallest(self) -> Candidate:
        """The choice that needs least GPU memory, of those that may be recommended and fit into host memory."""
        allowed = [each for each in self.choices if each.choice.is_exact]
        return min(allowed, key=lambda each: (each.host_missing_nbytes > 0, each.result.peak_nbytes))

    @property
    def counted(self) -> str:
        """What the rate counts: "tokens" or "samples"."""
        return "tokens" if self.num_samples is None else "samples"

    @property
    def code(self) -> str:
        """Python that shards the model in the recommended way.

        Raises:
            ValueError: nothing fits; the message says by how much.
        """
        if self.recommended is None:
            raise ValueError(self.why_nothing_fits())
        choice = self.recommended.choice
        num_shards = choice.shard_size or self.num_gpus // self.workload.tensor_parallel
        return code_for(
            self.units,
            choice,
            self.machine,
            self.workload,
            cuts_other_dims=any(shard_dim(shape, num_shards) > 0 for shape in self.shapes),
            caches=self.caches,
            has_initializer=self.has_initializer,
            master_dtype=self.sharded_in[0] if self.built_in != self.sharded_in else None,
        )

    @property
    def warnings(self) -> list[str]:
        """Reasons why the figures are worse than they look, one line each; ``str()`` shows them, too."""
        machine, num_gpus, node = self.machine, self.num_gpus, self.machine.node_size
        found = []
        if num_gpus > node and num_gpus % node:
            found.append(
                f"{num_gpus} GPUs are no whole number of nodes of {node}: the last node is filled in part, and has "
                "fewer network adapters than is assumed here. If your nodes have another size, pass --node-size, or "
                "Machine(node_size=...)."
            )
        if num_gpus > node and machine.in_node == machine.network:
            found.append(
                f"'{machine.name}' has one rate for links in a node and between nodes. Measure on two nodes: torchrun "
                "--nnodes 2 --nproc-per-node 8 ... -m fsdp2 measure FILE. "
                f"See {DOCS}/guide/planning.md#measure-your-machine."
            )
        if torch.bfloat16 in self.sharded_in:
            found.append(
                "shards, gradients and the optimizer's states are in bf16: there are no master weights in fp32. For "
                "these, pass --master-dtype fp32, or Workload(master_dtype='fp32')."
            )
        if self.scores_nbytes:
            found.append(
                f"eager attention: its scores take {text_of(self.scores_nbytes)} of the activations, without "
                "checkpointing. Call scaled_dot_product_attention, which keeps none; in transformers, "
                "attn_implementation='sdpa'."
            )
        if self.left_nbytes:
            found.append(
                f"the forward leaves {text_of(self.left_nbytes)} on each GPU until the step ends, in a cache of keys "
                "and values that Workload.inputs ask for, or in attributes of modules. Training needs no cache: leave "
                "use_cache=True out of the inputs, and do not keep tensors in attributes."
            )
        return found

    @property
    def data(self) -> dict[str, Any]:
        """The whole plan as plain data for JSON: bytes and seconds; ``choices`` in order, ``recommended`` by name."""
        workload = self.workload
        names = [field.name for field in fields(workload) if field.name not in ("inputs", "loss")]
        return {
            "model": self.model,
            "num_params": self.num_params,
            "units": [*self.units.block_paths, *self.units.large],
            "machine": self.machine.name,
            "num_gpus": self.num_gpus,
            "node_size": self.machine.node_size,
            "workload": {name: getattr(workload, name) for name in names},
            "num_samples": self.num_samples,
            "sharded_in": _dtypes(self.sharded_in),
            "budget_nbytes": self.budget_nbytes,
            "host_budget_nbytes": self.host_budget_nbytes,
            "warnings": self.warnings,
            "recommended": None if self.recommended is None else self.recommended.choice.name,
            "why_nothing_fits": None if self.recommended is not None else self.why_nothing_fits(),
            "code": None if self.recommended is None else self.code,
            "choices": [_choice_data(each, self.counted) for each in self.choices],
        }

    def why_nothing_fits(self) -> str:
        """How much the smallest choice is too large, and what would fit."""
        smallest, workload = self.smallest, self.workload
        activations = smallest.result.memory[Held.SAVED]
        remedies = []
        if self.enough is not None and self.enough.sequence == workload.sequence:
            remedies.append(f"a batch of {self.enough.batch} per GPU")
        elif self.enough is not None:
            batch = "a batch of 1 per GPU and " if workload.batch > 1 else ""
            remedies.append(f"{batch}sequences of {self.enough.sequence} tokens")
        if self.enough_gpus is not None:
            remedies.append(f"FSDP over {self.enough_gpus} GPUs")
        said = [
            f"nothing fits into {text_of(self.budget_nbytes)}: the smallest choice, {smallest.choice.name}, holds "
            f"{text_of(smallest.result.peak_nbytes)}, {text_of(smallest.missing_nbytes)} too much.",
            f"Activations take {text_of(activations)} of it.",
        ]
        if smallest.choice.offloads:
            said.append(f"It takes {_of_host(smallest)}.")
        said += [
            f"{each.choice.name} holds {text_of(each.result.peak_nbytes)}, but {_of_host(each)}, "
            f"{text_of(each.host_missing_nbytes)} too much."
            for each in self.choices
            if each.host_missing_nbytes and not each.missing_nbytes
        ][:1]
        return " ".join([*said, f"Use {', or '.join(remedies) or 'GPUs with more memory'}.", _NOT_PLANNED])

    def __str__(self) -> str:
        if self.recommended is None:
            verdict = self.why_nothing_fits()
        else:
            verdict = f"recommended: {self.recommended.choice.name}"
            verdict += f"; it takes {_of_host(self.recommended)}" if self.recommended.choice.offloads else ""
            if not self.recommended.fits:
                verdict += (
                    f"; tight: {text_of(self.recommended.result.peak_nbytes)} are held, and the allocator would "
                    f"reserve {text_of(self.recommended.result.reserved_nbytes)} if it could"
                )
        warnings = [f"warning: {each}" for each in self.warnings]
        lines = table(_shown(self), self.recommended, self.workload.precision, self.counted)
        return "\n".join([*_head(self), *warnings, "", *lines, "", verdict])


def _of_host(candidate: Candidate) -> str:
    nbytes, budget = text_of(candidate.result.host_nbytes), candidate.host_budget_nbytes
    known = _HOST_UNKNOWN if budget is None else f"of which {text_of(budget)} may be used"
    return f"{nbytes} of the host's memory of a node, {known}"


def _head(plan: Plan) -> list[str]:
    stacks = [f"{len(stack.names)} blocks in {stack.path or 'the model'}" for stack in plan.units.stacks]
    unit, _ = _memory_unit(_shown(plan))
    host = plan.host_budget_nbytes
    return [
        f"{plan.model}: {_count(plan.num_params)} parameters; units: {', '.join([*stacks, *plan.units.large])}; "
        "all else with the model",
        f"{plan.num_gpus} x {plan.machine.name}; {plan.workload.text(plan.num_samples)}",
        f"shards, gradients and optimizer in {_dtypes(plan.sharded_in)}"
        + (f"; the model is built in {_dtypes(plan.built_in)}" if plan.built_in != plan.sharded_in else ""),
        f"budget: {text_of(plan.budget_nbytes)} of {text_of(plan.machine.memory_nbytes)}"
        + (f", {text_of(host)} of a node's host" if host is not None else "")
        + f"; below: {unit} of one GPU at the peak; host: of a node",
    ]


def _dtypes(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(_DTYPES.get(each, str(each).removeprefix("torch.")) for each in dtypes) or "no dtype"


def _shown(plan: Plan) -> list[Candidate]:
    """The best ones, the recommended one, and the smallest."""
    shown = [*plan.choices[:_NUM_BEST], plan.smallest]
    if plan.recommended is not None:
        shown.append(plan.recommended)
    return [each for each in plan.choices if any(each is other for other in shown)]


# The table


def table(
    candidates: list[Candidate], recommended: Candidate | None, precision: str, counted: str = "tokens"
) -> list[str]:
    """The lines of the table, with peak memory of one GPU and step time. Each has one unit for all rows; memory that
    would round to 0.0 has its own."""
    _, factor = _memory_unit(candidates)
    gathered = precision if precision == Precision.FP32.value else Precision.BF16.value
    longest = max(each.result.time.step for each in candidates)
    time_unit, per_second = ("s", 1) if longest >= 1 else ("ms", 1000)
    # Four digits of the longest step: enough to tell choices apart, and more than a prediction knows.
    decimals = min(max(3 - math.floor(math.log10(longest * per_second)), 0), 3) if longest else 3

    def size(nbytes: float) -> str:
        return f"{nbytes / factor:.1f}" if nbytes == 0 or nbytes >= 0.05 * factor else text_of(nbytes)

    def row(each: Candidate) -> dict[str, str]:
        choice, result = each.choice, each.result
        return {
            "  shards": f"{'*' if each is recommended else ' '} {choice.sharding}",
            "after forward": choice.between_passes,
            "checkpointing": choice.checkpointing.value,
            "gathers": gathered if choice.is_exact else choice.wire.value,
            "shards in": "host" if choice.offloads else "GPU",
            **{name: size(nbytes) for name, nbytes in _held(each).items()},
            "host": size(result.host_nbytes) if choice.offloads else "-",
            # The optimizer's time on the host is added.
            f"step {time_unit}": f"{'>' if choice.offloads else ''}{result.time.step * per_second:.{decimals}f}",
            f"exposed {time_unit}": f"{result.time.exposed * per_second:.{decimals}f}",
            f"{counted}/s": f"{'<' if choice.offloads else ''}{_rate(result.tokens_per_second)}",
            "fits": _fits(each, size),
        }

    cells = [row(each) for each in candidates]
    rows = [[*cells[0]], *([*each.values()] for each in cells)]
    return aligned(rows, num_left=5).splitlines()


def _rate(per_second: float) -> str:
    return f"{per_second:.0f}" if per_second >= 100 else f"{per_second:.3g}"


def _held(candidate: Candidate) -> dict[str, float]:
    """Bytes of one GPU by purpose."""
    result = candidate.result
    return {
        "params": result.params_nbytes,
        "buffers": result.buffers_nbytes,
        "grads": result.grads_nbytes + result.memory[Held.GRADIENTS] + result.memory[Held.REDUCTION],
        "optimizer": result.optimizer_nbytes,
        "activations": result.memory[Held.SAVED],
        "unsharded": result.memory[Held.PARAMETERS],
        "reserved": result.reserved_nbytes,
    }


def _fits(candidate: Candidate, size: Callable[[float], str]) -> str:
    if candidate.may_fit:
        return "yes" if candidate.fits else "tight"
    over = [f"{size(candidate.missing_nbytes)} over"] if candidate.missing_nbytes else []
    if candidate.host_missing_nbytes:
        over.append(f"host {size(candidate.host_missing_nbytes)} over")
    return ", ".join(["no", *over])


def _memory_unit(candidates: list[Candidate]) -> tuple[str, int]:
    return unit_of(max(each.result.reserved_nbytes for each in candidates))


def _count(number: int) -> str:
    """ "8.03B", "1.20M", or all digits."""
    return next((f"{number / one:.2f}{name}" for one, name in ((1e9, "B"), (1e6, "M")) if number >= one), str(number))


def _choice_data(candidate: Candidate, counted: str) -> dict[str, Any]:
    """``step_s`` lacks the optimizer's time if it ``offloads``. ``counted``: tokens or samples."""
    choice, result = candidate.choice, candidate.result
    return {
        "name": choice.name,
        "shard_size": choice.shard_size,
        "after_forward": choice.between_passes,
        "checkpointing": choice.checkpointing.value,
        "gathers": choice.wire.value,
        "offloads": choice.offloads,
        "fits": candidate.fits,
        "may_fit": candidate.may_fit,
        **{f"{name}_nbytes": nbytes for name, nbytes in _held(candidate).items()},
        "host_nbytes": result.host_nbytes,
        "step_s": result.time.step,
        "exposed_s": result.time.exposed,
        f"{counted}_per_second": result.tokens_per_second,
    }
