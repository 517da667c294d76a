"""Replica groups that are killed and come back: torchft's HSDP, LocalSGD and DiLoCo on sharded models.

    python -m tests.faults.replicas --kills 50                            # three groups of two ranks, a table of kills
    python -m tests.faults.replicas --kills 50 --runtime torch            # the same under torch's fully_shard
    python -m tests.faults.replicas --kills 50 --quorum async             # torchft's default: recovery beside training
    python -m tests.faults.replicas --kills 50 --way mesh                 # torchft's group as an axis of the mesh
    python -m tests.faults.replicas --kills 50 --unguarded                # what torchft alone does
    python -m tests.faults.replicas --race                                # a state dict in the middle of a forward
    python -m tests.faults.replicas --way diloco --kills 10
    python -m tests.faults.replicas --way diloco --compare 6              # torch's runtime, ours, and no shards

Each kill has a phase. Every rank writes down the hash of its state before each step; afterwards, the hashes of all
groups are compared, and a model that is not sharded repeats the run with the same batches on the same groups.
Needs torchft 0.2.0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.faults.replica import PHASES, RANKS_PER_GROUP, Job, batch, built, loss_of, optimizer_of, race, run

NUM_GROUPS = 3
LOCAL_WAYS = ("local_sgd", "diloco")
PATIENCE_S = 300.0
MOST_DIFFERENCE = 1e-9  # float64, to rounding: a lost or doubled gradient changes losses by 1e-3 and more

Line = dict[str, Any]


class Logs:
    """What the ranks have written so far, by group and rank."""

    def __init__(self, folder: Path, group_size: int) -> None:
        self._files = {(g, r): folder / "logs" / f"{g}_{r}.jsonl" for g in range(NUM_GROUPS) for r in range(group_size)}
        self._offsets = dict.fromkeys(self._files, 0)
        self.lines: dict[tuple[int, int], list[Line]] = {key: [] for key in self._files}

    def read(self) -> None:
        for key, file in self._files.items():
            if file.exists():
                with file.open("rb") as opened:
                    opened.seek(self._offsets[key])
                    *whole, _ = opened.read().split(b"\n")
                self._offsets[key] += sum(len(line) + 1 for line in whole)
                self.lines[key] += map(json.loads, whole)

    def last(self, group: int, kind: str, since: float) -> Line | None:
        """The first line of rank 0 of ``group`` of a kind, written after ``since``."""
        return next((x for x in self.lines[group, 0] if x["kind"] == kind and x["time"] > since), None)

    def wait_for(self, what: str, found: Callable[[], Any]) -> Any:
        """What ``found`` returns, once that is not None."""
        until = time.time() + PATIENCE_S
        while time.time() < until:
            self.read()
            if (result := found()) is not None:
                return result
            time.sleep(0.02)
        raise TimeoutError(f"{what}: not within {PATIENCE_S:.0f} s")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Group(threading.Thread):
    """Starts the ranks of one group, and all of them again when one has died, as ``torchrun`` does."""

    def __init__(self, context: Any, job: Job, number: int) -> None:
        super().__init__(daemon=True)
        self._context, self._job, self._number = context, job, number
        self.may_restart = threading.Event()
        self.may_restart.set()
        self.ends: list[tuple[float, list[int | None]]] = []
        self.ranks: list[Any] = []
        self.is_over = False

    def run(self) -> None:
        while not self.is_over:
            self.may_restart.wait()
            port = free_port()
            ranks = [
                self._context.Process(target=run, args=(self._job, self._number, rank, port))
                for rank in range(self._job.group_size)
            ]
            for each in ranks:
                each.start()
            self.ranks = ranks
            multiprocessing.connection.wait([each.sentinel for each in ranks])
            for each in ranks:  # the others end by themselves, because their messages fail
                each.join(3.0)
                if each.is_alive():
                    each.kill()
                each.join()
            codes = [each.exitcode for each in ranks]
            self.ends.append((time.time(), codes))
            self.is_over |= not any(codes)


@dataclass
class Kill:
    """One kill, and what followed."""

    number: int
    phase: str
    group: int
    rank: int
    time: float = 0.0
    at_step: int = -1
    others_after_s: float = math.nan
    back_after_s: float = math.nan
    followed: str = ""
    equal: str = "?"


@dataclass
class Campaign:
    job: Job
    groups: list[Group]
    logs: Logs
    random: random.Random
    kills: list[Kill] = field(default_factory=list)
    problem: str = ""

    def end_at(self, step: int) -> None:
        """Let all groups end at ``step``, and wait until they have."""
        at = self.job.folder / "stop"
        at.with_suffix(".new").write_text(str(step))
        os.replace(at.with_suffix(".new"), at)
        for group in self.groups:
            group.join(PATIENCE_S)
        self.logs.read()

    def order(self, kill: Kill, targets: list[tuple[int, int]]) -> None:
        hits = {"forward": 3, "backward": 3, "reduction": 12, "optimizer": 2, "send": 2, "receive": 2}
        skip = self.random.randrange(hits.get(kill.phase, 1))
        for group, rank in targets:
            at = self.job.folder / "orders" / f"{group}_{rank}.json"
            at.with_suffix(".new").write_text(json.dumps({"number": kill.number, "phase": kill.phase, "skip": skip}))
            os.replace(at.with_suffix(".new"), at)

    def wait_for_kill(self, kill: Kill) -> None:
        def killed() -> tuple[tuple[int, int], Line] | None:
            for where, lines in self.logs.lines.items():
                for line in reversed(lines):
                    if line["kind"] == "killed" and line["number"] == kill.number:
                        return where, line
            return None

        (kill.group, kill.rank), line = self.logs.wait_for(f"kill {kill.number} in {kill.phase}", killed)
        kill.time = line["time"]
        for left in (self.job.folder / "orders").glob("*.json"):
            left.unlink(missing_ok=True)
        steps = [x["step"] for x in self.logs.lines[kill.group, kill.rank] if "step" in x]
        kill.at_step = steps[-1] if steps else -1
        self.kills.append(kill)

    def one(self, number: int) -> None:
        """The next kill, or two where the second one meets a recovery."""
        phase = self.random.choice(PHASES)
        victim, rank = self.random.randrange(NUM_GROUPS), self.random.randrange(self.job.group_size)
        first = Kill(number, phase, victim, rank)
        if phase not in ("send", "receive"):
            self.order(first, [(victim, rank)])
            self.wait_for_kill(first)
            self.follow([first])
            return
        first.phase = self.random.choice(PHASES[:5])
        self.groups[victim].may_restart.clear()
        self.order(first, [(victim, rank)])
        self.wait_for_kill(first)
        second = Kill(number + 1, phase, -1, -1)
        meets = [g for g in range(NUM_GROUPS) if (g == victim) is (phase == "receive")]
        self.order(second, [(group, rank) for group in meets])
        self.groups[victim].may_restart.set()
        self.wait_for_kill(second)
        self.follow([first, second])

    def follow(self, kills: list[Kill]) -> None:
        """Wait until all groups train together again."""
        down = {kill.group for kill in kills}
        for kill in kills:
            others = [g for g in range(NUM_GROUPS) if g not in down]
            found = [self.wait_commit(g, kill.time, starts_after=True) for g in others]
            kill.others_after_s = max(found) - kill.time
        last = kills[-1].time
        backs = {g: self.wait_together(g, last, max(k.time for k in kills if k.group == g)) for g in down}
        for kill in kills:
            kill.back_after_s = backs[kill.group] - kill.time

    def wait_commit(self, group: int, since: float, *, starts_after: bool) -> float:
        begun = self.logs.wait_for("a step", lambda: self.logs.last(group, "step", since)) if starts_after else None
        since = begun["time"] if begun else since
        return float(self.logs.wait_for("a commit", lambda: self.logs.last(group, "commit", since))["time"])

    def wait_together(self, group: int, since: float, killed: float) -> float:
        """When ``group``, started again after it was ``killed``, has committed a step of all groups."""

        def found() -> float | None:
            lines = self.logs.lines[group, 0]
            start = max((i for i, x in enumerate(lines) if x["kind"] == "start"), default=0)
            for line in lines[start:]:
                is_full = line["kind"] == "commit" and line["participants"] == NUM_GROUPS
                if is_full and line["time"] > since and lines[start]["time"] > killed:
                    return float(line["time"])
            return None

        return float(self.logs.wait_for(f"group {group} is back", found))


def restarts_by_themselves(campaign: Campaign) -> list[str]:
    """Errors of ranks that no order had killed, nor a rank of their group."""
    found = []
    for group in range(NUM_GROUPS):
        ordered = [kill.time for kill in campaign.kills if kill.group == group]
        for rank in range(campaign.job.group_size):
            for line in campaign.logs.lines[group, rank]:
                is_far = not any(-0.1 < line["time"] - t < 25 for t in ordered)
                if line["kind"] == "raised" and "of this group are at steps" not in line["error"] and is_far:
                    found.append(f"group {group} rank {rank}: {line['error'][:160]}")
    return found


# What is right


class Attempt(NamedTuple):
    """One try of a group at a step, in which it contributed its gradients."""

    step: int
    quorum: int
    begun: Line
    reducing: Line
    ended: Line  # a commit or a drop, or else the last line before the group died


def attempts(lines: list[Line]) -> Iterator[Attempt]:
    """The attempts of one rank. A state that arrived in between is that of the quorum, not of the line before."""
    for i, reducing in enumerate(lines):
        if reducing["kind"] != "reducing" or not reducing["takes_part"]:
            continue
        begun = next((x for x in reversed(lines[:i]) if x["kind"] in ("step", "loaded", "start")), None)
        if begun is not None and begun["kind"] == "step" and begun["step"] == reducing["step"]:
            ended = next((x for x in lines[i:] if x["kind"] not in ("reducing", "loaded")), reducing)
            yield Attempt(reducing["step"], reducing["quorum"], begun, reducing, ended)


def states(campaign: Campaign, rank: int) -> dict[tuple[int, int], dict[int, Line]]:
    """For each step and quorum, the lines with which groups began it."""
    found: dict[tuple[int, int], dict[int, Line]] = defaultdict(dict)
    for (group, its), lines in campaign.logs.lines.items():
        for each in attempts(lines) if its == rank else ():
            found[each.step, each.quorum][group] = each.begun
    return found


def is_equal(lines: Iterable[Line]) -> bool:
    return len({(line["state"], line["rng"]) for line in lines}) == 1


def compare_states(campaign: Campaign) -> tuple[int, int, list[str]]:
    """How many steps of ranks were compared between groups, how many of them between all groups, and what differed."""
    begun = [(rank, *each) for rank in range(campaign.job.group_size) for each in states(campaign, rank).items()]
    differing = [f"rank {rank}, step and quorum {at}: {by}" for rank, at, by in begun if not is_equal(by.values())]
    sizes = [len(by) for _, _, by in begun]
    return sum(size > 1 for size in sizes), sum(size == NUM_GROUPS for size in sizes), differing


def equal_after(campaign: Campaign, kill: Kill) -> str:
    """Whether all groups began the next step that all of them began after ``kill`` in the same state."""
    since = kill.time + kill.back_after_s
    found = []
    for rank in range(campaign.job.group_size):
        for _, by in sorted(states(campaign, rank).items(), key=lambda each: min(x["time"] for x in each[1].values())):
            if len(by) == NUM_GROUPS and min(line["time"] for line in by.values()) > since:
                found.append("yes" if is_equal(by.values()) else "NO")
                break
    return "NO" if "NO" in found else "yes" if len(found) == campaign.job.group_size else "not compared"


def what_followed(campaign: Campaign, kill: Kill) -> str:
    """What the other groups did in the steps after ``kill``: steps that were dropped, and those that went on."""
    drops = Counter(
        group
        for (group, rank), lines in campaign.logs.lines.items()
        for line in lines
        if rank == 0 and line["kind"] == "drop" and kill.time <= line["time"] <= kill.time + kill.back_after_s
    )
    mates = [
        line["error"].split(":")[0]
        for (group, rank), lines in campaign.logs.lines.items()
        for line in lines
        if group == kill.group and rank != kill.rank and line["kind"] == "raised" and 0 <= line["time"] - kill.time < 20
    ]
    dropped = f"dropped steps {dict(sorted(drops.items()))}" if drops else "no step dropped"
    return f"{dropped}; its mate: {mates[0] if mates else 'ended'}"


def committed(campaign: Campaign) -> list[Attempt]:
    """The steps that lead to the end, in order. A group may also commit steps that nobody goes on from: it dies, or it
    has begun anew without the others, and then gets the state of those that are further."""
    by_result: dict[str, Attempt] = {}
    last: Attempt | None = None
    for (_, rank), lines in campaign.logs.lines.items():
        for each in attempts(lines) if rank == 0 else ():
            if each.ended["kind"] != "commit":
                continue
            if last is None or each.step > last.step:
                last = each
            following = lines[lines.index(each.ended) + 1 :]
            after = next((x for x in following if x["kind"] in ("step", "loaded", "start")), None)
            if after is not None and after["kind"] == "step":
                by_result[after["state"]] = each
    found = []
    while last is not None:
        found.append(last)
        last = by_result.get(last.begun["state"])
    return found[::-1]


def repeat(campaign: Campaign) -> tuple[int, int, float]:
    """Repeat the committed steps on a model that is not sharded. Returns how many steps and losses were compared, and
    the largest difference of a loss, or of parameters at the end, relative to them."""
    job = campaign.job
    losses: dict[tuple[int, int], dict[tuple[int, int], float]] = defaultdict(dict)
    for where, lines in campaign.logs.lines.items():
        for each in attempts(lines):
            losses[each.step, each.quorum][where] = each.reducing["loss"]
    model = built(job.seed)
    optimizer, scheduler = optimizer_of(model)
    steps, count, worst = committed(campaign), 0, 0.0
    for number, attempt in enumerate(steps):
        assert attempt.step == number, f"step {attempt.step} is number {number}: no step before it was found"
        found = losses[attempt.step, attempt.quorum]
        groups = sorted({group for group, _ in found})
        assert len(groups) == attempt.ended["participants"], f"{groups} have reduced, expected {attempt.ended}"
        optimizer.zero_grad()
        for group, rank in itertools.product(groups, range(job.group_size)):
            torch.set_rng_state(torch.load(job.folder / "rng" / attempt.begun["rng"]))
            loss = loss_of(model, batch(job.seed, group, rank, number))
            (loss / (len(groups) * job.group_size)).backward()
            if (group, rank) in found:
                worst, count = max(worst, abs(loss.item() - found[group, rank]) / loss.item()), count + 1
        optimizer.step()
        scheduler.step()
    end = torch.load(next(job.folder.glob("end_*.pt")))
    for name, value in model.state_dict().items():
        worst = max(worst, ((value - end[name]).abs().max() / value.abs().max()).item())
    return len(steps), count, worst


def print_table(kills: list[Kill]) -> None:
    print("| kill | phase | group, rank | step | others went on after | back after | equal | what followed |")
    print("|---:|---|---|---:|---:|---:|---|---|")
    for kill in kills:
        seconds = f"{kill.others_after_s:.1f} s | {kill.back_after_s:.1f} s"
        where = f"{kill.phase} | {kill.group}, {kill.rank} | {kill.at_step}"
        print(f"| {kill.number} | {where} | {seconds} | {kill.equal} | {kill.followed} |")


def median_and_most(kills: list[Kill], name: str) -> str:
    found = sorted(getattr(kill, name) for kill in kills)
    return f"{found[len(found) // 2]:.1f} and {found[-1]:.1f}" if found else "-"


def summary(campaign: Campaign) -> dict[str, object]:
    """What was counted, and whether it "holds": all that was compared is equal."""
    kills = campaign.kills
    compared, of_all, differing = compare_states(campaign)
    lines = [line for each in campaign.logs.lines.values() for line in each]
    kinds = Counter(line["kind"] for line in lines)
    by_themselves = [line["error"] for line in lines if "of this group are at steps" in line.get("error", "")]
    found: dict[str, object] = {
        "kills": len(kills),
        "stopped early": campaign.problem or "no",
        "by phase": dict(Counter(kill.phase for kill in kills)),
        "equal after": dict(Counter(kill.equal for kill in kills)),
        "others went on after, median and most in s": median_and_most(kills, "others_after_s"),
        "back after, median and most in s": median_and_most(kills, "back_after_s"),
        "steps of ranks: committed, dropped, states loaded": (kinds["commit"], kinds["drop"], kinds["loaded"]),
        "ranks that ended because their group had recovered in part": len(by_themselves),
        "other errors far from a kill": restarts_by_themselves(campaign),
        "steps of ranks compared between groups, between all, differing": (compared, of_all, len(differing)),
    }
    holds = not differing and not campaign.problem and all(kill.equal == "yes" for kill in kills)
    if campaign.job.way not in LOCAL_WAYS:
        try:
            found["repeated without shards: steps, losses, largest difference"] = steps, losses, worst = repeat(
                campaign
            )
            holds &= worst <= MOST_DIFFERENCE and losses > steps > 0
        except AssertionError as error:
            found["repeated without shards"], holds = str(error)[:300], False
    found["holds"] = holds
    for line in differing[:3]:
        print(line[:400])
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runtime", choices=("fsdp2", "torch"), default="fsdp2")
    parser.add_argument("--way", choices=("hook", "mesh", "local_sgd", "diloco"), default="hook")
    parser.add_argument("--quorum", choices=("sync", "async"), default="sync")
    parser.add_argument("--minutes", type=float, default=60.0, help="no kill after so many")
    parser.add_argument("--unguarded", action="store_true", help="ranks do not compare their steps")
    parser.add_argument("--race", action="store_true", help="a thread makes a state dict in the middle of a forward")
    parser.add_argument("--compare", type=int, metavar="STEPS", help="kill nobody, and compare runtimes after STEPS")
    args = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.time()
    if args.race:
        show_race()
    elif args.compare:
        compare_runtimes(args.way, args.quorum, args.seed, args.compare)
    else:
        found = killed(
            args.runtime, args.way, args.quorum, args.seed, args.kills, guarded=not args.unguarded, minutes=args.minutes
        )
        print_table(found.kills)
        for name, value in summary(found).items():
            print(f"{name}: {value}")
    print(f"seconds: {time.time() - begin:.0f}")


def show_race() -> None:
    """Print what a step becomes, with each runtime, when another thread makes a state dict in its forward."""
    context = multiprocessing.get_context("spawn")
    for runtime in ("torch", "fsdp2"):
        results, port = context.SimpleQueue(), free_port()
        ranks = [context.Process(target=race, args=(rank, runtime, port, results)) for rank in range(RANKS_PER_GROUP)]
        for each in ranks:
            each.start()
        for _ in ranks:
            print(f"{runtime}, {results.get()}")
        for each in ranks:
            each.join()


def compare_runtimes(way: str, quorum: str, seed: int, steps: int) -> None:
    """Print how far models differ after ``steps`` that all groups have committed together."""
    runtimes = ("torch", "fsdp2", *(("plain",) if way in LOCAL_WAYS else ()))
    ends = {}
    for runtime in runtimes:
        with started(runtime, way, quorum, seed, min_replicas=NUM_GROUPS) as campaign:
            campaign.end_at(steps)
        found = [torch.load(file) for file in sorted(campaign.job.folder.glob("end_*.pt"))]
        assert len(found) == NUM_GROUPS * campaign.job.group_size, f"{runtime}: only {len(found)} ranks have ended"
        equal = all(torch.equal(value, other[name]) for name, value in found[0].items() for other in found)
        print(f"{way}, {runtime}: {len(found)} ranks after {steps} steps, equal: {equal}")
        ends[runtime] = found[0]
    for runtime in runtimes[1:]:
        pairs = [(value, ends[runtime][name]) for name, value in ends["torch"].items()]
        worst = max(((mine - theirs).abs().max() / theirs.abs().max()).item() for theirs, mine in pairs)
        print(f"{way}, {runtime} and torch: largest relative difference {worst:.1e}")


def killed(
    runtime: str, way: str, quorum: str, seed: int, num_kills: int, *, guarded: bool = True, minutes: float = 60.0
) -> Campaign:
    """A campaign after ``num_kills``, or one more, and what followed; fewer kills if there are not enough minutes."""
    until = time.time() + 60 * minutes
    with started(runtime, way, quorum, seed, guarded=guarded) as campaign:
        try:
            for group in range(NUM_GROUPS):
                campaign.wait_together(group, 0.0, 0.0)
            while len(campaign.kills) < num_kills and time.time() < until:
                campaign.one(len(campaign.kills))
                print(campaign.kills[-1], file=sys.stderr)
        except TimeoutError as error:
            campaign.problem = str(error)
        campaign.end_at(5 + max(x["step"] for lines in campaign.logs.lines.values() for x in lines if "step" in x))
    for kill in campaign.kills:
        kill.followed, kill.equal = what_followed(campaign, kill), equal_after(campaign, kill)
    return campaign


@contextmanager
def started(
    runtime: str, way: str, quorum: str, seed: int, *, min_replicas: int = 1, guarded: bool = True
) -> Iterator[Campaign]:
    """In the block, the groups train."""
    from torchft.coordination import LighthouseServer

    folder = Path(tempfile.mkdtemp(prefix="fsdp2_replicas_"))
    print(folder, file=sys.stderr)
    for name in ("logs", "orders", "taken", "rng"):
        (folder / name).mkdir()
    times = {"join_timeout_ms": 1000, "quorum_tick_ms": 50, "heartbeat_timeout_ms": 2000}
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=min_replicas, **times)
    address = f"http://localhost:{lighthouse.address().rsplit(':', 1)[1]}"
    waits, size = quorum == "sync" or way in LOCAL_WAYS, 1 if runtime == "plain" else RANKS_PER_GROUP
    job = Job(folder, address, runtime, way, waits, guarded, seed, size)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchft", "torchft.local_sgd", "fsdp2", "tests.faults.replica"])
    campaign = Campaign(
        job, [Group(context, job, n) for n in range(NUM_GROUPS)], Logs(folder, size), random.Random(seed)
    )
    for group in campaign.groups:
        group.start()
    try:
        yield campaign
    finally:
        for group in campaign.groups:
            group.is_over = True
            for each in group.ranks:
                each.kill()
        lighthouse.shutdown()


if __name__ == "__main__":
    main()
