"""Writes a report: as one page without any network, as JSON, or as a Chrome trace. All three hold the same numbers."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from fsdp2.tools.whole_file import write_whole

PAGE, JSON, CHROME_TRACE = ".html", ".json", ".trace.json"


def kind_of(path: Path) -> str | None:
    """What to write to ``path``, by its suffix; None if there is no such kind."""
    return next((suffix for suffix in (PAGE, CHROME_TRACE, JSON) if path.name.endswith(suffix)), None)


def write(path: Path, data: dict[str, Any]) -> None:
    """Write ``data`` to ``path``, as its suffix says: whole, or not at all."""
    kind = kind_of(path)
    text = page(data) if kind == PAGE else _json(chrome_trace(data) if kind == CHROME_TRACE else data)
    write_whole(path, text)


def page(data: dict[str, Any]) -> str:
    """A page that shows ``data``, with all that it needs inside."""
    folder = resources.files(__package__)
    html, script = ((folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.js"))
    # A module's name may contain anything, and must not end the element.
    return html.replace("{{script}}", script).replace("{{data}}", _json(data).replace("</", "<\\/"))


def chrome_trace(data: dict[str, Any]) -> dict[str, Any]:
    """The timelines in the format that Perfetto and chrome://tracing read: a process per rank, with a thread for what
    it does, and one for each kind of collective."""
    names = [unit["name"] for unit in data["units"]] + [""]  # -1: no unit
    events: list[dict[str, Any]] = []
    for timeline in data["timelines"]:
        rank = timeline["rank"]
        events += [
            _event("M", rank, thread, name="thread_name", args={"name": name})
            for thread, name in enumerate(["compute", *data["kinds"]])
        ]
        events += [
            _event("X", rank, 0, name=f"{data['does'][does]} {names[unit]}".strip(), ts=start, dur=duration)
            for does, unit, start, duration, _ in timeline["spans"]
        ]
        events += [
            _event("X", rank, 1 + kind, name=f"{data['kinds'][kind]} {names[unit]}", ts=start, dur=duration)
            for kind, unit, start, duration, _ in timeline["transfers"]
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(phase: str, rank: int, thread: int, **rest: Any) -> dict[str, Any]:
    return {"ph": phase, "pid": rank, "tid": thread, **rest}


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
