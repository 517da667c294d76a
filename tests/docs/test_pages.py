"""The Python in the pages runs, section by section, and prints what the pages say.

Each section is a program of its own behind the guide's "Setup"; all ranks run it, and rank 0's output is compared.
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

SETUP = "Setup"
PAGES = ("guide.md", "checkpoints.md", "debugging.md", "extensions.md")
SECTIONS = [(page, title) for page in PAGES for title, _ in programs(ROOT / "docs" / page) if title != SETUP]


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
    path = ROOT / "docs" / page
    (setup,) = dict(programs(ROOT / "docs" / "guide.md"))[SETUP]
    # torch.compile looks at the gradient of every input, and hides the warning only where warnings are no errors.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    namespace: dict[str, Any] = {"__name__": "example"}
    printed = _run(setup, path, namespace)
    for block in dict(programs(path))[title]:
        if block.language == "python":
            assert not printed, f"{page}: what is printed above line {block.line} is not shown"
            printed = _run(block, path, namespace)
        else:
            assert ctx.rank > 0 or printed == block.text, f"{page}:{block.line}: it prints\n{printed}"
            printed = ""
    assert not printed, f"{page}: what the end of '{title}' prints is not shown:\n{printed}"
