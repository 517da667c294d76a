"""The options of AdamW in a param group. torch checks only those that its constructor gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp2.extras.checked import NOT_NEGATIVE, Limit, check

_BETA = Limit(0, 1, below=True)


def check_adamw_options(optimizer: str, group: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError if an option of ``group`` is wrong, in the name of ``optimizer``."""
    for key in ("lr", "weight_decay", "eps"):
        check(f"{optimizer}: {key}", group[key], "float | Tensor" if key == "lr" else "float", NOT_NEGATIVE)
    for beta in group["betas"]:
        check(f"{optimizer}: betas: a number", beta, "float", _BETA)
