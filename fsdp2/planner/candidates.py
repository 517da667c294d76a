"""``plan``: compares the ways to shard a model on a number of GPUs by cost, and recommends one."""

from __future__ import annotations

import itertools
import logging
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from fsdp2.core.api.module import FSDPModule
from fsdp2.core.schedule.schedule import AfterForward
from fsdp2.core.types import MixedPrecisionPolicy
from fsdp2.extras.output import progress
from fsdp2.extras.plain_names import inside_compiled, is_checkpoint_wrapper, plain_name, plain_named_modules
from fsdp2.extras.sizes import nbytes_of, text_of
from fsdp2.planner import words
from fsdp2.planner.blocks import Units, find_units
from fsdp2.planner.code import code_for
from fsdp2.planner.groups import Wire
from fsdp2.planner.machine import Machine
from fsdp2.planner.machines import machine_by_name
from fsdp2.planner.observe import ModelWork, cache_configs, language_model_loss, observe, shard_dtype
from fsdp2.planner.placement import shard_dim
from fsdp2.planner.scenario import Choice, Kernels, Optimizer, Precision, Result, Scenario, simulate
from fsdp2.planner.work import Checkpointing

ABOUT_AS_FAST = 1.02  # smaller differences are within the model's accuracy
USABLE_SHARE = 0.95  # of a GPU's and of the host's memory; the rest is for the driver, NCCL and the system
SHARD_SIZES = (64, 512)  # of HSDP, besides a node
MOST_GPUS = 2**17  # a plan's time grows with them, since it lists what each rank sends in fp8

MASTER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

ModelOrBuilder = nn.Module | Callable[[], nn.Module]


def _check_int(what: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what} is {value!r}, expected an int.")


@dataclass(frozen=True)
class Workload:
    """The work of each GPU in a step.

    Attributes:
        batch: sequences per GPU.
        sequence: tokens per sequence.
        optimizer: ``"adamw"``, ``"sgd with momentum"`` or ``"sgd"``.
        precision: ``"bf16"`` gathers and computes in bf16, and reduces in fp32. ``"fp32"`` does everything in fp32.
        kernels: ``"eager"``, or ``"compiled"`` for blocks under ``torch.compile``.
        master_dtype: the dtype of trained shards, their gradients and the optimizer's states: ``"fp32"`` or
            ``"bf16"``; None is the dtype that the model is built in.
        inputs: makes the model's inputs, for models that do not take tokens of shape ``(batch, sequence)``: a
            tensor, a tuple of arguments, or a dict of them by name. It runs under fake tensors.
        loss: takes the model's output; None is cross-entropy of logits in fp32.
    """

    batch: int
    sequence: int
    optimizer: str = "adamw"
    precision: str = "bf16"
    kernels: str = "eager"
    inputs: Callable[[], Any] | None = None
    loss: Callable[[Any], torch.Tensor] | None = None
    master_dtype: str | None = None

    def __post_init__(self) -> None:
        for name, kind in (("optimizer", Optimizer), ("precision", Precision), ("kernels", Kernels)):
            allowed = [each.value for each in kind]
            if getattr(self, name) not in allowed:
                raise ValueError(f"Workload: {name} is {getattr(self, name)!r}, expected one of {allowed}.")
        if self.master_dtype not in (None, *MASTER_DTYPES):
            raise ValueError(
                f"Workload: master_dtype is {self.master_dtype!r}, expected one of {[*MASTER_DTYPES]}, or None."
            )
        for name, what in (("inputs", "that makes what the model is given"), ("loss", "of what the model returns")):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise TypeError(f"Workload: {name} is a {type(value).__name__}, expected a function {what}.")
        for name in ("batch", "sequence"):
            _check_int(f"Workload: {name}", getattr(self, name))
            if getattr(self, name) < 1:
                raise ValueError(f"Workload: {name} is {getattr(self, name)}, expected at least 1.")

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    def __str__(self) -> str:
        return (
            f"{self.batch} x {self.sequence} tokens per GPU, {self.optimizer}, {self.precision}, {self.kernels} kernels"
        )


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
    def missing_nbytes(self) -> int:
        """The memory that is missing on a GPU."""
        return max(0, int(self.result.reserved_nbytes) - self.budget_nbytes)

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
        left_nbytes: what a forward leaves on a GPU until the step ends, in caches that the workload's inputs ask for,
            or in attributes of modules. It counts as activations.
        has_initializer: it has ``initialize_weights``, as in transformers: ``code`` calls it before it loads weights.
        built_in, sharded_in: the dtypes of trained parameters, as the model is built, and of their shards.
        host_budget_nbytes: the host memory of a node that may be used; None where it is not known.
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
    has_initializer: bool = False
    built_in: tuple[torch.dtype, ...] = ()
    sharded_in: tuple[torch.dtype, ...] = ()
    host_budget_nbytes: int | None = None

    @cached_property
    def smallest(self) -> Candidate:
        """The choice that needs least GPU memory, of those that may be recommended and fit into host memory."""
        return _smallest(self.choices)

    @property
    def code(self) -> str:
        """Python that shards the model in the recommended way.

        Raises:
            ValueError: nothing fits; the message says by how much.
        """
        if self.recommended is None:
            raise ValueError(self.why_nothing_fits())
        choice = self.recommended.choice
        num_shards = choice.shard_size or self.num_gpus
        return code_for(
            self.units,
            choice,
            self.machine,
            Precision(self.workload.precision),
            cuts_other_dims=any(shard_dim(shape, num_shards) > 0 for shape in self.shapes),
            caches=self.caches,
            has_initializer=self.has_initializer,
            master_dtype=self.sharded_in[0] if self.built_in != self.sharded_in else None,
        )

    @property
    def warnings(self) -> list[str]:
        """Reasons why the figures are worse than they look, one line each; ``str()`` shows them, too."""
        return words.warnings(self)

    @property
    def data(self) -> dict[str, Any]:
        """The whole plan as plain data for JSON: bytes and seconds; ``choices`` in order, ``recommended`` by name."""
        return words.as_data(self)

    def why_nothing_fits(self) -> str:
        """How much the smallest choice is too large, and what would fit."""
        return words.why_nothing_fits(self)

    def __str__(self) -> str:
        return words.text_of_plan(self)


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
    _check_int("plan: num_gpus", num_gpus)
    if not 1 <= num_gpus <= MOST_GPUS:
        raise ValueError(f"plan: num_gpus is {num_gpus}, expected 1 to {MOST_GPUS}.")
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
    if workload.precision == Precision.FP32.value and machine.fp32_flops is None:
        raise ValueError(
            f"{caller}: '{machine.name}' has no figure for products in fp32. Use precision bf16, or a machine that "
            "`python -m fsdp2 measure` measured."
        )
    if budget is None:
        return machine, int(USABLE_SHARE * machine.memory_nbytes)
    limit = nbytes_of(budget, "budget", "70GiB")
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
    sizes = shard_sizes or _shard_sizes(machine, num_gpus)
    choices = list(filter(is_allowed, _choices(machine, num_gpus, sizes)))
    candidates: list[Candidate] = []
    enough_gpus, enough = None, None
    with progress("compare ways to shard", 3 + len(choices), "step") as advance:
        built = model if isinstance(model, nn.Module) else build(model)
        if any(isinstance(module, FSDPModule) for module in built.modules()):
            raise ValueError(f"this {type(built).__name__} is sharded already. Plan for it before fully_shard.")
        _check_computes_once(built)
        built = inside_compiled(built)
        units = find_units(built)
        advance(1)
        work = observed(built, units, workload, ignored)
        base = replace(_scenario(machine, work, workload, num_gpus), mp_policy=mp_policy)
        advance(1)
        for choice in choices:
            candidates.append(_candidate(base, work, choice, limit))
            advance(1)
        candidates += list(_that_keep_some(base, work, candidates, limit))
        recommended = _recommended(candidates)
        if recommended is None:
            enough_gpus = _enough_gpus(base, work, candidates, limit)
            enough = _enough(built, units, base, workload, _smallest(candidates).choice, limit, ignored)
        advance(1)
    built_in, sharded_in = _trained_dtypes(built, None), _trained_dtypes(built, _master_dtype(workload))
    return Plan(
        model=type(built).__name__,
        num_params=sum(param.numel() for param in built.parameters()),
        units=units.renamed(partial(plain_name, built)),
        shapes=frozenset(tuple(param.shape) for param in built.parameters()),
        machine=machine,
        num_gpus=num_gpus,
        workload=workload,
        budget_nbytes=limit,
        choices=tuple(sorted(candidates, key=_rank)),
        recommended=recommended,
        enough_gpus=enough_gpus,
        enough=enough,
        caches=tuple(cache_configs(built)),
        left_nbytes=sum(unit.left_nbytes for unit in work.units(Checkpointing.NONE)),
        has_initializer=hasattr(built, "initialize_weights"),
        built_in=built_in,
        sharded_in=sharded_in,
        host_budget_nbytes=_host_budget(machine),
    )


def _check_computes_once(model: nn.Module) -> None:
    """Refuse a model with activation checkpointing, which would be applied twice."""
    for name, module in plain_named_modules(model):
        is_switched_on = getattr(module, "gradient_checkpointing", False) is True  # as in transformers
        if is_switched_on or is_checkpoint_wrapper(module):
            raise ValueError(
                f"'{name or type(module).__name__}' has activation checkpointing already. A plan chooses it: leave "
                "checkpoint_wrapper out, or call gradient_checkpointing_disable() first."
            )


def _rank(candidate: Candidate) -> tuple[Any, ...]:
    """A sort key: choices that fit come first; those whose time is not known come last."""
    missing = candidate.missing_nbytes + candidate.host_missing_nbytes
    return not candidate.fits, missing, candidate.choice.offloads, candidate.result.time.step


def _master_dtype(workload: Workload) -> torch.dtype | None:
    return None if workload.master_dtype is None else MASTER_DTYPES[workload.master_dtype]


def _trained_dtypes(model: nn.Module, master_dtype: torch.dtype | None) -> tuple[torch.dtype, ...]:
    """The dtypes of the shards of trained parameters."""
    return tuple({shard_dtype(param, master_dtype): None for param in model.parameters() if param.requires_grad})


def _host_budget(machine: Machine) -> int | None:
    return None if machine.host_memory_nbytes is None else int(USABLE_SHARE * machine.host_memory_nbytes)


def build(builder: Callable[[], nn.Module]) -> nn.Module:
    """Call ``builder`` on the meta device.

    Raises:
        ValueError: it raises there, or does not return a module.
    """
    name = getattr(builder, "__name__", repr(builder))
    try:
        with torch.device("meta"):
            built = builder()
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"plan: {name}() failed on the meta device ({cause_of(error)}). A builder "
            "takes no arguments and makes the model alone: name no device in it, load no weights, and read no values."
        ) from error
    if not isinstance(built, nn.Module):
        raise ValueError(f"plan: {name}() returned a {type(built).__name__}, expected an nn.Module.")
    return built


def observed(model: nn.Module, units: Units, workload: Workload, ignored: Collection[nn.Parameter] = ()) -> ModelWork:
    """What ``model`` has, and its work for ``workload``.

    Raises:
        ValueError: the model cannot run under fake tensors.
    """
    shape = (workload.batch, workload.sequence)
    inputs = workload.inputs or (lambda: torch.zeros(shape, dtype=torch.int64))
    dtype = torch.bfloat16 if workload.precision == Precision.BF16.value else torch.float32
    log = logging.getLogger("torch._subclasses.fake_tensor")  # prints the traceback of what is raised anyway
    before, log.disabled = log.disabled, True
    try:
        return observe(model, units, inputs, _checked_loss(workload), dtype, _master_dtype(workload), ignored)
    except (ValueError, TypeError):
        raise
    except Exception as error:
        raise ValueError(
            f"plan: this {type(model).__name__} does not run under fake tensors ({type(error).__name__}: "
            f"{_first_line(error)}). Pass Workload(inputs=...) if it does not take tokens, and read no values of "
            "tensors in forward."
        ) from error
    finally:
        log.disabled = before


def _checked_loss(workload: Workload) -> Callable[[Any], torch.Tensor]:
    given = workload.loss
    if given is None:
        return language_model_loss

    def loss(output: Any) -> torch.Tensor:
        try:
            value = given(output)
        except Exception as error:
            raise ValueError(
                f"plan: Workload.loss failed for a {type(output).__name__}, which the model returned "
                f"({type(error).__name__}: {_first_line(error)})."
            ) from error
        if not isinstance(value, torch.Tensor) or value.dim() != 0:
            kind = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"plan: Workload.loss returned {kind}, expected a tensor without dims.")
        return value

    return loss


def cause_of(error: BaseException) -> str:
    """The type and text of ``error``, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f", {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    if isinstance(error, SyntaxError):
        where = f", {error.filename}:{error.lineno}"
    return f"{type(error).__name__}: {_first_line(error)}{where}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def _scenario(machine: Machine, work: ModelWork, workload: Workload, num_gpus: int) -> Scenario:
    return Scenario(
        machine=machine,
        units=(),
        tokens=workload.tokens,
        num_gpus=num_gpus,
        choice=Choice(""),
        root=work.root,
        members=work.members,
        ignored=work.ignored,
        buffers_nbytes=work.buffers_nbytes,
        precision=Precision(workload.precision),
        optimizer=Optimizer(workload.optimizer),
        kernels=Kernels(workload.kernels),
    )


def _candidate(base: Scenario, work: ModelWork, choice: Choice, limit: int) -> Candidate:
    scenario = replace(base, units=work.units(choice.checkpointing), choice=choice)
    return Candidate(choice, simulate(scenario), limit, _host_budget(base.machine))


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
        yield words.named(Choice("", size, after_forward, checkpointing=checkpointing))
    for checkpointing in Checkpointing:
        if num_gpus > 1:
            yield words.named(Choice("", sizes[0], wire=Wire.FP8, checkpointing=checkpointing))
        if machine.host_bandwidth is not None:
            yield words.named(Choice("", sizes[0], offloads=True, checkpointing=checkpointing))


def _that_keep_some(base: Scenario, work: ModelWork, tried: list[Candidate], limit: int) -> Iterator[Candidate]:
    """Choices that keep as many of the last blocks unsharded as fit, where not all of them can stay so."""
    for candidate in tried:
        choice = candidate.choice
        if (
            choice.shard_size != tried[0].choice.shard_size
            or choice.after_forward is not AfterForward.RESHARD
            or not candidate.fits
        ):
            continue
        if choice.wire is not Wire.BF16 or choice.offloads:
            continue

        def kept(num: int, choice: Choice = choice) -> Candidate:
            return _candidate(base, work, words.named(replace(choice, num_kept=num)), limit)

        num_kept = _largest(len(work.blocks), lambda num: kept(num).fits)
        if 0 < num_kept < len(work.blocks):
            yield kept(num_kept)


def _enough_gpus(base: Scenario, work: ModelWork, tried: list[Candidate], limit: int) -> int | None:
    """The number of GPUs on which FSDP fits, in powers of two times the current number; None if links are unknown."""
    if base.machine.in_node is None:
        return None
    allowed = filter(_changes_no_numbers, tried)
    smallest = min(allowed, key=lambda each: (each.choice.offloads, each.result.reserved_nbytes)).choice
    choice = replace(smallest, shard_size=None, after_forward=AfterForward.RESHARD)
    num_gpus = base.num_gpus
    while num_gpus <= MOST_GPUS:
        if _candidate(replace(base, num_gpus=num_gpus), work, choice, limit).fits:
            return num_gpus
        num_gpus *= 2
    return None


def _enough(
    model: nn.Module,
    units: Units,
    base: Scenario,
    workload: Workload,
    choice: Choice,
    limit: int,
    ignored: Collection[nn.Parameter],
) -> Workload | None:
    """The largest workload that fits, with smaller batches, or else shorter sequences."""
    if workload.inputs is not None:  # custom inputs have their own size
        return None

    def fits(batch: int, sequence: int) -> bool:
        smaller = replace(workload, batch=batch, sequence=sequence)
        try:
            work = observed(model, units, smaller, ignored)
        except (ValueError, TypeError):  # a model may not take all lengths
            return False
        return _candidate(replace(base, tokens=smaller.tokens), work, choice, limit).fits

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


def _smallest(candidates: Sequence[Candidate]) -> Candidate:
    """The one that needs least GPU memory, of those that may be recommended and fit into host memory."""
    allowed = filter(_changes_no_numbers, candidates)
    return min(allowed, key=lambda each: (each.host_missing_nbytes > 0, each.result.reserved_nbytes))


def _changes_no_numbers(candidate: Candidate) -> bool:
    """Rounding on the wire changes what is learned, so it is never recommended."""
    return candidate.choice.wire is Wire.BF16


def _recommended(candidates: list[Candidate]) -> Candidate | None:
    """The choice to recommend. Offloading is recommended only if nothing else fits."""
    fitting = [each for each in candidates if each.fits and _changes_no_numbers(each)]
    fitting = [each for each in fitting if not each.choice.offloads] or fitting
    if not fitting:
        return None
    fastest = min(each.result.time.step for each in fitting)
    return next(each for each in fitting if each.result.time.step <= fastest * ABOUT_AS_FAST)
