"""The reference pages are what their script writes, and leave no public name out."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import fsdp2
import fsdp2.extensions
import fsdp2.tensors
import fsdp2.testing
from docs.reference import generate
from tests.docs.markdown import ROOT, read

FOLDER = ROOT / "docs" / "reference"


PAGES: dict[str, str] = generate.render_all()


def _entries(pattern: str) -> set[str]:
    return {title.strip("`") for path in FOLDER.glob(pattern) for _, title in read(path).headings}


def test_the_committed_pages_are_those_that_the_script_writes() -> None:
    committed = {path.name: path.read_text() for path in FOLDER.glob("*.md")}
    differing = sorted({name for name in committed | PAGES if committed.get(name) != PAGES.get(name)})
    assert not differing, "run `python docs/reference/generate.py`"


@pytest.mark.parametrize("package", [fsdp2, fsdp2.tensors, fsdp2.testing, fsdp2.extensions], ids=lambda p: p.__name__)
def test_every_public_name_has_an_entry(package: Any) -> None:
    names = {name for name in package.__all__ if not inspect.ismodule(getattr(package, name))}
    assert names <= _entries("*.md")


def test_every_public_name_of_a_module_that_users_see_has_an_entry() -> None:
    assert {"record", "observe", "Trace", "TraceEntry", *generate.defined_in(fsdp2.trace)} <= _entries("trace.md")


def test_every_public_method_of_a_sharded_module_has_an_entry() -> None:
    methods = {name for name, value in vars(fsdp2.FSDPModule).items() if not name.startswith("_") and callable(value)}
    assert {f"FSDPModule.{name}" for name in methods} <= _entries("fsdp2.md")


def test_every_file_of_the_package_has_a_line() -> None:
    package = Path(fsdp2.__file__).parent
    listed = re.findall(r"^\| `([\w/]+\.py)` \| \S", (FOLDER / "files.md").read_text(), re.MULTILINE)
    files = {path.relative_to(package).as_posix() for path in package.rglob("*.py")}
    rules = {name for name in files if re.fullmatch(r"\w+/__init__\.py", name)}  # above the table of their folder
    assert sorted(listed) == sorted(files - rules)


def test_every_entry_says_what_the_name_does() -> None:
    for page in generate.public_pages():
        for name in page.names:
            value = getattr(page.module, name)
            assert not callable(value) or generate._doc(value), f"{page.module.__name__}.{name} has no docstring"


def test_pages_do_not_depend_on_the_run() -> None:
    for name, text in PAGES.items():
        assert " at 0x" not in text, name


def test_docstrings_become_markdown() -> None:
    doc = """Do ``this`` as :meth:`Model.that` does::

    model.that()

Args:
    first, second: what to do
        with it.

Returns:
    The ``result``.
"""
    assert "\n".join(generate._prose(doc)).replace("\n\n\n", "\n\n").strip() == (
        "Do `this` as `Model.that` does:\n\n```py\nmodel.that()\n```\n\nArguments:\n\n"
        "- `first`, `second`: what to do\n  with it.\n\nReturns:\n\nThe `result`."
    )
