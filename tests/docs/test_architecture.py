"""The architecture page is true: its tables are those in code, and it leaves no room out."""

from __future__ import annotations

import re

import pytest

import fsdp2.gradients
import fsdp2.schedule
from fsdp2.states import TRANSITIONS, GroupEvent, GroupState
from tests.docs.markdown import ROOT, read
from tests.unit.test_layers import LAYERS, ROOMS

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


@pytest.mark.parametrize(
    ("section", "enum"),
    [
        ("States of a group's gradients", fsdp2.gradients.GradientState),
        ("Where the model and a unit stand", fsdp2.schedule.Phase),
    ],
)
def test_other_states_are_those_of_the_code(section: str, enum: type) -> None:
    (body,) = re.findall(rf"^## {section}\n(.*?)^## ", TEXT, re.DOTALL | re.MULTILINE)
    assert re.findall(r"^\| `(\w+)` \|", body, re.MULTILINE) == [member.name for member in enum]  # type: ignore[attr-defined]


def test_picture_shows_every_room_on_its_layer() -> None:
    (picture,) = [block for block in read(PAGE).blocks if block.section == "Rooms"]
    shown = {}
    for line in picture.text.splitlines():
        number, rooms, _ = re.split(r"(?<=\d)  |   {3,}", line.strip(), maxsplit=2)
        shown[int(number)] = set(rooms.split())
    assert shown == {number: rooms for number, rooms in enumerate(LAYERS) if rooms != {"__init__"}}


def test_tour_visits_every_file_once() -> None:
    visited = re.findall(r"^\| `(\w+)(?:\.py|/)` \|", TEXT, re.MULTILINE)
    assert sorted(visited) == ROOMS


def test_every_invariant_cited_in_code_is_on_the_page() -> None:
    stated = re.findall(r"^- \*\*(I\d+)\. ", TEXT, re.MULTILINE)
    assert stated == [f"I{number}" for number in range(1, len(stated) + 1)]
    cited = {name for path in (ROOT / "fsdp2").glob("*.py") for name in re.findall(r"\bI\d+\b", path.read_text())}
    assert cited <= set(stated)
