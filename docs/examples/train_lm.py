"""Train a byte-level language model on the Python standard library's own source, sharded with ``fully_shard``.

    torchrun --nproc-per-node 2 docs/examples/train_lm.py                  # train, validate, checkpoint
    torchrun --nproc-per-node 2 docs/examples/train_lm.py --stop-after 60  # interrupt ...
    torchrun --nproc-per-node 2 docs/examples/train_lm.py --resume         # ... and finish with the same losses
    torchrun --nproc-per-node 2 docs/examples/train_lm.py --compare torch  # fsdp2 and torch's own, side by side
    torchrun --nproc-per-node 2 docs/examples/train_lm.py --weights int8   # all-gather the matrices in 8 bits
    torchrun --nproc-per-node 2 docs/examples/train_lm.py --optimizer muon # each matrix orthogonalised on one rank

What shapes a step (weights, batch, learning rate) follows from the options and the step's number alone, so on CPU
a resumed run repeats an uninterrupted one bit for bit. The model and the data are in ``lm_task.py``; the options,
the progress bar and the files of a run in ``lm_run.py``. A run of fsdp2 also writes a page about one of its steps.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import resource
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
import torch.nn.functional as F
from lm_run import (
    RUNTIMES,
    Config,
    Journal,
    checkpoint_path,
    comparison,
    config_from_args,
    finish_checkpoint,
    latest_checkpoint,
    num_ranks,
    unfinished_path,
)
from lm_task import Corpus, Transformer, read_corpus, training_batch, unigram_entropy, validation_batch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.tensors import (
    BFloat16AllGatherTensor,
    Float8AllGatherTensor,
    Float8Scaling,
    Int8AllGatherTensor,
    wrap_parameters,
)

FINAL_LR_FRACTION = 0.1
INTERRUPTED = 130  # the exit code after Ctrl-C in a shell
REPORTED_STEPS = 4  # the first one makes plans, and the last one ends where the next would begin
WIRE_FORMATS: dict[str, Callable[[Tensor], Tensor]] = {  # by the name that --weights has for it
    "bf16": BFloat16AllGatherTensor,
    "fp8": partial(Float8AllGatherTensor, scaling=Float8Scaling.PER_ROW),
    "int8": Int8AllGatherTensor,
}


def main() -> None:
    config = config_from_args(sys.argv[1:])
    try:
        if config.compare:
            compare(config, config.compare)
        else:
            train(config)
    except KeyboardInterrupt:  # each rank's own traceback would bury what to do next
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun passes on what the terminal has sent, too
        if os.environ.get("RANK", "0") == "0":
            print(f"\n{interrupted(config)}", flush=True)
        os._exit(INTERRUPTED)  # at once: threads of gloo may still wait for other ranks


def train(config: Config) -> None:
    """One run: from the first step, or the resumed one, to the last."""
    corpus = corpus_for(config)
    device = join_process_group(config.runtime)
    trainer = Trainer(config, corpus, device)
    checkpoint = latest_checkpoint(config.resume) if config.resume else None
    first_step = trainer.load(checkpoint) if checkpoint else 0
    journal = open_journal(trainer, checkpoint, first_step) if dist.get_rank() == 0 else None
    num_left = max(0, config.last_step - first_step)
    if journal and not num_left:
        journal.note(f"{checkpoint} has {first_step} steps, so none is left. Raise --steps or --stop-after.")
    num_reported = min(REPORTED_STEPS, num_left) if config.runtime == "fsdp2" else 0
    page = config.output / "step.html"
    with fsdp2.report.report(trainer.model, page) if config.report and num_reported else nullcontext():
        for step in range(first_step, first_step + num_reported):
            run_step(trainer, journal, step)
    if journal and config.report and num_reported:
        journal.point_to(page)
    for step in range(first_step + num_reported, config.last_step):
        run_step(trainer, journal, step)
    if config.last_step == config.steps:
        validation_loss = trainer.validate()
        if journal:
            journal.finish(validation_loss, unigram_entropy(corpus.train))
    elif journal:
        journal.interrupt()
    leave_process_group()


def run_step(trainer: Trainer, journal: Journal | None, step: int) -> None:
    """Train on batch number ``step``; then validate and write a checkpoint where they are due."""
    config = trainer.config
    record = trainer.step(step)
    if journal:
        journal.add_step(record)
    done, is_last = step + 1, step + 1 == config.last_step
    if is_due(done, config.validate_every) and not is_last:
        validation_loss = trainer.validate()
        if journal:
            journal.add_validation(done, validation_loss)
    if is_due(done, config.checkpoint_every) or is_last:
        try:
            trainer.save(config.output, done)
        except CheckpointError as error:  # on all ranks
            if not config.keep_going:
                raise
            if journal:
                journal.note(f"{error} Training goes on.")


def compare(config: Config, peer: str) -> None:
    """Train with fsdp2, then with ``peer``, and print both; each in a fresh process, so that memory compares."""
    for runtime in ("fsdp2", peer):
        run = dataclasses.replace(config, runtime=runtime, compare=None, output=config.output / runtime)
        process = torch.multiprocessing.get_context("spawn").Process(target=train, args=(run,))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"--compare: the {runtime} run failed with exit code {process.exitcode}; see above.")
    if os.environ.get("RANK", "0") == "0":
        print(comparison(config.output / "fsdp2", config.output / peer))


def interrupted(config: Config) -> str:
    """What the user of an interrupted run can do next."""
    latest = None if config.compare else latest_checkpoint(config.output)
    if latest is None:
        return "interrupted, without a checkpoint"
    return f"interrupted; the last checkpoint is {latest}; continue with --resume"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written."""

    def __init__(self, path: Path, reason: str) -> None:
        latest = latest_checkpoint(path.parents[1])
        super().__init__(
            f"checkpoint {path} could not be written ({reason}). The last complete checkpoint is {latest or 'none'}. "
            "Make room, or choose another --output; --keep-going trains on without it."
        )


class Trainer:
    """A sharded model, its optimizer and its data on one rank. All ranks call each method together.

    ``prepare`` gets the full model before it is sharded, and may change what its parameters are.
    """

    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        device: torch.device,
        prepare: Callable[[Transformer], object] = lambda model: None,
    ) -> None:
        self.config, self.corpus, self.device = config, corpus, device
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(config.seed)  # every rank builds the same full model, then keeps its shard of it
        self.model = Transformer(config.model)
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        prepare(self.model)
        shard(self.model, config, data_parallel_mesh(device, config.hsdp))
        self.optimizer = OPTIMIZERS[config.optimizer](self.model, config)

    def step(self, step: int) -> dict[str, Any]:
        """Train on each rank's batch number ``step``; returns the line for ``losses.jsonl``."""
        started = time.perf_counter()
        lr = learning_rate(step, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self._loss(*self._training_batch(step))
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        losses, peaks = self._from_all_ranks(loss.item(), peak_memory_mib(self.device))
        return {
            "step": step + 1,
            "loss": statistics.fmean(losses),
            "grad_norm": cast(DTensor, grad_norm).full_tensor().item(),
            "lr": lr,
            "seconds": time.perf_counter() - started,
            "peak_mib_per_rank": [round(peak) for peak in peaks],
        }

    @torch.no_grad()
    def validate(self) -> float:
        """Nats per byte, over the same validation windows on every call."""
        self.model.eval()
        num_batches = self.config.validation_batches
        losses = [self._loss(*self._validation_batch(index)).item() for index in range(num_batches)]
        self.model.train()
        (means,) = self._from_all_ranks(statistics.fmean(losses))
        return statistics.fmean(means)

    def save(self, folder: Path, step: int) -> None:
        """Write the state after ``step`` steps, then drop the older checkpoints of ``folder``.

        Raises:
            CheckpointError: a rank cannot write. All ranks raise; the older checkpoint is there.
        """
        path = checkpoint_path(folder, step)
        try:
            # With what a rank that was killed may have left of this one: torch replaces files of the same names.
            dcp.save(self._state(step), checkpoint_id=unfinished_path(path))
        except CheckpointException as error:  # torch tells all ranks
            reasons = [f"rank {rank}: {type(each).__name__}: {each}" for rank, (each, _) in error.failures.items()]
            if self.rank == 0:
                shutil.rmtree(unfinished_path(path), ignore_errors=True)  # makes room
            raise CheckpointError(path, "; ".join(reasons)) from error
        problem: list[str | None] = [None]
        if self.rank == 0:
            try:
                finish_checkpoint(path)
            except OSError as error:
                problem = [f"rank 0: {type(error).__name__}: {error}"]
        dist.broadcast_object_list(problem)
        if problem[0] is not None:
            raise CheckpointError(path, problem[0])

    def load(self, path: Path) -> int:
        """Continue from a checkpoint, whatever number of ranks wrote it; returns the number of steps done."""
        state = self._state(0)
        dcp.load(state, checkpoint_id=path)  # into the tensors of state: each rank reads its own shards
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        return state["step"]

    def _state(self, step: int) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": step}

    def _training_batch(self, step: int) -> tuple[Tensor, Tensor]:
        return training_batch(
            self.corpus.train,
            seed=self.config.seed,
            step=step,
            rank=self.rank,
            num_ranks=self.num_ranks,
            batch_size=self.config.batch_size,
            sequence_length=self.config.sequence_length,
        )

    def _validation_batch(self, index: int) -> tuple[Tensor, Tensor]:
        return validation_batch(
            self.corpus.validation,
            index=index * self.num_ranks + self.rank,
            num_batches=self.config.validation_batches * self.num_ranks,
            batch_size=self.config.batch_size,
            sequence_length=self.config.sequence_length,
        )

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(inputs.to(self.device)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.to(self.device).flatten())

    def _from_all_ranks(self, *values: float) -> list[list[float]]:
        """For each of ``values``, what every rank passed."""
        local = torch.tensor(values, dtype=torch.float64, device=self.device)
        gathered = [torch.empty_like(local) for _ in range(self.num_ranks)]
        dist.all_gather(gathered, local)
        return torch.stack(gathered, dim=1).tolist()


def corpus_for(config: Config) -> Corpus:
    """The corpus; ends the process with one line where it is too small for the batches that the options ask for."""
    corpus = read_corpus()
    sizes = {"batch_size": config.batch_size, "sequence_length": config.sequence_length}
    try:
        training_batch(corpus.train, seed=config.seed, step=0, rank=0, num_ranks=num_ranks(), **sizes)
        num_batches = config.validation_batches * num_ranks()
        validation_batch(corpus.validation, index=0, num_batches=num_batches, **sizes)
    except ValueError as error:
        raise SystemExit(f"train_lm.py: error: {error}") from None
    return corpus


def shard(model: Transformer, config: Config, mesh: DeviceMesh) -> None:
    """Apply the chosen runtime's ``fully_shard`` to each block, then to the root, which takes the rest."""
    if config.weights != "plain":
        wrap_parameters(model, WIRE_FORMATS[config.weights])
    runtime = importlib.import_module(RUNTIMES[config.runtime])
    policy = runtime.MixedPrecisionPolicy()
    if config.mp == "bf16":
        policy = runtime.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        runtime.fully_shard(block, mesh=mesh, mp_policy=policy)
    runtime.fully_shard(model, mesh=mesh, mp_policy=policy)


def data_parallel_mesh(device: torch.device, hsdp: bool) -> DeviceMesh:
    size = dist.get_world_size()
    if hsdp:
        return init_device_mesh(device.type, (2, size // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device.type, (size,), mesh_dim_names=("dp",))


def adamw(model: Transformer, config: Config) -> torch.optim.AdamW:
    """AdamW over the trainable shards: call it after ``shard``, which replaces the parameters."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    gains = [parameter for parameter in parameters if parameter.dim() == 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": gains, "weight_decay": 0.0},  # decay pulls to 0, but a norm's neutral gain is 1
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95))


def muon(model: Transformer, config: Config) -> fsdp2.optim.Muon:
    """Muon over the matrices of blocks, AdamW over embedding, head and gains; with one learning rate for both."""
    groups = fsdp2.optim.muon_groups(model, betas=(0.9, 0.95), weight_decay=0.0)
    return fsdp2.optim.Muon(groups, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")


OPTIMIZERS: dict[str, Callable[[Transformer, Config], torch.optim.Optimizer]] = {"adamw": adamw, "muon": muon}


def learning_rate(step: int, config: Config) -> float:
    """Linear warm-up, then a cosine to a tenth of the peak at ``config.steps``."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (FINAL_LR_FRACTION + (1 - FINAL_LR_FRACTION) * cosine)


def join_process_group(name: str) -> torch.device:
    """Join the other ranks: NCCL if each rank of this machine has a GPU of its own, else gloo on CPU.

    Without torchrun, the process is a group of one.
    """
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    has_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= num_local_ranks
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    by_torchrun = "RANK" in os.environ
    store, rank, world_size = next(dist.rendezvous("env://")) if by_torchrun else (dist.HashStore(), 0, 1)
    dist.init_process_group(
        "nccl" if has_gpu else "gloo",
        # Both runs of --compare use torchrun's one store, and so do ranks that torchrun has restarted: the prefix hides
        # addresses of ranks that have ended.
        store=dist.PrefixStore(f"{name}_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store),
        rank=rank,
        world_size=world_size,
    )
    return device


def leave_process_group() -> None:
    """Leave the other ranks. A gloo thread may still be letting go of the last collective, for which it needs Python's
    lock; were Python ending meanwhile, the process would abort ("terminate called without an active exception")."""
    time.sleep(0.5)
    dist.destroy_process_group()


def open_journal(trainer: Trainer, checkpoint: Path | None, first_step: int) -> Journal:
    config, corpus = trainer.config, trainer.corpus
    print(
        f"{config.runtime}: {trainer.num_ranks} ranks on {trainer.device.type} ({dist.get_backend()}), "
        f"{trainer.num_parameters / 1e6:.1f} M parameters, {config.mp}, {config.weights} weights; "
        f"{corpus.num_files} source files, {corpus.train.numel() / 1e6:.1f} MB for training, "
        f"{corpus.validation.numel() / 1e6:.1f} MB for validation"
    )
    if checkpoint:
        print(f"continues after step {first_step}, from {checkpoint}")
    facts = {"num_ranks": trainer.num_ranks, "corpus": corpus.digest, "torch": torch.__version__}
    return Journal(config, first_step=first_step, facts=facts)


def peak_memory_mib(device: torch.device) -> float:
    """The most this process has held: allocated tensors on CUDA, on CPU all resident memory, Python and torch too."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # macOS counts bytes, Linux KiB


def is_due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


if __name__ == "__main__":
    main()
