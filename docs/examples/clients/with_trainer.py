"""transformers' Trainer: train and save.

Run it with ``torchrun --nproc-per-node 2 -m fsdp2 run`` and this file.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2))
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(32, (8, 8))]
arguments = TrainingArguments(
    output_dir="out",
    fsdp=True,
    fsdp_config={"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    max_steps=2,
    report_to=[],
)
trainer = Trainer(model, arguments, train_dataset=data)
trainer.train()
trainer.save_model("saved")
