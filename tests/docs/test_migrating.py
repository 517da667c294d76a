"""Everything public in torch's FSDP2 is there in fsdp2 and tried beside torch's; the page lists what differs."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch.distributed.fsdp import _fully_shard  # without the wrapper class and its like

import fsdp2
from tests.docs.markdown import ROOT, table
from tests.docs.migrating.rows import Rows
from tests.docs.migrating.test_fsdp2_methods import METHODS
from tests.docs.migrating.test_fsdp2_names import ARGUMENTS, NAMES

PAGE = ROOT / "docs" / "migrating.md"

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason=f"the page was made for torch 2.13, not {torch.__version__}"
)


def _listed(title: str, pattern: str) -> set[str]:
    """What ``pattern`` finds in the first cells under ``title``."""
    return {name for cells in table(PAGE, title) for name in re.findall(pattern, cells[0])}


def _tried(rows: Rows, pattern: str) -> set[str]:
    """What ``pattern`` finds in the rows that tests try, on the page or not."""
    return {name for cell in rows for name in re.findall(pattern, cell)}


def _methods(cls: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(cls, callable) if not name.startswith("_")}


def _arguments(package: object) -> set[str]:
    return set(inspect.signature(package.fully_shard).parameters)  # type: ignore[attr-defined]


def _policy_fields(package: object) -> set[str]:
    policies = ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy", "DataParallelMeshDims")
    return {f"{policy}.{field.name}" for policy in policies for field in fields(getattr(package, policy))}


def test_every_name_is_tried_and_is_there() -> None:
    tried = _tried(NAMES, r"`([A-Za-z]\w*)`")
    assert tried == set(_fully_shard.__all__) | {"AllGather", "ReduceScatter"}
    assert tried <= set(fsdp2.__all__)


def test_every_argument_and_field_is_tried_and_is_there() -> None:
    tried = _tried(ARGUMENTS, r"`([\w.]+)`")
    assert tried == _arguments(theirs) | _policy_fields(theirs)
    assert tried <= _arguments(fsdp2) | _policy_fields(fsdp2)


def test_every_method_is_tried_and_is_there() -> None:
    tried = _tried(METHODS, r"`([a-z]\w*)\(")
    assert tried == _methods(theirs.FSDPModule)
    assert tried <= _methods(fsdp2.FSDPModule)


def test_every_argument_of_a_method_is_taken() -> None:
    """Ours may take more, by keyword only and with a default."""
    for name in _methods(theirs.FSDPModule):
        methods = (getattr(package.FSDPModule, name) for package in (theirs, fsdp2))
        expected, found = (list(inspect.signature(method).parameters.values()) for method in methods)
        shared, more = found[: len(expected)], found[len(expected) :]
        assert [(p.name, p.default) for p in shared] == [(p.name, p.default) for p in expected], name
        assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in more), name


def test_additions_of_later_versions_are_there() -> None:
    listed = _listed("What torch 2.15 adds", r"`([a-z]\w*)\(")
    of_2_15 = {"set_manual_backward_finalization", "finalize_backward", "set_keep_unsharded_storage"}
    assert listed == of_2_15 | {"reset_iter_state"}
    assert listed <= _methods(fsdp2.FSDPModule)
