"""Accepts torch's policies in place of ours, so a program that changes one import may keep the others.

torch's classes are recognized by name, since its modules take long to import and may not have been imported.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fsdp2.core import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

_OURS: dict[str, type] = {cls.__name__: cls for cls in (MixedPrecisionPolicy, OffloadPolicy, CPUOffloadPolicy)}


def as_ours(policy: Any) -> Any:
    """Our policy with the same settings, if ``policy`` is one of torch's or of a class derived from it; else
    ``policy``. Refuses settings that fsdp2 does not know, perhaps from a newer torch."""
    for cls in type(policy).__mro__:
        ours = _OURS.get(cls.__name__)
        if ours is not None and cls.__module__.split(".")[0] == "torch":
            return _converted(policy, cls, ours)
    return policy


def _converted(policy: Any, theirs: Any, ours: Any) -> Any:
    known = {field.name for field in dataclasses.fields(ours)}
    settings = {field.name: getattr(policy, field.name) for field in dataclasses.fields(theirs)}
    defaults = {field.name: field.default for field in dataclasses.fields(theirs)}
    unknown = [name for name in settings if name not in known and settings[name] != defaults[name]]
    if unknown:
        raise TypeError(
            f"fully_shard: {theirs.__name__} of torch has {unknown[0]}={settings[unknown[0]]!r}, which fsdp2 does not "
            f"know. Leave {unknown[0]} at its default, or pass an fsdp2.{ours.__name__}."
        )
    return ours(**{name: value for name, value in settings.items() if name in known})
