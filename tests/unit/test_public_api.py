"""Drop-in: the names, arguments and defaults of torch's fully_shard."""

from __future__ import annotations

import importlib
import inspect
import operator
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs

import fsdp2
from fsdp2 import fsdp1
from tests.harness.golden import Check
from tests.harness.messages import error_of

# What torch does not have; keyword-only, and the default does what torch's users expect.
OWN_ARGUMENTS = {"keep_unreduced"}
# What later versions of torch added behind all other arguments, with these defaults.
NEWER_ARGUMENTS = {("param_dtype_override_fn", inspect.Parameter.KEYWORD_ONLY, "None")}  # 2.15
OWN_FIELDS = {("reduce_wire", inspect.Parameter.KEYWORD_ONLY, "None")}

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


def test_public_names(golden: Check) -> None:
    golden("\n".join(sorted(fsdp2.__all__)))
    assert all(getattr(fsdp2, name).__doc__ for name in fsdp2.__all__)
    extensions = importlib.import_module("fsdp2.tensors")  # protocols are imported by either name
    for name in ("AllGatherExtension", "MeshAllGatherExtension"):
        assert getattr(fsdp2.tensors, name) is getattr(extensions, name)
    assert issubclass(fsdp2.ScheduleError, RuntimeError)


def test_names_of_the_wrapper_class_are_torchs_and_in_its_folder() -> None:
    same = set(theirs.__all__) & set(fsdp1.__all__) - {"FullyShardedDataParallel"}
    assert all(getattr(fsdp1, name) is getattr(theirs, name) for name in same)
    assert fsdp2.FullyShardedDataParallel is fsdp1.FullyShardedDataParallel


@pytest.mark.ci
def test_importing_the_package_imports_no_fsdp1_of_torch() -> None:
    """It takes longer to import than all of fsdp2."""
    code = "import sys, fsdp2; assert 'torch.distributed.fsdp' not in sys.modules; fsdp2.FullyShardedDataParallel"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.ci
def test_rooms_are_there_after_the_import_and_are_loaded_when_they_are_used() -> None:
    code = (
        "import sys, fsdp2; rooms = fsdp2._ROOMS; "
        "assert not {f'fsdp2.{room}' for room in rooms} & sys.modules.keys(); "
        "assert all(hasattr(getattr(fsdp2, room), name) for room in rooms for name in getattr(fsdp2, room).__all__); "
        "assert len(fsdp2.__all__) <= 30 and fsdp2.__all__ == sorted(fsdp2.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    folders = {path.parent.name for path in Path(fsdp2.__file__).parent.glob("*/__init__.py")}
    assert folders == {*fsdp2._ROOMS, "core", "extras"}


@on_the_checked_torch
def test_the_wrapper_class_has_torchs_arguments() -> None:
    ours, torchs = fsdp1.FullyShardedDataParallel, theirs.FullyShardedDataParallel
    assert _arguments(ours) == _arguments(torchs)
    for name in set(_public_methods(ours)) & {name for name in vars(torchs) if not name.startswith("_")}:
        expected = [name for name, _, _ in _arguments(getattr(torchs, name))]
        found = [name for name, _, _ in _arguments(getattr(ours, name))]
        assert "args" in expected or found[: len(expected)] == expected, name


@on_the_checked_torch
def test_names_and_methods_are_those_of_torch() -> None:
    public = {name for name in theirs.__all__ if not name.startswith("_")}
    assert public <= {*fsdp2.__all__, *fsdp1.__all__}
    for cls in ("FSDPModule", "UnshardHandle"):
        assert set(_public_methods(getattr(theirs, cls))) <= set(_public_methods(getattr(fsdp2, cls)))


SHARED_METHODS = sorted(set(_public_methods(theirs.FSDPModule)) & set(_public_methods(fsdp2.FSDPModule)))
FUNCTIONS = ["fully_shard", "register_fsdp_forward_method", "share_comm_ctx"]


@pytest.mark.parametrize("name", [*FUNCTIONS, *(f"FSDPModule.{name}" for name in SHARED_METHODS)])
def test_function_takes_the_arguments_of_torch(name: str) -> None:
    ours, torchs = (_arguments(operator.attrgetter(name)(package)) for package in (fsdp2, theirs))
    assert [each for each in ours if each[0] not in OWN_ARGUMENTS] == torchs


@pytest.mark.parametrize("name", ["MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"])
def test_policy_is_built_and_prints_as_that_of_torch(name: str) -> None:
    ours, other = getattr(fsdp2, name), getattr(theirs, name)
    expected = _arguments(other)
    mine = [argument for argument in _arguments(ours) if argument not in OWN_FIELDS]
    extra = [argument for argument in mine if argument not in expected]
    assert mine == expected + extra
    assert set(extra) <= NEWER_ARGUMENTS
    assert _printed(ours()) == _printed(other())
    assert set(extra) or repr(ours()) == repr(other())  # where torch has each argument, the texts are the same
    assert ours() == ours()
    assert hash(ours()) == hash(ours())
    assert ours.__dataclass_params__.frozen


def test_policy_prints_its_override(golden: Check) -> None:
    policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=len)  # type: ignore[arg-type]
    golden(repr(policy))
    assert policy != fsdp2.MixedPrecisionPolicy(torch.bfloat16)
    wired = fsdp2.MixedPrecisionPolicy(reduce_wire=torch.bfloat16)
    assert repr(wired).endswith("reduce_wire=torch.bfloat16)")
    assert wired != fsdp2.MixedPrecisionPolicy()


def test_without_a_process_group_torchrun_is_named(golden: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    golden(error_of(lambda: fsdp2.fully_shard(torch.nn.Linear(2, 2))))


def test_names_to_complete_are_those_of_users() -> None:
    names = {name for name in dir(fsdp2) if not name.startswith("_")}
    assert names == {*fsdp2.__all__, *fsdp2._ROOMS}
