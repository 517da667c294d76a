"""A training job as data, and what one of its ranks does: train, save, and be killed at a moment that was chosen.

Saves in the foreground are those of ``docs/examples``: so are the names that tell complete checkpoints from unfinished
ones, and the average of the weights. Rule: what a step computes follows from the job and from what a checkpoint holds,
never from when or how often the job was killed; on other ranks, only rounding differs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fsdp2
from fsdp2.checkpoint import AsyncSave, async_save, save_safetensors
from tests.distributed.support import InjectedError
from tests.docs.launch import ROOT
from tests.harness.pool import PRELOADED
from tests.harness.worker import EXPECTED_WARNINGS, RankContext

EXAMPLES = ROOT / "docs" / "examples"
SIZES = {"dim": 16, "num_layers": 2, "num_heads": 2, "hidden_dim": 24}
STEPS = 8
SAVE_EVERY = 2
WINDOWS = 12  # of a step, of all ranks together: 1, 2, 3 and 4 ranks divide it
LENGTH = 8
STEPS_PER_EPOCH = 5
INFINITE_LOSSES = (2, 5)  # the steps at which GradScaler finds gradients that are not finite, and skips the update
EVERY_STEP, FOREGROUND, BACKGROUND, OVERLAPPING = "every step", "foreground", "background", "overlapping"
EXAMPLE = "train_lm.py"  # the example runs as it is
ERROR = "an error in one"  # instead of a signal
FILE_OPERATION, FORWARD, BACKWARD, OPTIMIZER, TIME = "file operation", "forward", "backward", "optimizer", "time"
_FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "shutil.rmtree")
_RELATIVE_NAMES = (".safetensors", "fsdp2_save")  # save_safetensors opens its folder, and looks names up in it


def start_server() -> None:
    """Let the process whose forks are the ranks import this module once: a rank then takes half of the time."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED, __name__])
    forkserver.ensure_running()


@functools.cache
def example(name: str) -> dict[str, Any]:
    """The names of a script in ``docs/examples``."""
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        return runpy.run_path(str(EXAMPLES / name))


@dataclass(frozen=True)
class Job:
    """What is trained on which ranks, and how it is saved."""

    ranks: int = 2
    layout: str = "FSDP"  # or "HSDP"
    optimizer: str = "AdamW"
    scaled: bool = False  # GradScaler
    averaged: bool = False  # an average of the weights
    save: str = FOREGROUND
    exports: bool = False  # save_safetensors, too, in place
    keeps: int = 1  # checkpoints; the example keeps one
    saves_on_sigterm: bool = False
    own_noise: bool = True  # each rank draws from its own generator, so that the number of ranks matters
    runtime: str = "fsdp2"
    forgets: str = ""  # what it does not load, so that tests see that this is noticed

    @property
    def reference(self) -> Job:
        """The job that is trained without a kill: it saves after each step, and keeps all. A flat optimizer and AdamW
        are to give the same bits."""
        name = "AdamW" if self.optimizer == "flat" else self.optimizer
        is_example = self.save == EXAMPLE
        averaged = self.runtime == "fsdp2" and not is_example
        save = EXAMPLE if is_example else EVERY_STEP
        return replace(Job(self.ranks, self.layout, name, self.scaled, averaged, save), keeps=STEPS, **self._noise)

    @property
    def _noise(self) -> dict[str, Any]:
        return {"own_noise": self.own_noise, "runtime": self.runtime}


@dataclass(frozen=True)
class Kill:
    """Who is sent what when. ``at``: seconds from the beginning of training, or the number of an event on ``rank``."""

    sent: str  # to whom
    rank: int
    when: str
    at: float
    grace_s: float = 0.0  # from SIGTERM to SIGKILL


@dataclass
class Striker:
    """Counts the events of a rank, and kills at the one that was chosen."""

    kill: Kill | None
    rank: int
    pids: list[int]
    folder: Path
    counts: Counter[str] = field(default_factory=Counter)

    def start(self) -> None:
        def see(event: str, arguments: tuple[object, ...]) -> None:
            if event in _FILE_EVENTS:
                name = str(arguments[0])
                if str(self.folder) in name or any(part in name for part in _RELATIVE_NAMES):
                    self.note(FILE_OPERATION)

        sys.addaudithook(see)
        if self.kill is not None and self.kill.when == TIME and self.rank == self.kill.rank:
            timer = threading.Timer(self.kill.at, self.strike)
            timer.daemon = True
            timer.start()

    def note(self, event: str, *_: object) -> None:
        self.counts[event] += 1
        kill = self.kill
        if kill is not None and (kill.when, kill.rank) == (event, self.rank) and self.counts[event] == kill.at + 1:
            self.strike()

    def watch(self, model: Any, optimizer: optim.Optimizer) -> None:
        def see_backward(module: nn.Module, arguments: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda _: self.note(BACKWARD))

        for module in (model, *model.blocks):
            module.register_forward_pre_hook(lambda *_: self.note(FORWARD))
            module.register_forward_hook(see_backward)
        optimizer.register_step_pre_hook(lambda *_: self.note(OPTIMIZER))
        optimizer.register_step_post_hook(lambda *_: self.note(OPTIMIZER))

    def strike(self) -> None:
        assert self.kill is not None
        self.folder.with_suffix(".struck").touch()
        if self.kill.sent == ERROR:
            raise InjectedError
        number = getattr(signal, self.kill.sent.split()[0])
        if self.kill.sent.endswith("all"):
            for pid in self.pids:
                if pid != os.getpid():
                    os.kill(pid, number)
        os.kill(os.getpid(), number)


class Data:
    """Batches in an order that is drawn anew for each epoch. The position is state."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self._windows = torch.randint(256, (WINDOWS * STEPS_PER_EPOCH, LENGTH + 1), generator=generator)
        self.epoch = self.position = 0

    def next(self) -> Tensor:
        """The windows of all ranks for one step, ``[WINDOWS, LENGTH + 1]``."""
        order = torch.randperm(len(self._windows), generator=torch.Generator().manual_seed(self.epoch))
        found = self._windows[order[self.position : self.position + WINDOWS]]
        self.position += WINDOWS
        if self.position == len(self._windows):
            self.epoch, self.position = self.epoch + 1, 0
        return found

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


def whole_model() -> Any:
    """The example's model before it is sharded, with the same weights each time."""
    names = example("lm_task.py")
    torch.manual_seed(0)
    return names["Transformer"](names["ModelConfig"](**SIZES, sequence_length=LENGTH, tie_embedding=True))


def _adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def _muon(model: nn.Module) -> optim.Optimizer:
    return fsdp2.optim.Muon(fsdp2.optim.muon_groups(model), lr=1e-2)


OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "AdamW": _adamw,
    "Muon": _muon,
    "HostAdamW": lambda model: fsdp2.optim.HostAdamW(model.parameters(), lr=1e-2, weight_decay=0.1, max_norm=1.0),
    "flat": lambda model: fsdp2.optim.flatten_optimizer(_adamw(model)),
    "AdamW8bit": lambda model: fsdp2.optim.AdamW8bit(model.parameters(), lr=1e-2, weight_decay=0.1, block_size=16),
}


class Run:
    """One rank of a job, from its start or from a checkpoint."""

    def __init__(self, ctx: RankContext, mesh: DeviceMesh, job: Job, folder: Path) -> None:
        self.job, self.folder, self.rank, self.num_ranks = job, folder, ctx.rank, ctx.world_size
        self.model = whole_model()
        if job.layout == "HSDP":
            replicas = ctx.world_size if ctx.world_size % 2 else 2
            mesh = ctx.mesh_2d(replicas, ctx.world_size // replicas)
        fully_shard: Any = fsdp2.fully_shard if job.runtime == "fsdp2" else torch_fully_shard
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = OPTIMIZERS[job.optimizer](self.model)
        parts = [optim.lr_scheduler.LinearLR(self.optimizer, 0.5, total_iters=2)]
        parts += [optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)]  # type: ignore[list-item]
        self.scheduler = optim.lr_scheduler.SequentialLR(self.optimizer, parts, [2])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=job.scaled)
        self.average = example("ema.py")["ShardedEMA"](self.model, 0.9) if job.averaged else None
        self.data = Data()
        self.losses = torch.full((STEPS,), torch.nan, dtype=torch.float64)
        self.done = 0
        self.must_end = False
        self._pending: AsyncSave | Any = None  # a save in the background, and its path
        self._pending_path = folder
        source = ctx.rank if job.own_noise else 0
        self._noise = f"noise_{source}"
        torch.manual_seed(1 + source)

    # A step

    def step(self) -> None:
        inputs, targets = self._batch()
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        self._record(loss)
        is_infinite = self.job.scaled and self.done in INFINITE_LOSSES and self.rank == 0
        self.scaler.scale(loss * torch.inf if is_infinite else loss).backward()
        if self.job.optimizer != "HostAdamW":  # clips by itself
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        if self.average is not None:
            self.average.update(self.model)
        self.done += 1

    def _batch(self) -> tuple[Tensor, Tensor]:
        windows = self.data.next()
        noise = torch.rand(WINDOWS, LENGTH)
        mine = slice(self.rank * WINDOWS // self.num_ranks, (self.rank + 1) * WINDOWS // self.num_ranks)
        inputs = torch.where(noise < 0.1, 0, windows[:, :-1])
        return inputs[mine], windows[mine, 1:]

    def _record(self, loss: Tensor) -> None:
        """The mean loss; and whether some rank has been told to end."""
        shared = torch.tensor([loss.item() / self.num_ranks, float(self.must_end)], dtype=torch.float64)
        dist.all_reduce(shared)
        self.losses[self.done] = shared[0]
        self.must_end = bool(shared[1])

    # Checkpoints

    def _state(self, step: int) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, **self._rest(step)}

    def _rest(self, step: int) -> dict[str, Any]:
        state: dict[str, Any] = {"step": step, "losses": self.losses, self._noise: torch.get_rng_state()}
        state |= {"scheduler": self.scheduler.state_dict(), "data": self.data.state_dict()}
        if self.job.scaled:
            state["scaler"] = self.scaler.state_dict()
        if self.average is not None:
            state["average"] = get_model_state_dict(self.average.model)
        return state

    def load(self, path: Path) -> None:
        """The optimizer comes last: torch steps a new one once to make its states, which must change nothing else."""
        rest = self._rest(0)
        dcp.load(rest, checkpoint_id=path)
        self.done, self.losses = rest["step"], rest["losses"]
        loads: dict[str, Callable[[Any], object]] = {"scheduler": self.scheduler.load_state_dict}
        loads |= {"data": self.data.load_state_dict, "scaler": self.scaler.load_state_dict}
        loads[self._noise] = torch.set_rng_state
        if self.average is not None:
            loads["average"] = self.average.model.load_state_dict
        for name in rest.keys() & loads.keys() - {self.job.forgets}:
            loads[name](rest[name])
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def save_where_due(self) -> None:
        """After a step. A rank that was told to end saves now, wherever it is."""
        kind, is_due = self.job.save, self.done % SAVE_EVERY == 0
        if kind == EVERY_STEP:
            dcp.save(self._state(self.done), checkpoint_id=self._path())
        elif self.must_end or (is_due and kind == FOREGROUND):
            self.settle()
            if not self._path().exists():
                self._save_as_the_example()
        elif is_due:
            self.settle()
            if not self._path().exists():  # or only the export has failed, and is made again
                self._start_background()
        elif kind == OVERLAPPING and self.done > SAVE_EVERY:  # while the other one may still be written
            self._save_as_the_example()
        if is_due and self.job.exports:
            save_safetensors(self.model, self.folder / "weights", max_shard_size=4096)
        if self.must_end or self.done == STEPS:
            self.settle()

    def _save_as_the_example(self) -> None:
        example("train_lm.py")["Trainer"].save(self, self.folder, self.done)
        self._note_saved(self.done)

    def _path(self) -> Path:
        return cast(Path, example("lm_run.py")["checkpoint_path"](self.folder, self.done))

    def _start_background(self) -> None:
        self._pending_path = self._path()
        if self.job.runtime == "fsdp2":
            self._pending = async_save(self._state(self.done), self._pending_path)
            return
        unfinished = example("lm_run.py")["unfinished_path"](self._pending_path)
        state = copy.deepcopy(self._state(self.done))
        self._pending = dcp.async_save(state, checkpoint_id=unfinished, process_group=_gloo())

    def settle(self) -> None:
        """Wait for the save in the background, and drop the older checkpoints."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.result()
        names = example("lm_run.py")
        if self.rank > 0:
            return
        if self.job.runtime == "torch":
            os.rename(names["unfinished_path"](self._pending_path), self._pending_path)
        self._note_saved(names["steps_done"](self._pending_path))
        drop_older(self.folder, self.job.keeps)

    def _note_saved(self, step: int) -> None:
        if self.rank == 0:
            with self.folder.with_suffix(".saved").open("a") as file:
                file.write(f"{step}\n")


@functools.cache
def _gloo() -> dist.ProcessGroup:
    return dist.new_group(backend="gloo")


def unfinished(folder: Path) -> list[Path]:
    """What killed ranks have left of checkpoints, in the foreground and in the background."""
    return [*example("lm_run.py")["unfinished_checkpoints"](folder), *folder.glob("checkpoints/.unfinished_*")]


def drop_older(folder: Path, keeps: int) -> None:
    """Drop the oldest checkpoints. Each gets the name of an unfinished one first, since it is incomplete soon."""
    names = example("lm_run.py")
    for older in names["checkpoints"](folder)[:-keeps]:
        shutil.rmtree(older.rename(names["unfinished_path"](older)))


def train(ctx: RankContext, mesh: DeviceMesh, job: Job, folder: Path, kill: Kill | None = None) -> dict[str, Any]:
    """From the newest checkpoint in ``folder`` to the end. Returns how many events of which kind there were."""
    warnings.simplefilter("error")
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    pids: list[int] = [0] * ctx.world_size
    dist.all_gather_object(pids, os.getpid())
    striker = Striker(kill, ctx.rank, pids, folder)
    with contextlib.redirect_stdout(io.StringIO()):
        start = _start_example if job.save == EXAMPLE else _start
        go_on = start(ctx, mesh, job, striker)
        striker.start()
        started = time.perf_counter()
        go_on()
    return {"counts": dict(striker.counts), "seconds": time.perf_counter() - started}


def _start(ctx: RankContext, mesh: DeviceMesh, job: Job, striker: Striker) -> Callable[[], None]:
    folder, run = striker.folder, Run(ctx, mesh, job, striker.folder)
    striker.watch(run.model, run.optimizer)
    if job.saves_on_sigterm:
        signal.signal(signal.SIGTERM, lambda *_: setattr(run, "must_end", True))

    def go_on() -> None:
        if ctx.rank == 0:
            for left in unfinished(folder):
                shutil.rmtree(left)
            drop_older(folder, job.keeps)  # a kill may have come between a save and this
        newest = example("lm_run.py")["latest_checkpoint"](folder)
        dist.barrier()  # all ranks have seen the same
        if newest is not None:
            run.load(newest)
            dcp.save(run._state(run.done), checkpoint_id=folder.with_name(folder.name + "_loaded"))
        while run.done < STEPS and not run.must_end:
            run.step()
            run.save_where_due()

    return go_on


def _start_example(ctx: RankContext, mesh: DeviceMesh, job: Job, striker: Striker) -> Callable[[], None]:
    """The example with a process group that is there, and with a small corpus."""
    os.environ["WORLD_SIZE"] = str(ctx.world_size)
    names = example("train_lm.py")["train"].__globals__
    keeps_all = job.keeps == STEPS
    source = torch.randint(256, (2048,), generator=torch.Generator().manual_seed(7), dtype=torch.uint8)
    names["read_corpus"] = lambda: names["Corpus"](source, source, 1, "digest")
    names["join_process_group"] = lambda name: torch.device("cpu")
    names["leave_process_group"] = dist.barrier
    trainer_class = names["Trainer"]

    def made(*arguments: Any) -> Any:
        trainer = trainer_class(*arguments)
        striker.watch(trainer.model, trainer.optimizer)
        return trainer

    names["Trainer"] = made
    if keeps_all:
        names["finish_checkpoint"] = lambda path: names["unfinished_path"](path).rename(path)
    folder = striker.folder
    config = names["Config"](
        **SIZES,
        sequence_length=LENGTH,
        batch_size=2,
        steps=STEPS,
        warmup_steps=2,
        validate_every=3,
        validation_batches=1,
        checkpoint_every=1 if keeps_all else SAVE_EVERY,
        hsdp=job.layout == "HSDP",
        optimizer=job.optimizer.lower(),
        report=job.exports,
        output=folder,
        resume=folder if names["latest_checkpoint"](folder) else None,
    )
    dist.barrier()  # all ranks have seen the same
    return functools.partial(names["train"], config)
