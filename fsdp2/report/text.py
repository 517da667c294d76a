"""A report as text: what ``print(report)`` shows."""

from __future__ import annotations

from collections import Counter
from typing import Any

_MIB = 2**20


def text_of(data: dict[str, Any]) -> str:
    """The step, its lost time by cause, what to change first, and what holds the memory."""
    return "\n".join(
        [_step(data), *_speed(data["speed"]), _lost(data["lost"]), *_findings(data), *_memory(data["memory"])]
    )


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


def _findings(data: dict[str, Any]) -> list[str]:
    found = [f"up to {each['gain_ms']:.1f} ms: {each['text']}" for each in data["findings"]]
    return found or ["found nothing to change"]


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
