"""Lightning Fabric's ``ModelParallelStrategy``: the user's ``parallelize_fn`` calls ``fully_shard``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.nn import functional as F

from tests.clients.compare import client, files_in, layout_of, parameters_of, whole
from tests.harness.comms import CountingReduceScatter
from tests.harness.models import DIM, Block

PRELOADED = ("torch.distributed.checkpoint", "torch.distributed.tensor.parallel", "lightning_fabric")


def on_ranks(num_ranks: int) -> Any:
    return client("lightning_fabric", num_ranks=num_ranks, preload=PRELOADED)


def parallelize(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    in_block = {"up": ColwiseParallel, "down": RowwiseParallel}
    if mesh["tensor_parallel"].size() > 1:  # all parameters, since clipping wants them on one mesh
        styles = {f"{i}.{name}": style() for i in range(2) for name, style in in_block.items()}
        parallelize_module(model, mesh["tensor_parallel"], {**styles, "2": ColwiseParallel(output_layouts=Replicate())})
    for block in model[:2]:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def fabric_of(num_ranks: int, tensor_parallel: int = 1, **options: Any) -> Any:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import LightningEnvironment
    from lightning_fabric.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(
        parallelize, data_parallel_size=num_ranks // tensor_parallel, tensor_parallel_size=tensor_parallel, **options
    )
    fabric = Fabric(accelerator="cpu", devices=num_ranks, strategy=strategy, plugins=[LightningEnvironment()])
    fabric.launch()
    return fabric


def set_up(fabric: Any, *, on_meta: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    with fabric.init_module(empty_init=on_meta):
        model = nn.Sequential(Block(), Block(), nn.Linear(DIM, DIM))
    model = fabric.setup_module(model)
    return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))


def train(fabric: Any, model: Any, optimizer: Any, steps: range = range(3), num_accumulated: int = 1) -> dict[str, Any]:
    """A loop as Fabric's users write it; the last of ``num_accumulated`` backwards reduces."""
    dp_rank = fabric.strategy.device_mesh["data_parallel"].get_local_rank()
    seen: dict[str, Any] = {"losses": [], "norms": []}
    for step in steps:
        for micro in range(num_accumulated):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + dp_rank)
            inputs, target = torch.randn(2, 4, DIM, generator=generator)
            with fabric.no_backward_sync(model, enabled=micro < num_accumulated - 1):
                loss = F.mse_loss(model(inputs), target)
                fabric.backward(loss)
            seen["losses"].append(loss.detach())
        seen["norms"].append(whole(fabric.clip_gradients(model, optimizer, max_norm=0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return {**seen, "layout": layout_of(model), "parameters": parameters_of(model)}


@on_ranks(2)
def test_a_model_made_on_the_meta_device_trains_the_same(rank: int, folder: Path) -> Any:
    fabric = fabric_of(2)
    return train(fabric, *set_up(fabric, on_meta=True))


@on_ranks(4)
def test_tensor_parallelism_trains_the_same(rank: int, folder: Path) -> Any:
    fabric = fabric_of(4, tensor_parallel=2)
    return train(fabric, *set_up(fabric))


@on_ranks(2)
def test_no_backward_sync_reduces_once_per_step(rank: int, folder: Path) -> Any:
    fabric = fabric_of(2)
    model, optimizer = set_up(fabric)
    counters = [CountingReduceScatter() for _ in range(3)]
    for unit, counter in zip((*model.module[:2], model.module), counters, strict=True):
        unit.set_custom_reduce_scatter(counter)
    seen = train(fabric, model, optimizer, num_accumulated=3)
    assert [len(counter.take()) for counter in counters] == [3, 3, 3]  # once in each of three steps
    return seen


@pytest.mark.parametrize("is_distributed", [True, False], ids=["folder", "file"])
@on_ranks(2)
def test_training_goes_on_from_a_checkpoint(rank: int, folder: Path, is_distributed: bool) -> Any:
    fabric = fabric_of(2, save_distributed_checkpoint=is_distributed)
    model, optimizer = set_up(fabric)
    before = train(fabric, model, optimizer)
    fabric.save(folder / "checkpoint", {"model": model, "optimizer": optimizer, "step": 3})
    after = train(fabric, model, optimizer, range(3, 5))
    model, optimizer = set_up(fabric)
    # DCP fills the states of an optimizer that has states.
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    fabric.load(folder / "checkpoint", {"model": model, "optimizer": optimizer})
    again = train(fabric, model, optimizer, range(3, 5))
    assert all(torch.equal(one, other) for one, other in zip(again["losses"], after["losses"], strict=True))
    return before, after, again, files_in(folder)
