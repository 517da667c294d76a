"""Claim: over 1,500 small parameters, ``fsdp2.clip_grad_norm_`` takes about a quarter of the CPU time that
``torch.nn.utils.clip_grad_norm_`` takes over the DTensors of torch's ``fully_shard``.

Rank 0 of 8 with a fake process group, whose all-reduce costs nothing; one thread; CPU time of the process. Each group
has 15 parameters of 64 x 64 and 64 elements, of which a rank has an eighth, so nearly all time is Python and dispatch.
Both are given ``model.parameters()``, as in a training loop: walking the modules is a part of their time, and is shown.

    python benchmarks/optim/clip_grad_norm.py [--params 150 1500] [--rounds 15]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.fsdp as peer
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # started by its path, a script sees only its own folder
import fsdp2
from benchmarks.common import Ratios, Table, medians_in_turns, publish, seconds_per_call
from benchmarks.optim.optimizer_step import PARAMS_PER_GROUP, fake_process_group, sharded

CALLS = 5


def measured(call: Callable[[], object]) -> Callable[[], float]:
    """CPU seconds per call."""
    call()
    return seconds_per_call(call, CALLS, time.process_time)


def row(num_params: int, rounds: int) -> list[object]:
    ours, theirs = sharded(fsdp2, num_params), sharded(peer, num_params)
    max_norm = 1e-3  # clips in every call
    seconds = medians_in_turns(
        {
            "fsdp2": measured(lambda: fsdp2.clip_grad_norm_(ours.parameters(), max_norm)),
            "torch": measured(lambda: nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)),
            "walk": measured(lambda: list(ours.parameters())),
        },
        rounds,
    )
    ratio = seconds["fsdp2"] / seconds["torch"]
    return [f"{num_params} parameters", *(value * 1e3 for value in seconds.values()), ratio]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, nargs="+", default=[150, 1500])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with fake_process_group():
        rows = [row(number, options.rounds) for number in options.params]
    columns = ["", "fsdp2 ms", "torch FSDP2 ms", "of both: parameters() ms", "ratio"]
    table = Table("main", "CPU time of a call", columns, rows, noise=0.2, plot=Ratios(aim=0.2))
    publish(
        "optim/clip_grad_norm", f"Clipping gradients in groups of {PARAMS_PER_GROUP} parameters, rank 0 of 8", [table]
    )


if __name__ == "__main__":
    main()
