"""Typed protocols that a tensor subclass implements to choose what is all-gathered instead of its shard."""

from fsdp2.tensors.protocols import AllGatherExtension, MeshAllGatherExtension

__all__ = ["AllGatherExtension", "MeshAllGatherExtension"]
