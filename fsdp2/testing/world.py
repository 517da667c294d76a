"""Simulates all ranks in one process, with stand-ins for mesh and DTensor, and the all-gather between the ranks.

``World`` treats memory as the runtime does; memory whose contents are not guaranteed holds garbage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.core import (
    ExtensionError,
    MixedPrecisionPolicy,
    ParallelMesh,
    ShardedParam,
    Slot,
    _torch,
    comms,
    map_tensors,
    plans,
)
from fsdp2.tensors.all_gather_hooks import HookedParam, kinds_of
from fsdp2.tensors.cut import pinned_shard
from fsdp2.tensors.wrapper import WrapperTensor

T = TypeVar("T")

# The parameter's name in errors; reports leave it out.
PARAMETER = "tested"

# A huge number or NaN in any float dtype, and the largest byte in integers. No check takes it for a real value.
_GARBAGE = 0x7F


@dataclass(frozen=True)
class Case:
    """A tensor of ``shape`` that ``size`` ranks share. The rest is as given to ``check_all_gather_extension``."""

    make: Callable[[torch.Tensor], torch.Tensor]
    dtype: torch.dtype
    dim: int
    policy: MixedPrecisionPolicy
    device: torch.device
    trainable: bool
    prepare: Callable[[list[torch.Tensor]], object] | None
    shape: tuple[int, ...] = ()
    size: int = 1

    @property
    def where(self) -> str:
        return f"shape {self.shape} on {self.size} rank{'s' if self.size > 1 else ''}"

    @property
    def layout(self) -> plans.Layout:
        return plans.shard_layout(self.shape, self.dim % len(self.shape), self.size)

    def plain(self, seed: int = 0) -> torch.Tensor:
        """Random values; the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            values = torch.randn(self.shape, generator=generator)
        else:
            values = torch.randint(0, 100, self.shape, generator=generator)
        return values.to(self.device, self.dtype)

    def shards(self, made: torch.Tensor | None = None, *, seed: int = 0) -> list[torch.Tensor]:
        """The shards of all ranks, cut from ``made``, or from a different tensor for each seed."""
        full = self.make(self.plain(seed)) if made is None else made
        with torch.no_grad():
            home = comms.Home(self.device)
            return [pinned_shard(PARAMETER, full.detach(), self.layout, rank, home) for rank in range(self.size)]

    def params(self, shards: Sequence[torch.Tensor]) -> list[nn.Parameter]:
        """``shards`` as optimizers and state dicts see them; the class must not be lost on the way."""
        params = [nn.Parameter(StandInDTensor(shard), requires_grad=self.trainable) for shard in shards]
        for param, shard in zip(params, shards, strict=True):
            if type(local_of(param)) is not type(shard):
                raise ExtensionError(
                    f"detach of a DTensor makes a {type(local_of(param)).__name__} of a {type(shard).__name__}. The "
                    f"hooks would be lost. Make {type(shard).__name__} a wrapper subclass whose __torch_dispatch__ "
                    "keeps the class. as_subclass is not enough."
                )
        return params

    def hooks(self, param: nn.Parameter, rank: int) -> HookedParam:
        mesh = _mesh(self.size, rank, self.device.type)
        managed = ShardedParam(
            name=PARAMETER,
            sharded=param,
            slots=(Slot(nn.Module(), PARAMETER),),
            mesh=cast(ParallelMesh, None),  # hooks only see ``mesh``
            layout=self.layout,
            spec=plans.ParamSpec(plans.TensorSpec(mesh, (), self.shape, plans.contiguous_stride(self.shape))),
            dtypes=plans.param_dtypes(self.dtype, self.policy),
            policy=self.policy,
        )
        return HookedParam(managed, mesh, self.device)


class StandInDTensor(WrapperTensor):
    """Holds a shard as a DTensor holds its local tensor: operations reach the shard from below autograd, where torch
    does not always count writes. Their results are wrapped in the same way."""

    local: torch.Tensor
    _INNER = ("local",)

    @property
    def _local_tensor(self) -> torch.Tensor:
        return self.local

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # declared as a static method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # DTensors run operations in C++, where only classes with __torch_dispatch__ can intercept them.
        without_torch_function = nn.Parameter.__torch_function__
        result = without_torch_function(func, (), map_tensors(local_of, args), map_tensors(local_of, kwargs or {}))
        if func.__name__.partition(".")[0].endswith("_"):
            return None if result is None else args[0]
        return map_tensors(cls, result)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The shard that a ``StandInDTensor`` holds; other tensors themselves."""
    return tensor.local if isinstance(tensor, StandInDTensor) else tensor


class _Mesh(SimpleNamespace):
    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"the ranks of this check share one process, and their mesh has no '{name}'. For a hook that communicates, "
            "pass prepare(shards), which gives every shard the values that the ranks would agree on"
        )


def _mesh(size: int, rank: int, device_type: str) -> DeviceMesh:
    """A 1D mesh over ``size`` ranks as ``rank`` sees it, without a process group."""
    mesh = _Mesh(
        ndim=1,
        mesh_dim_names=("shard",),
        device_type=device_type,
        shape=(size,),
        mesh=torch.arange(size),
        size=lambda mesh_dim=None: size,
        get_rank=lambda: rank,
        get_local_rank=lambda mesh_dim=None: rank,
        get_coordinate=lambda: [rank],
    )
    return cast(DeviceMesh, mesh)


class Rank:
    """One rank: its shard, its hooks, and what it gathers."""

    def __init__(self, hooks: HookedParam) -> None:
        self.shard = _torch.local_of(hooks.param.sharded)
        self.hooks = hooks
        self._releases_outputs = False
        self._outputs: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def unsharded(self) -> nn.Parameter:
        """The parameter that compute reads, from the first gather on."""
        assert self.hooks.param.unsharded is not None
        return self.hooks.param.unsharded

    def send(self) -> tuple[torch.Tensor, ...]:
        """The payload."""
        payload = self.hooks.payload()
        self._releases_outputs = self.hooks.releases_outputs()
        return payload

    def receive(self, layouts: Sequence[plans.Layout], sent: Sequence[tuple[torch.Tensor, ...]]) -> None:
        """Receive what all ranks ``sent``, and let the post-hook make the unsharded parameter from it."""
        is_first = self.hooks.param.unsharded is None
        if is_first:
            pairs = zip(layouts, sent[0], strict=True)
            self.hooks.bind_outputs([self._output(layout, payload.dtype) for layout, payload in pairs])
        self._allocate()
        for layout, output, payloads in zip(layouts, self.hooks.gathered, zip(*sent, strict=True), strict=True):
            # I2: a separate tensor writes, so autograd does not see that the output changes.
            target = comms.tensor_on(output.untyped_storage(), 0, output.shape, output.stride(), output.dtype)
            for rank, payload in enumerate(payloads):
                start, stop = layout.interval(rank)
                piece = target.narrow(layout.dim, start, stop - start)
                piece.copy_(payload.reshape(piece.shape))
        if is_first:
            self.hooks.make_unsharded()
        versioned = _torch.versioned(self.unsharded)
        versions = _torch.versions_of(versioned)
        self.hooks.fill_first()
        _torch.set_versions(tuple(versioned), tuple(versions))

    def drop_outputs(self) -> None:
        """Overwrite the outputs, if the class says that the unsharded parameter does not need them."""
        for output in self.hooks.gathered if self._releases_outputs else ():
            _fill_with_garbage(output.untyped_storage())

    @property
    def _storages(self) -> list[tuple[torch.UntypedStorage, int]]:
        """What comes and goes: outputs, and what hooks list."""
        return self._outputs + self.hooks.param.inner

    def release(self) -> None:
        """Free what the runtime frees when the parameter is resharded."""
        for storage, _ in self._storages:
            storage.resize_(0)

    def frees(self, storage: torch.UntypedStorage) -> bool:
        """Whether ``release`` frees ``storage``. Known only while it has memory."""
        return any(mine.data_ptr() == storage.data_ptr() for mine, _ in self._storages)

    def _allocate(self) -> None:
        """Allocate different memory than before, filled with garbage."""
        kept = [torch.UntypedStorage(nbytes, device=storage.device) for storage, nbytes in self._storages]
        for storage, nbytes in self._storages:
            storage.resize_(nbytes)
            _fill_with_garbage(storage)
        del kept  # until here, ``kept`` prevented the allocator from returning the same block

    def _output(self, layout: plans.Layout, dtype: torch.dtype) -> torch.Tensor:
        storage = torch.UntypedStorage(layout.padded_numel * dtype.itemsize, device=self.shard.device)
        self._outputs.append((storage, storage.nbytes()))
        return comms.tensor_on(storage, 0, layout.shape, plans.contiguous_stride(layout.shape), dtype)


def _fill_with_garbage(storage: torch.UntypedStorage) -> None:
    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(_GARBAGE)


class World:
    """The ``params`` of all ranks, which are shards of one parameter of ``case``. Raises what the runtime would."""

    def __init__(self, case: Case, params: Sequence[nn.Parameter]) -> None:
        self._case = case
        self.ranks = [Rank(case.hooks(param, rank)) for rank, param in enumerate(params)]
        self._sent: list[tuple[torch.Tensor, ...]] = []
        self._layouts: list[plans.Layout] = []

    def send(self) -> None:
        """Call the pre-hook on every rank, and fit their payloads together."""
        with torch.inference_mode(False), torch.no_grad():
            if self._case.prepare is not None:
                self._case.prepare([rank.shard for rank in self.ranks])
            self._sent = [self._on(index, rank.send) for index, rank in enumerate(self.ranks)]
            joined = self.ranks[0].hooks.joined([kinds_of(payload) for payload in self._sent])
            self._layouts = [layout for layout, _ in joined]

    def receive(self) -> None:
        """Give every rank the payloads, in its own memory, and call its post-hook."""
        with torch.inference_mode(False), torch.no_grad():
            for index, rank in enumerate(self.ranks):
                self._on(index, partial(rank.receive, self._layouts, self._sent))

    def gather(self) -> None:
        """Do what an all-gather does. The post-hooks of all ranks return before outputs are dropped."""
        self.send()
        self.receive()
        for rank in self.ranks:
            rank.drop_outputs()

    def release(self) -> None:
        for rank in self.ranks:
            rank.release()

    def _on(self, index: int, act: Callable[[], T]) -> T:
        """Call ``act``; add the rank to the error that it raises."""
        try:
            return act()
        except ExtensionError as error:
            shape = tuple(self.ranks[index].shard.shape)
            where = f" This happened on rank {index}, whose shard has shape {shape}." if len(self.ranks) > 1 else ""
            raise ExtensionError(f"{error}{where}") from error
