"""Names without the wrappers around modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

from fsdp2.extras.plain_names import plain_name, plain_named_modules, without


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def _model() -> nn.Module:
    """A module in three wrappers, twice in the tree, with an empty one inside."""
    inner = nn.Sequential(nn.Linear(2, 2), nn.Sequential())
    wrapped = checkpoint_wrapper(_compiled(checkpoint_wrapper(inner)))
    return nn.ModuleDict({"first": wrapped, "second": nn.ModuleList([wrapped, offload_wrapper(nn.Sequential())])})


def test_names_of_modules_parameters_and_state_dicts_lose_their_wrappers() -> None:
    model = _model()
    names = {name for name, _ in plain_named_modules(model, remove_duplicate=False)}
    assert names == {"", "first", "first.0", "first.1", "second", "second.0", "second.0.0", "second.0.1", "second.1"}
    expected = [f"{path}.{name}" for path in ("first.0", "second.0.0") for name in ("weight", "bias")]
    assert [plain_name(model, name) for name, _ in model.named_parameters(remove_duplicate=False)] == expected
    assert [plain_name(model, name) for name in model.state_dict()] == expected


@pytest.mark.parametrize("name", ["", "absent.weight", "first.absent", "first._extra_state"])
def test_what_is_no_wrapper_keeps_its_name(name: str) -> None:
    """Hooks of users may rename what is in a state dict."""
    assert plain_name(_model(), name) == name


def test_words_in_names_are_no_parts_of_them() -> None:
    assert without("a._orig_mod.my_orig_mod._fsdp_wrapped_module") == "a.my_orig_mod"
