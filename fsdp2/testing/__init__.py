"""For tests of tensor subclasses: checks whether a class fulfils the contract of all-gather hooks."""

from __future__ import annotations

from fsdp2.testing.check import SHAPES, check_all_gather_extension

__all__ = ["SHAPES", "check_all_gather_extension"]
