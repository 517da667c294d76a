"""Lightning Fabric: its strategy, with two micro-batches per step.

Run it with ``torchrun --nproc-per-node 2 -m fsdp2 run`` and this file.
"""

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard


def parallelize(model, mesh):
    return fully_shard(model, mesh=mesh["data_parallel"])


strategy = ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1)
fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
fabric.launch()
model = fabric.setup_module(torch.nn.Linear(8, 4))
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
for micro in range(2):
    with fabric.no_backward_sync(model, enabled=micro == 0):
        fabric.backward(model(torch.randn(2, 8)).sum())
optimizer.step()
