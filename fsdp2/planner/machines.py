"""Machines by name: what others have measured on them, each figure with its source.

Peaks are for dense products, without sparsity. Vendors add both directions of a link; here it is one direction. The
first source of each machine is the vendor's page, as those after it quote it; sources marked as secondary name no
origin. No figure comes from a training run. What nobody seems to have measured is marked as assumed: latencies, and
shares that another machine reaches. ``python -m fsdp2 measure`` measures your own machine.
"""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from typing import Any

from fsdp2.extras.foreign_files import read_json
from fsdp2.planner.machine import NETWORK_SHARE, Algorithm, Contention, Link, Machine, Reached

_GIB = 2**30
_IN_NODE_LATENCY, _NETWORK_LATENCY = 3e-6, 15e-6  # assumed
_FP32_SHARE = 0.8  # of the peak of fp32 outside of tensor cores that products reach: assumed
# Of what GPUs of one kind reach: the slowest of eight H200s reached 683, in the mean they reached 699. The least of
# eight normal variates is 1.43 standard deviations below the mean. Assumed for all GPUs but B200s.
_SPREAD = (1 - 683 / 699) / 1.43
_CHANNELS = 24  # NCCL occupies a processor per channel

# Quotes the vendors' peaks: torchtitan's get_peak_flops.
_PEAKS = "peaks: https://github.com/pytorch/torchtitan/blob/main/torchtitan/tools/utils.py"
_GARDEN = "https://glennklockwood.com/garden/processors"
_LINKS = "links' peaks, secondary: https://alpha-one-index.github.io/ai-infra-index/specs/networking-interconnects.html"
_MLPERF = "https://raw.githubusercontent.com/mlcommons/inference_results_v4.1/main/closed"  # systems, by their vendors
_BEKMAN = "https://github.com/stas00/ml-engineering/blob/master"
_PRODUCTS = f"sustained products, measured by S. Bekman: {_BEKMAN}/compute/accelerator/benchmarks"
_FP8_PRODUCTS = (
    "products in fp8 in a short run, and the share of it that is sustained in bf16, measured by S. Bekman: "
    f"{_BEKMAN}/compute/accelerator"
)
_NETWORK = "47 GB/s of an adapter's 50, by NVIDIA's engineers: https://github.com/NVIDIA/nccl-tests/issues/290"
_OVERLAP = (
    "24 processors of an H100 are taken by an all-gather: "
    "https://forums.developer.nvidia.com/t/compute-communication-overlap-causes-severe-gemm-performance-degradation-because-of-tail-effect/337991"
    "; compute beside collectives takes 18.9% longer in the mean: https://arxiv.org/abs/2507.03114"
)
_KERNELS = (
    "5 µs per kernel: products of many sizes, measured for XLA: "
    "https://github.com/openxla/xla/blob/main/xla/service/gpu/model/matmul_interpolator_data.h"
)
_ATTENTION = "attention, FlashAttention-2 on H100, measured by its authors: https://arxiv.org/abs/2407.08608"
_A100 = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
    f"peaks: {_GARDEN}/A100",
    _LINKS,
    "sustained products, 8192 wide, measured by H. He: https://www.thonking.ai/p/strangely-matrix-multiplications",
    "attention, 73% and 63% of the peak, less a tenth for a causal mask, by its authors: https://arxiv.org/abs/2307.08691",
    "copies, measured on the PCIe card: https://github.com/chanzhennan/ChipBenchmarker",
    "link in a node, secondary: https://docs.alayanew.com/en/docs/tech-blog/2026-05-06-nccl-tests",
    "memory, as torch has it: https://github.com/levihsu/OOTDiffusion/issues/235, "
    "40 GB: https://github.com/TianheWu/CoSeR/issues/10",
    _NETWORK,
    _OVERLAP,
    _KERNELS,
)
_H100 = (
    "https://www.nvidia.com/en-us/data-center/h100/",
    _PEAKS,
    f"peaks: {_GARDEN}/h100",
    _LINKS,
    f"the host's memory: {_MLPERF}/NVIDIA/systems/DGX-H100_H100-SXM-80GBx8_TRT.json",
    "memory, as torch has it: https://github.com/vllm-project/vllm/issues/27508",
    _PRODUCTS,
    _FP8_PRODUCTS,
    _ATTENTION,
    f"link in a node, without SHARP, measured by S. Bekman: {_BEKMAN}/network/benchmarks/results",
    _NETWORK,
    _OVERLAP,
    _KERNELS,
)
_H200 = (
    "https://www.nvidia.com/en-us/data-center/h200/",
    *_H100[1:4],
    f"links; the host's memory: {_MLPERF}/NVIDIA/systems/H200-SXM-141GBx8_TRT_MaxQ.json",
    "bandwidth of memory, secondary: https://lzwjava.github.io/nvidia-h200-gpu-specs-en",
    *_H100[6:],
)
_B200 = (
    "https://nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703",
    _PEAKS,
    # the data sheet says 8 TB/s
    "memory and its bandwidth, as the driver has them: https://github.com/pytorch/ao/pull/4002",
    f"peaks of fp32, fp8 and link, secondary: {_GARDEN}/B200",
    "network, secondary: https://rillor.com/insights/connectx-7-vs-connectx-8-and-nvlink5",
    _PRODUCTS,
    _FP8_PRODUCTS,
    # torch calls cuDNN, which is assumed to be 15% slower
    "attention, FlashAttention-4, measured by its authors: https://github.com/Dao-AILab/flash-attention/pull/2280",
    _NETWORK,
    _OVERLAP,
    _KERNELS,
)
_MI300X = (
    "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
    _PEAKS,
    f"memory, host: {_MLPERF}/AMD/systems/8xMI300X_2xEPYC-9374F.json",
    "bandwidth of memory, links, secondary: https://www.emergentmind.com/topics/amd-mi300x-gpu",
    "network, secondary: https://www.yobitel.com/knowledge-base/amd-mi300x",
    _PRODUCTS,
    "products in fp8, 45% of the peak, and copies, secondary: "
    "https://aiweekly.co/alerts/amd-mi300x-hits-only-45-of-peak-flops-in-practice",
)


H100 = Machine(
    name="H100 SXM, 8 per node, 400 Gb/s each",
    device="H100",
    bf16_flops=989e12,
    reached=Reached(
        bf16=699e12,  # of eight H200s at once, which have the same processors and limit
        fp8=699 / 828 * 1453e12,  # 1453 in a short run; in bf16, 699 of 828
        fp32=_FP32_SHARE * 66.9e12,
        attention=340e12,
        attention_backward=290e12,
        num_processors=132,
    ),
    contention=Contention(compute=_CHANNELS / 132),
    memory_nbytes=79.11 * _GIB,
    copy_bandwidth=0.9 * 3.35e12,
    node_size=8,
    in_node=Link(368e9, _IN_NODE_LATENCY),
    network=Link(NETWORK_SHARE * 50e9, _NETWORK_LATENCY),
    watts=700,
    spread=_SPREAD,
    kernel_latency=5e-6,
    host_bandwidth=64e9,
    host_memory_nbytes=2e12,
    sources=_H100,
)
H200 = replace(
    H100,
    name="H200 SXM, 8 per node, 400 Gb/s each",
    device="H200",
    memory_nbytes=141e9,
    copy_bandwidth=0.9 * 4.8e12,
    sources=_H200,
)
B200 = replace(
    H100,
    name="B200 HGX, 8 per node, 400 Gb/s each",
    device="B200",
    bf16_flops=2250e12,
    reached=Reached(
        bf16=1426e12,  # of eight at once; the slowest reached 1352
        fp8=1426 / 1745 * 3432e12,  # 3432 in a short run; in bf16, 1426 of 1745
        fp32=_FP32_SHARE * 80e12,
        attention=1200e12,
        attention_backward=950e12,
        num_processors=148,
    ),
    contention=Contention(compute=_CHANNELS / 148),
    memory_nbytes=178.35 * _GIB,
    copy_bandwidth=0.9 * 7.67e12,
    in_node=Link(0.82 * 900e9, _IN_NODE_LATENCY),  # the share of H100s: assumed
    watts=1000,
    spread=(1 - 1352 / 1426) / 1.43,
    host_bandwidth=None,
    host_memory_nbytes=None,
    sources=_B200,
)
A100_80 = replace(
    H100,
    name="A100 SXM 80 GB, 8 per node, 200 Gb/s each",
    device="A100",
    bf16_flops=312e12,
    reached=Reached(
        bf16=257e12,
        fp8=None,
        fp32=_FP32_SHARE * 19.5e12,
        attention=205e12,
        attention_backward=177e12,
        num_processors=108,
    ),
    contention=Contention(compute=_CHANNELS / 108),
    memory_nbytes=79.25 * _GIB,
    copy_bandwidth=0.8 * 2.039e12,
    in_node=Link(235e9, _IN_NODE_LATENCY),
    network=Link(NETWORK_SHARE * 25e9, _NETWORK_LATENCY),
    watts=400,
    host_bandwidth=32e9,
    host_memory_nbytes=None,
    sources=_A100,
)
A100_40 = replace(
    A100_80,
    name="A100 SXM 40 GB, 8 per node, 200 Gb/s each",
    memory_nbytes=39.5 * _GIB,
    copy_bandwidth=0.8 * 1.555e12,
)
MI300X = replace(
    H100,
    name="MI300X, 8 per node, 400 Gb/s each",
    device="MI300X",
    bf16_flops=1300e12,
    reached=Reached(
        bf16=660e12,
        fp8=0.45 * 2600e12,
        fp32=None,
        attention=400e12,  # assumed
        attention_backward=250e12,  # assumed
        num_processors=304,
    ),
    contention=Contention(compute=_CHANNELS / 304),
    memory_nbytes=192 * _GIB,
    copy_bandwidth=0.81 * 5.3e12,
    in_node=Link(310e9, _IN_NODE_LATENCY),  # assumed
    watts=750,
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
    made = {"reached": Reached(**fields["reached"]), "contention": Contention(**fields["contention"])}
    read = {**fields, **links, **made, "sources": tuple(fields["sources"])}
    return Machine(**{**read, "algorithm": Algorithm(fields["algorithm"])})


def fields_of(machine: Machine) -> dict[str, Any]:
    """``machine`` as plain data, for JSON."""
    return {**asdict(machine), "algorithm": machine.algorithm.value}
