"""Saving and loading without a process group: what files look like, what is refused, and what a kill leaves behind."""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import re
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from fsdp2.tools import save_weights, weights
from tests.harness.models import MLP, Buffers, Transformer
from tests.harness.pool import PRELOADED

safetensors = pytest.importorskip("safetensors.torch")

INDEX = "model.safetensors.index.json"


def _seeded(model: Callable[[], Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return model()


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def _same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return set(found) == set(expected) and all(torch.equal(found[key], value) for key, value in expected.items())


def _read(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, found as transformers finds them, and read by safetensors itself."""
    one = folder / "model.safetensors"
    if one.exists():
        return safetensors.load_file(one)
    names = json.loads((folder / INDEX).read_text())["weight_map"]
    files = {name: safetensors.load_file(folder / name) for name in set(names.values())}
    return {key: files[name][key] for key, name in names.items()}


# Files


@pytest.mark.parametrize("size", ["5GB", 3000, "1.5kb", 1])
def test_files_are_no_larger_than_asked_for_and_hold_everything_once(size: int | str, tmp_path: Path) -> None:
    model = _seeded(MLP)
    fsdp2.save_safetensors(model, tmp_path / "new" / "folder", max_shard_size=size)
    folder = tmp_path / "new" / "folder"
    assert _same(_read(folder), _state(model))
    files = {path.name: safetensors.load_file(path) for path in folder.glob("*.safetensors")}
    keys = [key for tensors in files.values() for key in tensors]
    assert sorted(keys) == sorted(model.state_dict())
    limit = {"5GB": 5 * 10**9, "1.5kb": 1500}.get(size, size)  # type: ignore[call-overload]
    for tensors in files.values():
        assert len(tensors) == 1 or sum(each.nbytes for each in tensors.values()) <= limit
    if size != "5GB":
        index = json.loads((folder / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(each.nbytes for each in _state(model).values())
        numbers = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        assert sorted(files) == numbers
        assert list(dict.fromkeys(index["weight_map"].values())) == numbers  # in the order of the model


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
    model = Odd()
    fsdp2.save_safetensors(model, tmp_path, max_shard_size=size)
    found = _read(tmp_path)
    for key, value in _state(model).items():
        assert found[key].dtype is value.dtype
        assert torch.equal(_as_bytes(found[key]), _as_bytes(value))
    for file in tmp_path.glob("*.safetensors"):  # readers that map the file want aligned tensors
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        assert header.pop("__metadata__") == {"format": "pt"}
        for each in header.values():
            assert (start + each["data_offsets"][0]) % weights.DTYPES[each["dtype"]].itemsize == 0
    other = Odd()
    with torch.no_grad():
        for tensor in [*other.parameters(), *other.buffers()]:
            tensor.zero_()
    fsdp2.load_safetensors(other, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(_state(other).values(), _state(model).values(), strict=True))


def test_a_new_checkpoint_replaces_the_old_one_and_leaves_other_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for seed, size in enumerate([3000, "5GB", "5GB", 3000, 3000, 1000]):
        model = _seeded(MLP, seed)
        fsdp2.save_safetensors(model, tmp_path, max_shard_size=size)
        assert _same(_read(tmp_path), _state(model))
        count = len(json.loads((tmp_path / INDEX).read_text())["weight_map"]) if (tmp_path / INDEX).exists() else 0
        names = {each.name for each in tmp_path.iterdir()} - {"config.json", INDEX}
        assert names == {"model.safetensors"} if not count else all("-of-" in name for name in names)
    assert (tmp_path / "config.json").read_text() == "{}"


def test_without_hard_links_the_new_files_keep_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no hard links")

    monkeypatch.setattr(os, "link", refuse)
    for seed in range(2):
        model = _seeded(MLP, seed)
        fsdp2.save_safetensors(model, tmp_path, max_shard_size=3000)
        assert _same(_read(tmp_path), _state(model))
        listed = set(json.loads((tmp_path / INDEX).read_text())["weight_map"].values())
        assert {each.name for each in tmp_path.iterdir()} == {INDEX, *listed}


# A disk that is full, and places that cannot be written


@pytest.fixture
def small_disk() -> Iterator[Callable[[int], None]]:
    """Call it to let no file grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("size", "file"), [("5GB", "model.safetensors"), (3000, "model-0000")])
def test_full_disk_names_the_file_and_leaves_the_old_checkpoint(
    tmp_path: Path, small_disk: Callable[[int], None], size: int | str, file: str
) -> None:
    fsdp2.save_safetensors(_seeded(MLP, 0), tmp_path, max_shard_size=size)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    small_disk(500)
    named = re.escape(f"save_safetensors: {tmp_path / file}")
    with pytest.raises(OSError, match=rf"^{named}\S* could not be written \(OSError: .* too large\).* Make room"):
        fsdp2.save_safetensors(_seeded(MLP, 1), tmp_path, max_shard_size=size)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


@pytest.mark.parametrize("num_indices", [0, 1])
def test_disk_that_is_full_when_an_index_is_written_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_indices: int
) -> None:
    """The old one, or, from the first index on, the new one. Nothing is left of the other."""
    old, new = _seeded(MLP, 0), _seeded(MLP, 1)
    fsdp2.save_safetensors(old, tmp_path, max_shard_size=3000)
    left = num_indices
    original = json.dump

    def dump(*args: Any, **kwargs: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")
        original(*args, **kwargs)

    monkeypatch.setattr(json, "dump", dump)
    if num_indices == 0:
        named = re.escape(f"save_safetensors: {tmp_path / INDEX} could not be written")
        with pytest.raises(OSError, match=rf"^{named} \(OSError: .*No space left"):
            fsdp2.save_safetensors(new, tmp_path, max_shard_size=3000)
    else:
        fsdp2.save_safetensors(new, tmp_path, max_shard_size=3000)
    assert _same(_read(tmp_path), _state(new if num_indices else old))
    listed = set(json.loads((tmp_path / INDEX).read_text())["weight_map"].values())
    assert {each.name for each in tmp_path.iterdir()} == {INDEX, *listed}


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """No permissions keep the superuser out: a file stands in the way."""
    (tmp_path / "file").touch()
    named = re.escape(f"save_safetensors: {tmp_path / 'file' / 'weights'} could not be written (NotADirectoryError")
    with pytest.raises(OSError, match=rf"^{named}"):
        fsdp2.save_safetensors(_seeded(MLP, 0), tmp_path / "file" / "weights")


# Kills

LONG = [
    pytest.param(old, new, marks=pytest.mark.long)
    for old, new in (("5GB", "5GB"), ("5GB", 1100), (1100, "5GB"), (1100, 550))
]
CALLS = ("replace", "link", "fsync", "unlink")


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

    for name in CALLS:
        setattr(os, name, counting(name, getattr(os, name)))
    original = save_weights._bytes_of
    save_weights._bytes_of = counting("write", original)  # type: ignore[assignment]
    fsdp2.save_safetensors(_seeded(_small, 1), folder, max_shard_size=size)


def _small() -> nn.Module:
    """Four parameters, of 1024, 64, 512 and 32 bytes."""
    return MLP(num_blocks=0)


@pytest.mark.long
@pytest.mark.parametrize(("old", "new"), [(1100, 1100), *LONG])
def test_a_kill_at_any_moment_leaves_one_complete_checkpoint(old: int | str, new: int | str, tmp_path: Path) -> None:
    before, after = _state(_seeded(_small)), _state(_seeded(_small, 1))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    found = []
    for stop in range(1000):
        folder = tmp_path / str(stop)
        fsdp2.save_safetensors(_seeded(_small), folder, max_shard_size=old)
        process = context.Process(target=_save_until, args=(str(folder), new, stop))
        process.start()
        process.join()
        loaded = _seeded(_small, 2)
        fsdp2.load_safetensors(loaded, folder)
        assert _same(_read(folder), _state(loaded))
        assert _same(_state(loaded), before) or _same(_state(loaded), after), f"killed at call {stop}"
        found.append(_same(_state(loaded), after))
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        # The next save removes what the killed one has left.
        fsdp2.save_safetensors(_seeded(_small), folder)
        assert [each.name for each in folder.iterdir()] == ["model.safetensors"]
    assert found == sorted(found)  # first the old one, then the new one
    assert found[0] is False
    assert found[-1] is True
    assert len(found) > 10


# What is refused


def _message(call: Callable[[], Any], folder: Path) -> str:
    with pytest.raises((ValueError, TypeError, OSError, RuntimeError, ImportError)) as raised:
        call()
    return f"{raised.type.__name__}: {raised.value}".replace(str(folder), "FOLDER")


@pytest.mark.parametrize("cut", [3, 200, -10])
def test_a_cut_file_is_refused(cut: int, tmp_path: Path) -> None:
    model = _seeded(MLP)
    fsdp2.save_safetensors(model, tmp_path, max_shard_size=3000)
    file = tmp_path / "model-00002-of-00007.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    other = _seeded(MLP, 1)
    before = _state(other)
    message = _message(lambda: fsdp2.load_safetensors(other, tmp_path), tmp_path)
    first, *rest = message.splitlines()
    assert first == "ValueError: load_safetensors: FOLDER does not fit this MLP. Nothing was loaded."
    assert len(rest) == 1
    assert rest[0].startswith("- FOLDER/model-00002-of-00007.safetensors cannot be read: SafetensorError: ")
    assert _same(_state(other), before)


def test_a_checkpoint_of_another_model_is_refused_with_all_its_keys(tmp_path: Path) -> None:
    fsdp2.save_safetensors(MLP(num_blocks=12), tmp_path)
    message = _message(lambda: fsdp2.load_safetensors(Transformer(), tmp_path), tmp_path)
    assert "- Missing in the files: 'embedding.weight', 'blocks.0.attention_norm.weight', " in message
    assert "'blocks.4.up.weight', 'blocks.4.up.bias' and 32 more. Pass rename=" in message
    assert fsdp2.load_safetensors(Buffers(), tmp_path, strict=False).missing_keys[0] == "blocks.0.keep"


def test_paths_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    model = MLP()
    (tmp_path / "other.safetensors").write_bytes(b"")
    (tmp_path / "bad.json").write_text("[]")
    (tmp_path / "weights.bin").write_bytes(b"")

    def load(name: str) -> str:
        return _message(lambda: fsdp2.load_safetensors(model, tmp_path / name), tmp_path)

    assert load("nothing") == "FileNotFoundError: load_safetensors: FOLDER/nothing does not exist on this rank."
    assert load("") == (
        "FileNotFoundError: load_safetensors: the folder FOLDER has neither model.safetensors nor "
        "model.safetensors.index.json. Pass the path of a file or index. There are: other.safetensors."
    )
    assert load("weights.bin") == (
        "ValueError: load_safetensors: FOLDER/weights.bin: expected a folder, a .safetensors file, or an index (.json)."
    )
    assert load("bad.json").startswith(
        "ValueError: load_safetensors: the index FOLDER/bad.json cannot be read: TypeError"
    )


def test_an_index_that_files_contradict_is_refused(tmp_path: Path) -> None:
    fsdp2.save_safetensors(_seeded(MLP), tmp_path, max_shard_size=3000)
    index = json.loads((tmp_path / INDEX).read_text())
    files = index["weight_map"]
    files["exit.bias"] = files["entry.bias"]
    files["exit.weight"] = "nowhere.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    lines = _message(lambda: fsdp2.load_safetensors(MLP(), tmp_path), tmp_path).splitlines()
    assert any(line.startswith("- FOLDER/nowhere.safetensors cannot be read: FileNotFoundError: ") for line in lines)
    assert "- 'exit.bias' is not in model-00001-of-00007.safetensors, where the index says it is." in lines


def test_a_model_on_the_meta_device_is_refused_by_all_three(tmp_path: Path) -> None:
    fsdp2.save_safetensors(MLP(num_blocks=0), tmp_path)
    with torch.device("meta"):
        model = MLP(num_blocks=0)
    advice = "is on the meta device. Call model.to_empty(device=...) first."
    message = _message(lambda: fsdp2.load_safetensors(model, tmp_path), tmp_path)
    assert message.count(advice) == 4
    for name, call in (
        ("save_safetensors", lambda: fsdp2.save_safetensors(model, tmp_path)),
        ("stream_full_params", lambda: fsdp2.stream_full_params(model)),
    ):
        assert _message(call, tmp_path).startswith(
            f"RuntimeError: {name}: 'entry.weight' is still on the meta device. Call model.to_empty(device=...)"
        )


@pytest.mark.parametrize("size", ["5", "GB", "0GB", 0, -1, True, "1.2.3GB", None, float("nan"), float("inf")])
def test_sizes_that_are_none_are_refused(size: Any, tmp_path: Path) -> None:
    message = _message(lambda: fsdp2.save_safetensors(MLP(), tmp_path, max_shard_size=size), tmp_path)
    assert message == (
        f"ValueError: save_safetensors: max_shard_size is {size!r}, expected a number of bytes, or a number and a unit "
        "of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB, such as '5GB'."
    )
    assert not list(tmp_path.iterdir())


def test_names_that_meet_are_refused(tmp_path: Path) -> None:
    model = MLP(num_blocks=0)
    message = _message(lambda: fsdp2.save_safetensors(model, tmp_path, rename=lambda name: "one"), tmp_path)
    assert message.startswith(
        "ValueError: save_safetensors: 'entry.weight' and 'entry.bias' are both renamed to 'one'."
    )
    fsdp2.save_safetensors(model, tmp_path)
    rename = {"exit.bias": "entry.bias"}
    message = _message(lambda: fsdp2.load_safetensors(model, tmp_path, rename=rename), tmp_path)
    assert "' are both renamed to 'entry.bias'." in message


@pytest.mark.parametrize(
    ("rename", "problem"),
    [
        (3, "rename is a int, expected a mapping or a function of a name."),
        ({"entry.bias": 3}, "rename gives 3 for 'entry.bias', expected a name, or None to leave the tensor out."),
        (lambda name: [name], "rename gives ['entry.weight'] for 'entry.weight', expected a name"),
    ],
)
def test_new_names_that_are_none_are_refused(rename: Any, problem: str, tmp_path: Path) -> None:
    model = MLP(num_blocks=0)
    for run in (fsdp2.save_safetensors, fsdp2.load_safetensors):
        message = _message(functools.partial(run, model, tmp_path, rename=rename), tmp_path)
        assert message.startswith(f"TypeError: {problem}")
        fsdp2.save_safetensors(model, tmp_path)


@pytest.mark.parametrize("dtype", [torch.int64, "bf16"])
def test_a_dtype_that_would_lose_the_values_is_refused(dtype: Any, tmp_path: Path) -> None:
    model = MLP(num_blocks=0)
    expected = f"dtype is {dtype!r}, expected a floating-point dtype, such as torch.bfloat16."
    save = _message(lambda: fsdp2.save_safetensors(model, tmp_path, dtype=dtype), tmp_path)
    assert (save, list(tmp_path.iterdir())) == (f"TypeError: save_safetensors: {expected}", [])
    stream = _message(lambda: fsdp2.stream_full_params(model, dtype), tmp_path)
    assert stream == f"TypeError: stream_full_params: {expected}"


def test_a_dtype_that_safetensors_does_not_have_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, dtype=torch.complex128)
    message = _message(lambda: fsdp2.save_safetensors(model, tmp_path), tmp_path)
    assert message.startswith("ValueError: save_safetensors: safetensors has no name for torch.complex128")


def test_what_is_no_tensor_is_warned_of(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"step": 3}

        def set_extra_state(self, state: Any) -> None:
            raise AssertionError

    model = nn.Sequential(Extra(2, 2))
    with pytest.warns(UserWarning, match=r"not saved, because these are no tensors: 0\._extra_state"):
        fsdp2.save_safetensors(model, tmp_path)
    assert fsdp2.load_safetensors(model, tmp_path) == ([], [])


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _seeded(MLP)
    fsdp2.save_safetensors(model, tmp_path)  # needs none
    original = importlib.import_module

    def without(wanted: str, *rest: Any) -> Any:
        if wanted == "safetensors":
            raise ImportError(wanted)
        return original(wanted, *rest)

    monkeypatch.setattr(importlib, "import_module", without)
    message = _message(lambda: fsdp2.load_safetensors(model, tmp_path), tmp_path)
    assert message.startswith("ImportError: load_safetensors")
    assert message.endswith("needs safetensors, which is not installed. Run: pip install 'fsdp2[weights]'")


def test_a_file_that_fails_behind_the_checks_says_that_the_model_is_loaded_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsdp2.save_safetensors(_seeded(MLP), tmp_path)
    original = weights._slice_of

    def failing(opened: Any, key: str, weight: Any) -> Tensor:
        if key == "exit.bias":
            raise OSError(5, "Input/output error")
        return original(opened, key, weight)

    monkeypatch.setattr(weights, "_slice_of", failing)
    message = _message(lambda: fsdp2.load_safetensors(MLP(), tmp_path), tmp_path)
    assert message == (
        "RuntimeError: load_safetensors: reading 'exit.bias' of FOLDER/model.safetensors failed with OSError: "
        "[Errno 5] Input/output error\n"
        "The file was readable before. The model is loaded half: load again before you use it."
    )


# Ties


def test_tied_weights_are_saved_once_and_load_from_any_of_their_names(tmp_path: Path) -> None:
    model = _seeded(lambda: Transformer(tied=True))
    fsdp2.save_safetensors(model, tmp_path)
    saved = _read(tmp_path)
    assert "embedding.weight" in saved
    assert "output.weight" not in saved
    saved["output.weight"] = saved.pop("embedding.weight")
    both = {**saved, "embedding.weight": saved["output.weight"].clone()}
    rounded = saved["output.weight"].bfloat16()  # both round the same way
    model.embedding.weight.data.copy_(rounded)
    both["embedding.weight"], both["output.weight"], saved["output.weight"] = rounded, rounded.float(), rounded.float()
    for state in (saved, both):
        safetensors.save_file(state, tmp_path / "model.safetensors")
        other = _seeded(lambda: Transformer(tied=True), 1)
        assert fsdp2.load_safetensors(other, tmp_path) == ([], [])
        assert _same(_state(other), _state(model))
        assert other.output.weight is other.embedding.weight
    both["embedding.weight"] += 1
    safetensors.save_file(both, tmp_path / "model.safetensors")
    message = _message(lambda: fsdp2.load_safetensors(model, tmp_path), tmp_path)
    assert "- 'embedding.weight' and 'output.weight' differ, but the model ties them." in message


# Hugging Face


@pytest.mark.long
def test_transformers_loads_what_is_saved_and_the_other_way_round(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, tie_word_embeddings=True, **shape)
    model = _seeded(lambda: transformers.LlamaForCausalLM(config))
    for size in ("5GB", "20KB", "20KB"):
        fsdp2.save_safetensors(model, tmp_path, max_shard_size=size)
        model.config.save_pretrained(tmp_path)
        loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        assert _same(_state(loaded), _state(model))
    for size in ("5GB", "20KB"):
        folder = tmp_path / f"theirs {size}"
        model.save_pretrained(folder, max_shard_size=size)
        other = _seeded(lambda: transformers.LlamaForCausalLM(config), 1)
        assert fsdp2.load_safetensors(other, folder) == ([], [])
        assert _same(_state(other), _state(model))
