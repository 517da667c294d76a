"""Models a machine by what it reaches, and the cost of its products and collectives: work over a measured rate, plus a
latency that bandwidth cannot reduce.

Bandwidths are bytes per second of one GPU in one direction, latencies are seconds per hop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from statistics import NormalDist
from typing import Any

from fsdp2.extras.checked import AT_LEAST_1, Limit, check, checked
from fsdp2.planner.work import Attention, Product

NETWORK_SHARE = (
    0.94  # 47 GB/s of an adapter's 50, by NVIDIA's engineers: https://github.com/NVIDIA/nccl-tests/issues/290
)
# How the rate of products falls with the power limit: 600 W instead of 700 W cost 10 to 15% of a step
# (https://factryze.ai/scale-atlas/power/power-capping; secondary).
POWER_EXPONENT = 0.87
# Fused attention over this many tokens reaches half of what it reaches over many (H100, causal: arXiv 2407.08608).
SHORT_LENGTH = 350
_TILES = ((256, 128), (128, 256), (128, 128))  # of which the library takes the best
_ITEMSIZES = {"bf16": 2, "fp8": 1, "fp32": 4}
_RESULT_ITEMSIZES = {"bf16": 2, "fp8": 2, "fp32": 4}
# A step on a slower machine would take longer than a number can say.
_RATE = Limit(1, or_inf=True)
_GIGABITS = Limit(1e-3, or_inf=True)
_DELAY = Limit(0, 3600)
_SHARE = Limit(0, 1, below=True)
_SPREAD = Limit(0, 0.2, below=True)


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
    """A connection, with the ``bandwidth`` in bytes/s that a large collective reaches, and ``latency`` in s per hop."""

    bandwidth: float
    latency: float


@checked(compute=_SHARE, transfer=_SHARE)
@dataclass(frozen=True)
class Contention:
    """The share of its rate that compute loses while a transfer runs, and that a transfer loses while compute runs."""

    compute: float = 0.0
    transfer: float = 0.0


@checked(
    **dict.fromkeys(("bf16", "fp8", "fp32", "attention", "attention_backward"), _RATE),
    num_processors=AT_LEAST_1,
)
@dataclass(frozen=True)
class Reached:
    """What kernels reach, in floating-point operations per second, while the device works without a pause.

    Attributes:
        bf16, fp8, fp32: products of large matrices of random numbers in these dtypes; None where it is not known.
        attention, attention_backward: fused attention in bf16 over long sequences.
        num_processors: a product is computed in tiles, as many at once as there are processors.
    """

    bf16: float
    fp8: float | None
    fp32: float | None
    attention: float
    attention_backward: float
    num_processors: int


@checked(
    **dict.fromkeys(("bf16_flops", "copy_bandwidth", "watts", "host_bandwidth"), _RATE),
    **dict.fromkeys(("memory_nbytes", "host_memory_nbytes", "node_size", "channels"), AT_LEAST_1),
    **dict.fromkeys(("kernel_latency", "launch_latency"), _DELAY),
    spread=_SPREAD,
)
@dataclass(frozen=True)
class Machine:
    """Nodes of ``node_size`` GPUs, each with a network adapter of its own. All rates are what was measured, apart from
    ``bf16_flops``.

    Attributes:
        bf16_flops: the vendor's peak of dense matrix products.
        reached: what products and attention reach.
        copy_bandwidth: bytes per second that a copy kernel or an optimizer reads and writes.
        in_node, network: the links in a node and between nodes; None where they were not measured.
        watts: the power limit of a GPU at which ``reached`` holds; None where it is not known.
        spread: the standard deviation of what GPUs of one kind reach, as a share of ``reached``, which is their mean.
        kernel_latency: seconds that a kernel takes in addition to its work.
        contention: how concurrent compute and transfers slow each other down.
        host_bandwidth: bytes per second between one GPU and the host, in one direction.
        host_memory_nbytes: memory of a node's host; None where it is not known.
        device: part of the name that torch gives the device, such as "H100"; None where it is not known.
        launch_latency: seconds from the start of a collective to its first byte.
        channels: how many tensors of one coalesced launch are sent concurrently; further ones take turns.
        sources: what each figure is, who measured it, and where it was published.
    """

    name: str
    bf16_flops: float
    reached: Reached
    memory_nbytes: float
    copy_bandwidth: float
    node_size: int
    in_node: Link | None
    network: Link | None
    watts: float | None = None
    spread: float = 0.0
    kernel_latency: float = 0.0
    launch_latency: float = 10e-6
    channels: int = 16
    algorithm: Algorithm = Algorithm.RING
    contention: Contention = Contention()
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

    def limited_to(self, watts: float) -> Machine:
        """This machine with another power limit. Only products slow down: other kernels take less power.

        Raises:
            ValueError: the limit at which its products were measured is not known.
        """
        check("limited_to: watts", watts, "float", _RATE)
        before = self._known("watts", self.watts)
        share = (watts / before) ** POWER_EXPONENT
        products: dict[str, Any] = {name: rate and rate * share for name, rate in self._products().items()}
        name = f"{self.name}, limited to {watts:g} W"
        return replace(self, name=name, watts=watts, reached=replace(self.reached, **products))

    def with_network(self, gigabits: float) -> Machine:
        """This machine with a network of so many Gb/s per GPU."""
        check("with_network: gigabits", gigabits, "float", _GIGABITS)
        name = f"{self.name.rsplit(', ', 1)[0]}, {gigabits:g} Gb/s each"
        latency = self.links()[1].latency
        return replace(self, name=name, network=Link(NETWORK_SHARE * gigabits * 1e9 / 8, latency))

    def product_seconds(self, product: Product, dtype: str) -> float:
        """The time of ``product`` in ``dtype``: that of all rounds of its tiles, or of its bytes if this is longer.
        Tiles at the edge and the last round leave processors idle."""
        used = max(self._used(product, *tile) for tile in _TILES)
        compute = product.flops / used / self._known(f"products in {dtype}", self._products()[dtype])
        result_numel = product.m * product.n * product.times
        nbytes = product.operand_numel * _ITEMSIZES[dtype] + result_numel * _RESULT_ITEMSIZES[dtype]
        return max(compute, nbytes / self.copy_bandwidth)

    def _used(self, product: Product, height: int, width: int) -> float:
        """The share of all processors' time in which they compute results, with tiles of this size."""
        num_tiles = product.times * math.ceil(product.m / height) * math.ceil(product.n / width)
        num_rounds = math.ceil(num_tiles / self.reached.num_processors)
        results = product.times * product.m * product.n
        return results / (num_rounds * self.reached.num_processors * height * width)

    def attention_seconds(self, attention: Attention, dtype: str) -> float:
        """The time of ``attention`` in ``dtype``; short sequences fill fewer processors."""
        rate = self.reached.attention_backward if attention.is_backward else self.reached.attention
        if dtype == "fp32":
            rate *= self._known(f"products in {dtype}", self.reached.fp32) / self.reached.bf16
        return attention.flops * (1 + SHORT_LENGTH / attention.length) / rate

    def slowest_of(self, num_gpus: int) -> float:
        """What the slowest of ``num_gpus`` is expected to reach, as a share of the mean: all others wait for it."""
        if num_gpus == 1:
            return 1.0
        quantile = (num_gpus - 0.375) / (num_gpus + 0.25)  # of the largest of so many normal variates (Blom, 1958)
        return 1 - self.spread * NormalDist().inv_cdf(quantile)

    def to_host(self) -> float:
        return self._known("host_bandwidth", self.host_bandwidth)

    def knows(self, dtype: str) -> bool:
        """Whether it is known what products in ``dtype`` reach."""
        return self._products()[dtype] is not None

    def _products(self) -> dict[str, float | None]:
        return {"bf16": self.reached.bf16, "fp8": self.reached.fp8, "fp32": self.reached.fp32}

    def _known(self, name: str, value: float | None) -> float:
        if value is None:
            raise ValueError(
                f"machine '{self.name}' has no figure for {name}. Fill it in with dataclasses.replace, or pass a "
                "machine that `python -m fsdp2 measure` measured."
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
    in_node, network = (link.bandwidth for link in machine.links())
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
