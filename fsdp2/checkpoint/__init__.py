"""Files in and out, mappings between a model and its files, streams to inference engines, and moves to other ranks."""

from fsdp2.checkpoint.background_save import AsyncSave, async_save
from fsdp2.checkpoint.checkpointable import from_checkpointable, to_checkpointable
from fsdp2.checkpoint.from_transformers import transformers_mapping
from fsdp2.checkpoint.load_weights import LoadedKeys, load_safetensors
from fsdp2.checkpoint.lora import MergedLora, merge_lora
from fsdp2.checkpoint.mapping import CheckpointMapping, Concat, Stack, Transpose, WeightRule
from fsdp2.checkpoint.mirrored import Mirror, Restored, mirrored
from fsdp2.checkpoint.optimizer_states import optimizer_state_to_load
from fsdp2.checkpoint.reshard import reshard_to
from fsdp2.checkpoint.save_weights import save_safetensors
from fsdp2.checkpoint.stream_plan import BucketManifest, StreamedBucket, StreamedTensor
from fsdp2.checkpoint.stream_weights import FullParamStream, stream_full_params

__all__ = [
    "AsyncSave",
    "BucketManifest",
    "CheckpointMapping",
    "Concat",
    "FullParamStream",
    "LoadedKeys",
    "MergedLora",
    "Mirror",
    "Restored",
    "Stack",
    "StreamedBucket",
    "StreamedTensor",
    "Transpose",
    "WeightRule",
    "async_save",
    "from_checkpointable",
    "load_safetensors",
    "merge_lora",
    "mirrored",
    "optimizer_state_to_load",
    "reshard_to",
    "save_safetensors",
    "stream_full_params",
    "to_checkpointable",
    "transformers_mapping",
]
