"""Files that meet others: two saves in one folder, links, rights, replaced folders.

Without a process group. What several ranks do is in ``distributed/test_weights.py``.
"""

from __future__ import annotations

import fcntl
import functools
import itertools
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp2.checkpoint import save_weights
from fsdp2.checkpoint.save_folder import LOCK, SaveFolder
from tests.harness.weight_files import INDEX, ONE, bytes_of, listed, read
from tests.unit.checkpoint.seeds import SIZES, save, state_of

PAIRS = [
    ("5GB", 1100),
    *(pytest.param(*sizes, marks=pytest.mark.long) for sizes in ((1100, "5GB"), (1100, 1100), ("5GB", "5GB"))),
]


def _found(folder: Path) -> int:
    """The seed of the checkpoint that a reader finds, complete."""
    found = read(folder)
    return next(
        seed for seed in range(4) if all(torch.equal(found[key], value) for key, value in state_of(seed).items())
    )


def _names(folder: Path) -> set[str]:
    return {INDEX, *listed(folder).values()} if (folder / INDEX).exists() else {ONE}


def _saved_with(
    act: Callable[[Path], None], size: int | str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Path, OSError | None]]:
    """Save 1 over 0 again and again, each time with ``act`` before another one of its calls of the system. Gives the
    folder, and the error."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # slow
    for number in itertools.count():
        folder, error, count = folders / str(number), None, 0
        save(0, folder)

        def counted(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == number + 1:  # noqa: B023
                act(folder)  # noqa: B023
            return call(*args, **options)

        with monkeypatch.context() as context:
            for name in ("open", "replace", "link", "unlink"):
                context.setattr(os, name, functools.partial(counted, getattr(os, name)))
            try:
                save(1, folder, size)
            except OSError as raised:
                error = raised
        yield folder, error
        if count <= number:
            return


# Two saves


@pytest.mark.parametrize(("size", "other"), PAIRS)
def test_a_save_inside_of_another_one_is_refused(
    size: int | str, other: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any moment at which the first one is running."""
    refused = []

    def save_other(folder: Path) -> None:
        try:
            save(2, folder, other)
        except OSError as error:
            refused.append(str(error))

    for folder, error in _saved_with(save_other, size, tmp_path, monkeypatch):
        assert error is None
        assert _found(folder) == 1
        assert {each.name for each in folder.iterdir()} == _names(folder)
    assert len(refused) > 5
    assert all(each.startswith(f"save_safetensors: another save writes to {tmp_path}") for each in refused)


@pytest.mark.parametrize("refused", [OSError(37, "No locks available"), None], ids=["none", "of one node"])
@pytest.mark.parametrize(("size", "other"), PAIRS)
def test_without_locks_a_whole_checkpoint_stays_or_a_save_raises(
    size: int | str, other: int | str, refused: OSError | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one runs to its end at any moment of a save, where the file system has no locks that keep it out."""
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=refused))
    for folder, error in _saved_with(lambda folder: save(2, folder, other), size, tmp_path, monkeypatch):
        assert error is not None or _found(folder) in (1, 2)


def test_a_lock_that_nobody_holds_is_taken_and_removed(tmp_path: Path) -> None:
    save(0, tmp_path)
    (tmp_path / LOCK).write_text("of a save that was killed")
    with SaveFolder(tmp_path) as held:
        held.lock()
        before = bytes_of(tmp_path)
        with pytest.raises(OSError, match=r"another save writes to .* remove .*\.fsdp2_save\.lock\.$"):
            save(1, tmp_path)
        assert bytes_of(tmp_path) == before
    save(1, tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == _names(tmp_path)


def test_a_file_that_another_save_has_written_since_is_not_removed(tmp_path: Path) -> None:
    """Locks keep out only saves of this node."""
    save(0, tmp_path)
    with SaveFolder(tmp_path) as folder:
        found = folder.others([])
        assert len(found) > 2
        (tmp_path / INDEX).write_text("of another save")
        folder.remove_unchanged(found)
    assert [each.name for each in tmp_path.iterdir()] == [INDEX]


def test_a_save_removes_no_files_that_are_not_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    names = ["config.json", "adapter_model.safetensors", "in/model.safetensors"]
    for name in names:
        (tmp_path / name).write_text(name)
    (tmp_path / INDEX).write_text(f'{{"weight_map": {{"a": "config.json", "b": "in/{ONE}", "c": 3}}}}')
    save(0, tmp_path)
    assert [(tmp_path / name).read_text() for name in names] == names


# What is under the path


def _swap_folder(folder: Path) -> None:
    """Under the path there is a link to another folder."""
    folder.rename(folder.with_name("moved"))
    folder.with_name("elsewhere").mkdir()
    folder.symlink_to(folder.with_name("elsewhere"))


def _new_file(folder: Path) -> Path:
    return next(
        each for each in sorted(folder.iterdir()) if each.name.count(".") == 2 and each.suffix == ".safetensors"
    )


def _swap_file(folder: Path) -> None:
    file = _new_file(folder)
    data = bytearray(file.read_bytes())
    data[data.index(b"fsdp2_save") + 20] ^= 1
    file.unlink()
    file.write_bytes(data)


SITUATIONS: dict[str, tuple[Callable[[Path], object], str]] = {
    "folder replaced by a link": (_swap_folder, "was replaced during the save"),
    "folder removed": (shutil.rmtree, "(was replaced during the save|FileNotFoundError)"),
    "file removed": (lambda folder: _new_file(folder).unlink(), "rank 0 finds FileNotFoundError"),
    "file cut": (lambda folder: os.truncate(_new_file(folder), 700), "rank 0 finds 700 bytes"),
    "file of another save": (_swap_file, "rank 0 finds another file"),
}


@pytest.mark.parametrize("size", SIZES[:2])
@pytest.mark.parametrize("case", SITUATIONS)
def test_what_rank_0_does_not_see_is_not_published(
    case: str, size: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    act, said = SITUATIONS[case]
    folder, commit = tmp_path / "weights", save_weights._commit

    def act_first(*args: Any) -> None:
        act(folder)
        commit(*args)

    save(0, folder)
    before = bytes_of(folder)
    monkeypatch.setattr(save_weights, "_commit", act_first)
    with pytest.raises(OSError, match=f"save_safetensors: .*{said}.* The checkpoint that was in the folder is there"):
        save(1, folder, size)
    kept = tmp_path / "moved" if case == "folder replaced by a link" else folder
    if case != "folder removed":
        assert bytes_of(kept) == before
        assert not list((tmp_path / "elsewhere").glob("*"))


# Links and rights


WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "one file": ("model.00000000.safetensors", lambda folder: save(1, folder, "5GB")),
    "several files": ("model-00002-of-00002.00000000.safetensors", lambda folder: save(1, folder)),
    "index": (f"{INDEX}.00000000", lambda folder: save(1, folder)),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_links_under_names_of_unfinished_files_are_not_followed(
    writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, write = WRITERS[writer]
    folder, victim, new = tmp_path / "folder", tmp_path / "victim", tmp_path / "new"
    folder.mkdir()
    victim.write_text("mine")
    save(0, folder, "5GB")
    before = bytes_of(folder)
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=0))
    for target in (victim, new):
        (folder / name).symlink_to(target)
        with pytest.raises(OSError, match="File exists"):
            write(folder)
        assert read(folder).keys() == state_of(0).keys()
        assert (folder / ONE).read_bytes() == before[ONE]
        assert (victim.read_text(), new.exists()) == ("mine", False)
        (folder / name).unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("umask", "rights", "expected"),
    [(0o022, None, 0o644), (0o077, None, 0o600), (0o022, 0o600, 0o600), (0, 0o640, 0o640)],
)
@pytest.mark.parametrize("writer", ["one file", "several files"])
def test_rights_are_those_of_the_old_file_or_what_the_umask_leaves(
    writer: str, umask: int, rights: int | None, expected: int, tmp_path: Path
) -> None:
    """Of files that had several rights, those that all had."""
    _, write = WRITERS[writer]
    if rights is not None:
        save(0, tmp_path, 1100 if writer == "several files" else "5GB")
        for file in list(tmp_path.iterdir())[1:]:
            file.chmod(0o666)
        next(tmp_path.iterdir()).chmod(rights)
    before = os.umask(umask)
    try:
        write(tmp_path)
    finally:
        os.umask(before)
    assert {oct(file.stat().st_mode & 0o777) for file in tmp_path.iterdir()} == {oct(expected)}
