"""The model against published steps: torchtitan's tables of Llama 3.1 on H100s, from three sources.

- ``PAGE``: the project's performance page of December 2024 (llama3_h100_202412_torchtitan among
  pytorch/torchtitan's benchmarks). Its H100s have 96 GB of HBM2e with 2.4 TB/s, and a limit of 500 W.
- ``PAPER``: Liang et al., "TorchTitan", arXiv 2410.06511: the same rows at another date, with other versions.
- ``LATER``: the project's page of June 2025, of async TP on the same machines (asyncTP_llama3_h100_2025-06_torchtitan
  among its benchmarks); the figures are in the text of pytorch/torchtitan#1299.

Sequences of 8,192 tokens, two of them per GPU for 8B with selective checkpointing, 16 per group of 8 tensor-parallel
GPUs for 70B with full checkpointing, 32 per pipeline of such groups for 405B.

What is not in the tables is in torchtitan's code of that time (torchtitan/parallelisms): units are the blocks, of which
the last stays unsharded, in a pipeline all (pytorch/torchtitan#446); embedding and head are with the root; sequences
are divided between blocks, and words for the loss, which was not compiled then (pytorch/pytorch#143774). A pipeline has
as many microbatches as GPUs, if nothing else is said. Where it was split, the page does not say: here every 16 blocks,
or every 8 if the schedule is interleaved, so that the last GPU, which has the head, has fewer.

The first row calibrates what the allocator reserves. What async TP gains on the later page, in bf16 and fp8, calibrates
the share of a transfer that it hides. All else is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from fsdp2.planner.groups import Wire
from fsdp2.planner.machine import Machine
from fsdp2.planner.machines import H100
from fsdp2.planner.scenario import Choice, Kernels, Result, Scenario, simulate

from .pipeline import Pipeline, simulate_stages
from .workload import LLAMA_8B, LLAMA_70B, LLAMA_405B, Batch, Checkpointing, Llama, scenario

_FSDP = Choice(num_kept=1)
_FSDP_FP8 = Choice(wire=Wire.FP8, num_kept=1)
_8B = Batch(2 * 8192)
_70B = Batch(16 * 8192, checkpointing=Checkpointing.FULL, tensor_parallel=8)
_405B = Batch(4 * 8192, checkpointing=Checkpointing.FULL, tensor_parallel=8)
# What torchtitan's page names of its machine.
H100_OF_THE_PAGE = replace(
    H100.limited_to(500), name="H100, 96 GB HBM2e, 500 W", memory_nbytes=96e9, copy_bandwidth=0.9 * 2.4e12
)


@dataclass(frozen=True)
class Row:
    """Tokens per second and GPU as published; GiB are the page's. None: not published. ``batch``: in a pipeline, one
    microbatch."""

    name: str
    model: Llama
    batch: Batch
    num_gpus: int
    page: float
    paper: float | None = None
    gib: float | None = None
    fp8: bool = False
    async_tp: bool = False
    kernels: Kernels = Kernels.COMPILED
    pipeline: Pipeline | None = None

    def scenario(self, machine: Machine, hidden: float) -> Scenario:
        """``hidden``: the share of a transfer beside a product that async TP hides."""
        model, num_gpus = self.model, self.num_gpus
        if self.pipeline is not None:
            model = replace(model, num_blocks=self.pipeline.num_blocks(model.num_blocks))
            num_gpus //= self.pipeline.size
        return scenario(
            machine,
            model,
            self.batch,
            num_gpus,
            _FSDP_FP8 if self.fp8 else _FSDP,
            fp8=self.fp8,
            async_tp=hidden if self.async_tp else None,
            kernels=self.kernels,
            wraps_large=False,
        )


_EAGER = Kernels.EAGER
ROWS = (
    Row("8B, 8 GPUs, compiled", LLAMA_8B, _8B, 8, 6667, 6674, 77.0),
    Row("8B, 128 GPUs, compiled", LLAMA_8B, _8B, 128, 6514, 6482, 62.0),
    Row("8B, 8 GPUs, eager", LLAMA_8B, _8B, 8, 5762, 6258, 82.4, kernels=_EAGER),
    Row("8B, 128 GPUs, eager", LLAMA_8B, _8B, 128, 5605, 5645, 67.0, kernels=_EAGER),
    Row("8B, 8 GPUs, compiled, fp8", LLAMA_8B, _8B, 8, 8532, 9409, 76.8, fp8=True),
    Row("8B, 128 GPUs, compiled, fp8", LLAMA_8B, _8B, 128, 8380, 9319, 61.8, fp8=True),
    Row("70B, 256 GPUs, FSDP 32 x TP 8, compiled, fp8", LLAMA_70B, _70B, 256, 829, 897, 71.9, fp8=True),
    Row("the same with async TP", LLAMA_70B, _70B, 256, 876, 1010, 67.6, fp8=True, async_tp=True),
    Row(
        "405B, 512 GPUs, FSDP 8 x TP 8 x PP 8, 1F1B, compiled, fp8, async TP",
        LLAMA_405B,
        _405B,
        512,
        100,
        gib=82.5,
        fp8=True,
        async_tp=True,
        pipeline=Pipeline(8, 8),
    ),
    Row(
        "the same, interleaved",
        LLAMA_405B,
        _405B,
        512,
        128,
        gib=72.7,
        fp8=True,
        async_tp=True,
        pipeline=Pipeline(8, 8, num_chunks=2),
    ),
)


LATER = (
    Row("70B, 256 GPUs, FSDP 32 x TP 8, compiled, bf16", LLAMA_70B, _70B, 256, 597.3),
    Row("bf16, async TP", LLAMA_70B, _70B, 256, 652.4, async_tp=True),
    Row("fp8", LLAMA_70B, _70B, 256, 809.8, fp8=True),
    Row("fp8, async TP", LLAMA_70B, _70B, 256, 942.4, fp8=True, async_tp=True),
)


@dataclass(frozen=True)
class Calibrated:
    """The share of a transfer beside a product that async TP hides, on ``machine``."""

    hidden: float
    machine: Machine = H100_OF_THE_PAGE

    def predict(self, row: Row) -> Result:
        found = row.scenario(self.machine, self.hidden)
        return simulate(found) if row.pipeline is None else simulate_stages(found, row.pipeline)


@cache
def calibrated() -> Calibrated:
    """What async TP gains on the later page, in the mean."""
    published = _gain([row.page for row in LATER])

    def predicted(hidden: float) -> float:
        return _gain([Calibrated(hidden).predict(row).tokens_per_second for row in LATER])

    return Calibrated(_solved(predicted, published))


def _gain(rates: Sequence[float]) -> float:
    """The geometric mean of what async TP gains; each of its rows follows the one without it."""
    return math.prod(fast / slow for slow, fast in zip(rates[::2], rates[1::2], strict=True)) ** (2 / len(rates))


def _solved(function: Callable[[float], float], value: float) -> float:
    """Where between 0.01 and 1 the growing ``function`` has ``value``."""
    low, high = 0.01, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if function(middle) > value else (middle, high)
    return high


def predictions(rows: Sequence[Row] = ROWS) -> list[tuple[Row, Result]]:
    found = calibrated()
    return [(row, found.predict(row)) for row in rows]
