"""One rank of a replica group under torchft, which ``replicas.py`` starts, kills and starts again.

The rank trains a tiny model in float64 and writes down what it did, line by line: a line that was written survives
SIGKILL. An order in the folder makes the rank kill itself the next time it reaches a phase.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

RUNTIMES = {"torch": "torch.distributed.fsdp", "fsdp2": "fsdp2"}
PHASES = ("forward", "backward", "reduction", "commit", "optimizer", "send", "receive")
NUM_BLOCKS, WIDTH, ROWS = 3, 16, 4
RANKS_PER_GROUP = 2
SYNC_EVERY = 4  # inner steps of LocalSGD and DiLoCo


@dataclass(frozen=True)
class Job:
    """What all ranks of all groups have in common.

    Attributes:
        folder: for logs and orders.
        runtime: whose ``fully_shard``; "plain" for models that are not sharded.
        way: "hook" and "mesh" for HSDP, "local_sgd", or "diloco".
        waits_for_quorum: whether each step waits for torchft's quorum first (``use_async_quorum=False``).
        compares_steps: whether the ranks of a group compare their steps, as torchft does not, and start again where
            only some of them have recovered.
        group_size: ranks per replica group.
    """

    folder: Path
    lighthouse: str
    runtime: str
    way: str
    waits_for_quorum: bool
    compares_steps: bool
    seed: int
    group_size: int = RANKS_PER_GROUP


class Block(nn.Module):
    """A residual block with dropout. Calls ``at`` with a phase in the middle of its forward and of its backward."""

    def __init__(self, at: Callable[[str], None]) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=torch.float64)
        self._at = at

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.up(x).relu(), 0.1)
        self._at("forward")
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self._at("backward"))
        return x + self.down(hidden)


def built(seed: int, at: Callable[[str], None] = lambda _: None) -> nn.Sequential:
    """The model that every rank begins with."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Block(at) for _ in range(NUM_BLOCKS)))


def batch(seed: int, group: int, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """The inputs and targets of one rank in one step, the same each time the step is tried."""
    generator = torch.Generator().manual_seed(((seed * 31 + group) * 31 + rank) * 1_000_003 + step)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)
    return x, x.roll(1, dims=1).sin()


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(data[0]), data[1])


def optimizer_of(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.01 * step))


def tensors_in(value: object) -> Iterator[Tensor | bytes]:
    if isinstance(value, dict):
        for key in value:
            yield repr(key).encode()
            yield from tensors_in(value[key])
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
    else:
        yield value if isinstance(value, Tensor) else repr(value).encode()


def digest(value: object) -> str:
    """A hash of all tensors in ``value``, bit for bit; of DTensors, their local parts; and of everything else."""
    found = hashlib.sha256()
    for each in tensors_in(value):
        if isinstance(each, Tensor):
            each = (each.to_local() if isinstance(each, DTensor) else each).detach().numpy().tobytes()
        found.update(each)
    return found.hexdigest()[:16]


class Rank:
    """This rank: what it writes down, and how it dies."""

    def __init__(self, job: Job, group: int, rank: int) -> None:
        self.job, self.group, self.rank = job, group, rank
        self._log = (job.folder / "logs" / f"{group}_{rank}.jsonl").open("ab", buffering=0)
        self._order = job.folder / "orders" / f"{group}_{rank}.json"
        self._hits = 0

    def note(self, kind: str, **found: object) -> None:
        self._log.write(json.dumps({"kind": kind, "time": time.time(), "pid": os.getpid(), **found}).encode() + b"\n")

    def at(self, phase: str) -> None:
        """Die here if there is an order to. Orders with one number go to several ranks, of which one takes it."""
        if not self._order.exists():
            return
        order = json.loads(self._order.read_text())
        if order["phase"] != phase:
            return
        if self._hits < order["skip"]:
            self._hits += 1
            return
        try:
            (self.job.folder / "taken" / str(order["number"])).mkdir()
        except FileExistsError:
            return
        self._order.unlink()
        self.note("killed", number=order["number"], phase=phase, thread=threading.current_thread().name)
        os.kill(os.getpid(), signal.SIGKILL)


def run(job: Job, group: int, rank: int, port: int) -> None:
    """A process of one rank: trains until the file ``stop`` names the step to end at."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(job.group_size))
    torch.set_num_threads(1)
    said = os.open(job.folder / "logs" / f"said_{group}_{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)  # torchft prints every message of its servers
    os.dup2(said, 2)
    me = Rank(job, group, rank)
    me.note("start")
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
        Training(job, me).train()
        status = 0
    except BaseException as error:
        me.note("raised", error=f"{type(error).__name__}: {error}"[:400], where=traceback.format_exc()[-1500:])
        status = 1
    os._exit(status)


class Training:
    """The training loop, as torchft's users write it."""

    def __init__(self, job: Job, me: Rank) -> None:
        import torchft

        self.job, self.me = job, me
        self.model: Any = built(job.seed, me.at)
        self.manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=10)),
            min_replica_size=1,
            load_state_dict=self.load,
            state_dict=self.state,
            use_async_quorum=not job.waits_for_quorum,
            timeout=timedelta(seconds=15),
            quorum_timeout=timedelta(seconds=60),
            connect_timeout=timedelta(seconds=10),
            init_sync=False,  # all begin with the same model
            replica_id=f"group_{me.group}",
            lighthouse_addr=job.lighthouse,
            hostname="localhost",
        )
        self._all_reduce, self.manager.allreduce = self.manager.allreduce, self.all_reduce  # type: ignore[method-assign]
        if job.runtime != "plain":
            self.shard()
        self.inner, self.scheduler = optimizer_of(self.model)
        self.optimizer = torchft.Optimizer(self.manager, self.inner)
        self.step, self.loss = 0, 0.0
        self.has_reduced = self.has_stepped = False
        self.inner.register_step_pre_hook(lambda *_: me.at("optimizer"))
        self.inner.register_step_post_hook(self.step_scheduler)

    def state(self) -> dict[str, object]:
        self.me.at("send")
        state = {"model": self.model.state_dict(), "inner": self.inner.state_dict(), "rng": torch.get_rng_state()}
        self.me.at("send")
        return {**state, "scheduler": self.scheduler.state_dict()}

    def load(self, state: Any) -> None:
        self.me.at("receive")
        self.model.load_state_dict(state["model"])
        self.me.at("receive")
        self.inner.load_state_dict(state["inner"])
        self.scheduler.load_state_dict(state["scheduler"])
        if self.job.waits_for_quorum:
            torch.set_rng_state(state["rng"])
        self.me.note("loaded")

    def step_scheduler(self, *_: object) -> None:
        self.me.at("optimizer")
        self.scheduler.step()
        self.has_stepped = True

    def shard(self) -> None:
        """Shard the model inside the group, and let torchft take the mean over groups: in a hook, as its tests and
        torchtitan do, or with its managed process group as the replicate axis of the mesh."""
        fully_shard = import_module(RUNTIMES[self.job.runtime]).fully_shard
        mesh = init_device_mesh("cpu", (self.job.group_size,), mesh_dim_names=("dp_shard",))
        if self.job.way == "mesh":
            from torchft.process_group import ManagedProcessGroup

            managed = ManagedProcessGroup(self.manager)
            managed.register("dp_replicate")
            names, ranks = ("dp_replicate", "dp_shard"), torch.arange(self.job.group_size)[None]
            mesh = DeviceMesh.from_group([managed, mesh.get_group()], "cpu", mesh=ranks, mesh_dim_names=names)
        for module in (*self.model, self.model):
            fully_shard(module, mesh=mesh)
            if self.job.way == "hook":
                module.set_all_reduce_hook(lambda gradients: self.manager.allreduce(gradients).wait())

    def all_reduce(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """``Manager.allreduce``, with what this rank notes and where it may die."""
        self.me.at("reduction")
        work = self._all_reduce(tensor, *args, **kwargs)
        self.me.at("reduction")
        if not self.has_reduced:
            participants = self.manager.num_participants()
            self.note("reducing", takes_part=self.manager.is_participating(), participants=participants)
        self.has_reduced = True
        return work

    def note(self, kind: str, **found: object) -> None:
        step = self.manager.current_step() - (kind == "commit")  # where recovery runs beside training, it came later
        self.me.note(kind, step=step, quorum=self.manager._quorum_id, loss=self.loss, **found)

    def train(self) -> None:
        (self.train_together if self.job.way in ("hook", "mesh") else self.train_locally)()
        state = {
            key: value.full_tensor() if isinstance(value, DTensor) else value
            for key, value in self.model.state_dict().items()
        }
        torch.save(state, self.job.folder / f"end_{self.me.group}_{self.me.rank}.pt")
        self.manager.shutdown(wait=False)

    def has_ended(self) -> bool:
        stop = self.job.folder / "stop"
        return stop.exists() and self.manager.current_step() >= int(stop.read_text() or 1 << 60)

    def begin_step(self) -> None:
        """Note the state before the step. Where the quorum is computed meanwhile, dropout is seeded by the step:
        a state that arrives later cannot bring the generator's."""
        if not self.job.waits_for_quorum:
            torch.manual_seed(self.job.seed * 1_000_003 + self.step)
        self.rng = rng = torch.get_rng_state()
        state: tuple[object, ...] = (self.model.state_dict(),)
        if self.job.way in ("hook", "mesh"):  # else the inner optimizers differ between groups
            state += (self.inner.state_dict(), self.scheduler.state_dict())
        at = self.job.folder / "rng" / digest(rng)
        if self.me.rank == 0 and not at.exists():
            torch.save(rng, at.with_suffix(f".{self.me.group}"))
            os.replace(at.with_suffix(f".{self.me.group}"), at)
        self.me.note("step", step=self.step, state=digest(state), rng=at.name)

    def compare_steps(self) -> None:
        """End if the ranks of this group are at different steps: one has received the state of another group, and one
        has not."""
        self.step = self.manager.current_step()
        if self.job.compares_steps:
            least_and_most = torch.tensor([self.step, -self.step])
            dist.all_reduce(least_and_most, op=dist.ReduceOp.MIN)
            if least_and_most.sum() != 0:
                raise RuntimeError(f"the ranks of this group are at steps {least_and_most.abs().tolist()}")

    def train_together(self) -> None:
        while not self.has_ended():
            if not self.job.waits_for_quorum:
                self.compare_steps()
                self.begin_step()
            self.optimizer.zero_grad()
            if self.job.waits_for_quorum:
                self.compare_steps()
                self.begin_step()
            self.has_reduced = self.has_stepped = False
            loss = loss_of(self.model, batch(self.job.seed, self.me.group, self.me.rank, self.step))
            self.loss = loss.item()
            loss.backward()
            self.me.at("commit")
            self.optimizer.step()
            if not self.has_stepped:  # groups may try a step a different number of times
                torch.set_rng_state(self.rng)
            self.note("commit" if self.has_stepped else "drop", participants=self.manager.num_participants())

    def train_locally(self) -> None:
        """Steps of the inner optimizer inside the group; torchft synchronises the groups after every fourth."""
        from torchft.local_sgd import DiLoCo, LocalSGD

        if self.job.way == "local_sgd":
            algorithm: Any = LocalSGD(self.manager, self.model, self.inner, sync_every=SYNC_EVERY)
        else:
            outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            algorithm = DiLoCo(self.manager, [self.model], self.inner, outer, sync_every=SYNC_EVERY)
        with algorithm:
            self.begin_step()
            while not self.has_ended():
                self.compare_steps()
                self.has_reduced = False
                for inner_step in range(self.step * SYNC_EVERY, (self.step + 1) * SYNC_EVERY):
                    self.local_step(inner_step)
                has_synchronised = self.manager.current_step() > self.step
                self.note("commit" if has_synchronised else "drop", participants=self.manager.num_participants())
                if has_synchronised:
                    self.step = self.manager.current_step()
                    self.begin_step()

    def local_step(self, step: int) -> None:
        """A model that is not sharded takes the batches of all ranks of a group, with the same dropout for each."""
        ranks = range(RANKS_PER_GROUP) if self.job.runtime == "plain" else (self.me.rank,)
        torch.manual_seed(self.job.seed * 1_000_003 + step)
        rng = torch.get_rng_state()
        for rank in ranks:
            torch.set_rng_state(rng)
            loss = loss_of(self.model, batch(self.job.seed, self.me.group, rank, step)) / len(ranks)
            self.loss = loss.item()
            loss.backward()
        self.inner.step()
        self.inner.zero_grad()


def race(rank: int, runtime: str, port: int, results: Any) -> None:
    """A rank of two whose forward is interrupted by a state dict that another thread makes, as torchft's may."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS_PER_GROUP))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    made: list[dict[str, Any]] = []

    def at(phase: str) -> None:
        if phase == "forward" and not made:
            other = threading.Thread(target=lambda: made.append(model.state_dict()))
            other.start()
            other.join()

    model: Any = built(0, at)
    fully_shard = import_module(RUNTIMES[runtime]).fully_shard
    for module in (*model, model):
        fully_shard(module)
    expected = {name: digest(value) for name, value in model.state_dict().items()}
    try:
        loss_of(model, batch(0, 0, rank, 0)).backward()
        result = "the step ended"
    except Exception as error:
        result = f"the step raised {type(error).__name__}: {str(error)[:100]}"
    right = sum(digest(made[0][name]) == value for name, value in expected.items())
    results.put(f"rank {rank}: {result}; {right} of {len(expected)} values in the state dict are right")
    os._exit(0)
