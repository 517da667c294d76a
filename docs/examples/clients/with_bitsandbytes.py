"""bitsandbytes: QLoRA, adapters of peft on a base in 4 bits.

Run it with ``torchrun --nproc-per-node 2 -m fsdp2 run`` and this file.
"""

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

torch.distributed.init_process_group()
device = "cpu"  # torch.device("cuda", local rank) on GPUs
if torch.distributed.get_rank() == 0:  # stands for a real model
    sizes = LlamaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    LlamaForCausalLM(sizes).save_pretrained("base")
torch.distributed.barrier()

config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
model = LlamaForCausalLM.from_pretrained("base", quantization_config=config, device_map={"": device})
torch.manual_seed(0)  # the adapters are the same on all ranks
model = get_peft_model(model.train(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))

mesh = torch.distributed.init_device_mesh(torch.device(device).type, (2,))
for layer in model.get_base_model().model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
ids = torch.randint(32, (2, 8))
model(input_ids=ids, labels=ids).loss.backward()
optimizer.step()
torch.distributed.destroy_process_group()
