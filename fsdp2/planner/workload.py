"""The work of each GPU in a step, and what a model computes for it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp2.planner.blocks import Units
from fsdp2.planner.observe import ModelWork, language_model_loss, observe
from fsdp2.planner.scenario import Kernels, Optimizer, Precision

MASTER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def check_int(what: str, value: object) -> None:
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
            check_int(f"Workload: {name}", getattr(self, name))
            if getattr(self, name) < 1:
                raise ValueError(f"Workload: {name} is {getattr(self, name)}, expected at least 1.")

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


def master_dtype(workload: Workload) -> torch.dtype | None:
    return None if workload.master_dtype is None else MASTER_DTYPES[workload.master_dtype]


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
        return observe(model, units, inputs, _checked_loss(workload), dtype, master_dtype(workload), ignored)
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
