"""Plans of small models, which several tests look at."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import fsdp2
from fsdp2.planner.blocks import Stack, find_units
from fsdp2.planner.candidates import Candidate, Plan, Workload
from fsdp2.planner.observe import ModelWork, observe
from tests.unit.planner.models import LanguageModel

WORKLOAD = Workload(batch=2, sequence=128)

LARGE = functools.partial(LanguageModel, width=4096, num_blocks=8, vocabulary=32768)


def on_meta(builder: Callable[[], nn.Module] = LanguageModel) -> nn.Module:
    with torch.device("meta"):
        return builder()


def work_of(model: nn.Module, workload: Workload = WORKLOAD) -> ModelWork:
    return observe(model, find_units(model), workload)


@functools.cache
def plan_of(budget: str | int | None = None, num_gpus: int = 16, **options: Any) -> Plan:
    return fsdp2.planner.plan(LanguageModel, "H100", replace(WORKLOAD, **options), num_gpus=num_gpus, budget=budget)


def choice_named(found: Plan, name: str) -> Candidate:
    return next(each for each in found.choices if each.choice.name == name)


LAYERS = Stack("layers", ("0", "1", "2", "3"))
