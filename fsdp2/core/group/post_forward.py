"""Shards on the post-forward mesh. With ``reshard_after_forward=n``, a group keeps them between forward and backward;
with ``set_reshard_after_backward(n)``, it keeps them until its parameters change.

The unsharded parameters are sharded over a smaller group of ranks. So the gather in backward crosses fewer links, but
each shard is larger. Everything is bound once; ``cut`` allocates the memory, and ``release`` frees it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp2.core import _torch, seams
from fsdp2.core.comm.backends import comm_for
from fsdp2.core.comm.custom import GathersBy, carrier
from fsdp2.core.comm.streams import Streams
from fsdp2.core.group.all_gather import Gather, allocate, flat_shards, shard_slice
from fsdp2.core.group.param import ShardedParam
from fsdp2.core.plan.mesh import ParallelMesh
from fsdp2.core.plan.plan import compile_gather, cut_after_forward


class PostForwardShards:
    """One group's parameters on the post-forward mesh.

    Attributes:
        gather: the gather back into the group's unsharded storage.
        parameters: what is bound between forward and backward for each parameter of the group: the DTensor on the
            post-forward mesh, or the sharded parameter if it has all-gather hooks or is a DTensor on model axes.
        has_values: whether the shards hold values; true between ``cut`` and ``release``.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        full: Gather,
        hooks: seams.Codec | None,
        mesh: ParallelMesh,
        streams: Streams,
        gathers_by: GathersBy | None,
    ) -> None:
        self._mesh = mesh
        self._comm = comm_for(mesh.shard, mesh.device, is_async=streams.gathers_are_async)
        inputs = {step.index: cut_after_forward(step, mesh.shard.size) for step in full.plan.steps}
        plan = compile_gather(inputs, self._comm.routing, back_into=full.plan)
        flats = flat_shards(plan, mesh.device)
        rank = mesh.shard.rank
        comm = carrier(self._comm, gathers_by, mesh.shard, mesh.device)
        self.gather = Gather(plan, flats, full.gathered, rank, comm, streams, hooks, calls_pre_hooks=False)
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        # With hooks or on model axes, no DTensor describes the kept data, so the sharded parameter stays bound.
        self.parameters = [param.sharded for param in params]
        for step in plan.steps:
            start, stop = step.layout.interval(rank)
            local = shard_slice(flats, step, step.layout.shard_shape(rank))
            self._targets.append(local)
            output = full.outputs[step.index].view(step.layout.shape)
            self._sources.append(output.narrow(step.layout.dim, start, stop - start))
            if step.index < len(params) and params[step.index].spec.unsharded is None:
                self.parameters[step.index] = params[step.index].post_forward_parameter(local, mesh)
        self._memory = [(flat.untyped_storage(), flat.untyped_storage().nbytes()) for flat in flats.values()]
        self.release()

    def set_comm(self, gathers_by: GathersBy | None) -> None:
        """From the next launch on, gather with the comms that ``gathers_by`` makes; None: with the backend's own."""
        self.gather.set_comm(carrier(self._comm, gathers_by, self._mesh.shard, self._mesh.device))

    def cut(self) -> None:
        """Copy this rank's part out of the unsharded parameters. The caller then releases these, and gathers wait for
        that release (I3). So the copies are complete before a gather sends them."""
        allocate(self._memory)
        _torch.foreach_copy(self._targets, self._sources)
        self.has_values = True

    def release(self) -> None:
        """Free the shards, if there are any, unless a failed collective may still send from them (I17)."""
        self.has_values = False
        if not self.gather.gathered.is_lost:
            for storage, _ in self._memory:
                storage.resize_(0)
