"""Claim: ``fsdp2.report.report`` adds less than 1% to a step on GPUs, even if the GPU waited for all that it adds.

What it adds to a step is work of the host: it notes when each piece of work starts and stops, by events on the streams
that do the work. Their times are read after the last step. Here, the device is the simulated accelerator of
``tests/accelerator``; ranks are not there, and collectives move nothing. Blocks have the shapes of Llama 3 8B at an
eighth of its width. Per block: what 8 more blocks add, divided by 8. Time spent in the recorder; the least of many
steps.

The share is that of torchtitan's published step of Llama 3.1 8B on 8 H100s, compiled (``scale/published.py``). Nothing
was measured on a GPU: an event of CUDA may take another time than one of this device.

    python benchmarks/step/report_cost.py [--rounds 30]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
from benchmarks.common import Table, publish
from benchmarks.scale.published import CALIBRATES
from benchmarks.step.launches import CASES, FEWER_BLOCKS, NUM_BLOCKS, alone, model_on_device, stepper
from fsdp2.core.runtime.unit_tree import tree_of
from fsdp2.extras.units import sharded_unit
from fsdp2.report.call import attached
from fsdp2.report.held import HeldBytes
from fsdp2.report.recorder import DeviceClock, Recorder
from tests.accelerator import device

CASE = CASES["mixed"]
NUM_STEPS = 3  # of a report
NUM_UNITS = 33  # of Llama 3 8B: the blocks and the root
METHODS = ("on_event", "on_start", "on_stop", "on_action", "on_activity")


class Subject:
    """Some blocks, and what the recorder of a report takes for them: ``seconds`` and ``num_marks`` of a step."""

    def __init__(self, num_blocks: int, mesh: DeviceMesh) -> None:
        self._model = model_on_device("fsdp2", CASE, num_blocks, mesh)
        self._step = stepper(self._model, CASE)
        self._spent = 0.0
        self.seconds, self.num_marks = float("inf"), 0

    def measure(self) -> None:
        """Run the steps of one report."""
        tree = tree_of(sharded_unit(self._model, "benchmark"))
        clock, held = DeviceClock(tree.root.mesh.device, tree.units), HeldBytes(tree, saves=True)
        recorder = Recorder(clock, NUM_STEPS + 1, held)
        for name in METHODS:
            setattr(recorder, name, self._timed(getattr(recorder, name)))
        with attached(recorder, self._model, "blocks"):
            for _ in range(NUM_STEPS):
                self._spent = 0.0
                self._step()
                self.seconds = min(self.seconds, self._spent)
        recorder.end()
        self.num_marks = sum(len(step.marks) for step in recorder.steps()) // NUM_STEPS

    def _timed(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: object) -> None:
            start = time.perf_counter()
            call(*args)
            self._spent += time.perf_counter() - start

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    device.load()
    with alone(CASE.shape) as mesh:
        few, many = (Subject(num_blocks, mesh) for num_blocks in (FEWER_BLOCKS, NUM_BLOCKS))
        for _ in range(rounds):
            few.measure()
            many.measure()
    added = (many.seconds - few.seconds) / (NUM_BLOCKS - FEWER_BLOCKS)
    num_marks = (many.num_marks - few.num_marks) / (NUM_BLOCKS - FEWER_BLOCKS)
    share = added * NUM_UNITS * CALIBRATES.page / CALIBRATES.batch.tokens
    cells = [CASE.title, f"{1e6 * added:.0f}", f"{num_marks:.0f}", f"{100 * share:.2f}"]
    columns = ["", "us", "marks", "% of a step of 8B"]
    publish(
        "step/report_cost",
        "What a report adds to a step",
        [Table("main", "Per block and step", columns, [cells], ratio=None)],
    )


if __name__ == "__main__":
    main()
