"""The architecture page and the reference are true: their tables are those in code, and they leave nothing out."""

from __future__ import annotations

import re
from typing import Any

import pytest

import fsdp2
import fsdp2.tensors
import fsdp2.testing
from docs.reference import generate
from fsdp2.core.schedule.schedule import Phase
from fsdp2.core.schedule.states import TRANSITIONS, GroupEvent, GroupState
from fsdp2.report import trace
from tests.distributed.support import same_on_all_ranks, sharded, step
from tests.docs.markdown import ROOT, read
from tests.harness.distributed import RankContext
from tests.unit.test_layers import FOLDERS, PACKAGE

PAGE, FOLDER = ROOT / "docs" / "architecture.md", ROOT / "docs" / "reference"
TEXT = PAGE.read_text()
FILES = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}


def _section(title: str) -> str:
    (body,) = re.findall(rf"^## {title}\n(.*?)^## ", TEXT, re.DOTALL | re.MULTILINE)
    return body


def test_group_states_are_those_of_the_code() -> None:
    rows = [["state", *(event.value for event in GroupEvent)], ["---"] * (len(GroupEvent) + 1)]
    for state in GroupState:
        targets = [TRANSITIONS.get((state, event)) for event in GroupEvent]
        rows.append([f"`{state.value}`", *("-" if target is None else f"`{target.value}`" for target in targets)])
    expected = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    (shown,) = re.findall(r"<!-- group states -->\n(.*)<!-- /group states -->", TEXT, re.DOTALL)
    assert shown.strip() == expected, f"put this table into {PAGE.name}:\n\n{expected}\n"


def _recorded(ctx: RankContext) -> list[tuple[str, str]]:
    """Events and their actions in the second step of three units."""
    model = sharded(ctx, 2)
    step(model)
    with trace.record(model) as recorded:
        step(model)
    rows: list[tuple[str, list[str]]] = []
    for entry in recorded.entries:
        name = f"{entry.name} {entry.unit}"
        rows.append((f"`{name}`", [])) if entry.kind == "event" else rows[-1][1].append(name)
    return [(event, ", ".join(actions)) for event, actions in rows]


@pytest.mark.ci
def test_the_step_that_is_shown_is_one_that_was_recorded() -> None:
    (shown,) = re.findall(r"<!-- one step -->\n(.*)<!-- /one step -->", TEXT, re.DOTALL)
    rows = [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in shown.strip().splitlines()[2:]]
    assert rows == same_on_all_ranks(_recorded)


def test_phases_are_those_of_the_code() -> None:
    shown = re.findall(r"^\| `(\w+)` \|", _section("Where the model and a unit stand"), re.MULTILINE)
    assert shown == [member.name for member in Phase]


def test_folders_are_those_of_the_package() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", _section("Folders"), re.MULTILINE)
    shown = [{name.removesuffix(".py").rstrip("/") for name in re.findall(r"`([^`]+)`", row)} for row in rows]
    assert shown == FOLDERS


def test_files_to_read_first_and_those_in_the_picture_at_the_top_are_there() -> None:
    first = re.findall(r"^\d\. `([\w/]+\.py)`", _section("Read these eight files in this order"), re.MULTILINE)
    (picture,) = re.findall(r"!\[[^\]]+\]\((images/\w+\.svg)\)", TEXT.partition("\n## ")[0])
    shown = re.findall(r"[\w/]+\.py", (PAGE.parent / picture).read_text())
    assert len(first) == 8
    assert len(shown) >= 5
    assert {*first, *shown} <= FILES.keys()


def test_every_class_that_is_named_is_there() -> None:
    spans = re.findall(r"`([^`\n]+)`", TEXT)
    named = {name for span in spans for name in re.findall(r"\b[A-Z][a-z]+[A-Z]\w+|\b[A-Z][a-z]+\b", span)}
    source = "\n".join(FILES.values())
    assert named
    assert not {name for name in named if not re.search(rf"\b{name}\b", source)}


def test_every_invariant_cited_in_code_is_on_the_page() -> None:
    stated = re.findall(r"^- \*\*(I\d+)\. ", TEXT, re.MULTILINE)
    assert stated == [f"I{number}" for number in range(1, len(stated) + 1)]
    cited = {name for text in FILES.values() for name in re.findall(r"(?<!\")\bI\d+\b(?!\")", text)}
    assert cited <= set(stated)


# The reference


def _entries(pattern: str) -> set[str]:
    return {
        title.removesuffix(" (class)").strip("`") for path in FOLDER.glob(pattern) for _, title in read(path).headings
    }


def test_the_committed_pages_are_those_that_the_script_writes() -> None:
    committed = {path.name: path.read_text() for path in FOLDER.glob("*.md")}
    written = generate.render_all()
    differing = sorted({name for name in committed | written if committed.get(name) != written.get(name)})
    assert not any(" at 0x" in text for text in written.values()), "depends on the run"
    assert not differing, "run `python docs/reference/generate.py`"


ROOMS = ("checkpoint", "memory", "optim", "planner", "report", "tensors", "testing")


@pytest.mark.parametrize("package", [fsdp2, *(getattr(fsdp2, name) for name in ROOMS)], ids=lambda p: p.__name__)
def test_every_public_name_has_an_entry(package: Any) -> None:
    names = {name for name in package.__all__ if callable(getattr(package, name))}
    assert names <= _entries("*.md")


def test_names_of_a_module_that_users_see_and_methods_of_a_sharded_module_have_entries() -> None:
    assert {"record", "observe", "Trace", "TraceEntry", *generate.defined_in(fsdp2.report.trace)} <= _entries(
        "trace.md"
    )
    methods = {name for name, value in vars(fsdp2.FSDPModule).items() if not name.startswith("_") and callable(value)}
    assert {f"FSDPModule.{name}" for name in methods} <= _entries("fsdp2.md")


def test_every_file_of_the_package_has_a_line() -> None:
    listed = re.findall(r"^\| `([\w/]+\.py)` \| \S", (FOLDER / "files.md").read_text(), re.MULTILINE)
    rules = {name for name in FILES if re.fullmatch(r"\w+/__init__\.py", name)}  # above the table of their folder
    assert sorted(listed) == sorted(FILES.keys() - rules)


def test_every_entry_says_what_the_name_does() -> None:
    for page in generate.public_pages():
        for name in page.names:
            value = getattr(page.module, name)
            assert not callable(value) or generate._doc(value), f"{page.module.__name__}.{name} has no docstring"


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


def test_every_extra_has_a_subject() -> None:
    named = set(re.findall(r"`(\w+)[`/]", _section("Extras")))
    files = {name.split("/")[1].removesuffix(".py") for name in FILES if name.startswith("extras/")}
    assert files - named == {"__init__", "torch_names", "wiring"}
