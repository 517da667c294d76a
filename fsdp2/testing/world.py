"""All ranks in one process, and the all-gather between them.

``World`` does to memory what the runtime does, and worse: memory that is not promised to hold anything holds garbage.
It knows nothing of checks; what a hook does wrong is an ``ExtensionError`` of ``extensions``, as in the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2 import _torch
from fsdp2.comm.memory import tensor_on
from fsdp2.group.all_gather import pieces
from fsdp2.group.extensions import HookContext, Hooks
from fsdp2.group.shards import count_steps
from fsdp2.plan.layout import JoinedLayout, ShardLayout, contiguous_stride, join
from fsdp2.testing.stand_in import StandInMesh, local_of
from fsdp2.types import ExtensionError, MixedPrecisionPolicy

T = TypeVar("T")

# What errors call the parameter; reports leave it out.
PARAMETER = "tested"

# As a float of any width a huge number or NaN, as an integer its largest byte: it does not pass for a value.
_GARBAGE = 0x7F


@dataclass(frozen=True)
class Setting:
    """How ``fully_shard`` would have been called, but for the ranks."""

    policy: MixedPrecisionPolicy
    param_dtype: torch.dtype
    device: torch.device
    trainable: bool
    prepare: Callable[[list[torch.Tensor]], object] | None


@dataclass
class Memory:
    """Storages that come and go together, with their sizes."""

    sized: dict[int, tuple[torch.UntypedStorage, int]] = field(default_factory=dict)

    def add(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes():
            self.sized[storage.data_ptr()] = (storage, storage.nbytes())

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Only while it has memory."""
        return storage.data_ptr() in {mine.data_ptr() for mine, _ in self.sized.values()}

    def allocate(self) -> None:
        """Other memory than before, full of garbage."""
        kept = [torch.UntypedStorage(nbytes, device=storage.device) for storage, nbytes in self.sized.values()]
        for storage, nbytes in self.sized.values():
            storage.resize_(nbytes)
        self.spoil()
        del kept  # it has kept the allocator from handing out the same block again

    def spoil(self) -> None:
        for storage, _ in self.sized.values():
            fill_with_garbage(storage)

    def release(self) -> None:
        for storage, _ in self.sized.values():
            storage.resize_(0)


def fill_with_garbage(storage: torch.UntypedStorage) -> None:
    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(_GARBAGE)


class Rank:
    """One rank: its shard, its hooks, and what it gathers.

    Attributes:
        unsharded: the parameter that compute reads, from the first gather on.
        listed: what the post-hook wants freed with it.
    """

    def __init__(self, param: nn.Parameter, context: HookContext) -> None:
        self.shard = local_of(param)
        self.hooks = Hooks(self.shard, context)
        self.unsharded: nn.Parameter | None = None
        self.listed: list[torch.Tensor] = []
        self.outputs_memory, self.inner_memory = Memory(), Memory()
        self._param, self._trainable = param, param.requires_grad
        self._outputs: tuple[torch.Tensor, ...] = ()
        self._sent: tuple[torch.Tensor, ...] | None = None
        self._stamp: list[int] = []
        self._num_steps = [0]
        count_steps([self._param], self._num_steps)
        self._metadata: Any = None
        self._releases_outputs = False

    def send(self) -> tuple[torch.Tensor, ...]:
        """The payload; the earlier one, if the class has it kept and no write of the shard was noticed."""
        leaves = [leaf for leaf in _torch.leaves(self.shard) if leaf is not self.shard]
        stamp = [self._num_steps[0], *_torch.versions_of([self._param, self.shard, *leaves])]
        is_first = self._sent is None
        if self._sent is None or not self.hooks.keeps_inputs or stamp != self._stamp:
            self._sent, self._metadata = self.hooks.call_pre()
            self._stamp = stamp
        if is_first:
            self._releases_outputs = self.hooks.releases_outputs()
        return self._sent

    def receive(self, layouts: Sequence[JoinedLayout], sent: Sequence[tuple[torch.Tensor, ...]]) -> None:
        """``sent`` by all ranks arrives, and the post-hook makes the unsharded parameter of it."""
        is_first = self.unsharded is None
        if is_first:
            self._outputs = tuple(
                self._output(layout, payload.dtype) for layout, payload in zip(layouts, sent[0], strict=True)
            )
        self.outputs_memory.allocate()
        self.inner_memory.allocate()
        for k, (layout, output) in enumerate(zip(layouts, self._outputs, strict=True)):
            # I2: a tensor of its own writes, and autograd does not see that the output changes.
            target = tensor_on(output.untyped_storage(), 0, output.shape, output.stride(), output.dtype)
            for piece, payload in zip(pieces(target, layout), [each[k] for each in sent], strict=True):
                piece.copy_(payload.reshape(piece.shape))
        if self.unsharded is None:
            tensor, self.listed = self.hooks.first_post(self._outputs, self._metadata)
            self.unsharded = self._parameter(tensor)
            self._own()
        versioned = () if is_first else (self.unsharded, *_torch.leaves(self.unsharded))
        versions = [tensor._version for tensor in versioned]
        self._fill(self.unsharded)
        _torch.set_versions(versioned, versions)

    def drop_outputs(self) -> None:
        """Spoil the outputs, if the class says that the unsharded parameter does not need them."""
        if self.hooks.releases_outputs():
            self.outputs_memory.spoil()

    def release(self) -> None:
        self.outputs_memory.release()
        self.inner_memory.release()

    def _fill(self, unsharded: torch.Tensor) -> None:
        before = [leaf.untyped_storage() for leaf in _torch.leaves(unsharded)]
        self.hooks.call_post(self._outputs, self._metadata, unsharded)
        after = [leaf.untyped_storage() for leaf in _torch.leaves(unsharded)]
        if [storage.data_ptr() for storage in before] != [storage.data_ptr() for storage in after]:
            problem = "put other memory under out: write the tensors that it has, because autograd has saved them"
            raise self.hooks.error("fsdp_post_all_gather", problem)

    def _output(self, layout: JoinedLayout, dtype: torch.dtype) -> torch.Tensor:
        storage = torch.UntypedStorage(layout.padded_numel * dtype.itemsize, device=self.shard.device)
        self.outputs_memory.add(storage)
        return tensor_on(storage, 0, layout.shape, contiguous_stride(layout.shape), dtype)

    def _parameter(self, tensor: torch.Tensor) -> nn.Parameter:
        if self._trainable and not tensor.dtype.is_floating_point:
            raise self.hooks.error("fsdp_post_all_gather", f"made a tensor of {tensor.dtype} of a trainable parameter")
        try:
            return nn.Parameter(tensor, requires_grad=self._trainable)
        except RuntimeError as error:  # it wants detach() to keep the class
            problem = f"made a {type(tensor).__name__} that cannot be a parameter: {error}"
            raise self.hooks.error("fsdp_post_all_gather", problem) from error

    def _own(self) -> None:
        shards = {leaf.untyped_storage().data_ptr() for leaf in _torch.leaves(self.shard)}
        for leaf in (leaf for tensor in self.listed for leaf in _torch.leaves(tensor)):
            storage = leaf.untyped_storage()
            if storage.nbytes() and storage.data_ptr() in shards:
                raise self.hooks.error(
                    "fsdp_post_all_gather", "lists memory of the shard itself to be freed: make a tensor of its own"
                )
            if not self.outputs_memory.holds(storage):
                self.inner_memory.add(storage)


class World:
    """``params`` of all ranks, one each: shards of one parameter of ``layout``.

    Raises:
        ExtensionError: here and by the methods, what the runtime would raise.
    """

    def __init__(self, params: Sequence[nn.Parameter], layout: ShardLayout, setting: Setting) -> None:
        self._dim, self._setting = layout.dim, setting
        self.ranks = [Rank(param, _context(rank, layout, setting)) for rank, param in enumerate(params)]
        self._sent: list[tuple[torch.Tensor, ...]] = []
        self._layouts: list[JoinedLayout] = []

    def send(self) -> None:
        """Every rank calls its pre-hook, and what they send is fitted together."""
        with torch.inference_mode(False), torch.no_grad():
            if self._setting.prepare is not None:
                self._setting.prepare([rank.shard for rank in self.ranks])
            self._sent = [self._on(index, rank.send) for index, rank in enumerate(self.ranks)]
            self._layouts = self._joined()

    def receive(self) -> None:
        """Every rank gets what was sent, in memory of its own, and calls its post-hook."""
        with torch.inference_mode(False), torch.no_grad():
            for index, rank in enumerate(self.ranks):
                self._on(index, partial(rank.receive, self._layouts, self._sent))

    def drop_outputs(self) -> None:
        """On every rank the post-hook has returned."""
        for rank in self.ranks:
            rank.drop_outputs()

    def gather(self) -> None:
        self.send()
        self.receive()
        self.drop_outputs()

    def release(self) -> None:
        """Free what the runtime frees when the parameters are resharded."""
        for rank in self.ranks:
            rank.release()

    def _on(self, index: int, act: Callable[[], T]) -> T:
        """``act``; what it raises says on which rank."""
        try:
            return act()
        except ExtensionError as error:
            shape = tuple(self.ranks[index].shard.shape)
            where = f" It did so on rank {index}, whose shard has shape {shape}." if len(self.ranks) > 1 else ""
            raise ExtensionError(f"{error}{where}") from error

    def _joined(self) -> list[JoinedLayout]:
        hooks = self.ranks[0].hooks
        kinds = [tuple(tensor.dtype for tensor in payload) for payload in self._sent]
        for rank, kind in enumerate(kinds):
            if kind != kinds[0]:
                raise hooks.error(
                    "fsdp_pre_all_gather",
                    f"returned tensors of {kinds[0]} on rank 0, but of {kind} on rank {rank}: all must send the same",
                )
        try:
            return [join([tuple(tensor.shape) for tensor in same], self._dim) for same in zip(*self._sent, strict=True)]
        except ValueError as error:
            problem = f"returned tensors that do not fit together on the ranks: {error}"
            raise hooks.error("fsdp_pre_all_gather", problem) from None


def _context(rank: int, layout: ShardLayout, setting: Setting) -> HookContext:
    return HookContext(
        name=PARAMETER,
        mesh=cast(DeviceMesh, StandInMesh(layout.num_shards, rank, setting.device.type)),
        outer_size=torch.Size(layout.shape),
        outer_stride=contiguous_stride(layout.shape),
        module=nn.Module(),
        policy=setting.policy,
        param_dtype=setting.param_dtype,
        device=setting.device,
    )
