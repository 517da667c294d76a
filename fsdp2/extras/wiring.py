"""Which function is behind each seam of the core, and when it is loaded.

``core/seams.py`` says when each seam is called. Functions that every model needs are imported here. The others are
named here, as ``module:function``, and imported at their first call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from fsdp2.core import _torch, comms, fully_shard, seams
from fsdp2.extras import (
    alike,
    arguments,
    checked,
    empty_buffers,
    local_parts,
    lost_updates,
    outside_calls,
    own_groups,
    peers,
    plain_names,
    ranks_may_differ,
    refusals,
    saved_elsewhere,
    shared_memory,
    ties,
    unit_checks,
)

LOADED: dict[str, Callable[..., Any]] = {
    "read_arguments": arguments.read_arguments,
    "data_parallel_part": arguments.data_parallel_part,
    "read_placement": arguments.read_placement,
    "check_call": checked.check_method,
    "check_roots": refusals.check_roots,
    "check_module": refusals.check_module,
    "check_param": refusals.check_param,
    "divide_ties": ties.divide_ties,
    "ties_inside": ties.ties_inside,
    "warn_of_hooks": lost_updates.warn_of_hooks,
    "post_forward_mesh": own_groups.post_forward_mesh,
    "separate_axis": own_groups.separate_axis,
    "own_axis": own_groups.own_axis,
    "adopt_memory": shared_memory.adopt_memory,
    "hook_of_saving": saved_elsewhere.hook_of_saving,
    "around_apply": empty_buffers.noting_replaced,
    "where_ranks_differ": ranks_may_differ.where_ranks_differ,
    "guards_of": outside_calls.guards_of,
    "check_handed_out": refusals.check_handed_out,
    "plain_name": plain_names.plain_name,
    "is_left_out": plain_names.is_left_out,
}

LOADED_WHEN_CALLED = {
    "nbytes_of": "extras.sizes:nbytes_of",
    "cut_subclass": "tensors.cut:pinned_shard",
    "pin_subclass": "tensors.cut:pinned",
    "make_codec": "tensors.all_gather_hooks:HookedParams",
    "why_not_adopted": "extras.replaced:why_not",
    "check_device": "extras.replaced:check_device",
    "warn_of_plain": "extras.replaced:warn_of_plain",
    "refuse_gradient": "extras.replaced:refuse_gradient",
    "prepare_loaded": "extras.replaced:prepare_loaded",
    "copy_module": "extras.copying:copied_module",
    "communicate_by": "extras.own_comms:communicate_by",
    "reduces_by_wire": "extras.gradient_wires:WireMaker",
    "decorated": "extras.joined:decorated",
    "limit_memory": "memory.limit:MemoryLimit",
    "take_over_optimizer": "extras.kept_optimizers:take_over",
    "warn_of_plain_step": "extras.kept_optimizers:warn_of_plain",
}

# Each tree asks them in this order.
TREE_CHECKS = (unit_checks.checks_of_units, lost_updates.LateGradients, lost_updates.SplitBackwards, alike.Alike)

ADAPTERS = {"bitsandbytes.nn.modules.Params4bit": "tensors.params4bit:adapt"}

# Parameters with types are asked first. Until somebody has imported their library, no parameter has a type.
TYPES = "spmd_types"
READ_TYPES, RESOLVE_TYPES = "tensors.typed_params:written", "tensors.typed_params:resolved"


def wire() -> None:
    """Called once, when the package is imported."""
    for name, function in LOADED.items():
        setattr(seams, name, function)
    for name, place in LOADED_WHEN_CALLED.items():
        setattr(seams, name, _later(place))
    seams.tree_checks += TREE_CHECKS
    seams.adapters.update({name: _later(place) for name, place in ADAPTERS.items()})
    seams.spec_readers += [_once_imported(TYPES, _later(READ_TYPES), lambda *_: None), local_parts.written_spec]
    seams.resolve_on_ranks = _once_imported(TYPES, _later(RESOLVE_TYPES), lambda _, resolve: resolve())
    comms.register_comm("gloo", "cpu", peers.PeerComm)
    fully_shard.state = _later("extras.torch_view.state:state_of")  # type: ignore[attr-defined]  # as composable APIs have it


def _later(place: str) -> Any:
    """The function at ``place``, whose module is imported at the first call."""
    module, _, name = place.partition(":")

    # The step of an optimizer may be compiled, and no compiler follows an import.
    @_torch.runs_between_graphs
    def call(*args: Any) -> Any:
        return getattr(import_module(f"fsdp2.{module}"), name)(*args)

    return call


def _once_imported(library: str, function: Callable[..., Any], without: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``function`` once ``library`` has been imported, else ``without``."""
    return lambda *args: (function if library in sys.modules else without)(*args)
