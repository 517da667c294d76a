"""What ``fully_shard`` refuses: the words, in ``golden/refusals.txt``, and that the model is as it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor

import fsdp2
from fsdp2 import DataParallelMeshDims, ParamPlacement, fully_shard
from fsdp2.report import trace
from tests.distributed.changes import assert_step_is_that_of
from tests.distributed.refusals import Case, refused
from tests.distributed.support import DIM, Block, Stack, same_on_all_ranks, seeded, sharded
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import texts_beside


def _call(**kwargs: Any) -> Callable[[RankContext], Case]:
    """A ``Stack`` with wrong arguments; without them the same call works."""

    def case(ctx: RankContext) -> Case:
        model = seeded(Stack)
        given = {"mesh": ctx.mesh_1d(), **kwargs}
        return Case(model, lambda: fully_shard(model, **given), lambda: fully_shard(model, mesh=ctx.mesh_1d()))

    return case


def _changed(change: Callable[[Stack], Any], correct_args: Callable[[Stack], dict[str, Any]] | None = None) -> Any:
    """A ``Stack`` after ``change``; ``correct_args`` are what makes the call work."""

    def case(ctx: RankContext) -> Case:
        model = seeded(Stack)
        change(model)
        correct = None
        if correct_args is not None:
            correct = lambda: fully_shard(model, mesh=ctx.mesh_1d(), **correct_args(model))  # noqa: E731
        return Case(model, lambda: fully_shard(model, mesh=ctx.mesh_1d()), correct)

    return case


def _method(call: Callable[[Any], Any]) -> Callable[[RankContext], Case]:
    """A call on the sharded model; without it, the model trains like the unsharded one."""

    def case(ctx: RankContext) -> Case:
        model = sharded(ctx)
        return Case(model, lambda: call(model), lambda: assert_step_is_that_of(model, seeded(Stack)))

    return case


def _dtypes(**dtypes: Any) -> Callable[[RankContext], Case]:
    return _call(mp_policy=fsdp2.MixedPrecisionPolicy(**dtypes))


def _output_of_attention(ctx: RankContext) -> Case:
    model = nn.Sequential(nn.MultiheadAttention(DIM, 2))
    fully_shard(model[0].out_proj, mesh=ctx.mesh_1d())
    return Case(model, lambda: fully_shard(model, mesh=ctx.mesh_1d()), runs=False)


def _inner_after_outer(ctx: RankContext) -> Case:
    model = fully_shard(seeded(Stack), mesh=ctx.mesh_1d())
    call = lambda: fully_shard(model.blocks[0], mesh=ctx.mesh_1d())  # noqa: E731
    return Case(model, call, lambda: assert_step_is_that_of(model, seeded(Stack)))


def _three_axes(ctx: RankContext) -> Case:
    mesh = init_device_mesh("cpu", (1, 1, ctx.world_size), mesh_dim_names=("pp", "replicate", "shard"))
    return _call(mesh=mesh)(ctx)


class _Marked(nn.Parameter):
    """A parameter with a meaning of its own, as quantised layers define them."""


class _Logging(Tensor):
    """What ``as_subclass`` makes: operations see the class, a DTensor keeps none of it."""


class _Final(Stack):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise TypeError("this class is final")


def _mark(model: Stack) -> None:
    model.blocks[1].linear.weight = _Marked(model.blocks[1].linear.weight.detach())


def _log(model: Stack) -> None:
    model.blocks[1].linear.weight = nn.Parameter(model.blocks[1].linear.weight.detach().as_subclass(_Logging))


def _second_weight(model: Stack) -> dict[str, Any]:
    return {"ignored_params": {model.blocks[1].linear.weight}}


def _final(ctx: RankContext) -> Case:
    model = Stack()
    model.exit = nn.Sequential(_Final(num_blocks=1))
    return Case(model, lambda: fully_shard([model.entry, model.exit[0]], mesh=ctx.mesh_1d()))


def _newer_policy() -> Any:
    """torch's policy with a setting that no torch has yet."""
    options: dict[str, Any] = {"bases": (theirs.MixedPrecisionPolicy,), "frozen": True}
    made = dataclasses.make_dataclass("MixedPrecisionPolicy", [("rounds", str, "to nearest")], **options)
    made.__module__ = theirs.__name__
    return made(rounds="down")


def _overridden(override: Any) -> fsdp2.MixedPrecisionPolicy:
    return fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, param_dtype_override_fn=override)


def _allow_any_gradient(model: Stack) -> None:
    model.blocks[1].linear.weight.grad_dtype = None


def _reduce_in_float32(model: Stack) -> dict[str, Any]:
    return {"mp_policy": fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.float32)}


def _again(ctx: RankContext) -> Case:
    model = fully_shard(seeded(Stack), mesh=ctx.mesh_1d())
    return Case(model, lambda: fully_shard(model, mesh=ctx.mesh_1d()))


def _tied_across_units(ctx: RankContext) -> Case:
    model = seeded(Stack)
    model.exit.weight = model.blocks[0].linear.weight
    fully_shard(model.blocks[0], mesh=ctx.mesh_1d())
    with torch.no_grad():
        model.blocks[0].linear.bias.zero_()
    return Case(model, lambda: fully_shard(model, mesh=ctx.mesh_1d()), runs=False)


def _module_list(ctx: RankContext) -> Case:
    model = seeded(Stack)
    blocks = list(model.blocks)
    return Case(
        model,
        lambda: fully_shard(model.blocks, mesh=ctx.mesh_1d()),
        lambda: (fully_shard(blocks, mesh=ctx.mesh_1d()), fully_shard(model, mesh=ctx.mesh_1d())),
    )


# Meshes and DTensors

DP = DataParallelMeshDims(shard="dp")


Mesh = Callable[[RankContext], DeviceMesh]


def _axis(name: str) -> Mesh:
    return lambda ctx: ctx.mesh(dp=1, tp=2)[name]


def _last_weight(make: Callable[[RankContext, Tensor], Tensor], mesh: Mesh = RankContext.mesh_1d) -> Any:
    """A ``Stack`` whose last weight is what ``make`` makes of it."""

    def case(ctx: RankContext) -> Case:
        model = seeded(Stack)
        model.exit.weight = nn.Parameter(make(ctx, model.exit.weight.detach()))
        return Case(model, lambda: fully_shard(model, mesh=mesh(ctx)), runs=False)

    return case


def _placed(on: Mesh, placement: Any, mesh: Mesh) -> Any:
    """The last weight is a DTensor on another mesh than that of the call, or on that one."""
    return _last_weight(lambda ctx, weight: DTensor.from_local(weight, on(ctx), [placement], run_check=False), mesh)


def _on_named_mesh(**kwargs: Any) -> Callable[[RankContext], Case]:
    return lambda ctx: _call(mesh=ctx.mesh(dp=2), **kwargs)(ctx)


def _sharded_by_the_user(ctx: RankContext) -> Case:
    model, mesh = seeded(Stack), ctx.mesh(dp=2)
    sharded = distribute_tensor(model.exit.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
    distribute_module(model, mesh)
    model.exit.weight = nn.Parameter(sharded)
    return Case(model, lambda: fully_shard(model, mesh=mesh, dp_mesh_dims=DP), runs=False)


def _other_mesh(ctx: RankContext) -> Case:
    model = seeded(Stack)
    distribute_module(model, ctx.mesh(other=2))
    return Case(model, lambda: fully_shard(model, mesh=ctx.mesh(dp=2), dp_mesh_dims=DP), runs=False)


class _OneRow:
    """A format of gradients that sends the same to all ranks."""

    def fsdp_pre_reduce_scatter(self, pieces: Tensor) -> tuple[Tensor, ...]:
        return (pieces[:1],)

    def fsdp_post_reduce_scatter(self, received: tuple[Tensor, ...], reduce_dtype: torch.dtype) -> Tensor:
        return received[0]


class _Halves(_OneRow):
    def fsdp_pre_reduce_scatter(self, pieces: Tensor) -> tuple[Tensor, ...]:
        return (pieces[:, ::2].contiguous(),)


CASES: dict[str, Callable[[RankContext], Case]] = {
    "not a module": lambda ctx: Case(seeded(Stack), lambda: fully_shard("blocks", mesh=ctx.mesh_1d())),  # type: ignore[call-overload]
    "not a module in a list": lambda ctx: Case(
        model := seeded(Stack),
        lambda: fully_shard([model, None], mesh=ctx.mesh_1d()),  # type: ignore[list-item]
    ),
    "empty list": lambda ctx: Case(seeded(Stack), lambda: fully_shard([], mesh=ctx.mesh_1d())),
    "mesh of the wrong type": _call(mesh="cpu"),
    "mesh of three axes": _three_axes,
    "setting of a newer torch": _call(mp_policy=_newer_policy()),
    "dtype in place of a policy": _call(mp_policy=torch.bfloat16),
    "offload policy of the wrong type": _call(offload_policy=True),
    "ignored params in a dict": _call(ignored_params={}),
    "ignored params that are names": _call(ignored_params=["exit.weight"]),
    "name in place of a dtype": _call(mp_policy=fsdp2.MixedPrecisionPolicy(param_dtype="bf16")),  # type: ignore[arg-type]
    "type in place of a dtype": _call(mp_policy=fsdp2.MixedPrecisionPolicy(output_dtype=float)),  # type: ignore[arg-type]
    "placement is no function": _call(shard_placement_fn="dim1"),
    "reshard_after_forward of the wrong type": _call(reshard_after_forward="always"),
    "reshard_after_forward as a float": _call(reshard_after_forward=2.0),
    "reshard_after_forward that does not divide the ranks": _call(reshard_after_forward=3),
    "reshard_after_forward of no rank": _call(reshard_after_forward=0),
    "placement on a dim that a parameter lacks": _call(shard_placement_fn=lambda parameter: Shard(1)),
    "placement that is a sum": _call(shard_placement_fn=lambda parameter: Partial()),
    "class of parameter that would be lost": _changed(_mark, _second_weight),
    "tensor class that would be lost": _changed(_log, _second_weight),
    "sparse parameter": _last_weight(lambda ctx, weight: weight.to_sparse()),
    "module class that cannot be derived from": _final,
    "DTensor parameter": _placed(RankContext.mesh_1d, Replicate(), RankContext.mesh_1d),
    "override is no function": _call(mp_policy=_overridden(torch.float32)),
    "override returns no dtype": _call(mp_policy=_overridden(lambda parameter: "float32")),
    "override to a third dtype": _call(mp_policy=_overridden(lambda parameter: torch.float16)),
    "grad_dtype that leaves the reduction open": _changed(_allow_any_gradient, _reduce_in_float32),
    "same module twice": _again,
    "tie across units": _tied_across_units,
    "container without forward": _module_list,
    "mesh whose axes have no names": lambda ctx: _call(mesh=init_device_mesh("cpu", (2,)), dp_mesh_dims=DP)(ctx),
    "axis that the mesh lacks": _on_named_mesh(dp_mesh_dims=DataParallelMeshDims(shard="data")),
    "axis named twice": _on_named_mesh(dp_mesh_dims=DataParallelMeshDims(shard="dp", replicate="dp")),
    "names of axes as text": _on_named_mesh(dp_mesh_dims="dp"),
    "plain parameters with names of axes": _on_named_mesh(dp_mesh_dims=DP),
    "parameter that the user has sharded": _sharded_by_the_user,
    "DTensors on another mesh": _other_mesh,
    "sum that is pending": _placed(_axis("tp"), Partial(), _axis("dp")),
    "DTensor on a mesh without names": _placed(lambda ctx: init_device_mesh("cpu", (2,)), Replicate(), _axis("dp")),
    "DTensor on the axis to shard over": _placed(lambda ctx: ctx.mesh(dp=2), Replicate(), lambda ctx: ctx.mesh(dp=2)),
    "dtype of parameters that nothing is computed in": _dtypes(param_dtype=torch.int8),
    "dtype of outputs that nothing is computed in": _dtypes(output_dtype=torch.bool),
    "dtype that nothing is added in": _dtypes(reduce_dtype=torch.float8_e5m2),
    "wire without a dtype for sums": _dtypes(reduce_wire=torch.bfloat16),
    "wire for sums in few bits": _dtypes(reduce_dtype=torch.bfloat16, reduce_wire=torch.float16),
    "wire as wide as the sums": _dtypes(reduce_dtype=torch.float32, reduce_wire=torch.float32),
    "wire without a scale": _dtypes(reduce_dtype=torch.float32, reduce_wire=torch.float8_e4m3fn),
    "wire of integers": _dtypes(reduce_dtype=torch.float32, reduce_wire=torch.int8),
    "wire that overflows": _dtypes(reduce_dtype=torch.float32, reduce_wire=torch.float16),
    "wire that is a name": _dtypes(reduce_dtype=torch.float32, reduce_wire="bf16"),
    "wire that is a class": _dtypes(reduce_dtype=torch.float32, reduce_wire=_OneRow),
    "wire that loses rows": _dtypes(reduce_dtype=torch.float32, reduce_wire=_OneRow()),
    "wire that decodes another shape": _dtypes(reduce_dtype=torch.float32, reduce_wire=_Halves()),
    "output of attention": _output_of_attention,
    "inner module after the outer one": _inner_after_outer,
    "forward prefetch of a plain module": _method(lambda m: m.set_modules_to_forward_prefetch([m.blocks[1], m.entry])),
    "backward prefetch of a plain module": _method(lambda m: m.set_modules_to_backward_prefetch([m.entry])),
    "set_reshard_after_forward to a number": _method(lambda m: m.set_reshard_after_forward(2)),
    "whether reductions are in flight": _method(lambda m: m.set_reduce_scatter_max_input_buffers(True)),
    "part of a reduction in flight": _method(lambda m: m.set_reduce_scatter_max_input_buffers(2.0)),
    "no reduction in flight": _method(lambda m: m.set_reduce_scatter_max_input_buffers(0)),
    "divisor of gradients as text": _method(lambda m: m.set_gradient_divide_factor("2")),
    "divisor of gradients that is zero": _method(lambda m: m.set_gradient_divide_factor(0)),
    "divisor of gradients that is no number": _method(lambda m: m.set_gradient_divide_factor(float("nan"))),
    "shared streams of a plain module": _method(lambda m: fsdp2.share_comm_ctx([m, m.entry])),
    "trace of a plain module": _method(lambda m: trace.record(nn.Linear(1, 1)).__enter__()),
    "no_sync of a plain module": _method(lambda m: fsdp2.no_sync(nn.Linear(1, 1)).__enter__()),
    "placement that is text": _call(shard_placement_fn=lambda param: "experts"),
    "placement on text": _call(shard_placement_fn=lambda param: ParamPlacement(Shard(0), "ep")),  # type: ignore[arg-type]
}
TEXTS = texts_beside(__file__)


def _refusal(ctx: RankContext, case: str) -> str:
    return refused(CASES[case](ctx))


@pytest.mark.parametrize("case", CASES)
def test_call_is_refused(case: str) -> None:
    TEXTS.check(case, same_on_all_ranks(_refusal, case=case))


def test_every_text_has_a_case() -> None:
    TEXTS.check_names(CASES)


@distributed(2)
def test_meta_parameter_does_not_cost_the_real_ones_of_its_group_their_values(ctx: RankContext) -> None:
    model, reference = seeded(Stack), seeded(Stack)
    model.blocks[1] = Block().to("meta")
    fully_shard(model, mesh=ctx.mesh_1d())
    model.blocks[1].to_empty(device=ctx.device_type)
    for name, value in reference.named_parameters():
        found = model.get_parameter(name)
        assert isinstance(found, DTensor)
        assert not found.is_meta, f"{name} lost its values"
        assert "blocks.1" in name or torch.equal(found.full_tensor(), value)


@distributed(2)
def test_warning_about_one_rank_per_shard_shows_the_line_of_the_call(ctx: RankContext) -> None:
    with pytest.warns(UserWarning, match="reshard_after_forward=1 means one rank per shard") as warned:
        fully_shard(seeded(Stack), mesh=ctx.mesh_1d(), reshard_after_forward=1)
    assert Path(warned[0].filename).name == Path(__file__).name
