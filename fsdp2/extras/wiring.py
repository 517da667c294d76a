"""Connects features to the seams of the core, either directly or through a function that loads them when called.

``wire`` registers the extras that every model needs. Other features are named here, and imported at their first call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from fsdp2.core import _torch
from fsdp2.core.api.adapters import ADAPTERS, SPEC_READERS
from fsdp2.core.api.fully_shard import PlugIns as OfCalls, fully_shard
from fsdp2.core.api.module import PlugIns as OfModules
from fsdp2.core.group.codec import PlugIns as OfCodecs
from fsdp2.core.group.param import PlugIns as OfParams
from fsdp2.core.group.shards import PlugIns as OfShards
from fsdp2.core.runtime.hooks import PlugIns as OfHooks
from fsdp2.core.runtime.unit_tree import PlugIns as OfTrees
from fsdp2.extras import (
    alike,
    empty_buffers,
    handed_out,
    local_parts,
    lost_gradients,
    lost_hooks,
    outside_calls,
    own_groups,
    peers,
    plain_names,
    ranks_may_differ,
    refusals,
    shared_memory,
    ties,
    unit_checks,
)

CHECKS = (unit_checks, lost_gradients, alike)  # each tree asks them in this order
EXTRAS = (
    *(empty_buffers, handed_out, local_parts, lost_hooks, outside_calls, own_groups, peers),
    *(plain_names, ranks_may_differ, refusals, shared_memory, ties),
)


def wire() -> None:
    """Called once, when the package is imported."""
    types = "tensors.typed_params"  # before local parts: the first reader that knows it answers
    SPEC_READERS.append(_once_imported("spmd_types", _later(types, "written"), lambda *_: None))
    OfCalls.resolve = _once_imported("spmd_types", _later(types, "resolved"), lambda _, resolve: resolve())
    for extra in (*CHECKS, *EXTRAS):
        extra.register()
    fully_shard.state = _later("extras.torch_view.state", "state_of")  # type: ignore[attr-defined]  # as composable APIs have it
    OfHooks.check_loaded = _later("extras.loading", "check_loaded")
    OfModules.copied = _later("extras.copying", "copied_module")
    OfModules.communicate_by = _later("core.api.custom_comm", "communicate_by")
    OfTrees.limits_memory = _later("memory.limit", "MemoryLimit")
    OfParams.why_not = _later("extras.replaced", "why_not")
    OfParams.check_device = _later("extras.replaced", "check_device")
    OfParams.warn_of_plain = _later("extras.replaced", "warn_of_plain")
    OfParams.refuse_gradient = _later("extras.replaced", "refuse_gradient")
    OfShards.take_over = _later("extras.kept_optimizers", "take_over")
    OfShards.on_plain_step = _later("extras.plain_params", "warn_of_plain")
    OfCodecs.cut, OfCodecs.pin = _later("tensors.cut", "pinned_shard"), _later("tensors.cut", "pinned")
    OfCodecs.codec = _later("tensors.all_gather_hooks", "HookedParams")
    ADAPTERS["bitsandbytes.nn.modules.Params4bit"] = _later("tensors.params4bit", "adapt")


def _later(module: str, name: str) -> Any:
    """The function ``name`` of ``module``, which is imported at the first call."""

    # The step of an optimizer may be compiled, and no compiler follows an import.
    @_torch.runs_between_graphs
    def call(*args: Any) -> Any:
        return getattr(import_module(f"fsdp2.{module}"), name)(*args)

    return call


def _once_imported(library: str, function: Callable[..., Any], without: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``function`` once ``library`` has been imported, else ``without``."""
    return lambda *args: (function if library in sys.modules else without)(*args)
