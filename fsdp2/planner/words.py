"""A plan as text: its table, why nothing fits, and warnings; and the same as plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fsdp2.core.schedule.schedule import AfterForward
from fsdp2.core.types import DOCS
from fsdp2.extras.sizes import text_of, unit_of
from fsdp2.planner.groups import Wire
from fsdp2.planner.memory import Held
from fsdp2.planner.scenario import Choice
from fsdp2.planner.work import Checkpointing

if TYPE_CHECKING:
    from fsdp2.planner.candidates import Candidate, Plan

_NUM_BEST = 10  # rows of the table, besides the recommended one and the smallest
_AFTER = {
    AfterForward.RESHARD: "reshard",
    AfterForward.KEEP: "keep",
    AfterForward.RESHARD_TO_SMALLER_MESH: "reshard to node",
}
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_NOT_PLANNED = (
    "Tensor, pipeline and context parallelism cut more than FSDP does, and are not planned: see "
    f"{DOCS}/guide/meshes.md#tensor-parallelism."
)
_HOST_UNKNOWN = "whose size is not known: pass --host-memory, or Machine(host_memory_nbytes=...)"


# Names of choices


def named(choice: Choice) -> Choice:
    """``choice`` with a name that describes it completely."""
    parts = [sharding(choice), after_forward(choice)]
    if choice.checkpointing is not Checkpointing.NONE:
        parts.append(f"{choice.checkpointing.value} checkpointing")
    if choice.wire is Wire.FP8:
        parts.append("fp8 gathers")
    if choice.offloads:
        parts.append("offload")
    return replace(choice, name=", ".join(parts))


def sharding(choice: Choice) -> str:
    return f"HSDP {choice.shard_size}" if choice.shard_size else "FSDP"


def after_forward(choice: Choice) -> str:
    return f"keep last {choice.num_kept}" if choice.num_kept else _AFTER[choice.after_forward]


# A plan


def text_of_plan(plan: Plan) -> str:
    """The whole text of ``print(plan)``."""
    head = [*_head(plan), *(f"warning: {each}" for each in warnings(plan))]
    return "\n".join([*head, "", *table(_shown(plan), plan.recommended, plan.workload.precision), "", _verdict(plan)])


def warnings(plan: Plan) -> list[str]:
    """Reasons why the figures of ``plan`` are worse than they look."""
    machine, num_gpus, node = plan.machine, plan.num_gpus, plan.machine.node_size
    found = []
    if num_gpus > node and num_gpus % node:
        found.append(
            f"{num_gpus} GPUs are no whole number of nodes of {node}: the last node is filled in part, and has fewer "
            "network adapters than is assumed here. If your nodes have another size, pass --node-size, or "
            "Machine(node_size=...)."
        )
    if num_gpus > node and machine.in_node == machine.network:
        found.append(
            f"'{machine.name}' has one rate for links in a node and between nodes. Measure on two nodes: torchrun "
            "--nnodes 2 --nproc-per-node 8 ... -m fsdp2 measure FILE. "
            f"See {DOCS}/guide/planning.md#measure-your-machine."
        )
    if torch.bfloat16 in plan.sharded_in:
        found.append(
            "shards, gradients and the optimizer's states are in bf16: there are no master weights in fp32. For these, "
            "pass --master-dtype fp32, or Workload(master_dtype='fp32')."
        )
    if plan.left_nbytes:
        found.append(
            f"the forward leaves {text_of(plan.left_nbytes)} on each GPU until the step ends, in a cache of keys and "
            "values that Workload.inputs ask for, or in attributes of modules. Training needs no cache: leave "
            "use_cache=True out of the inputs, and do not keep tensors in attributes."
        )
    return found


def why_nothing_fits(plan: Plan) -> str:
    """How much the smallest choice is too large, and what would fit."""
    smallest, workload = plan.smallest, plan.workload
    activations = smallest.result.memory[Held.ACTIVATIONS]
    remedies = []
    if plan.enough is not None and plan.enough.sequence == workload.sequence:
        remedies.append(f"a batch of {plan.enough.batch} per GPU")
    elif plan.enough is not None:
        batch = "a batch of 1 per GPU and " if workload.batch > 1 else ""
        remedies.append(f"{batch}sequences of {plan.enough.sequence} tokens")
    if plan.enough_gpus is not None:
        remedies.append(f"FSDP over {plan.enough_gpus} GPUs")
    said = [
        f"nothing fits into {text_of(plan.budget_nbytes)}: the smallest choice, {smallest.choice.name}, takes "
        f"{text_of(smallest.result.reserved_nbytes)}, {text_of(smallest.missing_nbytes)} too much.",
        f"Activations take {text_of(activations)} of it.",
    ]
    if smallest.choice.offloads:
        said.append(f"It takes {_of_host(smallest)}.")
    said += [
        f"{each.choice.name} takes {text_of(each.result.reserved_nbytes)}, but {_of_host(each)}, "
        f"{text_of(each.host_missing_nbytes)} too much."
        for each in plan.choices
        if each.host_missing_nbytes and not each.missing_nbytes
    ][:1]
    return " ".join([*said, f"Use {', or '.join(remedies) or 'GPUs with more memory'}.", _NOT_PLANNED])


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
        f"{plan.num_gpus} x {plan.machine.name}; {plan.workload}",
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


def _verdict(plan: Plan) -> str:
    if plan.recommended is None:
        return why_nothing_fits(plan)
    host = f"; it takes {_of_host(plan.recommended)}" if plan.recommended.choice.offloads else ""
    return f"recommended: {plan.recommended.choice.name}{host}"


# The table


def table(candidates: list[Candidate], recommended: Candidate | None, precision: str) -> list[str]:
    """The lines of the table, with peak memory of one GPU and step time. Each has one unit for all rows."""
    _, factor = _memory_unit(candidates)
    time_unit, per_second = ("s", 1) if max(each.result.time.step for each in candidates) >= 1 else ("ms", 1000)

    def size(nbytes: float) -> str:
        return f"{nbytes / factor:.1f}"

    def duration(seconds: float) -> str:
        return f"{seconds * per_second:.3f}"

    columns = (
        "  shards|after forward|checkpointing|gathers|shards in|params|buffers|grads|optimizer|activations|unsharded|"
        "reserved|host"
    )
    rows: list[tuple[str, ...]] = [
        (*columns.split("|"), f"step {time_unit}", f"exposed {time_unit}", "tokens/s", "fits")
    ]
    for each in candidates:
        choice, result = each.choice, each.result
        at_least = ">" if choice.offloads else ""  # the optimizer's time on the host is added
        rows.append(
            (
                f"{'*' if each is recommended else ' '} {sharding(choice)}",
                after_forward(choice),
                choice.checkpointing.value,
                precision if choice.wire is Wire.BF16 else choice.wire.value,
                "host" if choice.offloads else "GPU",
                *map(size, _held(each).values()),
                size(result.host_nbytes) if choice.offloads else "-",
                f"{at_least}{duration(result.time.step)}",
                duration(result.time.exposed),
                f"{'<' if choice.offloads else ''}{result.tokens_per_second:.0f}",
                _fits(each, size),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < 5 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _held(candidate: Candidate) -> dict[str, float]:
    """Bytes of one GPU by purpose."""
    result = candidate.result
    return {
        "params": result.params_nbytes,
        "buffers": result.buffers_nbytes,
        "grads": result.grads_nbytes + result.memory[Held.GRADIENTS],
        "optimizer": result.optimizer_nbytes,
        "activations": result.memory[Held.ACTIVATIONS],
        "unsharded": result.memory[Held.GROUPS],
        "reserved": result.reserved_nbytes,
    }


def _fits(candidate: Candidate, size: Callable[[float], str]) -> str:
    over = [f"{size(candidate.missing_nbytes)} over"] if candidate.missing_nbytes else []
    if candidate.host_missing_nbytes:
        over.append(f"host {size(candidate.host_missing_nbytes)} over")
    return "yes" if candidate.fits else ", ".join(["no", *over])


def _memory_unit(candidates: list[Candidate]) -> tuple[str, int]:
    return unit_of(max(each.result.reserved_nbytes for each in candidates))


def _count(number: int) -> str:
    """ "8.03B", "1.20M", or all digits."""
    return next((f"{number / one:.2f}{name}" for one, name in ((1e9, "B"), (1e6, "M")) if number >= one), str(number))


# Plain data


def as_data(plan: Plan) -> dict[str, Any]:
    """``plan`` for JSON: bytes, seconds, and names as in the table."""
    workload = plan.workload
    names = ("batch", "sequence", "optimizer", "precision", "kernels", "master_dtype")
    return {
        "model": plan.model,
        "num_params": plan.num_params,
        "units": [*plan.units.block_paths, *plan.units.large],
        "machine": plan.machine.name,
        "num_gpus": plan.num_gpus,
        "node_size": plan.machine.node_size,
        "workload": {name: getattr(workload, name) for name in names},
        "sharded_in": _dtypes(plan.sharded_in),
        "budget_nbytes": plan.budget_nbytes,
        "host_budget_nbytes": plan.host_budget_nbytes,
        "warnings": warnings(plan),
        "recommended": None if plan.recommended is None else plan.recommended.choice.name,
        "why_nothing_fits": None if plan.recommended is not None else why_nothing_fits(plan),
        "code": None if plan.recommended is None else plan.code,
        "choices": [_choice_data(each) for each in plan.choices],
    }


def _choice_data(candidate: Candidate) -> dict[str, Any]:
    """``step_s`` lacks the optimizer's time if it ``offloads``."""
    choice, result = candidate.choice, candidate.result
    return {
        "name": choice.name,
        "shard_size": choice.shard_size,
        "after_forward": after_forward(choice),
        "checkpointing": choice.checkpointing.value,
        "gathers": choice.wire.value,
        "offloads": choice.offloads,
        "fits": candidate.fits,
        **{f"{name}_nbytes": nbytes for name, nbytes in _held(candidate).items()},
        "host_nbytes": result.host_nbytes,
        "step_s": result.time.step,
        "exposed_s": result.time.exposed,
        "tokens_per_second": result.tokens_per_second,
    }
