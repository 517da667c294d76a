"""The Python in the pages runs, section by section, and prints what the pages say.

Each section is a program of its own behind the guide's "Setup"; all ranks run it, and rank 0's output is compared. The
quickstart has a script of its own; see ``test_quickstart``. For clients, see ``tests/clients/test_page.py``.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.docs.markdown import ROOT, Block, programs
from tests.harness.distributed import RankContext, distributed

DOCS = ROOT / "docs"
SETUP_PAGE, SETUP = DOCS / "guide" / "wrapping.md", "Setup"
ELSEWHERE = {"quickstart.md", "clients.md"}
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.name not in ELSEWHERE and programs(path))
SECTIONS = [(str(path.relative_to(DOCS)), title) for path in PAGES for title, _ in programs(path) if title != SETUP]


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


def test_every_page_with_examples_links_to_their_setup() -> None:
    for path in PAGES:
        if path != SETUP_PAGE:
            assert "wrapping.md#setup)" in path.read_text(), path.name
