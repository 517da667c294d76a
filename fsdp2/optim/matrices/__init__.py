"""Makes the matrices of sharded parameters whole for a moment, each on one rank, without changing how they are stored.

From the bottom up: ``rules`` defines which matrices a tensor consists of, ``regions`` where its entries lie,
``planner`` the owner and bucket of each matrix, and ``messages`` what one rank sends. These are pure. ``exchange``
moves bytes, ``domains`` finds process groups, ``circles`` the ranks that must hear of failures; ``run`` combines them.
"""

from fsdp2.optim.matrices.planner import Matrix, newton_schulz_cost
from fsdp2.optim.matrices.rules import MatrixRule
from fsdp2.optim.matrices.run import WholeMatrices, whole_matrices

__all__ = ["Matrix", "MatrixRule", "WholeMatrices", "newton_schulz_cost", "whole_matrices"]
