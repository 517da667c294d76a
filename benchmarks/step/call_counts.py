"""Claim: beyond the unsharded model, a step under fsdp2 makes about a third of the Python calls that it makes under
torch's ``fully_shard``.

One warm step of 16 units of 9 parameters, blocks or the layers of a Llama, on the process group of ``null_group.py``
with 8 ranks, under ``sys.setprofile`` in all threads, without garbage collection. Counted, each per unit:

- all calls: of any Python function, minus those of the same step of the unsharded model;
- calls in the runtime: of functions in the runtime's files: all of ``fsdp2/``, or all of ``torch/distributed/fsdp/``;
- crossings: those of them whose caller is in another file;

and the files of the runtime that the step enters. Counts are exact: the same on every run.

    python benchmarks/step/call_counts.py [--list [{fsdp2,torch}]] [--llama]

``--list`` prints instead what one unit's forward and backward call, in order and indented by depth: the calls in the
runtime, and those from there into other files. With ``--llama``, of a Llama's layer.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
from benchmarks.common import Table, publish
from benchmarks.llama import MISSING, loss, units
from benchmarks.null_group import null_process_group
from benchmarks.step.runtime_overhead import LLAMA, RUNTIMES, Case, Step, model_and_input, sharded, stepper, summed

NUM_UNITS = LLAMA.num_layers
LISTED = NUM_UNITS // 2
FOLDERS = {name: f"{Path(str(runtime.__file__)).parent}/" for name, runtime in RUNTIMES.items()}


@dataclass(frozen=True)
class Call:
    """One call of a Python function. ``depth``: how many calls were open in its thread."""

    callee: CodeType
    caller: CodeType | None
    depth: int

    @property
    def is_crossing(self) -> bool:
        return self.caller is None or self.caller.co_filename != self.callee.co_filename

    def is_in(self, folder: str) -> bool:
        return self.callee.co_filename.startswith(folder)

    def is_from(self, folder: str) -> bool:
        return self.caller is not None and self.caller.co_filename.startswith(folder)


class Recorder:
    """Notes all Python calls while it records."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._here = threading.local()

    @contextmanager
    def recording(self) -> Iterator[None]:
        gc.disable()
        _profile(self._note)
        try:
            yield
        finally:
            _profile(None)
            gc.enable()

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        depth = getattr(self._here, "depth", 0)
        if event == "call":
            self.calls.append(Call(frame.f_code, frame.f_back.f_code if frame.f_back else None, depth))
            self._here.depth = depth + 1
        elif event == "return":
            self._here.depth = depth - 1


def _profile(hook: Callable[..., None] | None) -> None:
    """In all threads; before Python 3.12, in this one and in those that start from now on."""
    threading.setprofile(hook)
    getattr(sys, "_setprofileallthreads", sys.setprofile)(hook)


def calls_of_a_step(step: Step) -> list[Call]:
    recorder = Recorder()
    with recorder.recording():
        step()
    return recorder.calls


Subject = tuple[nn.Module, Callable[[nn.Module], Step]]  # a model, and what makes a step of it or of a sharded copy


def blocks() -> Subject:
    model, x = model_and_input(Case("", num_blocks=NUM_UNITS))
    return model, lambda model: stepper(model, x, summed)


def llama() -> Subject:
    return LLAMA.model(), lambda model: stepper(model, LLAMA.tokens(), loss)


def table(name: str, title: str, subject: Subject) -> Table:
    model, stepper_of = subject
    num_plain = len(calls_of_a_step(stepper_of(copy.deepcopy(model))))
    columns = []
    for runtime_name, runtime in RUNTIMES.items():
        calls = calls_of_a_step(stepper_of(sharded(copy.deepcopy(model), runtime, mixed=False)))
        own = [call for call in calls if call.is_in(FOLDERS[runtime_name])]
        totals = [len(calls) - num_plain, len(own), sum(call.is_crossing for call in own)]
        num_files = len({call.callee.co_filename for call in own})
        columns.append([*(total / NUM_UNITS for total in totals), num_files])
    names = ["all calls", "calls in the runtime", "crossings", "files of the runtime"]
    rows = [
        [name, f"{ours:.0f}", f"{theirs:.0f}", ours / theirs]
        for name, ours, theirs in zip(names, *columns, strict=True)
    ]
    return Table(name, title, ["", "fsdp2", "torch", "ratio"], rows, noise=0)


# One unit's calls


class _Mark(torch.autograd.Function):
    """Runs ``note`` with a name in the forward, and with another one in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[[str], None], index: int) -> Tensor:
        ctx.note, ctx.name = note, f"backward {index - 1}"
        note(f"forward {index}")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.note(ctx.name)
        return gradient, None, None


def _mark(unit: nn.Module, index: int, note: Callable[[str], None]) -> None:
    """Have ``unit`` say when its forward begins, ahead of all hooks, and when its backward has ended, behind them."""
    base = type(unit)

    def call(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return base.__call__(self, _Mark.apply(x, note, index), *args, **kwargs)

    unit.__class__ = type(f"Marked{base.__name__}", (base,), {"__call__": call})


def print_list(name: str, subject: Subject) -> None:
    """What one unit calls under the runtime ``name``."""
    recorder, starts = Recorder(), dict[str, int]()

    def note(mark: str) -> None:
        starts[mark] = len(recorder.calls)

    model, stepper_of = subject
    for index, unit in enumerate(units(model)[:-1]):
        _mark(unit, index, note)
    step = stepper_of(sharded(model, RUNTIMES[name], mixed=False))
    with recorder.recording():
        step()
    for phase, following in (("forward", LISTED + 1), ("backward", LISTED - 1)):
        calls = recorder.calls[starts[f"{phase} {LISTED}"] : starts[f"{phase} {following}"]]
        own = [call for call in calls if call.is_in(FOLDERS[name])]
        num_crossings = sum(call.is_crossing for call in own)
        print(f"{phase} of one unit: {len(own)} calls in the runtime, {num_crossings} crossings")
        print("\n".join(_lines(calls, FOLDERS[name])), end="\n\n")


def _lines(calls: list[Call], folder: str) -> Iterator[str]:
    """A line per call in ``folder`` or from there; indented by the number of such calls that are open."""
    open_depths: list[int] = []
    for call in calls:
        while open_depths and open_depths[-1] >= call.depth:
            open_depths.pop()
        if call.is_in(folder) or call.is_from(folder):
            function = getattr(call.callee, "co_qualname", call.callee.co_name)
            yield f"{'  ' * len(open_depths)}{_short(call.callee.co_filename, folder)}:{function}"
            open_depths.append(call.depth)


def _short(path: str, folder: str) -> str:
    """Below the runtime's folder, or else below the innermost folder that Python imports from."""
    parents = [parent for parent in (folder, *(f"{each}/" for each in sys.path if each)) if path.startswith(parent)]
    return path.removeprefix(max(parents, key=len, default=""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", nargs="?", choices=RUNTIMES, const="fsdp2", help="print one unit's calls instead")
    parser.add_argument("--llama", action="store_true", help="list those of a Llama's layer")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with null_process_group(8):
        if options.list:
            print_list(options.list, llama() if options.llama else blocks())
            return
        tables = [table("main", "Python calls per block and step", blocks())]
        if MISSING:
            print(f"without the Llama: {MISSING}")
        else:
            tables.append(table("llama", "Python calls per layer of a Llama and step", llama()))
    publish("step/call_counts", "Python calls per group of 9 parameters and step, 8 ranks, fp32", tables)


if __name__ == "__main__":
    main()
