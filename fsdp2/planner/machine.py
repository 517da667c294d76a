"""Models a machine and the cost of its collectives: bytes over bandwidth, plus a latency that bandwidth cannot reduce.

Bandwidths are bytes per second of one GPU in one direction, latencies are seconds per hop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from fsdp2.extras.checked import AT_LEAST_1, Limit, checked

# A step on a slower machine would take longer than a number can say.
_RATE = Limit(1, or_inf=True)
_SHARE_OF_RATE = Limit(1e-6, or_inf=True)
_DELAY = Limit(0, 3600)
_SHARE = Limit(0, 1, below=True)


class Resource(Enum):
    """Shared resources: operations that use the same one at the same time slow each other down."""

    __hash__ = object.__hash__

    COMPUTE = "compute"
    IN_NODE = "in-node link"
    NETWORK = "network"


class Algorithm(Enum):
    """How all-gather and reduce-scatter pass data on: latency grows with the ranks, or with their logarithm."""

    RING = "ring"
    TREE = "tree"


@checked(bandwidth=_RATE, latency=_DELAY)
@dataclass(frozen=True)
class Link:
    """A connection, with ``bandwidth`` in bytes/s and ``latency`` in s per hop."""

    bandwidth: float
    latency: float


@checked(compute=_SHARE, transfer=_SHARE)
@dataclass(frozen=True)
class Contention:
    """The share of its rate that compute loses while a transfer runs, and that a transfer loses while compute runs."""

    compute: float = 0.0
    transfer: float = 0.0


@checked(
    **dict.fromkeys(("bf16_flops", "fp8_flops", "fp32_flops", "copy_bandwidth", "host_bandwidth"), _RATE),
    **dict.fromkeys(("utilisation", "bandwidth_efficiency"), _SHARE_OF_RATE),
    **dict.fromkeys(("memory_nbytes", "host_memory_nbytes"), AT_LEAST_1),
    **dict.fromkeys(("node_size", "channels"), AT_LEAST_1),
    launch_latency=_DELAY,
)
@dataclass(frozen=True)
class Machine:
    """Nodes of ``node_size`` GPUs, each with a network adapter of its own.

    Attributes:
        bf16_flops, fp8_flops, fp32_flops: peak of dense matrix products; None where it is not known.
        in_node, network: the links in a node and between nodes; None where they were not measured.
        utilisation: the share of the peak that matrix products and attention reach.
        contention: how concurrent compute and transfers slow each other down.
        sources: where the figures come from.
        host_bandwidth: bytes per second between one GPU and the host, in one direction.
        host_memory_nbytes: memory of a node's host; None where it is not known.
        device: part of the name that torch gives the device, such as "H100"; None where it is not known.
        bandwidth_efficiency: the share of a link's bandwidth that a large collective reaches.
        copy_bandwidth: bytes per second that a copy kernel or an optimizer reads and writes.
        launch_latency: seconds from the start of a collective to its first byte.
        channels: how many tensors of one coalesced launch are sent concurrently; further ones take turns.
    """

    name: str
    bf16_flops: float
    fp8_flops: float | None
    utilisation: float
    memory_nbytes: float
    copy_bandwidth: float
    node_size: int
    in_node: Link | None
    network: Link | None
    bandwidth_efficiency: float = 0.8
    launch_latency: float = 10e-6
    channels: int = 16
    algorithm: Algorithm = Algorithm.RING
    contention: Contention = Contention()
    fp32_flops: float | None = None
    host_bandwidth: float | None = None
    host_memory_nbytes: float | None = None
    device: str | None = None
    sources: tuple[str, ...] = ()

    def links(self) -> tuple[Link, Link]:
        """The links within a node and between nodes.

        Raises:
            ValueError: they are not known.
        """
        if self.in_node is None or self.network is None:
            raise ValueError(
                f"machine '{self.name}' has no figures for links between GPUs. Run `torchrun --nproc-per-node 8 -m "
                "fsdp2 measure FILE` with all GPUs of a node, or of two nodes, or fill in in_node and network."
            )
        return self.in_node, self.network

    def is_made_of(self, device: str) -> bool:
        """Whether ``device``, as torch names it, is one of this machine's. False if the machine's device is unknown."""
        return self.device is not None and self.device.lower() in device.lower()

    def peak_fp8(self) -> float:
        return self._known("fp8_flops", self.fp8_flops)

    def peak_fp32(self) -> float:
        return self._known("fp32_flops", self.fp32_flops)

    def to_host(self) -> float:
        return self._known("host_bandwidth", self.host_bandwidth)

    def _known(self, name: str, value: float | None) -> float:
        if value is None:
            raise ValueError(
                f"machine '{self.name}' has no figure for {name}. Pass dataclasses.replace(machine, {name}=...)."
            )
        return value


@dataclass(frozen=True)
class Ranks:
    """The ranks of one process group: how many, and how many of them share a node."""

    size: int
    per_node: int

    @property
    def num_nodes(self) -> int:
        """The number of nodes; the last one may have fewer ranks."""
        return -(-self.size // self.per_node)


def ranks_of(size: int, stride: int, node_size: int) -> Ranks:
    """``size`` ranks, each ``stride`` after the one before it, on nodes of ``node_size``."""
    return Ranks(size, max(1, min(size, node_size // stride)))


@dataclass(frozen=True)
class Transfer:
    """One launch: ``latency`` seconds, then ``seconds`` on ``resource`` if nothing else uses it. Copies take ``before``
    and ``behind`` seconds."""

    latency: float
    seconds: float
    resource: Resource
    before: float = 0.0
    behind: float = 0.0

    @property
    def alone(self) -> float:
        """The time without copies."""
        return self.latency + self.seconds


def gather(machine: Machine, ranks: Ranks, nbytes: float, num_tensors: int = 1) -> Transfer:
    """An all-gather that fills ``nbytes`` on every rank, or a reduce-scatter that reads them.

    In a ring each rank receives all parts but its own. A ring through nodes enters each node once per GPU in it, so the
    GPUs' adapters share the data, and it is as fast as the slower of those adapters together and the link in the node.
    """
    if ranks.size == 1:
        return Transfer(0.0, 0.0, Resource.IN_NODE)
    hops = _ring_latency if machine.algorithm is Algorithm.RING else _tree_latency
    rounds = math.ceil(num_tensors / machine.channels)
    bandwidth, resource = _bandwidth(machine, ranks)
    seconds = nbytes * (ranks.size - 1) / ranks.size / bandwidth
    return Transfer(machine.launch_latency + rounds * hops(machine, ranks), seconds, resource)


def all_reduce(machine: Machine, ranks: Ranks, nbytes: float) -> Transfer:
    """A sum of ``nbytes`` over all ranks, which sends each byte twice. Backends may use trees, so the faster counts."""
    if ranks.size == 1:
        return Transfer(0.0, 0.0, Resource.IN_NODE)
    latency = 2 * min(_ring_latency(machine, ranks), _tree_latency(machine, ranks))
    bandwidth, resource = _bandwidth(machine, ranks)
    seconds = 2 * nbytes * (ranks.size - 1) / ranks.size / bandwidth
    return Transfer(machine.launch_latency + latency, seconds, resource)


def _bandwidth(machine: Machine, ranks: Ranks) -> tuple[float, Resource]:
    in_node, network = (link.bandwidth * machine.bandwidth_efficiency for link in machine.links())
    if ranks.num_nodes == 1:
        return in_node, Resource.IN_NODE
    return min(in_node, network * ranks.per_node), Resource.NETWORK


def _ring_latency(machine: Machine, ranks: Ranks) -> float:
    """A part passes through all other ranks, one after another; one hop per node leaves the node."""
    in_node, network = machine.links()
    between = min(ranks.num_nodes, ranks.size - 1) if ranks.num_nodes > 1 else 0
    return between * network.latency + (ranks.size - 1 - between) * in_node.latency


def _tree_latency(machine: Machine, ranks: Ranks) -> float:
    in_node, network = machine.links()
    between = math.ceil(math.log2(ranks.num_nodes)) * network.latency
    return between + math.ceil(math.log2(ranks.per_node)) * in_node.latency
