"""Published training steps that nothing of the planner was fitted to, predicted with ``fsdp2.planner.plan``.

No figure of a machine comes from these rows. Where a source leaves something open, a row has a prediction for either
end. ``seen`` says which rows the authors of the planner had seen before the description of their machine was final.

- ``A100``: torchtitan's page of performance, FSDP2 on 64 A100s. Its train_configs do not compile, and the page is of
  April 2024 (pytorch/torchtitan#255), when norms were one kernel; they were several from May on (#297). A reader of
  pytorch/torchtitan#394 names the network: EFA with 400 Gb/s per node.
- ``IBM``: the tables of "Maximizing training throughput using PyTorch FSDP" (pytorch.org, 2024), FSDP1 without compile
  on 128 A100s and 96 H100s with 400 and 800 Gb/s per node, and of the README of foundation-model-stack/fms-fsdp, which
  may have compiled. HSDP shards within a node; gradients are summed in bf16. torch had CUDA 12.1 then.
- ``H200``: llama3_8b_h200_2025-06_torchtitan_trainy_whitefiber among torchtitan's benchmarks.
- ``MPT``: the README of llm-foundry's scripts/train/benchmarking, FSDP1 without compile under bf16 autocast; with
  ``DEFAULT`` mixed precision, gathers are in bf16 and sums in fp32. Its counts of parameters include biases, and its
  configs name ``decoupled_adamw``, which runs one operation after another. Its sweep.sh had an image of torch 2.0.1
  with CUDA 11.8, and later one of 2.1.0 with 12.1; attention was FlashAttention in Triton, and later FlashAttention-2.
- ``B200``: the README of torchao/prototype/mx_formats of 2025, eight "power limited" B200s; at which limit, it does
  not say. Its "GB" are GiB: parse_torchtitan_logs.py reads them from torchtitan's log.
- ``Megatron``: Megatron-Bridge's performance summary; how much it recomputes, it does not say. Its kernels are those of
  Transformer Engine, with cuDNN's attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp2.planner import MACHINES, Candidate, Machine, Workload, plan
from fsdp2.planner.scenario import Kernels

from .workload import LLAMA_8B, LLAMA_70B, Llama

LLAMA2_7B = Llama("Llama 2 7B", dim=4096, num_blocks=32, kv_dim=4096, hidden_dim=11008, vocab_size=32000)
LLAMA2_13B = Llama("Llama 2 13B", dim=5120, num_blocks=40, kv_dim=5120, hidden_dim=13824, vocab_size=32000)
LLAMA2_34B = Llama("Llama 2 34B", dim=8192, num_blocks=48, kv_dim=1024, hidden_dim=22016, vocab_size=32000)
LLAMA2_70B = Llama("Llama 2 70B", dim=8192, num_blocks=80, kv_dim=1024, hidden_dim=28672, vocab_size=32000)


class MPTBlock(nn.Module):
    """The feed-forward has no gate."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

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
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


_EITHER = (Kernels.EAGER, Kernels.COMPILED)
_WITH_LOSS = (Kernels.COMPILED_LOSS,)
_SELECTIVE, _FULL = "FSDP, reshard, selective checkpointing", "FSDP, reshard, full checkpointing"


class Libraries(NamedTuple):
    """Which share of what its description says a machine reaches, where they are other libraries."""

    products: float = 1.0
    attention: float = 1.0
    attention_backward: float = 1.0

    def on(self, machine: Machine) -> Machine:
        reached = machine.reached
        rates: dict[str, Any] = {
            "bf16": self.products * reached.bf16,
            "attention": self.attention * reached.attention,
            "attention_backward": self.attention_backward * reached.attention_backward,
        }
        return replace(machine, reached=replace(reached, **rates))


_TODAY = Libraries()
# FlashAttention-2 is 1.3 to 1.5 times as fast in forward as FlashAttention in Triton, and twice as fast in backward, by
# its authors (arXiv 2307.08691).
_TRITON = Libraries(1.0, 1 / 1.4, 1 / 2)
# A product of 2048 x 8192 and 8192 x 8192 reached 720 on an H100 with CUDA 11.8 in a short run, and 743 with 12.0
# (pytorch/pytorch#100850, May 2023); from today's rate in a short run, 828, follow 803.
_CUDA_11_8, _CUDA_12_0 = _TRITON._replace(products=720 / 803), Libraries(products=743 / 803)
# cuDNN's attention is 1.7 to 2.3 times as fast as torch's FlashAttention-2 on H100s (huggingface/transformers#48163).
_CUDNN = Libraries(1.0, 2.0, 2.0)
# What AdamW moves per element if an operation after another runs over all tensors: the plan counts 28, for one kernel.
_UNFUSED_NBYTES, _FUSED_NBYTES = 80, 28
_LEAST_WATTS = 200  # AllowableMin in an example of NVIDIA's guide of the DGX B200


class Seen(Enum):
    """Whether the authors of the planner had seen a row before the description of its machine was final."""

    BEFORE = "seen before"
    AFTER = "looked up later"


@dataclass(frozen=True)
class Row:
    """``tokens_s`` and ``gib`` are those of a GPU as published; None: not published. ``choices``, ``kernels``,
    ``watts`` and ``libraries``: how it may have run. ``network``: Gb/s per GPU. ``is_open``: the source leaves so much
    open that any prediction would be right."""

    name: str
    model: Llama | Callable[[], nn.Module]
    gpu: str
    num_gpus: int
    workload: Workload
    choices: tuple[str, ...]
    tokens_s: float
    gib: float | None = None
    kernels: tuple[Kernels, ...] = (Kernels.EAGER,)
    watts: tuple[float, ...] = ()
    network: float | None = None
    libraries: tuple[Libraries, ...] = (_TODAY,)
    optimizer_nbytes: int = _FUSED_NBYTES
    is_open: bool = False
    seen: Seen = Seen.BEFORE

    def predictions(self) -> Iterator[Prediction]:
        """One for each way in which it may have run."""
        for watts, kernels, libraries in itertools.product(self.watts or (None,), self.kernels, self.libraries):
            machine = MACHINES[self.gpu]
            machine = machine if watts is None else machine.limited_to(watts)
            machine = machine if self.network is None else machine.with_network(self.network)
            workload = replace(self.workload, kernels=kernels.value)
            builder = self.model.build if isinstance(self.model, Llama) else self.model
            found = plan(builder, libraries.on(machine), workload, num_gpus=self.num_gpus)
            more_nbytes = (self.optimizer_nbytes - _FUSED_NBYTES) * found.num_params / self.num_gpus
            for candidate in found.choices:
                if candidate.choice.name in self.choices:
                    result, more = candidate.result, more_nbytes / machine.copy_bandwidth
                    yield Prediction(candidate, result.tokens_per_second / (1 + more / result.time.step))


@dataclass(frozen=True)
class Prediction:
    candidate: Candidate
    tokens_s: float


def _bf16(batch: int, sequence: int, reduce_dtype: str = "fp32") -> Workload:
    return Workload(batch, sequence, master_dtype="fp32", reduce_dtype=reduce_dtype)


def _fp8(batch: int) -> Workload:
    return Workload(batch, 8192, precision="fp8", master_dtype="fp32")


def _a100(name: str, model: Llama, workload: Workload, choice: str, tokens_s: float) -> Row:
    fused = replace(model, fuses_norms=True)
    return Row(f"{name}, 64 A100", fused, "A100-80", 64, workload, (choice,), tokens_s, network=50)


def _ibm(name: str, model: Llama, gpu: str, batch: int, choice: str, tokens_s: float) -> Row:
    """Of the blog."""
    num_gpus, network = {"A100-80": (128, 50), "H100": (96, 100)}[gpu]
    workload = _bf16(batch, 4096, "bf16")
    shown = f"{name}, {num_gpus} {gpu.removesuffix('-80')}, batch {batch}"
    row = Row(shown, model, gpu, num_gpus, workload, (choice,), tokens_s, network=network)
    return replace(row, libraries=(_CUDA_12_0, _TODAY)) if gpu == "H100" else row


def _ibm_later(*args: Any) -> Row:
    """Of the README."""
    row = _ibm(*args)
    return replace(row, name=f"{row.name}, later", kernels=_EITHER)


def _mpt(name: str, shape: tuple[int, int], gpus: str, workload: Workload, choice: str, tokens_s: float) -> Row:
    """``gpus``: such as "8 H100"."""
    number, gpu = gpus.split()
    return Row(
        f"{name}, {gpus}" + (f", {workload.micro_batches} micro-batches" if workload.micro_batches > 1 else ""),
        lambda: MPT(*shape),
        {"A100": "A100-80"}.get(gpu, gpu),
        int(number),
        workload,
        (choice,),
        tokens_s,
        libraries=(_CUDA_11_8 if gpu == "H100" else _TRITON, _TODAY),
        optimizer_nbytes=_UNFUSED_NBYTES,
    )


def _later(row: Row) -> Row:
    return replace(row, seen=Seen.AFTER)


def _accumulated(batch: int, micro_batches: int) -> Workload:
    return replace(_bf16(batch, 2048), micro_batches=micro_batches)


def _h200(num_gpus: int, tokens_s: float, gib: float) -> Row:
    choice, name = f"{_SELECTIVE}, fp8 gathers", f"Llama 3.1 8B, {num_gpus} H200, selective, fp8"
    return Row(name, LLAMA_8B, "H200", num_gpus, _fp8(2), (choice,), tokens_s, gib, _WITH_LOSS)


def _b200(name: str, workload: Workload, choice: str, tokens_s: float, gib: float) -> Row:
    row = Row(f"Llama 3 8B, 8 B200, selective{name}", LLAMA_8B, "B200", 8, workload, (choice,), tokens_s, gib)
    return replace(row, kernels=_WITH_LOSS, watts=(_LEAST_WATTS, 1000), is_open=True)


_NONE, _HSDP = "FSDP, reshard", "HSDP 8, reshard"
_MPT_7B, _MPT_13B, _MPT_30B, _MPT_70B = (4096, 32), (5120, 40), (7168, 48), (8192, 80)
ROWS = (
    _a100("Llama 3 8B, selective", LLAMA_8B, _bf16(1, 8192), _SELECTIVE, 2973),
    _a100("Llama 3 70B, full", LLAMA_70B, _bf16(1, 8192), _FULL, 331),
    _a100("Llama 2 13B, none", LLAMA2_13B, _bf16(2, 4096), _NONE, 2162),
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
    _h200(32, 10938, 47.96),
    _h200(64, 10753, 46.97),
    _mpt("MPT 7B, none", _MPT_7B, "8 H100", _bf16(6, 2048), _NONE, 10643),
    _mpt("MPT 13B, none", _MPT_13B, "8 H100", _bf16(2, 2048), _NONE, 4792),
    _mpt("MPT 13B, none", _MPT_13B, "64 H100", _bf16(2, 2048), _NONE, 4800),
    _mpt("MPT 70B, full", _MPT_70B, "32 H100", _accumulated(2, 16), _FULL, 882),
    _later(_mpt("MPT 30B, full", _MPT_30B, "8 H100", _accumulated(3, 21), _FULL, 2002)),
    _later(_mpt("MPT 30B, full", _MPT_30B, "32 H100", _accumulated(14, 3), _FULL, 2308)),
    _later(_mpt("MPT 70B, full", _MPT_70B, "64 H100", _accumulated(8, 4), _FULL, 1039)),
    _later(_mpt("MPT 7B, none", _MPT_7B, "8 A100", _accumulated(6, 2), _NONE, 4641)),
    _later(_mpt("MPT 13B, none", _MPT_13B, "8 A100", _accumulated(2, 3), _NONE, 2262)),
    _later(_mpt("MPT 30B, full", _MPT_30B, "8 A100", _accumulated(3, 21), _FULL, 916)),
    _b200("", _bf16(1, 8192), _SELECTIVE, 8307.5, 33.71),
    _b200(", fp8", _fp8(1), f"{_SELECTIVE}, fp8 gathers", 10417, 33.38),
    Row(
        "Llama 3 8B, 8 H100, fp8, Megatron-FSDP, 16 micro-batches",
        replace(LLAMA_8B, fuses_norms=True),
        "H100",
        8,
        replace(_fp8(1), micro_batches=16),
        (_NONE, _SELECTIVE, _FULL),
        14451,
        kernels=_WITH_LOSS,
        libraries=(_CUDNN,),
        seen=Seen.AFTER,
    ),
)
# Rows that ask for what the planner lacks, with the reason.
NOT_PREDICTED = {
    "DeepSeek V3 16B, 8 H100: 9281 tokens/s, 57.5 GiB (torchtitan-flexshard's README)": "experts over 4 ranks, "
    "which exchange tokens",
    "GPT-OSS 20B, 8 H100: 13058 tokens/s (NeMo Automodel's performance summary)": "experts over 8 ranks, which "
    "exchange tokens by DeepEP",
}


@cache
def predicted() -> dict[str, tuple[Prediction, ...]]:
    return {row.name: tuple(row.predictions()) for row in ROWS}
