"""Llama 3 as torchtitan writes it, on the meta device, and what its units compute, observed by the planner."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp2.tools.planner.blocks import find_units
from fsdp2.tools.planner.machine import Machine
from fsdp2.tools.planner.observe import ModelWork, language_model_loss, observe
from fsdp2.tools.planner.scenario import Choice, Kernels, Scenario
from fsdp2.tools.planner.work import Checkpointing, Param, UnitWork

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

    @property
    def num_params(self) -> int:
        return sum(param.numel() for param in self.build().parameters())

    def build(self) -> Transformer:
        with torch.device("meta"):
            return Transformer(self)


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
    hides_exchanges: bool = False,
    kernels: Kernels = Kernels.COMPILED,
) -> Scenario:
    """``model`` on ``num_gpus``, sharded by ``choice``."""
    work = observed(model, batch.tokens // batch.seq_len, batch.seq_len)
    units = tuple(_divided(unit, model, batch) for unit in work.units(batch.checkpointing))
    return Scenario(
        machine,
        units,
        batch.tokens,
        num_gpus,
        choice,
        root=work.root,
        kernels=kernels,
        fp8=fp8,
        tensor_parallel=batch.tensor_parallel,
        hides_exchanges=hides_exchanges,
    )


@cache
def observed(model: Llama, num_sequences: int, seq_len: int) -> ModelWork:
    built = model.build()
    shape = (num_sequences, seq_len)
    inputs = lambda: torch.zeros(shape, dtype=torch.int64)  # noqa: E731
    return observe(built, find_units(built), inputs, language_model_loss, torch.bfloat16)


def _divided(unit: UnitWork, model: Llama, batch: Batch) -> UnitWork:
    """By tensor parallelism with sequence parallelism: matrices, operations and activations. A block gathers or
    scatters all activations four times per pass, and once more per gather that is computed again."""
    tp = batch.tensor_parallel
    if tp == 1:
        return unit
    exchanges = (4, 8 if batch.checkpointing is Checkpointing.FULL else 4) if unit.is_block else (0, 0)
    return replace(
        unit,
        params=tuple(_divided_param(param, tp) for param in unit.params),
        forward=unit.forward * (1 / tp),
        backward=unit.backward * (1 / tp),
        saved_nbytes=unit.saved_nbytes / tp,
        working_nbytes=unit.working_nbytes / tp,
        exchanges=exchanges,
        exchanged_nbytes=2 * batch.tokens * model.dim,
    )


def _divided_param(param: Param, tp: int) -> Param:
    return param if len(param.shape) == 1 else replace(param, shape=(param.shape[0] // tp, *param.shape[1:]))


class Transformer(nn.Module):
    def __init__(self, shape: Llama) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(shape.vocab_size, shape.dim)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_blocks))
        self.norm = nn.RMSNorm(shape.dim)
        self.output = nn.Linear(shape.dim, shape.vocab_size, bias=False)
        self.head_dim = shape.head_dim

    def forward(self, tokens: Tensor) -> Tensor:
        angles = torch.empty(tokens.shape[1], self.head_dim // 2, dtype=torch.complex64)
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, angles)
        return self.output(self.norm(x))


class Block(nn.Module):
    def __init__(self, shape: Llama) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.dim)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.ffn_norm(x))


class Attention(nn.Module):
    def __init__(self, shape: Llama) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.wq = nn.Linear(shape.dim, shape.dim, bias=False)
        self.wk = nn.Linear(shape.dim, shape.kv_dim, bias=False)
        self.wv = nn.Linear(shape.dim, shape.kv_dim, bias=False)
        self.wo = nn.Linear(shape.dim, shape.dim, bias=False)

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
    def __init__(self, shape: Llama) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.dim, shape.hidden_dim, bias=False)
        self.w2 = nn.Linear(shape.hidden_dim, shape.dim, bias=False)
        self.w3 = nn.Linear(shape.dim, shape.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


LLAMA_8B = Llama("Llama 3 8B", dim=4096, num_blocks=32, kv_dim=1024, hidden_dim=14336)
LLAMA_70B = Llama("Llama 3 70B", dim=8192, num_blocks=80, kv_dim=1024, hidden_dim=28672)
LLAMA_405B = Llama("Llama 3 405B", dim=16384, num_blocks=126, kv_dim=1024, hidden_dim=53248)
