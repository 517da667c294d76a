"""Every row of the migration page, and everything public in torch's FSDP2, has a test that shows it."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch.distributed.fsdp import _fully_shard  # without the wrapper class and its like

import fsdp2
from tests.docs.markdown import ROOT, read, table
from tests.docs.migrating.shown_by import ARGUMENTS, METHODS, NAMES, ROWS

PAGE = ROOT / "docs" / "migrating.md"
TABLES = [*ROWS.values(), NAMES, ARGUMENTS, METHODS]
TESTS = sorted({test for rows in TABLES for tests in rows.values() for test in tests})

of_the_checked_torch = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason=f"the page was made for torch 2.13, not {torch.__version__}"
)


def _methods(cls: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(cls, callable) if not name.startswith("_")}


def _arguments(package: object) -> set[str]:
    return set(inspect.signature(package.fully_shard).parameters)  # type: ignore[attr-defined]


def _policy_fields(package: object) -> set[str]:
    policies = ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy", "DataParallelMeshDims")
    return {f"{policy}.{field.name}" for policy in policies for field in fields(getattr(package, policy))}


def _leaves_out(mark: pytest.Mark) -> bool:
    condition = mark.args[0] if mark.args else mark.kwargs.get("condition", True)
    return mark.name in ("skip", "skipif", "xfail") and bool(condition)


@pytest.mark.parametrize("name", TESTS)
def test_what_shows_a_row_is_a_test_that_runs_and_must_pass(name: str) -> None:
    file, _, function = name.partition("::")
    module: Any = importlib.import_module("tests." + file.removesuffix(".py").replace("/", "."))
    test = getattr(module, function)
    assert function.startswith("test_")
    marks = [*getattr(test, "pytestmark", []), *getattr(module, "pytestmark", [])]
    assert not any(_leaves_out(mark) for mark in marks), marks


def test_every_row_is_shown() -> None:
    on_page = {title: [cells[0] for cells in table(PAGE, title)] for _, title in read(PAGE).headings}
    found = {title: sorted(cells) for title, cells in on_page.items() if cells}
    assert found == {title: sorted(rows) for title, rows in ROWS.items()}
    assert all(all(rows.values()) for rows in TABLES)


@of_the_checked_torch
def test_every_name_is_shown_and_is_there() -> None:
    assert set(NAMES) == set(_fully_shard.__all__) | {"Comm", "AllGather", "ReduceScatter"}
    assert set(NAMES) <= set(fsdp2.__all__)


@of_the_checked_torch
def test_every_argument_and_field_is_shown_and_is_there() -> None:
    assert set(ARGUMENTS) == _arguments(theirs) | _policy_fields(theirs)
    assert set(ARGUMENTS) <= _arguments(fsdp2) | _policy_fields(fsdp2)


@of_the_checked_torch
def test_every_method_is_shown_and_is_there() -> None:
    assert set(METHODS) == _methods(theirs.FSDPModule) | {"_set_unshard_async_op"}
    assert set(METHODS) <= _methods(fsdp2.FSDPModule) | {"_set_unshard_async_op"}


@of_the_checked_torch
def test_additions_of_later_versions_are_there() -> None:
    cells = [cells[0] for cells in table(PAGE, "What torch 2.15 adds")]
    listed = {name for cell in cells for name in re.findall(r"`([a-z]\w*)\(", cell)}
    of_2_15 = {"set_manual_backward_finalization", "finalize_backward", "set_keep_unsharded_storage"}
    assert listed == of_2_15 | {"reset_iter_state"}
    assert listed <= _methods(fsdp2.FSDPModule)
