"""*Where* bytes lie, for rooms: layouts of shards, meshes and their axes, dtypes, and plans of gathers and reductions.

Everything here is pure, but for meshes, which create process groups.
"""

from fsdp2.core.plan.dtypes import GRADIENTS_FOLLOW_SHARDS, ParamDtypes, cast_floating, param_dtypes
from fsdp2.core.plan.layout import ALIGNMENT_NBYTES, Layout, contiguous_stride, join, pack, shard_layout
from fsdp2.core.plan.mesh import (
    NO_AXIS,
    AxisRole,
    SpmdMesh,
    default_mesh,
    mesh_device,
    mesh_with_roles,
    parallel_mesh,
    replicated,
)
from fsdp2.core.plan.placements import ParamSpec, TensorSpec, local_part, param_spec, plain_spec
from fsdp2.core.plan.plan import (
    GatherPlan,
    GatherStep,
    Origin,
    PlanInput,
    ReducePlan,
    ReduceStep,
    Route,
    Routing,
    compile_gather,
    compile_reduces,
    cut_after_forward,
)
