"""Sizes as people write them: "70GiB" and back."""

from __future__ import annotations

import re

_UNITS = {
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)},
    **{f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)},
}
GIB = 2**30
_MIB = 2**20


def nbytes_of(size: str | int | float) -> int:
    """Bytes of ``size``: a number of bytes, or a string such as ``"70GiB"`` or ``"80 GB"``.

    Raises:
        ValueError: the unit is unknown, or the size is not positive.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", size)
        units = {unit.lower(): factor for unit, factor in _UNITS.items()}
        if match is None or match[2].lower() not in units:
            raise ValueError(
                f"budget is '{size}', expected a number and a unit of {', '.join(_UNITS)}, such as '70GiB'."
            )
        return nbytes_of(float(match[1]) * units[match[2].lower()])
    if size <= 0:
        raise ValueError(f"budget is {int(size)} bytes, expected more than zero, such as '70GiB'.")
    return int(size)


def text_of(nbytes: float) -> str:
    """``nbytes`` for people: "70.8 GiB", or "3.1 MiB"."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / _MIB:.1f} MiB"
