"""Writes a report: as text, as one page without any network, as JSON, or as a Chrome trace, with the same numbers."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

from fsdp2.extras import sizes
from fsdp2.extras.foreign_files import json_of
from fsdp2.extras.output import check_writable, listed, write_whole
from fsdp2.report.chrome_trace import chrome_trace
from fsdp2.report.figures import ms_text

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


def page(data: dict[str, Any], name: str = "page", **texts: str) -> str:
    """The self-contained page ``name`` that shows ``data``: ``frame.html`` around ``{name}.html``. ``texts`` are the
    ``title``, the ``summary``, and the ``lead``, which is the most important sentence; by default those of a report."""
    texts = texts or {
        "title": f"{data['model']}: one step",
        "summary": " ".join([_step(data), *_speed(data["speed"])]),
        "lead": _lost(data["lost"], data["digits"]),
    }
    script = f"\n{_part('chart.js')}\n{_part(f'{name}.js')}\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "hash": f"sha256-{digest}",  # browsers run this script and no other, and load nothing from the network
        "body": _part(f"{name}.html"),
        **{key: html.escape(text) for key, text in texts.items()},
        "style": _part("page.css"),
        "chart": _part("chart.html"),
        "script": script,
        "data": as_json(data).replace("<", "\\u003c"),  # a module's name might otherwise end the element
    }
    text = _part("frame.html").replace("{{title}}", parts["title"])
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
    digits = data["digits"]
    findings = [f"Up to {ms_text(each['gain_ms'], digits)}: {each['text']}" for each in data["findings"]]
    findings = findings or ["No change is known to make this step shorter."]
    parts = [_step(data), *_speed(data["speed"]), _lost(data["lost"], digits), *findings, *_memory(data["memory"][0])]
    return "\n".join(parts)


def _step(data: dict[str, Any]) -> str:
    digits = data["digits"]
    text = f"A step of {setup_of(data)} takes {ms_text(data['steps_ms'][data['step']], digits)}{_spread(data)}."
    plan = data["prediction"]
    if plan is not None:
        predicted = ms_text(plan["rows"][0]["predicted"], 3)
        text += f" The plan predicts {predicted} for {plan['num_gpus']} x {plan['machine']}"
        text += "." if plan["same_machine"] else ", which is another machine."
    return text


def setup_of(data: dict[str, Any]) -> str:
    """What ran, and on what."""
    num_ranks, (replicas, shards) = len(data["ranks"]), data["mesh"]
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    if replicas > 1:
        ranks += f" ({replicas} replicas of {shards} shards each)"
    inputs = f", with inputs {', '.join(data['inputs'])}" if data["inputs"] else ""
    return f"{data['model']} in {len(data['units'])} units{inputs}, on {ranks} of {data['device']},"


def _spread(data: dict[str, Any]) -> str:
    usual, first = data["steps_ms"][data["first_step"] :], data["first_step"]
    if len(usual) == 1:
        return ""
    least, most = (ms_text(each, data["digits"]) for each in (min(usual), max(usual)))
    rest = " after the first, which makes plans" if first else ""
    return f", the median of {len(usual)} steps{rest}: they take {least} to {most}"


def _speed(speed: dict[str, Any]) -> list[str]:
    parts = []
    if speed["tokens_per_s"] is not None:
        parts.append(
            f"It trains on {speed['tokens_per_s']:.0f} tokens/s, {speed['tokens_per_s_per_rank']:.0f} per rank."
        )
    if speed["mfu"] is not None:
        parts.append(f"The MFU is {speed['mfu']:.1%} of {speed['peak']}.")
    elif speed["flops"] is not None:
        parts.append(f"The MFU is not known: {speed['no_mfu']}.")
    return [" ".join(parts)] if parts else []


def _lost(lost: dict[str, Any], digits: int) -> str:
    if not lost["kinds"]:
        return f"Rank {lost['rank']} loses no time: it computes from the beginning of the step to its end."
    kinds = listed([f"{ms_text(each['lost_ms'], digits)} in {each['kind']}" for each in lost["kinds"]])
    return (
        f"Rank {lost['rank']} loses most, {ms_text(lost['lost_ms'], digits)}: {kinds}. The findings explain "
        f"{ms_text(lost['explained_ms'], digits)} of that."
    )


def _memory(memory: dict[str, Any]) -> list[str]:
    if not memory["peak_nbytes"]:
        return []
    held: Counter[str] = Counter()
    for owner in memory["owners"]:
        held[owner["what"]] += owner["nbytes"]
    parts = listed([f"{what} {sizes.text_of(nbytes)}" for what, nbytes in held.most_common()])
    peak = sizes.text_of(memory["peak_nbytes"])
    return [f"Rank {memory['rank']} holds most memory, {peak} at the peak: {parts}.", *memory["notes"]]
