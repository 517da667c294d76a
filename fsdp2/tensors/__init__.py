"""Formats of parameters in memory and on their way, as tensor subclasses, and of gradients on their way."""

from __future__ import annotations

from fsdp2.extras.gradient_wires import GradientWire
from fsdp2.tensors.bfloat16 import BFloat16AllGatherTensor
from fsdp2.tensors.convert import wrap_parameters
from fsdp2.tensors.float8 import Float8AllGatherTensor, Float8Scaling, Float8Tensor, precompute_float8_scales
from fsdp2.tensors.int8 import Int8AllGatherTensor, Int8Wire
from fsdp2.tensors.mxfp8 import MXBlocks, MXFP8AllGatherTensor
from fsdp2.tensors.nf4 import NF4Tensor
from fsdp2.tensors.protocols import AllGatherExtension, MeshAllGatherExtension
from fsdp2.tensors.two_tensor import TwoTensor
from fsdp2.tensors.wire import WireFormatTensor
from fsdp2.tensors.wire_residuals import load_wire_residuals, wire_residuals

__all__ = [
    "AllGatherExtension",
    "BFloat16AllGatherTensor",
    "Float8AllGatherTensor",
    "Float8Scaling",
    "Float8Tensor",
    "GradientWire",
    "Int8AllGatherTensor",
    "Int8Wire",
    "MXBlocks",
    "MXFP8AllGatherTensor",
    "MeshAllGatherExtension",
    "NF4Tensor",
    "TwoTensor",
    "WireFormatTensor",
    "load_wire_residuals",
    "precompute_float8_scales",
    "wire_residuals",
    "wrap_parameters",
]
