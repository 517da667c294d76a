"""accelerate's FSDP2 plugin: ``Accelerator.prepare`` and what training scripts do around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.clients.compare import client, files_in, layout_of, parameters_of, whole

HF = (
    "torch.distributed.checkpoint",
    "accelerate",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "peft",
)
accelerate_client = client("accelerate", "transformers", "peft", preload=HF)


def tiny_llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**{**config, **changes}))


def allow_fsdp_on_cpu() -> None:
    """accelerate shards on accelerators only. So let it take the CPU ranks for ranks of an accelerator."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True).distributed_type = DistributedType.MULTI_XPU  # all instances share their state


def accelerator(num_accumulated: int = 1, **changes: Any) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    allow_fsdp_on_cpu()
    plugin = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", "reshard_after_forward": True}
    return Accelerator(
        cpu=True,
        gradient_accumulation_steps=num_accumulated,
        mixed_precision=changes.pop("mixed_precision", None),
        fsdp_plugin=FullyShardedDataParallelPlugin(**{**plugin, **changes}),
    )


def batch(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(0, 32, (2, 8), generator=generator)
    return {"input_ids": ids, "labels": ids}


def train(engine: Any, model: Any, optimizer: Any, rank: int, steps: range = range(3)) -> dict[str, Any]:
    """A training loop as accelerate's users write it; what it has seen."""
    seen: dict[str, Any] = {"losses": [], "norms": []}
    for step in steps:
        with engine.accumulate(model):
            loss = model(**batch(rank, step)).loss
            engine.backward(loss)
            seen["losses"].append(loss.detach())
            if engine.sync_gradients:
                seen["norms"].append(whole(engine.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    return {**seen, "layout": layout_of(model), "parameters": parameters_of(model)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reshard_after_forward": False},
        {"cpu_ram_efficient_loading": False},
        {"activation_checkpointing": True},
        {"mixed_precision": "bf16"},
        {"num_accumulated": 2},
    ],
    ids=str,
)
@accelerate_client
def test_a_loop_trains_the_same(rank: int, folder: Path, options: dict[str, Any]) -> Any:
    engine = accelerator(**options)
    model = tiny_llama()
    model, optimizer = engine.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return train(engine, model, optimizer, rank)
