"""Drop-in: the names, arguments and defaults of torch's fully_shard, but for what is listed here as still to come."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from expecttest import assert_expected_inline

import fsdp2
from fsdp2 import fsdp1
from tests.harness.messages import error_of

# What torch 2.13 has and fsdp2 does not have yet. A name that arrives is taken off this list, or a test fails.
ARGUMENTS_TO_COME: set[str] = set()
# What torch does not have; keyword-only, and the default does what torch's users expect.
OWN_ARGUMENTS = {"tied_weights"}
OWN_ARGUMENTS_OF_METHODS = {"keep_unreduced"}
METHODS_TO_COME: set[str] = set()
# What later versions of torch added behind all other arguments, with these defaults.
NEWER_ARGUMENTS = {("param_dtype_override_fn", inspect.Parameter.KEYWORD_ONLY, "None")}  # 2.15
NAMES_TO_COME: set[str] = set()
# What belongs to FullyShardedDataParallel is in fsdp2.fsdp1.
NAMES_OF_THE_WRAPPER_CLASS = {
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
}

on_the_checked_torch = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason=f"the lists were made for torch 2.13, not {torch.__version__}"
)


def _public_methods(cls: type) -> dict[str, Any]:
    return {name: member for name, member in inspect.getmembers(cls, callable) if not name.startswith("_")}


def _arguments(function: Any) -> list[tuple[str, Any, str]]:
    """Name, kind and default of each argument; policies of both packages print alike."""
    parameters = inspect.signature(function).parameters.values()
    return [(parameter.name, parameter.kind, _printed(parameter.default)) for parameter in parameters]


def _printed(value: object) -> str:
    """The text of ``value``, less the argument of policies that torch has since 2.15."""
    return repr(value).replace(", param_dtype_override_fn=None", "")


SHARED_METHODS = sorted(set(_public_methods(theirs.FSDPModule)) & set(_public_methods(fsdp2.FSDPModule)))


def test_public_names() -> None:
    assert_expected_inline(
        "\n".join(sorted(fsdp2.__all__)),
        """\
AllGather
AutoShard
CPUOffloadPolicy
Comm
CommunicationError
DataParallelMeshDims
ExtensionError
FSDPExtensions
FSDPModule
FullyShardedDataParallel
GradientReductionHandle
LoadedKeys
MatrixRule
MemoryLimitError
MixedPrecisionPolicy
Muon
Observer
OffloadPolicy
ParamPlacement
ReduceScatter
ScheduleError
TiedWeights
UnshardHandle
WholeMatrices
Workload
allow_inner_losses
auto_shard
clip_grad_norm_
extensions
flatten_optimizer
fully_shard
install
installed
load_safetensors
memory_plan
muon_groups
no_sync
plan
register_fsdp_forward_method
report
reshard_to
save_safetensors
set_fsdp_extensions
share_comm_ctx
stream_full_params
trace
uninstall
unsharded
whole_matrices""",
    )


def test_every_public_name_is_there_and_documented() -> None:
    for name in fsdp2.__all__:
        assert getattr(fsdp2, name).__doc__, name


def test_names_of_the_wrapper_class_are_in_its_folder() -> None:
    assert set(fsdp1.__all__) >= NAMES_OF_THE_WRAPPER_CLASS
    same = NAMES_OF_THE_WRAPPER_CLASS - {"FullyShardedDataParallel"}
    assert all(getattr(fsdp1, name) is getattr(theirs, name) for name in same)
    assert fsdp2.FullyShardedDataParallel is fsdp1.FullyShardedDataParallel


@pytest.mark.ci
def test_importing_the_package_imports_no_fsdp1_of_torch() -> None:
    """It takes longer to import than all of fsdp2."""
    code = "import sys, fsdp2; assert 'torch.distributed.fsdp' not in sys.modules; fsdp2.FullyShardedDataParallel"
    subprocess.run([sys.executable, "-c", code], check=True)


@on_the_checked_torch
def test_the_wrapper_class_has_torchs_arguments() -> None:
    ours, torchs = fsdp1.FullyShardedDataParallel, theirs.FullyShardedDataParallel
    assert _arguments(ours) == _arguments(torchs)
    for name in set(_public_methods(ours)) & {name for name in vars(torchs) if not name.startswith("_")}:
        expected = [name for name, _, _ in _arguments(getattr(torchs, name))]
        found = [name for name, _, _ in _arguments(getattr(ours, name))]
        assert "args" in expected or found[: len(expected)] == expected, name


@on_the_checked_torch
def test_names_are_those_of_torch_but_for_the_listed_ones() -> None:
    public = {name for name in theirs.__all__ if not name.startswith("_")}
    assert public - set(fsdp2.__all__) == NAMES_TO_COME | (NAMES_OF_THE_WRAPPER_CLASS - {"FullyShardedDataParallel"})


def test_fully_shard_takes_the_arguments_of_torch_but_for_the_listed_ones() -> None:
    expected = [argument for argument in _arguments(theirs.fully_shard) if argument[0] not in ARGUMENTS_TO_COME]
    assert [each for each in _arguments(fsdp2.fully_shard) if each[0] not in OWN_ARGUMENTS] == expected


@on_the_checked_torch
def test_methods_are_those_of_torch_but_for_the_listed_ones() -> None:
    missing = set(_public_methods(theirs.FSDPModule)) - set(_public_methods(fsdp2.FSDPModule))
    assert missing == METHODS_TO_COME


@pytest.mark.parametrize("name", SHARED_METHODS)
def test_method_takes_the_arguments_of_torch(name: str) -> None:
    found = [each for each in _arguments(getattr(fsdp2.FSDPModule, name)) if each[0] not in OWN_ARGUMENTS_OF_METHODS]
    assert found == _arguments(getattr(theirs.FSDPModule, name))


@pytest.mark.parametrize("name", ["register_fsdp_forward_method", "share_comm_ctx"])
def test_function_takes_the_arguments_of_torch(name: str) -> None:
    assert _arguments(getattr(fsdp2, name)) == _arguments(getattr(theirs, name))


@pytest.mark.parametrize("name", ["MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"])
def test_policy_is_built_and_prints_as_that_of_torch(name: str) -> None:
    ours, other = getattr(fsdp2, name), getattr(theirs, name)
    expected = _arguments(other)
    extra = [argument for argument in _arguments(ours) if argument not in expected]
    assert _arguments(ours) == expected + extra
    assert set(extra) <= NEWER_ARGUMENTS
    assert _printed(ours()) == _printed(other())
    assert set(extra) or repr(ours()) == repr(other())  # where torch has each argument, the texts are the same
    assert ours() == ours()
    assert hash(ours()) == hash(ours())


def test_policy_prints_its_override() -> None:
    policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=len)  # type: ignore[arg-type]
    assert_expected_inline(
        repr(policy),
        """MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=None, output_dtype=None, cast_forward_inputs=True, param_dtype_override_fn=<built-in function len>)""",  # noqa: E501
    )
    assert policy != fsdp2.MixedPrecisionPolicy(torch.bfloat16)


def test_policies_are_frozen() -> None:
    with pytest.raises(AttributeError):
        fsdp2.MixedPrecisionPolicy().param_dtype = torch.bfloat16  # type: ignore[misc]


def test_protocols_of_extensions_are_imported_by_either_name() -> None:
    from fsdp2.extensions import AllGatherExtension, MeshAllGatherExtension

    assert fsdp2.extensions.AllGatherExtension is AllGatherExtension
    assert fsdp2.extensions.MeshAllGatherExtension is MeshAllGatherExtension


def test_unshard_handle_has_the_methods_of_torch() -> None:
    assert set(_public_methods(theirs.UnshardHandle)) <= set(_public_methods(fsdp2.UnshardHandle))


def test_schedule_error_is_a_runtime_error() -> None:
    assert issubclass(fsdp2.ScheduleError, RuntimeError)


def test_observer_that_overrides_nothing_takes_every_report() -> None:
    observer = fsdp2.Observer()
    observer.on_event("pre_forward", "unit")
    observer.on_action("unshard", "unit", 0)
    observer.on_transition("unit", "SHARDED", "UNSHARDING")


def test_trace_lays_actions_out_under_their_event() -> None:
    trace = fsdp2.trace.Trace()
    trace.on_event("pre_forward", "blocks.0")
    trace.on_action("unshard", "blocks.0", 4096)
    trace.on_action("reduce", "blocks.0", 0)
    assert_expected_inline(
        str(trace),
        """\
pre_forward blocks.0
    unshard blocks.0  4096 bytes
    reduce blocks.0""",
    )
    assert trace.actions() == ["unshard blocks.0", "reduce blocks.0"]
    trace.clear()
    assert str(trace) == ""


def test_without_a_process_group_torchrun_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert_expected_inline(
        error_of(lambda: fsdp2.fully_shard(torch.nn.Linear(2, 2))),
        """\
ValueError: fully_shard: there is no process group, and torch cannot make one: Error initializing
torch.distributed using env:// rendezvous: environment variable RANK expected, but not set
Start the program with torchrun, which sets these variables: torchrun --nproc-per-node 2 train.py""",
    )
