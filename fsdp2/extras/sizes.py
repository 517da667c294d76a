"""Convert between bytes and sizes as people write them, such as "70GiB"."""

from __future__ import annotations

import math
import re

_UNITS = {
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)},
    **{f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)},
}
_FACTORS = {unit.lower(): factor for unit, factor in _UNITS.items()}
_SHOWN = ("GiB", "MiB", "KiB")


def nbytes_of(size: str | int | float, what: str, example: str) -> int:
    """The bytes of ``size``, a number of bytes, or text such as ``"70GiB"`` or ``"80 gb"``. For errors, ``what`` names
    the thing with this size, and ``example`` is a valid text."""
    found: object = size
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", size.lower())
        found = float(match[1]) * _FACTORS.get(match[2], 0) if match else None
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 1 <= found < math.inf:
        raise ValueError(
            f"{what} is {size!r}, expected a number of bytes, or a number and a unit of {', '.join(_UNITS)}, "
            f"such as '{example}'."
        )
    return int(found)


def text_of(nbytes: float) -> str:
    """``nbytes`` in readable form: "70.8 GiB", "3.1 MiB", or "12 B"."""
    unit, factor = unit_of(nbytes)
    return f"{nbytes:.0f} B" if 0 < nbytes < 0.05 * factor else f"{nbytes / factor:.1f} {unit}"


def unit_of(nbytes: float) -> tuple[str, int]:
    """The largest unit that is not larger than ``nbytes``, and its size in bytes; at least KiB."""
    return next(((unit, _UNITS[unit]) for unit in _SHOWN if nbytes >= _UNITS[unit]), ("KiB", _UNITS["KiB"]))
