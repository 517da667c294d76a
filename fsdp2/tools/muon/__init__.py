"""Muon on sharded parameters.

``optimizer`` is the optimizer; ``update`` says what a step computes for one parameter, ``early`` lets a step begin in
backward, and ``groups`` divides the parameters of a model.
"""

from fsdp2.tools.muon.groups import muon_groups
from fsdp2.tools.muon.optimizer import Muon

__all__ = ["Muon", "muon_groups"]
