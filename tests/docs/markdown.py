"""The project's pages as data: fenced blocks with their section, headings as anchors, links.

Convention: a ``python`` block is code that runs; a ``text`` block right behind one is what it prints.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

_FENCE = re.compile(r"^\s*(```+)(\w*)")
_HEADING = re.compile(r"^(#+) +(.*)$")
_LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced block; ``line`` is that of its first line of text, counted from 1."""

    language: str
    text: str
    line: int
    section: str


@dataclass(frozen=True)
class Page:
    blocks: tuple[Block, ...]
    headings: tuple[tuple[int, str], ...]
    prose: tuple[tuple[int, str], ...]
    """Lines outside of fenced blocks, with their numbers."""

    @property
    def anchors(self) -> set[str]:
        return {anchor(title) for _, title in self.headings}

    def links(self) -> Iterator[tuple[int, str]]:
        for line, text in self.prose:
            for target in _LINK.findall(re.sub(r"`[^`]*`", "", text)):
                yield line, target


def read(path: Path) -> Page:
    """Parse the page at ``path``. A block's section is the level-2 heading above it, "" before the first."""
    blocks: list[Block] = []
    headings: list[tuple[int, str]] = []
    prose: list[tuple[int, str]] = []
    section, fence, language, start = "", "", "", 0
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        if fence:
            if line.strip() == fence:
                blocks.append(Block(language, "\n".join(lines[start : number - 1]) + "\n", start + 1, section))
                fence = ""
        elif found := _FENCE.match(line):
            fence, language, start = found[1], found[2], number
        else:
            prose.append((number, line))
            if heading := _HEADING.match(line):
                headings.append((len(heading[1]), heading[2]))
                section = heading[2] if len(heading[1]) == 2 else section
    assert not fence, f"{path.name}: the block that starts at line {start} has no end"
    return Page(tuple(blocks), tuple(headings), tuple(prose))


def table(path: Path, title: str) -> list[tuple[str, ...]]:
    """The rows of the tables under the heading ``title``, up to the next heading, without the tables' own headings."""
    lines = path.read_text().splitlines()
    start = next(index for index, line in enumerate(lines) if (found := _HEADING.match(line)) and found[2] == title)
    body = list(itertools.takewhile(lambda line: not _HEADING.match(line), lines[start + 1 :]))
    dividers = {index for index, line in enumerate(body) if re.fullmatch(r"[|\- ]*---[|\- ]*", line)}
    rows = [line for index, line in enumerate(body) if line.startswith("|") and not {index, index + 1} & dividers]
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in rows]


def anchor(title: str) -> str:
    """The anchor that renderers give a heading: lower case, punctuation dropped, spaces to hyphens."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def programs(path: Path) -> list[tuple[str, tuple[Block, ...]]]:
    """The page's sections that hold Python, in order, each with its ``python`` and ``text`` blocks."""
    blocks = read(path).blocks
    titles = dict.fromkeys(block.section for block in blocks if block.language == "python")
    shown = ("python", "text")
    return [(title, tuple(b for b in blocks if b.section == title and b.language in shown)) for title in titles]
