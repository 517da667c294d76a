"""What a Llama-like model computes: the parameters of its units, floating-point operations, and an estimate of the
activations it saves.

A unit is what one ``fully_shard`` call would make: the embedding, each block, and the head with the last norm. The root
around them has no parameters of its own. Sizes and operations are those of one GPU; tensor parallelism divides them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class Checkpointing(Enum):
    """Which activations are computed again in backward. ``SELECTIVE`` keeps attention and every other matrix product,
    as torchtitan does. No choice gathers parameters again: a block that recomputes has been gathered for backward."""

    __hash__ = object.__hash__

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


@dataclass(frozen=True)
class Param:
    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Flops:
    """Of one GPU in one pass. ``linear``: products with the weights of blocks, which may run in fp8."""

    linear: float = 0.0
    other: float = 0.0

    def __add__(self, more: Flops) -> Flops:
        return Flops(self.linear + more.linear, self.other + more.other)

    def __mul__(self, times: float) -> Flops:
        return Flops(times * self.linear, times * self.other)


@dataclass(frozen=True)
class UnitWork:
    """One unit. ``backward`` includes what is computed again. ``saved_nbytes`` stay from its forward to its backward,
    ``working_nbytes`` come on top while its backward runs. ``exchanges``: how often tensor parallelism gathers or
    scatters all activations of ``exchanged_nbytes``, in forward and in backward."""

    name: str
    params: tuple[Param, ...]
    forward: Flops
    backward: Flops
    saved_nbytes: float
    working_nbytes: float
    exchanges: tuple[int, int] = (0, 0)
    exchanged_nbytes: float = 0.0


@dataclass(frozen=True)
class Llama:
    name: str
    dim: int
    num_blocks: int
    kv_dim: int
    hidden_dim: int
    vocab_size: int = 128256

    @property
    def num_params(self) -> int:
        block = sum(param.numel for param in self._block_params(1))
        return self.num_blocks * block + 2 * self.vocab_size * self.dim + self.dim

    def units(self, batch: Batch) -> list[UnitWork]:
        """In the order of forward, without the root."""
        block = self._block(batch)
        return [self._embedding(batch), *[block] * self.num_blocks, self._head(batch)]

    def _block_params(self, tp: int) -> tuple[Param, ...]:
        dim, kv_dim, hidden_dim = self.dim, self.kv_dim, self.hidden_dim
        shapes = {
            "attention.wq": (dim // tp, dim),
            "attention.wk": (kv_dim // tp, dim),
            "attention.wv": (kv_dim // tp, dim),
            "attention.wo": (dim, dim // tp),
            "feed_forward.w1": (hidden_dim // tp, dim),
            "feed_forward.w2": (dim, hidden_dim // tp),
            "feed_forward.w3": (hidden_dim // tp, dim),
            "attention_norm": (dim,),
            "ffn_norm": (dim,),
        }
        return tuple(Param(name, shape) for name, shape in shapes.items())

    def _block(self, batch: Batch) -> UnitWork:
        dim, kv_dim, hidden_dim, tp = self.dim, self.kv_dim, self.hidden_dim, batch.tensor_parallel
        tokens = batch.tokens / tp  # sequence parallelism divides what is between the products, too
        params = self._block_params(tp)
        linear = Flops(linear=2 * tokens * (2 * dim * dim + 2 * dim * kv_dim + 3 * dim * hidden_dim))
        attention = Flops(other=2 * tokens * batch.seq_len * dim)  # causal: half of all pairs
        # bf16 elements per token: the block's input, both norms, q, k, v, attention, its sum with the input, and the
        # four tensors of the feed-forward.
        everything = 6 * dim + 2 * kv_dim + 4 * hidden_dim
        again, saved = Flops(), everything
        if batch.checkpointing is Checkpointing.SELECTIVE:  # wk, wo and w3 are the products that run again
            again = Flops(linear=2 * tokens * (dim * kv_dim + dim * dim + dim * hidden_dim))
            saved = 4 * dim + kv_dim + hidden_dim
        elif batch.checkpointing is Checkpointing.FULL:
            again, saved = linear + attention, dim
        exchanges = (4, 8 if batch.checkpointing is Checkpointing.FULL else 4)
        return UnitWork(
            name="block",
            params=params,
            forward=linear + attention,
            backward=(linear + attention) * 2 + again,
            saved_nbytes=2 * tokens * saved,
            working_nbytes=2 * tokens * (everything - saved),
            exchanges=exchanges if tp > 1 else (0, 0),
            exchanged_nbytes=2 * batch.tokens * dim,
        )

    def _embedding(self, batch: Batch) -> UnitWork:
        table = Param("weight", (self.vocab_size // batch.tensor_parallel, self.dim))
        return UnitWork("tok_embeddings", (table,), Flops(), Flops(), saved_nbytes=0, working_nbytes=0)

    def _head(self, batch: Batch) -> UnitWork:
        """The last norm, the logits, and a loss in fp32 that keeps log-probabilities and makes two more such tensors in
        backward. It stays in bf16 where blocks run in fp8."""
        tp = batch.tensor_parallel
        tokens = batch.tokens / tp
        product = Flops(other=2 * tokens * self.dim * self.vocab_size)
        logits = tokens * self.vocab_size
        params = (Param("norm", (self.dim,)), Param("output", (self.vocab_size // tp, self.dim)))
        return UnitWork("head", params, product, product * 2, 4 * logits + 4 * tokens * self.dim, 8 * logits)


@dataclass(frozen=True)
class Batch:
    """What one GPU, or one group of ``tensor_parallel`` GPUs together, computes in a step."""

    tokens: int
    seq_len: int = 8192
    checkpointing: Checkpointing = Checkpointing.SELECTIVE
    tensor_parallel: int = 1


LLAMA_8B = Llama("Llama 3 8B", dim=4096, num_blocks=32, kv_dim=1024, hidden_dim=14336)
LLAMA_70B = Llama("Llama 3 70B", dim=8192, num_blocks=80, kv_dim=1024, hidden_dim=28672)
LLAMA_405B = Llama("Llama 3 405B", dim=16384, num_blocks=126, kv_dim=1024, hidden_dim=53248)
