"""``python -m fsdp2 measure``: measures the current machine for the planner.

A single process measures products, copies and memory; under ``torchrun``, it also measures all-gathers and
reduce-scatters by size, alone and concurrent with products. On several nodes, the ranks of each node also measure by
themselves, to distinguish its links from those between nodes; on one node, both get the same rate. A single rank
measures no link, so its result allows no plan for several GPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fsdp2.core import Axis, comms
from fsdp2.extras.output import check_writable, write_whole
from fsdp2.extras.peers import match_channels
from fsdp2.planner.machine import SHORT_LENGTH, Contention, Link, Machine, Reached
from fsdp2.planner.machines import fields_of

ROUNDS = 5
_MOST_WIDTH = 2**17  # a product of 64 GiB in fp32


@dataclass(frozen=True)
class Collective:
    """Seconds to gather or scatter ``nbytes`` over all ranks. ``beside`` is what it adds to concurrent products."""

    name: str
    nbytes: int
    alone: float
    beside: float


@dataclass(frozen=True)
class Measured:
    machine: Machine
    collectives: tuple[Collective, ...]


def measure(sizes: tuple[int, ...], width: int) -> Measured:
    """Measure this rank's device, and the collectives of the default group if there is one.

    Args:
        sizes: bytes of collectives, ascending.
        width: width of the square products.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator or torch.device("cpu")
    flops = {dtype: _product_flops(device, width, dtype) for dtype in (torch.bfloat16, torch.float32)}
    copies = _copy_bandwidth(device)
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    node_size = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    found = _collectives(dist.group.WORLD, sizes, device, width) if num_ranks > 1 else ()
    in_node = network = _link(found, num_ranks)
    if network is not None and num_ranks > node_size > 1 and num_ranks % node_size == 0:
        node, _ = dist.new_subgroups(group_size=node_size)
        in_node = _link(_collectives(node, sizes, device, width), node_size)
        assert in_node is not None  # node_size > 1
        network = _between(network, in_node, num_ranks, node_size)
    machine = Machine(
        name=f"measured: {device_name(device)}, {_ranks(num_ranks, node_size)}",
        bf16_flops=flops[torch.bfloat16],
        reached=_reached(device, flops),
        memory_nbytes=_memory(device),
        copy_bandwidth=copies,
        node_size=node_size,
        in_node=in_node,
        network=network,
        launch_latency=0.0,
        contention=_contention(found),
        host_memory_nbytes=None if device.type == "cpu" else _host_memory(),
        device=device_name(device),
        sources=("measured by python -m fsdp2 measure",),
    )
    return Measured(machine, found)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median time of ``run``, after one warm-up round."""
    return statistics.median([_once(run, device) for _ in range(ROUNDS + 1)][1:])


def _extra_seconds(more: Callable[[], object], less: Callable[[], object], device: torch.device) -> float:
    """The time that ``more`` takes beyond ``less``. They alternate, so that other load on the machine affects both. All
    ranks start together, since waiting for a late rank is not a cost of a collective."""
    extra = []
    for _ in range(ROUNDS + 1):
        dist.barrier()
        longer = _once(more, device)
        dist.barrier()
        extra.append(longer - _once(less, device))
    return max(statistics.median(extra[1:]), 0.0)


def _once(run: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _reached(device: torch.device, flops: dict[torch.dtype, float]) -> Reached:
    """What products of these ``flops`` and attention reach."""
    length, heads, dim = (4096, 16, 128) if device.type != "cpu" else (128, 1, 16)
    q, k, v = (
        torch.randn(1, heads, length, dim, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3)
    )
    attend = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    out = attend(q, k, v)
    forward = _seconds(lambda: attend(q, k, v), device)
    backward = _seconds(lambda: torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True), device)
    num_flops = 2.0 * heads * length**2 * dim * (1 + SHORT_LENGTH / length)
    is_cuda = device.type == "cuda"
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else 1
    return Reached(
        bf16=flops[torch.bfloat16],
        fp8=None,
        fp32=flops[torch.float32],
        attention=num_flops / forward,
        attention_backward=2.5 * num_flops / backward,
        num_processors=num_processors,
    )


def _product_flops(device: torch.device, width: int, dtype: torch.dtype) -> float:
    # Random numbers: on ones, a GPU takes less power, and runs faster than in a training step.
    a, b = (torch.randn(width, width, dtype=dtype, device=device) for _ in range(2))
    return 2.0 * width**3 / _seconds(lambda: a @ b, device)


def _copy_bandwidth(device: torch.device) -> float:
    source, target = (torch.ones(2**24, device=device) for _ in range(2))
    return 2.0 * source.nbytes / _seconds(lambda: target.copy_(source), device)


def _memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return _host_memory()


def _host_memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _ranks(num_ranks: int, node_size: int) -> str:
    if num_ranks == 1:
        return "1 rank, links not measured"
    return f"{num_ranks} ranks" + (f" on {-(-num_ranks // node_size)} nodes" if num_ranks > node_size else "")


def device_name(device: torch.device) -> str:
    """The model name of a GPU; for other devices, their type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _collectives(
    group: dist.ProcessGroup | None, sizes: tuple[int, ...], device: torch.device, width: int
) -> tuple[Collective, ...]:
    """Measure collectives as fsdp2 issues them over the ranks of ``group``. All ranks of the job call this together."""
    assert group is not None
    axis = Axis(group, group.size(), group.rank())
    match_channels(axis)
    comm = comms.comm_for(axis, device, is_async=True)
    a = torch.ones(width, width, device=device)
    product = _seconds(lambda: a @ a, device)

    def one(name: str, nbytes: int) -> Collective:
        whole = torch.ones(nbytes // 4 // axis.size * axis.size, device=device)
        part = torch.ones(whole.numel() // axis.size, device=device)

        def start() -> Sequence[comms.Waitable]:
            is_gather = name == "all-gather"
            return comm.all_gather([whole], [part])() if is_gather else comm.reduce_scatter()([part], [whole])

        def finish(works: Sequence[comms.Waitable]) -> None:
            for work in works:
                work.wait()

        def products() -> None:
            for _ in range(count):
                torch.mm(a, a)

        def both() -> None:
            works = start()
            products()
            finish(works)

        dist.barrier()
        alone = _agreed(_seconds(lambda: finish(start()), device), device)
        count = math.ceil(alone / product) + 1  # longer than the transfer
        return Collective(name, nbytes, alone, _extra_seconds(both, products, device))

    return tuple(one(name, nbytes) for name in ("all-gather", "reduce-scatter") for nbytes in sizes)


def _agreed(seconds: float, device: torch.device) -> float:
    """The value of rank 0, so that all ranks run the same number of products."""
    agreed = torch.tensor(seconds, device=device)
    dist.broadcast(agreed, src=0)
    return agreed.item()


def _link(found: tuple[Collective, ...], num_ranks: int) -> Link | None:
    """Fit a line through the smallest and the largest all-gather; a ring has a hop per other rank. None without
    collectives."""
    if not found:
        return None
    small, *_, large = (each for each in found if each.name == "all-gather")
    moved = (large.nbytes - small.nbytes) * (num_ranks - 1) / num_ranks
    return Link(moved / max(large.alone - small.alone, 1e-9), small.alone / (num_ranks - 1))


def _between(whole: Link, in_node: Link, num_ranks: int, node_size: int) -> Link:
    """The link between nodes, from the link over all ranks, by solving the ring of ``gather`` for it. If links in a
    node are slower, this is a lower bound of its bandwidth."""
    hops, num_nodes = num_ranks - 1, num_ranks // node_size
    latency = (hops * whole.latency - (hops - num_nodes) * in_node.latency) / num_nodes
    return Link(whole.bandwidth / node_size, max(latency, 0.0))


def _contention(found: tuple[Collective, ...]) -> Contention:
    """The share of its rate that compute loses during a large collective."""
    if not found:
        return Contention()
    return Contention(compute=min(found[-1].beside / found[-1].alone, 0.95))


def add_measure(commands: Any) -> None:
    """Add the subcommand to ``commands`` of a parser."""
    parser = commands.add_parser(
        "measure",
        help="measure this machine for `python -m fsdp2 plan --gpu FILE`",
        description="With the links of a node: torchrun --nproc-per-node 8 -m fsdp2 measure machine.json. With those "
        "between nodes, too: the same on two nodes, with --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:PORT.",
    )
    parser.add_argument("file", type=Path, help="where to write the machine, as JSON")
    parser.add_argument("--sizes", default="1,16,64", help="MiB of collectives, ascending; default: %(default)s")
    parser.add_argument("--width", type=int, default=2048, help="of the square products; default: %(default)s")
    parser.set_defaults(run=_write)


def _write(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    def refuse(said: str) -> NoReturn:
        parser.exit(2, f"{parser.prog} measure: error: {said}\n")

    @contextmanager
    def writing() -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:  # a NUL in the name; a loop of links before Python 3.13
            why = getattr(error, "strerror", None) or error
            refuse(
                f"cannot write '{options.file}' ({why}). Pass a file in a folder that exists and that you may write to."
            )

    try:
        sizes = tuple(int(float(size) * 2**20) for size in options.sizes.split(","))
    except (ValueError, OverflowError):
        sizes = ()
    if len(sizes) < 2 or sizes[0] < 1 or any(smaller >= larger for smaller, larger in pairwise(sizes)):
        refuse(f"--sizes is '{options.sizes}', expected at least two sizes in MiB, ascending, such as 1,16,64.")
    if not 1 <= options.width <= _MOST_WIDTH:
        refuse(f"--width is {options.width}, expected 1 to {_MOST_WIDTH}.")
    with writing():
        check_writable(options.file)
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group()
    if not dist.is_initialized() or dist.get_rank() == 0:
        more = f", and all-gathers and reduce-scatters of {options.sizes} MiB" if dist.is_initialized() else ""
        print(f"measuring matrix products of width {options.width}, copies{more} ...", flush=True)
    found = measure(sizes, options.width)
    if not dist.is_initialized() or dist.get_rank() == 0:
        with writing():
            write_whole(options.file, json.dumps(fields_of(found.machine), indent=2))
        print(f"wrote {options.file}: {found.machine.name}")
        print(f"products: {found.machine.bf16_flops / 1e12:.3g} TFLOPS in bf16")
        print(_said_of_links(found.machine))
        for each in found.collectives:
            print(
                f"{each.name} of {each.nbytes / 2**20:g} MiB: {1e3 * each.alone:.2f} ms alone; it holds up products by "
                f"{1e3 * each.beside:.2f} ms"
            )
    if dist.is_initialized():
        dist.destroy_process_group()


def _said_of_links(machine: Machine) -> str:
    if machine.in_node is None or machine.network is None:
        return "links were not measured: to plan for several GPUs, run this under torchrun"
    in_node, network = (f"{link.bandwidth / 1e9:.3g} GB/s" for link in (machine.in_node, machine.network))
    if machine.in_node == machine.network:
        return f"links: {in_node}; those between nodes were not measured: to plan for several, run this on two of them"
    return f"links: {in_node} in a node, {network} between nodes, for each rank"
