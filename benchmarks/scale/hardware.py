"""What a machine is, and what a collective on it costs: bytes over bandwidth, and a latency that no bandwidth shortens.

Bandwidths are bytes per second of one GPU in one direction, latencies are seconds per hop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class Resource(Enum):
    """What operations share: those that use the same one at the same time slow each other down."""

    __hash__ = object.__hash__

    COMPUTE = "compute"
    IN_NODE = "in-node link"
    NETWORK = "network"


class Algorithm(Enum):
    """How all-gather and reduce-scatter pass data on: latency grows with the ranks, or with their logarithm."""

    RING = "ring"
    TREE = "tree"


@dataclass(frozen=True)
class Link:
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Contention:
    """The share of its rate that compute loses while a transfer runs, and a transfer while compute runs."""

    compute: float = 0.0
    transfer: float = 0.0


@dataclass(frozen=True)
class Hardware:
    """Nodes of ``node_size`` GPUs, each with a network adapter of its own.

    Attributes:
        bf16_flops, fp8_flops: peak of dense matrix products.
        utilisation: the share of the peak that a step without communication reaches.
        bandwidth_efficiency: the share of a link's bandwidth that a large collective reaches.
        copy_bandwidth: bytes per second that a copy kernel or an optimizer reads and writes.
        launch_latency: seconds from the start of a collective to its first byte.
        channels: how many tensors of one coalesced launch travel beside each other; more of them take turns.
    """

    name: str
    bf16_flops: float
    fp8_flops: float
    utilisation: float
    memory_nbytes: float
    copy_bandwidth: float
    node_size: int
    in_node: Link
    network: Link
    bandwidth_efficiency: float = 0.8
    launch_latency: float = 10e-6
    channels: int = 16
    algorithm: Algorithm = Algorithm.RING
    contention: Contention = Contention()


@dataclass(frozen=True)
class Ranks:
    """The ranks of one process group: how many, and how many of them share a node."""

    size: int
    per_node: int

    @property
    def num_nodes(self) -> int:
        return self.size // self.per_node


def ranks_of(size: int, stride: int, node_size: int) -> Ranks:
    """``size`` ranks, each ``stride`` after the one before it, on nodes of ``node_size``."""
    return Ranks(size, max(1, min(size, node_size // stride)))


@dataclass(frozen=True)
class Transfer:
    """One launch: ``latency`` seconds, then ``seconds`` on ``resource`` if nothing else uses it."""

    latency: float
    seconds: float
    resource: Resource

    @property
    def alone(self) -> float:
        return self.latency + self.seconds


def gather(hardware: Hardware, ranks: Ranks, nbytes: float, num_tensors: int = 1) -> Transfer:
    """An all-gather that fills ``nbytes`` on every rank, or a reduce-scatter that reads them.

    In a ring each rank receives all parts but its own. A ring through nodes enters each node once per GPU in it, so the
    GPUs' adapters share the data, and it is as fast as the slower of those adapters together and the link in the node.
    """
    if ranks.size == 1:
        return Transfer(0.0, 0.0, Resource.IN_NODE)
    hops = _ring_latency if hardware.algorithm is Algorithm.RING else _tree_latency
    rounds = math.ceil(num_tensors / hardware.channels)
    bandwidth, resource = _bandwidth(hardware, ranks)
    seconds = nbytes * (ranks.size - 1) / ranks.size / bandwidth
    return Transfer(hardware.launch_latency + rounds * hops(hardware, ranks), seconds, resource)


def all_reduce(hardware: Hardware, ranks: Ranks, nbytes: float) -> Transfer:
    """A sum of ``nbytes`` over all ranks: each byte travels twice. Backends have trees for it, so the faster counts."""
    if ranks.size == 1:
        return Transfer(0.0, 0.0, Resource.IN_NODE)
    latency = 2 * min(_ring_latency(hardware, ranks), _tree_latency(hardware, ranks))
    bandwidth, resource = _bandwidth(hardware, ranks)
    seconds = 2 * nbytes * (ranks.size - 1) / ranks.size / bandwidth
    return Transfer(hardware.launch_latency + latency, seconds, resource)


def _bandwidth(hardware: Hardware, ranks: Ranks) -> tuple[float, Resource]:
    in_node = hardware.in_node.bandwidth * hardware.bandwidth_efficiency
    if ranks.num_nodes == 1:
        return in_node, Resource.IN_NODE
    network = hardware.network.bandwidth * ranks.per_node * hardware.bandwidth_efficiency
    return min(in_node, network), Resource.NETWORK


def _ring_latency(hardware: Hardware, ranks: Ranks) -> float:
    """A part passes all other ranks, one after the other; one hop per node leaves it."""
    between = min(ranks.num_nodes, ranks.size - 1) if ranks.num_nodes > 1 else 0
    return between * hardware.network.latency + (ranks.size - 1 - between) * hardware.in_node.latency


def _tree_latency(hardware: Hardware, ranks: Ranks) -> float:
    between = math.ceil(math.log2(ranks.num_nodes)) * hardware.network.latency
    return between + math.ceil(math.log2(ranks.per_node)) * hardware.in_node.latency


# Peaks, memory and link rates are the vendor's public figures. The share of the peak is calibrated (published.py).
# Latencies are of the order of the constants NCCL tunes its rings with, quoted from memory and rounded.
H100 = Hardware(
    name="H100 SXM, 8 per node, 400 Gb/s each",
    bf16_flops=989e12,
    fp8_flops=1979e12,
    utilisation=0.386,
    memory_nbytes=80e9,
    copy_bandwidth=0.8 * 3.35e12,
    node_size=8,
    in_node=Link(bandwidth=450e9, latency=3e-6),
    network=Link(bandwidth=50e9, latency=15e-6),
)
H200 = Hardware(
    name="H200 SXM, 8 per node, 400 Gb/s each",
    bf16_flops=989e12,
    fp8_flops=1979e12,
    utilisation=0.386,
    memory_nbytes=141e9,
    copy_bandwidth=0.8 * 4.8e12,
    node_size=8,
    in_node=Link(bandwidth=450e9, latency=3e-6),
    network=Link(bandwidth=50e9, latency=15e-6),
)
