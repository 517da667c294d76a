"""The base of all views: a name that a view cannot support raises an error that names the public call for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fsdp2.core.types import DOCS

_PUBLIC = "the methods of fsdp2.FSDPModule, or fsdp2.report.trace, which shows what happens in a step"


class View:
    """A view of one object of the runtime. It holds no state: whatever it shows is read anew each time.

    Attributes:
        shows: the name of the torch class that it imitates, for messages.
        instead: for names that it lacks, the public call that does what clients use the name for.
        not_now: for names that exist only at times, what is missing, and the remedy.
    """

    shows: ClassVar[str] = ""
    instead: ClassVar[Mapping[str, str]] = {}
    not_now: ClassVar[Mapping[str, str]] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python looks for protocols that the view does not support
            raise AttributeError(name)
        if name in self.not_now:
            raise AttributeError(f"fsdp2's view of torch's {self.shows}: '{name}' {self.not_now[name]}")
        raise AttributeError(self._refusal(f"does not have '{name}'", name))

    def __setattr__(self, name: str, value: object) -> None:
        place = getattr(type(self), name, None)
        if not isinstance(place, property) or place.fset is None:
            raise AttributeError(self._refusal(f"cannot set '{name}'", name))
        object.__setattr__(self, name, value)

    def _refusal(self, problem: str, name: str) -> str:
        return (
            f"fsdp2's view of torch's {self.shows} {problem}: the runtime has nothing like it, so this would have no "
            f"effect. Use {self.instead.get(name, _PUBLIC)}. See {DOCS}/clients.md#private-names."
        )
