"""Claim: fsdp2's runtime costs about a third of that of torch's ``fully_shard``, from 8 to 4096 ranks, for the layers
of a Llama, and for groups of tensor subclasses with all-gather hooks. It is linear in groups; setting up 1,000 groups
takes no longer.

With a process group that does nothing, a step's time beyond the unsharded model is the runtime's own: hooks, schedule,
allocation, copies in and out of buffers, binding, DTensor gradients. The model has 32 blocks of 9 parameters; one
thread. At width 16 the copies are negligible, unless parameters are padded to many more ranks than they have rows; at
width 256 they are not. The Llama is that of Hugging Face's transformers; its embedding and head, in the root's group,
are a part of what is divided by the number of layers. Times are CPU time, since nothing waits, but for those of setting
up; the least of several rounds, in which all take turns of ten steps: in training, too, steps of one runtime follow
each other. Compiling a whole sharded model takes as long, and its steps are shorter.

    python benchmarks/step/runtime_overhead.py [--rounds 5] [--only TABLE ...] [--profile [{blocks,llama}]]
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp as peer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
import fsdp2
from benchmarks.common import Block, Ratios, Table, print_profile, publish, seconds_per_call
from benchmarks.llama import MISSING, Llama, loss, units
from benchmarks.null_group import null_process_group
from fsdp2.tensors import BFloat16AllGatherTensor, wrap_parameters

BATCH_SIZE = 2
IN_A_ROW = 10  # steps of one subject
RUNTIMES = {"fsdp2": fsdp2, "torch": peer}


@dataclass(frozen=True)
class Case:
    name: str
    world_size: int = 8
    width: int = 16
    mixed: bool = False
    num_blocks: int = 32


PRECISIONS = {"fp32": False, "bf16/fp32": True}
RANKS = [Case(f"{w} ranks, {name}", w, mixed=mixed) for name, mixed in PRECISIONS.items() for w in (8, 64, 512, 4096)]
WIDE = [Case(f"{w} ranks, {name}", w, 256, mixed) for name, mixed in PRECISIONS.items() for w in (8, 64)]
GROUPS = [Case(f"{n} groups", num_blocks=n) for n in (32, 250, 1000)]
HOOKS = Case("8 ranks, bf16/fp32", mixed=True)
LLAMA = Llama(width=32, num_layers=16, num_tokens=8)
Step = Callable[[], None]


def policy(runtime: object, mixed: bool) -> object:
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if mixed else {}
    return runtime.MixedPrecisionPolicy(**dtypes)  # type: ignore[attr-defined]


def sharded(model: nn.Module, runtime: object, mixed: bool) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in units(model):
        runtime.fully_shard(unit, mesh=mesh, mp_policy=policy(runtime, mixed))  # type: ignore[attr-defined]
    return model


def summed(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().sum()


def stepper(model: nn.Module, x: Tensor, loss: Callable[[nn.Module, Tensor], Tensor] = summed) -> Step:
    parameters = list(model.parameters())

    def step() -> None:
        loss(model, x).backward()
        for parameter in parameters:
            parameter.grad = None

    for _ in range(3):
        step()
    return step


def model_and_input(case: Case) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(case.width) for _ in range(case.num_blocks))), torch.randn(BATCH_SIZE, case.width)


def unsharded(case: Case, model: nn.Module, x: Tensor) -> Step:
    dtype = torch.bfloat16 if case.mixed else torch.float32
    return stepper(copy.deepcopy(model).to(dtype), x.to(dtype))


def ms_per_group(num_groups: int, steps: Mapping[str, Step], rounds: int) -> dict[str, float]:
    """What a step takes: a few us are to be seen, so the least of many single steps. A mean has whatever else the
    machine did meanwhile, and only some of the subjects have it. Subjects take turns of ``IN_A_ROW`` steps."""
    measures = {name: seconds_per_call(step, 1, time.process_time) for name, step in steps.items()}
    least = dict.fromkeys(steps, math.inf)
    for _ in range(rounds * max(1, math.ceil(320 / num_groups / IN_A_ROW))):
        for name, measure in measures.items():
            least[name] = min(least[name], *(measure() for _ in range(IN_A_ROW)))
    return {name: seconds * 1e3 / num_groups for name, seconds in least.items()}


def costs(case: Case, rounds: int) -> dict[str, float]:
    with null_process_group(case.world_size):
        model, x = model_and_input(case)
        steps = {"unsharded": unsharded(case, model, x)}
        for name, runtime in RUNTIMES.items():
            steps[name] = stepper(sharded(copy.deepcopy(model), runtime, case.mixed), x)
        return ms_per_group(case.num_blocks, steps, rounds)


def runtime_row(case: Case, rounds: int) -> list[object]:
    ms = costs(case, rounds)
    ours, theirs = (ms[name] - ms["unsharded"] for name in RUNTIMES)
    return [case.name, ours, theirs, ours / theirs]


def hooked(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose matrices decide themselves that they travel in bf16."""
    model = copy.deepcopy(model)
    wrap_parameters(model, BFloat16AllGatherTensor)
    return model


def hooks_row(case: Case, rounds: int) -> list[object]:
    """What hooks add, under both runtimes."""
    with null_process_group(case.world_size):
        model, x = model_and_input(case)
        steps = {"unsharded": unsharded(case, model, x)}
        for name, runtime in RUNTIMES.items():
            steps[name] = stepper(sharded(copy.deepcopy(model), runtime, case.mixed), x)
            steps[f"{name}, hooks"] = stepper(sharded(hooked(model), runtime, case.mixed), x)
        ms = ms_per_group(case.num_blocks, steps, 2 * rounds)
    ours, theirs = ([ms[each] - ms["unsharded"] for each in (name, f"{name}, hooks")] for name in RUNTIMES)
    return [case.name, *ours, ours[1] / ours[0], *theirs, theirs[1] / theirs[0], ours[1] / theirs[1]]


def llama_row(name: str, rounds: int, *, mixed: bool = False, checkpointed: bool = False) -> list[object]:
    with null_process_group(8):
        model, tokens = LLAMA.model(checkpointed), LLAMA.tokens()
        plain = copy.deepcopy(model).to(torch.bfloat16 if mixed else torch.float32)
        steps = {"unsharded": stepper(plain, tokens, loss)}
        for runtime_name, runtime in RUNTIMES.items():
            steps[runtime_name] = stepper(sharded(copy.deepcopy(model), runtime, mixed), tokens, loss)
        ms = ms_per_group(LLAMA.num_layers, steps, 2 * rounds)
    ours, theirs = (ms[runtime] - ms["unsharded"] for runtime in RUNTIMES)
    return [name, ms["unsharded"], ours, theirs, ours / theirs]


def init_rows(num_blocks: int, rounds: int) -> list[list[object]]:
    """Seconds until a model is sharded, and of its first step, which compiles the plans.

    Without Python's garbage collector, as ``timeit`` does: where its one full collection of a second falls is chance.
    """
    wraps: dict[str, list[float]] = {name: [] for name in RUNTIMES}
    firsts: dict[str, list[float]] = {name: [] for name in RUNTIMES}
    with null_process_group(8):
        model, x = model_and_input(Case("", num_blocks=num_blocks))
        for _ in range(rounds):
            for name, runtime in RUNTIMES.items():
                gc.collect()
                gc.disable()
                start = time.perf_counter()
                mine = sharded(copy.deepcopy(model), runtime, mixed=False)
                wraps[name].append(time.perf_counter() - start)
                start = time.perf_counter()
                mine(x).sum().backward()
                firsts[name].append(time.perf_counter() - start)
                gc.enable()
    rows: list[list[object]] = []
    for name, taken in (("fully_shard", wraps), ("first step", firsts)):
        ours, theirs = min(taken["fsdp2"]), min(taken["torch"])
        rows.append([name, ours, theirs, ours / theirs])
    return rows


def compile_rows(rounds: int) -> list[list[object]]:
    """CPU seconds of the first two steps of a compiled Llama, which compile it; and CPU ms of a later step."""
    firsts: dict[str, list[float]] = {name: [] for name in RUNTIMES}
    steps: dict[str, list[float]] = {name: [] for name in RUNTIMES}
    with null_process_group(8):
        model, tokens = LLAMA.model(), LLAMA.tokens()
        for _ in range(rounds):
            for name, runtime in RUNTIMES.items():
                torch._dynamo.reset()
                compiled = torch.compile(sharded(copy.deepcopy(model), runtime, mixed=False), backend="aot_eager")
                marks = [time.process_time()]
                for _ in range(12):
                    loss(compiled, tokens).backward()
                    marks.append(time.process_time())
                firsts[name].append(marks[2] - marks[0])
                steps[name].append(1000 * (marks[-1] - marks[2]) / 10)
    rows: list[list[object]] = []
    for name, taken in (("first two steps, s", firsts), ("a later step, ms", steps)):
        ours, theirs = min(taken["fsdp2"]), min(taken["torch"])
        rows.append([name, ours, theirs, ours / theirs])
    return rows


def profile(subject: str) -> None:
    """Where the Python of our step goes."""
    with null_process_group(8):
        if subject == "llama":
            step = stepper(sharded(LLAMA.model(), fsdp2, mixed=False), LLAMA.tokens(), loss)
        else:
            model, x = model_and_input(RANKS[0])
            step = stepper(sharded(model, fsdp2, mixed=False), x)
        print_profile(step, 45)
        print_profile(step, 30, within=re.escape(str(Path(fsdp2.__file__).parent)))


# Tables

COLUMNS = ["", "fsdp2 ms", "torch ms", "ratio"]


def ranks_table(rounds: int) -> Table:
    title = "Width 16: ms beyond the unsharded model, the runtime alone"
    rows = [runtime_row(case, rounds) for case in RANKS]
    return Table("ranks", title, COLUMNS, rows, noise=0.1, plot=Ratios(aim=0.2))


def groups_table(rounds: int) -> Table:
    title = "8 ranks, width 16, fp32: the same, by the number of groups"
    rows = [runtime_row(case, rounds) for case in GROUPS]
    return Table("groups", title, COLUMNS, rows, noise=0.1, plot=Ratios(aim=0.2))


def width_256_table(rounds: int) -> Table:
    title = "Width 256: ms beyond the unsharded model, the runtime and its copies"
    note = (
        "An allocator that gives freed memory back to the system faults all pages in again: with "
        "MALLOC_TRIM_THRESHOLD_=131072, both runtimes take much longer."
    )
    rows = [runtime_row(case, rounds) for case in WIDE]
    return Table("width_256", title, COLUMNS, rows, noise=0.3, note=note, plot=Ratios())


def llama_table(rounds: int) -> Table:
    title = f"Llama, width {LLAMA.width}, {LLAMA.num_layers} layers, 8 ranks: ms per layer beyond the unsharded model"
    rows = [
        llama_row("fp32", rounds),
        llama_row("bf16/fp32", rounds, mixed=True),
        llama_row("fp32, activation checkpointing", rounds, checkpointed=True),
    ]
    return Table("llama", title, ["", "unsharded ms", *COLUMNS[1:]], rows, noise=0.15)


def init_table(_: int) -> Table:
    title = "Seconds to set up 1,000 groups, 8 ranks, width 16, fp32"
    return Table("init", title, ["", "fsdp2 s", "torch s", "ratio"], init_rows(1000, rounds=2), noise=0.15)


def compile_table(rounds: int) -> Table:
    title = f"Llama of {LLAMA.num_layers} layers, torch.compile of the whole sharded model (aot_eager), 8 ranks"
    return Table("compile", title, ["", "fsdp2", "torch", "ratio"], compile_rows(min(rounds, 3)), noise=0.15)


def hooks_table(rounds: int) -> Table:
    columns = ["", "fsdp2 ms", "hooks ms", "hooks/plain", "torch ms", "hooks ms", "hooks/plain", "ratio of hooks"]
    title = "Width 16: ms beyond the unsharded model, plain and with seven hooked parameters per group"
    return Table("hooks", title, columns, [hooks_row(HOOKS, rounds)], ratio="ratio of hooks", noise=0.12)


TABLES: dict[str, Callable[[int], Table]] = {
    "ranks": ranks_table,
    "groups": groups_table,
    "width_256": width_256_table,
    "llama": llama_table,
    "init": init_table,
    "compile": compile_table,
    "hooks": hooks_table,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=TABLES, metavar="TABLE", help=f"of {', '.join(TABLES)}")
    parser.add_argument(
        "--profile",
        nargs="?",
        choices=("blocks", "llama"),
        const="blocks",
        help="print where our Python goes in the first case, or in the Llama in fp32, instead",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # what is gathered from nowhere may be any number
    if options.profile:
        profile(options.profile)
        return
    names = options.only or list(TABLES)
    if MISSING:
        print(f"without the Llama: {MISSING}")
        names = [name for name in names if name not in ("llama", "compile")]
    tables = [TABLES[name](options.rounds) for name in names]
    publish(
        "step/runtime_overhead", "Runtime per group of 9 parameters and step; a process group that does nothing", tables
    )


if __name__ == "__main__":
    main()
