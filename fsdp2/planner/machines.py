"""Machines by name: public figures, each with its source.

Peaks are for dense products, without sparsity. Vendors add both directions of a link; here it is one direction. The
first source is the vendor's page, as those below it quote it; sources marked as secondary name no origin. Latencies and
the share of a link's bandwidth that a collective reaches are assumptions; ``utilisation`` is calibrated on a published
row (docs/scale.md). ``python -m fsdp2 measure`` measures your own machine.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fsdp2.planner.machine import Algorithm, Contention, Link, Machine

_COPY_SHARE = 0.8  # share of the memory bandwidth that a copy kernel reaches
_UTILISATION = 0.433
_IN_NODE_LATENCY, _NETWORK_LATENCY = 3e-6, 15e-6

# Quotes the vendors' peaks: torchtitan's get_peak_flops.
_PEAKS = "https://github.com/pytorch/torchtitan/blob/main/torchtitan/tools/utils.py"
_GARDEN = "https://glennklockwood.com/garden/processors"
_LINKS = "https://alpha-one-index.github.io/ai-infra-index/specs/networking-interconnects.html"  # secondary
_MLPERF = "https://raw.githubusercontent.com/mlcommons/inference_results_v4.1/main/closed"  # systems, by their vendors
_A100 = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
    f"{_GARDEN}/A100",
    _LINKS,
)
_H100 = (
    "https://www.nvidia.com/en-us/data-center/h100/",
    _PEAKS,
    f"{_GARDEN}/h100",
    _LINKS,
    f"{_MLPERF}/NVIDIA/systems/DGX-H100_H100-SXM-80GBx8_TRT.json",  # the host's memory
)
_H200 = (
    "https://www.nvidia.com/en-us/data-center/h200/",
    _PEAKS,
    f"{_MLPERF}/NVIDIA/systems/H200-SXM-141GBx8_TRT_MaxQ.json",  # memory, links; the host's memory
    "https://lzwjava.github.io/nvidia-h200-gpu-specs-en",  # bandwidth of memory; secondary
)
_B200 = (
    "https://nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703",
    _PEAKS,
    "https://github.com/pytorch/ao/pull/4002",  # bandwidth of memory, as the driver has it; the data sheet says 8 TB/s
    "https://docs.vultr.com/inference-cookbook/cuda/getting-started/hardware-overview",  # memory, as nvidia-smi has it
    f"{_GARDEN}/B200",  # fp32, fp8, link; secondary
    "https://rillor.com/insights/connectx-7-vs-connectx-8-and-nvlink5",  # network; secondary
)
_MI300X = (
    "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
    _PEAKS,
    f"{_MLPERF}/AMD/systems/8xMI300X_2xEPYC-9374F.json",  # memory, host
    "https://www.emergentmind.com/topics/amd-mi300x-gpu",  # bandwidth of memory, links; secondary
    "https://localaimaster.com/blog/mi300x-deep-dive",  # fp8; secondary
    "https://www.yobitel.com/knowledge-base/amd-mi300x",  # network; secondary
)


def _node(
    name: str,
    device: str,
    *,
    bf16: float,
    fp8: float | None,
    memory: float,
    memory_bandwidth: float,
    link: float,
    network: float,
    sources: tuple[str, ...],
    fp32: float | None = None,
    host: float | None = None,
    host_memory: float | None = None,
) -> Machine:
    return Machine(
        name=name,
        bf16_flops=bf16,
        fp8_flops=fp8,
        utilisation=_UTILISATION,
        memory_nbytes=memory,
        copy_bandwidth=_COPY_SHARE * memory_bandwidth,
        node_size=8,
        in_node=Link(link, _IN_NODE_LATENCY),
        network=Link(network, _NETWORK_LATENCY),
        fp32_flops=fp32,
        host_bandwidth=host,
        host_memory_nbytes=host_memory,
        device=device,
        sources=sources,
    )


H100 = _node(
    "H100 SXM, 8 per node, 400 Gb/s each",
    "H100",
    bf16=989e12,
    fp8=1979e12,
    fp32=66.9e12,
    memory=80e9,
    memory_bandwidth=3.35e12,
    link=450e9,
    network=50e9,
    host=64e9,
    host_memory=2e12,
    sources=_H100,
)
H200 = replace(
    H100,
    name="H200 SXM, 8 per node, 400 Gb/s each",
    device="H200",
    memory_nbytes=141e9,
    copy_bandwidth=_COPY_SHARE * 4.8e12,
    sources=_H200,
)
B200 = _node(
    "B200 HGX, 8 per node, 400 Gb/s each",
    "B200",
    bf16=2250e12,
    fp8=4500e12,
    fp32=80e12,
    memory=179e9,
    memory_bandwidth=7.67e12,
    link=900e9,
    network=50e9,
    sources=_B200,
)
A100_80 = _node(
    "A100 SXM 80 GB, 8 per node, 200 Gb/s each",
    "A100",
    bf16=312e12,
    fp8=None,
    fp32=19.5e12,
    memory=80e9,
    memory_bandwidth=2.039e12,
    link=300e9,
    network=25e9,
    host=32e9,
    sources=_A100,
)
A100_40 = replace(
    A100_80,
    name="A100 SXM 40 GB, 8 per node, 200 Gb/s each",
    memory_nbytes=40e9,
    copy_bandwidth=_COPY_SHARE * 1.555e12,
)
MI300X = _node(
    "MI300X, 8 per node, 400 Gb/s each",
    "MI300X",
    bf16=1300e12,
    fp8=2600e12,
    memory=192e9,
    memory_bandwidth=5.3e12,
    link=448e9,
    network=50e9,
    host=64e9,
    host_memory=1.5 * 2**40,
    sources=_MI300X,
)
MACHINES = {"H100": H100, "H200": H200, "B200": B200, "A100-80": A100_80, "A100-40": A100_40, "MI300X": MI300X}


def machine_by_name(name: str) -> Machine:
    """One of :data:`MACHINES`, or the machine in a file that ``python -m fsdp2 measure`` wrote.

    Raises:
        ValueError: there is no such machine and no such file; the file does not describe a machine.
    """
    found = {key.lower(): machine for key, machine in MACHINES.items()}.get(name.lower())
    if found is not None:
        return found
    if not Path(name).is_file():
        raise ValueError(
            f"unknown machine '{name}': expected one of {', '.join(MACHINES)}, or the path of a file that "
            "`python -m fsdp2 measure` wrote."
        )
    try:
        return machine_from(json.loads(Path(name).read_text()))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"'{name}' describes no machine ({str(error).rstrip('.')}). Write it with `python -m fsdp2 measure`."
        ) from error


def machine_from(fields: dict[str, Any]) -> Machine:
    """The machine with these ``fields``, as returned by :func:`fields_of`."""
    return Machine(
        **{
            **fields,
            "in_node": _link(fields["in_node"]),
            "network": _link(fields["network"]),
            "algorithm": Algorithm(fields["algorithm"]),
            "contention": Contention(**fields["contention"]),
            "sources": tuple(fields["sources"]),
        }
    )


def _link(fields: dict[str, float] | None) -> Link | None:
    return None if fields is None else Link(**fields)


def fields_of(machine: Machine) -> dict[str, Any]:
    """``machine`` as plain data, for JSON."""
    return {**asdict(machine), "algorithm": machine.algorithm.value}
