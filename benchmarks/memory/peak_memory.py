"""Claim: beyond its shards, a step holds about as much memory as under torch's FSDP2: 0.7 to 1.05 of it.

Counts what the CPU allocator hands out (torch's profiler reports each allocation): unsharded parameters, buffers that
are sent and received, gradients before and after reduction, memory kept for reuse. One step's peak, after two steps of
warm-up, minus the shards. Activations are a row of numbers per layer. A fake process group stands for the ranks, so the
figures are exact and the same on every run.

"limit" is what two groups in flight take: unsharded parameters and unreduced gradients of the two largest neighbours
and of the root, and all sharded gradients. Rows that keep parameters or unreduced gradients by request have all of
those instead.

    python benchmarks/memory/peak_memory.py
    python benchmarks/memory/peak_memory.py --cases plain HSDP --timeline  # what is alive at the peak, and by whom
"""

from __future__ import annotations

import argparse
import gc
import math
import multiprocessing
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
import fsdp2
import fsdp2.fsdp1
import fsdp2.tensors
from benchmarks.common import Block, Ratios, Table, publish
from fsdp2.tensors import wrap_parameters

VOCABULARY = 50257
KIB = 1024


@dataclass(frozen=True)
class Case:
    """``mesh``: (shard,) or (replicate, shard). ``vocabulary``: rows of an embedding and a head, tied or not; 0 for a
    model without. ``param``, ``reduce``: dtypes, None for fp32. All but the last of ``microbatches`` run without
    communication, unless ``reduces_each``. ``hooks``: the class in ``fsdp2.tensors`` that matrices become."""

    name: str
    mesh: tuple[int, ...] = (8,)
    width: int = 1024
    layers: int = 8
    vocabulary: int = 0
    is_tied: bool = False
    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    microbatches: int = 1
    reduces_each: bool = False
    reshards: bool = True
    hooks: str = ""


MIXED: dict[str, Any] = {"param": torch.bfloat16, "reduce": torch.float32}
LANGUAGE: dict[str, Any] = {"vocabulary": VOCABULARY, "width": 256, "layers": 4}
CASES = (
    Case("plain"),
    Case("plain, 2 ranks", mesh=(2,)),
    Case("bf16 parameters, fp32 reduction", **MIXED),
    Case("bf16 parameters, bf16 reduction", param=torch.bfloat16),
    Case("reshard_after_forward=False", reshards=False),
    Case("reshard_after_forward=False, mixed", reshards=False, **MIXED),
    Case("2 microbatches, one reduction", microbatches=2),
    Case("2 microbatches, one reduction, mixed", microbatches=2, **MIXED),
    Case("2 microbatches, each reduced", microbatches=2, reduces_each=True),
    Case("2 microbatches, each reduced, mixed", microbatches=2, reduces_each=True, **MIXED),
    Case("uneven: width 1000, 3 ranks", width=1000, mesh=(3,)),
    Case("vocabulary 50257", **LANGUAGE),
    Case("vocabulary 50257, mixed", **LANGUAGE, **MIXED),
    Case("vocabulary 50257, tied", **LANGUAGE, is_tied=True),
    Case("vocabulary 50257, tied, mixed", **LANGUAGE, is_tied=True, **MIXED),
    Case("small: width 256", width=256),
    Case("small: width 256, mixed", width=256, **MIXED),
    Case("small: width 64, all in buckets", width=64),
    Case("HSDP 2 x 4", mesh=(2, 4)),
    Case("HSDP 2 x 4, mixed", mesh=(2, 4), **MIXED),
    Case("HSDP 2 x 4, bf16 reduction", mesh=(2, 4), param=torch.bfloat16),
    Case("HSDP 2 x 4, bf16 reduction, 24 layers", mesh=(2, 4), layers=24, param=torch.bfloat16),
    Case("hooks: bf16, mixed", hooks="BFloat16AllGatherTensor", **MIXED),
    Case("hooks: int8", hooks="Int8AllGatherTensor"),
    Case("hooks: int8, mixed", hooks="Int8AllGatherTensor", **MIXED),
    Case("hooks: fp8, mixed", hooks="Float8AllGatherTensor", **MIXED),
)


class Model(nn.Module):
    """Blocks, and a head; with a vocabulary, an embedding before them."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embedding = nn.Embedding(case.vocabulary, case.width) if case.vocabulary else nn.Identity()
        self.blocks = nn.ModuleList(Block(case.width) for _ in range(case.layers))
        self.head = nn.Linear(case.width, case.vocabulary or case.width, bias=not case.vocabulary)
        if case.is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def units(model: Model, case: Case) -> list[nn.Module]:
    """What is sharded as a unit of its own, beside the root. Tied parameters belong to the root."""
    if case.is_tied or not case.vocabulary:
        return list(model.blocks)
    return [model.embedding, *model.blocks, model.head]


def by_fully_shard(runtime: Any) -> Callable[[Model, Case, DeviceMesh], Any]:
    def sharded(model: Model, case: Case, mesh: DeviceMesh) -> Any:
        policy = runtime.MixedPrecisionPolicy(param_dtype=case.param, reduce_dtype=case.reduce)
        options = {"mesh": mesh, "mp_policy": policy}
        for module in units(model, case):
            runtime.fully_shard(module, **options, reshard_after_forward=case.reshards)
        return runtime.fully_shard(model, **options)

    return sharded


def by_class(cls: Callable[..., Any]) -> Callable[[Model, Case, DeviceMesh], Any]:
    """The same units, in the class. torch's class takes the CPU only if ``device_id`` names it."""

    def sharded(model: Model, case: Case, mesh: DeviceMesh) -> Any:
        own = units(model, case)
        if mesh.ndim == 1:
            strategy = ShardingStrategy.FULL_SHARD if case.reshards else ShardingStrategy.SHARD_GRAD_OP
        else:
            strategy = ShardingStrategy.HYBRID_SHARD
        return cls(
            model,
            device_mesh=mesh,
            sharding_strategy=strategy,
            auto_wrap_policy=CustomPolicy(lambda module: any(module is unit for unit in own)),
            mixed_precision=MixedPrecision(case.param, case.reduce) if case.param else None,
            device_id=torch.device(mesh.device_type, None if mesh.device_type == "cpu" else 0),
            use_orig_params=True,
        )

    return sharded


PEERS: dict[str, Callable[[Model, Case, DeviceMesh], Any]] = {
    "fsdp2": by_fully_shard(fsdp2),
    "torch FSDP2": by_fully_shard(torch_fsdp),
    "FSDP1": by_class(torch_fsdp.FullyShardedDataParallel),
    "class": by_class(fsdp2.fsdp1.FullyShardedDataParallel),
}
CLASSES = ("FSDP1", "class")
CLASS_RATIOS = ("class / FSDP1", "class / fsdp2")


def stepper(model: Any, case: Case) -> Callable[[], None]:
    parameters = list(model.parameters())
    x = torch.randint(case.vocabulary, (1,)) if case.vocabulary else torch.randn(1, case.width)
    x = x.to(parameters[0].device)

    def unsynchronised(is_unsynchronised: bool) -> Any:
        if hasattr(model, "no_sync"):
            return model.no_sync() if is_unsynchronised else nullcontext()
        model.set_requires_gradient_sync(not is_unsynchronised)
        return nullcontext()

    def step() -> None:
        for index in range(case.microbatches):
            is_last = index == case.microbatches - 1
            with unsynchronised(not is_last and not case.reduces_each):
                model(x).float().sum().backward()
        for parameter in parameters:
            parameter.grad = None

    return step


@dataclass(frozen=True)
class Recorded:
    """Events of a run from before the model was built, in order: what was allocated earlier and is still held, such as
    memory kept for reuse, counts, too. ``span``: of the measured step in ns."""

    events: list[Any]
    span: tuple[int, int]
    shards_nbytes: int


def recorded(peer: str, case: Case, *, with_stack: bool = False) -> Recorded:
    dist.init_process_group("fake", rank=0, world_size=math.prod(case.mesh), store=FakeStore())
    mesh = init_device_mesh("cpu", case.mesh, mesh_dim_names=("replicate", "shard")[-len(case.mesh) :])
    torch.manual_seed(0)
    with (
        warnings.catch_warnings(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=with_stack) as profiler,
    ):
        warnings.simplefilter("ignore")
        model = Model(case)
        if case.hooks:
            wrap_parameters(model, getattr(fsdp2.tensors, case.hooks))
        model = PEERS[peer](model, case, mesh)
        shards_nbytes = sum(_local(parameter).nbytes for parameter in model.parameters())
        step = stepper(model, case)
        for _ in range(2):
            step()
        gc.collect()
        with torch.profiler.record_function("measured"):
            step()
    measured = next(event for event in _events(profiler) if _name(event) == "measured")
    return Recorded(allocations(profiler), (measured.start_time_ns, measured.end_time_ns), shards_nbytes)


def allocations(profiler: profile) -> list[Any]:
    """What was allocated and freed while ``profiler`` recorded, in order."""
    found = [event for event in _events(profiler) if _name(event) == "[memory]"]
    return sorted(found, key=lambda event: event.start_time_ns)


def peak_of_step(step: Callable[[], object]) -> int:
    """The most that the CPU's allocator hands out in ``step``, beyond what it has handed out before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    held = peak = 0
    for event in allocations(profiler):
        held += event.extra_fields.alloc_size
        peak = max(peak, held)
    return peak


def _events(profiler: profile) -> Iterator[Any]:
    return _descendants(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]


def _local(parameter: Tensor) -> Tensor:
    return getattr(parameter, "_local_tensor", parameter)


def _name(event: Any) -> str:
    try:
        return str(event.name)
    except UnicodeDecodeError:  # torch 2.13 garbles some names of Python functions
        return "?"


def _descendants(events: list[Any]) -> Iterator[Any]:
    stack = list(events)
    while stack:
        event = stack.pop()
        yield event
        stack += event.children


def peak_nbytes(peer: str, case: Case) -> int:
    """Peak of a step beyond the shards; run in a process of its own."""
    run = recorded(peer, case)
    live, peak = 0, 0
    for event in run.events:
        live += event.extra_fields.alloc_size
        if run.span[0] <= event.start_time_ns <= run.span[1]:
            peak = max(peak, live)
    return peak - run.shards_nbytes


def timeline(peer: str, case: Case, num_lines: int = 12) -> str:
    """What is alive at the peak, by who allocated it; run in a process of its own."""
    run = recorded(peer, case, with_stack=True)
    live: dict[int, Any] = {}
    total, peak, at_peak, cause = 0, 0, [], None
    for event in run.events:
        fields = event.extra_fields
        total += fields.alloc_size
        if fields.alloc_size > 0:
            live[fields.ptr] = event
        else:
            live.pop(fields.ptr, None)
        if run.span[0] <= event.start_time_ns <= run.span[1] and total > peak:
            peak, at_peak, cause = total, list(live.values()), event
    nbytes: Counter[str] = Counter()
    for event in at_peak:
        nbytes[_cause(event)] += event.extra_fields.alloc_size
    lines = [f"{size / KIB:10.0f}  {cause}" for cause, size in nbytes.most_common(num_lines)]
    title = f"{case.name}, {peer}: {(peak - run.shards_nbytes) / KIB:.0f} KiB beyond the shards, in {_cause(cause)}"
    return "\n".join([title, *lines, ""])


def _cause(event: Any, num_names: int = 4) -> str:
    """The innermost operations and functions of FSDP around an allocation."""
    names = []
    while (event := event.parent) is not None and len(names) < num_names:
        name = _name(event).rpartition("/")[2]
        if "fsdp" in _name(event) or "peak_memory" in name or name.startswith("aten::") or "Backward" in name:
            names.append(name.removeprefix("autograd::engine::evaluate_function: "))
    return " < ".join(names)


def limit_nbytes(case: Case) -> int:
    """See the module's text."""
    model = Model(case)
    groups = [_numel(unit) for unit in units(model, case)]
    numel, root = _numel(model), _numel(model) - sum(groups)
    param_size = (case.param or torch.float32).itemsize
    reduce_size = (case.reduce or case.param or torch.float32).itemsize
    two = max(sum(pair) for pair in pairwise(groups))
    params = param_size * (root + two if case.reshards else numel)
    waits = case.microbatches > 1 and not case.reduces_each
    grads = reduce_size * (numel if waits else root + two)
    return params + grads + 4 * numel // case.mesh[-1]


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def row(case: Case) -> list[object]:
    peers = [peer for peer in PEERS if not (peer in CLASSES and case.hooks)]
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        arguments = [(peer, case) for peer in peers]
        peaks = dict(zip(peers, pool.starmap(peak_nbytes, arguments, chunksize=1), strict=True))
    limit, ours = limit_nbytes(case), peaks["fsdp2"]
    group = _numel(Block(case.width)) * (case.param or torch.float32).itemsize
    shown = [None if nbytes is None else f"{nbytes / KIB:.0f}" for nbytes in (group, limit, *map(peaks.get, PEERS))]
    of_torch = [ours / peaks[peer] if peer in peaks else None for peer in ("torch FSDP2", "FSDP1")]
    of_class = [peaks["class"] / peaks[peer] if "class" in peaks else None for peer in ("FSDP1", "fsdp2")]
    smaller = min(peaks[peer] for peer in ("torch FSDP2", "FSDP1") if peer in peaks)
    return [case.name, *shown, ours / limit, *of_torch, *of_class, ours / smaller]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=[""], help="only rows whose name starts like one of these")
    parser.add_argument("--timeline", action="store_true", help="print what is alive at the peak instead of the table")
    arguments = parser.parse_args()
    cases = [case for case in CASES if case.name.startswith(tuple(arguments.cases))]
    if arguments.timeline:
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            for text in pool.starmap(timeline, [(peer, case) for case in cases for peer in PEERS], chunksize=1):
                print(text)
        return
    columns = ["", "one group", "limit", *PEERS, "of limit", "of FSDP2", "of FSDP1", *CLASS_RATIOS, "ratio"]
    note = (
        "of limit, of FSDP2, of FSDP1: fsdp2 to these. ratio: fsdp2 to the smaller of torch's two. FSDP1 and class: "
        "FullyShardedDataParallel of torch and of fsdp2. It takes no parameters that are tensor subclasses."
    )
    peaks = Table(
        "main",
        "KiB",
        columns,
        [row(case) for case in cases],
        noise=0,
        note=note,
        plot=Ratios(peer="the smaller of torch's FSDP2 and FSDP1"),
    )
    publish("memory/peak_memory", "Peak of one step beyond the shards", [peaks])


if __name__ == "__main__":
    main()
