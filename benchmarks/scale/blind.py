"""Published training steps that nothing of the planner was fitted to, predicted with ``fsdp2.planner.plan``.

The planner's machines were described, and committed, before these rows were looked up. Where a source does not say
whether blocks were compiled, or how far power was limited, a row has a prediction for either end.

- ``A100``: torchtitan's page of performance of 2024, FSDP2 on 64 A100s; its train_configs do not compile. A reader of
  pytorch/torchtitan#394 names the network: EFA with 400 Gb/s per node. Norms were one kernel until May 2024, and
  several later (pytorch/torchtitan#297); which of them the rows have, it does not say.
- ``IBM``: the tables of "Maximizing training throughput using PyTorch FSDP" (pytorch.org, 2024), FSDP1 without compile
  on 128 A100s and 96 H100s with 400 and 800 Gb/s per node, and of the README of foundation-model-stack/fms-fsdp, which
  may have compiled. HSDP shards within a node; gradients are summed in bf16.
- ``H200``: llama3_8b_h200_2025-06_torchtitan_trainy_whitefiber among torchtitan's benchmarks.
- ``MPT``: the README of llm-foundry's scripts/train/benchmarking of 2023, FSDP1 without compile under bf16 autocast on
  H100s. ``DEFAULT`` mixed precision gathers in bf16 and sums in fp32.
- ``B200``: the README of torchao/prototype/mx_formats of 2025, eight "power limited" B200s; at which limit, it does
  not say.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp2.planner import MACHINES, Candidate, Workload, plan
from fsdp2.planner.scenario import Kernels

from .workload import LLAMA_8B, LLAMA_70B, Llama

LLAMA2_7B = Llama("Llama 2 7B", dim=4096, num_blocks=32, kv_dim=4096, hidden_dim=11008, vocab_size=32000)
LLAMA2_13B = Llama("Llama 2 13B", dim=5120, num_blocks=40, kv_dim=5120, hidden_dim=13824, vocab_size=32000)
LLAMA2_34B = Llama("Llama 2 34B", dim=8192, num_blocks=48, kv_dim=1024, hidden_dim=22016, vocab_size=32000)
LLAMA2_70B = Llama("Llama 2 70B", dim=8192, num_blocks=80, kv_dim=1024, hidden_dim=28672, vocab_size=32000)


class MPTBlock(nn.Module):
    """Without biases; the feed-forward has no gate."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim, bias=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (-1, 128)).transpose(1, 2) for each in self.qkv(self.norms[0](x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class MPT(nn.Module):
    """Learned positions; the head shares the embedding's weights."""

    def __init__(self, dim: int, num_blocks: int, sequence: int = 2048) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(50368, dim), nn.Embedding(sequence, dim)
        self.blocks = nn.ModuleList(MPTBlock(dim) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


_EITHER = (Kernels.EAGER, Kernels.COMPILED)
_WITH_LOSS = (Kernels.COMPILED_LOSS,)
_SELECTIVE, _FULL = "FSDP, reshard, selective checkpointing", "FSDP, reshard, full checkpointing"


@dataclass(frozen=True)
class Row:
    """``tokens_s`` and ``gib`` are those of a GPU as published; None: not published. ``watts``: possible limits.
    ``network``: Gb/s per GPU."""

    name: str
    model: Llama | Callable[[], nn.Module]
    gpu: str
    num_gpus: int
    workload: Workload
    choice: str
    tokens_s: float
    gib: float | None = None
    kernels: tuple[Kernels, ...] = (Kernels.EAGER,)
    watts: tuple[float, ...] = ()
    network: float | None = None
    fuses_norms: tuple[bool, ...] = (False,)

    def predictions(self) -> Iterator[Candidate]:
        """One for each way in which it may have run."""
        for watts in self.watts or (None,):
            machine = MACHINES[self.gpu]
            machine = machine if watts is None else machine.limited_to(watts)
            machine = machine if self.network is None else machine.with_network(self.network)
            for kernels, fuses_norms in itertools.product(self.kernels, self.fuses_norms):
                workload = replace(self.workload, kernels=kernels.value)
                model = self.model
                builder = replace(model, fuses_norms=fuses_norms).build if isinstance(model, Llama) else model
                found = plan(builder, machine, workload, num_gpus=self.num_gpus)
                yield next(each for each in found.choices if each.choice.name == self.choice)


def _bf16(batch: int, sequence: int, reduce_dtype: str = "fp32") -> Workload:
    return Workload(batch, sequence, master_dtype="fp32", reduce_dtype=reduce_dtype)


def _fp8(batch: int) -> Workload:
    return Workload(batch, 8192, precision="fp8", master_dtype="fp32")


def _a100(name: str, model: Llama, workload: Workload, choice: str, tokens_s: float) -> Row:
    return Row(
        f"{name}, 64 A100", model, "A100-80", 64, workload, choice, tokens_s, network=50, fuses_norms=(False, True)
    )


def _ibm(name: str, model: Llama, gpu: str, batch: int, choice: str, tokens_s: float) -> Row:
    """Of the blog."""
    num_gpus, network = {"A100-80": (128, 50), "H100": (96, 100)}[gpu]
    workload = _bf16(batch, 4096, "bf16")
    shown = f"{name}, {num_gpus} {gpu.removesuffix('-80')}, batch {batch}"
    return Row(shown, model, gpu, num_gpus, workload, choice, tokens_s, network=network)


def _ibm_later(*args: Any) -> Row:
    """Of the README."""
    row = _ibm(*args)
    return replace(row, name=f"{row.name}, later", kernels=_EITHER)


def _mpt(name: str, shape: tuple[int, int], num_gpus: int, workload: Workload, choice: str, tokens_s: float) -> Row:
    return Row(name, lambda: MPT(*shape), "H100", num_gpus, workload, choice, tokens_s)


def _accumulated(batch: int, micro_batches: int) -> Workload:
    return replace(_bf16(batch, 2048), micro_batches=micro_batches)


_HSDP = "HSDP 8, reshard"
_MPT_7B, _MPT_13B, _MPT_30B, _MPT_70B = (4096, 32), (5120, 40), (7168, 48), (8192, 80)
ROWS = (
    _a100("Llama 3 8B, selective", LLAMA_8B, _bf16(1, 8192), _SELECTIVE, 2973),
    _a100("Llama 3 70B, full", LLAMA_70B, _bf16(1, 8192), _FULL, 331),
    _a100("Llama 2 13B, none", LLAMA2_13B, _bf16(2, 4096), "FSDP, reshard", 2162),
    _a100("Llama 2 13B, selective", LLAMA2_13B, _bf16(2, 4096), _SELECTIVE, 1904),
    _a100("Llama 2 70B, selective", LLAMA2_70B, _bf16(1, 4096), _SELECTIVE, 355),
    _a100("Llama 2 70B, full", LLAMA2_70B, _bf16(2, 4096), _FULL, 353),
    _ibm("Llama 2 7B, HSDP, none", LLAMA2_7B, "A100-80", 2, _HSDP, 3700),
    _ibm("Llama 2 34B, full", LLAMA2_34B, "A100-80", 2, _FULL, 700),
    _ibm("Llama 2 70B, full", LLAMA2_70B, "A100-80", 2, _FULL, 370),
    _ibm("Llama 2 7B, HSDP, none", LLAMA2_7B, "H100", 2, _HSDP, 7500),
    _ibm("Llama 2 34B, full", LLAMA2_34B, "H100", 2, _FULL, 1550),
    _ibm("Llama 2 70B, full", LLAMA2_70B, "H100", 2, _FULL, 800),
    _ibm_later("Llama 2 7B, HSDP, none", LLAMA2_7B, "A100-80", 2, _HSDP, 3760),
    _ibm_later("Llama 2 13B, HSDP, none", LLAMA2_13B, "A100-80", 1, _HSDP, 1700),
    _ibm_later("Llama 2 34B, full", LLAMA2_34B, "A100-80", 8, _FULL, 772),
    _ibm_later("Llama 2 70B, full", LLAMA2_70B, "A100-80", 6, _FULL, 380),
    Row(
        "Llama 3.1 8B, 32 H200, selective, fp8",
        LLAMA_8B,
        "H200",
        32,
        _fp8(2),
        f"{_SELECTIVE}, fp8 gathers",
        10938,
        47.96,
        _WITH_LOSS,
    ),
    Row(
        "Llama 3.1 8B, 64 H200, selective, fp8",
        LLAMA_8B,
        "H200",
        64,
        _fp8(2),
        f"{_SELECTIVE}, fp8 gathers",
        10753,
        46.97,
        _WITH_LOSS,
    ),
    _mpt("MPT 7B, none, 8 H100", _MPT_7B, 8, _bf16(6, 2048), "FSDP, reshard", 10643),
    _mpt("MPT 13B, none, 8 H100", _MPT_13B, 8, _bf16(2, 2048), "FSDP, reshard", 4792),
    _mpt("MPT 13B, none, 64 H100", _MPT_13B, 64, _bf16(2, 2048), "FSDP, reshard", 4800),
    _mpt("MPT 30B, full, 8 H100, 21 micro-batches", _MPT_30B, 8, _accumulated(3, 21), _FULL, 2002),
    _mpt("MPT 30B, full, 32 H100, 3 micro-batches", _MPT_30B, 32, _accumulated(14, 3), _FULL, 2308),
    _mpt("MPT 70B, full, 32 H100, 16 micro-batches", _MPT_70B, 32, _accumulated(2, 16), _FULL, 882),
    _mpt("MPT 70B, full, 64 H100, 4 micro-batches", _MPT_70B, 64, _accumulated(8, 4), _FULL, 1039),
    Row(
        "Llama 3 8B, 8 B200, selective",
        LLAMA_8B,
        "B200",
        8,
        _bf16(1, 8192),
        _SELECTIVE,
        8307.5,
        33.71e9 / 2**30,
        _WITH_LOSS,
        watts=(500, 1000),
    ),
    Row(
        "Llama 3 8B, 8 B200, selective, fp8",
        LLAMA_8B,
        "B200",
        8,
        _fp8(1),
        f"{_SELECTIVE}, fp8 gathers",
        10417,
        33.38e9 / 2**30,
        _WITH_LOSS,
        watts=(500, 1000),
    ),
)


@cache
def predicted() -> dict[str, tuple[Candidate, ...]]:
    return {row.name: tuple(row.predictions()) for row in ROWS}
