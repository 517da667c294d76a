"""For tests of extensions: checks whether a class fulfils the contract of all-gather hooks, or of gradient wires."""

from __future__ import annotations

from fsdp2.testing.check import SHAPES, check_all_gather_extension
from fsdp2.testing.wires import check_gradient_wire

__all__ = ["SHAPES", "check_all_gather_extension", "check_gradient_wire"]
