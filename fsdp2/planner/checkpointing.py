"""Activation checkpointing of one module, by torch's own ``checkpoint``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp2.planner.work import Checkpointing


def recompute(module: nn.Module, checkpointing: Checkpointing | str) -> None:
    """Let ``module`` recompute activations in its backward. Call it before ``fully_shard``.

    Args:
        checkpointing: ``"full"`` keeps only the inputs of ``module``. ``"selective"`` also keeps attention and every
            second matrix product; it counts only ``mm`` and ``addmm``. Batched and grouped products, such as those of
            experts, run again. ``"none"`` changes nothing.

    Raises:
        ValueError: ``checkpointing`` is none of these.
    """
    kind = Checkpointing(checkpointing)
    if kind is Checkpointing.NONE:
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if kind is Checkpointing.SELECTIVE:
        options["context_fn"] = _selective_contexts
    module.forward = functools.partial(checkpoint, module.forward, **options)


def _selective_contexts() -> Any:
    num_products = {False: 0, True: 0}  # in forward, and in recomputation

    def policy(ctx: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = "scaled_dot_product" in str(function)
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):  # without and with a bias
            keeps = num_products[ctx.is_recompute] % 2 == 0
            num_products[ctx.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
