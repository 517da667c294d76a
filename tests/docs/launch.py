"""Start a script as a user would: ``torchrun`` in a process of its own, with the package importable."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0


def torchrun(script: Path, arguments: Sequence[str] = (), *, num_ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Run ``script`` on ``num_ranks`` ranks of this machine; the result has its exit status and both outputs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return _run([*command, str(script), *arguments])


def python(script: Path, arguments: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run ``script`` in one process, without ``torchrun``."""
    return _run([sys.executable, str(script), *arguments])


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
