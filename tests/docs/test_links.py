"""Links in the pages, and citations of pages in code, lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.markdown import PAGES, ROOT, anchor, read

_CITATION = re.compile(r"\b(docs/)?([\w/]+\.md)(?:#([\w-]+))?")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_relative_links_resolve(path: Path) -> None:
    broken = []
    for line, target in read(path).links():
        if re.match(r"[a-z]+:", target):  # the network is not asked
            continue
        name, _, fragment = target.partition("#")
        found = (path.parent / name).resolve() if name else path
        if not found.exists() or not found.is_relative_to(ROOT) or (fragment and fragment not in read(found).anchors):
            broken.append(f"{_name(path)}:{line}: {target}")
    assert not broken


CODE = [path for folder in ("fsdp2", "benchmarks", "tests", "docs") for path in sorted((ROOT / folder).rglob("*.py"))]


def _cited(path: Path) -> list[tuple[str, str]]:
    """Pages below ``docs`` and their headings that the code at ``path`` cites. Elsewhere than in the package and in the
    benchmarks, a bare file name is data."""
    counts_bare = path.is_relative_to(ROOT / "fsdp2") or path.is_relative_to(ROOT / "benchmarks")
    found = _CITATION.findall(path.read_text())
    return [(name, heading) for prefix, name, heading in found if prefix or counts_bare]


@pytest.mark.parametrize("path", [path for path in CODE if _cited(path)], ids=_name)
def test_pages_cited_in_code_exist(path: Path) -> None:
    for name, fragment in _cited(path):
        page = ROOT / "docs" / name
        assert page.exists(), name
        assert not fragment or fragment in read(page).anchors, f"{name}#{fragment}"


def test_a_message_that_users_see_cites_a_page() -> None:
    """Else the test above might look for nothing."""
    assert ("guide/wrapping.md", "roots") in {cited for path in CODE for cited in _cited(path)}


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_no_two_headings_of_a_page_share_an_anchor(path: Path) -> None:
    # Changelogs repeat "Added" per version, so only the levels above count there.
    anchors = [anchor(title) for level, title in read(path).headings if level <= 2 or path.name != "CHANGELOG.md"]
    assert len(anchors) == len(set(anchors))


def test_every_page_is_reached_from_the_readme() -> None:
    reached, pending = set(), [ROOT / "README.md"]
    while pending:
        path = pending.pop()
        if path in reached:
            continue
        reached.add(path)
        targets = [target.partition("#")[0] for _, target in read(path).links()]
        pending += [page for page in PAGES if page in {(path.parent / target).resolve() for target in targets}]
    assert reached == set(PAGES)
