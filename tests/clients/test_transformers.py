"""transformers' own sharding: ``from_pretrained(..., distributed_config=DistributedConfig(...))``."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.clients.compare import files_in, whole
from tests.clients.hugging_face import adamw, batch, hf_client, model_class, saved, state, tiny, told_when_pinning
from tests.harness.training import Tolerance


def loaded(folder: Path, rank: int, config: dict[str, Any], name: str = "llama", **changes: Any) -> Any:
    """A tiny model, saved by rank 0 and loaded in shards."""
    from transformers.distributed import DistributedConfig

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    path = saved(tiny(name, **changes), folder, rank)
    return model_class(name).from_pretrained(path, distributed_config=DistributedConfig(**config))


def train(model: Any, data_rank: int, name: str = "llama", num_steps: int = 3) -> Any:
    optimizer = adamw(model.parameters())
    losses, gradients = [], {}
    for step in range(num_steps):
        loss = model(**batch(name, data_rank, step)).loss
        loss.backward()
        losses.append(loss.detach())
        if step == 0:
            gradients = {key: None if p.grad is None else whole(p.grad) for key, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "gradients": gradients, **state(model)}


@pytest.mark.parametrize("name", ["llama", "mixtral", "vit"])
@hf_client()
def test_fsdp_trains_the_same(rank: int, folder: Path, name: str) -> Any:
    return train(loaded(folder, rank, {"fsdp_size": 2}, name), rank, name)


# transformers ties embeddings after fully_shard. torch then reduces two gradients, and fsdp2 their sum.
tied_client = functools.partial(hf_client, tolerance=Tolerance(rtol=1e-5, atol=1e-6))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@tied_client()
def test_tied_embeddings_train_alike(rank: int, folder: Path, name: str) -> Any:
    changes = {} if name == "gpt2" else {"tie_word_embeddings": True}
    model = loaded(folder, rank, {"fsdp_size": 2}, name, **changes)
    return {**train(model, rank, name), "tied": model.lm_head.weight is model.get_input_embeddings().weight}


@pytest.mark.parametrize(
    "config", [{"fsdp_mixed_precision": True}, {"fsdp_plan": {"model.layers.*": "keep_full_weight"}}], ids=str
)
@hf_client()
def test_options_train_the_same(rank: int, folder: Path, config: dict[str, Any]) -> Any:
    return train(loaded(folder, rank, {"fsdp_size": 2, **config}), rank)


@hf_client(fails=(told_when_pinning(), "no error"))
def test_pinned_offload_needs_an_accelerator_in_torch(rank: int, folder: Path) -> None:
    train(loaded(folder, rank, {"fsdp_size": 2, "fsdp_cpu_offload": True}), rank, num_steps=1)


_EP = {"ep_implementation": "all_to_all"}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama", {"fsdp_size": 2, "dp_replicate_size": 2}),
        ("llama", {"fsdp_size": 2, "tp_size": 2}),
        *((name, {"fsdp_size": 4, "ep_size": 2, **_EP}) for name in ("mixtral", "qwen3_moe")),
        *((name, {"fsdp_size": 2, "tp_size": 2, "ep_size": 4, **_EP}) for name in ("mixtral", "qwen3_moe")),
        *((name, {"fsdp_size": 4, "ep_size": 4, **_EP}) for name in ("mixtral", "qwen3_moe")),
    ],
    ids=str,
)
@hf_client(num_ranks=4)
def test_meshes_of_four_ranks_train_the_same(rank: int, folder: Path, name: str, config: dict[str, Any]) -> Any:
    return train(loaded(folder, rank, config, name), rank // config.get("tp_size", 1), name)


@pytest.mark.parametrize("reentrant", [False, True])
@hf_client()
def test_gradient_checkpointing_trains_the_same(rank: int, folder: Path, reentrant: bool) -> Any:
    model = loaded(folder, rank, {"fsdp_size": 2})
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    return train(model, rank)


@hf_client()
def test_generated_tokens_are_the_same(rank: int, folder: Path) -> Any:
    model = loaded(folder, rank, {"fsdp_size": 2})
    seen = train(model, rank, num_steps=1)
    model.eval()
    prompt = batch("llama", rank, 7)["input_ids"]
    torch.manual_seed(rank)
    tokens = [
        model.generate(prompt, max_new_tokens=4 + rank, do_sample=sample, pad_token_id=0) for sample in (False, True)
    ]
    return {"tokens": tokens, **seen}


@pytest.mark.parametrize("options", [{}, {"distributed_checkpoint": True}], ids=str)
@hf_client()
def test_a_saved_model_is_the_same_files(rank: int, folder: Path, options: dict[str, Any]) -> Any:
    model = loaded(folder, rank, {"fsdp_size": 2})
    train(model, rank, num_steps=1)
    model.save_pretrained(folder / "again", **options)
    dist.barrier()
    return files_in(folder / "again", contents=["*.safetensors"])
