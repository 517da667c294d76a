"""Start a script as a user would: ``torchrun`` in a process of its own, with the package importable.

Or, where that start is not what is tested, as ``torchrun`` would have its ranks run: in forks of a process that has
imported torch, which takes two seconds where a start takes ten.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.harness.patience import patient
from tests.harness.pool import PRELOADED

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0


def torchrun(
    script: Path | str, arguments: Sequence[str] = (), *, num_ranks: int = 2, options: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` on ``num_ranks`` ranks of this machine; the result has its exit status and both outputs.
    ``options`` are torchrun's own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += [*options, str(script), *arguments]
    environment = {**os.environ, **settings()}
    return subprocess.run(command, capture_output=True, text=True, timeout=patient(TIMEOUT_S), env=environment)


def forked_ranks(script: Path, arguments: Sequence[str], *, num_ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """The same, quicker. The exit status is that of the first rank that failed; outputs are those of all, by rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, f"{name}.{rank}") for name in ("out", "err") for rank in range(num_ranks)]
        ranks = []
        for rank in range(num_ranks):
            variables = {**settings(), **_variables(rank, num_ranks, port)}
            given = (script, list(arguments), variables, outputs[rank], outputs[num_ranks + rank])
            ranks.append(context.Process(target=_run_rank, args=given, daemon=True))
            ranks[-1].start()
        for process in ranks:
            process.join(patient(TIMEOUT_S))
            process.kill()
            process.join()
        texts = [path.read_text() if path.exists() else "" for path in outputs]
    failed = [process.exitcode for process in ranks if process.exitcode]
    out, err = "".join(texts[:num_ranks]), "".join(texts[num_ranks:])
    return subprocess.CompletedProcess([str(script), *arguments], failed[0] or 1 if failed else 0, out, err)


def _run_rank(script: Path, arguments: list[str], variables: dict[str, str], out: Path, err: Path) -> None:
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.update(variables)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def settings() -> dict[str, str]:
    found = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        found["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return found


def _variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """What ``torchrun`` tells the ranks of one machine."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **{name: str(n) for name, n in ranks.items()}}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
