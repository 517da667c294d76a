"""Saving and loading without a process group: what files look like, what is refused, and what a kill leaves behind.

The words of refusals are in ``golden/weights.txt``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from fsdp2.checkpoint import load_weights, save_weights, weights
from fsdp2.checkpoint.mapping import Concat, WeightRule
from tests.harness.golden import texts_beside
from tests.harness.messages import wrapped
from tests.harness.models import MLP, Buffers, Transformer
from tests.harness.pool import PRELOADED
from tests.harness.selection import long
from tests.harness.weight_files import INDEX, ONE, assert_same, bytes_of, listed, read, safetensors

TEXTS = texts_beside(__file__)


def _seeded(model: Callable[[], Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return model()


def _small() -> nn.Module:
    """Four parameters, of 1024, 64, 512 and 32 bytes."""
    return MLP(num_blocks=0)


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def _assert_nothing_but(model: nn.Module, folder: Path) -> None:
    """The folder has the files of one checkpoint of ``model``, and no others."""
    assert_same(read(folder), _state(model))
    expected = {INDEX, *listed(folder).values()} if (folder / INDEX).exists() else {ONE}
    assert {each.name for each in folder.iterdir()} == expected


# Files


@pytest.mark.parametrize("size", ["5GB", 3000, "1.5kb", 1])
def test_files_are_no_larger_than_asked_for_and_hold_everything_once(size: int | str, tmp_path: Path) -> None:
    model, folder = _seeded(MLP), tmp_path / "new" / "folder"
    fsdp2.checkpoint.save_safetensors(model, folder, max_shard_size=size)
    _assert_nothing_but(model, folder)
    files = {path.name: safetensors.load_file(path) for path in folder.glob("*.safetensors")}
    assert sorted(key for tensors in files.values() for key in tensors) == sorted(model.state_dict())
    limit = {"5GB": 5 * 10**9, "1.5kb": 1500}.get(size, size)  # type: ignore[call-overload]
    for tensors in files.values():
        assert len(tensors) == 1 or sum(each.nbytes for each in tensors.values()) <= limit
    if size != "5GB":
        metadata = json.loads((folder / INDEX).read_text())["metadata"]
        assert metadata["total_size"] == sum(each.nbytes for each in _state(model).values())
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
    for key, value in _state(model).items():
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
    assert all(torch.equal(a, b) for a, b in zip(_state(other).values(), _state(model).values(), strict=True))


def test_a_new_checkpoint_replaces_the_old_one_and_leaves_other_files(tmp_path: Path) -> None:
    for seed, size in enumerate([3000, "5GB", "5GB", 3000, 3000, 1000]):
        (tmp_path / "config.json").write_text("{}")
        model = _seeded(MLP, seed)
        fsdp2.checkpoint.save_safetensors(model, tmp_path, max_shard_size=size)
        assert (tmp_path / INDEX).exists() is (size != "5GB")
        assert (tmp_path / "config.json").read_text() == "{}"
        (tmp_path / "config.json").unlink()
        _assert_nothing_but(model, tmp_path)


def test_without_hard_links_the_new_files_keep_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", mock.Mock(side_effect=OSError("no hard links")))
    for seed in range(2):
        fsdp2.checkpoint.save_safetensors(_seeded(MLP, seed), tmp_path, max_shard_size=3000)
        _assert_nothing_but(_seeded(MLP, seed), tmp_path)


@pytest.mark.parametrize("num_indices", [0, 1])
def test_full_disk_leaves_a_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_indices: int) -> None:
    """The old one, or, from the first index on, the new one. Nothing is left of the other."""
    models = _seeded(MLP, 0), _seeded(MLP, 1)
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
    fsdp2.checkpoint.save_safetensors(_seeded(_small, 1), folder, max_shard_size=size)


def _is(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.long
@pytest.mark.parametrize(("old", "new"), [(1100, 1100), *LONG])
def test_a_kill_at_any_moment_leaves_one_complete_checkpoint(old: int | str, new: int | str, tmp_path: Path) -> None:
    before, after = _state(_seeded(_small)), _state(_seeded(_small, 1))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    found = []
    for stop in range(1000):
        folder = tmp_path / str(stop)
        fsdp2.checkpoint.save_safetensors(_seeded(_small), folder, max_shard_size=old)
        process = context.Process(target=_save_until, args=(str(folder), new, stop))
        process.start()
        process.join()
        loaded = _seeded(_small, 2)
        fsdp2.checkpoint.load_safetensors(loaded, folder)
        assert_same(read(folder), _state(loaded))
        assert _is(_state(loaded), before) or _is(_state(loaded), after), f"killed at call {stop}"
        found.append(_is(_state(loaded), after))
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        fsdp2.checkpoint.save_safetensors(_seeded(_small), folder)  # removes what the killed one has left
        _assert_nothing_but(_seeded(_small), folder)
    assert found == sorted(found)  # first the old one, then the new one
    assert (found[0], found[-1]) == (False, True)
    assert len(found) > 10


load, save, stream = (
    fsdp2.checkpoint.load_safetensors,
    fsdp2.checkpoint.save_safetensors,
    fsdp2.checkpoint.stream_full_params,
)


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return _small()


def _same(*tensors: Tensor) -> dict[str, Tensor]:
    return {"same": tensors[0]}


# In a folder that has a checkpoint of an ``MLP``.
REFUSED: dict[str, Callable[[Path], object]] = {
    "path that is not there": lambda folder: load(_small(), folder / "nothing"),
    "folder without weights": lambda folder: load(_small(), folder / "other"),
    "file of another kind": lambda folder: load(_small(), folder / "weights.bin"),
    "index that is none": lambda folder: load(_small(), folder / "bad.json"),
    "folder that cannot be made": lambda folder: save(_small(), folder / "weights.bin" / "weights"),
    "load on meta": lambda folder: load(_on_meta(), folder, strict=False),
    "save on meta": lambda folder: save(_on_meta(), folder),
    "stream on meta": lambda folder: stream(_on_meta()),
    "names that meet when saved": lambda folder: save(_small(), folder, rename=lambda name: "one"),
    "names that meet when loaded": lambda folder: load(MLP(), folder, rename={"exit.bias": "entry.bias"}),
    "rename that is none when saved": lambda folder: save(_small(), folder, rename=3),  # type: ignore[arg-type]
    "rename that is none when loaded": lambda folder: load(MLP(), folder, rename=3),  # type: ignore[arg-type]
    "name that is none when saved": lambda folder: save(_small(), folder, rename={"entry.bias": 3}),  # type: ignore[dict-item]
    "name that is none when loaded": lambda folder: load(MLP(), folder, rename={"entry.bias": 3}),  # type: ignore[dict-item]
    "names that are lists when saved": lambda folder: save(_small(), folder, rename=lambda name: [name]),  # type: ignore[arg-type, return-value]
    "names that are lists when loaded": lambda folder: load(MLP(), folder, rename=lambda name: [name]),  # type: ignore[arg-type, return-value]
    "integers to save": lambda folder: save(_small(), folder, dtype=torch.int64),
    "integers to stream": lambda folder: stream(_small(), torch.int64),
    "dtype by name to save": lambda folder: save(_small(), folder, dtype="bf16"),  # type: ignore[arg-type]
    "dtype by name to stream": lambda folder: stream(_small(), "bf16"),  # type: ignore[arg-type]
    "bytes of a bucket that are none": lambda folder: stream(_small(), bucket_nbytes="much"),
    "receiver that is not there": lambda folder: stream(_small(), to_rank=1),
    "buckets ahead that are too many": lambda folder: stream(_small(), ahead=2),
    "device that is none": lambda folder: stream(_small(), device="somewhere"),
    "device without values": lambda folder: stream(_small(), device="meta"),
    "names that meet when streamed": lambda folder: stream(_small(), rename=lambda name: "one"),
    "rename that raises when streamed": lambda folder: stream(_small(), rename=lambda name: [][0]),
    "transform that is none": lambda folder: stream(_small(), transform=abs),  # type: ignore[arg-type]
    "transform to no function": lambda folder: stream(_small(), transform={"entry.bias": 3}),  # type: ignore[dict-item]
    "transform of a name that is not there": lambda folder: stream(_small(), transform={"entry.gain": dict}),
    "transform of one name twice": lambda folder: stream(_small(), transform={("entry.bias", "entry.bias"): _same}),
    "transform of one name in two": lambda folder: stream(
        _small(), transform={("entry.bias", "entry.weight"): _same, "entry.weight": _same}
    ),
    "transform that makes no names": lambda folder: stream(_small(), transform={"entry.bias": torch.relu}),  # type: ignore[dict-item]
    "transform that raises": lambda folder: stream(_small(), transform={"entry.bias": lambda bias: bias.names_it}),
    "transform to names that are there": lambda folder: stream(
        _small(), transform={"entry.bias": lambda bias: {"entry.weight": bias}}
    ),
    "lora without adapters": lambda folder: fsdp2.checkpoint.merge_lora(_small()),
    "dtype that safetensors does not have": lambda folder: save(nn.Linear(2, 2, dtype=torch.complex128), folder),
}


def _refusal(call: Callable[[], object], folder: Path) -> str:
    with pytest.raises((ValueError, TypeError, OSError, RuntimeError, ImportError)) as raised:
        call()
    return f"{raised.type.__name__}: {raised.value}".replace(str(folder), "FOLDER")


@pytest.mark.parametrize("case", REFUSED)
def test_call_is_refused_and_changes_no_file(case: str, tmp_path: Path) -> None:
    save(_seeded(MLP), tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "other.safetensors").write_bytes(b"")
    (tmp_path / "bad.json").write_text("[]")
    (tmp_path / "weights.bin").write_bytes(b"")
    before = bytes_of(tmp_path)
    TEXTS.check(case, wrapped(_refusal(lambda: REFUSED[case](tmp_path), tmp_path)), among=REFUSED)
    assert bytes_of(tmp_path) == before


@pytest.mark.parametrize("size", ["5", "GB", "0GB", 0, -1, True, "1.2.3GB", None, float("nan"), float("inf")])
def test_sizes_that_are_none_are_refused(size: Any, tmp_path: Path) -> None:
    assert _refusal(lambda: save(MLP(), tmp_path, max_shard_size=size), tmp_path) == (
        f"ValueError: save_safetensors: max_shard_size is {size!r}, expected a number of bytes, or a number and a unit "
        "of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB, such as '5GB'."
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cut", [3, 200, -10])
def test_a_cut_file_is_refused(cut: int, tmp_path: Path) -> None:
    save(_seeded(MLP), tmp_path, max_shard_size=3000)
    file = tmp_path / "model-00002-of-00007.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    other = _seeded(MLP, 1)
    message = _refusal(lambda: load(other, tmp_path), tmp_path)
    first = "ValueError: load_safetensors: FOLDER does not fit this MLP. Nothing was loaded.\n"
    assert message.startswith(f"{first}- FOLDER/{file.name} cannot be read: SafetensorError:")
    assert message.count("- FOLDER") == 1
    assert_same(_state(other), _state(_seeded(MLP, 1)))


def test_a_checkpoint_of_another_model_is_refused_with_all_its_keys(tmp_path: Path) -> None:
    save(MLP(num_blocks=12), tmp_path)
    message = _refusal(lambda: load(Transformer(), tmp_path), tmp_path)
    assert "- Missing in the files: 'embedding.weight', 'blocks.0.attention_norm.weight', " in message
    assert "'blocks.4.up.weight', 'blocks.4.up.bias' and 32 more. Pass rename=" in message
    assert load(Buffers(), tmp_path, strict=False).missing_keys[0] == "blocks.0.keep"


@pytest.mark.parametrize("strict", [True, False])
def test_codes_in_8_bits_are_not_loaded_without_their_scales(strict: bool, tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)
    before, codes = _state(model), torch.ones(2, 2, dtype=torch.float8_e4m3fn)
    safetensors.save_file({"weight": codes, "weight_scale_inv": torch.ones(1, 1)}, tmp_path / ONE)
    with pytest.raises(ValueError, match="'weight' is in 8 bits, and to be multiplied by 'weight_scale_inv'"):
        fsdp2.checkpoint.load_safetensors(model, tmp_path, strict=strict)
    assert_same(_state(model), before)
    safetensors.save_file({"weight": codes}, tmp_path / ONE)
    fsdp2.checkpoint.load_safetensors(model, tmp_path)
    assert model.weight.eq(1).all()


def test_an_index_that_files_contradict_is_refused(tmp_path: Path) -> None:
    save(_seeded(MLP), tmp_path, max_shard_size=3000)
    index = json.loads((tmp_path / INDEX).read_text())
    files = index["weight_map"]
    files.update({"exit.bias": files["entry.bias"], "exit.weight": "nowhere.safetensors"})
    (tmp_path / INDEX).write_text(json.dumps(index))
    message = _refusal(lambda: load(MLP(), tmp_path), tmp_path)
    assert "\n- FOLDER/nowhere.safetensors cannot be read: FileNotFoundError: " in message
    assert "\n- 'exit.bias' is not in model-00001-of-00007.safetensors, where the index says it is.\n" in f"{message}\n"


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


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _seeded(MLP)
    save(model, tmp_path)  # needs none
    monkeypatch.setitem(sys.modules, "safetensors", None)
    message = _refusal(lambda: load(model, tmp_path), tmp_path)
    assert message.startswith("ImportError: load_safetensors")
    assert message.endswith("needs safetensors, which is not installed. Run: pip install 'fsdp2[weights]'")


def test_a_file_that_fails_late_leaves_the_model_loaded_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(_seeded(MLP), tmp_path)
    original = load_weights._slice_of

    def failing(opened: Any, key: str, weight: Any) -> Tensor:
        if key == "exit.bias":
            raise OSError(5, "Input/output error")
        return original(opened, key, weight)

    monkeypatch.setattr(load_weights, "_slice_of", failing)
    assert _refusal(lambda: load(MLP(), tmp_path), tmp_path) == (
        "RuntimeError: load_safetensors: reading 'exit.bias' of FOLDER/model.safetensors failed with OSError: "
        "[Errno 5] Input/output error\n"
        "The file was readable before. The model is loaded half: load again before you use it."
    )


@pytest.mark.parametrize("size", ["5GB", *long(3000)])
def test_a_default_device_changes_nothing(size: int | str, tmp_path: Path) -> None:
    """safetensors makes tensors on the default device, which may be the meta device."""
    model, other = _seeded(MLP), _seeded(MLP, 1)
    with torch.device("meta"):
        save(model, tmp_path, max_shard_size=size)
        load(other, tmp_path)
    assert_same(_state(other), _state(model))


def test_tied_weights_are_saved_once_and_load_from_any_of_their_names(tmp_path: Path) -> None:
    model = _seeded(lambda: Transformer(tied=True))
    save(model, tmp_path)
    saved = read(tmp_path)
    assert "embedding.weight" in saved
    assert "output.weight" not in saved
    saved["output.weight"] = saved.pop("embedding.weight")
    both = {**saved, "embedding.weight": saved["output.weight"].clone()}
    rounded = saved["output.weight"].bfloat16()  # both round the same way
    model.embedding.weight.data.copy_(rounded)
    both["embedding.weight"], both["output.weight"], saved["output.weight"] = rounded, rounded.float(), rounded.float()
    for state in (saved, both):
        safetensors.save_file(state, tmp_path / ONE)
        other = _seeded(lambda: Transformer(tied=True), 1)
        assert load(other, tmp_path) == ([], [])
        assert_same(_state(other), _state(model))
        assert other.output.weight is other.embedding.weight
    both["embedding.weight"] += 1
    safetensors.save_file(both, tmp_path / ONE)
    message = _refusal(lambda: load(model, tmp_path), tmp_path)
    assert "- 'embedding.weight' and 'output.weight' differ, but the model ties them." in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_tied_weight_with_nan_is_the_same_under_each_name(dtype: torch.dtype, tmp_path: Path) -> None:
    model = _seeded(lambda: Transformer(tied=True)).to(dtype)
    model.embedding.weight.data[0] = float("nan")
    save(model, tmp_path)
    saved = read(tmp_path)
    both = {**saved, "output.weight": saved["embedding.weight"].clone()}
    safetensors.save_file(both, tmp_path / ONE)
    other = _seeded(lambda: Transformer(tied=True), 1).to(dtype)
    assert load(other, tmp_path) == ([], [])
    assert torch.equal(other.output.weight.view(torch.uint8), model.output.weight.view(torch.uint8))
    both["output.weight"][0] = 1.0
    safetensors.save_file(both, tmp_path / ONE)
    assert "differ, but the model ties them." in _refusal(lambda: load(model, tmp_path), tmp_path)


def test_a_tied_weight_is_compared_with_what_a_rule_makes_and_rename_gets_the_rest(tmp_path: Path) -> None:
    model = _seeded(lambda: Transformer(tied=True))
    rule = WeightRule("output.weight", Concat(["low", "high"], sizes=(1, 2)))
    save(model, tmp_path, mapping=[rule], rename=lambda name: f"old.{name}")
    saved = read(tmp_path)
    assert [key for key in saved if not key.startswith("old.")] == ["low", "high"]
    saved["old.embedding.weight"] = torch.cat([saved["low"], saved["high"]])
    for change, said in ((0, None), (1, "'old.embedding.weight' and 'low' differ, but the model ties them.")):
        saved["old.embedding.weight"] += change
        safetensors.save_file(saved, tmp_path / ONE)
        other = _seeded(lambda: Transformer(tied=True), 1)
        call = functools.partial(load, other, tmp_path, mapping=[rule], rename=lambda key: key.removeprefix("old."))
        if said is None:
            assert call() == ([], [])
            assert_same(_state(other), _state(model))
        else:
            assert said in _refusal(call, tmp_path)
