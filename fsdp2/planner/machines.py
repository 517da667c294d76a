"""Machines by name: public figures, each with its source.

Peaks are for dense products, without sparsity. Vendors add both directions of a link; here it is one direction. The
first source is the vendor's page, as those below it quote it; sources marked as secondary name no origin. Latencies and
the share of a link's bandwidth that a collective reaches are assumptions; ``utilisation`` is calibrated on a published
row (docs/scale.md). ``python -m fsdp2 measure`` measures your own machine.
"""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from typing import Any

from fsdp2.extras.foreign_files import read_json
from fsdp2.planner.machine import Algorithm, Contention, Link, Machine

_COPY_SHARE = 0.8  # share of the memory bandwidth that a copy kernel reaches
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


H100 = Machine(
    name="H100 SXM, 8 per node, 400 Gb/s each",
    device="H100",
    bf16_flops=989e12,
    fp8_flops=1979e12,
    fp32_flops=66.9e12,
    utilisation=0.433,
    memory_nbytes=80e9,
    copy_bandwidth=_COPY_SHARE * 3.35e12,
    node_size=8,
    in_node=Link(450e9, _IN_NODE_LATENCY),
    network=Link(50e9, _NETWORK_LATENCY),
    host_bandwidth=64e9,
    host_memory_nbytes=2e12,
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
B200 = replace(
    H100,
    name="B200 HGX, 8 per node, 400 Gb/s each",
    device="B200",
    bf16_flops=2250e12,
    fp8_flops=4500e12,
    fp32_flops=80e12,
    memory_nbytes=179e9,
    copy_bandwidth=_COPY_SHARE * 7.67e12,
    in_node=Link(900e9, _IN_NODE_LATENCY),
    host_bandwidth=None,
    host_memory_nbytes=None,
    sources=_B200,
)
A100_80 = replace(
    H100,
    name="A100 SXM 80 GB, 8 per node, 200 Gb/s each",
    device="A100",
    bf16_flops=312e12,
    fp8_flops=None,
    fp32_flops=19.5e12,
    copy_bandwidth=_COPY_SHARE * 2.039e12,
    in_node=Link(300e9, _IN_NODE_LATENCY),
    network=Link(25e9, _NETWORK_LATENCY),
    host_bandwidth=32e9,
    host_memory_nbytes=None,
    sources=_A100,
)
A100_40 = replace(
    A100_80,
    name="A100 SXM 40 GB, 8 per node, 200 Gb/s each",
    memory_nbytes=40e9,
    copy_bandwidth=_COPY_SHARE * 1.555e12,
)
MI300X = replace(
    H100,
    name="MI300X, 8 per node, 400 Gb/s each",
    device="MI300X",
    bf16_flops=1300e12,
    fp8_flops=2600e12,
    fp32_flops=None,
    memory_nbytes=192e9,
    copy_bandwidth=_COPY_SHARE * 5.3e12,
    in_node=Link(448e9, _IN_NODE_LATENCY),
    host_memory_nbytes=1.5 * 2**40,
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
    if not os.path.exists(name):
        raise ValueError(
            f"unknown machine '{name}': expected one of {', '.join(MACHINES)}, or the path of a file that "
            "`python -m fsdp2 measure` wrote."
        )
    try:
        return machine_from(read_json(name))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"'{name}' describes no machine ({str(error).rstrip('.')}). Write it with `python -m fsdp2 measure`."
        ) from error


def machine_from(fields: dict[str, Any]) -> Machine:
    """The machine with these ``fields``, as returned by :func:`fields_of`."""
    links = {name: fields[name] and Link(**fields[name]) for name in ("in_node", "network")}
    read = {**fields, **links, "sources": tuple(fields["sources"]), "contention": Contention(**fields["contention"])}
    return Machine(**{**read, "algorithm": Algorithm(fields["algorithm"])})


def fields_of(machine: Machine) -> dict[str, Any]:
    """``machine`` as plain data, for JSON."""
    return {**asdict(machine), "algorithm": machine.algorithm.value}
