"""Saving without a process group: what files look like, what is refused, and what a kill leaves behind.

The words of refusals are in ``golden/save_weights.txt``.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from fsdp2.checkpoint import save_weights, weights
from tests.harness.golden import texts_beside
from tests.harness.models import MLP
from tests.harness.pool import PRELOADED
from tests.harness.weight_files import INDEX, ONE, assert_same, listed, read, safetensors
from tests.unit.checkpoint.weights import Refused, assert_refused, load, on_meta, refusal, save, seeded, small, state_of

TEXTS = texts_beside(__file__)


def _assert_nothing_but(model: nn.Module, folder: Path) -> None:
    """The folder has the files of one checkpoint of ``model``, and no others."""
    assert_same(read(folder), state_of(model))
    expected = {INDEX, *listed(folder).values()} if (folder / INDEX).exists() else {ONE}
    assert {each.name for each in folder.iterdir()} == expected


# Files


@pytest.mark.parametrize("size", ["5GB", 3000, "1.5kb", 1])
def test_files_are_no_larger_than_asked_for_and_hold_everything_once(size: int | str, tmp_path: Path) -> None:
    model, folder = seeded(MLP), tmp_path / "new" / "folder"
    fsdp2.checkpoint.save_safetensors(model, folder, max_shard_size=size)
    _assert_nothing_but(model, folder)
    files = {path.name: safetensors.load_file(path) for path in folder.glob("*.safetensors")}
    assert sorted(key for tensors in files.values() for key in tensors) == sorted(model.state_dict())
    limit = {"5GB": 5 * 10**9, "1.5kb": 1500}.get(size, size)  # type: ignore[call-overload]
    for tensors in files.values():
        assert len(tensors) == 1 or sum(each.nbytes for each in tensors.values()) <= limit
    if size != "5GB":
        metadata = json.loads((folder / INDEX).read_text())["metadata"]
        assert metadata["total_size"] == sum(each.nbytes for each in state_of(model).values())
        numbers = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        assert sorted(files) == list(dict.fromkeys(listed(folder).values())) == numbers  # in the order of the model


class Odd(nn.Module):
    """Sizes that would put wide dtypes at odd offsets; scalars, empty tensors, every dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("three", torch.tensor([True, False, True]))
        self.register_buffer("none", torch.zeros(0, 4))
        self.scalar = nn.Parameter(torch.tensor(3.5))
        self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).t())
        for dtype in weights.DTYPES.values():
            self.register_buffer(str(dtype).replace(".", "_"), torch.arange(3).to(dtype))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("size", ["5GB", 16])
def test_every_dtype_and_shape_is_written_as_safetensors_reads_it(size: int | str, tmp_path: Path) -> None:
    model, other = Odd(), Odd()
    fsdp2.checkpoint.save_safetensors(model, tmp_path, max_shard_size=size)
    found = read(tmp_path)
    for key, value in state_of(model).items():
        assert found[key].dtype is value.dtype
        assert torch.equal(_as_bytes(found[key]), _as_bytes(value))
    tokens = {}
    for file in tmp_path.glob("*.safetensors"):  # readers that map the file want aligned tensors
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        (tokens[file.name],) = set(header.pop("__metadata__").items()) - {("format", "pt")}
        for each in header.values():
            assert (start + each["data_offsets"][0]) % weights.DTYPES[each["dtype"]].itemsize == 0
    assert len(set(tokens.values())) == 1  # of this save
    with torch.no_grad():
        for tensor in [*other.parameters(), *other.buffers()]:
            tensor.zero_()
    fsdp2.checkpoint.load_safetensors(other, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(state_of(other).values(), state_of(model).values(), strict=True))


def test_a_new_checkpoint_replaces_the_old_one_and_leaves_other_files(tmp_path: Path) -> None:
    for seed, size in enumerate([3000, "5GB", "5GB", 3000, 3000, 1000]):
        (tmp_path / "config.json").write_text("{}")
        model = seeded(MLP, seed)
        fsdp2.checkpoint.save_safetensors(model, tmp_path, max_shard_size=size)
        assert (tmp_path / INDEX).exists() is (size != "5GB")
        assert (tmp_path / "config.json").read_text() == "{}"
        (tmp_path / "config.json").unlink()
        _assert_nothing_but(model, tmp_path)


def test_without_hard_links_the_new_files_keep_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", mock.Mock(side_effect=OSError("no hard links")))
    for seed in range(2):
        fsdp2.checkpoint.save_safetensors(seeded(MLP, seed), tmp_path, max_shard_size=3000)
        _assert_nothing_but(seeded(MLP, seed), tmp_path)


@pytest.mark.parametrize("num_indices", [0, 1])
def test_full_disk_leaves_a_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_indices: int) -> None:
    """The old one, or, from the first index on, the new one. Nothing is left of the other."""
    models = seeded(MLP, 0), seeded(MLP, 1)
    fsdp2.checkpoint.save_safetensors(models[0], tmp_path, max_shard_size=3000)
    left, original = iter(range(num_indices)), json.dump

    def dump(*args: Any, **kwargs: Any) -> None:
        if next(left, None) is None:
            raise OSError(28, "No space left on device")
        original(*args, **kwargs)

    monkeypatch.setattr(json, "dump", dump)
    named = re.escape(f"save_safetensors: {tmp_path / INDEX} could not be written")
    refused = pytest.raises(OSError, match=rf"^{named} \(OSError: .*No space left")
    with refused if num_indices == 0 else contextlib.nullcontext():
        fsdp2.checkpoint.save_safetensors(models[1], tmp_path, max_shard_size=3000)
    _assert_nothing_but(models[num_indices], tmp_path)


LONG = [
    pytest.param(old, new, marks=pytest.mark.long)
    for old, new in (("5GB", "5GB"), ("5GB", 1100), (1100, "5GB"), (1100, 550))
]


def _save_until(folder: str, size: int | str, stop: int) -> None:
    """Save another model, and be killed before call number ``stop`` that changes the folder."""
    count = 0

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            if count == stop:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return call(*arguments, **options)

        return counted

    for name in ("replace", "link", "fsync", "unlink"):
        setattr(os, name, counting(name, getattr(os, name)))
    opened, made = os.open, counting("open", os.open)
    os.open = lambda path, flags, *rest, **options: (made if flags & os.O_CREAT else opened)(
        path, flags, *rest, **options
    )
    original = save_weights._bytes_of
    save_weights._bytes_of = counting("write", original)  # type: ignore[assignment]
    fsdp2.checkpoint.save_safetensors(seeded(small, 1), folder, max_shard_size=size)


def _is(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.long
@pytest.mark.parametrize(("old", "new"), [(1100, 1100), *LONG])
def test_a_kill_at_any_moment_leaves_one_complete_checkpoint(old: int | str, new: int | str, tmp_path: Path) -> None:
    before, after = state_of(seeded(small)), state_of(seeded(small, 1))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    found = []
    for stop in range(1000):
        folder = tmp_path / str(stop)
        fsdp2.checkpoint.save_safetensors(seeded(small), folder, max_shard_size=old)
        process = context.Process(target=_save_until, args=(str(folder), new, stop))
        process.start()
        process.join()
        loaded = seeded(small, 2)
        fsdp2.checkpoint.load_safetensors(loaded, folder)
        assert_same(read(folder), state_of(loaded))
        assert _is(state_of(loaded), before) or _is(state_of(loaded), after), f"killed at call {stop}"
        found.append(_is(state_of(loaded), after))
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        fsdp2.checkpoint.save_safetensors(seeded(small), folder)  # removes what the killed one has left
        _assert_nothing_but(seeded(small), folder)
    assert found == sorted(found)  # first the old one, then the new one
    assert (found[0], found[-1]) == (False, True)
    assert len(found) > 10


REFUSED: Refused = {
    "folder that cannot be made": lambda folder: save(small(), folder / "weights.bin" / "weights"),
    "save on meta": lambda folder: save(on_meta(), folder),
    "names that meet when saved": lambda folder: save(small(), folder, rename=lambda name: "one"),
    "rename that is none when saved": lambda folder: save(small(), folder, rename=3),  # type: ignore[arg-type]
    "name that is none when saved": lambda folder: save(small(), folder, rename={"entry.bias": 3}),  # type: ignore[dict-item]
    "names that are lists when saved": lambda folder: save(small(), folder, rename=lambda name: [name]),  # type: ignore[arg-type, return-value]
    "integers to save": lambda folder: save(small(), folder, dtype=torch.int64),
    "dtype by name to save": lambda folder: save(small(), folder, dtype="bf16"),  # type: ignore[arg-type]
    "dtype that safetensors does not have": lambda folder: save(nn.Linear(2, 2, dtype=torch.complex128), folder),
}


@pytest.mark.parametrize("case", REFUSED)
def test_call_is_refused_and_changes_no_file(case: str, tmp_path: Path) -> None:
    assert_refused(TEXTS, case, REFUSED, tmp_path)


@pytest.mark.parametrize("size", ["5", "GB", "0GB", 0, -1, True, "1.2.3GB", None, float("nan"), float("inf")])
def test_sizes_that_are_none_are_refused(size: Any, tmp_path: Path) -> None:
    assert refusal(lambda: save(MLP(), tmp_path, max_shard_size=size), tmp_path) == (
        f"ValueError: save_safetensors: max_shard_size is {size!r}, expected a number of bytes, or a number and a unit "
        "of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB, such as '5GB'."
    )
    assert not list(tmp_path.iterdir())


def test_what_is_no_tensor_is_warned_of(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"step": 3}

        def set_extra_state(self, state: Any) -> None:
            raise AssertionError

    model = nn.Sequential(Extra(2, 2))
    with pytest.warns(UserWarning, match=r"not saved, because these are no tensors: 0\._extra_state"):
        save(model, tmp_path)
    assert load(model, tmp_path) == ([], [])
