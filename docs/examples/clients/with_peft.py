"""peft: a LoRA adapter, trained and saved.

Run it with ``torchrun --nproc-per-node 2 -m fsdp2 run`` and this file.
"""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
accelerator = Accelerator(fsdp_plugin=plugin)
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2))
model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
ids = torch.randint(32, (2, 8))
accelerator.backward(model(input_ids=ids, labels=ids).loss)
optimizer.step()
state = accelerator.get_state_dict(model)  # all ranks
model.save_pretrained("adapter", state_dict=state, is_main_process=accelerator.is_main_process)
