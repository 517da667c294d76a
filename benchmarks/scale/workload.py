"""Llama 3 as torchtitan writes it, on the meta device, and what its units compute, observed by the planner."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp2.planner.blocks import find_units
from fsdp2.planner.machine import Machine
from fsdp2.planner.observe import ModelWork, observe
from fsdp2.planner.scenario import Choice, Kernels, Precision, Scenario
from fsdp2.planner.work import Checkpointing, UnitWork
from fsdp2.planner.workload import Workload

from .tensor_parallel import Exchange, TensorParallel

HEAD_DIM = 128


@dataclass(frozen=True)
class Llama:
    name: str
    dim: int
    num_blocks: int
    kv_dim: int
    hidden_dim: int
    vocab_size: int = 128256
    head_dim: int = HEAD_DIM
    fuses_norms: bool = False

    def norm(self) -> nn.Module:
        return nn.RMSNorm(self.dim) if self.fuses_norms else RMSNorm(self.dim)

    @property
    def num_params(self) -> int:
        return sum(param.numel() for param in self.build().parameters())

    def build(self, tensor_parallel: int = 1) -> Transformer:
        """The part of one of ``tensor_parallel`` GPUs."""
        with torch.device("meta"):
            return Transformer(self, tensor_parallel)


@dataclass(frozen=True)
class Batch:
    """What one GPU, or one group of ``tensor_parallel`` GPUs together, computes in a step."""

    tokens: int
    seq_len: int = 8192
    checkpointing: Checkpointing = Checkpointing.SELECTIVE
    tensor_parallel: int = 1


def scenario(
    machine: Machine,
    model: Llama,
    batch: Batch,
    num_gpus: int,
    choice: Choice,
    *,
    fp8: bool = False,
    async_tp: float | None = None,
    kernels: Kernels = Kernels.COMPILED,
    wraps_large: bool = True,
) -> Scenario:
    """``model`` on ``num_gpus``, sharded by ``choice``. ``wraps_large``: embedding and head are units of their own."""
    shape, size = (batch.tokens // batch.seq_len, batch.seq_len), batch.tensor_parallel
    work = observed(model, *shape, size, wraps_large=wraps_large)
    units = work.units(batch.checkpointing)
    if size > 1:
        parallel = TensorParallel(machine, size, fp8, async_tp)
        whole = observed(model, *shape, wraps_large=wraps_large).units(batch.checkpointing)
        units = tuple(_with_exchanges(*each, model, batch, parallel) for each in zip(units, whole, strict=True))
    return Scenario(
        machine,
        units,
        batch.tokens / size,
        num_gpus,
        choice,
        root=work.root,
        members=work.members,
        kernels=kernels,
        precision=Precision.FP8 if fp8 else Precision.BF16,
        tensor_parallel=size,
    )


@cache
def observed(
    model: Llama, num_sequences: int, seq_len: int, tensor_parallel: int = 1, *, wraps_large: bool = True
) -> ModelWork:
    """On one GPU of a group of ``tensor_parallel``."""
    built = model.build(tensor_parallel)
    units = find_units(built) if wraps_large else replace(find_units(built), large=())
    loss = None if tensor_parallel == 1 else _loss_of_a_part
    return observe(built, units, Workload(num_sequences, seq_len, loss=loss))


def _with_exchanges(unit: UnitWork, whole: UnitWork, model: Llama, batch: Batch, parallel: TensorParallel) -> UnitWork:
    """What torchtitan's plan sends. Block: a gather before attention and feed-forward and a sum behind each, backward
    the other way round. What runs again sends all but the last sum. Head: a gather before it. ``whole``: the same unit
    without tensor parallelism, of whose products each GPU computes a part. torchao casts activations to fp8 before it
    gathers them, so each GPU casts a part, too."""
    size = batch.tensor_parallel
    numel = batch.tokens * model.dim

    def exchange(num_features: int = 0, *, gathers: bool) -> Exchange:
        return Exchange(float(numel), gathers, product=2.0 * numel * num_features / size)

    if not unit.is_block:
        sent = [parallel.seconds([exchange(gathers=gathers)], is_block=False) for gathers in (True, False)]
        return replace(unit, sent_s=tuple(sent)) if unit.forward.linear else unit
    forward = (
        exchange(model.dim + 2 * model.kv_dim, gathers=True),
        exchange(model.dim, gathers=False),
        exchange(2 * model.hidden_dim, gathers=True),
        exchange(model.hidden_dim, gathers=False),
    )
    summed = exchange(gathers=False)  # gradients that several products make and another kernel adds
    backward = (exchange(model.hidden_dim, gathers=True), summed, exchange(model.dim, gathers=True), summed)
    again = forward[:-1] if batch.checkpointing is Checkpointing.FULL else ()
    return replace(
        unit,
        forward=replace(unit.forward, products=whole.forward.divided(size).products),
        backward=replace(unit.backward, products=whole.backward.divided(size).products),
        sent_s=tuple(parallel.seconds(each, is_block=True) for each in (forward, again + backward)),
    )


class Transformer(nn.Module):
    """The part of one of ``size`` GPUs: heads, hidden features and words are divided, and sequences between blocks."""

    def __init__(self, shape: Llama, size: int) -> None:
        super().__init__()
        self.size = size
        self.tok_embeddings = nn.Embedding(shape.vocab_size // size, shape.dim)
        self.layers = nn.ModuleList(Block(shape, size) for _ in range(shape.num_blocks))
        self.norm = shape.norm()
        self.output = nn.Linear(shape.dim, shape.vocab_size // size, bias=False)
        self.head_dim = shape.head_dim

    def forward(self, tokens: Tensor) -> Tensor:
        angles = torch.empty(tokens.shape[1], self.head_dim // 2, dtype=torch.complex64)
        x = scattered(self.tok_embeddings(tokens), self.size)
        for layer in self.layers:
            x = layer(x, angles)
        return self.output(gathered(self.norm(x), self.size))


class RMSNorm(nn.Module):
    """In several kernels, as torchtitan wrote it until March 2025 (pytorch/torchtitan#985)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        whole = x.float()
        normed = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed.type_as(x) * self.weight


class Block(nn.Module):
    def __init__(self, shape: Llama, size: int) -> None:
        super().__init__()
        self.size = size
        self.attention_norm = shape.norm()
        self.attention = Attention(shape, size)
        self.ffn_norm = shape.norm()
        self.feed_forward = FeedForward(shape, size)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + scattered(self.attention(gathered(self.attention_norm(x), self.size), angles), self.size)
        return x + scattered(self.feed_forward(gathered(self.ffn_norm(x), self.size)), self.size)


class Attention(nn.Module):
    def __init__(self, shape: Llama, size: int) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.wq = nn.Linear(shape.dim, shape.dim // size, bias=False)
        self.wk = nn.Linear(shape.dim, shape.kv_dim // size, bias=False)
        self.wv = nn.Linear(shape.dim, shape.kv_dim // size, bias=False)
        self.wo = nn.Linear(shape.dim // size, shape.dim, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.wq, self.wk, self.wv))
        q, k = rotated(q, angles), rotated(k, angles)
        k, v = (each.repeat_interleave(q.shape[2] // each.shape[2], dim=2) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(-2))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding as a complex product in fp32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles[:, None]).flatten(-2).type_as(x)


class FeedForward(nn.Module):
    def __init__(self, shape: Llama, size: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.dim, shape.hidden_dim // size, bias=False)
        self.w2 = nn.Linear(shape.hidden_dim // size, shape.dim, bias=False)
        self.w3 = nn.Linear(shape.dim, shape.hidden_dim // size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def gathered(x: Tensor, size: int) -> Tensor:
    """Sequences as long as those of ``size`` GPUs together."""
    return x if size == 1 else _Resized.apply(x, x.shape[1] * size)


def scattered(x: Tensor, size: int) -> Tensor:
    """One GPU's part of each sequence."""
    return x if size == 1 else _Resized.apply(x, x.shape[1] // size)


class _Resized(torch.autograd.Function):
    """Holds what a collective holds, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seq_len: int) -> Tensor:
        ctx.seq_len = x.shape[1]
        return x.new_empty(x.shape[0], seq_len, x.shape[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_empty(grad.shape[0], ctx.seq_len, grad.shape[2]), None


def _loss_of_a_part(logits: Tensor) -> Tensor:
    labels = torch.zeros(logits.shape[:-1].numel(), 1, dtype=torch.int64, device=logits.device)
    return LossOfAPart.apply(logits.float().flatten(0, -2), labels)


class LossOfAPart(torch.autograd.Function):
    """Cross-entropy of one GPU's part of the words, in the steps of torch's ``loss_parallel``, which do not run as one
    kernel. Its collectives are small and left out."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        shifted = logits - logits.amax(-1, keepdim=True)
        log_probs = shifted - shifted.exp().sum(-1, keepdim=True).log()
        ctx.save_for_backward(log_probs, labels)
        return -log_probs.gather(1, labels).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        log_probs, labels = ctx.saved_tensors
        chosen = torch.zeros_like(log_probs)
        chosen.scatter_(1, labels, -1.0)
        return (chosen + log_probs.exp()) * (grad / len(labels)), None


LLAMA_8B = Llama("Llama 3 8B", dim=4096, num_blocks=32, kv_dim=1024, hidden_dim=14336)
LLAMA_70B = Llama("Llama 3 70B", dim=8192, num_blocks=80, kv_dim=1024, hidden_dim=28672)
LLAMA_405B = Llama("Llama 3 405B", dim=16384, num_blocks=126, kv_dim=1024, hidden_dim=53248)
