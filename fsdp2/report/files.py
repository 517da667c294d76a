"""Writes a report: as one page without any network, as JSON, or as a Chrome trace. All three hold the same numbers."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from fsdp2.extras.output import check_writable, write_whole
from fsdp2.report.chrome_trace import chrome_trace

PAGE, JSON, CHROME_TRACE = ".html", ".json", ".trace.json"
_DATA = '<script type="application/json" id="data">', "</script>"


def kind_of(path: Path) -> str | None:
    """The kind of file to write to ``path``, by its suffix; None if there is no such kind."""
    return next((suffix for suffix in (PAGE, CHROME_TRACE, JSON) if path.name.endswith(suffix)), None)


def problem(path: Path, *kinds: str) -> str | None:
    """Why ``path`` cannot be written as one of ``kinds``."""
    if kind_of(path) not in kinds:
        *others, last = kinds
        return f"'{path}' has the suffix '{path.suffix}'. Use {', '.join(others)} or {last}."
    try:
        check_writable(path)
    except OSError as error:
        return f"cannot write '{path}': {error.strerror or error}. Use another path."
    return None


def write(path: Path, data: dict[str, Any]) -> None:
    """Write ``data`` to ``path`` in the format of its suffix, completely or not at all."""
    kind = kind_of(path)
    text = page(data) if kind == PAGE else as_json(chrome_trace(data) if kind == CHROME_TRACE else data)
    write_whole(path, text)


def page(data: dict[str, Any], name: str = "page", title: str = "fsdp2 report") -> str:
    """The self-contained page ``name`` that shows ``data``: ``frame.html`` around ``{name}.html``."""
    parts = {
        "title": title,
        "body": _part(f"{name}.html"),
        "style": _part("page.css"),
        "chart": _part("chart.html"),
        "script": f"{_part('chart.js')}\n{_part(f'{name}.js')}",
        "data": as_json(data).replace("<", "\\u003c"),  # a module's name might otherwise end the element
    }
    text = _part("frame.html")
    for key, value in parts.items():
        text = text.replace(f"{{{{{key}}}}}", value, 1)
    return text


def data_of(page: str) -> Any:
    """The data that :func:`page` put into ``page``; None if there is none.

    Raises:
        ValueError: it is not JSON.
    """
    _, found, rest = page.partition(_DATA[0])
    return json.loads(rest.partition(_DATA[1])[0]) if found else None


def as_json(value: dict[str, Any]) -> str:
    """``value`` as compact JSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _part(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")
