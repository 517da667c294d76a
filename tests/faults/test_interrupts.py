"""Ctrl-C at any call inside of a save, a load or a stream: files are whole, and the next use says what is not."""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2.checkpoint import load_safetensors, save_safetensors, stream_full_params
from tests.harness.models import MLP
from tests.harness.selection import long
from tests.harness.weight_files import assert_same, read
from tests.unit.checkpoint.weights import seeded, state_of

_OURS = str(Path(fsdp2.__file__).parent)

# Of files that the collector closes.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")


def _calls_until_interrupt(run: Callable[[], object], number: int) -> int:
    """Raise in the function of fsdp2 that ``run`` calls as that number, as Python's handler of SIGINT does between two
    lines. Returns how many were called."""
    count = 0

    def interrupt(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        code = frame.f_code
        if event == "call" and _OURS in code.co_filename and not code.co_flags & inspect.CO_GENERATOR:
            count += 1
            if count == number:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            run()
    finally:
        sys.setprofile(None)
    return count


def _at_calls(run: Callable[[], object], check: Callable[[], object], every: int) -> int:
    """Run it again and again, interrupted ever later, and check what is left. Returns how many calls there are."""
    for number in itertools.count(1, every):
        if _calls_until_interrupt(run, number) < number:
            return number
        check()
    raise AssertionError


@pytest.mark.parametrize("every", [97, *long(7)])
def test_a_save_leaves_the_old_checkpoint_or_the_new_one(every: int, tmp_path: Path) -> None:
    models = [seeded(MLP), seeded(MLP)]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.add_(1)

    def check() -> None:
        names = {path.name for path in tmp_path.iterdir()}
        found = read(tmp_path)
        is_new = torch.equal(found["entry.weight"], models[1].entry.weight)
        assert_same(found, state_of(models[is_new]))
        gc.collect()  # an interrupt just before a file is closed leaves it to the collector
        save_safetensors(models[0], tmp_path, max_shard_size=3000)
        assert len({path.name for path in tmp_path.iterdir()}) == count, names

    save_safetensors(models[0], tmp_path, max_shard_size=3000)
    count = len(list(tmp_path.iterdir()))
    assert _at_calls(lambda: save_safetensors(models[1], tmp_path, max_shard_size=3000), check, every) > 50


@pytest.mark.parametrize("every", [7, *long(1)])
def test_after_a_load_forward_says_once_that_values_are_mixed(every: int, tmp_path: Path) -> None:
    old, new, model = seeded(MLP), seeded(MLP), seeded(MLP)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(1)
    save_safetensors(old, tmp_path / "old")
    save_safetensors(new, tmp_path / "new")
    heard = []

    def check() -> None:
        mixed = not any(_equal(model, each) for each in (old, new))
        try:
            model(torch.ones(2, 16))
        except RuntimeError as error:
            heard.append(str(error))
        else:
            assert not mixed
        model(torch.ones(2, 16))
        load_safetensors(model, tmp_path / "old")
        assert _equal(model, old)

    assert _at_calls(lambda: load_safetensors(model, tmp_path / "new"), check, every) > 50
    assert len(set(heard)) == 1
    assert heard[0].startswith("load_safetensors was interrupted while it wrote the parameters of this MLP, so some")


def _equal(model: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def test_a_stream_can_be_begun_again() -> None:
    model = seeded(MLP)

    def check() -> None:
        assert_same({name: tensor.clone() for name, tensor in stream_full_params(model)}, state_of(model))

    assert _at_calls(lambda: [None for _ in stream_full_params(model, bucket_nbytes=3000)], check, 5) > 10
