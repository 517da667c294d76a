"""A script that has done its work ends as it says, whatever gloo's threads still hold."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

CODES = {"as it is": 0, "destroy": 0, "error": 1}


@pytest.mark.ci
def test_ranks_end_cleanly_while_gloo_holds_the_last_collective(tmp_path: Path) -> None:
    """They aborted: "terminate called without an active exception"."""
    root = Path(__file__).parents[2]
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(root)}
    script = root / "tests" / "faults" / "endings.py"
    ran = subprocess.run(
        [sys.executable, str(script), *CODES, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **settings},
    )
    assert ran.returncode == 0, ran.stderr
    assert ast.literal_eval(ran.stdout) == [(end, code) for end, code in CODES.items() for _ in range(2)], ran.stderr


_LATE = """
import threading, time, weakref, torch
from fsdp2.comm import backends

def drop(held):
    time.sleep(0.5)
    held.clear()
    print("dropped", flush=True)

held = [torch.zeros(1)]
backends._lent.add(weakref.ref(held[0], backends._lent.discard))
threading.Thread(target=drop, args=(held,), daemon=True).start()
"""


@pytest.mark.ci
def test_python_ends_after_a_thread_has_dropped_the_last_collective() -> None:
    """The same with a thread that takes its time; above, the moment decides."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run([sys.executable, "-c", _LATE], capture_output=True, text=True, timeout=200, env=env)
    assert (ran.returncode, ran.stdout) == (0, "dropped\n"), ran.stderr
