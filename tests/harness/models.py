"""Small models that are real in kind: every one knows its inputs, its loss and the units it is sharded in.

Rule: no parameter's gradient is zero by mathematics and noise by arithmetic (a key bias, say), because an adaptive
optimizer would turn that noise into full-size updates and no tolerance could hold.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM = 16
BATCH_SIZE = 3


def float_tensors(value: Any) -> list[Tensor]:
    """All floating-point tensors in dicts, sequences and dataclasses, in a fixed order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        return [tensor for key in sorted(value) for tensor in float_tensors(value[key])]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in float_tensors(item)]
    if hasattr(value, "__dataclass_fields__"):
        return [tensor for name in value.__dataclass_fields__ for tensor in float_tensors(getattr(value, name))]
    return []


class ParityModel(nn.Module):
    """What the driver asks of a model."""

    def batch(self, generator: torch.Generator) -> tuple[Any, ...]:
        """The arguments of one forward, drawn from ``generator``."""
        return (torch.randn(BATCH_SIZE, DIM, generator=generator),)

    def loss(self, output: Any, batch: tuple[Any, ...]) -> Tensor:
        """A scalar in fp32 that depends on all of ``output``."""
        return torch.stack([(tensor.float() - 0.5).square().mean() for tensor in float_tensors(output)]).sum()

    def units(self) -> list[nn.Module]:
        """The submodules that are sharded on their own when a test nests, innermost first: ``blocks``, if any."""
        return list(getattr(self, "blocks", ()))


class Block(nn.Module):
    """A residual MLP block."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class MLP(ParityModel):
    def __init__(self, num_blocks: int = 3, dim: int = DIM) -> None:
        super().__init__()
        self.dim = dim
        self.entry = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_blocks))
        self.exit = nn.Linear(dim, 8)

    def batch(self, generator: torch.Generator) -> tuple[Any, ...]:
        return (torch.randn(BATCH_SIZE, self.dim, generator=generator),)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.exit(x)


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.num_heads, dim // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class TransformerBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = Attention(dim, num_heads=2)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = SwiGLU(dim, hidden=24)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(ParityModel):
    """A decoder-only language model; ``tied`` shares the embedding with the output projection."""

    VOCABULARY = 33

    def __init__(self, num_blocks: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.VOCABULARY, DIM)
        self.blocks = nn.ModuleList(TransformerBlock(DIM) for _ in range(num_blocks))
        self.norm = nn.RMSNorm(DIM)
        self.output = nn.Linear(DIM, self.VOCABULARY, bias=False)
        if tied:
            self.output.weight = self.embedding.weight

    def batch(self, generator: torch.Generator) -> tuple[Any, ...]:
        return (torch.randint(self.VOCABULARY, (2, 6), generator=generator),)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))

    def loss(self, output: Any, batch: tuple[Any, ...]) -> Tensor:
        return F.cross_entropy(output[:, :-1].reshape(-1, self.VOCABULARY).float(), batch[0][:, 1:].reshape(-1))


class UnevenBlock(nn.Module):
    """Dims that no world size divides, dims smaller than the world."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.narrow = nn.Parameter(torch.randn(3, 5) * 0.4)
        self.wide = nn.Parameter(torch.randn(5, 3) * 0.4)
        self.bias = nn.Parameter(torch.randn(5) * 0.1)
        self.cube = nn.Parameter(torch.randn(7, 1, 2) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(F.linear(x, self.narrow)) * self.scale
        return x + F.linear(hidden, self.wide, self.bias) + self.cube.square().sum()


class Uneven(ParityModel):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(1, 5) * 0.1)
        self.blocks = nn.ModuleList(UnevenBlock() for _ in range(2))
        self.exit = nn.Linear(5, 7)

    def batch(self, generator: torch.Generator) -> tuple[Any, ...]:
        return (torch.randn(BATCH_SIZE, 5, generator=generator),)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shift
        for block in self.blocks:
            x = block(x)
        return self.exit(x)


class Branches(MLP):
    """An MLP of which a forward runs only the blocks that it is told to, or ``order``."""

    def __init__(self, order: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor, active: tuple[int, ...] | None = None) -> Tensor:  # type: ignore[override]
        x = self.entry(x)
        for index in self.order if active is None else active:
            x = self.blocks[index](x)
        return self.exit(x)


class PartlyUsedBlock(nn.Module):
    """A block with a second path inside one group; ``use_side=False`` leaves ``side`` without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Linear(DIM, DIM)
        self.side = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, use_side: bool = True) -> Tensor:
        y = torch.tanh(self.main(x))
        return x + y + self.side(y) if use_side else x + y


class PartlyUsed(ParityModel):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PartlyUsedBlock() for _ in range(3))

    def forward(self, x: Tensor, use_side: bool = True) -> Tensor:
        for block in self.blocks:
            x = block(x, use_side=use_side)
        return x


Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Outputs:
    value: Tensor
    label: str
    more: dict[str, list[Tensor]]


def as_tuple(x: Tensor) -> Any:
    return x, (x * 2, None)


def as_dict(x: Tensor) -> Any:
    return {"x": x, "nested": {"y": [x * 2, 7]}}


def as_namedtuple(x: Tensor) -> Any:
    return Pair(x, x * 2)


def as_dataclass(x: Tensor) -> Any:
    return Outputs(x, "label", {"y": [x * 2, x + 1]})


STRUCTURES = (as_tuple, as_dict, as_namedtuple, as_dataclass)


class NestedBlock(nn.Module):
    """A block that takes and returns a structure of tensors."""

    def __init__(self, structure: Any) -> None:
        super().__init__()
        self.block = Block()
        self.structure = structure

    def forward(self, value: Any) -> Any:
        return self.structure(self.block(torch.stack(float_tensors(value)).mean(dim=0)))


class Nested(ParityModel):
    """Blocks and root return ``structure(x)``, one of ``STRUCTURES``."""

    def __init__(self, structure: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NestedBlock(structure) for _ in range(2))
        self.exit = NestedBlock(structure)

    def forward(self, x: Tensor) -> Any:
        value: Any = x
        for block in self.blocks:
            value = block(value)
        return self.exit(value)


class SharedModules(ParityModel):
    """One block used at two depths, and one weight used by two layers of the root's own group."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(DIM, DIM)
        self.first = Block()
        self.second = Block()
        self.again = self.first
        self.exit = nn.Linear(DIM, DIM)
        self.exit.weight = self.entry.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.exit(self.again(self.second(self.first(self.entry(x)))))

    def units(self) -> list[nn.Module]:
        return [self.first, self.second]


class BufferBlock(nn.Module):
    """Float, int and bool buffers, some written in forward, one not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.norm = nn.BatchNorm1d(DIM)
        self.register_buffer("keep", torch.arange(DIM) % 3 != 0)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.calls += 1
        return x + self.norm(self.linear(x) * self.keep) * mask


class Buffers(ParityModel):
    """Bool and int inputs beside the float one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BufferBlock() for _ in range(2))
        self.table = nn.Embedding(5, DIM)

    def batch(self, generator: torch.Generator) -> tuple[Any, ...]:
        x = torch.randn(6, DIM, generator=generator)
        mask = torch.rand(6, 1, generator=generator) > 0.3
        return x, mask, torch.randint(5, (6,), generator=generator)

    def forward(self, x: Tensor, mask: Tensor, index: Tensor) -> Tensor:
        x = x + self.table(index)
        for block in self.blocks:
            x = block(x, mask=mask)
        return x


def freeze(model: nn.Module, *prefixes: str) -> None:
    """Stop gradients of the parameters whose names start with one of ``prefixes``."""
    for name, parameter in model.named_parameters():
        if name.startswith(prefixes):
            parameter.requires_grad_(False)


def frozen(build: Callable[[], Any], *prefixes: str) -> Callable[[], Any]:
    """``build``, and ``freeze``."""
    return functools.partial(_build_frozen, build, prefixes)


def _build_frozen(build: Callable[[], Any], prefixes: tuple[str, ...]) -> Any:
    model = build()
    freeze(model, *prefixes)
    return model
