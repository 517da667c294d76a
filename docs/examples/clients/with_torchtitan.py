"""torchtitan: a Llama on the meta device, sharded by torchtitan's own function.

Run it with ``torchrun --nproc-per-node 2 -m fsdp2 run`` and this file.
"""

import torch
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3 import llama3_configs, parallelize_llama

torch.distributed.init_process_group()
layout = ParallelismConfig(spmd_backend="partial_dtensor")
dims = ParallelDims.from_config(layout, torch.distributed.get_world_size())
options = {"parallel_dims": dims, "parallelism": layout, "training": TrainingConfig(), "ac_config": None}
with torch.device("meta"):
    model = llama3_configs["debugmodel"](attn_backend="flex").build()
parallelize_llama(model, compile_config=CompileConfig(), dump_folder=".", **options)
model.to_empty(device=dims.get_mesh("fsdp").device_type)
with torch.no_grad():
    model.init_weights()
torch.distributed.destroy_process_group()
