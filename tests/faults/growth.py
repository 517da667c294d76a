"""What a rank holds after many steps: nothing of it may grow with their number.

    python -m tests.faults.growth --steps 10000                  # all variants, 2 ranks, a table
    python -m tests.faults.growth --steps 10000 --runtime torch  # the same under torch's fully_shard

torch notes the last 2,000 collectives of a process, with about 1.3 KB each; fsdp2 calls one per step on gloo. So the
first reading is after 2,000 steps; TORCH_FR_BUFFER_SIZE=0 makes shorter runs flat.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import pickle
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import fsdp2
from tests.distributed.compile_support import BACKEND, start_compiling
from tests.distributed.support import InjectedError, Stack, batch, seeded, step
from tests.harness.pool import WorkerPool
from tests.harness.runtimes import Runtime, oracle, subject
from tests.harness.worker import RankContext

KEPT_STEPS = 5
MIB = 2**20


class _Mallinfo2(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def held() -> Counter[str]:
    """What this process holds now, by what it is; Linux with glibc.

    "resident_nbytes" also moves with how pages are used. "malloc_nbytes" is memory that was allocated and not freed,
    Python's and torch's. "python_blocks" are also of objects that the garbage collector does not know; those that it
    knows are counted by their types, and "tensors" once more.
    """
    gc.collect()
    found = Counter(python_blocks=sys.getallocatedblocks())
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    malloc = mallinfo2()
    for cls, count in Counter(map(type, gc.get_objects())).items():
        found[f"{cls.__module__}.{cls.__qualname__}"] += count
        found["tensors"] += count if issubclass(cls, Tensor) else 0
    process = Path("/proc/self")
    found["resident_nbytes"] = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    found["malloc_nbytes"] = malloc.uordblks + malloc.hblkhd
    found["entries"] = entries_of_the_runtime()
    found["threads"] = len(list((process / "task").iterdir()))
    found["descriptors"] = len(list((process / "fd").iterdir()))
    found["mappings"] = (process / "maps").read_text().count("\n")
    return found


def entries_of_the_runtime() -> int:
    """How many entries all containers have that objects of the package hold. Numbers in a list are no objects that the
    garbage collector knows, and take a few bytes each."""
    owners = [each for each in gc.get_objects() if str(type(each).__module__).startswith("fsdp2.")]
    values = [value for each in owners for value in getattr(each, "__dict__", {}).values()]
    return sum(len(value) for value in values if isinstance(value, (list, dict, set, deque, bytes, tuple)))


def _update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def _one_backward(model: Any, optimizer: torch.optim.Optimizer, index: int) -> list[Any]:
    step(model, index)
    _update(optimizer)
    return []


def _accumulation(model: Any, optimizer: torch.optim.Optimizer, index: int) -> list[Any]:
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        step(model, index + micro)
    _update(optimizer)
    return []


def _evaluation(model: Any, optimizer: torch.optim.Optimizer, index: int) -> list[Any]:
    model.eval()
    with torch.no_grad():
        model(batch(index))
    model.train()
    return _one_backward(model, optimizer, index)


def _kept(model: Any, optimizer: torch.optim.Optimizer, index: int) -> list[Any]:
    """Outputs whose graphs nobody frees, gradients, and a loss."""
    unused = model(batch(index + 1))
    output = model(batch(index))
    loss = output.square().mean()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    _update(optimizer)
    return [unused, output, loss, *gradients]


def _state_dicts(model: Any, optimizer: torch.optim.Optimizer, index: int) -> list[Any]:
    _one_backward(model, optimizer, index)
    if index % 10 == 0:
        return [model.state_dict(), get_state_dict(model, optimizer)]
    return []


def _without_backward(model: Any, optimizer: torch.optim.Optimizer, index: int) -> list[Any]:
    """An inference that forgets no_grad."""
    model(batch(index))
    return []


def _frozen(model: Any, optimizer: torch.optim.Optimizer, index: int) -> list[Any]:
    model.requires_grad_(False)
    model(batch(index))
    return []


def _partly_frozen(model: Any, optimizer: torch.optim.Optimizer, index: int) -> list[Any]:
    model.entry.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return _one_backward(model, optimizer, index)


def _never_last(model: Any, optimizer: torch.optim.Optimizer, index: int) -> list[Any]:
    """The user forgets to say which backward is the last one, and drops the gradients."""
    model.set_is_last_backward(False)
    step(model, index)
    optimizer.zero_grad()
    return []


def _parts(model: Any, optimizer: torch.optim.Optimizer, index: int) -> list[Any]:
    """A unit alone, then its root."""
    model.blocks[0](batch(index)).square().mean().backward()
    return _one_backward(model, optimizer, index)


def _scopes(model: Any, optimizer: torch.optim.Optimizer, index: int) -> list[Any]:
    with fsdp2.unsharded(model, writeback=index % 2 == 0):
        next(model.parameters()).norm()
    handle = model.unshard(async_op=True)
    _one_backward(model, optimizer, index)
    if handle is not None:
        handle.wait()
    model.reshard()
    return []


def _clipping(model: Any, optimizer: torch.optim.Optimizer, index: int) -> list[Any]:
    step(model, index)
    clip = fsdp2.clip_grad_norm_ if isinstance(model, fsdp2.FSDPModule) else nn.utils.clip_grad_norm_
    norm = clip(model.parameters(), 1.0)
    _update(optimizer)
    return [norm]


def _recovery(model: Any, optimizer: torch.optim.Optimizer, index: int) -> list[Any]:
    def fail(*args: object) -> None:
        raise InjectedError

    hook = model.blocks[-1].register_forward_pre_hook(fail)
    try:
        model(batch(index))
    except InjectedError:
        model.reset_iter_state()
    hook.remove()
    return _one_backward(model, optimizer, index)


def _in_bfloat16(runtime: Runtime, ctx: RankContext) -> dict[str, Any]:
    return {"mp_policy": runtime.MixedPrecisionPolicy(torch.bfloat16, torch.float32)}


@dataclass(frozen=True)
class Variant:
    """A way to train."""

    options: Callable[[Runtime, RankContext], dict[str, Any]] = lambda runtime, ctx: {}  # of fully_shard
    step: Callable[[Any, torch.optim.Optimizer, int], list[Any]] = _one_backward  # the user keeps what it returns
    compiled: bool = False  # the blocks, with inductor's front and no C++ compiler
    needs_ours: bool = False  # uses what torch's runtime lacks


VARIANTS = {
    "fp32": Variant(),
    "mixed precision": Variant(_in_bfloat16),
    "kept after forward": Variant(lambda runtime, ctx: {"reshard_after_forward": False}),
    "HSDP": Variant(lambda runtime, ctx: {"mesh": ctx.mesh_2d(2, 1)}),
    "offload": Variant(lambda runtime, ctx: {"offload_policy": runtime.CPUOffloadPolicy(pin_memory=False)}),
    "compiled blocks": Variant(compiled=True),
    "compiled, mixed precision, accumulation": Variant(_in_bfloat16, _accumulation, compiled=True),
    "accumulation": Variant(step=_accumulation),
    "evaluation between steps": Variant(step=_evaluation),
    "tensors kept by the user": Variant(step=_kept),
    "compiled, tensors kept by the user": Variant(step=_kept, compiled=True),
    "clipping": Variant(step=_clipping),
    "forwards without a backward": Variant(step=_without_backward),
    "a frozen model": Variant(step=_frozen),
    "a partly frozen model": Variant(step=_partly_frozen),
    "no last backward": Variant(step=_never_last),
    "a unit alone, then its root": Variant(step=_parts),
    "state dicts between steps": Variant(step=_state_dicts),
    "unsharded() and unshard()": Variant(step=_scopes, needs_ours=True),
    "errors and reset_iter_state()": Variant(step=_recovery, needs_ours=True),
}


def train(ctx: RankContext, variant: str, at: tuple[int, ...], with_torch: bool = False) -> list[Counter[str]]:
    """Train as ``variant`` says; what this rank holds after each number of steps in ``at``."""
    chosen, runtime = VARIANTS[variant], oracle() if with_torch else subject()
    if chosen.compiled:
        start_compiling()
    model = seeded(lambda: Stack(2))
    options = {"mesh": ctx.mesh_1d(), **chosen.options(runtime, ctx)}
    for block in model.blocks:
        if chosen.compiled:
            block.compile(backend=BACKEND)
        runtime.fully_shard(block, **options)
    runtime.fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    kept: deque[list[Any]] = deque(maxlen=KEPT_STEPS)
    held()  # what reading itself keeps, such as compiled patterns of paths, is there from now on
    with tempfile.TemporaryFile() as readings:  # in memory, the first would be growth in the last
        for index in range(max(at)):
            kept.append(chosen.step(model, optimizer, index))
            if index + 1 in at:
                pickle.dump(held(), readings)
        readings.seek(0)
        return [pickle.load(readings) for _ in at]


def growth(found: list[Counter[str]]) -> dict[str, int]:
    """What the last reading has more or less than the first one."""
    first, last = found[0], found[-1]
    return {name: last[name] - first[name] for name in sorted(first | last) if last[name] != first[name]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--runtime", choices=("fsdp2", "torch"), default="fsdp2")
    parser.add_argument("--only", nargs="*", choices=tuple(VARIANTS), default=tuple(VARIANTS))
    options = parser.parse_args()
    at = tuple(options.steps * tenths // 10 for tenths in (3, 5, 7, 10))
    for name in options.only:
        if options.runtime == "torch" and VARIANTS[name].needs_ours:
            continue
        started = time.perf_counter()
        pool = WorkerPool(2)  # new processes
        found = pool.run(train, 3600, variant=name, at=at, with_torch=options.runtime == "torch")
        pool.close()
        print(f"{time.perf_counter() - started:.0f} s")
        for rank, readings in enumerate(found):
            print(f"{name}, rank {rank}:")
            for what, more in growth(readings).items():
                print(f"    {what:<24} {readings[0][what]:>12,} {more:>+12,}", flush=True)


if __name__ == "__main__":
    main()
