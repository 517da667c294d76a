"""Claim: initialising a model of one billion parameters through ``whole_init`` on 2 gloo ranks needs no memory besides
the shards but one parameter, where rank 0 and a broadcast need the whole model on rank 0. It also takes less time,
though each rank draws all numbers.

A Llama of 1.0 billion parameters in fp32. Each measurement has processes of its own. It begins with a sharded model on
the meta device, and ends with values in all shards; all ways must give the same. Memory is what the processes allocate
beyond what they had at the beginning, the shards included, sampled every 5 ms.

    python benchmarks/checkpoint/whole_init.py [--rounds N] [--layers N] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
import fsdp2
from benchmarks.checkpoint.weights import NUM_RANKS, Taken, measure, median, turned
from benchmarks.common import Table, publish

LAYERS = "FSDP2_BENCH_LAYERS"  # the ranks read it


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds

    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=int(os.environ[LAYERS]),
        num_attention_heads=16,
        num_key_value_heads=8,
        attn_implementation="sdpa",  # type: ignore[call-arg]
    )
    return LlamaForCausalLM(config)


def init(module: nn.Module) -> None:
    """As for an unsharded model."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    elif hasattr(module, "variance_epsilon"):
        nn.init.ones_(module.weight)  # type: ignore[arg-type]


def on_meta(fully_shard: Callable[..., Any]) -> Any:
    with torch.device("meta"):
        model: Any = llama()
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    return model


def by_whole_init() -> nn.Module:
    model = on_meta(fsdp2.fully_shard)
    model.to_empty(device="cpu")
    with fsdp2.whole_init(model, seed=0):
        model.apply(init)
    return model


def from_rank_0() -> nn.Module:
    model, whole = on_meta(torch_fully_shard), {}
    if dist.get_rank() == 0:
        with torch.device("meta"):
            plain = llama()
        plain.to_empty(device="cpu")
        torch.manual_seed(0)
        plain.apply(init)
        whole = plain.state_dict()
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return model


def each_rank_by_hand() -> nn.Module:
    """Torch's own way without communication: draw each parameter, and cut it."""
    model = on_meta(torch_fully_shard)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            for param in module.parameters(recurse=False):
                whole = torch.empty(param.shape)
                if isinstance(module, (nn.Linear, nn.Embedding)):
                    nn.init.normal_(whole, std=0.02)
                else:
                    nn.init.ones_(whole)
                assert isinstance(param, DTensor)
                param.copy_(distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None))
    return model


WAYS = {
    "fsdp2.whole_init": by_whole_init,
    "rank 0, then set_model_state_dict": from_rank_0,
    "by hand, with distribute_tensor": each_rank_by_hand,
}


def rank_main(rank: int, name: str, _: str, store: str, connection: Connection) -> None:
    """One rank of one measurement, as in ``benchmarks/checkpoint/weights.py``."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    with torch.device("meta"):
        llama()  # imports
    dist.barrier()
    connection.send("ready")
    connection.recv()
    dist.barrier()
    start = time.perf_counter()
    model = WAYS[name]()
    dist.barrier()
    seconds = time.perf_counter() - start
    connection.send("done")
    connection.recv()
    params = [each for each in model.parameters() if isinstance(each, DTensor)]
    checksum = torch.stack([each._local_tensor.detach().double().sum() for each in params]).sum()
    dist.all_reduce(checksum)
    connection.send((seconds, checksum.item()))
    connection.recv()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=list(WAYS), default=list(WAYS))
    options = parser.parse_args()
    os.environ[LAYERS] = str(options.layers)
    with torch.device("meta"):
        billions = sum(param.numel() for param in llama().parameters()) / 1e9
    taken: dict[str, list[Taken]] = {}
    for round_ in range(options.rounds):
        for name in turned(options.only, round_):
            taken.setdefault(name, []).append(measure(name, Path(tempfile.gettempdir()), rank_main))
    checksums = {each.checksum for measured in taken.values() for each in measured}
    assert len(checksums) == 1, f"they gave different values: {checksums}"
    reference = median(taken[options.only[0]], "seconds")
    rows: list[list[object]] = []
    for name in options.only:
        seconds = median(taken[name], "seconds")
        first, other = (max(getattr(each, field) for each in taken[name]) for field in ("first_mb", "other_mb"))
        rows.append(
            [name, seconds, f"{first:.0f}", f"{other:.0f}", reference / seconds if reference != seconds else None]
        )
    columns = ["", "s", "rank 0 MB", "rank 1 MB", "fsdp2 / peer"]
    note = f"Median of {options.rounds} rounds. A rank's shards take {billions * 4e3 / NUM_RANKS:.0f} MB."
    table = Table("main", "From meta to values", columns, rows, ratio="fsdp2 / peer", noise=0.3, note=note)
    publish("checkpoint/whole_init", f"Initialising {billions:.2f} billion parameters, 2 gloo ranks", [table])


if __name__ == "__main__":
    main()
