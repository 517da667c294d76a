"""``fully_shard.state(module)``: what ``torch.distributed.pipelining`` and clients read of a sharded module, by torch's
names. And the state dict that tools read."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn

from fsdp2.api.fully_shard import fully_shard
from fsdp2.extras.plain_names import plain_name
from fsdp2.runtime.unit import Unit, unit_of
from fsdp2.runtime.unit_tree import tree_of
from fsdp2.types import MixedPrecisionPolicy


@dataclass(frozen=True, eq=True)
class FSDPState:
    """The state of one unit. Two states are equal if they belong to one unit."""

    _unit: Unit
    _fsdp_param_groups: Sequence[object] = ()  # none to reduce one by one: the callback below reduces all

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        return self._unit.policy

    @property
    def _comm_ctx(self) -> Unit:
        """torch's pipelining lets reductions of stages overlap if no two share this object. A handle of ours waits for
        the reductions of its own root only."""
        return self._unit

    @property
    def _state_ctx(self) -> FSDPState:
        return self

    @property
    def all_states(self) -> list[FSDPState]:
        """The states of all units under one root."""
        return [FSDPState(unit) for unit in tree_of(self._unit).units]

    def _root_post_backward_final_callback(self) -> None:
        """Reduce the gradients that the backwards of a step have kept, reshard, and wait for the gradients."""
        tree = tree_of(self._unit)
        tree.finalize_backward()
        tree.land()


def state_of(module: nn.Module) -> FSDPState | None:
    """The state of ``module``; None if ``module`` was not given to ``fully_shard``."""
    unit = unit_of(module)
    return None if unit is None else FSDPState(unit)


collects_shards = ContextVar("collects_shards", default=False)  # whether ``bound_state`` runs


def bound_state(model: nn.Module) -> dict[str, Any]:
    """The state dict of ``model`` with the parameters and buffers themselves, by names without wrappers. Front ends
    whose state dicts have other values look at ``collects_shards``."""
    token = collects_shards.set(True)
    try:
        return {plain_name(model, name): value for name, value in model.state_dict(keep_vars=True).items()}
    finally:
        collects_shards.reset(token)


def register() -> None:
    """Give ``fully_shard`` the function ``state``, as torch's composable APIs have it."""
    fully_shard.state = state_of  # type: ignore[attr-defined]
