"""Claim: with ``reshard_after_forward=8`` and ``set_reshard_after_backward(8)``, one gather of a step with four
micro-batches leaves nodes of 8 ranks, and optimizer states are sharded over all ranks.

A step of blocks on 4 nodes of 8 ranks, one rank of which runs, on a process group that counts instead of communicating
(``null_group.py``). Gradients are reduced in the last micro-batch. Bytes are those that leave a node in a step, if the
backend sends them around a ring that enters each node once: of a gather or a reduction over g ranks, each link carries
(g - 1) / g of the whole; of an all-reduce, twice that. Counts are exact: the same on every run.

    python benchmarks/step/node_bytes.py [--width 256] [--micro-batches 4]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
import fsdp2
from benchmarks.common import Block, Table, publish
from benchmarks.null_group import NullGroup, null_process_group

NODE, NUM_NODES, NUM_BLOCKS = 8, 4, 4
NUM_RANKS = NODE * NUM_NODES


@dataclass(frozen=True)
class Message:
    """A collective over ``num_ranks`` ranks of ``num_nodes`` nodes. ``nbytes``: of the parts of all ranks."""

    kind: str
    num_ranks: int
    num_nodes: int
    nbytes: int

    @property
    def leaves_node(self) -> float:
        """Bytes on the link out of a node."""
        if self.num_nodes == 1:
            return 0.0
        return self.nbytes * (self.num_ranks - 1) / self.num_ranks * (2 if self.kind == "all_reduce" else 1)


class Counter:
    """Makes all ``NullGroup``s note their messages."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def install(self) -> None:
        def gather(group: Any, outputs: Any, *_: Any) -> Any:
            return self._note(group, "all_gather", outputs)

        def scatter(group: Any, _outputs: Any, inputs: Any, *_: Any) -> Any:
            return self._note(group, "reduce_scatter", inputs)

        def reduce(group: Any, tensors: Any, *_: Any) -> Any:
            return self._note(group, "all_reduce", tensors)

        cls: Any = NullGroup
        cls.all_gather_single = cls._allgather_base = gather
        cls.all_gather_single_coalesced = cls.allgather_into_tensor_coalesced = gather
        cls.reduce_scatter_single = cls._reduce_scatter_base = scatter
        cls.reduce_scatter_single_coalesced = cls.reduce_scatter_tensor_coalesced = scatter
        cls.allreduce = reduce

    def _note(self, group: Any, kind: str, tensors: Any) -> Any:
        ranks = dist.get_process_group_ranks(group)
        nodes = {rank // NODE for rank in ranks}
        each = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        self.messages.append(Message(kind, len(ranks), len(nodes), sum(tensor.nbytes for tensor in each)))
        return group._work


def model(width: int) -> nn.Module:
    return nn.Sequential(*(Block(width) for _ in range(NUM_BLOCKS)))


def sharded(width: int, runtime: Any, *, replicas: int = 1, stays: bool = False, **options: Any) -> nn.Module:
    made = model(width)
    shape = (NUM_RANKS,) if replicas == 1 else (replicas, NUM_RANKS // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for unit in [*made, made]:
        runtime.fully_shard(unit, mesh=mesh, **options)
    if stays:
        made.set_reshard_after_backward(NODE)  # type: ignore[operator]
    return made


WAYS: dict[str, Callable[[int], nn.Module]] = {
    "torch, FSDP": lambda width: sharded(width, torch_fsdp),
    "torch, reshard_after_forward=8": lambda width: sharded(width, torch_fsdp, reshard_after_forward=NODE),
    "torch, HSDP": lambda width: sharded(width, torch_fsdp, replicas=NUM_NODES),
    "fsdp2, FSDP": lambda width: sharded(width, fsdp2),
    "fsdp2, reshard_after_forward=8": lambda width: sharded(width, fsdp2, reshard_after_forward=NODE),
    "fsdp2, the same, and set_reshard_after_backward(8)": lambda width: sharded(
        width, fsdp2, reshard_after_forward=NODE, stays=True
    ),
    "fsdp2, HSDP": lambda width: sharded(width, fsdp2, replicas=NUM_NODES),
}


def step(made: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, micro_batches: int) -> None:
    for micro in range(micro_batches):
        made.set_requires_gradient_sync(micro + 1 == micro_batches)
        made(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def row(name: str, width: int, micro_batches: int, counter: Counter) -> list[object]:
    torch.manual_seed(0)
    made = WAYS[name](width)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3, foreach=False)
    for _ in range(3):  # a steady step
        counter.messages.clear()
        step(made, optimizer, torch.zeros(2, width), micro_batches)
    whole = sum(p.numel() * p.element_size() for p in model(width).parameters())
    states = sum(
        value.to_local().nbytes for state in optimizer.state.values() for value in state.values() if value.dim() > 0
    )
    crossing = [message for message in counter.messages if message.num_nodes > 1]
    gathered = sum(message.leaves_node for message in crossing if message.kind == "all_gather")
    reduced = sum(message.leaves_node for message in crossing if message.kind != "all_gather")
    if "HSDP" in name:  # as many groups as a node has ranks, side by side
        reduced *= NODE
    return [name, *(f"{nbytes / whole:.2f}" for nbytes in (gathered, reduced, gathered + reduced, states))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--micro-batches", type=int, default=4)
    options = parser.parse_args()
    counter = Counter()
    counter.install()
    with null_process_group(NUM_RANKS):
        rows = [row(name, options.width, options.micro_batches, counter) for name in WAYS]
    plain = next(each for each in rows if each[0] == "fsdp2, FSDP")
    for each in rows:
        each.append(float(str(each[3])) / float(str(plain[3])))
    columns = ["", "gathers", "reductions", "together", "Adam states of a rank", "ratio"]
    note = (
        "Bytes that leave a node in a step, and bytes of Adam's states, in bytes of all parameters. ratio: together, "
        "to fsdp2's FSDP."
    )
    title = f"{NUM_NODES} nodes of {NODE} ranks, {options.micro_batches} micro-batches, gradients reduced in the last"
    publish("step/node_bytes", title, [Table("main", "Bytes between nodes", columns, rows, noise=0.0, note=note)])


if __name__ == "__main__":
    main()
