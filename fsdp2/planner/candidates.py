"""``plan``: compares the ways to shard a model on a number of GPUs by cost, and recommends one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from fsdp2.core import AfterForward, FSDPModule, MixedPrecisionPolicy
from fsdp2.extras.checked import Limit, checked
from fsdp2.extras.output import progress
from fsdp2.extras.plain_names import inside_compiled, is_checkpoint_wrapper, plain_name, plain_named_modules
from fsdp2.extras.sizes import nbytes_of, text_of
from fsdp2.planner.blocks import Units, find_units
from fsdp2.planner.groups import Wire
from fsdp2.planner.machine import Machine
from fsdp2.planner.machines import machine_by_name
from fsdp2.planner.observe import ModelWork, cache_configs, observe, shard_dtype
from fsdp2.planner.parallel import Parallel
from fsdp2.planner.plans import Candidate, Plan
from fsdp2.planner.scenario import Choice, Kernels, Optimizer, Precision, Scenario, simulate
from fsdp2.planner.work import Checkpointing
from fsdp2.planner.workload import Workload, build

ABOUT_AS_FAST = 1.02  # smaller differences are within the model's accuracy
USABLE_SHARE = 0.95  # of a GPU's and of the host's memory; the rest is for the driver, NCCL and the system
SHARD_SIZES = (64, 512)  # of HSDP, besides a node
MOST_GPUS = 2**17  # a plan's time grows with them, since it lists what each rank sends in fp8

ModelOrBuilder = nn.Module | Callable[[], nn.Module]


@checked(num_gpus=Limit(1, MOST_GPUS))
def plan(
    model: ModelOrBuilder,
    machine: Machine | str,
    workload: Workload,
    *,
    num_gpus: int,
    budget: str | int | None = None,
) -> Plan:
    """Predict what a training step costs for each way to shard ``model``. Nothing is allocated; no GPU is needed.

    Args:
        model: a module, on any device and the meta device, or a function that builds one, which is called on the meta
            device.
        machine: one of ``"H100"``, ``"H200"``, ``"B200"``, ``"A100-80"``, ``"A100-40"``, ``"MI300X"``, a path that
            ``python -m fsdp2 measure`` wrote, or a :class:`Machine`.
        workload: what each GPU computes.
        num_gpus: the number of GPUs.
        budget: bytes of one GPU that may be used, such as ``"70GiB"``; None is 95% of its memory.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the machine or the budget's unit is unknown; the budget is more than a GPU has; the model is sharded
            already, has no repeated blocks, or cannot run under fake tensors.
    """
    machine, limit = checked_inputs("plan", machine, workload, budget, num_gpus)
    if not callable(model):
        raise TypeError(f"plan: model is {model!r}, expected an nn.Module, or a function that builds one.")
    return compare(model, machine, workload, num_gpus=num_gpus, limit=limit)


def checked_inputs(
    caller: str, machine: Machine | str, workload: Workload, budget: str | int | None, num_gpus: int
) -> tuple[Machine, int]:
    """Return the machine, and the bytes of a GPU that may be used.

    Raises:
        TypeError: ``machine`` or ``workload`` is something else.
        ValueError: the machine or the budget's unit is unknown; the machine has no figure for products in the
            workload's precision, or for links between several GPUs; the budget is more than a GPU has.
    """
    if not isinstance(workload, Workload):
        raise TypeError(
            f"{caller}: workload is {workload!r}, expected such as fsdp2.planner.Workload(batch=2, sequence=8192)."
        )
    machine = machine_by_name(machine) if isinstance(machine, str) else machine
    if not isinstance(machine, Machine):
        raise TypeError(f"{caller}: machine is {machine!r}, expected a name, a path, or a Machine.")
    if num_gpus > 1:
        machine.links()  # refuses a machine whose links were not measured
    if num_gpus % workload.gpus_per_sequence:
        raise ValueError(
            f"{caller}: {num_gpus} GPUs are no multiple of tensor_parallel x context_parallel, which is "
            f"{workload.gpus_per_sequence}."
        )
    if workload.tensor_parallel > machine.node_size:
        raise ValueError(
            f"{caller}: tensor_parallel is {workload.tensor_parallel}, expected at most {machine.node_size}, the GPUs "
            "of a node: it sends activations between any two products."
        )
    if not machine.knows(workload.precision):
        raise ValueError(
            f"{caller}: '{machine.name}' has no figure for products in {workload.precision}. Use precision bf16, or a "
            "machine for which it is known."
        )
    if budget is None:
        return machine, int(USABLE_SHARE * machine.memory_nbytes)
    limit = nbytes_of(budget, f"{caller}: budget", "70GiB")
    if limit > machine.memory_nbytes:
        raise ValueError(
            f"budget is {text_of(limit)}, but a GPU of '{machine.name}' has {text_of(machine.memory_nbytes)}. Pass "
            "less, or name your machine: machine='H200' in Python, --gpu H200 on the command line."
        )
    return machine, limit


def compare(
    model: ModelOrBuilder,
    machine: Machine,
    workload: Workload,
    *,
    num_gpus: int,
    limit: int,
    shard_sizes: Sequence[int | None] = (),
    is_allowed: Callable[[Choice], bool] = lambda choice: True,
    ignored: Collection[nn.Parameter] = (),
    mp_policy: MixedPrecisionPolicy | None = None,
) -> Plan:
    """:func:`plan` with checked arguments. ``shard_sizes``: those to compare; without them, FSDP and HSDP of some.
    ``ignored``: parameters that are not sharded. ``mp_policy``: None is that of the workload's precision."""
    size = workload.tensor_parallel
    nodes = replace(machine, node_size=max(1, machine.node_size // size))  # of GPUs that shard
    sizes = shard_sizes or _shard_sizes(nodes, num_gpus // size)
    choices = list(filter(is_allowed, _choices(nodes, num_gpus // size, sizes)))
    with progress("compare ways to shard", 3 + len(choices), "step") as advance:
        built = model if isinstance(model, nn.Module) else build(model)
        if any(isinstance(module, FSDPModule) for module in built.modules()):
            raise ValueError(f"this {type(built).__name__} is sharded already. Plan for it before fully_shard.")
        _check_computes_once(built)
        built = inside_compiled(built)
        units = find_units(built)
        observed = partial(_observed, built, units, machine, ignored)
        advance(1)
        costs = _Costs(machine, num_gpus, workload, observed(workload), mp_policy, limit)
        advance(1)
        candidates: list[Candidate] = []
        for choice in choices:
            candidates.append(costs.of(choice))
            advance(1)
        candidates += list(_that_keep_some(costs, candidates))
        found = Plan(
            model=type(built).__name__,
            num_params=sum(param.numel() for param in built.parameters()),
            units=units.renamed(partial(plain_name, built)),
            shapes=frozenset(tuple(param.shape) for param in built.parameters()),
            machine=machine,
            num_gpus=num_gpus,
            workload=workload,
            budget_nbytes=limit,
            choices=tuple(sorted(candidates, key=_rank)),
            recommended=_recommended(candidates),
            caches=tuple(cache_configs(built)),
            left_nbytes=sum(unit.left_nbytes for unit in costs.work.units(Checkpointing.NONE)),
            scores_nbytes=sum(unit.scores_nbytes for unit in costs.work.units(Checkpointing.NONE)),
            has_initializer=hasattr(built, "initialize_weights"),
            built_in=_trained_dtypes(built, None),
            sharded_in=_trained_dtypes(built, workload.master),
            host_budget_nbytes=costs.host_limit,
            num_samples=costs.work.num_samples,
        )
        if found.recommended is None:
            enough = _enough(costs, found.smallest.choice, observed)
            found = replace(found, enough_gpus=_enough_gpus(costs, candidates), enough=enough)
        advance(1)
    return found


def _observed(
    model: nn.Module, units: Units, machine: Machine, ignored: Collection[nn.Parameter], workload: Workload
) -> ModelWork:
    """The part of one GPU."""
    work = observe(model, units, workload, ignored)
    if workload.gpus_per_sequence == 1:
        return work
    fp8 = workload.precision == Precision.FP8.value
    return Parallel(machine, workload.tensor_parallel, workload.context_parallel, fp8).part_of(work)


def _check_computes_once(model: nn.Module) -> None:
    """Refuse a model with activation checkpointing, which would be applied twice."""
    for name, module in plain_named_modules(model):
        is_switched_on = getattr(module, "gradient_checkpointing", False) is True  # as in transformers
        if is_switched_on or is_checkpoint_wrapper(module):
            raise ValueError(
                f"'{name or type(module).__name__}' has activation checkpointing already. A plan chooses it: leave "
                "checkpoint_wrapper out, or call gradient_checkpointing_disable() first."
            )


def _rank(candidate: Candidate) -> tuple[bool, int, bool, float]:
    """A sort key: choices that fit come first; those whose time is not known come last."""
    missing = candidate.missing_nbytes + candidate.host_missing_nbytes
    return not candidate.fits, missing, candidate.choice.offloads, candidate.result.time.step


def _trained_dtypes(model: nn.Module, master_dtype: torch.dtype | None) -> tuple[torch.dtype, ...]:
    """The dtypes of the shards of trained parameters."""
    return tuple({shard_dtype(param, master_dtype): None for param in model.parameters() if param.requires_grad})


@dataclass(frozen=True)
class _Costs:
    """What each choice costs for one model."""

    machine: Machine
    num_gpus: int
    workload: Workload
    work: ModelWork
    mp_policy: MixedPrecisionPolicy | None
    limit: int

    @property
    def host_limit(self) -> int | None:
        memory = self.machine.host_memory_nbytes
        return None if memory is None else int(USABLE_SHARE * memory)

    def of(self, choice: Choice) -> Candidate:
        work, workload = self.work, self.workload
        scenario = Scenario(
            machine=self.machine,
            units=work.units(choice.checkpointing),
            tokens=workload.tokens if work.num_samples is None else workload.part_of_gpu(work.num_samples),
            num_gpus=self.num_gpus,
            choice=choice,
            root=work.root,
            members=work.members,
            ignored=work.ignored,
            buffers_nbytes=work.buffers_nbytes,
            precision=Precision(workload.precision),
            mp_policy=self.mp_policy or workload.policy,
            optimizer=Optimizer(workload.optimizer),
            kernels=Kernels(workload.kernels),
            micro_batches=workload.micro_batches,
            tensor_parallel=workload.tensor_parallel,
        )
        return Candidate(choice, simulate(scenario), self.limit, self.host_limit)


def _shard_sizes(machine: Machine, num_gpus: int) -> list[int | None]:
    """The shard sizes to compare; None is FSDP."""
    sizes = sorted({machine.node_size, *SHARD_SIZES})
    return [None, *(size for size in sizes if size < num_gpus and num_gpus % size == 0)]


def _choices(machine: Machine, num_gpus: int, sizes: Sequence[int | None]) -> Iterator[Choice]:
    """The choices, simplest first: by settings, then by recomputation."""
    node = machine.node_size
    after = [AfterForward.RESHARD, AfterForward.KEEP]
    if num_gpus > node > 1:
        after.append(AfterForward.RESHARD_TO_SMALLER_MESH)
    for size, after_forward, checkpointing in itertools.product(sizes, after, Checkpointing):
        if after_forward is AfterForward.RESHARD_TO_SMALLER_MESH and (size == node or (size or num_gpus) % node):
            continue  # the same as resharding, or shards that no number of whole nodes holds
        yield Choice(size, after_forward, checkpointing=checkpointing)
    for checkpointing in Checkpointing:
        if num_gpus > 1:
            yield Choice(sizes[0], wire=Wire.FP8, checkpointing=checkpointing)
        if machine.host_bandwidth is not None:
            yield Choice(sizes[0], offloads=True, checkpointing=checkpointing)


def _that_keep_some(costs: _Costs, tried: Sequence[Candidate]) -> Iterator[Candidate]:
    """Choices that keep as many of the last blocks unsharded as fit, where not all units can stay so."""
    num_blocks = len(costs.work.blocks)
    for candidate in tried:
        choice = candidate.choice
        if not candidate.fits or choice != Choice(tried[0].choice.shard_size, checkpointing=choice.checkpointing):
            continue

        def kept(num: int, choice: Choice = choice) -> Candidate:
            return costs.of(replace(choice, num_kept=num))

        num_kept = _largest(num_blocks, lambda num: kept(num).fits)
        if num_kept and not costs.of(replace(choice, after_forward=AfterForward.KEEP)).fits:
            yield kept(num_kept)


def _enough_gpus(costs: _Costs, tried: Sequence[Candidate]) -> int | None:
    """The number of GPUs on which FSDP fits, in powers of two times the current number; None if links are unknown."""
    if costs.machine.in_node is None:
        return None
    exact = [each for each in tried if each.choice.is_exact]
    smallest = min(exact, key=lambda each: (each.choice.offloads, each.result.peak_nbytes)).choice
    choice = replace(smallest, shard_size=None, after_forward=AfterForward.RESHARD)
    num_gpus = costs.num_gpus
    while num_gpus <= MOST_GPUS:
        if replace(costs, num_gpus=num_gpus).of(choice).fits:
            return num_gpus
        num_gpus *= 2
    return None


def _enough(costs: _Costs, choice: Choice, observed: Callable[[Workload], ModelWork]) -> Workload | None:
    """The largest workload that fits, with smaller batches, or else shorter sequences."""
    workload = costs.workload
    if workload.inputs is not None:  # custom inputs have their own size
        return None

    def fits(batch: int, sequence: int) -> bool:
        smaller = replace(workload, batch=batch, sequence=sequence)
        try:
            work = observed(replace(smaller, kernels=Kernels.EAGER.value))  # fast, and no less
        except (ValueError, TypeError):  # a model may not take all lengths
            return False
        return replace(costs, workload=smaller, work=work).of(choice).fits

    batch = _largest(workload.batch - 1, lambda batch: fits(batch, workload.sequence))
    if batch:
        return replace(workload, batch=batch)
    sequence = _largest(workload.sequence - 1, lambda sequence: fits(1, sequence), share=0.01)
    return replace(workload, batch=1, sequence=sequence) if sequence else None


def _largest(limit: int, fits: Callable[[int], bool], share: float = 0.0) -> int:
    """The largest number up to ``limit`` that fits, by bisection to within ``share`` of it; 0 if none fits."""
    low, high = 0, limit
    while low < high * (1 - share):
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _recommended(candidates: Sequence[Candidate]) -> Candidate | None:
    """The choice to recommend. Offloading is recommended only if nothing else fits; a choice that may fit, only if none
    is sure to."""
    allowed = [each for each in candidates if each.may_fit and each.choice.is_exact]
    fitting = [each for each in allowed if each.fits] or allowed
    fitting = [each for each in fitting if not each.choice.offloads] or fitting
    if not fitting:
        return None
    fastest = min(each.result.time.step for each in fitting)
    return next(each for each in fitting if each.result.time.step <= fastest * ABOUT_AS_FAST)
