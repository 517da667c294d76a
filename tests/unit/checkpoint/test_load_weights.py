"""Loading without a process group: what is refused, and what a tied weight is loaded from.

The words of refusals are in ``golden/load_weights.txt``.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from fsdp2.checkpoint import load_weights
from fsdp2.checkpoint.mapping import Concat, WeightRule
from tests.harness.golden import texts_beside
from tests.harness.models import MLP, Buffers, Transformer
from tests.harness.selection import long
from tests.harness.weight_files import INDEX, ONE, assert_same, read, safetensors
from tests.unit.checkpoint.weights import Refused, assert_refused, load, on_meta, refusal, save, seeded, small, state_of

TEXTS = texts_beside(__file__)
REFUSED: Refused = {
    "path that is not there": lambda folder: load(small(), folder / "nothing"),
    "folder without weights": lambda folder: load(small(), folder / "other"),
    "file of another kind": lambda folder: load(small(), folder / "weights.bin"),
    "index that is none": lambda folder: load(small(), folder / "bad.json"),
    "load on meta": lambda folder: load(on_meta(), folder, strict=False),
    "names that meet when loaded": lambda folder: load(MLP(), folder, rename={"exit.bias": "entry.bias"}),
    "rename that is none when loaded": lambda folder: load(MLP(), folder, rename=3),  # type: ignore[arg-type]
    "name that is none when loaded": lambda folder: load(MLP(), folder, rename={"entry.bias": 3}),  # type: ignore[dict-item]
    "names that are lists when loaded": lambda folder: load(MLP(), folder, rename=lambda name: [name]),  # type: ignore[arg-type, return-value]
}


@pytest.mark.parametrize("case", REFUSED)
def test_call_is_refused_and_changes_no_file(case: str, tmp_path: Path) -> None:
    assert_refused(TEXTS, case, REFUSED, tmp_path)


@pytest.mark.parametrize("cut", [3, 200, -10])
def test_a_cut_file_is_refused(cut: int, tmp_path: Path) -> None:
    save(seeded(MLP), tmp_path, max_shard_size=3000)
    file = tmp_path / "model-00002-of-00007.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    other = seeded(MLP, 1)
    message = refusal(lambda: load(other, tmp_path), tmp_path)
    first = "ValueError: load_safetensors: FOLDER does not fit this MLP. Nothing was loaded.\n"
    assert message.startswith(f"{first}- FOLDER/{file.name} cannot be read: SafetensorError:")
    assert message.count("- FOLDER") == 1
    assert_same(state_of(other), state_of(seeded(MLP, 1)))


def test_a_checkpoint_of_another_model_is_refused_with_all_its_keys(tmp_path: Path) -> None:
    save(MLP(num_blocks=12), tmp_path)
    message = refusal(lambda: load(Transformer(), tmp_path), tmp_path)
    assert "- Missing in the files: 'embedding.weight', 'blocks.0.attention_norm.weight', " in message
    assert "'blocks.4.up.weight', 'blocks.4.up.bias' and 32 more. Pass rename=" in message
    assert load(Buffers(), tmp_path, strict=False).missing_keys[0] == "blocks.0.keep"


@pytest.mark.parametrize("strict", [True, False])
def test_codes_in_8_bits_are_not_loaded_without_their_scales(strict: bool, tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)
    before, codes = state_of(model), torch.ones(2, 2, dtype=torch.float8_e4m3fn)
    safetensors.save_file({"weight": codes, "weight_scale_inv": torch.ones(1, 1)}, tmp_path / ONE)
    with pytest.raises(ValueError, match="'weight' is in 8 bits, and to be multiplied by 'weight_scale_inv'"):
        fsdp2.checkpoint.load_safetensors(model, tmp_path, strict=strict)
    assert_same(state_of(model), before)
    safetensors.save_file({"weight": codes}, tmp_path / ONE)
    fsdp2.checkpoint.load_safetensors(model, tmp_path)
    assert model.weight.eq(1).all()


def test_an_index_that_files_contradict_is_refused(tmp_path: Path) -> None:
    save(seeded(MLP), tmp_path, max_shard_size=3000)
    index = json.loads((tmp_path / INDEX).read_text())
    files = index["weight_map"]
    files.update({"exit.bias": files["entry.bias"], "exit.weight": "nowhere.safetensors"})
    (tmp_path / INDEX).write_text(json.dumps(index))
    message = refusal(lambda: load(MLP(), tmp_path), tmp_path)
    assert "\n- FOLDER/nowhere.safetensors cannot be read: FileNotFoundError: " in message
    assert "\n- 'exit.bias' is not in model-00001-of-00007.safetensors, where the index says it is.\n" in f"{message}\n"


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/../../b", "", "a\0b", 3, None, ["x"]])
def test_an_index_that_names_files_outside_of_its_folder_is_refused(name: object, tmp_path: Path) -> None:
    save(seeded(MLP), tmp_path)
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / INDEX).write_text(json.dumps({"weight_map": {"entry.bias": name}}))
    message = refusal(lambda: load(MLP(), inside), tmp_path)
    assert message.startswith(f"ValueError: load_safetensors: the index FOLDER/inside/{INDEX} cannot be read: ")


@pytest.mark.parametrize("named", ["fifo.safetensors", "index.json", "/dev/zero"])
def test_what_is_no_regular_file_is_refused_instead_of_waited_for(named: str, tmp_path: Path) -> None:
    for each in ("fifo.safetensors", "index.json"):
        os.mkfifo(tmp_path / each)
    (tmp_path / INDEX).write_text('{"weight_map": {"entry.bias": "fifo.safetensors"}}')
    for path in (tmp_path / named, tmp_path):
        with pytest.raises(ValueError, match=r"it is no regular file|expected a folder"):
            load(MLP(), path)


def test_keys_of_files_send_no_escape_sequences_to_a_terminal(tmp_path: Path) -> None:
    save(seeded(MLP), tmp_path, rename=lambda name: f"{name}\x1b[31m\x07")
    message = refusal(lambda: load(MLP(), tmp_path), tmp_path)
    assert "entry.bias\\x1b[31m\\x07" in message
    assert all(each.isprintable() for each in message.replace("\n", ""))


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeded(MLP)
    save(model, tmp_path)  # needs none
    monkeypatch.setitem(sys.modules, "safetensors", None)
    message = refusal(lambda: load(model, tmp_path), tmp_path)
    assert message.startswith("ImportError: load_safetensors")
    assert message.endswith("needs safetensors, which is not installed. Run: pip install 'fsdp2[weights]'")


def test_a_file_that_fails_late_leaves_the_model_loaded_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(seeded(MLP), tmp_path)
    original = load_weights._slice_of

    def failing(opened: Any, key: str, weight: Any) -> Tensor:
        if key == "exit.bias":
            raise OSError(5, "Input/output error")
        return original(opened, key, weight)

    monkeypatch.setattr(load_weights, "_slice_of", failing)
    assert refusal(lambda: load(MLP(), tmp_path), tmp_path) == (
        "RuntimeError: load_safetensors: reading 'exit.bias' of FOLDER/model.safetensors failed with OSError: "
        "[Errno 5] Input/output error\n"
        "The file was readable before. The model is loaded half: load again before you use it."
    )


@pytest.mark.parametrize("size", ["5GB", *long(3000)])
def test_a_default_device_changes_nothing(size: int | str, tmp_path: Path) -> None:
    """safetensors makes tensors on the default device, which may be the meta device."""
    model, other = seeded(MLP), seeded(MLP, 1)
    with torch.device("meta"):
        save(model, tmp_path, max_shard_size=size)
        load(other, tmp_path)
    assert_same(state_of(other), state_of(model))


def test_tied_weights_are_saved_once_and_load_from_any_of_their_names(tmp_path: Path) -> None:
    model = seeded(lambda: Transformer(tied=True))
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
        other = seeded(lambda: Transformer(tied=True), 1)
        assert load(other, tmp_path) == ([], [])
        assert_same(state_of(other), state_of(model))
        assert other.output.weight is other.embedding.weight
    both["embedding.weight"] += 1
    safetensors.save_file(both, tmp_path / ONE)
    message = refusal(lambda: load(model, tmp_path), tmp_path)
    assert "- 'embedding.weight' and 'output.weight' differ, but the model ties them." in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_tied_weight_with_nan_is_the_same_under_each_name(dtype: torch.dtype, tmp_path: Path) -> None:
    model = seeded(lambda: Transformer(tied=True)).to(dtype)
    model.embedding.weight.data[0] = float("nan")
    save(model, tmp_path)
    saved = read(tmp_path)
    both = {**saved, "output.weight": saved["embedding.weight"].clone()}
    safetensors.save_file(both, tmp_path / ONE)
    other = seeded(lambda: Transformer(tied=True), 1).to(dtype)
    assert load(other, tmp_path) == ([], [])
    assert torch.equal(other.output.weight.view(torch.uint8), model.output.weight.view(torch.uint8))
    both["output.weight"][0] = 1.0
    safetensors.save_file(both, tmp_path / ONE)
    assert "differ, but the model ties them." in refusal(lambda: load(model, tmp_path), tmp_path)


def test_a_tied_weight_is_compared_with_what_a_rule_makes_and_rename_gets_the_rest(tmp_path: Path) -> None:
    model = seeded(lambda: Transformer(tied=True))
    rule = WeightRule("output.weight", Concat(["low", "high"], sizes=(1, 2)))
    save(model, tmp_path, mapping=[rule], rename=lambda name: f"old.{name}")
    saved = read(tmp_path)
    assert [key for key in saved if not key.startswith("old.")] == ["low", "high"]
    saved["old.embedding.weight"] = torch.cat([saved["low"], saved["high"]])
    for change, said in ((0, None), (1, "'old.embedding.weight' and 'low' differ, but the model ties them.")):
        saved["old.embedding.weight"] += change
        safetensors.save_file(saved, tmp_path / ONE)
        other = seeded(lambda: Transformer(tied=True), 1)
        call = functools.partial(load, other, tmp_path, mapping=[rule], rename=lambda key: key.removeprefix("old."))
        if said is None:
            assert call() == ([], [])
            assert_same(state_of(other), state_of(model))
        else:
            assert said in refusal(call, tmp_path)
