"""Which public names of fsdp2 the programs use, and why they cannot use the others."""

from __future__ import annotations

import importlib
import inspect
import re

import torch

import fsdp2
from tests.programs import parts
from tests.programs.features import features, program_of
from tests.programs.source import source

ROOMS = ("checkpoint", "fsdp1", "memory", "optim", "planner", "report", "tensors", "testing")
_CLASSES = {"FSDPModule": fsdp2.FSDPModule, "FullyShardedDataParallel": fsdp2.FullyShardedDataParallel}
_ERROR = "programs see errors by their text"
_INTERFACE = "an interface that users implement; tests/harness/extensions.py does"
_RESULT = "what a function returns; programs read no more of it than they need"
_MAPPING = "names and layouts of other checkpoints: tests/distributed/test_checkpoint_mapping.py"
_SENT_GRADIENTS = "rounded on their way, by hand: tests/distributed/test_gradient_wires.py"
_PLANNER = "plans before a model runs: tests/unit/planner"
_DICTS = "state dicts of FSDP1 in other forms: tests/parity/fsdp1/test_random_programs.py draws them"
_FLAT = "programs wrap with use_orig_params=True; flat parameters: tests/parity/fsdp1/test_random_programs.py"
# By name, or room and name.
NOT_IN_PROGRAMS = {
    **dict.fromkeys(("CommunicationError", "ExtensionError", "MemoryLimitError", "ScheduleError"), _ERROR),
    **dict.fromkeys(("CPUOffloadPolicy", "OffloadPolicy"), "tests/harness/offload.py makes the policy"),
    **dict.fromkeys(("FSDPModule", "GradientReductionHandle", "UnshardHandle"), "a class that fsdp2 makes objects of"),
    **dict.fromkeys(("ParamPlacement", "DataParallelMeshDims"), "options of placement: tests/parity/test_placement.py"),
    **dict.fromkeys(("ExpertMeshes", "expert_meshes"), "needs 4 ranks; the mesh `experts` is made by hand"),
    **dict.fromkeys(("install", "uninstall"), "the way `install`, by tests/harness/runtimes.py"),
    **dict.fromkeys(
        (
            "AsyncSave",
            "BucketManifest",
            "FullParamStream",
            "LoadedKeys",
            "Mirror",
            "Restored",
            "StreamedBucket",
            "StreamedTensor",
        ),
        _RESULT,
    ),
    **dict.fromkeys(
        ("CheckpointMapping", "Concat", "Stack", "Transpose", "WeightRule", "transformers_mapping"), _MAPPING
    ),
    **dict.fromkeys(("MergedLora", "merge_lora"), "models of peft: tests/clients"),
    **dict.fromkeys(
        ("LocalOptimStateDictConfig", "LocalStateDictConfig", "OptimStateDictConfig", "OptimStateKeyType"), _DICTS
    ),
    **dict.fromkeys(
        ("FullOptimStateDictConfig", "FullStateDictConfig", "StateDictConfig", "StateDictSettings"), _DICTS
    ),
    **dict.fromkeys(("ShardedOptimStateDictConfig", "ShardedStateDictConfig", "StateDictType"), _DICTS),
    **dict.fromkeys(("FSDPExtensions", "set_fsdp_extensions"), "tests/parity/fsdp1/test_extensions.py"),
    "FlatParameter": _FLAT,
    "BackwardPrefetch": "changes the order of gathers only: tests/parity/fsdp1/test_random_programs.py",
    "ShardedGradScaler": "steps by its own rules: tests/parity/fsdp1/test_gradients.py",
    **dict.fromkeys(("MemoryPlan", "OffloadChoice", "UnitBytes", "UnitMemory"), _RESULT),
    **dict.fromkeys(("ActivationOffload", "UnitActivations"), _RESULT),
    **dict.fromkeys(("Matrix", "MatrixRule", "WholeMatrices", "whole_matrices"), "Muon uses them in programs"),
    "AdamW8bit": "a rounding error of a gradient may give another code: tests/distributed/test_adamw8bit.py",
    "newton_schulz_cost": "a number for plans of owners: tests/unit/optim",
    "muon_groups": "makes groups by names of layers, which the models of programs do not have",
    **dict.fromkeys(fsdp2.planner.__all__, _PLANNER),
    **dict.fromkeys(("Comparison", "Report", "compare_reports"), "read after a step: tests/unit/report"),
    **dict.fromkeys(("AllGatherExtension", "MeshAllGatherExtension", "WireFormatTensor"), _INTERFACE),
    "MXBlocks": "what mxfp8 gathers are made of",
    **dict.fromkeys(("Float8Scaling", "Float8Tensor"), "what float8 gathers are made of"),
    "TwoTensor": "all parameters of a model must be of this class: tests/distributed/test_extension_training.py",
    **dict.fromkeys(("SHAPES", "check_all_gather_extension"), "a check for writers of tensor subclasses"),
    "check_gradient_wire": "a check for writers of gradient wires",
    **dict.fromkeys(("GradientWire", "load_wire_residuals", "wire_residuals"), _SENT_GRADIENTS),
    # Methods
    "set_post_optim_event": "has no effect on the CPU",
    "set_reduce_scatter_divide_factor": "the old name of set_gradient_divide_factor",
    "set_symm_mem_for_comm": "needs NCCL",
    **dict.fromkeys(("check_is_root", "fsdp_modules", "get_state_dict_type", "set_state_dict_type"), _DICTS),
    **dict.fromkeys(("state_dict_type", "full_optim_state_dict", "sharded_optim_state_dict"), _DICTS),
    **dict.fromkeys(("rekey_optim_state_dict", "scatter_full_optim_state_dict", "shard_full_optim_state_dict"), _DICTS),
    "flatten_sharded_optim_state_dict": _DICTS,
    "register_comm_hook": "tests/parity/fsdp1/test_gradients.py",
    **dict.fromkeys(("compute_device", "mixed_precision", "process_group", "world_size"), "read by clients only"),
}


def public_names() -> set[str]:
    """The public names of the package and its rooms, and the public methods of units and wrappers."""
    rooms = (fsdp2, *(importlib.import_module(f"fsdp2.{room}") for room in ROOMS))
    names = {name for room in rooms for name in room.__all__}
    for cls in _CLASSES.values():
        names |= {name for name in dir(cls) if not name.startswith("_") and not hasattr(torch.nn.Module, name)}
    return names


def used_names() -> set[str]:
    """All names in the programs that have one value of a feature."""
    base = {"micros": 2, "place": "middle"}  # without which some values mean nothing
    programs = [program_of({**base, name: value}) for name, values in features(4).items() for value in values]
    texts = [inspect.getsource(parts), *map(source, programs)]
    return set(re.findall(r"\w+", "".join(texts)))
