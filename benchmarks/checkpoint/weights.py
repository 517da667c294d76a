"""Claim: from files to shards on 2 gloo ranks, ``load_safetensors`` takes about half the time of DCP's own format and
of torch's broadcast, and 0.4 of accelerate's, and no memory besides the shards. DCP's reader for safetensors is
faster: ours takes 1.5 of its time. ``save_safetensors`` takes 1.8 of the time of DCP's own format, which moves nothing
between ranks, and 0.8 of that of gathering all on rank 0.

A random Llama of 1.0 GB in fp32. Each measurement has processes of its own. It begins with a sharded model on the meta
device, and ends with values in all shards; all loaders must load the same. Peers use torch's ``fully_shard``. Memory is
what the processes allocate beyond what they had at the beginning, the shards included; mapped files are not in it. The
parent process samples it every 5 ms.

    python benchmarks/checkpoint/weights.py [--rounds N] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
import fsdp2
from benchmarks.common import Table, publish
from benchmarks.llama import MISSING

NUM_RANKS = 2
SAMPLE_S = 0.005
PRELOADED = ["torch", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "transformers", "fsdp2"]


def llama() -> nn.Module:
    """252 million parameters, on the default device."""
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds

    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        attn_implementation="sdpa",  # type: ignore[call-arg]
    )
    return LlamaForCausalLM(config)


def sharded(fully_shard: Callable[..., Any]) -> nn.Module:
    with torch.device("meta"):
        model: Any = llama()
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    return model


def locals_of(model: nn.Module) -> list[torch.Tensor]:
    return [each._local_tensor if isinstance(each, DTensor) else each for each in model.state_dict().values()]


# What loads. Each gets the sharded model on meta, and the folder with all checkpoints.


def ours(model: nn.Module, folder: Path) -> None:
    model.to_empty(device="cpu")
    fsdp2.checkpoint.load_safetensors(model, folder / "safetensors")


def dcp_native(model: nn.Module, folder: Path) -> None:
    model.to_empty(device="cpu")
    dcp.load({"model": model.state_dict()}, checkpoint_id=str(folder / "dcp"))


def dcp_from_safetensors(model: nn.Module, folder: Path) -> None:
    model.to_empty(device="cpu")
    dcp.load(model.state_dict(), storage_reader=dcp.HuggingFaceStorageReader(str(folder / "safetensors")))


def _whole(folder: Path) -> dict[str, torch.Tensor]:
    """On rank 0: the whole checkpoint; the other ranks have nothing."""
    from safetensors.torch import load_file

    files = sorted((folder / "safetensors").glob("*.safetensors")) if dist.get_rank() == 0 else []
    return {key: value for file in files for key, value in load_file(file).items()}


def broadcast_by_torch(model: nn.Module, folder: Path) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, _whole(folder), options=options)


def broadcast_by_accelerate(model: nn.Module, folder: Path) -> None:
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict

    accelerator = SimpleNamespace(is_main_process=dist.get_rank() == 0)  # all that it asks for
    fsdp2_load_full_state_dict(accelerator, model, _whole(folder))


# What saves. Each gets the sharded model with values, and an empty folder.


def save_ours(model: nn.Module, folder: Path) -> None:
    fsdp2.checkpoint.save_safetensors(model, folder, max_shard_size="550MB")


def save_by_dcp(model: nn.Module, folder: Path) -> None:
    dcp.save({"model": model.state_dict()}, checkpoint_id=str(folder))


def save_whole_on_rank_0(model: nn.Module, folder: Path) -> None:
    from safetensors.torch import save_file

    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()


LOADERS = {
    "fsdp2.checkpoint.load_safetensors": ours,
    "DCP, its own format": dcp_native,
    "DCP, from safetensors": dcp_from_safetensors,
    "set_model_state_dict from rank 0": broadcast_by_torch,
    "accelerate, from rank 0": broadcast_by_accelerate,
}
SAVERS = {
    "fsdp2.checkpoint.save_safetensors": save_ours,
    "DCP, its own format": save_by_dcp,
    "whole on rank 0, save_file": save_whole_on_rank_0,
}


# One measurement


class Taken(NamedTuple):
    """Seconds of the slowest rank; MB of rank 0, and of the other rank; the sum of all values."""

    seconds: float
    first_mb: float
    other_mb: float
    checksum: float


def rank_main(rank: int, name: str, folder: str, store: str, connection: Connection) -> None:
    """One rank of one measurement. It says when it is ready, waits for the word, and says what it took."""
    warnings.simplefilter("ignore")  # torch's own, about names that torch deprecates
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    work = {**LOADERS, **{f"save: {key}": value for key, value in SAVERS.items()}}[name]
    is_ours = work in (ours, save_ours)
    model = sharded(fsdp2.fully_shard if is_ours else torch_fully_shard)
    if name.startswith("save"):
        model.to_empty(device="cpu")
        torch.manual_seed(rank)
        for local in locals_of(model):
            local.detach().normal_()
    dist.barrier()
    connection.send("ready")
    connection.recv()
    dist.barrier()
    start = time.perf_counter()
    work(model, Path(folder))
    seconds = time.perf_counter() - start
    connection.send("done")
    connection.recv()
    checksum = torch.stack([local.detach().double().sum() for local in locals_of(model)]).sum()
    dist.all_reduce(checksum)
    connection.send((seconds, checksum.item()))
    connection.recv()
    os._exit(0)


def anonymous_mb(pid: int) -> float:
    """Memory of the process that no file backs."""
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon:")) / 1000


def measure(name: str, folder: Path, main: Callable[..., None] = rank_main) -> Taken:
    """``main`` is what each rank runs, as ``rank_main`` does."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as place:
        ends, processes = [], []
        for rank in range(NUM_RANKS):
            end, other = context.Pipe()
            arguments = (rank, name, str(folder), f"{place}/store", other)
            processes.append(context.Process(target=main, args=arguments, daemon=True))
            processes[-1].start()
            other.close()
            ends.append(end)
        pids = [process.pid or 0 for process in processes]
        assert [end.recv() for end in ends] == ["ready"] * NUM_RANKS
        before = [anonymous_mb(pid) for pid in pids]
        peaks = list(before)
        tell(ends)
        done = 0
        while done < NUM_RANKS:
            peaks = [max(peak, anonymous_mb(pid)) for peak, pid in zip(peaks, pids, strict=True)]
            done += sum(end.recv() == "done" for end in wait(ends, SAMPLE_S))  # type: ignore[union-attr]
        tell(ends)
        answers = [end.recv() for end in ends]
        tell(ends)
        for process in processes:
            process.join()
    first, *others = [peak - start for peak, start in zip(peaks, before, strict=True)]
    return Taken(max(seconds for seconds, _ in answers), first, max(others), answers[0][1])


def tell(ends: Sequence[Connection]) -> None:
    for end in ends:
        end.send("go on")


# All of them


def write_checkpoints(folder: Path) -> float:
    """The files that the loaders read. Returns the number of GB."""
    torch.manual_seed(0)
    model = llama()
    model.save_pretrained(folder / "safetensors", max_shard_size="550MB")  # type: ignore[operator]
    dcp.save({"model": model.state_dict()}, checkpoint_id=str(folder / "dcp"), no_dist=True)
    return sum(each.nbytes for each in model.state_dict().values()) / 1e9


def forget(folder: Path) -> None:
    """Have the system read the files from the disk the next time."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def loads(folder: Path, names: Sequence[str], rounds: int) -> Table:
    taken: dict[tuple[str, bool], list[Taken]] = {}
    for round_ in range(rounds):
        for name in turned(names, round_):
            for is_cold in (True, False):
                if is_cold:
                    forget(folder)
                taken.setdefault((name, is_cold), []).append(measure(name, folder))
    checksums = {each.checksum for measured in taken.values() for each in measured}
    lowest, highest = min(checksums), max(checksums)
    assert math.isclose(lowest, highest, rel_tol=1e-9), f"loaders have loaded different values: {checksums}"
    rows: list[list[object]] = []
    reference = median(taken[names[0], False], "seconds")
    for name in names:
        warm, cold = taken[name, False], taken[name, True]
        both = [*warm, *cold]
        seconds = median(warm, "seconds")
        rows.append(
            [
                name,
                f"{min(each.seconds for each in warm):.2f}",
                seconds,
                f"{min(each.seconds for each in cold):.2f}",
                median(cold, "seconds"),
                f"{max(each.first_mb for each in both):.0f}",
                f"{max(each.other_mb for each in both):.0f}",
                reference / seconds if name != names[0] else None,
            ]
        )
    columns = ["", "warm min s", "warm s", "cold min s", "cold s", "rank 0 MB", "rank 1 MB", "fsdp2 / peer"]
    note = f"Median and minimum of {rounds} rounds. Cold: the files were dropped from the page cache before."
    return Table("load", "From files to shards", columns, rows, ratio="fsdp2 / peer", noise=0.3, note=note)


def saves(names: Sequence[str], rounds: int) -> Table:
    taken: dict[str, list[Taken]] = {}
    for round_ in range(rounds):
        for name in turned(names, round_):
            folder = Path(tempfile.mkdtemp(prefix="fsdp2-weights-"))
            os.sync()
            taken.setdefault(name, []).append(measure(f"save: {name}", folder))
            shutil.rmtree(folder)
    reference = median(taken[names[0]], "seconds")
    rows: list[list[object]] = []
    for name in names:
        measured = taken[name]
        seconds = median(measured, "seconds")
        rows.append(
            [
                name,
                f"{min(each.seconds for each in measured):.2f}",
                seconds,
                f"{max(each.first_mb for each in measured):.0f}",
                f"{max(each.other_mb for each in measured):.0f}",
                reference / seconds if name != names[0] else None,
            ]
        )
    columns = ["", "min s", "s", "rank 0 MB", "rank 1 MB", "fsdp2 / peer"]
    note = (
        f"Median and minimum of {rounds} rounds. fsdp2 and DCP wait until the disk has the data (`fsync`); `save_file` "
        "does not. Memory comes on top of the shards."
    )
    return Table(
        "save", "From shards to files", columns, sorted(rows, key=str), ratio="fsdp2 / peer", noise=0.3, note=note
    )


def turned(names: Sequence[str], by: int) -> list[str]:
    by %= len(names)
    return [*names[by:], *names[:by]]


def median(taken: Sequence[Taken], field: str) -> float:
    return statistics.median(getattr(each, field) for each in taken)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    if MISSING:
        raise SystemExit(MISSING)

    def chosen(names: Sequence[str]) -> list[str]:
        return [name for name in names if not options.only or name in options.only or name.startswith("fsdp2")]

    folder = Path(tempfile.mkdtemp(prefix="fsdp2-weights-"))
    try:
        size_gb = write_checkpoints(folder)
        tables = [loads(folder, chosen(list(LOADERS)), options.rounds), saves(chosen(list(SAVERS)), options.rounds)]
    finally:
        shutil.rmtree(folder)
    publish("checkpoint/weights", f"Weights of a Llama of {size_gb:.2f} GB in and out, 2 gloo ranks", tables)


if __name__ == "__main__":
    main()
