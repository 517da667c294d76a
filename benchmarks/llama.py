"""A small Llama of Hugging Face's transformers, with random weights; nothing is downloaded.

It is a model that people train. ``common.Block`` is the one that is easy to reason about.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 512
MISSING = None if importlib.util.find_spec("transformers") else "transformers is not installed (pip install '.[bench]')"


@dataclass(frozen=True)
class Llama:
    """Its shape, and the number of tokens of a step. A layer has nine parameters."""

    width: int
    num_layers: int
    num_tokens: int
    head_width: int = 16

    def model(self, checkpointed: bool = False) -> nn.Module:
        """In fp32, with torch's attention and no key-value cache. ``checkpointed``: layers compute their activations
        again in the backward."""
        from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds

        num_heads = self.width // self.head_width
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.width,
            intermediate_size=2 * self.width,
            num_hidden_layers=self.num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads // 2,
            max_position_embeddings=self.num_tokens,
            use_cache=False,
            attn_implementation="sdpa",  # type: ignore[call-arg]
        )
        model = LlamaForCausalLM(config).train()
        if checkpointed:  # version 5 has a new name for it
            old = model.gradient_checkpointing_enable
            getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": False})
        return model

    def tokens(self, seed: int = 0) -> Tensor:
        """Random ones, of shape (1, num_tokens)."""
        return torch.randint(VOCABULARY, (1, self.num_tokens), generator=torch.Generator().manual_seed(seed))


def units(model: nn.Module) -> list[nn.Module]:
    """What ``fully_shard`` is called for, in this order: the layers of a Llama or ``nn.Sequential``, then the root."""
    layers: Any = model if isinstance(model, nn.Sequential) else model.model.layers  # type: ignore[union-attr]
    return [*layers, model]


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of the next token; the logits are a part of what the root's forward returns."""
    return model(input_ids=tokens, labels=tokens).loss
