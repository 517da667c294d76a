"""``ShardedGradScaler``: torch's loss scaler for parameters that are DTensors or flat."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as _ShardedGradScaler
from torch.distributed.tensor import DTensor

from fsdp2.core import _torch

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(_ShardedGradScaler):
    """Torch's scaler, with the same arguments: if gradients on any rank are not finite, all ranks skip the step.

    Torch's own class hands DTensors to an operator that reduces over their mesh on each call, so ranks block each
    other when one of them has no gradients. Here the operator sees only this rank's shards, and one all-reduce over
    ``process_group`` (default: all ranks) follows. Pass ``device="cpu"`` on the CPU.
    """

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        found = (param.grad for group in optimizer.param_groups for param in group["params"])
        grads = [_torch.local_of(grad) if isinstance(grad, DTensor) else grad for grad in found if grad is not None]
        on_this_rank: Any = SimpleNamespace(param_groups=[{"params": [SimpleNamespace(grad=each) for each in grads]}])
        return super()._unscale_grads_(on_this_rank, *args, **kwargs)
