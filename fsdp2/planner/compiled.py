"""What autograd keeps of a block under ``torch.compile``, which recomputes what is cheaper to compute than to keep.

The block is traced as ``torch.compile`` would, and torch's own partitioner decides. Nothing is compiled.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fsdp2.core import find_tensors, map_tensors
from fsdp2.extras import torch_names

_tracing: list[bool] = []


def is_tracing() -> bool:
    """Whether :func:`saved_when_compiled` runs, which takes operations apart."""
    return bool(_tracing)


class _Called(nn.Module):
    """Calls ``forward``, a method of ``module``, so that its parameters can be passed."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


def saved_when_compiled(
    module: nn.Module, forward: Callable[..., Any], given: tuple[tuple[Any, ...], dict[str, Any]]
) -> list[Tensor] | None:
    """The tensors that backward keeps of ``forward``, a method of ``module``, with parameters and inputs. None if it
    cannot be traced: ``torch.compile`` would break it into several graphs, or leave it eager.

    ``given``: its arguments."""
    functorch: Any = importlib.import_module("functorch.compile")  # slow to import

    called = _Called(module, forward)
    params, buffers = dict(called.named_parameters()), dict(called.named_buffers())

    def run(params: dict[str, Tensor], leaves: list[Tensor]) -> list[Tensor]:
        left = iter(leaves)
        args, kwargs = map_tensors(lambda _: next(left), given)
        output = functional_call(called, {**params, **buffers}, args, kwargs, tie_weights=False)
        return find_tensors((output,), [])

    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    partition = functorch.min_cut_rematerialization_partition
    compiled = functorch.aot_function(
        run, functorch.nop, functorch.nop, partition_fn=partition, decompositions=torch_names.decompositions()
    )
    _tracing.append(True)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            compiled(params, find_tensors(given, []))
    except Exception:  # whatever the user's module does
        return None
    finally:
        _tracing.pop()
    return saved
