"""Gradients in dtypes of their own: ``grad_dtype``, which torch reads from 2.15 on, against gradients of an unsharded
copy, cast and summed by hand; and those of casts that torch.autocast keeps until its region ends."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fsdp2 import MixedPrecisionPolicy, fully_shard
from tests.distributed.changes import assert_step_is_that_of
from tests.distributed.support import Block as StackBlock, Stack, batch, seeded, shard
from tests.harness.comms import reductions_noted
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import DIM, Block
from tests.harness.selection import in_ci

BF16, FP32 = torch.bfloat16, torch.float32


class _Widened(torch.autograd.Function):
    """The identity whose gradient comes in fp32, whatever the dtype of its input: fused accumulation does that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.linear = nn.Linear(DIM, DIM, dtype=dtype)
        self.scale = nn.Parameter(torch.ones(DIM, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.linear(self.norm(x).to(self.linear.weight.dtype)))
        return hidden.float() * _Widened.apply(self.scale)


def _loss(model: nn.Module, rank: int, micro: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10 * micro + rank)
    return model(torch.randn(4, DIM, generator=generator)).square().mean()


def _expected(
    ctx: RankContext, model: nn.Module, reduce: dict[str, torch.dtype], micros: Any = (0,), alone: bool = False
) -> dict[str, Tensor]:
    """Averages over ranks, or those of one ``alone``, of ``model``'s gradients, summed in their reduce dtypes."""
    sums: dict[str, Tensor] = {}
    for micro in micros:
        _loss(model, ctx.rank, micro).backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            grad = param.grad.to(reduce[name])
            sums[name] = sums[name] + grad if name in sums else grad
            param.grad = None
    for grad in () if alone else sums.values():
        dist.all_reduce(grad)
        grad /= ctx.world_size
    return sums


def _assert_gradients(model: nn.Module, expected: dict[str, Tensor], dtypes: dict[str, torch.dtype]) -> None:
    for name, param in model.named_parameters():
        grad = param.grad
        assert isinstance(grad, DTensor), name
        assert grad.dtype is dtypes[name], name
        assert grad.to_local().dtype is dtypes[name], name
        torch.testing.assert_close(grad.full_tensor(), expected[name].to(dtypes[name]), rtol=0, atol=0, msg=name)


def _set(model: Net, grad_dtypes: dict[str, torch.dtype | None]) -> Any:
    for name, dtype in grad_dtypes.items():
        model.get_parameter(name).grad_dtype = dtype
    return model


WEIGHT = {"linear.weight": FP32}
IN_FP32 = {"norm.weight": FP32, "norm.bias": FP32, "linear.weight": FP32, "linear.bias": BF16, "scale": BF16}


NARROW = {**IN_FP32, "norm.weight": BF16, "linear.weight": BF16}
ALL_FP32, ALL_BF16 = dict.fromkeys(IN_FP32, FP32), dict.fromkeys(IN_FP32, BF16)
# The grad_dtype of parameters, the policy's reduce_dtype; the dtypes in which gradients are reduced, and are kept.
CASES: dict[str, tuple[dict[str, Any], torch.dtype | None, dict[str, torch.dtype], dict[str, torch.dtype]]] = {
    "wider": ({"linear.weight": FP32}, None, IN_FP32, IN_FP32),
    "narrower": ({"norm.weight": BF16}, None, NARROW, NARROW),
    "the policy comes before it": ({"linear.weight": FP32}, BF16, ALL_BF16, IN_FP32),
    "comes wider": ({"scale": FP32}, FP32, ALL_FP32, {**IN_FP32, "linear.weight": BF16, "scale": FP32}),
    "any, and comes wider": ({"scale": None}, FP32, ALL_FP32, {**IN_FP32, "linear.weight": BF16, "scale": FP32}),
}


@pytest.mark.every_case
@pytest.mark.parametrize("shards_first", [False, *in_ci(True)])
@pytest.mark.parametrize("case", CASES)
@distributed(2)
def test_gradient_is_reduced_and_kept_in_grad_dtype(ctx: RankContext, case: str, shards_first: bool) -> None:
    """It may be set on the shards before the first forward, too."""
    own, reduce_dtype, reduced, kept = CASES[case]
    model = seeded(Net) if shards_first else _set(seeded(Net), own)
    fully_shard(model, mesh=ctx.mesh_1d(), mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    if shards_first:
        _set(model, own)
    _loss(model, ctx.rank).backward()
    reference = _set(seeded(Net), {"scale": None}) if "scale" in own else seeded(Net)  # keeps what autograd computes
    expected = _expected(ctx, reference, reduced)
    _assert_gradients(model, expected, kept)
    if case == "wider":
        assert not torch.equal(expected["linear.weight"], expected["linear.weight"].to(BF16))  # else nothing is shown
        assert model.linear.weight.grad_dtype is FP32
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert model.linear.weight.dtype is BF16
    if "scale" in own:
        assert not torch.equal(_expected(ctx, seeded(Net), reduced)["scale"], expected["scale"])


@pytest.mark.parametrize("alone", [False, True])
@distributed(2)
def test_microbatches_accumulate_in_it_from_the_first_on(ctx: RankContext, alone: bool) -> None:
    """Several backwards add up in it, too."""
    model = fully_shard(_set(seeded(Net), WEIGHT), mesh=ctx.mesh_of_one() if alone else ctx.mesh_1d())
    for micro in range(4):
        model.set_requires_gradient_sync(micro >= 2)
        _loss(model, ctx.rank, micro).backward()
    first, last = (_expected(ctx, seeded(Net), IN_FP32, m, alone)["linear.weight"] for m in (range(3), [3]))
    assert model.linear.weight.grad.dtype is FP32
    assert torch.equal(model.linear.weight.grad.full_tensor(), first + last)


@distributed(2)
def test_it_survives_conversions_and_loading(ctx: RankContext) -> None:
    model = seeded(lambda: Net(FP32))
    model.linear.weight.grad_dtype = torch.float64
    fully_shard(model, mesh=ctx.mesh_1d())
    _loss(model, ctx.rank).backward()
    model.to(BF16)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.norm.float()
    model.load_state_dict(state, assign=True)
    model.norm.float()
    model.zero_grad()
    _loss(model, ctx.rank).backward()
    weight = model.linear.weight
    assert weight.dtype is BF16
    assert weight.grad_dtype is torch.float64
    assert weight.grad.dtype is torch.float64
    assert model.linear.bias.grad.dtype is BF16


@distributed(2)
def test_gradients_of_all_dtypes_travel_in_one_launch(ctx: RankContext) -> None:
    model = fully_shard(_set(seeded(Net), WEIGHT), mesh=ctx.mesh_1d())
    with reductions_noted() as launched:
        _loss(model, ctx.rank).backward()
    assert launched == [["torch.bfloat16", "torch.float32", "torch.float32"]]  # the norm's, the weight's


@distributed(2)
def test_override_is_asked_once_for_each_parameter(ctx: RankContext) -> None:
    model = seeded(Net)
    model.tied = model.linear.weight
    given, asked = list(model.parameters()), []

    def override(param: nn.Parameter) -> torch.dtype | None:
        asked.append(param)
        return None

    policy = MixedPrecisionPolicy(param_dtype=FP32, param_dtype_override_fn=override)
    fully_shard(model, mesh=ctx.mesh_1d(), mp_policy=policy)
    _loss(model, ctx.rank).backward()
    _loss(model.to(torch.float64), ctx.rank).backward()
    assert len(asked) == len(given)
    assert all(any(param is other for other in asked) for param in given)


class TensorParallel(Block):
    """fp32 behind a norm in float64; the linear layers are cut over the model axis."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x.double()).float())


@distributed(4)
def test_parameter_of_a_tensor_parallel_module(ctx: RankContext) -> None:
    mesh = ctx.mesh(dp=2, tp=2)

    def trained(grad_dtype: torch.dtype | None) -> nn.Module:
        model = seeded(TensorParallel)
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if grad_dtype is not None:
            model.up.weight.grad_dtype = grad_dtype
        fully_shard(model, mesh=mesh["dp"])
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            _loss(model, mesh.get_local_rank("dp"), micro).backward()
        return model

    own, usual = trained(torch.float64), trained(None)
    for (name, param), other in zip(own.named_parameters(), usual.parameters(), strict=True):
        assert param.grad.dtype is (torch.float64 if name == "up.weight" else param.dtype), name
        assert param.grad.placements == other.grad.placements, name
        assert param.grad.to_local().abs().max() > 0
        torch.testing.assert_close(param.grad.to_local().to(other.dtype), other.grad.to_local(), rtol=1e-5, atol=1e-6)


class _Casting(Stack):
    """Blocks of two layers. ``checkpoints``: they run again in backward; ``saves_casts``: but for their casts, which
    must then be as many as in forward. ``recycles``: each runs ahead, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(StackBlock(), StackBlock()) for _ in range(3))
        self.checkpoints = self.recycles = self.saves_casts = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        saving = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten._to_copy.default])
        for block in self.blocks:
            x = x + block(x).detach() if self.recycles else x
            if self.saves_casts:
                x = checkpoint(block, x, use_reentrant=False, context_fn=saving)
            else:
                x = checkpoint(block, x, use_reentrant=True) if self.checkpoints else block(x)
        return self.exit(x)


def _backward_under_autocast(model: Any, kind: str) -> None:
    """``evaluation first``: as models that condition on their own output, or recycle it. ``target first``: gradients
    are recorded for nothing."""
    model.checkpoints, model.recycles = kind == "checkpointed", kind == "recycled"
    model.saves_casts = kind == "evaluation before backward"
    has_earlier = kind in ("evaluation first", "target first")
    with torch.autocast("cpu", torch.bfloat16):
        with torch.set_grad_enabled(kind == "target first"):
            earlier = model(batch(1)).detach() if has_earlier else 0.0
        for seed in range(2 if kind == "two micro-batches" else 1):
            loss = model(batch(seed)).float().square().mean()
            if model.saves_casts:  # of this forward, no cast of a parameter is saved
                loss = loss + model(batch(seed)).float().square().mean()
                with torch.no_grad():
                    model(batch(1))
            if has_earlier:
                loss = loss + (model(batch(2)) - earlier).float().square().mean()
            loss.backward()
    model.checkpoints = model.recycles = model.saves_casts = False


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(
    "kind",
    [
        *("evaluation first", "target first", "two micro-batches", "checkpointed", "recycled"),
        "evaluation before backward",
    ],
)
@distributed(2)
def test_no_gradient_is_lost_in_one_autocast_region(ctx: RankContext, kind: str, reshard: bool) -> None:
    """As torch's loses some, through a cast that autocast keeps until its region ends."""
    model, reference = shard(ctx, seeded(_Casting), reshard_after_forward=reshard), seeded(_Casting)
    for _ in range(2):
        for each in (model, reference):
            _backward_under_autocast(each, kind)
        for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert param.grad is not None, name
            assert torch.allclose(param.grad.full_tensor(), expected.grad, rtol=0.02, atol=1e-3), name
        for each in (model, reference):
            each.zero_grad()
    assert_step_is_that_of(model, reference)  # nothing is left for a later step
