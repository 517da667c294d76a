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
from tests.harness.golden import texts_beside

PAGE, SHOWN = ROOT / "docs" / "migrating.md", ROOT / "tests" / "docs" / "migrating" / "shown_by.md"
TABLES = {title: dict(table(SHOWN, title)) for level, title in read(SHOWN).headings if level == 2}
NAMES, ARGUMENTS, METHODS = (set(TABLES[kind]) for kind in ("Names", "Arguments", "Methods"))
TESTS = sorted({test for rows in TABLES.values() for tests in rows.values() for test in tests.split(", ")})

of_the_checked_torch = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason=f"the page was made for torch 2.13, not {torch.__version__}"
)


def _methods(cls: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(cls, callable) if not name.startswith("_")}


def _arguments(package: Any) -> set[str]:
    """Of ``fully_shard``, and the fields of policies."""
    policies = ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy", "DataParallelMeshDims")
    found = {f"{policy}.{field.name}" for policy in policies for field in fields(getattr(package, policy))}
    return found | set(inspect.signature(package.fully_shard).parameters)


def _leaves_out(mark: pytest.Mark) -> bool:
    condition = mark.args[0] if mark.args else mark.kwargs.get("condition", True)
    return mark.name in ("skip", "skipif", "xfail") and bool(condition)


@pytest.mark.parametrize("name", TESTS)  # with [a case] that has a golden text, where a test has a table of them
def test_what_shows_a_row_is_a_test_that_runs_and_must_pass(name: str) -> None:
    file, _, function = name.partition("::")
    module: Any = importlib.import_module("tests." + file.removesuffix(".py").replace("/", "."))
    function, is_case, _ = function.partition("[")
    test = getattr(module, function)
    assert function.startswith("test_")
    assert not is_case or name.partition("::")[2] in texts_beside(module.__file__).names()
    marks = [*getattr(test, "pytestmark", []), *getattr(module, "pytestmark", [])]
    assert not any(_leaves_out(mark) for mark in marks), marks


def test_every_row_is_shown() -> None:
    on_page = {title: [cells[0] for cells in table(PAGE, title)] for _, title in read(PAGE).headings}
    found = {title: sorted(cells) for title, cells in on_page.items() if cells}
    assert found == {title: sorted(rows) for title, rows in list(TABLES.items())[3:]}


@of_the_checked_torch
def test_every_name_argument_field_and_method_is_shown_and_is_there() -> None:
    added = {"_set_unshard_async_op"}
    assert set(_fully_shard.__all__) | {"Comm", "AllGather", "ReduceScatter"} == NAMES
    assert {*fsdp2.__all__, *dir(fsdp2.core.comms)} >= NAMES
    assert _arguments(theirs) == ARGUMENTS
    assert _arguments(fsdp2) >= ARGUMENTS
    assert _methods(theirs.FSDPModule) | added == METHODS
    assert _methods(fsdp2.FSDPModule) | added >= METHODS


@of_the_checked_torch
def test_additions_of_later_versions_are_there() -> None:
    cells = [cells[0] for cells in table(PAGE, "What torch 2.15 adds")]
    listed = {name for cell in cells for name in re.findall(r"`([a-z]\w*)\(", cell)}
    of_2_15 = {"set_manual_backward_finalization", "finalize_backward", "set_keep_unsharded_storage"}
    assert listed == of_2_15 | {"reset_iter_state"}
    assert listed <= _methods(fsdp2.FSDPModule)
