"""Run one program under torch's runtime, ours, and unsharded, and say what came of it."""

from __future__ import annotations

import itertools
import linecache
import os
import traceback
import warnings
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.harness.compare import (
    compare_with_oracle,
    compare_with_unsharded,
    oracle_records,
    subject_records,
    unsharded_records,
)
from tests.harness.distributed import RankContext
from tests.harness.training import Case, Tolerance
from tests.programs.known import known_difference
from tests.programs.parts import LacksError
from tests.programs.program import Program
from tests.programs.source import settings, source

IN_FP32 = Tolerance(rtol=1e-4, atol=1e-5)
IN_LESS = Tolerance(rtol=5e-2, atol=5e-2, of_largest=7e-2)  # bf16 rounds by up to 4e-3; norms used twice, by more


class Outcome(Enum):
    """What came of a program. All but the last two are as they should be."""

    EQUAL = "equal"
    TORCH_REFUSES = "torch refuses it; fsdp2 is as the unsharded model"
    TORCH_HANGS = "torch hangs, or refuses it on one rank only; fsdp2 is as the unsharded model"
    ALONE = "nothing to compare with: torch refuses it or is known to differ, and so does the unsharded model"
    OVER_LIMIT = "it needs more memory than the limit that it sets, and fsdp2 says so"
    BOTH_REFUSE = "both refuse it, with the same error, or as the unsharded model does, if there is one"
    KNOWN = "known difference"
    DIFFERS = "DIFFERS"
    RAISES = "RAISES"

    @property
    def is_failure(self) -> bool:
        return self in (Outcome.DIFFERS, Outcome.RAISES)

    @property
    def is_compared(self) -> bool:
        """Whether the values of fsdp2 were found to be right."""
        return self in (Outcome.EQUAL, Outcome.TORCH_REFUSES, Outcome.TORCH_HANGS, Outcome.KNOWN)


class OneSidedRefusalError(Exception):
    """Torch's runtime raised on some ranks only. The ranks cannot go on together."""


@dataclass(frozen=True)
class Verdict:
    """``text``: differences, or the exception; why the difference is known."""

    outcome: Outcome
    text: str = ""


def verdict(program: Program, ctx: RankContext, *, with_torch: bool = True) -> Verdict:
    """Collective. The same on all ranks, unless runtimes do other things there. ``with_torch``: compare with torch."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    # dynamo asks inputs of compiled blocks for .grad; in a pool of ranks, warnings are errors
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf Tensor", UserWarning)
    warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)  # of a first block
    warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`", UserWarning)
    warnings.filterwarnings("ignore", "Mismatch dtype between input and weight", UserWarning)  # of norms
    text = source(program)
    name = f"<program {hash(text)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # so that tracebacks have lines
    found: dict[str, Any] = {"__name__": "program"}
    exec(compile(text, name, "exec"), found)
    case = _case(found, **settings(program))
    try:
        mesh = _mesh(program.mesh, ctx)
        with_torch = with_torch and not program.ranks_differ
        answer = compared(case, mesh, known_difference(program), with_torch=with_torch)
        is_over = answer.outcome is Outcome.RAISES and "MemoryLimitError" in answer.text
        return Verdict(Outcome.OVER_LIMIT, answer.text) if is_over and program.memory == "tight limit" else answer
    finally:
        linecache.cache.pop(name, None)
        for each in [each for each in found if not each.startswith("__")]:  # dynamo deletes its own
            del found[each]  # runtimes remember the classes of modules, and so what their methods see


def compared(case: Case, mesh: DeviceMesh, known: str | None = None, *, with_torch: bool = True) -> Verdict:
    """``known``: why the runtimes may differ. fsdp2 must be as the unsharded model even so."""
    refused, lacks, expected, differs = None, False, None, False
    try:
        expected = oracle_records(case, mesh) if with_torch else None
    except Exception as error:
        refused, lacks = traceback.format_exc(limit=-3), isinstance(error, LacksError)
    if with_torch and len(set(_of_all_ranks(refused is not None))) > 1:
        raise OneSidedRefusalError(refused)  # its messages to the other ranks are still on their way
    try:
        actual = subject_records(case, mesh)
    except Exception:
        raised = traceback.format_exc(limit=-6)
        alike = refused is not None and refused.splitlines()[-1] == raised.splitlines()[-1]
        if refused is None or lacks or (not alike and _runs_unsharded(case, mesh)):  # then fsdp2 must run it
            return Verdict(Outcome.RAISES, raised)
        return Verdict(Outcome.BOTH_REFUSE, f"{refused}\n{raised}")
    try:
        if expected is not None:
            compare_with_oracle(case, mesh, actual, expected)
    except AssertionError as error:
        if known is None:
            return Verdict(Outcome.DIFFERS, str(error))
        differs = True
    has_unsharded = case.unsharded is not None
    try:
        if has_unsharded:
            compare_with_unsharded(case, mesh, actual)
    except AssertionError as error:
        return Verdict(Outcome.DIFFERS, str(error))
    if differs and known:
        return Verdict(Outcome.KNOWN if has_unsharded else Outcome.ALONE, known)
    if expected is None and not has_unsharded:
        return Verdict(Outcome.ALONE, refused or "")
    if not with_torch:
        return Verdict(Outcome.TORCH_HANGS)
    return Verdict(Outcome.TORCH_REFUSES, refused) if refused else Verdict(Outcome.EQUAL)


def _runs_unsharded(case: Case, mesh: DeviceMesh) -> bool:
    """Whether the unsharded model runs it. Torch may have refused it for one reason, and fsdp2 raise for another."""
    if case.unsharded is None:
        return False
    try:
        unsharded_records(case, mesh)
    except Exception:
        return False
    return True


_num_answers = itertools.count()


def _of_all_ranks(value: bool) -> list[str]:
    """``value`` on each rank, through the store: messages that ranks wait for may never come."""
    store, number = dist.distributed_c10d._get_default_store(), next(_num_answers)
    store.set(f"fuzz {number} {dist.get_rank()}", str(value))
    return [store.get(f"fuzz {number} {rank}").decode() for rank in range(dist.get_world_size())]


def _case(found: dict[str, Any], *, is_low: bool, has_reference: bool, **own: Any) -> Case:
    unsharded = (IN_LESS if is_low else IN_FP32) if has_reference else None
    own |= {"reduce_dtype": torch.bfloat16 if is_low else torch.float32, "unsharded": unsharded}
    own |= {"clip": found.get("clip", torch.nn.utils.clip_grad_norm_)}
    return Case(found["build"], found["shard"], found["run"], found["optimizer"], **own)


def _mesh(kind: str, ctx: RankContext) -> DeviceMesh:
    size = ctx.world_size
    if kind == "fsdp":
        return ctx.mesh_1d()
    if kind == "one rank":
        return ctx.mesh_of_one()
    if kind == "tp":
        return ctx.mesh(dp=size // 2, tp=2)
    replicas = 1 if kind == "one replica" else 2
    return ctx.mesh_2d(replicas, size // replicas)


def check(ctx: RankContext, programs: list[Program], *, with_torch: bool = True) -> list[Verdict]:
    """What a pool of ranks runs."""
    return [verdict(program, ctx, with_torch=with_torch) for program in programs]


def main(mesh: str, *, with_torch: bool, **given: Any) -> None:
    """What a printed program runs, under ``torchrun --nproc-per-node 2``."""
    import __main__

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ctx = RankContext(dist.get_rank(), dist.get_world_size())
    found = compared(_case(vars(__main__), **given), _mesh(mesh, ctx), with_torch=with_torch)
    print(f"rank {ctx.rank}: {found.outcome.value}\n{found.text}", flush=True)
    dist.barrier()
    os._exit(found.outcome.is_failure)


__all__ = ["OneSidedRefusalError", "Outcome", "Verdict", "check", "compared", "init_device_mesh", "main", "verdict"]
