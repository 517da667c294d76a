"""torchao: float8 training with float8 all-gathers.

Run it with ``torchrun --nproc-per-node 2 -m fsdp2 run`` and this file.
"""

import torch
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

torch.distributed.init_process_group()
mesh = torch.distributed.init_device_mesh("cpu", (2,))  # "cuda" on GPUs, and there without emulate
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
fully_shard(convert_to_float8_training(model, config=config), mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(16, 32)).sum().backward()
optimizer.step()
precompute_float8_dynamic_scale_for_fsdp(model)
torch.distributed.destroy_process_group()
