"""A small language model, as users write one, and others whose units and calls do not match one to one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, 16)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*heads.chunk(3, dim=1), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.silu(self.up(x)))


class LanguageModel(nn.Module):
    def __init__(self, width: int = 64, num_blocks: int = 4, vocabulary: int = 1024, *, is_tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


# Models whose forward does not call each unit once, or whose parameters are not each of one module. ``turn`` counts
# forwards.


class Looped(LanguageModel):
    num_rounds = 3

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(self.num_rounds):
            for layer in self.layers:
                x = layer(x)
        return self.head(self.norm(x))


class Repeated(LanguageModel):
    """One block, several times."""

    def __init__(self) -> None:
        super().__init__(num_blocks=1)
        self.layers.extend([self.layers[0]] * 3)


class Skipping(LanguageModel):
    """Two of eight blocks at a time."""

    turn = -1

    def __init__(self) -> None:
        super().__init__(num_blocks=8)

    def forward(self, tokens: Tensor) -> Tensor:
        self.turn += 1
        x, first = self.embedding(tokens), 2 * (self.turn % 4)
        for layer in self.layers[first : first + 2]:
            x = layer(x)
        return self.head(self.norm(x))


class LateFirst(LanguageModel):
    """The first forward does not use the first block."""

    turn = -1

    def forward(self, tokens: Tensor) -> Tensor:
        self.turn += 1
        x = self.embedding(tokens)
        for layer in self.layers[int(self.turn == 0) :]:
            x = layer(x)
        return self.head(self.norm(x))


class TiedBlocks(LanguageModel):
    """Blocks share a matrix with each other, and with a module beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(64, 256, bias=False)
        for layer in (*self.layers[1:], self.layers[0]):
            layer.up.weight = self.extra.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x + self.extra(x)[..., :64]))


class Adapted(nn.Module):
    """A frozen layer with a trained part of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 8, bias=False)
        self.up = nn.Linear(8, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> nn.Module:
    model = LanguageModel().requires_grad_(False)
    for layer in model.layers:
        layer.qkv = Adapted(layer.qkv)
    return model


def frozen(*paths: str) -> nn.Module:
    """With modules at ``paths`` frozen."""
    model = LanguageModel()
    for path in paths:
        model.get_submodule(path).requires_grad_(False)
    return model


class TwoInputs(LanguageModel):
    """Of other lengths."""

    def forward(self, query: Tensor, passage: Tensor) -> Tensor:  # type: ignore[override]
        first, second = map(self.encoded, (query, passage))
        return self.head(first[:, : second.shape[1]] + second)

    def encoded(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Tower(nn.Module):
    """With an embedding that is not its own, and a large parameter beside its blocks."""

    def __init__(self, embedding: nn.Module, num_blocks: int) -> None:
        super().__init__()
        self.embedding = embedding
        self.positions = nn.Parameter(torch.zeros(256, 64))
        self.layers = nn.ModuleList(Block(64) for _ in range(num_blocks))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return x


class Translator(nn.Module):
    """Encoder, decoder, and an embedding that is a child of all."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(1024, 64)
        self.encoder, self.decoder = Tower(self.shared, 2), Tower(self.shared, 3)
        self.head = nn.Linear(64, 1024, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.decoder(target) + self.encoder(source).mean(1, keepdim=True))


class Mixed(LanguageModel):
    """Dtypes; modules and parameters that are not used; buffers, one of which blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(2))
        self.layers.to(torch.bfloat16)
        shared = torch.ones(64)
        for layer in self.layers:
            layer.norm.float()
            layer.spare = nn.Linear(64, 64)
            layer.gain = nn.Parameter(torch.ones(2))
            layer.code = nn.Parameter(torch.zeros(64, 64, dtype=torch.uint8), requires_grad=False)
            layer.register_buffer("mask", torch.ones(128, 128, dtype=torch.bool))
            layer.register_buffer("angles", shared, persistent=False)


class Positions(nn.Module):
    """Large, with children, one of which is large, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(256, 64))
        self.words = nn.Embedding(1024, 64)
        self.out = nn.Linear(64, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.words(tokens) + self.table[: tokens.shape[1]])


def with_large_parts() -> nn.Module:
    model = LanguageModel(num_blocks=3)
    model.embedding = Positions()
    return model


class TwoModels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = LanguageModel(num_blocks=2), LanguageModel(num_blocks=3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.one(tokens) + self.other(tokens)


def tokens(length: int = 32) -> Tensor:
    return torch.zeros(2, length, dtype=torch.int64)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": LanguageModel,
    "looped": Looped,
    "one block, repeated": Repeated,
    "skipping": Skipping,
    "first block later": LateFirst,
    "tied": partial(LanguageModel, is_tied=True),
    "tied blocks": TiedBlocks,
    "frozen blocks": partial(frozen, "layers"),
    "frozen at the bottom": partial(frozen, "embedding", "layers.0", "layers.1"),
    "head alone": partial(frozen, "embedding", "layers", "norm"),
    "adapters": adapted,
    "two inputs": TwoInputs,
    "encoder and decoder": Translator,
    "mixed": Mixed,
    "large parts": with_large_parts,
    "two models": TwoModels,
    "odd sizes": partial(LanguageModel, width=48, num_blocks=3, vocabulary=1001),
}
INPUTS: dict[str, Callable[[], tuple[Tensor, ...]]] = {
    "two inputs": lambda: (tokens(32), tokens(16)),
    "encoder and decoder": lambda: (tokens(32), tokens(16)),
}


def inputs_of(name: str) -> Callable[[], tuple[Tensor, ...]]:
    """What the model of this name in ``MODELS`` is given."""
    return INPUTS.get(name, lambda: (tokens(),))


def square(output: Tensor) -> Tensor:
    """A loss."""
    return output.float().square().mean()


# With a cache, as in transformers


class Cache:
    """Keys and values by layer. They grow."""

    def __init__(self) -> None:
        self.entries: dict[int, Tensor] = {}

    def update(self, layer: int, heads: Tensor) -> Tensor:
        earlier = [self.entries[layer]] if layer in self.entries else []
        self.entries[layer] = torch.cat([*earlier, heads], dim=-2)
        return self.entries[layer]


class CachingBlock(Block):
    def __init__(self, width: int, index: int) -> None:
        super().__init__(width)
        self.index = index

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        query, *rest = self.qkv(self.norm(x)).unflatten(-1, (-1, 16)).transpose(1, 2).chunk(3, dim=1)
        both = torch.stack(rest)
        key, value = both if cache is None else cache.update(self.index, both)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.silu(self.up(x)))


class Caching(LanguageModel):
    """Keeps keys and values, unless its config or an input says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.layers = nn.ModuleList(CachingBlock(64, index) for index in range(4))

    def forward(  # type: ignore[override]
        self, tokens: Tensor, use_cache: bool | None = None, cache: Cache | None = None
    ) -> SimpleNamespace:
        if self.config.use_cache if use_cache is None else use_cache:
            cache = cache or Cache()
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cache=cache)
        return SimpleNamespace(logits=self.head(self.norm(x)), past_key_values=cache)
