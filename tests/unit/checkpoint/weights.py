"""Models and their checkpoints: how they are made, compared, and refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from tests.harness.golden import GoldenTexts
from tests.harness.messages import wrapped
from tests.harness.models import MLP
from tests.harness.weight_files import bytes_of

load = fsdp2.checkpoint.load_safetensors
save = fsdp2.checkpoint.save_safetensors
Refused = dict[str, Callable[[Path], object]]  # called with a folder that has a checkpoint of an ``MLP``


def seeded(model: Callable[[], Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return model()


def small() -> nn.Module:
    """Four parameters, of 1024, 64, 512 and 32 bytes."""
    return MLP(num_blocks=0)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return small()


def refusal(call: Callable[[], object], folder: Path) -> str:
    with pytest.raises((ValueError, TypeError, OSError, RuntimeError, ImportError)) as raised:
        call()
    return f"{raised.type.__name__}: {raised.value}".replace(str(folder), "FOLDER")


def assert_refused(texts: GoldenTexts, case: str, cases: Refused, folder: Path) -> None:
    """What ``cases`` have as ``case`` is refused in the words of ``texts``, and changes no file."""
    save(seeded(MLP), folder)
    (folder / "other").mkdir()
    (folder / "other" / "other.safetensors").write_bytes(b"")
    (folder / "bad.json").write_text("[]")
    (folder / "weights.bin").write_bytes(b"")
    before = bytes_of(folder)
    texts.check(case, wrapped(refusal(lambda: cases[case](folder), folder)), among=cases)
    assert bytes_of(folder) == before
