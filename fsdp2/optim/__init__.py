"""Optimizers for shards: Muon, whole matrices, AdamW on the host or in 8 bits, flat memory, and clipping."""

from fsdp2.optim.adamw8bit import AdamW8bit
from fsdp2.optim.clip import clip_grad_norm_
from fsdp2.optim.flat_optimizer import flatten_optimizer
from fsdp2.optim.host_adamw import HostAdamW
from fsdp2.optim.matrices import Matrix, MatrixRule, WholeMatrices, newton_schulz_cost, whole_matrices
from fsdp2.optim.muon import Muon, muon_groups

__all__ = [
    "AdamW8bit",
    "HostAdamW",
    "Matrix",
    "MatrixRule",
    "Muon",
    "WholeMatrices",
    "clip_grad_norm_",
    "flatten_optimizer",
    "muon_groups",
    "newton_schulz_cost",
    "whole_matrices",
]
