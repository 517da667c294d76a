"""Muon on sharded parameters.

``optimizer`` has the optimizer; ``update`` defines what a step computes for one parameter, also if it begins during
backward, and ``groups`` divides the parameters of a model into param groups.
"""

from fsdp2.optim.muon.groups import muon_groups
from fsdp2.optim.muon.optimizer import Muon

__all__ = ["Muon", "muon_groups"]
