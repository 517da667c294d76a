"""Claim: fp8 and int8 shards halve bf16's bytes in an all-gather, a 4-bit base with its adapters takes a third of them,
and the loss stays within what another seed changes.

The model, data and optimizer of ``make train``, on 2 gloo ranks with one thread each. A row is a format in which the
matrices travel; norms always travel in fp32. Only the bf16 policy computes in bf16. The other rows compute in fp32 on
what arrived, so that they differ from the first row by what was rounded for the wire, and by nothing else.

Bytes are those that a rank sends, counted by the kernel on the loopback device, headers included, in a forward without
gradients and in a training step. Other programs that use the loopback device meanwhile add theirs, so each count is
the least of several. Where the kernel does not tell, payloads of collectives are counted instead.

Rounding is the norm of what a format changes in a matrix, relative to that of the matrix; no ranks are needed for it.

The last row is ``docs/examples/lora.py``: the first row's final weights in 4 bits, frozen, and adapters of rank 8 that
travel in fp32, trained for as many steps again.

    python benchmarks/tensors/all_gather_bytes.py [--steps 40] [--turns 8] [--formats FORMAT ...]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))
from lm_run import Config
from lm_task import Transformer, read_corpus
from lora import quantise_and_adapt
from train_lm import Trainer

from benchmarks.common import Table, medians_in_turns, publish
from fsdp2.tensors import (
    BFloat16AllGatherTensor,
    Float8AllGatherTensor,
    Float8Scaling,
    Int8AllGatherTensor,
    MXBlocks,
    MXFP8AllGatherTensor,
    precompute_float8_scales,
    wrap_parameters,
)
from fsdp2.tensors.float8 import magnitude, quantise_float8, row_magnitudes, scale_from
from fsdp2.tensors.int8 import dequantise, quantise
from fsdp2.tensors.mxfp8 import dequantise_mxfp8, quantise_mxfp8

NUM_RANKS = 2
VALIDATION_BATCHES = 8
COUNTERS = Path("/proc/net/dev")
UNTIMED_STEPS = 3  # under both runtimes: one before the turns, two whose bytes are counted
MAX_OVERHEAD = 1.03  # of headers; beyond it, others have used the loopback device
BASE = "base.pt"


@dataclass(frozen=True)
class Format:
    """How a row's parameters travel. ``wrap``: what a matrix becomes; ``options``: of the training run."""

    name: str
    wrap: Callable[[torch.Tensor], torch.Tensor] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    precompute: bool = False
    lora: bool = False


FORMATS = {
    "fp32": Format("fp32"),
    "bf16-policy": Format("bf16, by policy", options={"mp": "bf16"}),
    "bf16": Format("bf16", BFloat16AllGatherTensor),
    "fp8-row": Format("fp8, scale per row", partial(Float8AllGatherTensor, scaling=Float8Scaling.PER_ROW)),
    "fp8-tensor": Format("fp8, scale per tensor", Float8AllGatherTensor, precompute=True),
    "mxfp8": Format("mxfp8, blocks of 32", MXFP8AllGatherTensor),
    "int8": Format("int8, blocks of 256", Int8AllGatherTensor),
    "nf4": Format("nf4 base, LoRA", lora=True, options={"lr": 3e-3}),
}


def prepare(model: Transformer, format: Format, folder: Path) -> None:
    if format.wrap is not None:
        wrap_parameters(model, format.wrap)
    if format.lora:
        model.load_state_dict(torch.load(folder / BASE))
        quantise_and_adapt(model, rank=8, alpha=16.0)


class Subject:
    """A model under one runtime, trained step by step."""

    def __init__(self, format: Format, config: Config, folder: Path) -> None:
        self.trainer = Trainer(
            config, read_corpus(), torch.device("cpu"), partial(prepare, format=format, folder=folder)
        )
        self.losses: list[float] = []
        if format.precompute:
            model = self.trainer.model
            self.trainer.optimizer.register_step_post_hook(lambda *_: precompute_float8_scales(model))

    def step(self) -> float:
        """Train one step; returns its seconds."""
        dist.barrier()
        record = self.trainer.step(len(self.losses))
        self.losses.append(record["loss"])
        return record["seconds"]

    @torch.no_grad()
    def forward(self) -> None:
        self.trainer.model(torch.zeros(1, self.trainer.config.sequence_length, dtype=torch.long))

    def traffic(self) -> dict[str, float]:
        """MB that a rank sends, in a forward and in a training step; and the former's factor over the payload."""
        forwards = []
        for _ in range(5):
            self.trainer.model.reshard()  # type: ignore[operator]  # else the root stays unsharded after a forward
            forwards.append(sent_nbytes(self.forward))
        self.trainer.model.reshard()  # type: ignore[operator]
        counted, payload = min(forwards)
        step = min(sent_nbytes(self.step)[0] for _ in range(2))
        return {"forward": counted / 1e6, "step": step / 1e6, "overhead": counted / payload}


def sent_nbytes(act: Callable[[], object]) -> tuple[float, float]:
    """Bytes that a rank sends during ``act``, as counted, and their payload."""
    with SentPayloads() as payloads:
        dist.barrier()
        before = loopback_nbytes()
        dist.barrier()
        act()
        dist.barrier()
        after = loopback_nbytes()
    is_counted = before is not None and after is not None
    return (after - before) / NUM_RANKS if is_counted else payloads.nbytes, payloads.nbytes


def loopback_nbytes() -> int | None:
    """What this machine has sent over the loopback device so far; None where the kernel does not count it."""
    lines = COUNTERS.read_text().splitlines() if COUNTERS.exists() else []
    counters = {name.strip(): values.split() for name, _, values in (line.partition(":") for line in lines)}
    return int(counters["lo"][8]) if "lo" in counters else None


class SentPayloads(TorchDispatchMode):
    """Counts what a rank sends at least, in the collectives by which either runtime moves parameters and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.send.default:
            self.nbytes += sum(tensor.nbytes for tensor in args[0])
        elif func is torch.ops.c10d._allgather_base_.default:
            self.nbytes += args[1].nbytes * (NUM_RANKS - 1)
        elif func is torch.ops.c10d._reduce_scatter_base_.default:
            self.nbytes += args[1].nbytes * (NUM_RANKS - 1) / NUM_RANKS
        return func(*args, **(kwargs or {}))


def measure(format: Format, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train ``format`` under both runtimes in turns, then to the end under ours; all ranks get the same figures."""
    run = {"steps": options.steps, "validation_batches": VALIDATION_BATCHES, **format.options}
    ours = Subject(format, Config(**run), folder)
    subjects, refusal = {"fsdp2": ours}, ""
    result: dict[str, Any] = {"loss at start": ours.trainer.validate()} if format.lora else {}
    try:
        theirs = Subject(format, Config(runtime="torch", **run), folder)
        theirs.forward()
        subjects["torch"] = theirs
    except Exception as error:  # on all ranks alike: it depends on the format
        refusal = f"no: {str(error).splitlines()[0]}"
    for subject in subjects.values():
        subject.step()  # the first one makes plans, and allocates
    result["seconds"] = medians_in_turns({name: subject.step for name, subject in subjects.items()}, options.turns)
    result["traffic"] = {name: subject.traffic() for name, subject in subjects.items()}
    while len(ours.losses) < options.steps:
        ours.step()
    if "torch" in subjects:  # its run is shorter
        result["difference"] = max(abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=False))
    if format.name == "fp32":
        state = {name: shard.full_tensor() for name, shard in ours.trainer.model.state_dict().items()}
        if dist.get_rank() == 0:
            torch.save(state, folder / BASE)
    return {**result, "loss": ours.losses[-1], "validation": ours.trainer.validate(), "refusal": refusal}


def run_rank(rank: int, name: str, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store_{name}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=NUM_RANKS)
    result = measure(FORMATS[name], options, Path(folder))
    if rank == 0:
        Path(folder, name).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def row(format: Format, result: dict[str, Any], bf16_mb: float | None) -> list[object]:
    def figures(runtime: str) -> list[object]:
        traffic = result["traffic"][runtime]
        return [f"{traffic['forward']:.1f}", f"{traffic['step']:.1f}", f"{result['seconds'][runtime] * 1e3:.0f}"]

    of_bf16 = result["traffic"]["fsdp2"]["forward"] / bf16_mb if bf16_mb else ""
    cells = [format.name, of_bf16, *figures("fsdp2"), f"{result['loss']:.4f}", f"{result['validation']:.4f}"]
    if result["refusal"]:
        return [*cells, result["refusal"][:40], "", "", "", ""]
    ratio = result["seconds"]["fsdp2"] / result["seconds"]["torch"]
    return [*cells, *figures("torch"), f"{result['difference']:.2g}", ratio]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="of training, after which losses are shown")
    parser.add_argument("--turns", type=int, default=8, help="of these, how many both runtimes take in turns")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="some of the rows only")
    options = parser.parse_args()
    if options.turns < 1 or options.steps < options.turns + UNTIMED_STEPS:
        parser.error(f"--steps is {options.steps}, expected {max(options.turns, 1) + UNTIMED_STEPS} or more.")
    if "nf4" in options.formats and "fp32" not in options.formats:
        parser.error("--formats: nf4 starts from what fp32 has trained, so name both.")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    title = f"Bytes of all-gathers: MB that a rank sends, {NUM_RANKS} gloo ranks, one thread each"
    publish("tensors/all_gather_bytes", title, [report(measured(options), options), errors()])


# Errors


def arrived_in_fp8(matrix: torch.Tensor, magnitudes: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    scale = scale_from(magnitudes(matrix))
    return quantise_float8(matrix, scale).to(matrix.dtype) * scale


def arrived_in_mxfp8(matrix: torch.Tensor, blocks: MXBlocks = MXBlocks.ROWS) -> torch.Tensor:
    made = torch.empty_like(matrix)
    dequantise_mxfp8(*quantise_mxfp8(matrix, blocks), blocks, out=made)
    return made


def arrived_in_int8(matrix: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(matrix)
    dequantise(*quantise(matrix, 256), 256, out=made)
    return made


ARRIVED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bf16": lambda matrix: matrix.bfloat16().to(matrix.dtype),
    "fp8, scale per tensor": partial(arrived_in_fp8, magnitudes=magnitude),
    "fp8, scale per row": partial(arrived_in_fp8, magnitudes=row_magnitudes),
    "mxfp8, blocks of 32": arrived_in_mxfp8,
    "mxfp8, blocks of 32 in columns": partial(arrived_in_mxfp8, blocks=MXBlocks.COLUMNS),
    "int8, blocks of 256": arrived_in_int8,
}


def rounding(arrived: torch.Tensor, matrix: torch.Tensor) -> str:
    exact = matrix.double()
    return f"{float((arrived.double() - exact).norm() / exact.norm()):.1e}"


def errors() -> Table:
    """What a format loses of a normal matrix, and of one whose columns have different sizes."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(1024, 1024, generator=generator)
    wide = normal * torch.exp(2 * torch.randn(1024, generator=generator))
    rows = [[name, *(rounding(arrived(each), each) for each in (normal, wide))] for name, arrived in ARRIVED.items()]
    note = "A normal matrix; wide: its columns differ by a factor of about 7."
    title = "Rounding of a matrix, relative to fp64"
    return Table("errors", title, ["", "normal", "wide"], rows, ratio=None, note=note)


def measured(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By name of the format; those that others start from come first."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in (name for name in FORMATS if name in options.formats):
            torch.multiprocessing.spawn(run_rank, (name, options, folder), nprocs=NUM_RANKS)
            results[name] = json.loads(Path(folder, name).read_text())
    return results


def report(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> Table:
    bf16_mb = results["bf16-policy"]["traffic"]["fsdp2"]["forward"] if "bf16-policy" in results else None
    columns = ["", "of bf16", "forward MB", "step MB", "step ms", "loss", "val. loss"]
    columns += ["torch: forward MB", "step MB", "step ms", "difference", "ratio"]
    rows = [row(FORMATS[name], result, bf16_mb) for name, result in results.items()]
    return Table("main", "Formats on the wire", columns, rows, note="\n".join(notes(results, options)))


def notes(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> list[str]:
    counted = "on the loopback device" if loopback_nbytes() is not None else "as payloads: no loopback counters here"
    lines = [
        f"Of bf16: bytes in forward against bf16 by policy. Bytes counted {counted}.",
        f"Losses, nats per byte, after {options.steps} steps. Their largest difference to torch's: in the first",
        f"{options.turns + UNTIMED_STEPS} steps; 0 is bit for bit. Ratio: of step times.",
    ]
    if "nf4" in results:
        dense, adapted = results["fp32"]["validation"], results["nf4"]
        lines.append(
            f"nf4: validation loss of the dense base {dense:.4f}, in 4 bits {adapted['loss at start']:.4f}, "
            f"after {options.steps} more steps of adapters only {adapted['validation']:.4f}."
        )
    for name, result in results.items():
        if any(traffic["overhead"] > MAX_OVERHEAD for traffic in result["traffic"].values()):
            lines.append(f"{FORMATS[name].name}: other programs used the loopback device meanwhile. Run it again.")
    return lines


if __name__ == "__main__":
    main()
