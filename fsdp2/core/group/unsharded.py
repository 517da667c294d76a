"""The unsharded form of one group's parameters: the gather that fills it, and what compute reads.

At first use, a plan is compiled and bound to memory; in every step, the group replays the plan. Rule: tensors that
autograd has saved stay the same objects as long as their place in memory stays the same (I1).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, count

import torch
from torch import nn

from fsdp2.core import _torch, seams
from fsdp2.core.comm.backends import AxisComm, GatherComm, comm_for
from fsdp2.core.comm.custom import GathersBy, carrier
from fsdp2.core.comm.offload import FlatStage, Home
from fsdp2.core.comm.streams import Streams, streams_for
from fsdp2.core.group.all_gather import FlatShards, Gather, GatheredMemory, LocalGather
from fsdp2.core.group.param import ShardedParam
from fsdp2.core.group.post_forward import PostForwardShards
from fsdp2.core.group.shards import GroupShards
from fsdp2.core.plan.mesh import ParallelMesh
from fsdp2.core.plan.plan import GatherPlan, compile_gather


class UnshardedParams:
    """The unsharded parameters of one group.

    Attributes:
        comm, streams: the backend's own comm, and the streams that the group uses.
        carrier: the comm that runs the gathers: the user's own, or the backend's.
        gather: the gather of the shards, once it is bound.
        post_forward: the shards on ``post_forward_mesh``, once that has been used.
        parameters: what compute reads; empty until the first gather has arrived.
        versioned, saved_versions: the tensors whose versions autograd compares, and the versions that it saved.
        requires_grad: for each parameter, the flag that ``follow_requires_grad`` has set on all its forms.
        trainable: the positions of the parameters that require gradients, once there are ``parameters``.
        hooked: the codec of the parameters with all-gather hooks, if there are any.
        post_forward_mesh: the smaller mesh for shards between forward and backward, if there is one. Set it before the
            first use.
    """

    def __init__(
        self, params: Sequence[ShardedParam], shards: GroupShards, mesh: ParallelMesh, home: Home, comm: AxisComm
    ) -> None:
        self._params, self._shards, self._mesh, self._home = params, shards, mesh, home
        self.comm, self.streams = comm, streams_for(mesh.device)
        self.carrier: GatherComm = comm
        self.post_forward_mesh: ParallelMesh | None = None
        self._gathers_by: GathersBy | None = None
        self._memory: GatheredMemory | None = None
        self._places: object = None  # where each tensor is in ``_memory``
        self.hooked: seams.Codec | None = None
        self.unbind()

    def unbind(self) -> None:
        """Forget the compiled plan: dtypes, layouts or streams have changed."""
        self.gather: Gather | LocalGather | None = None
        self.post_forward: PostForwardShards | None = None
        self.parameters: list[nn.Parameter] = []
        self.requires_grad: list[bool] = []
        self.trainable: tuple[int, ...] = ()
        self.versioned: tuple[torch.Tensor, ...] = ()
        self.saved_versions: tuple[int, ...] = ()

    # Configuration

    def set_comm(self, gathers_by: GathersBy | None) -> None:
        """From the next launch on, gather with the comms that ``gathers_by`` makes; None: with the backend's own."""
        self._gathers_by = gathers_by
        self.carrier = carrier(self.comm, gathers_by, self._mesh.shard, self._mesh.device)
        with torch.inference_mode(False), torch.no_grad(), self.streams.on_gather:
            if isinstance(self.gather, Gather):
                self.gather.set_comm(self.carrier)
            if self.post_forward is not None:
                self.post_forward.set_comm(gathers_by)

    def move_to(self, streams: Streams) -> None:
        """Gather on ``streams`` from now on. Requires that nothing is unsharded or in flight."""
        if self.gather is not None:
            self.gather.release()  # also kept memory, which belongs to the stream it was allocated on
        self.streams = streams
        self.comm = comm_for(self._mesh.shard, self._mesh.device, is_async=streams.gathers_are_async)
        self.carrier = carrier(self.comm, self._gathers_by, self._mesh.shard, self._mesh.device)
        self.unbind()

    # Sizes and plan

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded parameters, including the inner tensors that hooks make. What hooks send is included
        from the first gather on."""
        return self.plan().unsharded_nbytes + sum(nbytes for param in self._params for _, nbytes in param.inner)

    def plan(self) -> GatherPlan:
        """The plan that a gather runs. From the first gather on, it includes what hooks send."""
        if self.gather is not None:
            return self.gather.plan
        return compile_gather(self._shards.plain_inputs(), self.comm.routing)

    # At first use

    def bind(self) -> None:
        """Compile and bind the gather.

        Raises:
            ExtensionError: hooks are missing, or returned something that cannot be gathered; all ranks raise.
            RuntimeError: a parameter is still on the meta device.
        """
        self._shards.check_ready()
        seams.warn_of_hooks(self._params, is_sharded=True)
        # These tensors live longer than the first pass.
        with torch.inference_mode(False), torch.no_grad(), _torch.without_autocast(), self.streams.on_gather:
            inputs = self._shards.plain_inputs()
            first_key = len(self._params)
            hooked = [param for index, param in enumerate(self._params) if index not in self._shards.plain]
            self.hooked = seams.make_codec(hooked, self._mesh, self._home) if hooked else None
            if self.hooked is not None:
                # What hooks consume is freed on arrival, unless the post-forward mesh needs a part of it.
                inputs |= self.hooked.inputs(first_key, keeps_consumed=self.post_forward_mesh is not None)
            gather = self._bound(compile_gather(inputs, self.comm.routing))
            if self.hooked is not None:
                self.hooked.bind_outputs(gather.outputs, first_key)
        self.gather = gather

    def _bound(self, plan: GatherPlan) -> Gather | LocalGather:
        flats, mesh, streams = self._shards.flats, self._mesh, self.streams
        if self.is_local(plan, is_staged=self._home.is_staged):
            self._memory_for(plan, flats)
            return LocalGather(plan, flats)
        memory = self._memory_for(plan, {})
        stage = FlatStage(flats, mesh.device, streams) if self._home.is_staged else None
        return Gather(plan, flats, memory, mesh.shard.rank, self.carrier, streams, self.hooked, stage=stage)

    def is_local(self, plan: GatherPlan, *, is_staged: bool) -> bool:
        """Whether the shards themselves would be the unsharded parameters with ``plan`` and ``is_staged``."""
        if self._mesh.shard.size > 1 or is_staged or len(self._shards.plain) < len(self._params):
            return False
        return not any(step.is_copied_in for step in plan.steps)

    def _memory_for(self, plan: GatherPlan, flats: FlatShards) -> GatheredMemory:
        """The memory to gather into. ``flats``: the buffers that compute reads directly, if any. If all places in
        memory are unchanged, the unsharded parameters stay the same objects, since autograd may have saved them."""
        steps = sorted(plan.steps, key=lambda step: step.index)
        places = [(step.index, step.offset_nbytes, step.layout.shape, step.dtype, step.origin) for step in steps]
        found = places, [flat.data_ptr() for flat in flats.values()]
        if found != self._places or self._memory is None:
            self._memory = GatheredMemory(plan, self._mesh.device)
            for param in self._params:
                param.forget_unsharded()
        self._places = found
        return self._memory

    def adopt(self) -> None:
        """The first gather has arrived: make its outputs the parameters that compute reads."""
        assert self.gather is not None
        with torch.inference_mode(False), torch.no_grad():
            for index in self._shards.plain:
                param = self._params[index]
                if param.unsharded is None:
                    param.unsharded = param.unsharded_parameter(self.gather.outputs[index])
        self.parameters = [param.unsharded for param in self._params if param.unsharded is not None]
        if isinstance(self.gather, Gather):
            self.versioned = tuple(tensor for param in self.parameters for tensor in _torch.versioned(param))
            self.saved_versions = tuple(_torch.versions_of(self.versioned))
        for param in self._params:
            param.follow_compute_dtype()
        self.follow_requires_grad(self.requires_grad)

    def follow_requires_grad(self, requires_grad: list[bool]) -> None:
        """Give the unsharded parameters, and those on the post-forward mesh, the flags of the sharded ones."""
        self.requires_grad = requires_grad
        for forms in (self.parameters, [] if self.post_forward is None else self.post_forward.parameters):
            for form, is_trainable in zip(forms, requires_grad, strict=False):  # no forms before the first gather
                form.requires_grad_(is_trainable)
        self.trainable = tuple(compress(count(), requires_grad)) if self.parameters else ()

    # In every step

    def wait_for_reads(self) -> None:
        """Make the CPU wait until no copy to the device reads the shards any more."""
        if self.gather is not None and self.gather.stage is not None:
            self.gather.stage.wait()

    def cut(self) -> Sequence[nn.Parameter]:
        """Copy out this rank's part for the post-forward mesh, unless this was done. Returns the parameters to bind
        until backward."""
        if self.post_forward is None:
            assert isinstance(self.gather, Gather)
            assert self.post_forward_mesh is not None
            with torch.inference_mode(False), torch.no_grad():
                self.post_forward = PostForwardShards(
                    self._params, self.gather, self.hooked, self.post_forward_mesh, self.streams, self._gathers_by
                )
        if not self.post_forward.has_values:
            self.post_forward.cut()
        return self.post_forward.parameters

    def release_post_forward(self) -> None:
        """Free the shards on the post-forward mesh, if there are any."""
        if self.post_forward is not None:
            self.post_forward.release()
