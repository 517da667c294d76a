"""Names, parameters and defaults of ``torch.distributed.fsdp``, as far as FSDP1 has them, are there."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.fsdp import sharded_grad_scaler, wrap as their_wrap
from torch.distributed.fsdp._fsdp_extensions import FSDPExtensions

import fsdp2
import fsdp2.fsdp1 as ours
from fsdp2.fsdp1 import wrap as our_wrap

OF_FSDP2 = {  # the other names of torch.distributed.fsdp
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
}


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """Without annotations: ours have fewer private types."""
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


def methods(cls: type) -> dict[str, Any]:
    """What the class itself defines for users."""
    names = (name for name in vars(cls) if not name.startswith("_") or name in ("__init__", "_unshard"))
    return {name: inspect.getattr_static(cls, name) for name in names}


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the list of names is that of torch 2.13")
def test_all_names_are_there() -> None:
    assert set(theirs.__all__) - OF_FSDP2 <= set(ours.__all__)
    assert set(their_wrap.__all__) <= set(our_wrap.__all__)
    assert set(theirs.__all__) >= OF_FSDP2
    assert set(theirs.__all__) & OF_FSDP2 <= set(fsdp2.__all__) | {"UnshardHandle"}


IN_TORCH = methods(theirs.FullyShardedDataParallel)


@pytest.mark.parametrize("name", sorted(IN_TORCH))
def test_methods_take_what_those_of_torchs_class_take(name) -> None:
    cls = ours.FullyShardedDataParallel
    expected, found = IN_TORCH[name], inspect.getattr_static(cls, name, None)
    assert type(found) is type(expected), f"{name}: {found} and {expected}"
    if isinstance(expected, property):
        return
    passes_on = name in ("named_parameters", "named_buffers")  # torch's class: to nn.Module, with *args
    of_torch = nn.Module if passes_on else theirs.FullyShardedDataParallel
    assert parameters(getattr(cls, name)) == parameters(getattr(of_torch, name))


def test_the_scaler_and_extensions_take_what_torchs_take() -> None:
    assert parameters(ours.ShardedGradScaler) == parameters(sharded_grad_scaler.ShardedGradScaler)
    assert ours.FSDPExtensions.__abstractmethods__ == FSDPExtensions.__abstractmethods__
    for name in FSDPExtensions.__abstractmethods__:
        assert parameters(getattr(ours.FSDPExtensions, name)) == parameters(getattr(FSDPExtensions, name)), name
