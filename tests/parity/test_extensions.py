"""All-gather hooks: torch's ``fully_shard`` and ours make the same of the same subclasses, bit for bit on axes of two.

torch asks more of hooks: shards and payloads padded alike on all ranks, and an ``out`` that they write without autograd
noticing. So the classes here do. What hooks do beside other features is compared with a model by hand, bit for bit:
``tests/distributed/test_extension_*.py``.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.harness.compare import compare
from tests.harness.distributed import RankContext, distributed
from tests.harness.extensions import AliasingHalved, Halved, Packed4, Padded, Scaled, Travelling, wrap
from tests.harness.models import MLP, ParityModel, Transformer, Uneven
from tests.harness.runtimes import oracle, subject
from tests.harness.selection import long
from tests.harness.training import Case, adamw, sgd, shard_units_and_root


class Careful(Travelling):
    """Writes ``out`` as torch wants it."""

    def write(self, out: Tensor, made: Tensor) -> None:
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            super().write(out, made)


class CarefulHalved(Careful, Halved):
    pass


class CarefulScaled(Careful, Scaled):
    pass


class CarefulPacked4(Careful, Packed4):
    pass


class CarefulPadded(Careful, Padded):
    pass


class CarefulAliasing(Careful, AliasingHalved):
    pass


class ShortHook(CarefulHalved):
    """The short signature."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        size = torch.Size((self.size(0) * mesh.size(), *self.shape[1:]))
        return super().fsdp_pre_all_gather(mesh, size, (), None, None)


EVEN = [CarefulHalved, CarefulScaled, CarefulPacked4, ShortHook]


def _case(make: type[Travelling], model: Any = MLP, param_dtype: torch.dtype | None = None, **kwargs: Any) -> Case:
    """``model`` with its matrices in a class."""

    def shard(runtime: Any, model: ParityModel, mesh: Any) -> None:
        policy = runtime.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
        shard_units_and_root(runtime, model, mesh, mp_policy=policy, **options)

    options = kwargs.pop("options", {})
    return Case(lambda: wrap(model(), make), shard=shard, unsharded=None, **kwargs)


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("make", EVEN)
@distributed(2)
def test_training_with_hooks(ctx: RankContext, make: Any, param_dtype: torch.dtype | None) -> None:
    compare(_case(make, param_dtype=param_dtype, optimizer=sgd if param_dtype else adamw), ctx.mesh_1d())


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@distributed(2)
def test_hooks_that_pad_uneven_shards(ctx: RankContext, param_dtype: torch.dtype | None) -> None:
    compare(_case(CarefulPadded, Uneven, param_dtype), ctx.mesh_1d())
    compare(_case(CarefulPadded, functools.partial(Transformer, tied=True), param_dtype), ctx.mesh_1d())


@distributed(2)
def test_unsharded_parameter_that_is_what_arrived(ctx: RankContext) -> None:
    compare(_case(CarefulAliasing, param_dtype=torch.bfloat16), ctx.mesh_1d())


@pytest.mark.ci
@pytest.mark.parametrize("make", [CarefulPacked4, *long(CarefulScaled)])
@distributed(4)
def test_hooks_on_hsdp(ctx: RankContext, make: Any) -> None:
    compare(_case(make, param_dtype=torch.bfloat16), ctx.mesh_2d(2, 2))


@distributed(2)
def test_hooks_that_instances_were_given(ctx: RankContext) -> None:
    """Plain shards; the other parameters stay as they are."""

    def shard(runtime: Any, model: MLP, mesh: Any) -> None:
        shard_units_and_root(runtime, model, mesh)
        for block in model.blocks:
            local = block.up.weight._local_tensor
            hooks = CarefulHalved(local)
            local.fsdp_pre_all_gather = hooks.fsdp_pre_all_gather
            local.fsdp_post_all_gather = hooks.fsdp_post_all_gather

    compare(Case(MLP, shard=shard, unsharded=None), ctx.mesh_1d())


def _patched(model: nn.Module, pre: Any, post: Any) -> None:
    """Give the shards of all matrices hooks of their own; the class has none."""
    for param in model.parameters():
        local = param._local_tensor  # to_local() makes another object
        if param.dim() == 2:
            local.fsdp_pre_all_gather = pre.__get__(local)
            local.fsdp_post_all_gather = post.__get__(local)


def _two_tensor_losses(ctx: RankContext, mesh: Any, hooks: Any, num_forwards: int) -> Any:
    """Pairs of losses: of the oracle, and of the subject."""
    results = []
    for runtime in (oracle(), subject()):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
        for layer in model:
            layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach().clone()))
        for module in (*model, model):
            runtime.fully_shard(module, mesh=mesh)
        _patched(model, *hooks)
        torch.manual_seed(ctx.rank)
        results.append([model(torch.randn(2, 8)).square().sum() for _ in range(num_forwards)])
    return zip(*results, strict=True)


def _as_bfloat16(self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
    return (self.to(torch.bfloat16),), None


@torch.no_grad()
def _from_bfloat16(self: Any, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
    (gathered,) = outputs
    assert gathered.dtype is torch.bfloat16
    if out is None:
        made = gathered.to(param_dtype)
        return made, (gathered, made)
    with torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(gathered)
    return None


def _itself(self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
    return (self,), mesh.size()


@torch.no_grad()
def _as_it_came(self: Any, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
    assert metadata == 2
    return None if out is not None else (outputs[0], outputs)


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("hooks", [(_as_bfloat16, _from_bfloat16), (_itself, _as_it_came)])
@distributed(4)
def test_payload_that_is_a_wrapper_tensor(ctx: RankContext, hooks: Any, axes: int) -> None:
    """torch writes all inner tensors of the payload to one place, so that the last one arrives. Here they are equal."""
    mesh = ctx.mesh_2d(2, 2) if axes == 2 else ctx.mesh_2d(2, 2)["shard"]
    for theirs, ours in _two_tensor_losses(ctx, mesh, hooks, 2):
        assert isinstance(ours, TwoTensor)
        assert torch.equal(ours.a, theirs)
        assert torch.equal(ours.b, theirs)


def _first_half(self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
    return (self.a,), torch.full((8, 8), 2.0)


def _with_metadata(self: Any, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
    if out is None:
        return TwoTensor(outputs[0], metadata), outputs
    out.b = metadata  # torchao's float8 replaces the scale of a weight so
    return None


@distributed(2)
def test_a_post_hook_may_replace_what_was_not_gathered(ctx: RankContext) -> None:
    for theirs, ours in _two_tensor_losses(ctx, ctx.mesh_1d(), (_first_half, _with_metadata), 3):
        assert torch.equal(ours.a, theirs.a)
        assert torch.equal(ours.b, theirs.b)


class FillsEvenOnly(CarefulPadded):
    """Copies all rows that were gathered into ``out``. That fails where ``out`` has no rows of padding."""

    def write(self, out: Tensor, made: Tensor) -> None:
        out.copy_(made)


@distributed(2)
def test_the_first_gather_calls_the_post_hook_without_out_only(ctx: RankContext) -> None:
    case = _case(FillsEvenOnly, Uneven, options={"reshard_after_forward": False}, num_steps=1)
    compare(case, ctx.mesh_1d())
