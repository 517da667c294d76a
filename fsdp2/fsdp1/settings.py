"""The arguments of ``FullyShardedDataParallel``: checked, and translated to what the runtime takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from fsdp2.plan.mesh import ParallelMesh, default_mesh, parallel_mesh, replicated
from fsdp2.types import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
KEEPS_PARAMETERS = (
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy._HYBRID_SHARD_ZERO2,
    ShardingStrategy.NO_SHARD,
)

ProcessGroups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None


@dataclass(frozen=True)
class Settings:
    """What one wrapper was given, with defaults filled in.

    Attributes:
        parallel: the ranks that parameters are sharded over and replicated on.
        device_mesh: the mesh that the user gave, if any. It decides whether sharded state dicts have DTensors.
        process_group: the ranks that parameters are sharded over, or copied to (``NO_SHARD``).
    """

    parallel: ParallelMesh
    device_mesh: DeviceMesh | None
    process_group: dist.ProcessGroup
    strategy: ShardingStrategy
    mixed_precision: MixedPrecision
    cpu_offload: CPUOffload
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    limit_all_gathers: bool
    use_orig_params: bool

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """The dtypes of parameters and of the reduction. The wrapper casts inputs itself: the root by another rule."""
        given = self.mixed_precision
        return MixedPrecisionPolicy(
            param_dtype=given.param_dtype,
            reduce_dtype=given.reduce_dtype or given.param_dtype,
            cast_forward_inputs=False,
        )

    @property
    def offload_policy(self) -> OffloadPolicy:
        return CPUOffloadPolicy() if self.cpu_offload.offload_params else OffloadPolicy()

    @property
    def reshard_after_forward(self) -> bool | None:
        """None: True, but False for the root, whose parameters backward needs first."""
        return False if self.strategy in KEEPS_PARAMETERS else None


def checked_settings(
    process_group: ProcessGroups,
    sharding_strategy: ShardingStrategy | None,
    cpu_offload: CPUOffload | None,
    backward_prefetch: BackwardPrefetch | None,
    mixed_precision: MixedPrecision | None,
    device_id: int | torch.device | None,
    device_mesh: DeviceMesh | None,
    **others: Any,
) -> Settings:
    """The settings of one wrapper.

    Raises:
        ValueError: arguments contradict each other.
    """
    strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
    mesh = device_mesh or _mesh_of(process_group)
    parallel = parallel_mesh(mesh)
    group = parallel.shard.group
    assert group is not None
    if strategy is ShardingStrategy.NO_SHARD:
        parallel = replicated(parallel)
    return Settings(
        parallel=parallel,
        device_mesh=device_mesh,
        process_group=group,
        strategy=strategy,
        mixed_precision=mixed_precision or MixedPrecision(),
        cpu_offload=cpu_offload or CPUOffload(),
        backward_prefetch=backward_prefetch,
        **others,
    )


def _mesh_of(process_group: ProcessGroups) -> DeviceMesh:
    if process_group is None:
        return default_mesh()
    raise NotImplementedError


def ignored_params_of(module: nn.Module, ignored_modules: Any, ignored_states: Any) -> set[nn.Parameter]:
    """The parameters that stay as they are."""
    return set()
