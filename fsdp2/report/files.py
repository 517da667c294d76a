"""Writes a report: as text, as one page without any network, as JSON, or as a Chrome trace, with the same numbers."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

from fsdp2.extras.foreign_files import json_of
from fsdp2.extras.output import check_writable, write_whole
from fsdp2.report.chrome_trace import chrome_trace

PAGE, JSON, CHROME_TRACE = ".html", ".json", ".trace.json"
_MIB = 2**20
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
        folder = path.absolute().parent
        if not folder.is_dir():
            return f"cannot write '{path}': there is no folder '{folder}'. Create it, or use another path."
        check_writable(path)
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in the name, and a loop of links before Python 3.13
        return f"cannot write '{path}': {getattr(error, 'strerror', None) or error}. Use another path."
    return None


def write(path: Path, data: dict[str, Any]) -> None:
    """Write ``data`` to ``path`` in the format of its suffix, completely or not at all."""
    kind = kind_of(path)
    text = page(data) if kind == PAGE else as_json(chrome_trace(data) if kind == CHROME_TRACE else data)
    write_whole(path, text)


def page(data: dict[str, Any], name: str = "page", title: str = "fsdp2 report") -> str:
    """The self-contained page ``name`` that shows ``data``: ``frame.html`` around ``{name}.html``."""
    script = f"\n{_part('chart.js')}\n{_part(f'{name}.js')}\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "title": title,
        "hash": f"sha256-{digest}",  # browsers run this script and no other, and load nothing from the network
        "body": _part(f"{name}.html"),
        "style": _part("page.css"),
        "chart": _part("chart.html"),
        "script": script,
        "data": as_json(data).replace("<", "\\u003c"),  # a module's name might otherwise end the element
    }
    text = _part("frame.html")
    for key, value in parts.items():
        text = text.replace(f"{{{{{key}}}}}", value, 1)
    return text


def data_of(page: str) -> Any:
    """The data that :func:`page` put into ``page``; None if there is none.

    Raises:
        ValueError: it is not JSON, or nested too deeply.
    """
    _, found, rest = page.partition(_DATA[0])
    return json_of(rest.partition(_DATA[1])[0]) if found else None


def as_json(value: dict[str, Any]) -> str:
    """``value`` as compact JSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _part(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


# Text


def text_of(data: dict[str, Any]) -> str:
    """The step, its lost time by cause, what to change first, and what holds the memory."""
    findings = [f"up to {each['gain_ms']:.1f} ms: {each['text']}" for each in data["findings"]]
    findings = findings or ["found nothing to change"]
    return "\n".join([_step(data), *_speed(data["speed"]), _lost(data["lost"]), *findings, *_memory(data["memory"])])


def _step(data: dict[str, Any]) -> str:
    text = f"step of {data['steps_ms'][data['step']]:.1f} ms"
    plan = data["prediction"]
    if plan is not None:
        text += f", predicted {plan['rows'][0]['predicted']:.1f} ms for {plan['num_gpus']} x {plan['machine']}"
        text += "" if plan["same_machine"] else ", which is another machine"
    return text


def _speed(speed: dict[str, Any]) -> list[str]:
    if speed["tokens_per_s"] is None and speed["flops"] is None:
        return []
    parts = []
    if speed["tokens_per_s"] is not None:
        parts.append(f"{speed['tokens_per_s']:.0f} tokens/s, {speed['tokens_per_s_per_rank']:.0f} per rank")
    mfu = f"no MFU: {speed['no_mfu']}" if speed["mfu"] is None else f"MFU {speed['mfu']:.1%} of {speed['peak']}"
    return ["; ".join([*parts, mfu])]


def _lost(lost: dict[str, Any]) -> str:
    kinds = ", ".join(f"{each['kind']} {each['lost_ms']:.1f}" for each in lost["kinds"])
    listed = f" ({kinds})" if kinds else ""
    return (
        f"rank {lost['rank']}: {lost['lost_ms']:.1f} of {lost['step_ms']:.1f} ms lost{listed}; "
        f"{lost['explained_ms']:.1f} ms of it explained by the findings below"
    )


def _memory(memory: dict[str, Any]) -> list[str]:
    if not memory["peak_nbytes"]:
        return []
    held: Counter[str] = Counter()
    for owner in memory["owners"]:
        held[owner["what"]] += owner["nbytes"]
    listed = ", ".join(f"{what} {_size(nbytes)}" for what, nbytes in held.most_common())
    return [f"most memory, on rank {memory['rank']}: {_size(memory['peak_nbytes'])} ({listed})", *memory["notes"]]


def _size(nbytes: int) -> str:
    return f"{nbytes / _MIB:.1f} MiB" if nbytes >= _MIB else f"{nbytes / 1024:.1f} KiB"
