"""Loads while somebody saves, and files of several saves. Without a process group."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp2
from tests.harness.selection import long
from tests.harness.weight_files import ONE, assert_same, read, safetensors
from tests.unit.checkpoint.seeds import SIZES, mlp_of, save, state_of


def _load(folder: Path) -> int:
    """The seed of what is loaded."""
    model = mlp_of(3)
    fsdp2.checkpoint.load_safetensors(model, folder)
    return next(
        seed for seed in range(3) if all(torch.equal(model.state_dict()[k], v) for k, v in state_of(seed).items())
    )


class _Opening:
    """Calls ``act`` before, or after, file number ``number`` is opened, and before the next ones if ``again``."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], None], *, after: bool, again: bool = False
    ) -> None:
        import safetensors as library

        self.count = 0
        original = library.safe_open

        def opened(*args: Any, **options: Any) -> Any:
            acts = self.count >= number if again else self.count == number
            self.count += 1
            if acts and not after:
                act()
            found = original(*args, **options)
            if acts and after:
                act()
            return found

        monkeypatch.setattr(library, "safe_open", opened)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("old", [*SIZES[:2], *long(*SIZES[2:])])
@pytest.mark.parametrize("new", [*SIZES[:2], *long(*SIZES[2:])])
def test_a_load_during_a_save_gets_one_checkpoint(
    old: int | str, new: int | str, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file has been opened before the other checkpoint is put in its place."""
    for number in range(4):
        folder = tmp_path / str(number)
        save(0, folder, old)
        with monkeypatch.context() as context:
            opening = _Opening(context, number, lambda: save(1, folder, new), after=after)  # noqa: B023
            assert _load(folder) == (0 if opening.count <= number else 1)


@pytest.mark.parametrize("size", SIZES[:2])
def test_a_load_that_always_meets_a_save_raises_and_loads_nothing(
    size: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsdp2.checkpoint import open_checkpoint

    monkeypatch.setattr(open_checkpoint, "_PAUSE_S", 0)
    monkeypatch.setattr(open_checkpoint, "_ATTEMPTS", 3)
    save(0, tmp_path, size)
    _Opening(monkeypatch, 0, lambda: save(1, tmp_path, size), after=True, again=True)
    model = mlp_of(2)
    with pytest.raises(RuntimeError, match=r"load_safetensors: .* was replaced while it was opened, 3 times"):
        fsdp2.checkpoint.load_safetensors(model, tmp_path)
    assert_same(model.state_dict(), state_of(2))


def test_a_file_that_is_overwritten_while_it_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes its place is none: the load has the old one open."""
    from fsdp2.checkpoint import load_weights

    take = load_weights._Shard.take

    def take_and(act: Callable[[], object]) -> Any:
        def taken(*args: Any) -> int:
            act()
            return take(*args)

        return taken

    save(0, tmp_path, "5GB")
    monkeypatch.setattr(load_weights._Shard, "take", take_and(lambda: save(1, tmp_path)))
    assert _load(tmp_path) == 0
    save(0, tmp_path, "5GB")
    new = tmp_path / ONE
    monkeypatch.setattr(load_weights._Shard, "take", take_and(lambda: new.write_bytes(new.read_bytes())))
    with pytest.raises(RuntimeError, match="was overwritten while it was read"):
        _load(tmp_path)


def test_files_that_were_copied_during_a_save_are_refused(tmp_path: Path) -> None:
    """A copy has the index and some files of one save, and a file of another one. A file by another program is no
    such copy."""
    for seed in range(2):
        save(seed, tmp_path / str(seed))
    name = "model-00002-of-00002.safetensors"
    shutil.copy(tmp_path / "1" / name, tmp_path / "0" / name)
    with pytest.raises(ValueError, match=f"{name} is of another save than the index"):
        _load(tmp_path / "0")
    safetensors.save_file(safetensors.load_file(tmp_path / "0" / name), tmp_path / "0" / name)
    model = mlp_of(3)
    fsdp2.checkpoint.load_safetensors(model, tmp_path / "0")
    assert_same(model.state_dict(), read(tmp_path / "0"))
