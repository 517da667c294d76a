"""``@on_device(2)``: a test body that runs on ranks with a simulated accelerator each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.accelerator import device, group
from tests.harness.distributed import CALL_TIMEOUT_S, RankContext, distributed


def on_device(*world_sizes: int, timeout_s: float = CALL_TIMEOUT_S) -> Callable[[Callable[..., Any]], Any]:
    """Run the decorated ``body(ctx, ...)`` on pools of each of ``world_sizes`` ranks, whose meshes are on ``"sim"``.
    Tests that take more than 2 ranks are long.
    """

    def decorate(body: Callable[..., Any]) -> Any:
        @functools.wraps(body)
        def run(ctx: RankContext, **kwargs: Any) -> Any:
            prepare()
            try:
                return body(ctx, **kwargs)
            finally:
                device.load().drain()  # what other ranks may wait for

        test = distributed(*world_sizes, timeout_s=timeout_s, device_type=device.DEVICE)(run)
        return pytest.mark.long(test) if min(world_sizes) > 2 else test

    return decorate


def prepare() -> None:
    """Load the device into this rank, once, and make ``simnccl`` its default process group. Schedules start anew."""
    _join()
    device.schedule(0)
    device.host_syncs.clear()


@functools.cache
def _join() -> None:
    device.load()
    group.register()
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("accelerator", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group(group.BACKEND, store=store, rank=rank, world_size=size)


@functools.cache
def cpu_mesh(*sizes: int) -> DeviceMesh:
    """A mesh of the same ranks on the CPU, where gloo carries everything."""
    names = ("replicate", "shard")[-len(sizes) :]
    override: dict[int | str, Any] = dict.fromkeys(names, "gloo")
    return init_device_mesh("cpu", sizes, mesh_dim_names=names, backend_override=override)
