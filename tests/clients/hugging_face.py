"""Tiny models of transformers, and what accelerate needs to shard on the CPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.clients.compare import client, layout_of, parameters_of, whole

_MODELS = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2", "mixtral", "vit", "qwen3_moe")]
_PRELOAD = ("torch.distributed.checkpoint", "accelerate", "transformers.trainer", "peft", *_MODELS)
VOCAB = 32
_SMALL = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
_SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
_SMALL |= {"tie_word_embeddings": False}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
_GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_MOE = {**_SMALL, "num_experts_per_tok": 2, "output_router_logits": True}
_QWEN = {**_MOE, "num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8}
_VIT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_VIT |= {"image_size": 8, "patch_size": 4, "num_labels": 3}
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _SMALL),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_MOE, "num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _QWEN),
    "vit": ("ViTForImageClassification", "ViTConfig", _VIT),
}


def hf_client(*more: str, num_ranks: int = 2, **options: Any) -> Any:
    """``client`` for the libraries of Hugging Face, ``more`` of them included; all tests share the processes."""
    return client("transformers", "accelerate", "peft", *more, num_ranks=num_ranks, preload=_PRELOAD, **options)


def told_when_pinning() -> str:
    """What torch says here when it pins memory: without an accelerator, each of its builds has another error."""
    try:
        torch.empty(1).pin_memory()
    except RuntimeError as error:
        return str(error).partition(".")[0]
    return "no error"


def tiny(name: str = "llama", **changes: Any) -> Any:
    """A model of ``CONFIGS`` with random weights, equal on all ranks."""
    transformers = importlib.import_module("transformers")
    model, config, values = CONFIGS[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**{**values, **changes}))


def model_class(name: str) -> Any:
    return getattr(importlib.import_module("transformers"), CONFIGS[name][0])


def training_options(folder: Path, **more: Any) -> dict[str, Any]:
    """Arguments for a ``Trainer``, trl's included, that trains on the CPU and logs each step."""
    allow_fsdp_on_cpu()
    defaults = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2, "max_grad_norm": 0.5}
    defaults |= {"per_device_train_batch_size": 2, "seed": 3, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    return {"output_dir": str(folder / "out"), **defaults, **more}


def batch(name: str, rank: int, step: int) -> dict[str, Tensor]:
    """Inputs with labels; different on each rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    if name == "vit":
        return {
            "pixel_values": torch.randn(2, 3, 8, 8, generator=generator),
            "labels": torch.randint(0, 3, (2,), generator=generator),
        }
    ids = torch.randint(0, VOCAB, (2, 8), generator=generator)
    return {"input_ids": ids, "labels": ids}


def allow_fsdp_on_cpu() -> None:
    """accelerate shards on accelerators only. So let it take the CPU ranks for ranks of an accelerator."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    init = PartialState.__init__

    def init_with_fsdp(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_XPU

    PartialState.__init__ = init_with_fsdp


def accelerator(**options: Any) -> Any:
    """An ``Accelerator`` with the FSDP2 plugin; ``options`` of either of the two."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    allow_fsdp_on_cpu()
    of_accelerator = {"gradient_accumulation_steps", "mixed_precision", "parallelism_config", "dynamo_plugin"}
    own = {name: options.pop(name) for name in list(options) if name in of_accelerator}
    plugin = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", "reshard_after_forward": True}
    return Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**{**plugin, **options}), **own)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)  # rounding noise of a gradient stays noise in the update


def train(engine: Any, model: Any, optimizer: Any, rank: int, steps: range = range(3), name: str = "llama") -> Any:
    """A training loop as accelerate's users write it; what it has seen, and the model."""
    return {**loop(engine, model, optimizer, rank, steps, name), **state(model)}


def loop(
    engine: Any, model: Any, optimizer: Any, rank: int, steps: range, name: str = "llama", max_norm: float = 0.5
) -> dict[str, Any]:
    seen: dict[str, Any] = {"losses": [], "norms": []}
    for step in steps:
        with engine.accumulate(model):
            loss = model(**batch(name, rank, step)).loss
            engine.backward(loss)
            seen["losses"].append(loss.detach())
            if engine.sync_gradients:
                seen["norms"].append(whole(engine.clip_grad_norm_(model.parameters(), max_norm)))
            optimizer.step()
            optimizer.zero_grad()
    return seen


def state(model: nn.Module) -> dict[str, Any]:
    return {"layout": layout_of(model), "parameters": parameters_of(model)}


def saved(model: Any, folder: Path, rank: int) -> Path:
    """``model`` in a folder that all ranks can load it from; needs the process group."""
    path = folder / "saved"
    if rank == 0:
        model.save_pretrained(path)
    torch.distributed.barrier()
    return path
