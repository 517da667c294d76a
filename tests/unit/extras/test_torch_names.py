"""The hook for gradients of what the calls of a submodule return; the store that ranks share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import CommunicationError
from fsdp2.core import _torch
from fsdp2.core.trees import find_tensors
from fsdp2.extras import torch_names


class _Twice(nn.Module):
    """Returns a tensor, or several of them inside of something."""

    def __init__(self, *, nested: bool) -> None:
        super().__init__()
        self.linear, self._nested = nn.Linear(3, 3), nested

    def forward(self, x: Tensor) -> Tensor | dict[str, list[Tensor]]:
        first, second = self.linear(x).tanh(), x.detach()
        return {"several": [first, second]} if self._nested else first


def _watched(*, nested: bool = False, is_late: bool = False) -> tuple[_Twice, list[Tensor]]:
    module, seen = _Twice(nested=nested), []
    module.hook = _torch.GradientHook(lambda gradient: seen.append(gradient.clone()))  # type: ignore[assignment]
    torch_names.watch_calls(module, module.hook, find_tensors, lambda: is_late)  # type: ignore[arg-type]
    return module, seen


@pytest.mark.parametrize("nested", [False, True])
def test_a_gradient_of_an_output_calls_the_hook_once(nested: bool) -> None:
    module, seen = _watched(nested=nested)
    with torch.no_grad():
        assert nested or module(torch.randn(2, 3)).grad_fn is None  # what needs no gradient has no hook
    output = module(torch.randn(2, 3))
    (output["several"][0] if nested else output).sum().backward()
    assert [each.tolist() for each in seen] == [[[1.0] * 3] * 2]


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_calls_the_hook_once_unless_it_is_late(use_reentrant: bool, is_late: bool) -> None:
    """Reentrant checkpointing has no graph before: its second forward makes one, inside of the backward. Once the
    unit's backward has begun, gradients inside it say nothing new. A forward is never late."""
    module, seen = _watched(is_late=is_late)
    checkpoint(module, torch.randn(2, 3, requires_grad=True), use_reentrant=use_reentrant).sum().backward()
    assert module.linear.weight.grad is not None
    assert len(seen) == (0 if use_reentrant and is_late else 1)


def test_a_process_group_that_was_destroyed_is_named_as_the_cause() -> None:
    """Here, there is none."""
    with pytest.raises(
        CommunicationError, match=r"destroyed.*Call torch\.distributed\.destroy_process_group\(\) after"
    ):
        torch_names.default_store()
