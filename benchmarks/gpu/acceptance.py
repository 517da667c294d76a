"""All that one GPU can say about fsdp2, in 8 minutes and without network: a verdict per line, JSON, tables and plots.

    make gpu                                                  # with the python3 at hand, whose torch sees a GPU
    python benchmarks/gpu/acceptance.py --only 1 2            # some parts
    python benchmarks/gpu/acceptance.py --device sim --only 1 2 4 8 9    # on the simulated accelerator
    python benchmarks/gpu/acceptance.py --device cpu --only 6 7      # the same of other parts; figures mean nothing

(1) NCCL's contract and training through it, with one rank; (2) 8 ranks that are not there, whose data comes late;
(3) the same under torch's sanitizer of CUDA streams; (4) 2 and 4 ranks that share the GPU; (5) ``tests/gpu``;
(6) step time, memory, copies, and what tensors cost that travel direct; (7) float8 and NF4; (8) a whole step in a CUDA
graph; (9) formats in which gradients travel, and activations that wait on the host.

Every part runs in a process of its own. One that hangs or crashes is a verdict, and the next one starts. The most
valuable ones come first; what the time does not suffice for is "NOT RUN". The exit status is 1 if anything failed.
Python and torch are enough, but (5) needs pytest, and plots need matplotlib: what is left out is said.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # fsdp2 need not be installed
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
ELSEWHERE = ROOT / "runs" / "gpu"  # what no GPU has run, which nobody commits
SCRIPT = "gpu/acceptance"
LIMIT_S = 480.0
MARGIN_S = 15.0  # for tables and plots at the end
SHORTEST_S = 10.0  # with less time left, a part is not started
LOG_TAIL = 6000  # characters of what a part that failed has printed
PASS, FAIL, NOT_RUN = "PASS", "FAIL", "NOT RUN"


@dataclass(frozen=True)
class Verdict:
    """``figures``: what is not in the line."""

    status: str
    part: str
    detail: str
    figures: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.status} {self.part}: {self.detail}"


@dataclass(frozen=True)
class Part:
    """``name`` tells ``run_here`` what to run; ``devices``: where that can be. ``lasts_s``: what it took on an H200; of
    parts (8) and (9), which no GPU has run yet, what they should take at most."""

    number: int
    title: str
    name: str
    lasts_s: float
    limit_s: float
    devices: tuple[str, ...] = ("cuda",)
    environment: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"({self.number}) {self.title}"


PARTS = (
    Part(1, "NCCL's contract", "contract", 7, 60, ("cuda", "sim")),
    Part(1, "NCCL's contract", "forced", 6, 60, ("cuda", "sim")),
    Part(2, "late collectives", "late", 8, 80, ("cuda", "sim")),
    Part(4, "ranks that share the GPU", "ranks 2", 11, 80, ("cuda", "sim")),
    Part(6, "steps", "steps 8B 0", 26, 80, ("cuda", "cpu")),
    Part(6, "steps", "steps 8B 3", 25, 80, ("cuda", "cpu")),
    Part(6, "steps", "steps 1B 1", 25, 80, ("cuda", "cpu")),
    Part(7, "float8 and NF4", "extensions", 7, 60, ("cuda", "cpu", "sim")),
    Part(8, "a step in a CUDA graph", "graph nccl", 10, 60, ("cuda", "sim")),
    Part(8, "a step in a CUDA graph", "graph late", 12, 60, ("cuda", "sim")),
    Part(9, "wires and activations", "features", 8, 60, ("cuda", "sim")),
    Part(5, "tests/gpu", "pytest", 75, 160),
    Part(6, "direct travel", "direct", 5, 60, ("cuda", "cpu", "sim")),
    Part(3, "sanitizer", "sanitizer", 9, 80, environment={"TORCH_CUDA_SANITIZER": "1"}),
    Part(6, "steps", "steps 1B 3", 25, 80, ("cuda", "cpu")),
    Part(4, "ranks that share the GPU", "ranks 4", 15, 90, ("cuda", "sim")),
    Part(6, "steps", "steps 8B 5", 25, 80, ("cuda", "cpu")),
)


# In the process of a part


def run_here(name: str, device: str, report: Callable[..., None], limit_s: float) -> None:
    """Run the part of that name."""
    if name == "pytest":
        run_tests(report, limit_s)
        return
    from benchmarks.gpu import checks, contract, features, figures, graphs

    kind, *arguments = name.split()
    {
        "contract": contract.contract,
        "forced": checks.forced,
        "late": checks.late,
        "sanitizer": checks.sanitizer,
        "extensions": checks.extensions,
        "ranks": lambda *given: checks.ranks(*given, int(arguments[0])),
        "steps": lambda *given: figures.steps(*given, arguments[0], int(arguments[1])),
        "direct": figures.direct,
        "graph": lambda *given: graphs.graph(*given, arguments[0]),
        "features": features.features,
    }[kind](report, device)


def run_tests(report: Callable[..., None], limit_s: float) -> None:
    """``tests/gpu``, counted while they run, so that the time limit loses nothing."""
    if importlib.util.find_spec("pytest") is None:
        report(NOT_RUN, "none of these tests has run, since pytest is not installed")
        return
    # Warnings are no errors here: without numpy, or with another driver, torch itself warns when it is imported.
    options = ["-m", "", "-v", "--tb=short", "-p", "no:cacheprovider", "-W", "default"]
    command = [sys.executable, "-m", "pytest", "tests/gpu", *options]
    with tempfile.TemporaryFile("w+") as log:
        plain = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # whatever is installed there
        process = subprocess.Popen(command, cwd=ROOT, env=plain, stdout=log, stderr=subprocess.STDOUT)
        try:
            end = f"exit status {process.wait(max(limit_s - 5, 1))}"
        except subprocess.TimeoutExpired:
            process.kill()
            end = f"time limit of {limit_s:.0f} s"
        log.seek(0)
        text = log.read()
    passed, skipped, failed = outcomes(text)
    shown = f"{passed} passed, {len(failed)} failed, {skipped} skipped, {end}"
    if passed and not failed and end == "exit status 0":
        report(PASS, shown)
    else:
        report(FAIL, "; ".join([shown, *failed[:5]]), failed=failed, log=text[-4 * LOG_TAIL :])


def outcomes(text: str) -> tuple[int, int, list[str]]:
    """How many tests passed and were skipped, and the names of those that failed, by what ``pytest -v`` has printed."""
    passed, skipped = (len(re.findall(rf"^tests/\S.* {word}\b", text, re.MULTILINE)) for word in ("PASSED", "SKIPPED"))
    return passed, skipped, re.findall(r"^(tests/\S+::\S.*?) (?:FAILED|ERROR)\b", text, re.MULTILINE)


def main_of_part(name: str, device: str, verdicts: Path, limit_s: float) -> None:
    faulthandler.enable()
    if name != "pytest":
        faulthandler.dump_traceback_later(max(limit_s - 3, 1))  # where it hangs

    def report(status: str, detail: str, **figures: object) -> None:
        line = json.dumps({"status": status, "detail": detail, "figures": figures}, default=str)
        with verdicts.open("a") as file:
            file.write(line + "\n")

    status = 0
    try:
        run_here(name, device, report, limit_s)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # skips the orderly end of process groups, which may wait


# In the process that starts the parts


def run_part(
    title: str,
    command: Callable[[Path], Sequence[str]],
    limit_s: float,
    environment: Mapping[str, str],
    show: Callable[[Verdict], None],
) -> list[Verdict]:
    """Run ``command(file)``, which adds a verdict per line to ``file``. How it ends may be a verdict, too."""
    found: list[Verdict] = []
    with tempfile.TemporaryDirectory() as folder:
        lines, log = Path(folder) / "verdicts", Path(folder) / "log"
        lines.touch()

        def collect() -> None:
            whole = lines.read_text().rpartition("\n")[0].splitlines()
            for line in whole[len(found) :]:
                found.append(Verdict(part=title, **json.loads(line)))
                show(found[-1])

        deadline = time.monotonic() + limit_s
        with log.open("w") as file:
            process = subprocess.Popen(
                command(lines),
                cwd=ROOT,
                env={**os.environ, **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                while process.poll() is None and time.monotonic() < deadline:
                    collect()
                    time.sleep(0.1)
            finally:
                is_late = process.poll() is None
                _kill(process)  # and what it has started
        collect()
        end = f"time limit of {limit_s:.0f} s" if is_late else _described(process.returncode)
        if end or not found:
            tail = log.read_text(errors="replace")[-LOG_TAIL:]
            last = [line for line in tail.splitlines() if line.strip()][-1:]
            detail = end or "ended without a verdict"
            found.append(
                Verdict(FAIL, title, "; ".join([detail, *(each.strip()[:200] for each in last)]), {"log": tail})
            )
            show(found[-1])
    return found


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # it has ended, and so have all that it started
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _described(status: int) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}" if status else ""


def run_all(
    parts: Sequence[Part],
    device: str,
    limit_s: float,
    show: Callable[[Verdict], None],
    keep: Callable[[Sequence[Mapping[str, Any]]], None],
) -> list[dict[str, Any]]:
    """The verdicts of all ``parts``, each with the seconds that its part took. ``keep`` gets those so far."""
    start, found = time.monotonic(), []
    is_there = device != "cuda" or _sees_gpu()
    for part in parts:
        left = limit_s - MARGIN_S - (time.monotonic() - start)
        reason = _reason_not_to_run(part, device, is_there, left)
        began = time.monotonic()
        if reason:
            verdicts = [Verdict(NOT_RUN, str(part), f"{part.name}: {reason}")]
            show(verdicts[0])
        else:
            limit = min(part.limit_s, left) if device == "cuda" else left  # a simulated device is slower
            environment = {
                "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # bit for bit the same at every run
                "OMP_NUM_THREADS": "1",
                **part.environment,
            }
            if device == "sim":  # torch 2.15 cannot record groups written in Python
                environment["TORCH_FR_BUFFER_SIZE"] = "0"
            verdicts = run_part(str(part), partial(_command, part, device, limit), limit, environment, show)
        seconds = round(time.monotonic() - began, 1)
        found += [{**asdict(each), "name": part.name, "seconds_of_part": seconds} for each in verdicts]
        keep(found)
    return found


def _command(part: Part, device: str, limit_s: float, verdicts: Path) -> list[str]:
    given = ["--device", device, "--part", part.name, "--verdicts", str(verdicts), "--limit", f"{limit_s:.1f}"]
    return [sys.executable, str(Path(__file__)), *given]


def _sees_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def _reason_not_to_run(part: Part, device: str, is_there: bool, left_s: float) -> str:
    if device not in part.devices:
        return f"needs {' or '.join(each.upper() if each == 'cuda' else each for each in part.devices)}"
    if not is_there:
        return "needs CUDA, and torch sees no GPU"
    return f"{left_s:.0f} s are left" if left_s < SHORTEST_S else ""


# What stays


def write_verdicts(folder: Path, verdicts: Sequence[Mapping[str, Any]], **more: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    record = {**more, "verdicts": list(verdicts)}
    (folder / "verdicts.json").write_text(json.dumps(record, indent=1, default=str) + "\n")


def write_results(folder: Path, device: str, verdicts: Sequence[Mapping[str, Any]], seconds: float) -> list[str]:
    """Write verdicts, tables and plots. Returns what could not be written, and why."""
    try:
        import torch

        from benchmarks import common
        from benchmarks.gpu import figures

        record = common._record(SCRIPT, "All that one GPU can say", [])
        record |= {"device": device, "cuda": torch.version.cuda, "seconds": round(seconds)}
        if device == "cuda" and torch.cuda.is_available():
            record["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        write_verdicts(folder, verdicts, **record)
        tables = figures.tables([each["figures"] for each in verdicts])
        if not tables:
            return []
        record = common._record(SCRIPT, "Llama-shaped stacks on one GPU", tables)
        print(common.shown(record))
        common.write(record, folder / "acceptance.json")
        return _draw(folder, record["tables"])
    except Exception as error:  # the verdicts have been written before
        traceback.print_exc()
        return [f"tables: {error}"]


def _draw(folder: Path, tables: Sequence[Mapping[str, Any]]) -> list[str]:
    if importlib.util.find_spec("matplotlib") is None:
        return ["no plots, since matplotlib is not installed; verdicts and figures are complete"]
    from benchmarks import plots

    problems = []
    for table in tables:
        if table["plot"]:
            try:
                plots.draw(table, folder / f"{table['name']}.png", SCRIPT)
            except Exception as error:  # a picture is not worth the verdicts
                problems.append(f"plot {table['name']}: {error}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "sim", "cpu"], default="cuda")
    parser.add_argument("--only", type=int, nargs="+", choices=range(1, 10), help="numbers of parts")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds in all; 480 by default")
    parser.add_argument("--out", type=Path, help="a folder; by default benchmarks/results/gpu, without a GPU runs/gpu")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--verdicts", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        main_of_part(options.part, options.device, options.verdicts, options.limit)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and a part that runs ends, too
    start = time.monotonic()
    is_real = options.device == "cuda" and _sees_gpu()
    out = options.out or (RESULTS if is_real else ELSEWHERE)
    parts = [part for part in PARTS if options.only is None or part.number in options.only]
    show = partial(print, flush=True)
    verdicts = run_all(parts, options.device, options.limit, show, partial(write_verdicts, out))
    problems = write_results(out, options.device, verdicts, time.monotonic() - start)
    counts = {status: sum(each["status"] == status for each in verdicts) for status in (PASS, FAIL, NOT_RUN)}
    print("; ".join([", ".join(f"{count} {status}" for status, count in counts.items()), *problems]))
    print(f"{time.monotonic() - start:.0f} s; {out / 'verdicts.json'}")
    return 1 if counts[FAIL] else 0


if __name__ == "__main__":
    sys.exit(main())
