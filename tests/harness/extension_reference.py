"""Training with all-gather hooks done by hand: nothing of a runtime, nothing of DTensor.

Every rank keeps its own shards as plain tensors, encodes them, gathers the payloads with ``dist.all_gather``, decodes
what arrived, runs ``functional_call``, reduces the gradients, cuts its part out and steps the same optimizer.

Tolerance: bit for bit where every mesh axis has at most 2 ranks; else sums run in another order (see ``compare``): a
few roundings that grow over the steps, ``ON_LONGER_AXES``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from fsdp2 import MixedPrecisionPolicy
from fsdp2.core.plan.dtypes import GRADIENTS_FOLLOW_SHARDS

ON_LONGER_AXES = {"rtol": 1e-4, "atol": 1e-5}

Loss = Callable[[Callable[..., Tensor]], Tensor]


class Reference:
    """``model`` as it is before ``fully_shard``, with its parameters in whatever subclasses.

    ``dim`` says along which dim a parameter is cut, by its name and value. Where the policy names no dtype of the
    reduction, it is that of torch's own runtime: the shard's since torch 2.15, the gradient's before.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
        policy: MixedPrecisionPolicy | None = None,
        dim: Callable[[str, Tensor], int] = lambda name, value: 0,
    ) -> None:
        self.model, self._policy = model, policy or MixedPrecisionPolicy()
        axes = range(mesh.ndim)
        self._groups = [mesh.get_group(axis) for axis in reversed(axes)]  # the shard axis first
        self._group = self._groups[0]
        self._rank, self._num_ranks = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        self._world_size = mesh.size()
        named = dict(model.named_parameters())
        self._kinds = {name: type(value.detach()) for name, value in named.items()}
        self._sizes = {name: value.shape for name, value in named.items()}
        self._dims = {name: dim(name, value) for name, value in named.items()}
        self._trainable = {name for name, value in named.items() if value.requires_grad}
        self.shards = {name: self._cut(name, plain(value).clone()) for name, value in named.items()}
        self._accumulated: dict[str, Tensor] = {}
        self._gathered: dict[str, Tensor] = {}
        self.optimizer = optimizer([self.shards[name] for name in named])

    def _cut(self, name: str, full: Tensor) -> Tensor:
        """This rank's shard, in memory of its own."""
        chunks = torch.chunk(full, self._num_ranks, self._dims[name])
        if self._rank < len(chunks):
            return chunks[self._rank].clone(memory_format=torch.contiguous_format)
        return full.narrow(self._dims[name], 0, 0).clone()

    def _dtype(self, name: str) -> torch.dtype:
        return self._policy.param_dtype or self.shards[name].dtype

    def unsharded(self, name: str) -> Tensor:
        """What compute reads."""
        kind, size, dim = self._kinds[name], self._sizes[name], self._dims[name]
        shard = self.shards[name]
        if kind is Tensor:
            return self._joined(shard.to(self._dtype(name)), dim).view(size)
        payload = kind.encode(shard, self._rank, size, self._num_ranks)  # type: ignore[attr-defined]
        outputs = tuple(self._joined(tensor, dim) for tensor in payload)
        made = kind.decode(outputs, size, self._num_ranks, self._dtype(name))  # type: ignore[attr-defined]
        return made[: size[0]].clone()

    def _joined(self, mine: Tensor, dim: int) -> Tensor:
        """The pieces of all ranks behind each other, of whatever sizes along ``dim``."""
        mine = mine.reshape(1) if mine.dim() == 0 else mine
        dim = dim if dim < mine.dim() else 0
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._num_ranks)]
        dist.all_gather(sizes, torch.tensor([mine.size(dim)]), group=self._group)
        row = mine.movedim(dim, 0)
        padded = row.new_zeros((int(max(sizes)), *row.shape[1:]))
        padded[: row.size(0)] = row
        wire = padded.view(torch.uint8) if padded.dim() else padded
        received = [torch.empty_like(wire) for _ in range(self._num_ranks)]
        if wire.numel():
            dist.all_gather(received, wire, group=self._group)
        pieces = [part.view(mine.dtype)[: int(size)] for part, size in zip(received, sizes, strict=True)]
        return torch.cat(pieces).movedim(0, dim).contiguous()

    def backward(self, loss: Loss, *, reduce: bool = True) -> Tensor:
        """Forward and backward; adds to the shards' gradients, or to what a later call will reduce."""
        values = {name: self.unsharded(name) for name in self.shards}
        leaves = [value.requires_grad_() for name, value in values.items() if name in self._trainable]
        result = loss(lambda *args: functional_call(self.model, values, args))
        grads = torch.autograd.grad(result, leaves, allow_unused=True)
        for name, grad in zip([name for name in values if name in self._trainable], grads, strict=True):
            if grad is not None:
                unless_told = self.shards[name].dtype if GRADIENTS_FOLLOW_SHARDS else grad.dtype
                grad = grad.to(self._policy.reduce_dtype or unless_told)
                earlier = self._accumulated.get(name)
                self._accumulated[name] = grad if earlier is None else earlier + grad
        if reduce:
            for name, grad in self._accumulated.items():
                self._reduce(name, grad)
            self._accumulated = {}
        return result.detach()

    def _reduce(self, name: str, grad: Tensor) -> None:
        for group in self._groups:
            dist.all_reduce(grad, group=group)
        shard = self.shards[name]
        mine = self._cut(name, grad / self._world_size).to(shard.dtype)
        shard.grad = mine if shard.grad is None else shard.grad + mine

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def plain(value: Tensor) -> Tensor:
    """The plain tensor of ``value``'s shard, or of ``value``."""
    local = value.detach()
    if isinstance(local, DTensor):
        local = local._local_tensor
    return local.plain if hasattr(local, "plain") else local.as_subclass(Tensor)


def assert_same_shards(parameters: Mapping[str, Tensor], reference: Reference, *, exact: bool) -> None:
    """The sharded ``parameters`` hold what the reference holds."""
    assert parameters.keys() == reference.shards.keys()
    for name, parameter in parameters.items():
        assert_same(name, plain(parameter), reference.shards[name], exact)


def assert_same_gradients(parameters: Mapping[str, Tensor], reference: Reference, *, exact: bool) -> None:
    """So do their gradients, None where there are none."""
    for name, parameter in parameters.items():
        expected = reference.shards[name].grad
        assert (parameter.grad is None) == (expected is None), name
        if parameter.grad is not None and expected is not None:
            assert_same(f"gradient of {name}", plain(parameter.grad), expected, exact)


def assert_same(name: str, actual: Tensor, expected: Tensor, exact: bool) -> None:
    assert actual.dtype is expected.dtype, f"{name}: {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{name}: {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    options: dict[str, Any] = {"rtol": 0.0, "atol": 0.0} if exact else ON_LONGER_AXES
    # Shards may be offloaded.
    torch.testing.assert_close(actual, expected, check_device=False, msg=lambda text: f"{name}: {text}", **options)
