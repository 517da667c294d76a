"""For tests of tensor subclasses: does a class keep what the all-gather hooks promise?"""

from __future__ import annotations

from fsdp2.testing.check import SHAPES, check_all_gather_extension

__all__ = ["SHAPES", "check_all_gather_extension"]
