"""What an index and a user of the package get: a README whose links work, an sdist that runs the README's commands.

And what the ``Makefile`` and the workflow say.
"""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import tarfile
import zipfile
from email.message import Message
from typing import Any

import pytest

import fsdp2
from tests.docs.markdown import ROOT

REPOSITORY = "https://github.com/fsdp2/fsdp2"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Message, set[str]]:
    """The metadata of the wheel, and the files of the sdist."""
    pytest.importorskip("hatch_fancy_pypi_readme", reason="no builder is installed; `make` installs one")
    sdist: Any = pytest.importorskip("hatchling.builders.sdist")
    wheel: Any = pytest.importorskip("hatchling.builders.wheel")
    folder = tmp_path_factory.mktemp("dist")
    (whl,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    (tar,) = sdist.SdistBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(whl) as opened:
        (name,) = (each for each in opened.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(opened.read(name))
    with tarfile.open(tar) as opened_sdist:
        return metadata, {each.partition("/")[2] for each in opened_sdist.getnames()}


def test_the_version_is_that_of_the_package_and_of_the_changelog(built: tuple[Message, set[str]]) -> None:
    newest = re.findall(r"^## \[.*\] ?(\d\S*)?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert built[0]["Version"] == fsdp2.__version__ == newest


def test_on_an_index_links_and_pictures_of_the_readme_lead_to_the_repository(built: tuple[Message, set[str]]) -> None:
    metadata, files = built
    text = str(metadata.get_payload())
    targets = re.findall(r"\]\(([^)]+)\)", text)
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    raw = f"{REPOSITORY.replace('github.com', 'raw.githubusercontent.com')}/main/"
    assert len(targets) > 20
    assert pictures
    for target in targets:
        start = raw if target in pictures else f"{REPOSITORY}/blob/main/"
        assert target.startswith(start), target
        assert target.removeprefix(start).partition("#")[0] in files
    urls = dict(line.split(", ", 1) for line in metadata.get_all("Project-URL", []))
    assert all(url.startswith(REPOSITORY) for url in urls.values())
    assert {"Homepage", "Documentation", "Issues", "Changelog"} <= urls.keys()


def test_an_sdist_has_what_the_commands_of_the_readme_run(built: tuple[Message, set[str]]) -> None:
    needed = {"Makefile", "constraints-dev.txt", "pyproject.toml", ".ci/run", "docs/examples/train_lm.py"}
    needed |= {"tests/conftest.py", "benchmarks/gpu/acceptance.py", "LICENSE", "CONTRIBUTING.md", "docs/SECURITY.md"}
    assert needed <= built[1]
    code = {str(path.relative_to(ROOT)) for folder in ("fsdp2", "tests") for path in (ROOT / folder).rglob("*.py")}
    assert code <= built[1]


def test_no_extra_asks_an_index_for_this_package(built: tuple[Message, set[str]]) -> None:
    required = built[0].get_all("Requires-Dist", [])
    assert not [each for each in required if each.startswith("fsdp2")]
    for extra, names in (("plan", {"tqdm", "transformers"}), ("weights", {"safetensors", "tqdm"})):
        assert {each.partition(";")[0] for each in required if f"'{extra}'" in each} == names


def test_the_workflow_runs_what_a_laptop_runs() -> None:
    steps = re.findall(r"^      - run: (.*)$", (ROOT / ".github/workflows/ci.yml").read_text(), re.MULTILINE)
    assert steps == [".ci/run"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_without_a_target_lists_every_target() -> None:
    rules = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shown = subprocess.run(
        ["make", "-C", str(ROOT), "--no-print-directory"], capture_output=True, text=True, check=True
    )
    listed = re.findall(r"^  make ([a-z-]+) +\S", shown.stdout, re.MULTILINE)
    assert set(listed) == set(rules)
    assert {"train", "test", "lint", "bench", "bench-check", "docs"} <= set(listed)
