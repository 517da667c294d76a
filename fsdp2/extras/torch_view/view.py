"""The base of all views: a name that a view cannot support raises an error that names the public call for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from fsdp2.core import DOCS

REPLACE_PARAMETERS = "nn.Module's ways to replace parameters: the next forward takes over what is bound"
_PUBLIC = "the methods of fsdp2.FSDPModule, or fsdp2.report.trace, which shows what happens in a step"

_T = TypeVar("_T")


class View:
    """A view of one object of the runtime. What it shows is read anew each time. Two views are equal if they show the
    same object.

    Names that are only read are written as a table, ``their_name = property(lambda view: what is ours)``.

    Attributes:
        shows: the name of the torch class that it imitates, for messages.
        instead: for names that it lacks, the public call that does what clients use the name for.
        not_now: for names that exist only at times, what is missing, and the remedy.
    """

    shows: ClassVar[str] = ""
    instead: ClassVar[Mapping[str, str]] = {}
    not_now: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **shown: object) -> None:
        vars(self).update(shown)

    @property
    def _key(self) -> object:
        """What the view shows, for comparisons."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return isinstance(other, View) and type(other) is type(self) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def _kept(self, of: object, make: Callable[[], list[_T]]) -> list[_T]:
        """The views that ``make`` returns: the same objects as long as ``of`` stays the same."""
        if vars(self).get("_kept_of") != of:
            vars(self).update(_kept_of=of, _kept_views=make())
        return list(vars(self)["_kept_views"])

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


def setting_of_unit(name: str) -> property:
    """A flag in the configuration of the view's unit, which clients may set."""

    def write(view: Any, value: object) -> None:
        view._unit.configure(**{name: bool(value)})

    return property(lambda view: getattr(view._unit.config, name), write)
