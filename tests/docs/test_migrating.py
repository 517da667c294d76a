"""The migration page lists everything that torch's FSDP2 has and fsdp2 does not, and nothing else."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch.distributed.fsdp import _fully_shard  # without the wrapper class and its like

import fsdp2
from tests.docs.markdown import ROOT

TEXT = (ROOT / "docs" / "migrating.md").read_text()

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason=f"the page was made for torch 2.13, not {torch.__version__}"
)


def _methods(cls: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(cls, callable) if not name.startswith("_")}


def _not_there_yet() -> set[str]:
    (body,) = re.findall(r"^### Not there yet\n(.*?)^## ", TEXT, re.DOTALL | re.MULTILINE)
    return set(re.findall(r"`(\w+)`", body))


def test_every_missing_method_is_listed_and_no_other() -> None:
    listed = {name for name in _not_there_yet() if name.startswith("set_")} - {"set_gradient_divide_factor"}
    assert listed == _methods(theirs.FSDPModule) - _methods(fsdp2.FSDPModule)


def test_every_missing_argument_is_listed() -> None:
    arguments = [set(inspect.signature(package.fully_shard).parameters) for package in (theirs, fsdp2)]
    assert arguments[0] - arguments[1] <= _not_there_yet()


def test_every_missing_name_of_fsdp2_is_listed() -> None:
    assert set(_fully_shard.__all__) - set(fsdp2.__all__) <= _not_there_yet()
