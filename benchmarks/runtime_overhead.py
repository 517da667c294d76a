"""Claim: on 8 ranks at width 16, fsdp2's runtime costs at most 0.35 of that of torch's ``fully_shard``; and a group of
tensor subclasses with all-gather hooks at most 1.5 times a plain group.

With a fake process group, a step's time beyond the unsharded model is the runtime's own: hooks, schedule, allocation,
copies in and out of buffers, binding, DTensor gradients. The model has 32 blocks of 9 parameters; one thread. At width
16 the copies are negligible; at width 256 they are not.

The fake group is not free: an all-gather copies its input once per rank, one rank after the other, which dominates at
512 ranks. So the table shows what it takes for one group's two all-gathers and one reduce-scatter, each one call, and
the ratio again without that.

The second table is about hooks: the seven matrices of each block are ``BFloat16AllGatherTensor``, beside the plain
model whose policy casts to bf16.

    python benchmarks/runtime_overhead.py [--world-sizes 8 64 512] [--widths 16 256] [--profile]
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import pstats
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.fsdp as peer
from common import Block, Ratios, Table, medians_in_turns, publish
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp2
from fsdp2.tensors import BFloat16AllGatherTensor, wrap_parameters

NUM_BLOCKS = 32
BATCH_SIZE = 2


@dataclass(frozen=True)
class Case:
    world_size: int
    width: int
    mixed: bool


def policy(runtime: object, mixed: bool) -> object:
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if mixed else {}
    return runtime.MixedPrecisionPolicy(**dtypes)  # type: ignore[attr-defined]


def sharded(model: nn.Module, runtime: object, mixed: bool) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:  # type: ignore[attr-defined]
        runtime.fully_shard(block, mesh=mesh, mp_policy=policy(runtime, mixed))  # type: ignore[attr-defined]
    runtime.fully_shard(model, mesh=mesh, mp_policy=policy(runtime, mixed))  # type: ignore[attr-defined]
    return model


def stepper(model: nn.Module, x: Tensor) -> Callable[[], None]:
    parameters = list(model.parameters())

    def step() -> None:
        model(x).float().sum().backward()
        for parameter in parameters:
            parameter.grad = None

    for _ in range(3):
        step()
    return step


def seconds_per_step(step: Callable[[], None], steps: int) -> Callable[[], float]:
    def measure() -> float:
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - start) / steps

    return measure


@contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    yield
    dist.destroy_process_group()


def steppers(case: Case) -> dict[str, Callable[[], None]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(case.width) for _ in range(NUM_BLOCKS)))
    x = torch.randn(BATCH_SIZE, case.width)
    unsharded = copy.deepcopy(model).to(torch.bfloat16 if case.mixed else torch.float32)
    return {
        "unsharded": stepper(unsharded, x.to(torch.bfloat16) if case.mixed else x),
        "fsdp2": stepper(sharded(copy.deepcopy(model), fsdp2, case.mixed), x),
        "torch": stepper(sharded(copy.deepcopy(model), peer, case.mixed), x),
    }


def hooked(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose matrices decide themselves that they travel in bf16."""
    model = copy.deepcopy(model)
    wrap_parameters(model, BFloat16AllGatherTensor)
    return model


def hooks_row(case: Case, rounds: int) -> list[object]:
    """What hooks add, under both runtimes. The least of the rounds: a few us per hook are to be seen."""
    with fake_process_group(case.world_size):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(case.width) for _ in range(NUM_BLOCKS)))
        x = torch.randn(BATCH_SIZE, case.width)
        steps = {"unsharded": stepper(copy.deepcopy(model).to(torch.bfloat16), x.to(torch.bfloat16))}
        for name, runtime in (("fsdp2", fsdp2), ("torch", peer)):
            steps[name] = stepper(sharded(copy.deepcopy(model), runtime, mixed=True), x)
            steps[f"{name}, hooks"] = stepper(sharded(hooked(model), runtime, mixed=True), x)
        measures = {name: seconds_per_step(step, steps=3) for name, step in steps.items()}
        taken = [{name: measure() for name, measure in measures.items()} for _ in range(3 * rounds)]
    seconds = {name: min(each[name] for each in taken) for name in measures}
    cost = {name: (value - seconds["unsharded"]) / NUM_BLOCKS * 1e3 for name, value in seconds.items()}
    ours, theirs = ((cost[name], cost[f"{name}, hooks"]) for name in ("fsdp2", "torch"))
    name = f"{case.world_size} ranks, width {case.width}"
    return [name, *ours, ours[1] / ours[0], *theirs, theirs[1] / theirs[0], ours[1] / theirs[1]]


def fake_seconds(case: Case) -> float:
    """What the fake group takes for a group's collectives in one step, each as one tensor."""
    dtype = torch.bfloat16 if case.mixed else torch.float32
    chunks = [-(-p.size(0) // case.world_size) * p[0].numel() for p in Block(case.width).parameters()]
    shard, full = torch.empty(sum(chunks), dtype=dtype), torch.empty(sum(chunks) * case.world_size, dtype=dtype)
    reduced, grads = shard.float(), full.float()

    def collectives() -> None:
        for _ in range(2):
            dist.all_gather_into_tensor(full, shard, async_op=True)
        dist.reduce_scatter_tensor(reduced, grads, async_op=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer torch renames both; the names here exist in every supported version
        measure = seconds_per_step(collectives, steps=20)
        return min(measure() for _ in range(5))


def row(case: Case, rounds: int) -> list[object]:
    with fake_process_group(case.world_size):
        measures = {name: seconds_per_step(step, steps=5) for name, step in steppers(case).items()}
        seconds = medians_in_turns(measures, rounds)
        fake = fake_seconds(case) * 1e3
    ours, theirs = ((seconds[name] - seconds["unsharded"]) / NUM_BLOCKS * 1e3 for name in ("fsdp2", "torch"))
    dtypes = "bf16/fp32" if case.mixed else "fp32"
    name = f"{case.world_size} ranks, width {case.width}, {dtypes}"
    return [name, ours, theirs, fake, (ours - fake) / (theirs - fake), ours / theirs]


def profile(case: Case) -> None:
    """Where the Python of our step goes."""
    with fake_process_group(case.world_size):
        step = steppers(case)["fsdp2"]
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(10):
            step()
        profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--profile", action="store_true", help="print where our Python goes in the first case instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.profile:
        profile(Case(options.world_sizes[0], options.widths[0], mixed=False))
        return
    columns = ["", "fsdp2 ms", "torch ms", "fake group ms", "ratio without it", "ratio"]
    plain = []
    for width in options.widths:
        rows = [row(Case(w, width, mixed), options.rounds) for mixed in (False, True) for w in options.world_sizes]
        noise = 0.08 if width < 256 else 0.4  # what two runs of the same code were apart
        title = f"Plain parameters, width {width}"
        plain.append(Table(f"width_{width}", title, columns, rows, noise=noise, plot=Ratios(aim=0.2)))
    columns = ["", "fsdp2 ms", "hooks ms", "hooks/plain", "torch ms", "hooks ms", "hooks/plain", "ratio of hooks"]
    rows = [hooks_row(Case(options.world_sizes[0], width, True), options.rounds) for width in options.widths]
    title = "In bf16, plain and with seven hooked parameters per group"
    hooks = Table("hooks", title, columns, rows, ratio="ratio of hooks", noise=0.12)
    title = "Overhead per group of 9 parameters and step, beyond the unsharded model; fake process group"
    publish("runtime_overhead", title, [*plain, hooks])


if __name__ == "__main__":
    main()
