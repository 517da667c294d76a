"""``fully_shard.state(module)``: a unit and its root as torch's ``FSDPState`` shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from fsdp2.core.group.group import ParamGroup
from fsdp2.core.runtime.unit import Unit, unit_of
from fsdp2.core.runtime.unit_tree import tree_of
from fsdp2.core.types import MixedPrecisionPolicy
from fsdp2.extras.torch_view import torch_names
from fsdp2.extras.torch_view.group import ParamGroupView, training_state, views_of
from fsdp2.extras.torch_view.view import View

_VIEW = "_torch_view"  # attribute of a unit that keeps its view, since torch's registry holds weak references


class FSDPState(View):
    """The state of one unit. ``isinstance`` also accepts it as an instance of torch's class."""

    shows = "FSDPState"
    instead: ClassVar[Mapping[str, str]] = {
        "_reset_iter_state": "reset_iter_state() of the root module",
        "_pre_forward": "register_forward_pre_hook of the module",
        "_post_forward": "register_forward_hook of the module",
        "_pre_backward": "register_full_backward_pre_hook of the module",
        "_mp_policy": "mp_policy of fully_shard: dtypes are decided when the module is sharded",
        "_fsdp_param_groups": "nn.Module's ways to replace parameters: the next forward takes over what is bound",
    }
    not_now: ClassVar[Mapping[str, str]] = {
        "_fsdp_param_group": "is one group, and this unit has several, on different meshes. Read _fsdp_param_groups."
    }

    def __init__(self, unit: Unit) -> None:
        vars(self).update(_unit=unit, _shown=(), _views=[])

    _unit: Unit
    _shown: tuple[ParamGroup, ...]  # the groups that the views show
    _views: list[ParamGroupView]
    _state_name = "FSDP"

    @property  # type: ignore[misc]  # isinstance reads it if the type does not match
    def __class__(self) -> type:
        return torch_names.state_class() or FSDPState

    def __eq__(self, other: object) -> bool:
        return type(other) is FSDPState and self._unit is other._unit

    def __hash__(self) -> int:
        return hash(self._unit)

    @property
    def _fsdp_param_groups(self) -> list[ParamGroupView]:
        unit = self._unit
        if self._shown != unit.groups:
            vars(self).update(_shown=unit.groups, _views=views_of(unit))
        return list(self._views)

    @property
    def _fsdp_param_group(self) -> ParamGroupView | None:
        groups = self._fsdp_param_groups
        if len(groups) > 1:
            raise AttributeError  # the view adds the reason
        return groups[0] if groups else None

    @property
    def _modules(self) -> tuple[nn.Module, ...]:
        return self._unit.modules

    @property
    def _device(self) -> torch.device:
        return self._unit.mesh.device

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        return self._unit.policy

    @property
    def _modules_to_run_forward(self) -> set[nn.Module]:
        return set(self._unit.missing_modules)

    @property
    def _training_state(self) -> Any:
        return training_state(self._unit)

    @property
    def _is_root(self) -> bool | None:
        """None until the first use, as in torch."""
        return None if self._unit.tree is None else self._unit.tree.root is self._unit

    @property
    def _auto_reshard_after_forward(self) -> bool:
        """Whether the unit, as a root, stays unsharded after forward, because the user has not chosen otherwise."""
        return self._unit.config.stays_as_root

    @_auto_reshard_after_forward.setter
    def _auto_reshard_after_forward(self, value: bool) -> None:
        self._unit.configure(stays_as_root=bool(value))

    @property
    def _states_to_forward_prefetch(self) -> list[FSDPState]:
        return [of_unit(unit) for unit in self._unit.config.forward_units or ()]

    @_states_to_forward_prefetch.setter
    def _states_to_forward_prefetch(self, states: list[FSDPState]) -> None:
        self._unit.configure(forward_units=tuple(state._unit for state in states))

    @property
    def _states_to_backward_prefetch(self) -> list[FSDPState]:
        return [of_unit(unit) for unit in self._unit.config.backward_units or ()]

    @_states_to_backward_prefetch.setter
    def _states_to_backward_prefetch(self, states: list[FSDPState]) -> None:
        self._unit.configure(backward_units=tuple(state._unit for state in states))

    @property
    def _comm_ctx(self) -> Unit:
        """torch's pipelining lets reductions of stages overlap if no two of them share this object. Our handles wait
        only for the reductions of their own root."""
        return self._unit

    @property
    def _state_ctx(self) -> StateContext:
        return StateContext(self._unit)

    def _lazy_init(self) -> None:
        """Form the tree of units, which otherwise happens at the first use."""
        tree_of(self._unit)

    def _root_post_backward_final_callback(self) -> None:
        """Reduce the gradients that the backwards of a step have kept, reshard, and wait for the gradients."""
        tree = tree_of(self._unit)
        tree.finalize_backward()
        tree.land()


class StateContext(View):
    """What the units of one root share."""

    shows = "FSDPStateContext"

    def __init__(self, unit: Unit) -> None:
        vars(self).update(_unit=unit)

    _unit: Unit

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StateContext) and tree_of(self._unit) is tree_of(other._unit)

    def __hash__(self) -> int:
        return hash(tree_of(self._unit))

    @property
    def all_states(self) -> list[FSDPState]:
        """The states of all units of the tree, the root first."""
        return [of_unit(unit) for unit in tree_of(self._unit).units]

    @property
    def iter_forward_root(self) -> FSDPState | None:
        """The state of the outermost unit of the running pass; None if no pass runs."""
        tree = tree_of(self._unit)
        return None if tree.passes.root is None else of_unit(tree.units[tree.passes.root])

    @property
    def post_backward_final_callback_queued(self) -> bool:
        return tree_of(self._unit).passes.in_backward

    @property
    def is_last_backward(self) -> bool:
        return tree_of(self._unit).schedule.is_last_backward

    @is_last_backward.setter
    def is_last_backward(self, value: bool) -> None:
        tree_of(self._unit).schedule.is_last_backward = bool(value)

    @property
    def post_optim_event(self) -> torch.Event | None:
        return tree_of(self._unit).post_optim_event

    @post_optim_event.setter
    def post_optim_event(self, event: torch.Event | None) -> None:
        tree_of(self._unit).post_optim_event = event


def of_unit(unit: Unit) -> FSDPState:
    """The state of ``unit``, always the same object."""
    found: FSDPState = vars(unit).setdefault(_VIEW, None) or FSDPState(unit)
    if found._unit is not unit:  # the unit is a copy of another one
        found = FSDPState(unit)
    vars(unit)[_VIEW] = found
    return found


def state_of(module: nn.Module) -> FSDPState | None:
    """The state of ``module``; None if ``module`` was not given to ``fully_shard``."""
    unit = unit_of(module)
    return None if unit is None else of_unit(unit)
