"""``accelerate launch`` from the shell, with configuration files of FSDP1 and FSDP2: ``launched.py`` is the script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.compare import TIMEOUT_S
from tests.clients.server import RUNTIMES
from tests.docs.launch import settings
from tests.harness.compare import compare_values
from tests.harness.patience import patient
from tests.harness.selection import long
from tests.harness.training import EXACT, Tolerance

SCRIPT = Path(__file__).with_name("launched.py")
COMMAND = """import sys; from accelerate.commands.accelerate_cli import main; sys.argv[0] = "accelerate"; main()"""
COMMON = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
machine_rank: 0
main_process_port: 0
mixed_precision: "no"
num_machines: 1
num_processes: 2
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_cpu_ram_efficient_loading: false
"""
LINES = {
    "fsdp1": """\
  fsdp_version: 1
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_use_orig_params: true
  fsdp_sync_module_states: false
""",
    "fsdp2": """\
  fsdp_version: 2
  fsdp_reshard_after_forward: true
""",
}
# As test_fsdp1.py says, norms of FSDP1 are sums in another order; here, no gradient is so large that it is clipped.
OF_NORMS = {"fsdp1": Tolerance(1e-6, 1e-7), "fsdp2": EXACT}
NUM_UNITS = {"fsdp1": 3, "fsdp2": 6}  # of FSDP2, the embedding, the norm and the head are units, too
# Each unit is reduced once and gathered twice, but for the last one of the forward, which stays unsharded.
NUM_TRANSFERS = {"fsdp1": 8, "fsdp2": 11}


# FSDP1 is how most people start it. It is in CI in turns, as all clients are: each case starts six processes.
@pytest.mark.parametrize("version", ["fsdp1", *long("fsdp2")])
def test_a_launched_script_trains_saves_and_loads_the_same(version: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    (tmp_path / "config.yaml").write_text(COMMON + LINES[version])
    with ThreadPoolExecutor() as threads:
        theirs, ours = threads.map(lambda runtime: launch(runtime, tmp_path), RUNTIMES)
    for rank in range(2):
        expected, found = (shown_by(seen, rank) for seen in (theirs, ours))
        for seen, package in ((expected, "torch."), (found, "fsdp2.")):
            assert [name.startswith(package) for name in seen.pop("classes")] == [True]
        compare_values("fsdp2 differs from torch", found.pop("norms"), expected.pop("norms"), OF_NORMS[version])
        compare_values("fsdp2 differs from torch", found, expected, EXACT)
        # That both shard, and neither replicates.
        assert found["elements_here"] * 2 == found["elements"]
        assert (found["units"], found["transfers"]) == (NUM_UNITS[version], NUM_TRANSFERS[version])
        losses = found["losses"]
        assert losses[4:7] == losses[7:]  # what was saved is where the second of these runs began
    compare_values("fsdp2 saved other states than torch", states_in(ours), states_in(theirs), EXACT)


def launch(runtime: str, folder: Path) -> Path:
    """Run the script under ``runtime``; the folder where it wrote."""
    out = folder / runtime
    out.mkdir()
    way = {"torch": [], "fsdp2": ["-m", "fsdp2", "run"]}[runtime]
    command = [sys.executable, "-c", COMMAND, "launch", "--config_file", str(folder / "config.yaml")]
    command += ["--num_cpu_threads_per_process", "1", *way, str(SCRIPT), str(out)]
    # torch's class of FSDP1 takes the device ``cpu`` for the CPU, and not ``cpu:0``
    variables = {"HF_HUB_OFFLINE": "1", "ACCELERATE_TORCH_DEVICE": "cpu", **settings()}
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=patient(TIMEOUT_S), env={**os.environ, **variables}
    )
    assert ran.returncode == 0, f"with {runtime}'s runtime:\n{ran.stderr[-8000:]}"
    assert ("fsdp2.install:" in ran.stderr) == (runtime == "fsdp2")
    return out


def shown_by(folder: Path, rank: int) -> dict[str, Any]:
    seen = json.loads((folder / f"seen.{rank}.json").read_text())
    return {name: torch.tensor(values) if name == "norms" else values for name, values in seen.items()}


def states_in(folder: Path) -> dict[str, Any]:
    """All tensors and numbers of the saved model, optimizer and scheduler, whole."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    state = folder / "state"
    found = {}
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        dcp_to_torch_save(state / part, folder / part)
        found[part] = by_name(torch.load(folder / part, weights_only=False))
    files = sorted(str(path.relative_to(state)) for path in state.rglob("*"))
    return {**found, "scheduler": torch.load(state / "scheduler.bin"), "files": files}


def by_name(tree: Any) -> Any:
    """``tree`` with its names sorted: those of a checkpoint come in the order of a set."""
    if isinstance(tree, dict):
        return {name: by_name(tree[name]) for name in sorted(tree)}
    return tree
