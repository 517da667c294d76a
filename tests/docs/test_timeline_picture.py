"""What ``docs/images/timeline.py`` draws of a report and of a profile."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from tests.harness.golden import texts_beside
from tests.unit.report.examples import example_data

IMAGES = Path(__file__).parents[2] / "docs" / "images"
sys.path.insert(0, str(IMAGES))
from timeline import Range, from_profiler, from_report, svg  # noqa: E402

TEXTS = texts_beside(__file__)


def _ranges() -> list[Range]:
    """A forward, and a backward that reduces, of one block ``a`` and the root, in milliseconds."""
    return [
        Range(1, "whole step", 0.0, 100.0),
        Range(1, "FSDP::pre_forward (a)", 10.0, 20.0),
        Range(1, "FSDP::all_gather (a)", 11.0, 18.0),
        Range(1, "c10d::_allgather_base_", 12.0, 13.0),
        Range(2, "gloo:all_gather", 13.0, 17.0),
        Range(1, "FSDP::all_gather_copy_out (a)", 18.0, 20.0),
        Range(1, "FSDP::post_forward (a)", 40.0, 41.0),
        Range(1, "FSDP::pre_backward (a)", 45.0, 46.0),
        Range(1, "FSDP::post_backward_reduce (a)", 70.0, 80.0),
        Range(1, "c10d::_reduce_scatter_base_", 72.0, 73.0),
        Range(2, "gloo:all_reduce", 73.0, 78.0),
        Range(1, "FSDP::root_post_backward_callback", 85.0, 86.0),
    ]


def test_a_profile_shows_compute_waits_copies_and_collectives_in_flight() -> None:
    found = from_profiler(_ranges(), _ranges()[0])
    assert (found.name, found.step_ms) == ("torch", 100.0)
    # Collectives that are waited for: from their launch to the end of their range.
    said = (f"row {each.row}: {each.what} {each.unit} from {each.start:g} for {each.length:g}" for each in found.bars)
    TEXTS.check("bars of a profile", "\n".join(said))


def test_both_timelines_are_drawn_on_one_axis() -> None:
    data = example_data()
    ours, torchs = from_report(data), from_profiler(_ranges(), _ranges()[0])
    assert ours.step_ms == data["timelines"][0]["stop_us"] / 1e3
    assert len(ours.bars) == len(data["timelines"][0]["spans"]) + len(data["timelines"][0]["transfers"])
    drawn = svg([ours, torchs], "a note")
    widths = [float(each.get("width", "")) for each in ET.fromstring(drawn).iter() if each.tag.endswith("rect")]
    scale = (1000 - 62 - 10) / max(ours.step_ms, torchs.step_ms)
    assert round(24.0 * scale, 1) in widths
    assert "a note" in drawn


def test_the_committed_picture_is_small_and_whole() -> None:
    text = (IMAGES / "timeline.svg").read_text()
    assert len(text) < 100_000
    assert [each.text for each in ET.fromstring(text).iter() if each.get("font-weight")] == ["fsdp2", "torch"]
