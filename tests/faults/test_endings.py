"""A script that has done its work ends as it says, whatever gloo's threads still hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.selection import long

ROOT = Path(__file__).parents[2]
# A thread holds the tensor of the last collective, as gloo's does, and lets go of it when Python is about to end.
SCRIPT = """
import threading, time, torch
import torch.distributed as dist
from fsdp2.comm import backends

def hold(tensor, *given, **options):
    held.append(tensor)
    return all_reduce(tensor, *given, **options)

def drop():
    time.sleep(0.5)
    held.clear()
    print("dropped", flush=True)

held, all_reduce, dist.all_reduce = [], dist.all_reduce, hold
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for work in backends.all_reduce(None, torch.ones(1)):
    work.wait()
assert len(held) == 1
threading.Thread(target=drop, daemon=True).start()
"""


@pytest.mark.ci
@pytest.mark.parametrize("end", ["", *long("dist.destroy_process_group()", "raise ValueError('of the script')")])
def test_python_ends_after_a_thread_has_dropped_the_last_collective(end: str) -> None:
    """It aborted: "terminate called without an active exception"."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run([sys.executable, "-c", SCRIPT + end], capture_output=True, text=True, timeout=200, env=env)
    assert (ran.returncode, ran.stdout) == (int("raise" in end), "dropped\n"), ran.stderr
