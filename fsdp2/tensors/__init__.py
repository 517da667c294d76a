"""Tensor subclasses for parameters: wire formats, and formats in memory."""

from __future__ import annotations

from fsdp2.tensors.bfloat16 import BFloat16AllGatherTensor
from fsdp2.tensors.convert import wrap_parameters
from fsdp2.tensors.float8 import Float8AllGatherTensor, Float8Scaling, Float8Tensor, precompute_float8_scales
from fsdp2.tensors.int8 import Int8AllGatherTensor
from fsdp2.tensors.mxfp8 import MXBlocks, MXFP8AllGatherTensor
from fsdp2.tensors.nf4 import NF4Tensor
from fsdp2.tensors.protocols import AllGatherExtension, MeshAllGatherExtension
from fsdp2.tensors.two_tensor import TwoTensor
from fsdp2.tensors.wire import WireFormatTensor

__all__ = [
    "AllGatherExtension",
    "BFloat16AllGatherTensor",
    "Float8AllGatherTensor",
    "Float8Scaling",
    "Float8Tensor",
    "Int8AllGatherTensor",
    "MXBlocks",
    "MXFP8AllGatherTensor",
    "MeshAllGatherExtension",
    "NF4Tensor",
    "TwoTensor",
    "WireFormatTensor",
    "precompute_float8_scales",
    "wrap_parameters",
]
