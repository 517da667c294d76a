"""The table of seams is complete: each seam has a function, and each function is there."""

from __future__ import annotations

from importlib import import_module

import pytest

from fsdp2.core import seams
from fsdp2.extras import wiring

SET_BY_HAND = {"adapters", "spec_readers", "tree_checks", "resolve_on_ranks"}
PLACES = [*wiring.LOADED_WHEN_CALLED.values(), *wiring.ADAPTERS.values(), wiring.READ_TYPES, wiring.RESOLVE_TYPES]


def test_every_seam_has_one_function() -> None:
    rows = [*wiring.LOADED, *wiring.LOADED_WHEN_CALLED, *SET_BY_HAND]
    assert sorted(rows) == sorted(seams.__annotations__)
    assert all(hasattr(seams, name) for name in rows)


@pytest.mark.parametrize("place", PLACES)
def test_what_is_loaded_when_it_is_called_is_there(place: str) -> None:
    module, _, name = place.partition(":")
    assert callable(getattr(import_module(f"fsdp2.{module}"), name))
