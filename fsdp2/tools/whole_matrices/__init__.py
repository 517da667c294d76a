"""Whole matrices on shards: for a moment, on one rank each, without another storage.

From below: ``rules`` says which matrices a tensor consists of, ``regions`` where its entries lie, ``planner`` who owns
which matrix and in which bucket it travels, ``messages`` what one rank sends. They are pure. ``exchange`` moves the
bytes, ``domains`` finds the process groups, ``circles`` who must hear of failures, ``run`` puts them together.
"""

from fsdp2.tools.whole_matrices.planner import Matrix, newton_schulz_cost
from fsdp2.tools.whole_matrices.rules import MatrixRule
from fsdp2.tools.whole_matrices.run import WholeMatrices, whole_matrices

__all__ = ["Matrix", "MatrixRule", "WholeMatrices", "newton_schulz_cost", "whole_matrices"]
