"""A call that must be refused, and that nothing has changed by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.distributed.support import batch
from tests.harness.messages import error_of


class Case(NamedTuple):
    model: nn.Module
    call: Callable[[], Any]
    correct: Callable[[], Any] | None = None
    runs: bool = True


def _state(model: nn.Module) -> dict[str, Any]:
    named = dict(model.named_parameters(remove_duplicate=False))
    return {
        "classes": {name: type(module) for name, module in model.named_modules()},
        "parameters": {name: id(parameter) for name, parameter in named.items()},
        "types": {name: (type(p), tuple(p.shape), p.dtype, p.device, p.requires_grad) for name, p in named.items()},
        "grads": {name: p.grad for name, p in named.items()},
        "marks": {name: sorted(vars(p)) for name, p in named.items()},
        "hooks": {
            name: {key: len(value) for key, value in vars(module).items() if key.endswith("hooks")}
            for name, module in model.named_modules()
        },
    }


def _values(model: nn.Module) -> list[torch.Tensor]:
    locals_ = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [local.detach().clone() for local in locals_ if not local.is_meta and not local.is_sparse]


def refused(case: Case) -> str:
    """The error of the call, after all checks. ``correct``, where given, is a call that must work afterwards."""
    model, call, correct, runs = case
    output = model(batch()).detach() if runs else None  # first, since it leaves a sharded root unsharded
    before, values = _state(model), _values(model)
    error = error_of(call)
    assert _state(model) == before
    assert all(map(torch.equal, _values(model), values))
    if output is not None:
        assert torch.equal(model(batch()), output)
    if correct is not None:
        correct()
        after = model(batch())
        assert output is None or torch.allclose(after, output, atol=1e-6)
    return error
