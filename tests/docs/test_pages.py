"""The Python in the pages runs, section by section, and prints what the pages say. Links and citations lead somewhere.

Each section is a program of its own behind the guide's "Setup"; all ranks run it, and rank 0's output is compared. The
quickstart has a script of its own; see ``test_first_pages``. For clients and torchft, see ``tests/clients``.
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.markdown import PAGES, ROOT, Block, anchor, programs, read
from tests.harness.distributed import RankContext, distributed

DOCS = ROOT / "docs"
SETUP_PAGE, SETUP = DOCS / "guide" / "wrapping.md", "Setup"
ELSEWHERE = {"quickstart.md", "clients.md", "torchft.md"}
WITH_EXAMPLES = sorted(path for path in DOCS.rglob("*.md") if path.name not in ELSEWHERE and programs(path))
SECTIONS = [
    (str(path.relative_to(DOCS)), title) for path in WITH_EXAMPLES for title, _ in programs(path) if title != SETUP
]


def _run(block: Block, page: Path, namespace: dict[str, Any]) -> str:
    """What ``block`` prints; tracebacks show the page's own lines."""
    printed = io.StringIO()
    code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, namespace)
    return printed.getvalue()


@pytest.mark.parametrize(("page", "title"), SECTIONS)
@distributed(4)
def test_section_runs_and_prints_what_it_shows(ctx: RankContext, page: str, title: str) -> None:
    path = DOCS / page
    (setup,) = dict(programs(SETUP_PAGE))[SETUP]
    # torch.compile looks at the gradient of every input, and hides the warning only where warnings are no errors.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    namespace: dict[str, Any] = {"__name__": "example"}
    printed = _run(setup, SETUP_PAGE, namespace)
    for block in dict(programs(path))[title]:
        if block.language == "python":
            assert not printed, f"{page}: what is printed above line {block.line} is not shown"
            printed = _run(block, path, namespace)
        else:
            assert ctx.rank > 0 or printed == block.text, f"{page}:{block.line}: it prints\n{printed}"
            printed = ""
    assert not printed, f"{page}: what the end of '{title}' prints is not shown:\n{printed}"


@pytest.mark.parametrize("replicates", [False, True])
@distributed(4)
def test_the_example_for_the_meta_device_gives_each_rank_its_part(ctx: RankContext, replicates: bool) -> None:
    """Of what one process draws; ranks that draw for their own shards with one seed get equal ones."""
    path, namespace = DOCS / "checkpoints.md", dict[str, Any](__name__="example")
    (setup,) = dict(programs(SETUP_PAGE))[SETUP]
    (example,) = dict(programs(path))["Initialise on the meta device"]
    _run(setup, SETUP_PAGE, namespace)
    if replicates:
        namespace["mesh"] = ctx.mesh_2d(2, 2)
    _run(example, path, namespace)
    torch.manual_seed(0)
    for name, param in namespace["model"].named_parameters():
        if name.endswith("bias"):
            assert not param.full_tensor().any(), name
            continue
        expected = torch.nn.init.trunc_normal_(torch.empty(param.shape), std=0.02)
        assert torch.equal(param.full_tensor(), expected), name
        first, *others = expected.chunk(2 if replicates else 4)
        assert not any(torch.equal(first, each) for each in others), name


def test_every_page_with_examples_links_to_their_setup() -> None:
    for path in WITH_EXAMPLES:
        if path != SETUP_PAGE:
            assert "wrapping.md#setup)" in path.read_text(), path.name


# Links

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
        assert not fragment or fragment in read(ROOT / "docs" / name).anchors, f"{name}#{fragment}"
        assert (ROOT / "docs" / name).exists(), name


def test_a_message_that_users_see_cites_a_page() -> None:
    """Else the test above might look for nothing."""
    assert ("guide/wrapping.md", "roots") in {cited for path in CODE for cited in _cited(path)}


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_no_two_headings_of_a_page_share_an_anchor(path: Path) -> None:
    # Changelogs repeat "Added" per version, so only the levels above count there.
    anchors = [anchor(title) for level, title in read(path).headings if level <= 2 or path.name != "CHANGELOG.md"]
    assert len(anchors) == len(set(anchors))


def test_every_page_is_reached_from_the_readme() -> None:
    reached, pending = set(), {ROOT / "README.md"}
    while pending:
        path = pending.pop()
        reached.add(path)
        targets = {(path.parent / target.partition("#")[0]).resolve() for _, target in read(path).links()}
        pending |= targets & set(PAGES) - reached
    assert reached == set(PAGES)
