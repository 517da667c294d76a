"""Offloading as the tests here force it: with copies at both ends of a plan, although all of it is on the CPU."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from fsdp2.core.comm.offload import StagedOffloadPolicy
from tests.harness.models import ParityModel
from tests.harness.runtimes import Runtime
from tests.harness.training import shard_units_and_root


def offload_policy(runtime: Runtime) -> Any:
    """For fsdp2 the one that copies on the CPU, too; torch's copies nothing that is there already. torch pins memory
    wherever it is told to, which takes an accelerator."""
    return StagedOffloadPolicy() if runtime.name == "fsdp2" else runtime.CPUOffloadPolicy(pin_memory=False)


def shard_offloaded(runtime: Runtime, model: ParityModel, mesh: DeviceMesh, **kwargs: Any) -> None:
    """Every unit on its own, then the root, with shards on the host."""
    shard_units_and_root(runtime, model, mesh, offload_policy=offload_policy(runtime), **kwargs)
