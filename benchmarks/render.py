"""Puts the tables of ``benchmarks/results`` into the documentation, and draws their plots into ``docs/images``.

A page shows a table between ``<!-- table SCRIPT.TABLE -->`` and ``<!-- /table -->``, and what a script was run with
between ``<!-- run SCRIPT -->`` and ``<!-- /run -->``. ``SCRIPT`` is its room and name, such as ``step/gloo_step``.
``run machine`` is the machine of most runs; other runs name theirs. The table ``summary`` has the rows of ``SUMMARY``.
Of a table in ``PARTS``, pages show only the rows and columns that a reader needs; the JSON has all. What is between
markers is replaced, all else is left alone. ``images/SCRIPT.TABLE.png``, where a page embeds it, is the plot of the
whole table.

    python benchmarks/render.py
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # started by its path, a script sees only its own folder
from benchmarks.common import RESULTS, ROOT, cell, machine

IMAGES = ROOT / "docs" / "images"
_PICTURE = re.compile(r"\]\(images/([\w/]+\.\w+)\.png\)")
_BEGIN = re.compile(r"^<!-- (table|run) ([\w./]+) -->$", re.MULTILINE)
_MARKED = re.compile(rf"({_BEGIN.pattern}\n)(?:(?!<!-- ).)*(<!-- /\2 -->)$", re.MULTILINE | re.DOTALL)

Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Line:
    """A row of the table that the README shows: what it says there, who is compared with, and where the figures are.

    Attributes:
        ours, theirs: columns of ``table``.
        their_row: of the peer's figure, where it is not in the row of ours.
        ratio: the column of the peer's row that has it; without one, it is the quotient of the two figures.
    """

    text: str
    peer: str
    table: str
    row: str
    ours: str = "fsdp2"
    theirs: str = "torch FSDP2"
    unit: str = ""
    their_row: str = ""
    ratio: str = ""


def _step(dtype: str, peer: str, column: str) -> Line:
    row, text = "2 ranks, width 1024", f"step on 2 gloo ranks of one host, width 1024, {dtype}"
    return Line(text, peer, f"step/gloo_step.{dtype}", row, theirs=column, unit="ms")


def _peak(text: str, peer: str, row: str, column: str) -> Line:
    return Line(
        f"peak memory beyond the shards, {text}", peer, "memory/peak_memory.main", row, theirs=column, unit="KiB"
    )


SUMMARY = (
    Line(
        "step of six Llama 3 8B blocks on an H200, bf16, reduced in fp32; as one of 8 ranks, messages move nothing",
        "torch",
        "gpu/acceptance.time",
        "8B, 8 ranks, fp32 shards, reduced in fp32",
        theirs="torch",
        unit="ms",
    ),
    Line(
        "the same",
        "no sharding",
        "gpu/acceptance.time",
        "8B, 8 ranks, fp32 shards, reduced in fp32",
        theirs="unsharded",
        unit="ms",
    ),
    Line(
        "runtime per group and step, 8 ranks, width 16, fp32",
        "torch",
        "step/runtime_overhead.ranks",
        "8 ranks, fp32",
        ours="fsdp2 ms",
        theirs="torch ms",
        unit="ms",
    ),
    _step("fp32", "torch", "torch FSDP2"),
    _step("fp32", "FSDP1", "FSDP1"),
    _step("fp32", "DeepSpeed ZeRO-3", "DeepSpeed"),
    _step("fp32", "DDP, the whole model on each rank", "DDP"),
    _step("bf16", "torch", "torch FSDP2"),
    Line(
        "AdamW (foreach) over 1,500 small parameters, with `flatten_optimizer`, CPU time",
        "torch",
        "optim/optimizer_step.steady",
        "AdamW, foreach, 1500 parameters",
        ours="fsdp2 flat ms",
        theirs="torch FSDP2 ms",
        unit="ms",
    ),
    _peak("fp32", "torch", "plain", "torch FSDP2"),
    _peak("bf16 parameters, fp32 reduction", "FSDP1", "bf16 parameters, fp32 reduction", "FSDP1"),
    _peak("the same, 2 micro-batches, one reduction", "FSDP1", "2 microbatches, one reduction, mixed", "FSDP1"),
    Line(
        "load safetensors files into 0.5 GB shards",
        "torch's DCP",
        "checkpoint/weights.load",
        "fsdp2.checkpoint.load_safetensors",
        ours="warm s",
        theirs="warm s",
        unit="s",
        their_row="DCP, from safetensors",
        ratio="fsdp2 / peer",
    ),
    Line(
        "move model and optimizer from 4 to 2 ranks, 1.5 GB",
        "torch's DCP, through a disk",
        "checkpoint/reshard_to.main",
        "4 to 2: fsdp2.checkpoint.reshard_to",
        ours="s",
        theirs="s",
        unit="s",
        their_row="4 to 2: DCP, disk",
        ratio="fsdp2 / peer",
    ),
)


@dataclass(frozen=True)
class Part:
    """What pages show of a table. Empty: all rows, all columns. A name that two columns have means the first one."""

    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    note: str | None = None
    """Replaces the table's own note where that explains columns that are left out."""


_GLOO = ("2 ranks, width 256", "2 ranks, width 1024", "4 ranks, width 1024")
_SCALE = ("FSDP", "FSDP, own reduce group", "HSDP 64", "choose")
_FLAT = ("AdamW, foreach, 1500 parameters", "AdamW, fused, 1500 parameters")

PARTS = {
    "step/runtime_overhead.ranks": Part(rows=("8 ranks, fp32", "4096 ranks, fp32")),
    "step/call_counts.main": Part(rows=("all calls", "calls in the runtime")),
    "step/runtime_instructions.main": Part(("unsharded", "fsdp2", "torch", "ratio", "fsdp2's class")),
    "gpu/acceptance.time": Part(("unsharded", "fsdp2", "torch", "fsdp2 / unsharded", "ratio"), note=""),
    "gpu/acceptance.memory": Part(
        ("fsdp2 allocated", "torch allocated", "fsdp2 reserved", "torch reserved", "ratio"), note="ratio: allocated."
    ),
    "step/launches.mixed": Part(
        ("fsdp2, a block", "torch, a block", "ratio"), ("copies", "collectives", "stream waits")
    ),
    "step/gloo_step.fp32": Part(
        ("unsharded", "DDP", "FSDP1", "DeepSpeed", "torch FSDP2", "fsdp2", "fsdp2's class", "ratio"),
        _GLOO,
        note="unsharded: no communication. ratio: fsdp2 to torch FSDP2. class: fsdp2.FullyShardedDataParallel.",
    ),
    "step/gloo_step.bf16": Part(
        ("unsharded", "DDP", "FSDP1", "DeepSpeed", "torch FSDP2", "fsdp2", "fsdp2's class", "ratio"), _GLOO, note=""
    ),
    "step/gloo_step.llama": Part(
        ("unsharded", "DDP", "FSDP1", "torch FSDP2", "fsdp2", "fsdp2's class", "ratio"), note=""
    ),
    "optim/optimizer_step.steady": Part(("fsdp2 flat ms", "torch FSDP2 ms", "ratio"), _FLAT),
    "optim/whole_matrices.plans": Part(
        ("largest share", "best possible", "bytes", "most bytes", "MiB for a moment"),
        note="Shares: to the mean. Bytes that a rank sends: mean and most, to twice the bytes of its shards.",
    ),
    "optim/clip_grad_norm.main": Part(("fsdp2 ms", "torch FSDP2 ms", "ratio"), ("150 parameters",)),
    "step/divergent_use.main": Part(
        ("fsdp2", "ranks may differ", "torch FSDP2", "DDP"),
        note="DDP: find_unused_parameters=True; it holds all parameters on every rank.",
    ),
    "tensors/all_gather_bytes.main": Part(
        ("step MB", "step ms", "val. loss", "ratio"),
        (
            "fp32",
            "bf16, by policy",
            "fp8, scale per row",
            "mxfp8, blocks of 32",
            "int8, blocks of 256",
            "nf4 base, LoRA",
        ),
        note="nf4: trains adapters only, 40 steps from the final weights of the first row.",
    ),
    "tensors/gradient_wires.errors": Part(
        rows=tuple(
            f"computed in {dtype}, noise, {size} ranks" for dtype in ("bfloat16", "float32") for size in (2, 8, 64)
        )
    ),
    "optim/adamw8bit.training": Part(rows=("1 to 50", "201 to 250", "451 to 500", "validation")),
    "tensors/qlora.main": Part(
        ("base KiB", "ms", "fsdp2 / peer KiB", "fsdp2 / peer ms", "gradients"),
        note="Base: what a rank keeps between steps. gradients: those of the adapters, beside fsdp2's.",
    ),
    "memory/peak_memory.main": Part(
        ("limit", "fsdp2", "torch FSDP2", "FSDP1", "ratio"),
        (
            "plain",
            "bf16 parameters, fp32 reduction",
            "2 microbatches, one reduction, mixed",
            "HSDP 2 x 4, mixed",
        ),
        note="ratio: fsdp2 to the smaller of torch's two.",
    ),
    "memory/reserved_memory.main": Part(
        ("fsdp2", "torch FSDP2", "ratio", "FSDP1 in step", "FSDP1 late", "class"),
        (
            "plain",
            "bf16 parameters, fp32 reduction",
            "2 microbatches, one reduction, mixed",
            "HSDP 2 x 4, mixed",
        ),
        note="ratio: fsdp2 to torch FSDP2. class: fsdp2.FullyShardedDataParallel.",
    ),
    "checkpoint/weights.load": Part(
        ("warm s", "rank 0 MB", "fsdp2 / peer"),
        note="Medians of 4 rounds. Warm: the files are in the page cache.",
    ),
    "checkpoint/weights.save": Part(
        ("s", "rank 0 MB", "fsdp2 / peer"),
        note="fsdp2 and DCP wait until the disk has the data; `save_file` does not. Memory: on top of the shards.",
    ),
    "checkpoint/fused_weights.load": Part(
        ("min s", "rank 0 MB", "rank 1 MB", "fsdp2 / peer"),
        note="The fastest of 4 rounds, from files in the page cache; with the model's construction.",
    ),
    "checkpoint/fused_weights.save": Part(
        ("min s", "rank 0 MB", "rank 1 MB", "fsdp2 / peer"),
        note="fsdp2 waits until the disk has the data; `save_pretrained` does not. Memory: on top of the shards.",
    ),
    "checkpoint/reshard_to.main": Part(
        ("s", "CPU s", "MB", "fsdp2 / peer"),
        ("4 to 2: fsdp2.checkpoint.reshard_to", "4 to 2: DCP, tmpfs", "4 to 2: DCP, disk"),
        note="Medians of 2 rounds. CPU s: of all ranks. MB: the most that a rank allocates. DCP waits for the disk.",
    ),
    "scale/scale_model.efficiency_8b": Part(_SCALE, ("8", "512", "1024", "2048", "4096", "16384")),
    "scale/scale_model.published": Part(
        ("model tokens/s", "page", "error", "paper", "error of the paper's", "error of GiB"),
    ),
}


def read_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """By script; those that have tables."""
    found = {path.relative_to(folder): json.loads(path.read_text()) for path in sorted(folder.rglob("*.json"))}
    return {path.with_suffix("").as_posix(): record for path, record in found.items() if record["tables"]}


def tables(results: Results) -> dict[str, dict[str, Any]]:
    """All tables of all scripts, by ``SCRIPT.TABLE``."""
    return {f"{script}.{table['name']}": table for script, record in results.items() for table in record["tables"]}


def digest(table: Mapping[str, Any]) -> str:
    """Of all that a picture shows; the picture carries it, so that a test can tell whether it is out of date."""
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def pages() -> list[Path]:
    """Those that show results."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(path for path in found if _BEGIN.search(path.read_text()))


def pictures() -> set[str]:
    """The tables, as ``SCRIPT.TABLE``, whose plots pages embed."""
    return {name for path in pages() for name in _PICTURE.findall(path.read_text())}


def markers(text: str) -> list[tuple[str, str]]:
    """What ``text`` shows: pairs of "table" or "run", and its name."""
    return [(found[1], found[2]) for found in _BEGIN.finditer(text)]


def render(text: str, results: Results) -> str:
    """``text`` with all that is between markers as ``results`` have it."""

    def shown(found: re.Match[str]) -> str:
        kind, name = found[2], found[3]
        if (kind, name) == ("run", "machine"):
            content = f"{_usual(results)}\n"
        elif kind == "run":
            content = _run(_find(results, name, f"run {name}"), results)
        elif name == "summary":
            content = _markdown(["", "fsdp2", "peer", "ratio"], [_summary_row(line, results) for line in SUMMARY])
        else:
            table = part(_find(tables(results), name, f"table {name}"), PARTS.get(name, Part()), f"PARTS, {name}")
            note = [" ".join(table["note"].splitlines()), ""] if table["note"] else []
            title = [f"{table['title']}:", ""]
            content = "\n".join([*title, _markdown(table["columns"], table["rows"]), *note])
        return f"{found[1]}{content}{found[4]}"

    rendered, count = _MARKED.subn(shown, text)
    if count != len(markers(text)):
        raise ValueError(f"{count} of {markers(text)} end with <!-- /table --> or <!-- /run --> on a line of its own.")
    return rendered


def part(table: Mapping[str, Any], shown: Part, where: str) -> dict[str, Any]:
    """``table`` with the rows and columns of ``shown``, in that order.

    Raises:
        KeyError: the table has no such row or column.
    """
    columns = list(range(len(table["columns"])))
    if shown.columns:
        indices = {name: index for index, name in reversed(list(enumerate(table["columns"])))}
        columns = [0, *(_find(indices, name, where) for name in shown.columns)]
    by_name = {cell(row[0]): row for row in table["rows"]}
    rows = [_find(by_name, name, where) for name in shown.rows] if shown.rows else table["rows"]
    return {
        "title": table["title"],
        "columns": [table["columns"][index] for index in columns],
        "rows": [[row[index] for index in columns] for row in rows],
        "note": table["note"] if shown.note is None else shown.note,
    }


def _usual(results: Results) -> str:
    """The machine and torch of most runs."""
    return Counter(machine(record) for record in results.values()).most_common(1)[0][0]


def _run(record: Mapping[str, Any], results: Results) -> str:
    where = "" if machine(record) == _usual(results) else f"{machine(record)}, "
    return f"`{record['command']}`: {where}commit {record['commit']}, {record['date']}, {record['seconds']} s.\n"


def _summary_row(line: Line, results: Results) -> list[object]:
    table = _find(tables(results), line.table, "SUMMARY")
    rows = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}
    names = (line.row, line.their_row or line.row)
    our_row, their_row = (_find(rows, name, f"SUMMARY, {line.table}") for name in names)
    ours, theirs = _find(our_row, line.ours, "SUMMARY"), _find(their_row, line.theirs, "SUMMARY")
    ratio = _find(their_row, line.ratio, "SUMMARY") if line.ratio else float(ours) / float(theirs)
    return [line.text, f"{cell(ours)} {line.unit}", f"{line.peer}: {cell(theirs)} {line.unit}", ratio]


def _find(found: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in found:
        raise KeyError(f"{where}: there is no {name!r} in the results, only {sorted(found)}.")
    return found[name]


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table whose figures are aligned when it is shown. The source is not padded: a new figure changes one line."""
    lines = [[cell(value).replace("|", "\\|") for value in row] for row in [columns, *rows]]
    lines.insert(1, ["---", *("---:" for _ in columns[1:])])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    results = read_results()
    for path in pages():
        text = path.read_text()
        rendered = render(text, results)
        if rendered != text:
            path.write_text(rendered)
            print(f"rendered {path.relative_to(ROOT)}")
    from benchmarks.plots import draw  # which needs matplotlib

    plotted = {name: tables(results)[name] for name in sorted(pictures())}
    for path in IMAGES.rglob("*.*.png"):
        if path.relative_to(IMAGES).with_suffix("").as_posix() not in plotted:
            path.unlink()
    for name, table in plotted.items():
        draw(table, IMAGES / f"{name}.png", digest(table))
        print(f"drew {(IMAGES / name).relative_to(ROOT)}.png")


if __name__ == "__main__":
    main()
