"""transformers: a model that ``from_pretrained`` shards by ``DistributedConfig``.

Run it with ``torchrun --nproc-per-node 2 -m fsdp2 run`` and this file.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

torch.distributed.init_process_group()
config = LlamaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
if torch.distributed.get_rank() == 0:
    LlamaForCausalLM(config).save_pretrained("start")
torch.distributed.barrier()
model = LlamaForCausalLM.from_pretrained("start", distributed_config=DistributedConfig(fsdp_size=2))
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.randint(32, (2, 8))
model(input_ids=ids, labels=ids).loss.backward()
optimizer.step()
model.save_pretrained("saved")
torch.distributed.destroy_process_group()
