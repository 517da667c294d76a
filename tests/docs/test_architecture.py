"""The architecture page is true: its tables are those in code, and it leaves no file out."""

from __future__ import annotations

import re

import pytest

import fsdp2.group.gradients
import fsdp2.schedule.schedule
from fsdp2.schedule.states import TRANSITIONS, GroupEvent, GroupState
from fsdp2.tools import trace
from tests.distributed.support import same_on_all_ranks, sharded, step
from tests.docs.markdown import ROOT
from tests.harness.distributed import RankContext
from tests.unit.test_layers import FOLDERS, PACKAGE

PAGE = ROOT / "docs" / "architecture.md"
TEXT = PAGE.read_text()


def _group_states() -> str:
    """The state machine of a parameter group as a Markdown table."""
    rows = [["state", *(event.value for event in GroupEvent)], ["---"] * (len(GroupEvent) + 1)]
    for state in GroupState:
        targets = [TRANSITIONS.get((state, event)) for event in GroupEvent]
        rows.append([f"`{state.value}`", *("-" if target is None else f"`{target.value}`" for target in targets)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_group_states_are_those_of_the_code() -> None:
    expected = _group_states()
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


@pytest.mark.parametrize(
    ("section", "enum"),
    [
        ("States of a group's gradients", fsdp2.group.gradients.GradientState),
        ("Where the model and a unit stand", fsdp2.schedule.schedule.Phase),
    ],
)
def test_other_states_are_those_of_the_code(section: str, enum: type) -> None:
    (body,) = re.findall(rf"^## {section}\n(.*?)^## ", TEXT, re.DOTALL | re.MULTILINE)
    assert re.findall(r"^\| `(\w+)` \|", body, re.MULTILINE) == [member.name for member in enum]  # type: ignore[attr-defined]


def test_folders_are_those_of_the_package() -> None:
    (body,) = re.findall(r"^## Folders\n(.*?)^## ", TEXT, re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\| (`.*?`) \|", body, re.MULTILINE)
    shown = [{name.removesuffix(".py").rstrip("/") for name in re.findall(r"`([^`]+)`", row)} for row in rows]
    assert shown == FOLDERS


def test_the_files_to_read_first_are_there() -> None:
    (body,) = re.findall(r"^## Read these eight files in this order\n(.*?)^## ", TEXT, re.DOTALL | re.MULTILINE)
    names = re.findall(r"^\d\. `([\w/]+\.py)`", body, re.MULTILINE)
    assert len(names) == 8
    assert all((PACKAGE / name).exists() for name in names)


def test_the_picture_comes_first_and_names_files_that_are_there() -> None:
    (picture,) = re.findall(r"!\[[^\]]+\]\((images/\w+\.svg)\)", TEXT.partition("\n## ")[0])
    files = re.findall(r"[\w/]+\.py", (PAGE.parent / picture).read_text())
    assert len(files) >= 5
    assert all((PACKAGE / name).exists() for name in files)


def test_every_class_that_is_named_is_there() -> None:
    spans = re.findall(r"`([^`\n]+)`", TEXT)
    named = {name for span in spans for name in re.findall(r"\b[A-Z][a-z]+[A-Z]\w+|\b[A-Z][a-z]+\b", span)}
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    assert named
    assert not {name for name in named if not re.search(rf"\b{name}\b", source)}


def test_every_invariant_cited_in_code_is_on_the_page() -> None:
    stated = re.findall(r"^- \*\*(I\d+)\. ", TEXT, re.MULTILINE)
    assert stated == [f"I{number}" for number in range(1, len(stated) + 1)]
    cited = {name for path in PACKAGE.rglob("*.py") for name in re.findall(r"(?<!\")\bI\d+\b(?!\")", path.read_text())}
    assert cited <= set(stated)
