"""Colours of the page, in ``chart.js`` and ``page.css``.

Contrast: "Web Content Accessibility Guidelines" (WCAG) 2.2, 1.4.3 for text and 1.4.11 for shapes.
"""

from __future__ import annotations

import json
import operator
import re
from importlib import resources
from itertools import pairwise

import pytest

TEXT, SHAPE = 4.5, 3.0  # the least ratios of level AA


CHART, STYLE = ((resources.files("fsdp2.report") / name).read_text() for name in ("chart.js", "page.css"))
(_FOUND,) = re.findall(r"const PALETTE = (\{.*?\n\});", CHART, re.DOTALL)
PALETTE = json.loads(_FOUND)
VARIABLES = {name: pair for name, *pair in re.findall(r"--(\w+): light-dark\((#\w+), (#\w+)\)", STYLE)}
SCHEMES = ("light", "dark")
SOLID = [*PALETTE["units"], *PALETTE["bars"].values()]


def _linear(colour: str) -> list[float]:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def _contrast(one: str, other: str) -> float:
    weights = (0.2126, 0.7152, 0.0722)
    dark, light = sorted(sum(map(operator.mul, weights, _linear(colour))) for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


def test_labels_can_be_read_on_each_bar() -> None:
    assert _contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)  # just too little, say the guidelines
    assert [colour for colour in SOLID if _contrast(PALETTE["label"], colour) < TEXT] == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_can_be_read_and_stripes_of_waits_stand_out_and_no_unit_has_their_colour_or_pattern(scheme: str) -> None:
    """Also labels of waits: they lie on the page's ground."""
    of = {name: pair[SCHEMES.index(scheme)] for name, pair in VARIABLES.items()}
    pairs = [("ink", "ground"), ("faint", "ground"), ("ink", "mark"), ("better", "ground"), ("worse", "ground")]
    assert {pair for pair in pairs if _contrast(of[pair[0]], of[pair[1]]) < TEXT} == set()
    ground, hatches = of["ground"], PALETTE["hatches"]
    assert {"gather wait", "reduce wait", "other wait"} <= set(hatches)
    assert {name for name, each in hatches.items() if _contrast(each[scheme], ground) < SHAPE} == set()
    assert not {each[scheme] for each in hatches.values()} & set(SOLID)
    assert len({each["lines"] for each in hatches.values()}) == len(hatches)  # also told apart without colours


def _seen_without(cone: str, colour: str) -> list[float]:
    """How ``colour`` looks to readers without that cone, in linear RGB.

    Source: Vienot, Brettel and Mollon, "Digital video colourmaps for checking the legibility of displays by
    dichromats", 1999.
    """
    r, g, b = _linear(colour)
    mixed = 0.11238 * r + 0.88762 * g if cone == "L" else 0.29275 * r + 0.70725 * g
    return [mixed, mixed, 0.00401 * (r - g) + b if cone == "L" else -0.02234 * (r - g) + b]


@pytest.mark.parametrize("cone", ["L", "M"])
@pytest.mark.parametrize("colours", [PALETTE["units"], PALETTE["series"]], ids=["units", "series"])
def test_neighbours_differ_for_readers_who_lack_a_cone(cone: str, colours: list[str]) -> None:
    seen = [_seen_without(cone, colour) for colour in colours]
    gaps = [max(abs(a - b) for a, b in zip(one, other, strict=True)) for one, other in pairwise(seen)]
    assert min(gaps) > 0.08
