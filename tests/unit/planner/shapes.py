"""Ten shapes of blocks that people use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEAD = 64, 16


class Transformer(nn.Module):
    """``norm``, ``act``: of the block. ``gated``: whether a second product scales the hidden features."""

    def __init__(
        self,
        norm: Callable[[int], nn.Module] = nn.RMSNorm,
        act: Callable[[Tensor], Tensor] = F.silu,
        *,
        gated: bool = False,
        bias: bool = False,
        causal: bool = True,
    ) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=bias)
        self.norms = nn.ModuleList(norm(WIDTH) for _ in range(2))
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)
        self.gate = linear(WIDTH, 4 * WIDTH) if gated else None
        self.act, self.causal = act, causal

    def heads(self, x: Tensor) -> list[Tensor]:
        return [each.unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1)]

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)

    def attention(self, x: Tensor) -> Tensor:
        return self.out(self.mixed(*self.heads(x)).transpose(1, 2).flatten(-2))

    def feed_forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.up(x))
        return self.down(hidden if self.gate is None else hidden * self.gate(x))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.feed_forward(self.norms[1](x))


class Side(Transformer):
    """Attention and feed-forward next to each other."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        return x + self.attention(normed) + self.feed_forward(normed)


class Normed(Transformer):
    """Norms of queries and keys, and of what is added."""

    def heads(self, x: Tensor) -> list[Tensor]:
        q, k, v = super().heads(x)
        return [F.rms_norm(q, (HEAD,)), F.rms_norm(k, (HEAD,)), v]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norms[0](self.attention(x))
        return x + self.norms[1](self.feed_forward(x))


class Eager(Transformer):
    """Attention that makes its scores, and masks them."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / HEAD**0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1, dtype=torch.float32).to(v.dtype) @ v


class Experts(Transformer):
    """Four experts that all compute, weighted by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.ups = nn.Parameter(torch.zeros(4, WIDTH, WIDTH))

    def feed_forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.router(x), -1)
        each = F.silu(torch.einsum("bsd,edh->bseh", x, self.ups))
        return (each * weights[..., None]).sum(-2)


class Convolution(nn.Module):
    """As in ConvNeXt, on channels first."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, 7, padding=3, groups=WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.depthwise(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.norm(mixed))))


SHAPES: dict[str, Callable[[], nn.Module]] = {
    "llama": partial(Transformer, gated=True),
    "gpt": partial(Transformer, nn.LayerNorm, F.gelu, bias=True),
    "vision": partial(Transformer, nn.LayerNorm, partial(F.gelu, approximate="tanh"), bias=True, causal=False),
    "squared relu": partial(Transformer, act=lambda x: F.relu(x).square()),
    "gated gelu": partial(Transformer, act=F.gelu, gated=True),
    "side by side": partial(Side, nn.LayerNorm, F.gelu, bias=True),
    "norms of heads": partial(Normed, gated=True),
    "eager attention": Eager,
    "experts": Experts,
    "convolution": Convolution,
}


class Stack(nn.Module):
    """Three blocks of one shape."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SHAPES[name]() for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x
