"""The unsharded form of one group's parameters: the gather that fills it, what compute reads, and what rests meanwhile.

At first use a plan is compiled and bound to memory; every step replays it. Knows nothing of states: the group says when
to gather, from what, and when to release. Rule: what autograd has saved stays the same objects as long as they lie
where they did (I1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fsdp2.comm.backends import AxisComm, comm_for
from fsdp2.comm.custom import gather_comm
from fsdp2.comm.offload import FlatStage, Home
from fsdp2.comm.services import Services, services_for
from fsdp2.group.all_gather import FlatShards, Gather, GatheredMemory, LocalGather, PendingGather, is_local
from fsdp2.group.freed import FreedGuard
from fsdp2.group.hooked_params import ExtendedParams
from fsdp2.group.param import ShardedParam
from fsdp2.group.post_forward import RestingShards
from fsdp2.group.shards import GroupShards
from fsdp2.plan.mesh import ParallelMesh
from fsdp2.plan.plan import GatherPlan, Lifetime, compile_gather
from fsdp2.tools.budget import UnitBytes
from fsdp2.tools.footprint import gather_bytes
from fsdp2.types import AllGather


class GatheredParams:
    """See the module's text.

    Attributes:
        comm, services: the backend's own gathers, and the streams and the memory that the group works with.
        parameters: what compute reads; none before the first gather has arrived.
        requires_grad: of each parameter, what was last seen on the sharded one.
        trainable: the positions of those that require gradients, once there are ``parameters``.
        resting_mesh: the post-forward mesh, if there is one.
    """

    def __init__(
        self, params: Sequence[ShardedParam], shards: GroupShards, mesh: ParallelMesh, home: Home, comm: AxisComm
    ) -> None:
        self._params, self._shards, self._mesh, self._home = params, shards, mesh, home
        self.comm, self.services = comm, services_for(mesh.device)
        self.resting_mesh: ParallelMesh | None = None
        self.requires_grad: list[bool] = []
        self._all_gather: AllGather | None = None
        self._memory: GatheredMemory | None = None
        self._regions: object = None  # of what lies in that memory
        self._extended: ExtendedParams | None = None
        self.unbind()

    def unbind(self) -> None:
        """Forget what was compiled: dtypes, layouts or streams have changed."""
        self._gather: Gather | LocalGather | None = None
        self._resting: RestingShards | None = None
        self.parameters: list[nn.Parameter] = []
        self.trainable: tuple[int, ...] = ()
        self._guard = FreedGuard(())

    # What is asked for

    def rest_on(self, mesh: ParallelMesh | None) -> None:
        """The post-forward mesh from now on."""
        self.resting_mesh, self._resting = mesh, None

    def carry_by(self, all_gather: AllGather | None) -> None:
        """From the next launch on, ``all_gather`` carries what is gathered; None is the backend's."""
        self._all_gather = all_gather
        with torch.inference_mode(False), torch.no_grad(), self.services.streams.on_gather():
            if isinstance(self._gather, Gather):
                self._gather.carry_by(gather_comm(self.comm, self._mesh, all_gather))
            if self._resting is not None:
                self._resting.carry_by(all_gather)

    def move_to(self, services: Services) -> None:
        """Gather on the streams of ``services`` from now on. Nothing is unsharded, or in flight."""
        if self._gather is not None:
            self._gather.release()  # what was kept, too: memory belongs to the stream it was allocated on
        self.services.flush()
        self.services = services
        self.comm = comm_for(self._mesh.shard, self._mesh.device, is_async=services.streams.gathers_are_async)
        self.unbind()

    # What there is

    @property
    def is_bound(self) -> bool:
        """Whether a plan has been compiled."""
        return self._gather is not None

    @property
    def has_hooks(self) -> bool:
        """Whether all-gather hooks decide what some parameter sends."""
        return self._extended is not None

    @property
    def nbytes(self) -> int:
        """Size of the unsharded parameters with what hooks make of them; 0 as long as nobody has asked for them."""
        return self._made_by_hooks + (self._gather.plan.unsharded_nbytes if self._gather is not None else 0)

    @property
    def footprint(self) -> UnitBytes:
        """What gathering takes; what hooks send is counted from the first gather on."""
        if isinstance(self._gather, LocalGather):
            return UnitBytes()
        shards = self._shards
        return gather_bytes(
            compile_gather(shards.plain_inputs(), self.comm) if self._gather is None else self._gather.plan,
            gather_comm(self.comm, self._mesh, self._all_gather),
            made_by_hooks=self._made_by_hooks,
            staged=sum(flat.nbytes for flat in shards.flats.values()) if self._home.is_staged else 0,
            resting_ranks=0 if self.resting_mesh is None else self.resting_mesh.shard.size,
        )

    @property
    def _made_by_hooks(self) -> int:
        return sum(nbytes for param in self._params for _, nbytes in param.inner)

    # At first use

    def bind(self) -> None:
        """Compile and bind the gather.

        Raises:
            ExtensionError: hooks are missing, or returned what cannot be gathered; on all ranks alike.
            RuntimeError: a parameter is still on the meta device.
        """
        self._shards.check_ready()
        # These tensors outlive the pass that first needs them.
        with torch.inference_mode(False), torch.no_grad(), self.services.streams.on_gather():
            inputs = self._shards.plain_inputs()
            first_key = len(self._params)
            if len(inputs) < first_key:
                inputs |= self._bind_hooks().inputs(first_key, self._consumed_lifetime)
            else:
                self._extended = None
            gather = self._bound(compile_gather(inputs, self.comm))
            if self._extended is not None:
                self._extended.bind_outputs(gather.outputs, first_key)
        self._gather = gather
        self.requires_grad = self._shards.requires_grad()

    def _bind_hooks(self) -> ExtendedParams:
        hooked = [param for index, param in enumerate(self._params) if index not in self._shards.plain]
        self._extended = ExtendedParams(hooked, self._mesh, self._home, self.services, self._extended)
        return self._extended

    @property
    def _consumed_lifetime(self) -> Lifetime:
        """How long what hooks consume is kept: the post-forward mesh wants a part of it."""
        return Lifetime.ARRIVAL if self.resting_mesh is None else Lifetime.UNSHARDED

    def _bound(self, plan: GatherPlan) -> Gather | LocalGather:
        flats, mesh, services = self._shards.flats, self._mesh, self.services
        stage = FlatStage(flats, mesh.device, services.streams) if self._home.is_staged else None
        if self._extended is None and stage is None and is_local(plan, mesh):
            self._memory_for(plan, flats)
            return LocalGather(plan, flats, services.streams)
        comm = gather_comm(self.comm, mesh, self._all_gather)
        return Gather(
            plan, flats, self._memory_for(plan, {}), mesh.shard.rank, comm, services, self._extended, stage=stage
        )

    def _memory_for(self, plan: GatherPlan, flats: FlatShards) -> GatheredMemory:
        """The memory to gather into, unless ``flats`` are read right away. Unsharded parameters stay the same objects
        if they lie where they did: autograd may have saved them."""
        regions = _regions(plan, flats)
        if regions != self._regions or self._memory is None:
            self._memory = GatheredMemory(plan, self._mesh.device)
            for param in self._params:
                param.forget_unsharded()
        self._regions = regions
        return self._memory

    def adopt(self) -> None:
        """The first gather has arrived: what it filled becomes the parameters that compute reads."""
        assert self._gather is not None
        with torch.inference_mode(False), torch.no_grad():
            for index in self._shards.plain:
                param = self._params[index]
                if param.unsharded is None:
                    param.unsharded = param.unsharded_parameter(self._gather.outputs[index])
        self.parameters = [param.unsharded for param in self._params if param.unsharded is not None]
        self._guard = FreedGuard(self.parameters)
        for param in self._params:
            param.follow_compute_dtype()

    def follow_requires_grad(self) -> None:
        """Follow what the user set on the sharded parameters."""
        self.requires_grad = self._shards.requires_grad()
        for unsharded, requires_grad in zip(self.parameters, self.requires_grad, strict=True):
            unsharded.requires_grad_(requires_grad)
        self.trainable = tuple(i for i, requires_grad in enumerate(self.requires_grad) if requires_grad)

    # In every step

    def issue(self, *, is_resting: bool) -> PendingGather:
        """Start gathering: what rests on the post-forward mesh, unless it has been forgotten; else the shards."""
        gather = self._gather if self._resting is None or not is_resting else self._resting
        assert gather is not None
        return gather.issue()

    def open(self) -> None:
        """What was gathered may be read."""
        self._guard.open()

    def wait_for_reads(self) -> None:
        """Have the CPU wait until no copy to the device reads the shards any more."""
        if isinstance(self._gather, Gather) and self._gather.stage is not None:
            self._gather.stage.wait()

    def cut(self) -> Sequence[nn.Parameter]:
        """Copy out what rests on the post-forward mesh. Returns what is bound meanwhile."""
        if self._resting is None:
            assert isinstance(self._gather, Gather)
            assert self.resting_mesh is not None
            with torch.inference_mode(False), torch.no_grad():
                self._resting = RestingShards(
                    self._params, self._gather, self._extended, self.resting_mesh, self.services
                )
                self._resting.carry_by(self._all_gather)
        self._resting.cut()
        return self._resting.parameters

    def free_resting(self) -> None:
        """Free what rests, if anything does."""
        if self._resting is not None:
            self._resting.release()

    def release(self, *, keeps_memory: bool) -> None:
        """Free the unsharded parameters when compute has read them; or keep their memory, to be written then."""
        assert self._gather is not None
        if isinstance(self._gather, Gather) and not keeps_memory:
            self._guard.close()
        self._gather.release(keeps_memory=keeps_memory)


def _regions(plan: GatherPlan, flats: FlatShards) -> object:
    """Where the unsharded parameters lie, and what lies there; ``flats`` if that is in them."""
    places = [(step.index, step.offset_nbytes, step.layout.shape, step.dtype, step.lifetime) for step in plan.steps]
    return sorted(places, key=lambda place: place[0]), [flat.data_ptr() for flat in flats.values()]
