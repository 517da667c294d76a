"""The work of each GPU in a step, and the model that a builder makes for it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp2.extras.checked import AT_LEAST_1, checked
from fsdp2.planner.scenario import Kernels, Optimizer, Precision

MASTER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@checked(batch=AT_LEAST_1, sequence=AT_LEAST_1)
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

    @property
    def master(self) -> torch.dtype | None:
        return None if self.master_dtype is None else MASTER_DTYPES[self.master_dtype]

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    def __str__(self) -> str:
        return (
            f"{self.batch} x {self.sequence} tokens per GPU, {self.optimizer}, {self.precision}, {self.kernels} kernels"
        )


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
