"""``Muon`` on shards steps as ``torch.optim.Muon`` on the unsharded model, however the model is sharded.

All ranks have the same batch, so the mean of gradients is that of the unsharded model, to rounding. Newton-Schulz in
fp32 is compared to 1e-5. In bf16, torch's products round alike, but the gradients that go in differ by rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, clip_grad_norm_, fully_shard
from fsdp2.optim import MatrixRule, Muon, muon_groups
from tests.harness.compare import compare_values
from tests.harness.distributed import RankContext, distributed
from tests.harness.extensions import Halved, wrap
from tests.harness.runtimes import oracle
from tests.harness.selection import in_ci

OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.2, "momentum": 0.9}
ADAMW: dict[str, Any] = {"lr": 0.01, "eps": 1e-3}
STEPS = 3
FP32 = {"rtol": 1e-5, "atol": 1e-5}
BF16 = {"rtol": 0.0, "atol": 4e-3}  # a result near 1 has an ulp of 2^-8, and the learning rate is 0.05


class Net(nn.Module):
    """Matrices that are tall, wide and square, with rows that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 10)
        self.up, self.gate = nn.Linear(10, 23), nn.Linear(10, 23, bias=False)
        self.mid = nn.Linear(23, 23)
        self.down = nn.Linear(23, 10)
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        y = torch.tanh(self.mid(self.up(x) * torch.sigmoid(self.gate(x))))
        return self.head(self.norm(x + self.down(y)))


class Even(nn.Module):
    """As tensor parallelism wants it: widths that 4 divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.plain = nn.Linear(8, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x + self.down(torch.tanh(self.up(x))))


def seeded(cls: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    with torch.device("cpu"):
        return cls()


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(step: int) -> Tensor:
    return torch.randint(0, 13, (30,), generator=generator(step), device="cpu")


def floats(step: int) -> Tensor:
    return torch.randn(6, 8, generator=generator(step), device="cpu")


# torch's works in bf16, always.
newton_schulz_in_fp32 = partial(mock.patch.object, Tensor, "bfloat16", Tensor.clone)


class Reference:
    def __init__(self, groups: Any, dtype: torch.dtype, **options: Any) -> None:
        self.optimizers = [
            optim.Muon([p for _, p in group["params"]], **{**OPTIONS, **options})
            if group["use_muon"]
            else optim.AdamW([p for _, p in group["params"]], **ADAMW)
            for group in groups
        ]
        self.dtype = dtype

    def step(self) -> None:
        with newton_schulz_in_fp32() if self.dtype is torch.float32 else nullcontext():
            for each in self.optimizers:
                each.step()

    def zero_grad(self) -> None:
        for each in self.optimizers:
            each.zero_grad()


def train(model: Any, optimizer: Any, inputs: Callable[[int], Tensor], steps: Any = range(STEPS), **how: Any) -> None:
    device = next(model.parameters()).device if not how.get("device") else how["device"]
    for step in steps:
        for micro in range(how.get("micro_batches", 1)):
            loss = model(inputs(step * 7 + micro).to(device)).square().mean()
            is_last = micro + 1 == how.get("micro_batches", 1)
            with optimizer.overlap_backward() if is_last and how.get("overlaps") else nullcontext():
                loss.backward()
        if "max_norm" in how:
            clip_grad_norm_(model.parameters(), how["max_norm"])
        optimizer.step()
        optimizer.zero_grad()


def assert_close(model: nn.Module, reference: nn.Module, tolerance: dict[str, float]) -> None:
    for (name, mine), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
        torch.testing.assert_close(
            whole.float().cpu(), other.float(), msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


def compare(
    ctx: RankContext,
    shard: Callable[[nn.Module], object],
    cls: type[nn.Module] = Net,
    dtype: torch.dtype = torch.float32,
    tolerance: dict[str, float] | None = None,
    how: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    overlaps: bool = False,
    **options: Any,
) -> tuple[Any, Muon]:
    """Train both for some steps; returns what was sharded."""
    how, inputs = how or {}, tokens if cls is Net else floats
    reference = seeded(cls)
    theirs = Reference(muon_groups(reference, verbose=False), dtype, **options)
    train(reference, theirs, inputs, **how)
    model = seeded(cls)
    model.to(ctx.device_type)
    shard(model)
    groups = muon_groups(model, verbose=False, **ADAMW)
    optimizer = Muon(groups, **{**OPTIONS, **options}, ns_dtype=dtype, **(settings or {}))
    train(model, optimizer, inputs, device=ctx.device_type, overlaps=overlaps, **how)
    assert_close(model, reference, tolerance or (FP32 if dtype is torch.float32 else BF16))
    return model, optimizer


def sharded(model: nn.Module, runtime: Any = fully_shard, make: Any = None, **options: Any) -> None:
    """``make``: the class of the matrices."""
    model = model if make is None else wrap(model, make)
    for unit in [*model.children(), model]:
        if isinstance(unit, nn.Linear) or unit is model:
            runtime(unit, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@distributed(2, 3, 4, short=2)
def test_steps_as_torch_on_the_unsharded_model(ctx: RankContext, dtype: torch.dtype) -> None:
    compare(ctx, partial(sharded, mesh=ctx.mesh_1d()), dtype=dtype)


LOW: dict[str, Any] = {"tolerance": {"rtol": 0.0, "atol": 0.05}}
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# How it is sharded, and what else ``compare`` takes.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no nesterov": ({}, {"nesterov": False}),
    "as AdamW": ({}, {"adjust_lr_fn": "match_rms_adamw"}),
    "original": ({}, {"adjust_lr_fn": "original"}),
    "few steps": ({}, {"ns_steps": 2, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3}),
    "lr is a tensor": ({}, {"lr": torch.tensor(0.02)}),
    "no momentum": ({}, {"momentum": 0.0, "weight_decay": 0.0}),
    "Shard(1)": ({"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None}, {}),
    "offloaded": ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {}),
    "stays unsharded": ({"reshard_after_forward": False}, {}),
    "mixed precision": ({"mp_policy": MIXED}, LOW),
    "all-gather hooks": ({"make": Halved}, LOW),  # they travel in bf16, and Muon writes the shards of a wrapper
    "torch's own fully_shard": ({"runtime": oracle().fully_shard}, {}),
    "accumulation": ({}, {"how": {"micro_batches": 3}}),
    "clipping": ({}, {"how": {"max_norm": 1e-3}}),
    "one bucket": ({}, {"settings": {"bucket_nbytes": 1 << 30}}),
    "a bucket for each matrix": ({}, {"settings": {"bucket_nbytes": 1}}),
}
IN_SHORT = ("no nesterov", "Shard(1)", "mixed precision", "all-gather hooks", "torch's own fully_shard", "accumulation")


@pytest.mark.every_case
@pytest.mark.parametrize("case", [*IN_SHORT, *in_ci(*(name for name in CASES if name not in IN_SHORT))])
@distributed(2)
def test_steps_as_torch_with_each_option_and_however_it_is_sharded(ctx: RankContext, case: str) -> None:
    sharding, options = CASES[case]
    compare(ctx, partial(sharded, mesh=ctx.mesh_1d(), **sharding), **options)


@pytest.mark.parametrize("copies", ["share", "each", "cheaper"])
@distributed(4)
def test_hsdp(ctx: RankContext, copies: str) -> None:
    _, optimizer = compare(ctx, partial(sharded, mesh=ctx.mesh_2d(2, 2)), settings={"copies": copies})
    num_ranks = {len(domain.ranks) for domain in optimizer.plan.domains}
    assert num_ranks == {"share": {4}, "each": {2}}.get(copies, num_ranks)


@pytest.mark.ci
@pytest.mark.every_case
@pytest.mark.parametrize("copies", ["share", "each"])
@distributed(4)
def test_tensor_parallelism_and_fsdp(ctx: RankContext, copies: str) -> None:
    mesh = ctx.mesh(dp=2, tp=2)

    def shard(model: Any) -> None:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        sharded(model, mesh=mesh["dp"])

    compare(ctx, shard, Even, settings={"copies": copies})


@pytest.mark.parametrize("micro_batches", [1, 2])
@distributed(2)
def test_the_first_buckets_are_sent_in_backward(ctx: RankContext, micro_batches: int) -> None:
    model, optimizer = compare(
        ctx,
        partial(sharded, mesh=ctx.mesh_1d()),
        how={"micro_batches": micro_batches},
        overlaps=True,
        settings={"bucket_nbytes": 1, "last_first": True},
    )
    with optimizer.overlap_backward():
        model(tokens(0).to(ctx.device_type)).square().mean().backward()
    assert optimizer._early.num_sent == 2
    clip_grad_norm_(model.parameters(), 1e-4)
    before = [param.full_tensor().clone() for param in model.parameters()]
    with pytest.raises(ValueError, match="gradients have changed between overlap_backward"):
        optimizer.step()
    assert all(torch.equal(a.full_tensor(), b) for a, b in zip(model.parameters(), before, strict=True))
    optimizer.step()  # what was sent is thrown away


@distributed(2)
def test_a_backward_that_fails_takes_back_what_it_has_sent(ctx: RankContext) -> None:
    def stop(_: Tensor) -> None:
        raise ArithmeticError("stopped")

    models = []
    for fails in (False, True):
        model: Any = seeded(Net).to(ctx.device_type)
        sharded(model, mesh=ctx.mesh_1d())
        optimizer = Muon(muon_groups(model, verbose=False), bucket_nbytes=1, last_first=True)
        if fails:
            handle = model.embedding.register_forward_hook(lambda _, __, output: output.register_hook(stop) and None)
            with pytest.raises(ArithmeticError, match="stopped"), optimizer.overlap_backward():
                model(tokens(0).to(ctx.device_type)).square().mean().backward()
            handle.remove()
            optimizer.zero_grad()
        train(model, optimizer, tokens, overlaps=True)
        models.append(model)
    for mine, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(mine.full_tensor(), other.full_tensor())


@distributed(2)
def test_a_copy_steps_on_and_what_was_frozen_meanwhile_is_left_alone(ctx: RankContext) -> None:
    pairs = []
    for overlaps in (False, True):
        model: Any = seeded(Net).to(ctx.device_type)
        sharded(model, mesh=ctx.mesh_1d())
        optimizer = Muon(muon_groups(model, verbose=False), bucket_nbytes=1, last_first=True)
        train(model, optimizer, tokens, range(1))
        model.head.requires_grad_(False)
        model.mid.requires_grad_(False)
        model, optimizer = copy.deepcopy((model, optimizer)) if overlaps else (model, optimizer)
        train(model, optimizer, tokens, overlaps=overlaps)
        pairs.append(model)
    for mine, other in zip(*(model.parameters() for model in pairs), strict=True):
        assert torch.equal(mine.full_tensor(), other.full_tensor())


@distributed(2)
def test_momentum_keeps_the_dtype_of_gradients_when_it_is_loaded(ctx: RankContext) -> None:
    """torch would cast it to the parameter's. Also where a parameter has no gradient."""

    def made() -> tuple[Any, Muon]:
        model: Any = seeded(Even).to(ctx.device_type, torch.bfloat16)
        for param in model.parameters():
            param.grad_dtype = torch.float32
        sharded(model, mesh=ctx.mesh_1d(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        return model, Muon([model.up.weight, model.down.weight])

    def train(model: Any, optimizer: Muon, steps: range) -> Any:
        for step in steps:
            model(floats(step).to(ctx.device_type, torch.bfloat16)).square().mean().backward()
            model.up.weight.grad = model.up.weight.grad if step < 2 else None
            optimizer.step()
            optimizer.zero_grad()
        return [param.full_tensor() for param in model.parameters()], optimizer.state_dict()

    model, optimizer = made()
    train(model, optimizer, range(2))
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    expected = train(model, optimizer, range(1, 3))
    model, optimizer = made()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    compare_values("saved again", optimizer.state_dict(), saved["optimizer"])
    compare_values("resumed", train(model, optimizer, range(1, 3)), expected)


def test_heads_are_known_by_their_names_inside_of_wrappers() -> None:
    model: Any = nn.Module()
    model.hidden, model.head, model.score = nn.Linear(4, 4), checkpoint_wrapper(nn.Linear(4, 4)), nn.Linear(4, 4)
    model.score = torch.compile(model.score, backend="eager")
    taken, others = muon_groups(model, verbose=False)
    assert [name for name, _ in taken["params"]] == ["hidden.weight"]
    assert len(others["params"]) == 5


class Fused(nn.Module):
    """A fused QKV weight, experts and a convolution, as parameters; ``parts`` are what Muon is to see of them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(6 + 2 + 2, 6))
        self.heads = nn.Parameter(torch.randn(9, 6))
        self.fused_columns = nn.Parameter(torch.randn(6, 7))
        self.experts = nn.Parameter(torch.randn(5, 4, 6))
        self.gated = nn.Parameter(torch.randn(3, 8, 6))
        self.conv = nn.Parameter(torch.randn(5, 2, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.qkv @ x, self.heads @ x, self.fused_columns.T @ x])
        return torch.cat([y, (self.experts @ x).flatten(), (self.gated @ x).flatten(), self.conv.flatten().tanh()])


RULES = {
    "qkv": MatrixRule.rows(6, 2, 2),
    "heads": MatrixRule.heads(3),
    "fused_columns": MatrixRule.columns(3, 4),
    "experts": MatrixRule.batch(),
    "gated": MatrixRule.batch(MatrixRule.rows(4, 4)),
    "conv": MatrixRule.flattened(),
}


def parts_of(name: str, value: Tensor) -> list[Tensor]:
    cuts: dict[str, Callable[[Tensor], Any]] = {
        "qkv": lambda t: t.split([6, 2, 2]),
        "heads": lambda t: t.chunk(3),
        "fused_columns": lambda t: t.split([3, 4], dim=1),
        "experts": Tensor.unbind,
        "gated": lambda t: t.reshape(6, 4, 6).unbind(),
        "conv": lambda t: [t.flatten(1)],
    }
    return list(cuts[name](value))


@distributed(2, 3, short=2)
def test_parts_of_a_tensor_are_stepped_as_matrices_of_their_own(ctx: RankContext) -> None:
    reference = seeded(Fused)
    batches = [torch.randn(6, generator=generator(seed), device="cpu") for seed in range(2)]
    parts = {name: [each.detach().clone() for each in parts_of(name, p)] for name, p in reference.named_parameters()}
    theirs = optim.Muon([each for of_param in parts.values() for each in of_param], **OPTIONS)
    model = seeded(Fused).to(ctx.device_type)
    fully_shard(model, mesh=ctx.mesh_1d())
    ours = Muon(model.named_parameters(), **OPTIONS, ns_dtype=torch.float32, rule=lambda name, _: RULES[name])
    for x in batches:
        reference(x).square().mean().backward()
        for name, param in reference.named_parameters():
            for part, grad in zip(parts[name], parts_of(name, param.grad), strict=True):
                part.grad = grad.clone()
        with newton_schulz_in_fp32():
            theirs.step()
        with torch.no_grad():
            for name, param in reference.named_parameters():
                for piece, part in zip(parts_of(name, param), parts[name], strict=True):
                    piece.copy_(part)
        reference.zero_grad()
        model(x.to(ctx.device_type)).square().mean().backward()
        ours.step()
        ours.zero_grad()
    assert_close(model, reference, FP32)
