"""Losses that reach an operation on a parameter, while the parameter is resharded, ahead of all else in its unit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp2
from fsdp2.group.direct_uses import WatchedParameter
from tests.distributed.compile_support import BACKEND, start_compiling
from tests.distributed.support import DIM, batch, seeded
from tests.harness.distributed import RankContext, distributed


class _Normed(nn.Module):
    """A layer of somebody's own, which keeps what it has in hand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(DIM))
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = F.rms_norm(x, (DIM,), self.weight)
        return torch.relu(self.kept)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(DIM, DIM)  # used, but not called
        self.called = nn.Linear(DIM, DIM)
        self.norm = _Normed()
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.lists = nn.ParameterList(torch.rand(DIM) for _ in range(2))
        self.scale, self.shift = nn.Parameter(torch.rand(DIM)), nn.Parameter(torch.rand(DIM))
        self.experts = nn.Parameter(torch.randn(3, DIM, DIM) / DIM)
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.experts[:2].flatten(0, 1).chunk(2)
        kept = {
            "product": x * self.scale,
            "in place": (x * self.scale).relu_(),
            "two parameters": self.scale * self.shift,
            "operator of a module": F.linear(x, self.proj.weight, self.proj.bias),
            "view": x @ self.experts[0],
            "view of views": x @ gate.t().view(DIM, DIM).mT,
            "one of several views": x @ value,
            "batched": torch.einsum("bd,edf->bf", x, self.experts),
            "list": x * self.lists[1],
            "keyword": F.layer_norm(x, (DIM,), weight=self.scale, bias=None),
            "operator in a function": F.gelu(F.layer_norm(x, (DIM,), self.scale, self.shift)),
            "cast": x * self.scale.double().to(x.dtype),
            "several results": torch.stack([x * self.scale, x]).unbind()[0],
        }
        y = sum(kept.values()) + self.norm(self.called(x))
        assert self.norm.kept is not None
        y = y + self.attention(y[None], y[None], y[None], need_weights=False)[0][0]
        self.kept = kept | {"kept by a submodule": self.norm.kept}
        return x + y


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList([_Block(), _Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return x


def _names() -> Iterator[str]:
    block = _Block()
    block(torch.zeros(4, DIM))
    yield from block.kept


def _sharded(ctx: RankContext, **options: Any) -> Any:
    model = seeded(_Model)
    for unit in (*model.blocks, model):
        fsdp2.fully_shard(unit, mesh=ctx.mesh_1d(), **options)
    return model


def _assert_same_gradients(model: Any, reference: Any) -> None:
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (parameter.grad is None) is (other.grad is None), name
        if parameter.grad is not None:
            assert torch.allclose(parameter.grad.full_tensor(), other.grad, atol=1e-6), name


@pytest.mark.parametrize("name", list(_names()))
@distributed(2)
def test_loss_on_what_an_operation_returned(ctx: RankContext, name: str) -> None:
    model, reference = _sharded(ctx), seeded(_Model)
    for seed in range(2):  # the second shows what the first has left behind
        for each in (model, reference):
            each(batch(seed))
            each.blocks[1].kept[name].square().mean().backward()
    _assert_same_gradients(model, reference)
    assert reference.entry.weight.grad is not None or name == "two parameters"


@distributed(2)
def test_classes_of_parameters_tell_who_is_watched(ctx: RankContext) -> None:
    """A parameter that is used by calls of torch's layers alone costs nothing once such a call was seen."""
    model = _sharded(ctx)
    block = model.blocks[1]
    seen: list[dict[str, bool]] = []
    block.norm.register_forward_hook(
        lambda *_: seen.append({name: type(p) is WatchedParameter for name, p in block.named_parameters()})
    )
    for _ in range(2):
        model(batch()).sum().backward()
    first, second = seen
    assert second == {name: name.split(".")[0] not in ("called", "attention") for name in second}
    assert first == second | {"attention.in_proj_weight": True, "attention.in_proj_bias": True}
    assert not any(isinstance(p, WatchedParameter) for p in model.parameters())


@distributed(2)
def test_mixed_precision(ctx: RankContext) -> None:
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, reference = _sharded(ctx, mp_policy=policy), seeded(_Model)
    for each in (model, reference):
        each(batch())
        each.blocks[0].kept["view"].float().square().mean().backward()
    found = model.blocks[0].experts.grad.full_tensor()
    assert torch.allclose(found, reference.blocks[0].experts.grad, atol=1e-3)
    assert found.abs().max() > 1e-3


class _OfItsOwnMind(Tensor):
    """Sees the operations on it, as ours does."""

    seen: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, cls) and not hasattr(result, "seen"):
            result.seen = next(arg.seen for arg in args if isinstance(arg, cls))
            result.seen.append(func.__name__)
        return result


@distributed(2)
def test_inputs_of_a_class_that_sees_operations(ctx: RankContext) -> None:
    x = batch().as_subclass(_OfItsOwnMind)
    x.seen = []
    model, reference = _sharded(ctx), seeded(_Model)
    kept = []
    for each in (model, reference):
        block = each.blocks[0]
        block.forward = lambda x, block=block: x * block.scale
        output = each.blocks[0](x)
        kept.append((type(output), list(x.seen)))
        x.seen.clear()
    assert kept[0] == kept[1]
    assert kept[0][0] is _OfItsOwnMind


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.norm = nn.Linear(DIM, DIM), _Normed()
        self.scale = nn.Parameter(torch.rand(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.norm(self.proj(x)))


@distributed(2)
def test_compiled_blocks_share_a_graph(ctx: RankContext) -> None:
    """Watching parameters neither breaks graphs nor has a block compiled again."""
    start_compiling()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(BACKEND)(graph, inputs)

    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(DIM, DIM), *(_Small() for _ in range(10)))

    sharded, reference = seeded(model), seeded(model)
    for block in sharded[1:]:
        fsdp2.fully_shard(block, mesh=ctx.mesh_1d())
        block.compile(backend=backend, fullgraph=True)
    fsdp2.fully_shard(sharded, mesh=ctx.mesh_1d())
    for seed in range(3):
        for each in (sharded, reference):
            each(batch(seed)).square().mean().backward()
    _assert_same_gradients(sharded, reference)
    assert len(graphs) == 1
