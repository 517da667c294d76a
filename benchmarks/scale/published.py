"""The model against published steps: torchtitan's tables of Llama 3.1 on H100s.

Source: Liang et al., "TorchTitan", arXiv 2410.06511, and the project's performance page of December 2024. Sequences of
8,192 tokens, two of them per GPU for 8B with selective checkpointing, 16 per group of 8 tensor-parallel GPUs for 70B
with full checkpointing. **All figures are quoted from memory**, and so is that these H100s had 95 GiB and a lower power
limit than usual. The tables of 405B use pipeline parallelism, which the model does not have.

Of these rows one calibrates one number, the share of the peak that kernels reach; all else is predicted.
"""

from __future__ import annotations

from dataclasses import dataclass

from .groups import Wire
from .hardware import H100, Hardware
from .scenario import Choice, Result, Scenario, calibrated, simulate
from .workload import LLAMA_8B, LLAMA_70B, Batch, Checkpointing, Llama

_FSDP = Choice("FSDP")
_FSDP_FP8 = Choice("FSDP, fp8 gathers", wire=Wire.FP8)
_8B = Batch(2 * 8192)
_70B = Batch(16 * 8192, checkpointing=Checkpointing.FULL, tensor_parallel=8)


@dataclass(frozen=True)
class Row:
    """Tokens per second and GPU, and GiB, as published."""

    name: str
    model: Llama
    batch: Batch
    num_gpus: int
    tokens_per_second: float
    gib: float
    fp8: bool = False
    hides_exchanges: bool = False

    def scenario(self, hardware: Hardware) -> Scenario:
        choice = _FSDP_FP8 if self.fp8 else _FSDP
        return Scenario(hardware, self.model, self.batch, self.num_gpus, choice, self.fp8, self.hides_exchanges)


CALIBRATES = Row("8B, 8 GPUs, compiled", LLAMA_8B, _8B, 8, 6674, 77.0)
ROWS = (
    CALIBRATES,
    Row("8B, 128 GPUs, compiled", LLAMA_8B, _8B, 128, 6482, 62.1),
    Row("8B, 8 GPUs, eager", LLAMA_8B, _8B, 8, 6258, 81.9),
    Row("8B, 128 GPUs, eager", LLAMA_8B, _8B, 128, 5645, 67.0),
    Row("8B, 8 GPUs, compiled, fp8", LLAMA_8B, _8B, 8, 9409, 76.8, fp8=True),
    Row("8B, 128 GPUs, compiled, fp8", LLAMA_8B, _8B, 128, 9319, 61.8, fp8=True),
    Row("70B, 256 GPUs, FSDP 32 x TP 8, compiled, fp8", LLAMA_70B, _70B, 256, 897, 70.3, fp8=True),
    Row("the same with async TP", LLAMA_70B, _70B, 256, 1010, 67.7, fp8=True, hides_exchanges=True),
)


def calibrated_h100() -> Hardware:
    """The preset with the utilisation that makes the first row right."""
    return calibrated(CALIBRATES.scenario(H100), CALIBRATES.tokens_per_second)


def predictions(hardware: Hardware) -> list[tuple[Row, Result]]:
    return [(row, simulate(row.scenario(hardware))) for row in ROWS]
