"""The options of a training run, and what a run shows, writes and finds again.

No collective and no model code here; ``train_lm.py`` calls this room with plain values. A run's folder holds
``config.json`` (everything its loss curve depends on), ``losses.jsonl`` (one line per step and per validation),
``result.json`` (the outcome) and ``checkpoints/step_*``. A checkpoint is written as ``checkpoints/writing_step_*``, and
renamed when all of it is on the disk: so a folder ``step_*`` is complete, whenever the ranks are killed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import secrets
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lm_task import VOCABULARY_SIZE, ModelConfig
from tqdm import tqdm

STEPS_PER_LINE = 10  # where standard error is no terminal
RUNTIMES = {"fsdp2": "fsdp2", "torch": "torch.distributed.fsdp"}  # the modules that offer fully_shard
MODEL_OPTIONS = tuple(field.name for field in dataclasses.fields(ModelConfig))
FREE_OPTIONS = frozenset(  # do not change the loss curve
    {
        *("compare", "stop_after", "validate_every", "validation_batches"),
        *("checkpoint_every", "keep_going", "output", "report", "resume"),
    }
)


def option(default: Any, help: str, **kwargs: Any) -> Any:
    """A field of ``Config`` that is also a command-line option; ``kwargs`` go to ``add_argument``."""
    return dataclasses.field(default=default, metadata={"help": help, **kwargs})


@dataclass(frozen=True)
class Config:
    """The options of one run; refuses those that cannot work.

    Raises:
        ValueError: names the option, what was found and what to use instead.
    """

    runtime: str = option("fsdp2", "whose fully_shard", choices=tuple(RUNTIMES))
    compare: str | None = option(None, "run fsdp2, then this runtime, and print both", choices=("torch",))
    steps: int = option(120, "optimizer steps of the whole run, which the learning rate's schedule spans")
    stop_after: int = option(0, "stop after this step, with a checkpoint (0: run to the end)")
    batch_size: int = option(4, "sequences per rank and step")
    sequence_length: int = option(128, "bytes per sequence")
    dim: int = option(384, "channels of the residual stream")
    num_layers: int = option(6, "transformer blocks")
    num_heads: int = option(6, "attention heads")
    hidden_dim: int = option(1024, "channels inside the feed-forward layer")
    tie_embedding: bool = option(True, "share embedding and output weights", action=argparse.BooleanOptionalAction)
    optimizer: str = option("adamw", "what steps the matrices of the blocks", choices=("adamw", "muon"))
    lr: float = option(1e-3, "peak learning rate: linear warm-up before it, cosine decay after it")
    warmup_steps: int = option(10, "steps of warm-up")
    weight_decay: float = option(0.1, "weight decay, on matrices only")
    max_grad_norm: float = option(1.0, "clip the gradients to this norm")
    seed: int = option(0, "of initial weights and batches")
    mp: str = option("fp32", "precision of the gathered parameters and of compute", choices=("fp32", "bf16"))
    weights: str = option(
        "plain",
        "what travels in an all-gather of the matrices: themselves, or a narrower format of them",
        choices=("plain", "bf16", "fp8", "int8"),
    )
    hsdp: bool = option(False, "two replicas, each sharded over half of the ranks", action="store_true")
    validate_every: int = option(40, "steps between validations (0: only at the end)")
    validation_batches: int = option(16, "batches per rank and validation")
    checkpoint_every: int = option(40, "steps between checkpoints (0: only at the end)")
    keep_going: bool = option(
        False, "train on when a checkpoint cannot be written, as when the disk is full", action="store_true"
    )
    output: Path = option(Path("runs/train_lm"), "folder for results; replaces an earlier run's there", type=Path)
    report: bool = option(
        True, "write a page about one of the first steps (fsdp2 only)", action=argparse.BooleanOptionalAction
    )
    resume: Path | None = option(
        None,
        "continue the run in DIR; without DIR, the one in --output, or start it if it has no checkpoint yet",
        type=Path,
        nargs="?",
        const=True,
        metavar="DIR",
    )

    def __post_init__(self) -> None:
        self._require_at_least(1, "steps", "batch_size", "validation_batches")
        self._require_at_least(0, "stop_after", "warmup_steps", "weight_decay", "validate_every", "checkpoint_every")
        for name in ("lr", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{flag(name)} is {getattr(self, name)}, expected more than 0.")
        if self.stop_after > self.steps:
            raise ValueError(f"--stop-after is {self.stop_after}, expected --steps ({self.steps}) or less.")
        if self.stop_after and self.compare:
            raise ValueError("--compare compares finished runs: leave out --stop-after, and shorten them with --steps.")
        if self.hsdp and (num_ranks() < 4 or num_ranks() % 2):
            raise ValueError(f"--hsdp on {num_ranks()} ranks: expected an even number of ranks, 4 or more.")
        model = self.model  # refuses impossible shapes
        if self.weights != "plain" and "torch" in (self.runtime, self.compare):
            self._require_even_rows()
        if self.resume is not None:
            self._require_resumable(self.resume, model)

    def _require_at_least(self, minimum: int, *names: str) -> None:
        for name in names:
            if not getattr(self, name) >= minimum:
                raise ValueError(f"{flag(name)} is {getattr(self, name)}, expected {minimum} or more.")

    def _require_even_rows(self) -> None:
        """torch's fully_shard leaves it to all-gather hooks to pad short shards, and those of fsdp2.tensors do not."""
        num_shards = num_ranks() // 2 if self.hsdp else num_ranks()
        for name, rows in (("dim", self.dim), ("hidden_dim", self.hidden_dim), ("vocabulary", VOCABULARY_SIZE)):
            if rows % num_shards:
                raise ValueError(
                    f"--weights {self.weights} under torch's fully_shard: {name} is {rows}, which {num_shards} ranks "
                    "do not divide. Use fsdp2 alone, or sizes that they divide."
                )

    def _require_resumable(self, folder: Path, model: ModelConfig) -> None:
        if self.compare:
            raise ValueError("--compare starts two new runs: leave out --resume.")
        checkpoint = latest_checkpoint(folder)
        if checkpoint is None:
            raise ValueError(f"--resume: {folder} holds no complete checkpoint. Start a run without --resume.")
        if (done := steps_done(checkpoint)) > self.last_step:
            raise ValueError(f"--resume: {folder} is at step {done} already, expected {self.last_step} or less.")
        if different := differences(folder, dataclasses.asdict(model)):
            raise ValueError(f"--resume: {folder} holds another model: {'; '.join(different)}. Use the same options.")

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(**{name: getattr(self, name) for name in MODEL_OPTIONS})

    @property
    def last_step(self) -> int:
        return self.stop_after or self.steps


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line: every rank prints it, so argparse's list of all options would bury it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


def config_from_args(args: Sequence[str]) -> Config:
    """Parse the command line; ends the process with one line where the options cannot work."""
    parser = Parser(
        description="Train a byte-level language model on the Python standard library's source with fully_shard.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for field in dataclasses.fields(Config):
        kwargs = dict(field.metadata)
        if "action" not in kwargs:
            kwargs.setdefault("type", str if field.default is None else type(field.default))
        parser.add_argument(flag(field.name), default=field.default, **kwargs)
    options = vars(parser.parse_args(args))
    if options["resume"] is True:  # the bare flag, with which torchrun may restart a run at any step
        options["resume"] = options["output"] if latest_checkpoint(options["output"]) else None
    try:
        return Config(**options)
    except ValueError as error:
        parser.error(str(error))


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def num_ranks() -> int:
    """As torchrun says, before any process group exists."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step_{step:08d}"


def steps_done(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in ``folder``, oldest first."""
    return sorted(path for path in folder.glob("checkpoints/step_*") if path.is_dir())


def latest_checkpoint(folder: Path) -> Path | None:
    return max(checkpoints(folder), default=None)


def unfinished_path(checkpoint: Path) -> Path:
    """Where ``checkpoint`` is while it is written."""
    return checkpoint.with_name(f"writing_{checkpoint.name}")


def unfinished_checkpoints(folder: Path) -> list[Path]:
    """What ranks were writing in ``folder`` when they were killed."""
    return sorted(folder.glob("checkpoints/writing_step_*"))


def unfinished_files(folder: Path) -> list[Path]:
    """What rank 0 was writing in ``folder`` when it was killed: ``write_whole``'s files, and the page about a step."""
    return [*folder.glob("writing_*.*"), *folder.glob(".step.html.*")]


def finish_checkpoint(checkpoint: Path) -> None:
    """All files of ``checkpoint`` are on the disk: give it its name, then drop the older ones."""
    unfinished = unfinished_path(checkpoint)
    sync_folder(unfinished)  # the names of its files, before its own
    unfinished.rename(checkpoint)
    sync_folder(checkpoint.parent)
    drop_checkpoints(checkpoint.parents[1], but=checkpoint)


def drop_checkpoints(folder: Path, *, but: Path | None) -> None:
    """Remove the checkpoints in ``folder``, except one."""
    for other in set(checkpoints(folder)) - {but}:
        # Under a name of its own first: whoever looks now must not take the rest of it for a checkpoint.
        shutil.rmtree(other.rename(unfinished_path(other)))


def sync_folder(folder: Path) -> None:
    """Wait until the names in ``folder`` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Replace the file: a reader finds the old text or the new one, whenever this process is killed."""
    written = path.with_name(f"writing_{path.name}.{secrets.token_hex(8)}")
    with written.open("x") as file:  # fails if another process has created this file
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    written.replace(path)


def differences(folder: Path, options: dict[str, Any]) -> list[str]:
    """Where ``options`` differ from those of the run in ``folder``, for people to read."""
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}  # of options it did not have yet
    before = {**defaults, **json.loads((folder / "config.json").read_text())}
    return [f"{name} was {before[name]} and is {now}" for name, now in options.items() if before[name] != now]


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The lines of ``losses.jsonl``. The last one may have been cut off, by a kill or a full disk."""
    *lines, _ = (folder / "losses.jsonl").read_text().split("\n")
    return [json.loads(line) for line in lines]


class Journal:
    """What rank 0 shows and writes of a run; the other ranks have none.

    ``facts`` are what the loss curve depends on besides the options: number of ranks, corpus, versions.
    """

    def __init__(self, config: Config, *, first_step: int, facts: dict[str, Any]) -> None:
        self.config = config
        self.bytes_per_step = num_ranks() * config.batch_size * config.sequence_length
        shaping = {name: value for name, value in dataclasses.asdict(config).items() if name not in FREE_OPTIONS}
        self.records = self._take_over_folder(first_step, {**shaping, **facts})
        self.bar = tqdm(
            desc=config.runtime,
            total=config.last_step,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            disable=None,  # where standard error is no terminal
        )

    def _take_over_folder(self, first_step: int, curve_options: dict[str, Any]) -> list[dict[str, Any]]:
        """Remove what another run left in the folder; returns the records of the run that is resumed, if any."""
        folder, resumed, records = self.config.output, self.config.resume, []
        folder.mkdir(parents=True, exist_ok=True)
        if resumed:
            for difference in differences(resumed, curve_options):
                print(f"note: {difference}: the losses will not be those of an uninterrupted run")
            records = [record for record in read_records(resumed) if record["step"] <= first_step]
        is_same = resumed is not None and resumed.resolve() == folder.resolve()
        drop_checkpoints(folder, but=latest_checkpoint(folder) if is_same else None)
        for path in unfinished_files(folder):
            path.unlink()
        for path in unfinished_checkpoints(folder):
            print(f"note: {path} was not written to its end, since the ranks were killed: it is ignored and removed")
            shutil.rmtree(path)
        write_whole(folder / "config.json", json.dumps(curve_options, indent=2) + "\n")
        write_whole(folder / "losses.jsonl", "".join(json.dumps(record) + "\n" for record in records))
        return records

    def add_step(self, record: dict[str, Any]) -> None:
        """Record one training step: a dict with step, loss, seconds, peak_mib_per_rank and whatever else."""
        self._add(record)
        if self.bar.disable:
            self._print_step(record)
        self.bar.set_postfix_str(
            f"loss {record['loss']:.3f}, {self.bytes_per_step / record['seconds']:.0f} tokens/s, "
            f"peak MiB per rank {per_rank(record['peak_mib_per_rank'])}",
            refresh=False,
        )
        self.bar.update()

    def _print_step(self, record: dict[str, Any]) -> None:
        """Every ten steps, a line where there is no bar."""
        done, last = record["step"], self.config.last_step
        if done % STEPS_PER_LINE and done != last:
            return
        seconds = statistics.median(each["seconds"] for each in self.records[-STEPS_PER_LINE:] if "seconds" in each)
        left = tqdm.format_interval(seconds * (last - done))
        print(f"step {done} of {last}: loss {record['loss']:.3f}, {seconds:.2f} s per step, {left} left", flush=True)

    def add_validation(self, step: int, loss: float) -> None:
        """Record a validation loss in nats per byte, after ``step`` steps."""
        self._add({"step": step, "validation_loss": loss})
        self.bar.write(f"step {step}: validation loss {loss:.4f} nats/byte")

    def point_to(self, page: Path) -> None:
        """Say where the report on one step lies."""
        self.bar.clear()
        print(f"a page about one step: {page}")

    def note(self, text: str) -> None:
        """Show ``text`` beside the bar."""
        self.bar.write(f"note: {text}")

    def interrupt(self) -> None:
        """The run ends before its last step: no outcome to write."""
        self.bar.close()
        print(f"stopped after step {self.config.last_step} of {self.config.steps}; continue with --resume")

    def finish(self, validation_loss: float, entropy: float) -> None:
        """Write ``result.json`` and print the outcome beside ``entropy``, that of the training split's bytes."""
        self.bar.close()
        final = {"step": self.config.last_step, "validation_loss": validation_loss}
        if self.records[-1] != final:  # it is there already when a finished run is resumed
            self._add(final)
        steps = [record for record in self.records if "loss" in record]
        result = {
            "loss": steps[-1]["loss"],
            "validation_loss": validation_loss,
            "unigram_entropy": entropy,
            "tokens_per_second": self.bytes_per_step / statistics.median(record["seconds"] for record in steps),
            "peak_mib_per_rank": steps[-1]["peak_mib_per_rank"],
        }
        (self.config.output / "result.json").write_text(json.dumps(result, indent=2) + "\n")
        print(
            f"validation loss {validation_loss:.4f} nats/byte ({validation_loss / math.log(2):.4f} bits); "
            f"byte-unigram entropy of the training split {entropy:.4f} ({entropy / math.log(2):.4f} bits)\n"
            f"{result['tokens_per_second']:.0f} tokens/s (median step), "
            f"peak MiB per rank {per_rank(result['peak_mib_per_rank'])}; results in {self.config.output}"
        )

    def _add(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        # Opened per line, so that an interrupted run leaves whole lines.
        with (self.config.output / "losses.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


def per_rank(peaks: list[int]) -> str:
    return " ".join(map(str, peaks)) if len(peaks) <= 4 else f"{min(peaks)} to {max(peaks)}"


def comparison(ours: Path, peer: Path) -> str:
    """A table of the two finished runs of one job in these folders."""
    runs = (ours, peer)
    results = [json.loads((folder / "result.json").read_text()) for folder in runs]
    for result in results:
        result["peak_mib"] = max(result["peak_mib_per_rank"])
    lines = [f"{'':34}{ours.name:>12}{peer.name:>12}{'ratio':>9}"]
    for label, key, digits in (
        ("loss of the last step, nats/byte", "loss", 6),
        ("validation loss, nats/byte", "validation_loss", 6),
        ("tokens/s, median step", "tokens_per_second", 0),
        ("peak MiB, largest rank", "peak_mib", 0),
    ):
        left, right = (result[key] for result in results)
        lines.append(f"{label:34}{left:>12.{digits}f}{right:>12.{digits}f}{left / right:>9.3f}")
    curves = [[record["loss"] for record in read_records(folder) if "loss" in record] for folder in runs]
    largest = max(abs(left - right) for left, right in zip(*curves, strict=True))
    lines.append(f"{'largest difference of losses':34}{largest:>12.3g}   ({len(curves[0])} steps; 0 is bit for bit)")
    return "\n".join(lines)
