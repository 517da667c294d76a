"""Record what the runtime does, event by event.

``with fsdp2.report.trace.record(model) as trace: ...; print(trace)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from fsdp2.core import Observer, units_under
from fsdp2.extras.units import sharded_unit


@dataclass(frozen=True)
class TraceEntry:
    """``kind`` is ``event`` (a hook fired) or ``action`` (the runtime did something). ``nbytes`` is 0 if the action
    has no size."""

    kind: str
    name: str
    unit: str
    nbytes: int = 0

    def __str__(self) -> str:
        indent, size = "" if self.kind == "event" else "    ", f"  {self.nbytes} bytes" if self.nbytes else ""
        return f"{indent}{self.name} {self.unit}{size}"


class Trace(Observer):
    """The entries recorded so far. ``str()`` shows actions indented under their event."""

    def __init__(self) -> None:
        self.entries: list[TraceEntry] = []

    def on_event(self, event: str, unit: str) -> None:
        self.entries.append(TraceEntry("event", event, unit))

    def on_action(self, action: str, unit: str, nbytes: int) -> None:
        self.entries.append(TraceEntry("action", action, unit, nbytes))

    def clear(self) -> None:
        """Forget what was recorded."""
        self.entries.clear()

    def actions(self) -> list[str]:
        """Only the actions, as ``"unshard layers.0"``. Tests compare these."""
        return [f"{entry.name} {entry.unit}" for entry in self.entries if entry.kind == "action"]

    def __str__(self) -> str:
        return "\n".join(map(str, self.entries))


@contextmanager
def observe(module: nn.Module, observer: Observer) -> Iterator[None]:
    """Report to ``observer`` what the runtime does with ``module`` and the sharded modules inside it. Names start at
    the root.

    Raises:
        ValueError: ``module`` is not sharded.
    """
    sharded_unit(module, "fsdp2.report.trace")
    for _, unit in units_under(module):
        unit.tell([*unit.observers, observer])
    try:
        yield
    finally:
        for _, unit in units_under(module):  # including those that were added meanwhile
            unit.tell([each for each in unit.observers if each is not observer])


@contextmanager
def record(module: nn.Module) -> Iterator[Trace]:
    """Record what the runtime does with ``module`` and the sharded modules inside it.

    Raises:
        ValueError: ``module`` is not sharded.
    """
    trace = Trace()
    with observe(module, trace):
        yield trace
