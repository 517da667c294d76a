"""The parameters of a unit as torch's ``FSDPParamGroup`` and ``FSDPParam`` show them.

torch has one group for each mesh; the runtime has another one for scalars, which it all-reduces. A view shows all
groups on one mesh as one. Its methods act on the whole unit, like the methods of ``FSDPModule``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from fsdp2.core import (
    AfterForward,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    GroupState,
    OffloadPolicy,
    ParallelMesh,
    ParamGroup,
    ScheduleError,
    ShardedParam,
    Unit,
    _torch,
    door,
    plans,
    schedules,
    tree_of,
)
from fsdp2.extras.torch_view import torch_names
from fsdp2.extras.torch_view.view import REPLACE_PARAMETERS, View, setting_of_unit

_OF_PHASE = {
    schedules.Phase.IDLE: "IDLE",
    schedules.Phase.FORWARD: "FORWARD",
    schedules.Phase.RECOMPUTE: "FORWARD",
    schedules.Phase.BACKWARD: "PRE_BACKWARD",
    schedules.Phase.REDUCED: "POST_BACKWARD",
}
_OF_GROUP = {
    GroupState.SHARDED: "SHARDED",
    GroupState.UNSHARDING: "SHARDED",  # torch also changes its state only when the gather is waited for
    GroupState.UNSHARDED: "UNSHARDED",
    GroupState.LENT: "UNSHARDED",
    GroupState.SHARDED_POST_FORWARD: "SHARDED_POST_FORWARD",
}


def training_state(unit: Unit, groups: Sequence[ParamGroup] = ()) -> Any:
    """The pass that ``unit`` is in. A prefetch of one of its ``groups`` belongs to the pass that prefetches."""
    tree = unit.tree
    name = "IDLE" if tree is None else _OF_PHASE[tree.passes.phases[unit.index]]
    if tree is not None and name == "IDLE" and any(group.state is GroupState.UNSHARDING for group in groups):
        name = {"forward": "FORWARD", "backward": "PRE_BACKWARD"}.get(tree.passes.running, name)
    return torch_names.member("TrainingState", name)


def mesh_info(mesh: ParallelMesh) -> Any:
    """``mesh`` as torch describes it."""
    options: dict[str, Any] = {}
    if mesh.spmd is not None:
        names = tuple(zip(mesh.spmd.mesh.mesh_dim_names or (), mesh.spmd.roles, strict=True))
        shard, replicate = (
            tuple(name for name, role in names if role is wanted) or None
            for wanted in (plans.AxisRole.SHARD, plans.AxisRole.REPLICATE)
        )
        options = {"dp_mesh_dims": DataParallelMeshDims(shard, replicate), "spmd_mesh": mesh.spmd.mesh}
    of_role = {role: index for index, role in enumerate(mesh.roles)}
    axes = of_role.get(plans.AxisRole.SHARD), of_role.get(plans.AxisRole.REPLICATE)
    return torch_names.mesh_info(mesh.mesh, *axes, **options)


def _option_of_groups(name: str, convert: Callable[[Any], Any] = bool) -> property:
    """An option that all groups of the view have, which clients may set."""

    def write(view: Any, value: Any) -> None:
        for group in view._groups:
            group.configure(**{name: convert(value)})

    return property(lambda view: getattr(view._groups[0].options, name), write)


@door.all_entries
class ParamGroupView(View):
    """The parameters of a unit on one mesh, and the operations of the unit on them."""

    shows = "FSDPParamGroup"
    instead: ClassVar[Mapping[str, str]] = {
        "_all_gather_comm": "set_custom_all_gather(comm) of the module",
        "_reduce_scatter_comm": "set_custom_reduce_scatter(comm) of the module",
        "_all_reduce_hook": "set_all_reduce_hook(hook) of the module",
        "_all_reduce_hook_stream": "set_all_reduce_hook(hook, stream=...) of the module",
        "reduce_scatter_reduce_op": "set_gradient_divide_factor(factor) of the module",
        "reduce_scatter_max_input_buffers": "set_reduce_scatter_max_input_buffers(n) of the module",
        "unshard_async_op": "_set_unshard_async_op(enabled) of the module",
        "set_symm_mem": "set_symm_mem_for_comm() of the module",
        "set_allocate_memory_from_process_group": "set_allocate_memory_from_process_group_for_comm of the module",
        "fsdp_params": REPLACE_PARAMETERS,
        "pre_forward": "register_forward_pre_hook of the module",
        "post_forward": "register_forward_hook of the module",
        "pre_backward": "unshard() of the module",
        "finalize_backward": "finalize_backward() of the root module",
        "_reset_iter_state": "reset_iter_state() of the root module",
        "_to_sharded": "reshard() of the module",
        "_to_unsharded": "unshard() of the module",
        "use_training_state": "the methods of FSDPModule, which need no state to be set",
    }
    not_now: ClassVar[Mapping[str, str]] = {
        "_all_gather_process_group": "is for a unit that shards; this one only replicates. Read mesh_info.",
        "_reduce_scatter_process_group": "is for a unit that shards; this one only replicates. Read mesh_info.",
        "_all_reduce_process_group": "is for a unit with a replicate axis (HSDP). Read mesh_info.",
    }

    _unit: Unit
    _groups: tuple[ParamGroup, ...]
    _key = property(lambda view: view._groups)

    # Contents

    modules = property(lambda view: view._unit.modules)
    device = property(lambda view: view._mesh.device)
    mp_policy = property(lambda view: view._unit.policy)

    @property
    def fsdp_params(self) -> list[ParamView]:
        params = [(group, param) for group in self._groups for param in group.params]  # ties may have moved
        return self._kept(params, lambda: [ParamView(_around=self, _group=g, _param=param) for g, param in params])

    @property
    def offload_policy(self) -> OffloadPolicy:
        home = self._groups[0].home
        return CPUOffloadPolicy(home.pin_memory) if home.is_staged else OffloadPolicy()

    @property
    def mesh_info(self) -> Any:
        reduces = next((group.options.reduce_axis for group in self._groups), None)
        info = mesh_info(self._mesh)
        return torch_names.set_reduce_group(info, None if reduces is None else reduces.group)

    @property
    def _mesh(self) -> ParallelMesh:
        return next((g.mesh for g in self._groups if plans.AxisRole.SHARD in g.mesh.roles), self._groups[0].mesh)

    @property
    def _is_hsdp(self) -> bool:
        return {plans.AxisRole.SHARD, plans.AxisRole.REPLICATE} <= set(self._mesh.roles)

    @property
    def _all_gather_process_group(self) -> dist.ProcessGroup:
        smaller = self._smaller_mesh if self.is_sharded_post_forward else None
        return _group_or_refuse((smaller or self._mesh).shard.group)

    @property
    def _reduce_scatter_process_group(self) -> dist.ProcessGroup:
        axis = self._groups[0].options.reduce_axis or self._mesh.shard
        return _group_or_refuse(axis.group)

    @property
    def _all_reduce_process_group(self) -> dist.ProcessGroup:
        return _group_or_refuse(self._mesh.replicate.group)

    @property
    def _module_fqn(self) -> str | None:
        tree = self._unit.tree
        return None if tree is None else "" if tree.root is self._unit else self._unit.name

    def _with_fqn(self, label: str) -> str:
        return f"{label} ({self._module_fqn})" if self._module_fqn else label

    # State

    _form = property(lambda view: _OF_GROUP[view._groups[0].state])
    _sharded_state = property(lambda view: torch_names.member("ShardedState", view._form))
    is_sharded = property(lambda view: view._form == "SHARDED")
    is_sharded_post_forward = property(lambda view: view._form == "SHARDED_POST_FORWARD")
    is_unsharded = property(lambda view: view._form == "UNSHARDED")

    @property
    def _training_state(self) -> Any:
        return training_state(self._unit, self._groups)

    @_training_state.setter
    def _training_state(self, state: Any) -> None:
        """Clients set IDLE before they reshard, because torch otherwise refuses or ignores that call in a pass. The
        runtime's ``reshard()`` does not depend on this state."""
        if getattr(state, "name", None) != "IDLE":
            raise AttributeError(self._refusal("can set '_training_state' to IDLE only", "_training_state"))

    # What the user has configured

    unshard_in_backward = setting_of_unit("unshard_in_backward")
    reduce_grads = setting_of_unit("reduces")
    all_reduce_grads = _option_of_groups("requires_all_reduce")
    gradient_divide_factor = _option_of_groups("gradient_divide_factor", lambda factor: factor)
    reduce_scatter_unused_params = _option_of_groups("fills_gradients")
    force_sum_reduction_for_comms = _option_of_groups("divides_behind_hook")
    _reshard_after_forward = property(lambda view: view._after_forward is not AfterForward.KEEP)
    _use_post_forward_mesh = property(lambda view: view._after_forward is AfterForward.RESHARD_TO_SMALLER_MESH)

    @property
    def _after_forward(self) -> AfterForward:
        unit, tree = self._unit, self._unit.tree
        return unit.config.after_forward if tree is None else tree.rules_of(unit).after_forward

    @property
    def _smaller_mesh(self) -> ParallelMesh | None:
        return next((g.unsharded.post_forward_mesh for g in self._groups if g.unsharded.post_forward_mesh), None)

    @property
    def post_forward_mesh_info(self) -> Any:
        if self._after_forward is AfterForward.KEEP:
            return None
        smaller = self._smaller_mesh if self._after_forward is AfterForward.RESHARD_TO_SMALLER_MESH else None
        return self.mesh_info if smaller is None else mesh_info(smaller)

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, info: Any) -> None:
        smaller, size = self._smaller_mesh, None if info is None else torch_names.size_of(info)
        if size is None:
            after, ranks = AfterForward.KEEP, None
        elif size == self._mesh.shard.size:
            after, ranks = AfterForward.RESHARD, None
        elif smaller is not None and size == smaller.shard.size:
            after, ranks = AfterForward.RESHARD_TO_SMALLER_MESH, size
        else:
            raise AttributeError(
                f"fsdp2's view of torch's FSDPParamGroup: post_forward_mesh_info shards over {size} ranks, and unit "
                f"'{self._unit.name}' has no mesh for that. Pass reshard_after_forward={size} to fully_shard."
            )
        self._unit.configure(after_forward=after, stays_as_root=False, post_forward_size=ranks)

    @property
    def reshard_after_backward(self) -> bool | int:
        """The value that ``set_reshard_after_backward`` takes."""
        config = self._unit.config
        keeps_some = any(group.keeps_post_forward for group in self._groups)
        return config.post_forward_size or True if keeps_some else config.reshard_after_backward

    @reshard_after_backward.setter
    def reshard_after_backward(self, value: bool) -> None:
        self._unit.configure(reshard_after_backward=bool(value))

    # Operations

    def lazy_init(self) -> None:
        """Form the tree of units, which otherwise happens at the first use."""
        tree_of(self._unit)

    def unshard(self, async_op: bool = False) -> None:
        """Start gathering the unit; ``wait_for_unshard`` binds the parameters."""
        tree_of(self._unit).unshard(self._unit)

    def wait_for_unshard(self) -> None:
        """Bind the unsharded parameters, if a gather is in flight."""
        if self._unit.tree is not None:
            self._unit.tree.finish_unshard(self._unit)

    def reshard(self) -> None:
        self._unit.reshard()

    def post_backward(self, *_: object) -> None:
        """Reduce what backwards have kept, and reshard. The runtime does so for all units of a root together, in an
        order that all ranks share, so the first call does it. It also waits, as some clients call no final callback.

        Raises:
            ScheduleError: a backward is running.
        """
        unit, tree = self._unit, self._unit.tree
        if tree is None:
            return  # never used, so there is nothing to do
        if tree.passes.in_backward:
            raise ScheduleError(
                f"post_backward of unit '{unit.name}': a backward is running, which reduces the unit itself. Call "
                "post_backward after backward() has returned."
            )
        if unit.index in tree.schedule.kept:
            tree.finalize_backward()
            tree.land()
        elif unit.config.reshard_after_backward:
            unit.reshard()


@door.all_entries
class ParamView(View):
    """One parameter of a unit."""

    shows = "FSDPParam"
    instead: ClassVar[Mapping[str, str]] = {
        "sharded_param": REPLACE_PARAMETERS,
        "reset_sharded_param": REPLACE_PARAMETERS,
        "to_sharded": "reshard() of the module",
        "to_unsharded": "unshard() of the module",
        "all_gather_inputs": "set_custom_all_gather(comm) of the module, or all-gather hooks of a tensor subclass",
        "all_gather_outputs": "set_custom_all_gather(comm) of the module, or all-gather hooks of a tensor subclass",
        "_post_load_hook_handle": "load_state_dict of the module",
    }
    not_now: ClassVar[Mapping[str, str]] = {
        "_unsharded_param": "was never unsharded. Call unshard() of the module first.",
        "unsharded_param": "was never unsharded. Call unshard() of the module first.",
        "_sharded_param_data": "has no padding here, so its size differs from torch's. Read sharded_param.to_local().",
    }

    _around: ParamGroupView
    _group: ParamGroup
    _param: ShardedParam
    _key = property(lambda view: view._param)

    def __repr__(self) -> str:
        return f"ParamView(fqn={self._param_fqn}, orig_size={self._orig_size})"

    # Of the parameter

    sharded_param = _sharded_param = property(lambda view: view._param.sharded)
    sharded_size = property(lambda view: torch.Size(view._param.shard_shape))
    unsharded_accumulated_grad = property(lambda view: view._param.accumulated)
    orig_dtype = property(lambda view: view._param.dtypes.orig)
    mp_policy = property(lambda view: view._param.policy)
    mesh_info = property(lambda view: mesh_info(view._param.mesh))
    is_dtensor = property(lambda view: view._param.spec.unsharded is not None)
    fsdp_placement = property(lambda view: Shard(view._param.layout.dim))
    _sharded_local_tensor = property(lambda view: _torch.local_of(view._param.sharded))
    _sharding_spec = property(lambda view: view._param.spec.sharded)
    _module_info = property(lambda view: torch_names.places_of(view._param.slots))
    _orig_size = property(lambda view: torch.Size(view._param.layout.shape))

    # Of its group

    device = property(lambda view: view._around.device)
    post_forward_mesh_info = property(lambda view: view._around.post_forward_mesh_info)
    sharded_state = property(lambda view: torch_names.member("ShardedState", _OF_GROUP[view._group.state]))
    offload_to_cpu = property(lambda view: view._group.home.is_staged)
    pin_memory = property(lambda view: view._group.home.pin_memory)

    @property
    def _sharded_param_data(self) -> torch.Tensor:
        local: torch.Tensor = self._sharded_local_tensor
        if local.numel() != self._param.layout.chunk_numel:
            raise AttributeError  # the view adds the reason
        return local.view(-1)

    @property
    def unsharded_param(self) -> nn.Parameter:
        if self._param.unsharded is None:
            raise AttributeError  # the view adds the reason
        return self._param.unsharded

    _unsharded_param = unsharded_param

    @property
    def _param_fqn(self) -> str | None:
        return None if self._around._module_fqn is None else self._param.full_name

    @property
    def param_dtype(self) -> torch.dtype | None:
        """None if it is the dtype of the shard, as in torch."""
        dtypes = self._param.dtypes
        return None if dtypes.param is dtypes.orig else dtypes.param

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """None if it is the dtype of compute, as in torch."""
        dtypes = self._param.dtypes
        return None if dtypes.reduce is dtypes.param else dtypes.reduce

    def accumulate_unsharded_grad_if_needed(self) -> None:
        """Add this backward's gradients to the kept ones, in the reduce dtype."""
        self._group.gradients.keep_unreduced()

    to_accumulated_grad_if_needed = accumulate_unsharded_grad_if_needed


def _group_or_refuse(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        raise AttributeError  # the view adds the reason
    return group


def views_of(unit: Unit) -> list[ParamGroupView]:
    """A view for each mesh of ``unit``'s groups, in the order of the first parameter of each."""
    by_mesh: dict[Any, list[ParamGroup]] = {}
    for group in unit.groups:
        by_mesh.setdefault(group.mesh.mesh, []).append(group)
    return [ParamGroupView(_unit=unit, _groups=tuple(groups)) for groups in by_mesh.values()]
