"""torch.distributed.checkpoint: an asynchronous save, and Hugging Face files.

Run it with ``torchrun --nproc-per-node 2 -m fsdp2 run`` and this file.
"""

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

torch.distributed.init_process_group()
mesh = torch.distributed.init_device_mesh("cpu", (2,))
model = fully_shard(torch.nn.Linear(8, 4), mesh=mesh)
group = torch.distributed.new_group(backend="gloo")  # training may go on in the default one
dcp.async_save(get_model_state_dict(model), checkpoint_id="checkpoint", process_group=group).result()
writer = dcp.HuggingFaceStorageWriter("saved", save_distributed=True, enable_consolidation=True)
dcp.save(get_model_state_dict(model), storage_writer=writer)
state = get_model_state_dict(model)
dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader("saved"))
set_model_state_dict(model, state)
torch.distributed.destroy_process_group()
