"""What is trained: a byte-level transformer, and the corpus that every machine has.

Plain torch, no sharding: every runtime in ``train_lm.py`` trains this model on these batches. The model is a
decoder with RMSNorm, rotary attention and SwiGLU; each block holds nine parameters and is the natural unit for one
``fully_shard`` call. The corpus is the Python standard library's own source. Batches are addressed by ``(seed, step,
rank)``, not drawn from a stream, so a resumed run reads what an uninterrupted one would have read and there is no
reader state to checkpoint.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY_SIZE = 256  # bytes
INIT_STD = 0.02
# Installed packages and test suites differ between machines; the last two are tables rather than source code.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})
ONE_FILE_IN = 20  # goes to the validation split


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model; refuses shapes that cannot be built."""

    dim: int
    num_layers: int
    num_heads: int
    hidden_dim: int
    sequence_length: int
    tie_embedding: bool

    def __post_init__(self) -> None:
        for name in ("dim", "num_layers", "num_heads", "hidden_dim", "sequence_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 1 or more.")
        if self.dim % (2 * self.num_heads):
            raise ValueError(
                f"dim is {self.dim} and num_heads is {self.num_heads}: rotary attention needs an even number of "
                f"channels per head. Choose a dim divisible by {2 * self.num_heads}."
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


class Attention(nn.Module):
    """Causal self-attention with rotary position embedding."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, config.dim, bias=False)
        self.value = nn.Linear(config.dim, config.dim, bias=False)
        self.output = nn.Linear(config.dim, config.dim, bias=False)
        cos, sin = rotary_table(config.sequence_length, config.head_dim)
        # Derived from the config, so they stay out of checkpoints.
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix positions of ``x`` ``[batch, sequence, dim]``; each sees itself and those before it."""
        query, key, value = (self._heads(project(x)) for project in (self.query, self.key, self.value))
        query, key = self._rotate(query), self._rotate(key)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _rotate(self, x: Tensor) -> Tensor:
        length = x.size(-2)
        cos, sin = self.cos[:length], self.sin[:length]
        # The table stays fp32 under mixed precision: angles near a long sequence's end need the bits.
        left, right = x.float().chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1).to(x.dtype)


class SwiGLU(nn.Module):
    """The gated feed-forward layer of Shazeer, "GLU Variants Improve Transformer" (2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward, each normalized before and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """A byte-level language model.

    The weights depend only on ``config`` and on torch's default generator at the call.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY_SIZE, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, VOCABULARY_SIZE, bias=False)
        self._initialize(config)
        if config.tie_embedding:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[batch, sequence, 256]`` of the byte that follows each of ``tokens`` ``[batch, sequence]``."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def _initialize(self, config: ModelConfig) -> None:
        # The last layer of each residual branch starts smaller, so that depth does not grow the stream's variance.
        residual_std = INIT_STD / math.sqrt(2 * config.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                is_branch_end = name.endswith(("attention.output.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=residual_std if is_branch_end else INIT_STD)


def rotary_table(sequence_length: int, head_dim: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[sequence_length, head_dim // 2]`` of Su et al., "RoFormer" (2021)."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(sequence_length, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


@dataclass(frozen=True)
class Corpus:
    """Two disjoint sets of source files, each joined into one uint8 tensor ``[numel]``."""

    train: Tensor
    validation: Tensor
    num_files: int
    digest: str
    """Identifies the bytes and the split: runs with equal digests read the same corpus."""


def read_corpus(root: Path | None = None) -> Corpus:
    """Read every ``*.py`` under ``root`` (default: the standard library) and split by file.

    Which split a file belongs to depends on its path alone, so an edited or additional file moves no other.

    Raises:
        ValueError: one of the splits would be empty.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    splits: dict[bool, list[bytes]] = {True: [], False: []}
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts):
            content = path.read_bytes()
            name = relative.as_posix().encode()
            splits[zlib.crc32(name) % ONE_FILE_IN == 0].append(content)
            digest.update(b"%s\0%d\0%s" % (name, len(content), content))
    train, validation = b"".join(splits[False]), b"".join(splits[True])
    if not train or not validation:
        raise ValueError(
            f"read_corpus: {root} holds too few Python source files to split: {len(splits[False])} for training and "
            f"{len(splits[True])} for validation. Use a Python whose standard library is installed as source."
        )
    return Corpus(
        train=torch.frombuffer(bytearray(train), dtype=torch.uint8),
        validation=torch.frombuffer(bytearray(validation), dtype=torch.uint8),
        num_files=len(splits[False]) + len(splits[True]),
        digest=digest.hexdigest()[:16],
    )


def unigram_entropy(split: Tensor) -> float:
    """Entropy of ``split``'s byte frequencies, in nats: the loss of the best model that ignores context."""
    counts = torch.bincount(split, minlength=256).double()
    frequencies = counts / counts.sum()
    return -torch.xlogy(frequencies, frequencies).sum().item()


def training_batch(
    split: Tensor, *, seed: int, step: int, rank: int, num_ranks: int, batch_size: int, sequence_length: int
) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 ``[batch_size, sequence_length]``, for one rank's share of one step.

    Windows are drawn without replacement: no two ranks, and no two steps of an epoch, read the same window.

    Raises:
        ValueError: the split has fewer windows than one step of all ranks takes.
    """
    num_windows = _num_windows(split, sequence_length)
    steps_per_epoch = num_windows // (batch_size * num_ranks)
    if steps_per_epoch == 0:
        raise ValueError(
            f"training_batch: the split has {num_windows} windows of {sequence_length} bytes, but {num_ranks} ranks "
            f"take {batch_size} each per step. Use a smaller batch or shorter sequences."
        )
    epoch, step_in_epoch = divmod(step, steps_per_epoch)
    # A large odd factor keeps the epochs of one seed apart from the first epochs of the next seeds.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(num_windows, generator=generator)
    first = (step_in_epoch * num_ranks + rank) * batch_size
    return _windows(split, order[first : first + batch_size], sequence_length)


def validation_batch(
    split: Tensor, *, index: int, num_batches: int, batch_size: int, sequence_length: int
) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the ``index``-th of ``num_batches`` batches whose windows are spread over ``split``.

    The same windows on every call, so validation losses of one corpus compare.

    Raises:
        ValueError: the split has fewer windows than the batches take together.
    """
    num_windows, num_taken = _num_windows(split, sequence_length), num_batches * batch_size
    if num_taken > num_windows:
        raise ValueError(
            f"validation_batch: {num_batches} batches of {batch_size} need {num_taken} windows of {sequence_length} "
            f"bytes, but the split has {num_windows}. Use fewer batches or shorter sequences."
        )
    taken = torch.arange(index * batch_size, (index + 1) * batch_size)
    return _windows(split, taken * num_windows // num_taken, sequence_length)


def _num_windows(split: Tensor, sequence_length: int) -> int:
    return (split.numel() - 1) // sequence_length  # the last target lies one byte behind the last input


def _windows(split: Tensor, numbers: Tensor, sequence_length: int) -> tuple[Tensor, Tensor]:
    positions = numbers[:, None] * sequence_length + torch.arange(sequence_length + 1)
    window = split[positions].long()
    return window[:, :-1], window[:, 1:]
