"""Pipelining: two pipeline ranks, two data-parallel ranks, and a schedule that splits the backward.

Run it with ``torchrun --nproc-per-node 4 -m fsdp2 run`` and this file.
"""

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

torch.distributed.init_process_group()
mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
linears = [torch.nn.Linear(8, 8) for _ in range(2)]
model = torch.nn.ModuleList(fully_shard(linear, mesh=mesh["dp"], reshard_after_forward=False) for linear in linears)
rank, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
stages = [PipelineStage(part, rank + 2 * i, 4, torch.device("cpu"), group=group) for i, part in enumerate(model)]
schedule = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=torch.nn.functional.mse_loss)
if rank == 0:
    schedule.step(torch.randn(8, 8))
else:
    schedule.step(target=torch.randn(8, 8))
torch.optim.AdamW(model.parameters()).step()
torch.distributed.destroy_process_group()
