"""What users add to a model after ``fully_shard``: noticed between passes, at the price of comparing one number.

Whoever may have changed a tree calls ``note_change``; a root that sees another count looks at its tree again. Knows
modules and parameters, no unit and no group.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.group.param import Slot

_MAX_NAMES = 4


class _Changes:
    count = 0


def note_change() -> None:
    """Some module tree may have gained units or parameters."""
    _Changes.count += 1


def change_count() -> int:
    """Differs from an earlier one if ``note_change`` was called meanwhile."""
    return _Changes.count


def warn_of_unsharded(roots: Iterable[nn.Module], known: Collection[Slot]) -> list[Slot]:
    """Warn of trainable plain parameters under ``roots`` that are in none of the ``known`` slots: nobody reduces their
    gradients, so ranks come to differ. Returns where they are."""
    found = {
        f"{prefix}.{name}" if prefix else name: slot
        for root in roots
        for prefix, module in root.named_modules()
        for name, param in _torch.parameters_dict(module).items()
        if param is not None
        and param.requires_grad
        and not isinstance(param, DTensor)
        and (slot := Slot(module, name)) not in known
    }
    if found:
        names = ", ".join(f"'{name}'" for name in list(found)[:_MAX_NAMES])
        if len(found) > _MAX_NAMES:
            names += f" and {len(found) - _MAX_NAMES} more"
        warnings.warn(
            f"parameters were added to a sharded module after fully_shard: {names}. They are not sharded, and nobody "
            "reduces their gradients, so ranks come to differ. Call fully_shard on the new modules, and build the "
            "optimizer after that; or freeze them with requires_grad_(False).",
            stacklevel=2,
        )
    return list(found.values())
