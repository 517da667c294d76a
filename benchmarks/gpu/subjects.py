"""What ``step.py`` runs: blocks of a language model, unsharded or under a runtime, on ranks that are not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as peer
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2

RUNTIMES = {"fsdp2": fsdp2, "torch": peer}
SUBJECTS = ("unsharded", *RUNTIMES)
BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Shape:
    """A block's: Llama 3 8B's, but for tests."""

    dim: int = 4096
    num_heads: int = 32
    num_kv_heads: int = 8
    hidden: int = 14336

    @property
    def block_nbytes(self) -> int:
        """Of a block's parameters in bf16."""
        kv_dim = self.dim // self.num_heads * self.num_kv_heads
        return 2 * (2 * self.dim * (self.dim + kv_dim) + 3 * self.dim * self.hidden + 2 * self.dim)


@dataclass(frozen=True)
class Case:
    """Computes in bf16. ``has_gains``: whether norms have parameters. ``is_quick``: whether a quick run has it."""

    name: str
    world_size: int
    shard_dtype: torch.dtype
    reduce_dtype: torch.dtype
    has_gains: bool = True
    is_quick: bool = True


CASES = [
    Case("8 ranks, bf16 throughout, no gains", 8, BF16, BF16, has_gains=False),
    Case("8 ranks, bf16 throughout", 8, BF16, BF16, is_quick=False),
    Case("8 ranks, fp32 shards", 8, FP32, BF16, is_quick=False),
    Case("8 ranks, fp32 shards, reduced in fp32", 8, FP32, FP32),
    Case("1 rank, NCCL, fp32 shards", 1, FP32, BF16, is_quick=False),
    Case("1 rank, NCCL, fp32 shards, reduced in fp32", 1, FP32, FP32),
]


@dataclass(frozen=True)
class Run:
    """How a case is run. ``traces``: a folder for traces of the profiler."""

    device: str
    shape: Shape
    num_blocks: int
    tokens: int
    rounds: int
    traces: Path


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.dim // shape.num_heads
        kv_dim = shape.num_kv_heads * self.head_dim
        self.q = nn.Linear(shape.dim, shape.dim, bias=False)
        self.k = nn.Linear(shape.dim, kv_dim, bias=False)
        self.v = nn.Linear(shape.dim, kv_dim, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, shape: Shape, *, has_gains: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, elementwise_affine=has_gains)
        self.mlp_norm = nn.RMSNorm(shape.dim, elementwise_affine=has_gains)
        self.attention = Attention(shape)
        self.gate = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


# Ranks that are not there


class _Done:
    def wait(self, timeout: object = None) -> bool:
        return True


class StillGroup(dist.ProcessGroup):
    """A process group whose collectives move nothing. With ``fills``, gathers copy this rank's part to all places."""

    fills = False

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._size = size

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "still"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> _Done:
        if StillGroup.fills:
            for output, mine in zip(outputs, inputs, strict=True):
                output.view(self._size, -1).copy_(mine.clone().view(1, -1).expand(self._size, -1))
        return _Done()

    def _allgather_base(self, output: Tensor, mine: Tensor, opts: Any = None) -> _Done:
        return self.allgather_into_tensor_coalesced([output], [mine])

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> _Done:
        return _Done()

    def _reduce_scatter_base(self, output: Tensor, values: Tensor, opts: Any = None) -> _Done:
        return _Done()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Done:
        """How ranks compare their models, once."""
        return _Done()

    # The names of torch 2.13
    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced


def _still_group(store: object, rank: int, size: int, timeout: object) -> StillGroup:
    return StillGroup(rank, size)


@contextmanager
def process_group(case: Case, device: str) -> Iterator[None]:
    backend = "still" if case.world_size > 1 else "nccl" if device == "cuda" else "gloo"
    if backend == "still" and not hasattr(dist.Backend, "STILL"):
        dist.Backend.register_backend("still", _still_group, devices=["cpu", "cuda"])
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend, rank=0, world_size=case.world_size, store=dist.HashStore())
    try:
        yield
    finally:  # a case that runs out of memory must not fail the next one
        StillGroup.fills = False
        dist.destroy_process_group()


class Stepper:
    """Forward and backward of one subject."""

    def __init__(self, subject: str, case: Case, run: Run) -> None:
        runtime: Any = RUNTIMES.get(subject)
        torch.manual_seed(0)
        dtype = BF16 if runtime is None else case.shard_dtype
        blocks = []
        for _ in range(run.num_blocks):
            with torch.device(run.device):
                block = Block(run.shape, has_gains=case.has_gains).to(dtype)
            blocks.append(self._sharded(block, runtime, case, run))
        self.model = self._sharded(nn.Sequential(*blocks), runtime, case, run)
        self._parameters = list(self.model.parameters())
        self._x = torch.randn(1, run.tokens, run.shape.dim, device=run.device, dtype=BF16, requires_grad=True)
        self._grad = torch.randn_like(self._x)

    @staticmethod
    def _sharded(module: nn.Module, runtime: Any, case: Case, run: Run) -> nn.Module:
        if runtime is None:
            return module
        policy = runtime.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=case.reduce_dtype)
        mesh = init_device_mesh(run.device, (case.world_size,))
        return runtime.fully_shard(module, mesh=mesh, mp_policy=policy)

    def __call__(self) -> None:
        self.model(self._x).backward(self._grad)
        self._x.grad = None
        for parameter in self._parameters:
            parameter.grad = None

    def is_finite(self) -> bool:
        with torch.no_grad():
            return bool(self.model(self._x).isfinite().all())
