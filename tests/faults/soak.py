"""Train for a long time while ranks are killed, stopped and raise, and disks are full. In the end, nothing has leaked.

    python -m tests.faults.soak --minutes 30 --seed 0      # make soak

In turns: **a life** of ranks that stay, and repeat the same jobs and random programs (``tests/programs``) in rounds,
with faults that a process survives; then **jobs that are killed** (``resume.py``), or one of whose ranks raises. Later
rounds of a life may hold no more than earlier ones: tensors, objects, memory, threads, descriptors, keys in the store.
A job with a fault must end in the state of the same job without one, bit for bit. After each turn, the processes, the
shared memory and the files of its ranks must be gone.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import io
import multiprocessing
import os
import pickle
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing import util
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.distributed.support import InjectedError
from tests.faults.growth import MIB, growth, held
from tests.faults.jobs import BACKGROUND, FOREGROUND, SAVE_EVERY, STEPS, Job, Run, example
from tests.faults.ranks import World
from tests.faults.resume import READS_ALONE, Found, Harness, contents, drawn, drawn_job, wait_for
from tests.harness.worker import EXPECTED_WARNINGS, RankContext
from tests.programs.check import check
from tests.programs.drawn import draw
from tests.programs.program import Program

STOPPED_S = 0.2
LIFE_S = 30.0
WARM_ROUNDS = 2  # caches fill
FEWEST_ROUNDS = 4
TIMEOUT_S = 60.0
THREADS_S = 10.0
NEVER_GROW = ("tensors", "threads", "descriptors", "entries")
MOST_KEYS = 16  # of the claims of the last models; a leak has two of each model, of which a round makes six and more
MOST_MALLOC_NBYTES = MIB // 2
MOST_RESIDENT_NBYTES = 16 * MIB  # the allocator returns pages late
MOST_MAPPINGS = 16  # of such pages
MOST_BLOCKS = 8_000  # strings and numbers, too
MOST_OBJECTS = 100  # of one type in a life, as caches of torch keep


@dataclass
class Lived:
    """What a rank did in its life."""

    num_rounds: int = 0
    num_programs: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    grown: dict[str, int] = field(default_factory=dict)


def live(ctx: RankContext, mesh: DeviceMesh, seed: int, folder: Path, seconds: float) -> Lived:
    """Rounds of two jobs, each without and with a fault, and of two random programs."""
    warnings.simplefilter("error")
    for message in (*EXPECTED_WARNINGS, READS_ALONE):
        warnings.filterwarnings("ignore", message=message)
    choose = random.Random(seed)
    some_jobs = [_job_of_a_life(choose, ctx.world_size) for _ in range(2)]
    programs = list(_programs(choose, ctx.world_size, 2))
    lived, ends = Lived(), time.monotonic() + seconds
    readings = tempfile.TemporaryFile()  # noqa: SIM115  # in memory, they would be growth
    at_most = 0
    while True:
        for job in some_jobs:
            _compare_with_fault(ctx, mesh, job, folder, choose, lived)
        with warnings.catch_warnings():
            verdicts = check(ctx, programs, with_torch=False)
        failed = [verdict for verdict in verdicts if verdict.outcome.is_failure]
        assert not failed, failed
        lived.num_programs += len(programs)
        lived.num_rounds += 1
        if lived.num_rounds >= WARM_ROUNDS:
            found = _held(at_most)
            at_most = at_most or found["threads"]
            pickle.dump(found, readings)
        is_over = torch.tensor(float(time.monotonic() > ends and lived.num_rounds >= FEWEST_ROUNDS))
        dist.all_reduce(is_over, dist.ReduceOp.MAX)
        if is_over:
            break
    with readings:
        readings.seek(0)
        all_found = [pickle.load(readings) for _ in range(lived.num_rounds - WARM_ROUNDS + 1)]
    lived.grown = too_much(growth(all_found))
    return lived


def too_much(grown: dict[str, int]) -> dict[str, int]:
    """What of ``grown`` is a leak."""
    most = {"resident_nbytes": MOST_RESIDENT_NBYTES, "malloc_nbytes": MOST_MALLOC_NBYTES, "mappings": MOST_MAPPINGS}
    most |= {"python_blocks": MOST_BLOCKS, "keys in the store": MOST_KEYS, **dict.fromkeys(NEVER_GROW, 0)}
    most |= {name: 0 for name in grown if name.startswith("thread ")}
    return {name: by for name, by in grown.items() if by > most.get(name, MOST_OBJECTS)}


def _held(at_most: int) -> Counter[str]:
    """``at_most``: as many threads as there may be; 0: not known yet."""
    gc.collect()
    for thread in threading.enumerate():  # those of timers, and of savers and optimizers that are gone, are ending
        if thread is not threading.current_thread() and (not thread.daemon or thread.name.startswith("fsdp2_")):
            thread.join(2.0)
    found = held()
    found["threads"] = _num_threads(at_most)
    found.update(f"thread {re.sub('[0-9]+', 'N', each.name)}" for each in threading.enumerate())
    found["keys in the store"] = dist.distributed_c10d._get_default_store().num_keys()
    return found


def _num_threads(at_most: int) -> int:
    """A thread that was joined may still be about to end, on a busy machine for some seconds."""
    fewest, ends = sys.maxsize, time.monotonic() + (THREADS_S if at_most else 0.5)
    while fewest > at_most and time.monotonic() < ends:
        time.sleep(0.05)
        fewest = min(fewest, len(os.listdir("/proc/self/task")))
    return fewest


def _job_of_a_life(choose: random.Random, num_ranks: int) -> Job:
    job = drawn_job(choose, num_ranks)
    return replace(job, save=choose.choice((FOREGROUND, BACKGROUND)), saves_on_sigterm=False)


def _programs(choose: random.Random, num_ranks: int, count: int) -> Iterator[Program]:
    """Those that compile nothing, since a compiler keeps what it has made, and that all ranks run alike."""
    while count:
        program = draw(choose.randrange(10**6), num_ranks)
        fits = num_ranks % 2 == 0 or program.mesh in ("fsdp", "one rank")  # other meshes are pairs of ranks
        compiles = program.compiled or any(block.compiled for block in program.blocks)
        if fits and not compiles and not program.ranks_differ:
            count -= 1
            yield program


# Faults that a process survives


def _compare_with_fault(
    ctx: RankContext, mesh: DeviceMesh, job: Job, folder: Path, choose: random.Random, lived: Lived
) -> None:
    """Train twice, the second time with a fault; the last checkpoints must be equal."""
    fault = choose.choice(tuple(_FAULTS))
    step, victim = choose.randrange(SAVE_EVERY + 1, STEPS, SAVE_EVERY), choose.randrange(ctx.world_size)
    states = []
    for each in (None, fault):
        with contextlib.redirect_stdout(io.StringIO()):
            _train(ctx, mesh, job, folder, each, step, victim)
        if ctx.rank == 0:
            newest = example("lm_run.py")["latest_checkpoint"](folder)
            assert newest is not None
            assert newest.name == f"step_{STEPS:08d}"
            states.append(_digest(newest))
            shutil.rmtree(folder)
            folder.with_suffix(".saved").unlink(missing_ok=True)
        dist.barrier()
    assert len(set(states)) <= 1, f"{job} ends in another state after '{fault}' on rank {victim} at step {step}"
    lived.faults[fault] += 1


def _digest(checkpoint: Path) -> str:
    hashed = hashlib.sha256()
    for name, value in sorted(contents(checkpoint).items()):
        is_tensor = isinstance(value, torch.Tensor)
        hashed.update(
            f"{name} {value.contiguous().view(-1).view(torch.uint8).tolist() if is_tensor else value}".encode()
        )
    return hashed.hexdigest()


def _train(
    ctx: RankContext, mesh: DeviceMesh, job: Job, folder: Path, fault: str | None, step: int, victim: int
) -> None:
    """A job from its start to its end, with ``fault`` in the step of that number."""
    run = Run(ctx, mesh, job, folder)
    while run.done < STEPS:
        if fault is not None and run.done == step:
            _FAULTS[fault](run, victim)
            fault = None
        else:
            run.step()
            run.save_where_due()


def _stop(run: Run, victim: int) -> None:
    """A neighbour stops the rank, and lets it go on later."""
    pids: list[int] = [0] * run.num_ranks
    dist.all_gather_object(pids, os.getpid())
    if run.num_ranks > 1 and run.rank == (victim + 1) % run.num_ranks:
        os.kill(pids[victim], signal.SIGSTOP)
        threading.Timer(STOPPED_S, os.kill, (pids[victim], signal.SIGCONT)).start()
    run.step()
    run.save_where_due()


def _fill_disk(run: Run, victim: int) -> None:
    """One rank cannot write, so no rank takes the checkpoint for saved. There is room later, and they save again."""
    run.step()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if run.rank == victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (256, before[1]))
    raised = torch.zeros(1)
    try:
        run.save_where_due()
        run.settle()
    except (RuntimeError, OSError):
        raised += 1
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    dist.all_reduce(raised)
    assert raised == run.num_ranks, f"{raised} ranks have raised"
    with contextlib.suppress(RuntimeError):  # the weights were exported while the other save was still to fail
        run.settle()
    run.save_where_due()


def _raise(run: Run, hook: Callable[[Any], Any]) -> None:
    """All ranks raise within a step, and go back to the newest checkpoint in the same process."""
    run.settle()
    handle = hook(run.model.blocks[1])
    try:
        run.step()
    except InjectedError:
        run.model.reset_iter_state()
        run.optimizer.zero_grad()
    else:
        raise AssertionError("no error")
    handle.remove()
    run.load(example("lm_run.py")["latest_checkpoint"](run.folder))


def _fail(*_: object) -> None:
    raise InjectedError


def _fail_in_backward(module: Any, arguments: Any, output: torch.Tensor) -> None:
    output.register_hook(_fail)


_FAULTS: dict[str, Callable[[Run, int], None]] = {
    "stopped": _stop,
    "full disk": _fill_disk,
    "raised in forward": lambda run, _: _raise(run, lambda block: block.register_forward_pre_hook(_fail)),
    "raised in backward": lambda run, _: _raise(run, lambda block: block.register_forward_hook(_fail_in_backward)),
}


# The process that starts the others


class Soak:
    """Lives and trials in turns, and what they have left behind."""

    def __init__(self, root: Path, seed: int) -> None:
        self._root, self._seed = root, seed
        self._harness = Harness(root)
        self._number = 0
        self.num_lives = self.num_rounds = self.num_programs = 0
        self.faults: Counter[str] = Counter()
        self.found: list[Found] = []
        self.problems: list[str] = []

    def live(self, seconds: float) -> None:
        """One life, of a number of ranks that is drawn."""
        self._number += 1
        num_ranks = random.Random(f"{self._seed} {self._number}").choice((2, 2, 3))  # programs need two
        world = World(live, num_ranks, TIMEOUT_S, True, seed=self._number, folder=self._root / "life", seconds=seconds)
        pids = [process.pid for process in world.processes]
        wait_for(world)
        for rank, ended in enumerate(world.join()):
            if ended.exit_code != 0:
                self.problems.append(f"life {self._number}, rank {rank}: {ended.exit_code} {ended.trace}")
                continue
            lived: Lived = ended.value
            if lived.grown:
                self.problems.append(f"life {self._number}, rank {rank}: has grown: {lived.grown}")
            if rank == 0:
                self.faults += lived.faults
                self.num_rounds += lived.num_rounds
                self.num_programs += lived.num_programs
        self.num_lives += 1
        left = [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in pids)]
        if left:
            self.problems.append(f"life {self._number}: left in shared memory: {left}")

    def kill(self) -> None:
        """One job that is killed, or one of whose ranks raises."""
        self._number += 1
        found = self._harness.run(drawn(self._seed, self._number, errors=True))
        self.found.append(found)
        self.problems += [f"{found.trial}: {problem}" for problem in found.problems]

    def held(self) -> tuple[int, int, int]:
        """Descriptors, threads and children of this process."""
        descriptors = len(os.listdir("/proc/self/fd"))
        return descriptors, threading.active_count(), len(multiprocessing.active_children())

    def check_files(self) -> None:
        """All that is left is what the harness keeps, and what the fork server needs."""
        names = [path.name for path in self._root.iterdir()]
        left = [name for name in names if not name.startswith(("reference-", "pymp-"))]
        if left and not self.problems:
            self.problems.append(f"left on the disk: {left}")


def soak(minutes: float, seed: int, life_s: float = LIFE_S, says: Callable[[str], object] = print) -> Soak:
    """Until the time is over, or something is wrong."""
    root = Path(tempfile.mkdtemp(prefix="fsdp2-soak-"))
    ends = time.monotonic() + 60 * minutes
    variables = {"TMPDIR": str(root), "TORCH_FR_BUFFER_SIZE": "0"}
    with mock.patch.dict(os.environ, variables), mock.patch.object(tempfile, "tempdir", str(root)):
        running, before = Soak(root, seed), None
        while not running.problems and (before is None or time.monotonic() < ends):
            turn = time.monotonic()
            running.live(min(life_s, 20 * minutes))
            while not running.problems and time.monotonic() < min(ends, turn + 2 * life_s):
                running.kill()
            running.check_files()
            held_now = running.held()
            before = before or held_now
            if any(now > first for now, first in zip(held_now, before, strict=True)):
                running.problems.append(f"this process holds {held_now} of descriptors, threads, children; {before}")
            says(summary(running))
    if not running.problems:  # after the folder of multiprocessing in it, whose priority is -100
        util.Finalize(None, shutil.rmtree, args=(root,), kwargs={"ignore_errors": True}, exitpriority=-101)
    return running


def summary(running: Soak) -> str:
    """One line."""
    killed = Counter(kill.sent for found in running.found for kill, _ in found.was_killed)
    counted = [f"{num} x {name}" for name, num in sorted((killed + running.faults).items())]
    return (
        f"{running.num_lives} lives with {running.num_rounds} rounds and {running.num_programs} random programs, "
        f"{len(running.found)} jobs started again; {', '.join(counted)}; "
        f"{len(running.problems) or 'nothing'} wrong, {'see above' if running.problems else 'nothing leaked'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=READS_ALONE)
    running = soak(options.minutes, options.seed, says=lambda line: print(line, file=sys.stderr, flush=True))
    for problem in running.problems:
        print(problem)
    print(summary(running))
    sys.exit(bool(running.problems))


if __name__ == "__main__":
    main()
