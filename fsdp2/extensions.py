"""What a tensor subclass implements to decide what is all-gathered in its place, as typed protocols."""

from fsdp2.types import AllGatherExtension, MeshAllGatherExtension

__all__ = ["AllGatherExtension", "MeshAllGatherExtension"]
