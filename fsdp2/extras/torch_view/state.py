"""``fully_shard.state(module)``: a unit and its root as torch's ``FSDPState`` shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from fsdp2.core import Unit, UnitTree, tree_of, unit_of
from fsdp2.extras.torch_view import torch_names
from fsdp2.extras.torch_view.group import ParamGroupView, training_state, views_of
from fsdp2.extras.torch_view.view import REPLACE_PARAMETERS, View, setting_of_unit

_VIEW = "_torch_view"  # attribute of a unit that keeps its view, since torch's registry holds weak references


def _prefetched(name: str) -> property:
    """The states of the units that the user has listed for prefetching, in the option ``name`` of the unit."""

    def read(view: FSDPState) -> list[FSDPState]:
        return [of_unit(unit) for unit in getattr(view._unit.config, name) or ()]

    def write(view: FSDPState, states: list[FSDPState]) -> None:
        view._unit.configure(**{name: tuple(state._unit for state in states)})

    return property(read, write)


class FSDPState(View):
    """The state of one unit. ``isinstance`` also accepts it as an instance of torch's class."""

    shows = "FSDPState"
    instead: ClassVar[Mapping[str, str]] = {
        "_reset_iter_state": "reset_iter_state() of the root module",
        "_pre_forward": "register_forward_pre_hook of the module",
        "_post_forward": "register_forward_hook of the module",
        "_pre_backward": "register_full_backward_pre_hook of the module",
        "_mp_policy": "mp_policy of fully_shard: dtypes are decided when the module is sharded",
        "_fsdp_param_groups": REPLACE_PARAMETERS,
    }
    not_now: ClassVar[Mapping[str, str]] = {
        "_fsdp_param_group": "is one group, and this unit has several, on different meshes. Read _fsdp_param_groups."
    }

    _unit: Unit
    _key = property(lambda view: view._unit)

    @property  # type: ignore[misc]  # isinstance reads it if the type does not match
    def __class__(self) -> type:
        return torch_names.state_class() or FSDPState

    _state_name = "FSDP"
    _modules = property(lambda view: view._unit.modules)
    _device = property(lambda view: view._unit.mesh.device)
    _mp_policy = property(lambda view: view._unit.policy)
    _modules_to_run_forward = property(lambda view: set(view._unit.missing_modules))
    _training_state = property(lambda view: training_state(view._unit))
    _states_to_forward_prefetch = _prefetched("forward_units")
    _states_to_backward_prefetch = _prefetched("backward_units")
    # Whether the unit, as a root, stays unsharded after forward, because the user has not chosen otherwise
    _auto_reshard_after_forward = setting_of_unit("stays_as_root")
    # torch's pipelining lets reductions of stages overlap if no two of them share this object. Our handles wait only
    # for the reductions of their own root.
    _comm_ctx = property(lambda view: view._unit)
    _state_ctx = property(lambda view: StateContext(_unit=view._unit))

    @property
    def _fsdp_param_groups(self) -> list[ParamGroupView]:
        return self._kept(self._unit.groups, lambda: views_of(self._unit))

    @property
    def _fsdp_param_group(self) -> ParamGroupView | None:
        groups = self._fsdp_param_groups
        if len(groups) > 1:
            raise AttributeError  # the view adds the reason
        return groups[0] if groups else None

    @property
    def _is_root(self) -> bool | None:
        """None until the first use, as in torch."""
        return None if self._unit.tree is None else self._unit.tree.root is self._unit

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

    _unit: Unit
    _key = property(lambda view: view._tree)

    @property
    def _tree(self) -> UnitTree:
        return tree_of(self._unit)  # anew each time, since another root may take over

    @property
    def all_states(self) -> list[FSDPState]:
        """The states of all units of the tree, the root first."""
        return [of_unit(unit) for unit in self._tree.units]

    @property
    def iter_forward_root(self) -> FSDPState | None:
        """The state of the outermost unit of the running pass; None if no pass runs."""
        root = self._tree.passes.root
        return None if root is None else of_unit(self._tree.units[root])

    post_backward_final_callback_queued = property(lambda view: view._tree.passes.in_backward)

    @property
    def is_last_backward(self) -> bool:
        return self._tree.schedule.is_last_backward

    @is_last_backward.setter
    def is_last_backward(self, value: bool) -> None:
        self._tree.schedule.is_last_backward = bool(value)

    @property
    def post_optim_event(self) -> Any:
        return self._tree.post_optim_event

    @post_optim_event.setter
    def post_optim_event(self, event: Any) -> None:
        self._tree.post_optim_event = event


def of_unit(unit: Unit) -> FSDPState:
    """The state of ``unit``, always the same object."""
    found: FSDPState | None = vars(unit).get(_VIEW)
    if found is None or found._unit is not unit:  # the unit is a copy of another one
        found = vars(unit)[_VIEW] = FSDPState(_unit=unit)
    return found


def state_of(module: nn.Module) -> FSDPState | None:
    """The state of ``module``; None if ``module`` was not given to ``fully_shard``."""
    unit = unit_of(module)
    return None if unit is None else of_unit(unit)
