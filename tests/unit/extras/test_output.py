"""Bars of long work: on a terminal, with tqdm, and not if the user has disabled them. Files that are written whole."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp2.extras.output import check_writable, progress, write_whole
from tests.harness.terminal import on_a_terminal


def _work() -> None:
    with progress("work", 3, "step") as advance:
        for _ in range(3):
            advance(1)


def test_a_terminal_sees_the_work_go_on_to_its_end_and_nothing_else_sees_it() -> None:
    assert "work: 100%" in on_a_terminal(_work)
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        _work()
    assert shown.getvalue() == ""
    with contextlib.redirect_stderr(None):
        _work()


def test_without_tqdm_the_work_is_done_and_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert on_a_terminal(_work) == ""


@pytest.mark.long
@pytest.mark.parametrize("disable", ["0", "1"])
def test_tqdm_disable_hides_bars(disable: str) -> None:
    code = "from tests.unit.extras.test_output import _work, on_a_terminal; print(on_a_terminal(_work))"
    environment = {**os.environ, "TQDM_DISABLE": disable if disable == "1" else ""}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert ("work: 100%" in result.stdout) is (disable == "0")


# Files


WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "report": (f".report.html.{'0' * 32}", lambda file: write_whole(file, "text")),
    "report as it was": (f".report.html.{os.getpid()}", lambda file: write_whole(file, "text")),
    "check before a report": (f".report.html.{os.getpid()}", lambda file: check_writable(file)),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_links_under_names_of_unfinished_files_are_not_followed(
    writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, write = WRITERS[writer]
    folder, victim, new = tmp_path / "folder", tmp_path / "victim", tmp_path / "new"
    file = folder / "report.html"
    folder.mkdir()
    victim.write_text("mine")
    file.write_text("before")
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=0))
    for target in (victim, new):
        (folder / name).symlink_to(target)
        if writer == "report":
            with pytest.raises(OSError, match="File exists"):
                write(file)
            assert file.read_text() == "before"
        else:
            write(file)  # nobody can know the name
        assert (victim.read_text(), new.exists()) == ("mine", False)
        (folder / name).unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("umask", "rights", "expected"),
    [(0o022, None, 0o644), (0o077, None, 0o600), (0o022, 0o600, 0o600), (0, 0o640, 0o640)],
)
def test_rights_are_those_of_the_old_file_or_what_the_umask_leaves(
    umask: int, rights: int | None, expected: int, tmp_path: Path
) -> None:
    file = tmp_path / "report.html"
    if rights is not None:
        file.write_text("before")
        file.chmod(rights)
    before = os.umask(umask)
    try:
        write_whole(file, "text")
    finally:
        os.umask(before)
    assert oct(file.stat().st_mode & 0o777) == oct(expected)
