"""Claim: from files with a tensor for each expert to shards of a model that fuses its experts, ``load_safetensors``
takes no memory besides the shards: 0.6 of what ``from_pretrained`` takes on each rank, and less time. transformers' own
``distributed_config`` takes 1.2 of our memory, and is as fast or faster. ``save_safetensors`` takes 0.06 of the memory
of gathering all on rank 0, and less time.

A random Mixtral of 1.1 GB in fp32 on 2 gloo ranks, which transformers has written: 8 experts in 6 layers. Each
measurement has processes of its own. It begins with nothing but the files, and ends with values in all shards; all
loaders must load the same. Saving begins with shards, and ends with files as transformers writes them. Memory is what
the processes allocate beyond what they had at the beginning, the shards included; mapped files are not in it. The
parent process samples it every 5 ms.

    python benchmarks/checkpoint/fused_weights.py [--rounds N] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
import fsdp2
from benchmarks.checkpoint.weights import NUM_RANKS, Taken, measure, median, turned
from benchmarks.common import Table, publish
from benchmarks.llama import MISSING
from fsdp2.checkpoint.from_transformers import transformers_mapping


def mixtral() -> Any:
    """277 million parameters, on the default device."""
    from transformers import MixtralConfig, MixtralForCausalLM  # takes seconds

    config = MixtralConfig(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_local_experts=8,
        num_attention_heads=12,
        num_key_value_heads=4,
        attn_implementation="sdpa",  # type: ignore[call-arg]
    )
    return MixtralForCausalLM(config)


def sharded(model: Any, fully_shard: Callable[..., Any]) -> Any:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    return model


def on_meta(fully_shard: Callable[..., Any]) -> Any:
    with torch.device("meta"):
        model = mixtral()
    return sharded(model, fully_shard)


def fill_frequencies(model: Any) -> None:
    """What no file has."""
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


# What loads


def ours(folder: Path) -> nn.Module:
    model = on_meta(fsdp2.fully_shard)
    model.to_empty(device="cpu")
    fsdp2.checkpoint.load_safetensors(model, folder, mapping=transformers_mapping(model))
    fill_frequencies(model)
    return model


def whole_on_each_rank(folder: Path) -> nn.Module:
    from transformers import MixtralForCausalLM

    return sharded(MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32), torch_fully_shard)


def broadcast_from_rank_0(folder: Path) -> nn.Module:
    from transformers import MixtralForCausalLM

    whole: dict[str, Any] = {}
    if dist.get_rank() == 0:
        whole = MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    model = on_meta(torch_fully_shard)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)
    fill_frequencies(model)
    return model


def by_transformers(folder: Path) -> nn.Module:
    from transformers import MixtralForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(fsdp_size=NUM_RANKS)
    return MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=config)


# What saves


def save_ours(model: nn.Module, folder: Path) -> None:
    fsdp2.checkpoint.save_safetensors(model, folder, max_shard_size="600MB", mapping=transformers_mapping(model))


def save_whole_on_rank_0(model: Any, folder: Path) -> None:
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=whole, max_shard_size="600MB")
    dist.barrier()


LOADERS = {
    "fsdp2.checkpoint.load_safetensors, mapping": ours,
    "from_pretrained whole on each rank": whole_on_each_rank,
    "from_pretrained on rank 0, broadcast": broadcast_from_rank_0,
    "from_pretrained, distributed_config": by_transformers,
}
SAVERS = {
    "fsdp2.checkpoint.save_safetensors, mapping": save_ours,
    "whole on rank 0, save_pretrained": save_whole_on_rank_0,
}


def rank_main(rank: int, name: str, folder: str, store: str, connection: Connection) -> None:
    """One rank of one measurement. It says when it is ready, waits for the word, and says what it took."""
    warnings.simplefilter("ignore")  # torch's own, about names that torch deprecates
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TQDM_DISABLE", "1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    import transformers.models.mixtral.modeling_mixtral  # noqa: F401  # no loader pays for it

    init_device_mesh("cpu", (NUM_RANKS,))
    model: Any = None
    if name in SAVERS:
        model = on_meta(fsdp2.fully_shard if SAVERS[name] is save_ours else torch_fully_shard)
        model.to_empty(device="cpu")
        torch.manual_seed(rank)
        for local in locals_of(model):
            local.normal_()
    dist.barrier()
    connection.send("ready")
    connection.recv()
    dist.barrier()
    start = time.perf_counter()
    if name in SAVERS:
        SAVERS[name](model, Path(folder))
    else:
        model = LOADERS[name](Path(folder))
    seconds = time.perf_counter() - start
    connection.send("done")
    connection.recv()
    checksum = torch.stack([local.double().sum() for local in locals_of(model)]).sum()
    dist.all_reduce(checksum)
    connection.send((seconds, checksum.item()))
    connection.recv()
    os._exit(0)


def locals_of(model: nn.Module) -> list[torch.Tensor]:
    return [(each.to_local() if isinstance(each, DTensor) else each).detach() for each in model.parameters()]


def write_checkpoint(folder: Path) -> float:
    """What the loaders read. Returns the number of GB."""
    torch.manual_seed(0)
    model = mixtral()
    model.save_pretrained(folder, max_shard_size="600MB")
    return sum(each.nbytes for each in model.parameters()) / 1e9


def table(name: str, title: str, note: str, taken: dict[str, list[Taken]]) -> Table:
    first = next(iter(taken))
    fastest = {each: min(one.seconds for one in measured) for each, measured in taken.items()}
    rows: list[list[object]] = []
    for each, measured in taken.items():
        most = [max(getattr(one, field) for one in measured) for field in ("first_mb", "other_mb")]
        ratio = fastest[first] / fastest[each] if each != first else None
        rows.append([each, fastest[each], median(measured, "seconds"), *(f"{mb:.0f}" for mb in most), ratio])
    columns = ["", "min s", "median s", "rank 0 MB", "rank 1 MB", "fsdp2 / peer"]
    return Table(name, title, columns, rows, ratio="fsdp2 / peer", noise=0.3, note=note)


def loads(folder: Path, names: Sequence[str], rounds: int) -> Table:
    taken: dict[str, list[Taken]] = {name: [] for name in names}
    for round_ in range(rounds):
        for name in turned(names, round_):
            taken[name].append(measure(name, folder, rank_main))
    checksums = {each.checksum for measured in taken.values() for each in measured}
    same = math.isclose(min(checksums), max(checksums), rel_tol=1e-9)
    assert same, f"loaders have loaded different values: {checksums}"
    note = f"Of {rounds} rounds; ratios are of minima. The files are in the page cache. With the model's construction."
    return table("load", "From files to shards", note, taken)


def saves(names: Sequence[str], rounds: int) -> Table:
    taken: dict[str, list[Taken]] = {name: [] for name in names}
    for round_ in range(rounds):
        for name in turned(names, round_):
            folder = Path(tempfile.mkdtemp(prefix="fsdp2-fused-weights-"))
            os.sync()
            taken[name].append(measure(name, folder, rank_main))
            shutil.rmtree(folder)
    note = (
        f"Of {rounds} rounds; ratios are of minima. fsdp2 waits until the disk has the data (`fsync`), and "
        "`save_pretrained` does not. Memory comes on top of the shards."
    )
    return table("save", "From shards to files", note, taken)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    if MISSING:
        raise SystemExit(MISSING)

    def chosen(names: Sequence[str]) -> list[str]:
        return [name for name in names if not options.only or name in options.only or name.startswith("fsdp2")]

    folder = Path(tempfile.mkdtemp(prefix="fsdp2-fused-weights-"))
    try:
        size_gb = write_checkpoint(folder)
        tables = [loads(folder, chosen(list(LOADERS)), options.rounds), saves(chosen(list(SAVERS)), options.rounds)]
    finally:
        shutil.rmtree(folder)
    publish("checkpoint/fused_weights", f"A Mixtral of {size_gb:.2f} GB in and out, 2 gloo ranks", tables)


if __name__ == "__main__":
    main()
