"""The work of each GPU in a step, and the model that a builder makes for it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp2.core import MixedPrecisionPolicy
from fsdp2.extras.checked import AT_LEAST_1, checked
from fsdp2.planner.scenario import Kernels, Optimizer, Precision

MASTER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@checked(**dict.fromkeys(("batch", "sequence", "micro_batches", "tensor_parallel", "context_parallel"), AT_LEAST_1))
@dataclass(frozen=True)
class Workload:
    """The work of each GPU in a step.

    Attributes:
        batch: sequences per GPU and micro-batch.
        sequence: tokens per sequence.
        optimizer: ``"adamw"``, ``"sgd with momentum"`` or ``"sgd"``.
        precision: ``"bf16"`` gathers and computes in bf16, and reduces in fp32. With ``"fp8"``, blocks also multiply by
            their weights in fp8, as in torchao's float8 training. ``"fp32"`` does everything in fp32.
        kernels: ``"eager"``, ``"compiled"`` for blocks under ``torch.compile``, or ``"compiled with loss"``.
        reduce_dtype: the dtype in which gradients travel and are summed: ``"fp32"`` or ``"bf16"``.
        micro_batches: how many forwards and backwards a step has, each with ``batch`` sequences and reductions.
        tensor_parallel: how many GPUs share every product. ``batch`` is that of all of them together.
        context_parallel: how many GPUs share every sequence; ``inputs`` are those of one of them.
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
    reduce_dtype: str = "fp32"
    micro_batches: int = 1
    tensor_parallel: int = 1
    context_parallel: int = 1

    def __post_init__(self) -> None:
        for name, kind in (("optimizer", Optimizer), ("precision", Precision), ("kernels", Kernels)):
            allowed = [each.value for each in kind]
            if getattr(self, name) not in allowed:
                raise ValueError(f"Workload: {name} is {getattr(self, name)!r}, expected one of {allowed}.")
        if self.master_dtype not in (None, *MASTER_DTYPES):
            raise ValueError(
                f"Workload: master_dtype is {self.master_dtype!r}, expected one of {[*MASTER_DTYPES]}, or None."
            )
        if self.reduce_dtype not in MASTER_DTYPES:
            raise ValueError(f"Workload: reduce_dtype is {self.reduce_dtype!r}, expected one of {[*MASTER_DTYPES]}.")
        for name, what in (("inputs", "that makes what the model is given"), ("loss", "of what the model returns")):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise TypeError(f"Workload: {name} is a {type(value).__name__}, expected a function {what}.")
        if self.sequence % self.context_parallel:
            raise ValueError(
                f"Workload: context_parallel is {self.context_parallel}, expected a divisor of {self.sequence} tokens."
            )

    @property
    def master(self) -> torch.dtype | None:
        return None if self.master_dtype is None else MASTER_DTYPES[self.master_dtype]

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """The policy to pass to ``fully_shard``."""
        return MixedPrecisionPolicy(Precision(self.precision).dtype, MASTER_DTYPES[self.reduce_dtype])

    @property
    def tokens(self) -> float:
        """Those of one GPU in a step."""
        return self.part_of_gpu(self.batch * self.sequence)

    def part_of_gpu(self, number: int) -> float:
        """Of tokens or samples of a micro-batch, those of one GPU in a step."""
        return number * self.micro_batches / self.gpus_per_sequence

    @property
    def gpus_per_sequence(self) -> int:
        """How many GPUs compute the same sequences together."""
        return self.tensor_parallel * self.context_parallel

    def __str__(self) -> str:
        return self.text()

    def text(self, num_samples: int | None = None) -> str:
        """``num_samples``: those of a micro-batch, for a model without tokens."""
        size = self.gpus_per_sequence
        several = [f"{self.micro_batches} micro-batches of"] if self.micro_batches > 1 else []
        shared = [f"{self.tensor_parallel} for tensors"] if self.tensor_parallel > 1 else []
        shared += [f"{self.context_parallel} for contexts"] if self.context_parallel > 1 else []
        per = f"{size} GPUs ({' x '.join(shared)})" if size > 1 else "GPU"
        given = f"{self.batch} x {self.sequence} tokens" if num_samples is None else f"{num_samples} samples"
        given = " ".join([*several, f"{given} per {per}"])
        return f"{given}, {self.optimizer}, {self.precision}, {self.kernels} kernels"


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


def cause_of(error: BaseException) -> str:
    """The type and text of ``error``, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f", {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    if isinstance(error, SyntaxError):
        where = f", {error.filename}:{error.lineno}"
    return f"{type(error).__name__}: {first_line(error)}{where}"


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
