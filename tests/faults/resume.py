"""Kill training jobs at random moments, start them again, and compare with jobs that nobody killed.

    python -m tests.faults.resume --kills 200 --seed 0                   # a table
    python -m tests.faults.resume --kills 40 --runtime torch             # under torch's fully_shard and dcp.async_save
    python -m tests.faults.resume --only 17                              # one trial again

A trial is a job (``jobs.py``) that is killed once or twice and then runs to its end, on the same ranks or on others. It
follows from the seed and its number, but for how far the ranks are when a time has passed. Reference: the same job on
the ranks of the first start, saved after each step.

After each kill, all checkpoints in the folder must be complete and equal the reference's of their steps, and the newest
must be no older than what the job had reported as saved. In the end, the newest checkpoint must equal the reference's,
and nothing else may be there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp2.checkpoint import load_safetensors
from tests.faults import jobs
from tests.faults.jobs import (
    BACKGROUND,
    BACKWARD,
    ERROR,
    EXAMPLE,
    FILE_OPERATION,
    FOREGROUND,
    FORWARD,
    OPTIMIZER,
    OVERLAPPING,
    STEPS,
    TIME,
    Job,
    Kill,
    example,
)
from tests.faults.ranks import DEADLINE_S, Ended, World
from tests.harness.patience import patient

SENT = ("SIGKILL to one", "SIGKILL to all", "SIGTERM to all")
WHEN = (FILE_OPERATION, FILE_OPERATION, TIME, TIME, FORWARD, BACKWARD, OPTIMIZER)  # saves are the hardest
FILES_OF_THE_EXAMPLE = {"checkpoints", "config.json", "losses.jsonl", "result.json", "step.html"}
NOTHING, COMPLETE, HALF = "nothing was saved yet", "complete", "complete, and a half-written one"
# On other ranks, sums are rounded in another order. Adam's step of an element whose gradient is near 0 has any sign, so
# that 8 steps of at most 0.01 may differ by a share of them; measured figures are in the table.
TOLERANCES = {"AdamW": 1e-3, "flat": 1e-3, "HostAdamW": 1e-3, "Muon": 5e-2, "AdamW8bit": 5e-2}
TIMEOUT_S = 60.0
READS_ALONE = "torch.distributed is disabled"  # torch warns of what reads a checkpoint, and is no rank


@dataclass(frozen=True)
class Trial:
    """The job of each start, and the kill of each but the last; ``at`` of a kill is a fraction of the way."""

    number: int
    starts: tuple[Job, ...]
    kills: tuple[Kill, ...]


def drawn(seed: int, number: int, runtime: str = "fsdp2", *, errors: bool = False) -> Trial:
    """The trial of that number. ``errors``: in some, a rank raises instead of being killed."""
    choose = random.Random(f"{seed} {number}")
    first = drawn_job(choose, choose.randint(1, 4), runtime)
    later = first
    if not first.own_noise:
        later = replace(first, ranks=choose.randint(1, 4), layout=choose.choice(("FSDP", "HSDP")))
    starts = (first, *[later] * choose.choice((1, 1, 1, 2)))
    return Trial(number, starts, tuple(_drawn_kill(choose, job, errors) for job in starts[:-1]))


def drawn_job(choose: random.Random, ranks: int, runtime: str = "fsdp2") -> Job:
    """A job on that many ranks."""
    is_ours = runtime == "fsdp2"
    optimizer = choose.choice(tuple(jobs.OPTIMIZERS)) if is_ours else "AdamW"
    save = choose.choice((FOREGROUND, BACKGROUND, OVERLAPPING, EXAMPLE) if is_ours else (FOREGROUND, BACKGROUND))
    if save == EXAMPLE:
        return _of_the_example(ranks, choose)
    return Job(
        ranks=ranks,
        layout=choose.choice(("FSDP", "HSDP")),
        optimizer=optimizer,
        scaled=choose.random() < 0.5 and optimizer != "HostAdamW",  # which refuses it
        averaged=choose.random() < 0.5 and is_ours,  # torch's modules have no copies
        save=save,
        exports=choose.random() < 0.4 and is_ours,
        keeps=choose.choice((1, 2)) if save == BACKGROUND else 1,
        saves_on_sigterm=choose.random() < 0.5,
        own_noise=choose.random() < 0.5,
        runtime=runtime,
    )


def _of_the_example(ranks: int, choose: random.Random) -> Job:
    """It does not do all that other jobs do, and its batches depend on the number of ranks. It may write a report."""
    layout = choose.choice(("FSDP", "HSDP")) if ranks == 4 else "FSDP"
    return Job(ranks, layout, choose.choice(("AdamW", "Muon")), save=EXAMPLE, exports=choose.random() < 0.4)


def _drawn_kill(choose: random.Random, job: Job, errors: bool) -> Kill:
    sent = choose.choice((*SENT, ERROR) if errors else SENT)
    grace_s = choose.choice((0.05, 0.3, 10.0)) if job.saves_on_sigterm else 1.0
    when = choose.choice((FORWARD, BACKWARD, OPTIMIZER) if sent == ERROR else WHEN)
    return Kill(sent, choose.randrange(job.ranks), when, choose.random(), grace_s)


@dataclass
class Found:
    """What happened to one job that was killed."""

    trial: Trial
    was_killed: list[tuple[Kill, str]] = field(default_factory=list)  # and what was there afterwards
    problems: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)  # of ranks that were not killed
    longest_s: float = 0.0  # until those had ended
    difference: float = 0.0  # of the last state from the reference's

    @property
    def is_moved(self) -> bool:
        """To other ranks or another layout."""
        first, last = self.trial.starts[0], self.trial.starts[-1]
        return (first.ranks, first.layout) != (last.ranks, last.layout)


class Harness:
    """Runs trials in folders of their own below ``root``, and the references that they need once."""

    def __init__(self, root: Path) -> None:
        jobs.start_server()
        self._root = root
        self._runs: dict[Job, Future[tuple[Path, list[Ended]]]] = {}
        self._lock = threading.Lock()

    def run(self, trial: Trial) -> Found:
        """Kill, look, and start again, to the end."""
        found = Found(trial)
        folder = self._root / f"trial-{trial.number:06}"
        folder.mkdir()
        reference = self._reference(trial.starts[0])
        for index, job in enumerate(trial.starts):
            is_exact = index == 0 or not found.is_moved
            kill = self._placed(trial.kills[index], job, is_first=index == 0) if index < len(trial.kills) else None
            before = _newest(folder)
            ended = self._start(found, job, folder, kill)
            _check_loaded(found, folder, before)
            if kill is not None and folder.with_suffix(".struck").exists():
                folder.with_suffix(".struck").unlink()
                found.was_killed.append((kill, _there(found, job, folder)))
            elif any(each.exit_code for each in ended):
                found.problems += [f"start {index}: {each.trace or each.exit_code}" for each in ended if each.exit_code]
            _check_checkpoints(found, job, folder, reference, is_exact)
            if found.problems:
                break
        else:
            _check_end(found, folder, reference)
        for path in self._root.glob(f"{folder.name}*"):
            if not found.problems:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return found

    def _reference(self, job: Job) -> Path:
        return self._once(job.reference)[0]

    def _once(self, job: Job) -> tuple[Path, list[Ended]]:
        """The folder of ``job``, which nobody has killed, and how its ranks ended. Other trials wait for it."""
        with self._lock:
            is_first = job not in self._runs
            run = self._runs.setdefault(job, Future())
            number = len(self._runs)
        if is_first:
            folder = self._root / f"reference-{number}"
            folder.mkdir()
            world = World(jobs.train, job.ranks, TIMEOUT_S, job=job, folder=folder)
            wait_for(world)
            run.set_result((folder, world.join()))
        folder, ended = run.result()
        assert not any(each.exit_code for each in ended), [each.trace or each.exit_code for each in ended]
        return folder, ended

    def _placed(self, kill: Kill, job: Job, *, is_first: bool) -> Kill:
        """``kill`` with the seconds or the number of its event. A job that resumes has some of the way behind it."""
        _, ended = self._once(Job(job.ranks, save=job.save, exports=job.exports, runtime=job.runtime))
        counts, seconds = [each.value["counts"] for each in ended], ended[0].value["seconds"]
        fraction = kill.at if is_first else kill.at / 2
        return replace(
            kill, at=fraction * seconds if kill.when == TIME else int(fraction * counts[kill.rank][kill.when])
        )

    def _start(self, found: Found, job: Job, folder: Path, kill: Kill | None) -> list[Ended]:
        """Start the ranks, be the scheduler that kills what has not ended in time, and watch the newest checkpoint."""
        world = World(jobs.train, job.ranks, TIMEOUT_S, job=job, folder=folder, kill=kill)
        newest, since, struck = -1, time.monotonic(), folder.with_suffix(".struck")
        struck_since: float | None = None
        while any(process.is_alive() for process in world.processes):
            seen = _newest(folder)
            if seen < newest:
                seen = _newest(folder)  # the one that was listed may have been replaced before it was looked at
            if seen < newest:
                found.problems.append(f"step {newest} was there, and then step {seen}")
            newest = max(newest, seen)
            now = time.monotonic()
            if struck_since is None and struck.exists():
                struck_since = now
            waits = struck_since is not None and kill is not None and kill.sent.startswith("SIGTERM")
            if waits and struck_since is not None and kill is not None and now - struck_since > kill.grace_s:
                for process in world.processes:
                    process.kill()
            if now - since > patient(DEADLINE_S):
                found.problems.append(f"{kill}: hangs")
                break
            time.sleep(0.02)
        if struck_since is not None:
            found.longest_s = max(found.longest_s, time.monotonic() - struck_since)
        ended = world.join()
        found.errors.update(each.error_type for each in ended if each.error_type)
        return ended


def wait_for(world: World) -> None:
    """For as long as a busy machine needs: ``join`` gives up earlier."""
    ends = time.monotonic() + patient(DEADLINE_S)
    while any(process.is_alive() for process in world.processes) and time.monotonic() < ends:
        time.sleep(0.02)


def _newest(folder: Path) -> int:
    """The step of the newest complete checkpoint; 0 if there is none."""
    names = example("lm_run.py")
    path = names["latest_checkpoint"](folder)
    return names["steps_done"](path) if path else 0


def _there(found: Found, job: Job, folder: Path) -> str:
    """What is there after a kill. What the job has reported as saved must be."""
    saved = folder.with_suffix(".saved")
    reported = max(map(int, saved.read_text().split())) if saved.exists() else 0
    if _newest(folder) < reported:
        found.problems.append(f"step {reported} was saved, and the newest is {_newest(folder)}")
    if jobs.unfinished(folder):
        return HALF
    return COMPLETE if _newest(folder) else NOTHING


def _check_loaded(found: Found, folder: Path, step: int) -> None:
    """On whichever ranks: what a job has loaded, and saved at once, is what was in the checkpoint of ``step``."""
    loaded = folder.with_name(folder.name + "_loaded")
    if (loaded / ".metadata").exists():
        kept = contents(folder.with_name(folder.name + "_before"))
        found.problems += [f"loaded step {step}: {each}" for each in differences(contents(loaded), kept)]
    for path in (loaded, folder.with_name(folder.name + "_before")):
        shutil.rmtree(path, ignore_errors=True)


def _check_checkpoints(found: Found, job: Job, folder: Path, reference: Path, is_exact: bool) -> None:
    """Each checkpoint that looks complete is, and has the values of the reference."""
    tolerance = 0.0 if is_exact else TOLERANCES[job.optimizer]
    names = example("lm_run.py")
    all_saved = names["checkpoints"](folder)
    for path in all_saved:
        expected = contents(reference / "checkpoints" / path.name)
        problems, found.difference = compare(contents(path), expected, tolerance)
        found.problems += [f"{path.name}: {each}" for each in problems]
    if len(all_saved) > job.keeps + 1:
        found.problems.append(f"{len(all_saved)} checkpoints are kept")
    if (weights := folder / "weights").exists() and is_exact:
        _check_weights(found, weights, reference)
    if all_saved:
        before = folder.with_name(folder.name + "_before")
        shutil.copytree(all_saved[-1], before)


def _check_weights(found: Found, weights: Path, reference: Path) -> None:
    """The exported weights are those of one step."""
    if not [path for path in weights.iterdir() if path.name in ("model.safetensors", "model.safetensors.index.json")]:
        return  # the first export has not ended
    model = jobs.whole_model()
    load_safetensors(model, weights)
    mine = {f"model.{name}": value for name, value in model.state_dict().items()}
    for step in range(jobs.SAVE_EVERY, STEPS + 1, jobs.SAVE_EVERY):
        expected = contents(reference / "checkpoints" / f"step_{step:08d}")
        if all(torch.equal(value, expected[name]) for name, value in mine.items()):
            return
    found.problems.append("the exported weights are not those of any step")


def _check_end(found: Found, folder: Path, reference: Path) -> None:
    """The job has run to its end: its last checkpoint is there, the older ones that it keeps, and nothing else."""
    job = found.trial.starts[-1]
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    if names[-1:] != [f"step_{STEPS:08d}"] or len(names) > job.keeps or jobs.unfinished(folder):
        found.problems.append(f"in the end, there are {names}")
    expected = {"checkpoints", "weights"} if job.save != EXAMPLE else FILES_OF_THE_EXAMPLE
    others = {path.name for path in folder.iterdir()} - expected
    if others:
        found.problems.append(f"left in the folder: {sorted(others)}")
    if job.save == EXAMPLE:
        records = [_records(each) for each in (folder, reference)]
        if records[0] != records[1]:
            found.problems.append(f"losses are {records[0]}, expected {records[1]}")
    elif job.exports:
        left = sorted(path.name for path in (folder / "weights").iterdir())
        index = folder / "weights" / "model.safetensors.index.json"
        named = set(index.read_text().split('"')) if index.exists() else set()
        left = [name for name in left if name not in named and name not in ("model.safetensors", index.name)]
        if left:
            found.problems.append(f"left beside the exported weights: {left}")


def _records(folder: Path) -> list[dict[str, Any]]:
    """The losses that the example has written, without what it measures."""
    lines = map(json.loads, (folder / "losses.jsonl").read_text().splitlines())
    return [{key: line[key] for key in line if key not in ("seconds", "peak_mib_per_rank")} for line in lines]


def contents(path: Path) -> dict[str, Any]:
    """All that a checkpoint holds, by its flat names."""
    described = FileSystemReader(path).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(each.size, dtype=each.properties.dtype) if isinstance(each, TensorStorageMetadata) else None
        for name, each in described.items()
    }
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Where they differ in any bit."""
    return compare(found, expected, 0.0)[0]


def compare(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> tuple[list[str], float]:
    """Where ``found`` differs from ``expected``, which may hold an average that no job asked for; and the largest
    difference of numbers, which may be ``tolerance``."""
    problems = [f"{name} is missing" for name in expected if name not in found and not name.startswith("average.")]
    problems += [f"{name} is not expected" for name in found if name not in expected]
    largest = 0.0
    for name, value in found.items():
        if name not in expected:
            continue
        other = expected[name]
        if not isinstance(value, torch.Tensor):
            if value != other:
                problems.append(f"{name} is {value}, expected {other}")
        elif not _same_bits(value, other):
            by = _distance(value, other)
            largest = max(largest, by)
            if by > tolerance or tolerance == 0:
                problems.append(f"{name} differs by {by:.3g}")
    return problems, largest


def _same_bits(value: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        value.shape == other.shape
        and value.dtype == other.dtype
        and torch.equal(value.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
    )


def _distance(value: torch.Tensor, other: torch.Tensor) -> float:
    if value.shape != other.shape or value.dtype != other.dtype:
        return float("inf")
    gap = (value.double() - other.double()).abs()
    return float(gap.nan_to_num(nan=0.0 if torch.equal(value.isnan(), other.isnan()) else torch.inf).max())


def run_trials(
    harness: Harness, num_kills: int, seed: int, runtime: str, at_once: int, minutes: float
) -> Iterator[Found]:
    """Trials until ``num_kills`` kills have struck, or time is over; a kill may come when the job has ended already."""
    numbers, num_struck, ends = itertools.count(), 0, time.monotonic() + 60 * minutes
    with ThreadPoolExecutor(at_once) as executor:
        running: set[Future[Found]] = set()
        while num_struck < num_kills and time.monotonic() < ends:
            while len(running) < at_once:
                running.add(executor.submit(harness.run, drawn(seed, next(numbers), runtime)))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for each in done:
                num_struck += len(each.result().was_killed)
                yield each.result()
        for each in running:
            yield each.result()


def table(all_found: Sequence[Found]) -> str:
    """Counts of kills by what was killed when, and what was there afterwards."""
    rows: dict[str, Counter[str]] = {}
    for found in all_found:
        first, last = found.trial.starts[0], found.trial.starts[-1]
        for (kill, there), job in zip(found.was_killed, found.trial.starts, strict=False):
            properties = [f"layout: {job.layout}", f"ranks: {job.ranks}", f"optimizer: {job.optimizer}"]
            properties += [f"save: {job.save}", f"sent: {kill.sent}", f"when: {kill.when}"]
            properties += ["resumed: on other ranks or another mesh" if found.is_moved else "resumed: on equal ranks"]
            properties += ["with: GradScaler"] * first.scaled + ["with: an average of the weights"] * first.averaged
            properties += ["with: exports"] * first.exports + ["with: SIGTERM saves"] * last.saves_on_sigterm
            for name in (*sorted(properties), "~all"):
                rows.setdefault(name, Counter()).update([there, "kills"])
    columns = ("kills", NOTHING, COMPLETE, HALF)
    lines = ["| | " + " | ".join(columns) + " |", "|---" + "|---:" * len(columns) + "|"]
    for name in sorted(rows):
        lines.append(f"| {name.strip('~')} | " + " | ".join(str(rows[name][column]) for column in columns) + " |")
    return "\n".join(lines)


def summary(all_found: Sequence[Found]) -> str:
    """What the table does not show."""
    same = [found for found in all_found if not found.is_moved]
    moved = [found for found in all_found if found.is_moved]
    by_optimizer: dict[str, float] = {}
    for found in moved:
        name = found.trial.starts[0].optimizer
        by_optimizer[name] = max(by_optimizer.get(name, 0.0), found.difference)
    errors = sum((found.errors for found in all_found), Counter[str]())
    equal = sum(found.difference == 0 and not found.problems for found in same)
    return "\n".join(
        [
            f"{sum(len(found.was_killed) for found in all_found)} kills of {len(all_found)} jobs",
            f"on equal ranks: {equal} of {len(same)} equal the reference bit for bit",
            f"on others: {len(moved)}; largest differences: "
            + (", ".join(f"{by:.1e} ({name})" for name, by in sorted(by_optimizer.items())) or "none"),
            f"ranks that were not killed raised {dict(errors)}; all ranks had ended after "
            f"{max((found.longest_s for found in all_found), default=0.0):.1f} s",
            f"{sum(bool(found.problems) for found in all_found)} jobs with problems",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no trial after that")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runtime", choices=("fsdp2", "torch"), default="fsdp2")
    parser.add_argument("--at-once", type=int, default=2, help="jobs that run side by side")
    parser.add_argument("--only", type=int, help="the number of one trial")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=READS_ALONE)
    root = Path(tempfile.mkdtemp(prefix="fsdp2-resume-"))
    harness = Harness(root)
    if options.only is not None:
        trials: Iterator[Found] = iter([harness.run(drawn(options.seed, options.only, options.runtime))])
    else:
        limits = (options.at_once, options.minutes)
        trials = run_trials(harness, options.kills, options.seed, options.runtime, *limits)
    all_found = []
    for found in trials:
        all_found.append(found)
        for problem in found.problems:
            print(f"trial {found.trial.number}: {problem}\n    {found.trial}\n    {found.was_killed}", flush=True)
        print(f"{sum(len(each.was_killed) for each in all_found)} kills", end="\r", file=sys.stderr, flush=True)
    print(table(all_found))
    print(summary(all_found))
    if any(found.problems for found in all_found):
        sys.exit(f"The folders of trials with problems are in {root}.")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
