"""The blocks of programs, whose gradients are never zero by mathematics and noise by arithmetic. Printed with them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mlp(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor, uses_side: bool = True) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, uses_side: bool = True) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Norms(nn.Module):
    """Small tensors around one matrix."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.before, self.after = nn.RMSNorm(dim), nn.LayerNorm(dim)
        self.linear = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, uses_side: bool = True) -> Tensor:
        normed = self.linear(self.before(x.to(self.before.weight.dtype)))
        return x + self.after(normed.to(self.after.weight.dtype))  # autocast may have another dtype


class Side(nn.Module):
    """Without ``uses_side``, ``side`` gets no gradient."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, uses_side: bool = True) -> Tensor:
        y = torch.tanh(self.main(x))
        return x + y + self.side(y) if uses_side else x + y


class Odd(nn.Module):
    """Sizes that no number of ranks divides, and sizes below it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.narrow = nn.Linear(dim, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.wide = nn.Parameter(torch.randn(dim, 3) * 0.4)
        self.cube = nn.Parameter(torch.randn(7, 1, 2) * 0.1)

    def forward(self, x: Tensor, uses_side: bool = True) -> Tensor:
        return x + F.linear(torch.tanh(self.narrow(x)) * self.scale, self.wide) + self.cube.square().sum()


class Adapters(nn.Module):
    """A frozen layer with two adapters, of which the active one is trained."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.base = nn.Linear(dim, dim).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(dim, 2, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(2, dim, bias=False) for _ in range(2))
        self.switch(0)

    def switch(self, active: int) -> None:
        self.active = active
        for index, (down, up) in enumerate(zip(self.down, self.up, strict=True)):
            down.requires_grad_(index == active)
            up.requires_grad_(index == active)

    def merge(self) -> None:
        self.base.weight.add_(self.up[self.active].weight @ self.down[self.active].weight)

    def forward(self, x: Tensor, uses_side: bool = True) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up[self.active](self.down[self.active](x)))


class Itself(nn.Module):
    """Calls itself, last: torch reshards after the inner call."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor, uses_side: bool = True, num_calls: int = 3) -> Tensor:
        x = x + torch.tanh(self.linear(x))
        return x if num_calls == 1 else self(x, uses_side, num_calls - 1)
