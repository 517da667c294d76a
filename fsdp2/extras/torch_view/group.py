"""The parameters of a unit as torch's ``FSDPParamGroup`` and ``FSDPParam`` show them.

torch has one group for each mesh; the runtime has another one for scalars, which it all-reduces. A view shows all
groups on one mesh as one. Its methods act on the whole unit, like the methods of ``FSDPModule``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from fsdp2.core import _torch
from fsdp2.core.group.group import ParamGroup
from fsdp2.core.group.param import ShardedParam
from fsdp2.core.plan.mesh import AxisRole, ParallelMesh
from fsdp2.core.runtime import door
from fsdp2.core.runtime.unit import Unit
from fsdp2.core.runtime.unit_tree import tree_of
from fsdp2.core.schedule.schedule import AfterForward, Phase
from fsdp2.core.schedule.states import GroupState
from fsdp2.core.types import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy, ScheduleError
from fsdp2.extras.torch_view import torch_names
from fsdp2.extras.torch_view.view import View

_OF_PHASE = {
    Phase.IDLE: "IDLE",
    Phase.FORWARD: "FORWARD",
    Phase.RECOMPUTE: "FORWARD",
    Phase.BACKWARD: "PRE_BACKWARD",
    Phase.REDUCED: "POST_BACKWARD",
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
    return torch_names.training_state(name)


def mesh_info(mesh: ParallelMesh) -> Any:
    """``mesh`` as torch describes it."""
    options: dict[str, Any] = {}
    if mesh.spmd is not None:
        names = tuple(zip(mesh.spmd.mesh.mesh_dim_names or (), mesh.spmd.roles, strict=True))
        shard, replicate = (
            tuple(name for name, role in names if role is wanted) or None
            for wanted in (AxisRole.SHARD, AxisRole.REPLICATE)
        )
        options = {"dp_mesh_dims": DataParallelMeshDims(shard, replicate), "spmd_mesh": mesh.spmd.mesh}
    of_role = {role: index for index, role in enumerate(mesh.roles)}
    axes = of_role.get(AxisRole.SHARD), of_role.get(AxisRole.REPLICATE)
    return torch_names.mesh_info(mesh.mesh, *axes, **options)


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
        "fsdp_params": "nn.Module's ways to replace parameters: the next forward takes over what is bound",
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

    def __init__(self, unit: Unit, groups: Sequence[ParamGroup]) -> None:
        params = [ParamView(self, group, param) for group in groups for param in group.params]
        vars(self).update(_unit=unit, _groups=tuple(groups), _params=params)

    _unit: Unit
    _groups: tuple[ParamGroup, ...]
    _params: list[ParamView]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ParamGroupView) and self._groups == other._groups

    def __hash__(self) -> int:
        return hash(self._groups)

    # Contents

    @property
    def fsdp_params(self) -> list[ParamView]:
        shown = [param._param for param in self._params]
        if shown != [param for group in self._groups for param in group.params]:  # ties have moved since
            vars(self)["_params"] = [ParamView(self, group, param) for group in self._groups for param in group.params]
        return list(self._params)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self._unit.modules

    @property
    def device(self) -> torch.device:
        return self._mesh.device

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        return self._unit.policy

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
        return next((g.mesh for g in self._groups if AxisRole.SHARD in g.mesh.roles), self._groups[0].mesh)

    @property
    def _is_hsdp(self) -> bool:
        return {AxisRole.SHARD, AxisRole.REPLICATE} <= set(self._mesh.roles)

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

    @property
    def _training_state(self) -> Any:
        return training_state(self._unit, self._groups)

    @_training_state.setter
    def _training_state(self, state: Any) -> None:
        """Clients set IDLE before they reshard, because torch otherwise refuses or ignores that call in a pass. The
        runtime's ``reshard()`` does not depend on this state."""
        if getattr(state, "name", None) != "IDLE":
            raise AttributeError(self._refusal("can set '_training_state' to IDLE only", "_training_state"))

    @property
    def _sharded_state(self) -> Any:
        return torch_names.sharded_state(_OF_GROUP[self._groups[0].state])

    @property
    def is_sharded(self) -> bool:
        return _OF_GROUP[self._groups[0].state] == "SHARDED"

    @property
    def is_sharded_post_forward(self) -> bool:
        return _OF_GROUP[self._groups[0].state] == "SHARDED_POST_FORWARD"

    @property
    def is_unsharded(self) -> bool:
        return _OF_GROUP[self._groups[0].state] == "UNSHARDED"

    # What the user has configured

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
    def _reshard_after_forward(self) -> bool:
        return self._after_forward is not AfterForward.KEEP

    @property
    def _use_post_forward_mesh(self) -> bool:
        return self._after_forward is AfterForward.RESHARD_TO_SMALLER_MESH

    @property
    def reshard_after_backward(self) -> bool | int:
        """The value that ``set_reshard_after_backward`` takes."""
        config = self._unit.config
        keeps_some = any(group.keeps_post_forward for group in self._groups)
        return config.post_forward_size or True if keeps_some else config.reshard_after_backward

    @reshard_after_backward.setter
    def reshard_after_backward(self, value: bool) -> None:
        self._unit.configure(reshard_after_backward=bool(value))

    @property
    def unshard_in_backward(self) -> bool:
        return self._unit.config.unshard_in_backward

    @unshard_in_backward.setter
    def unshard_in_backward(self, value: bool) -> None:
        self._unit.configure(unshard_in_backward=bool(value))

    @property
    def reduce_grads(self) -> bool:
        return self._unit.config.reduces

    @reduce_grads.setter
    def reduce_grads(self, value: bool) -> None:
        self._unit.configure(reduces=bool(value))

    @property
    def all_reduce_grads(self) -> bool:
        return self._groups[0].options.requires_all_reduce

    @all_reduce_grads.setter
    def all_reduce_grads(self, value: bool) -> None:
        self._configure(requires_all_reduce=bool(value))

    @property
    def gradient_divide_factor(self) -> float | None:
        return self._groups[0].options.gradient_divide_factor

    @gradient_divide_factor.setter
    def gradient_divide_factor(self, value: float | None) -> None:
        self._configure(gradient_divide_factor=value)

    @property
    def reduce_scatter_unused_params(self) -> bool:
        return self._groups[0].options.fills_gradients

    @reduce_scatter_unused_params.setter
    def reduce_scatter_unused_params(self, value: bool) -> None:
        self._configure(fills_gradients=bool(value))

    @property
    def force_sum_reduction_for_comms(self) -> bool:
        return self._groups[0].options.divides_behind_hook

    @force_sum_reduction_for_comms.setter
    def force_sum_reduction_for_comms(self, value: bool) -> None:
        self._configure(divides_behind_hook=bool(value))

    def _configure(self, **changes: Any) -> None:
        for group in self._groups:
            group.configure(**changes)

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
        "sharded_param": "nn.Module's ways to replace parameters: the next forward takes over what is bound",
        "reset_sharded_param": "nn.Module's ways to replace parameters: the next forward takes over what is bound",
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

    def __init__(self, around: ParamGroupView, group: ParamGroup, param: ShardedParam) -> None:
        vars(self).update(_around=around, _group=group, _param=param)

    _around: ParamGroupView
    _group: ParamGroup
    _param: ShardedParam

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ParamView) and self._param is other._param

    def __hash__(self) -> int:
        return hash(self._param)

    def __repr__(self) -> str:
        return f"ParamView(fqn={self._param_fqn}, orig_size={self._orig_size})"

    @property
    def sharded_param(self) -> nn.Parameter:
        return self._param.sharded

    _sharded_param = sharded_param

    @property
    def _sharded_local_tensor(self) -> torch.Tensor:
        return _torch.local_of(self._param.sharded)

    @property
    def _sharded_param_data(self) -> torch.Tensor:
        local = self._sharded_local_tensor
        if local.numel() != self._param.layout.chunk_numel:
            raise AttributeError
        return local.view(-1)

    @property
    def unsharded_param(self) -> nn.Parameter:
        if self._param.unsharded is None:
            raise AttributeError
        return self._param.unsharded

    _unsharded_param = unsharded_param

    @property
    def unsharded_accumulated_grad(self) -> torch.Tensor | None:
        return self._param.accumulated

    @property
    def _param_fqn(self) -> str | None:
        return None if self._around._module_fqn is None else self._param.full_name

    @property
    def _module_info(self) -> Any:
        return torch_names.places_of(self._param.slots)

    @property
    def sharded_state(self) -> Any:
        return torch_names.sharded_state(_OF_GROUP[self._group.state])

    @property
    def orig_dtype(self) -> torch.dtype:
        return self._param.dtypes.orig

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

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        return self._param.policy

    @property
    def device(self) -> torch.device:
        return self._around.device

    @property
    def mesh_info(self) -> Any:
        return mesh_info(self._param.mesh)

    @property
    def post_forward_mesh_info(self) -> Any:
        return self._around.post_forward_mesh_info

    @property
    def offload_to_cpu(self) -> bool:
        return self._group.home.is_staged

    @property
    def pin_memory(self) -> bool:
        return self._group.home.pin_memory

    @property
    def is_dtensor(self) -> bool:
        return self._param.spec.unsharded is not None

    @property
    def fsdp_placement(self) -> Shard:
        return Shard(self._param.layout.dim)

    @property
    def _orig_size(self) -> torch.Size:
        return torch.Size(self._param.layout.shape)

    @property
    def sharded_size(self) -> torch.Size:
        return torch.Size(self._param.shard_shape)

    @property
    def _sharding_spec(self) -> Any:
        return self._param.spec.sharded

    def accumulate_unsharded_grad_if_needed(self) -> None:
        """Add this backward's gradients to the kept ones, in the reduce dtype."""
        self._group.gradients.keep_unreduced()

    def to_accumulated_grad_if_needed(self) -> None:
        """Keep this backward's gradients in the reduce dtype."""
        self._group.gradients.keep_unreduced()


def _group_or_refuse(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        raise AttributeError  # the view adds the reason
    return group


def views_of(unit: Unit) -> list[ParamGroupView]:
    """A view for each mesh of ``unit``'s groups, in the order of the first parameter of each."""
    by_mesh: dict[Any, list[ParamGroup]] = {}
    for group in unit.groups:
        by_mesh.setdefault(group.mesh.mesh, []).append(group)
    return [ParamGroupView(unit, groups) for groups in by_mesh.values()]
