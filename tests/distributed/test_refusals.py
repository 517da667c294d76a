"""What ``fully_shard`` refuses: the words, and that the model is as it was.

Each case builds a model and a call that must be refused. Around the call the classes of all modules, the parameter
objects and their values and the output are compared; then, where the case names one, a correct call must work.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp2
from fsdp2 import TiedWeights, fully_shard
from tests.distributed.refusals import Case, refused
from tests.distributed.support import DIM, Block, Stack, same_on_all_ranks, seeded
from tests.harness.distributed import RankContext


def _refusal(ctx: RankContext, case: str) -> str:
    return refused(CASES[case](ctx))


def refusal(case: str) -> str:
    __tracebackhide__ = True
    return same_on_all_ranks(_refusal, case=case)


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


def _sparse(ctx: RankContext) -> Case:
    model = seeded(Stack)
    model.blocks[1].linear.weight = nn.Parameter(torch.eye(DIM).to_sparse())
    return Case(model, lambda: fully_shard(model, mesh=ctx.mesh_1d()), runs=False)


def _second_weight(model: Stack) -> dict[str, Any]:
    return {"ignored_params": {model.blocks[1].linear.weight}}


def _final(ctx: RankContext) -> Case:
    model = Stack()
    model.exit = nn.Sequential(_Final(num_blocks=1))
    return Case(model, lambda: fully_shard([model.entry, model.exit[0]], mesh=ctx.mesh_1d()))


def _distribute(ctx: RankContext) -> Case:
    model = seeded(Stack)
    weight = distribute_tensor(model.exit.weight.detach(), ctx.mesh_1d(), [Replicate()])
    model.exit.weight = nn.Parameter(weight)
    return Case(model, lambda: fully_shard(model, mesh=ctx.mesh_1d()), runs=False)


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
    return Case(
        model,
        lambda: fully_shard(model, mesh=ctx.mesh_1d(), tied_weights=TiedWeights.REFUSE),
        lambda: fully_shard(model, mesh=ctx.mesh_1d()),
        runs=False,
    )


def _module_list(ctx: RankContext) -> Case:
    model = seeded(Stack)
    blocks = list(model.blocks)
    return Case(
        model,
        lambda: fully_shard(model.blocks, mesh=ctx.mesh_1d()),
        lambda: (fully_shard(blocks, mesh=ctx.mesh_1d()), fully_shard(model, mesh=ctx.mesh_1d())),
    )


def _meta_among_real(ctx: RankContext) -> Case:
    model = seeded(Stack)
    model.blocks[1] = Block().to("meta")
    return Case(model, lambda: fully_shard(model, mesh=ctx.mesh_1d()), runs=False)


CASES: dict[str, Callable[[RankContext], Case]] = {
    "no module": lambda ctx: Case(seeded(Stack), lambda: fully_shard("blocks", mesh=ctx.mesh_1d())),  # type: ignore[call-overload]
    "no module in the list": lambda ctx: Case(
        model := seeded(Stack),
        lambda: fully_shard([model, None], mesh=ctx.mesh_1d()),  # type: ignore[list-item]
    ),
    "empty list": lambda ctx: Case(seeded(Stack), lambda: fully_shard([], mesh=ctx.mesh_1d())),
    "mesh type": _call(mesh="cpu"),
    "three axes": _three_axes,
    "policy of torch": _call(mp_policy=theirs.MixedPrecisionPolicy()),
    "dtype as policy": _call(mp_policy=torch.bfloat16),
    "offload policy type": _call(offload_policy=True),
    "ignored dict": _call(ignored_params={}),
    "ignored names": _call(ignored_params=["exit.weight"]),
    "name of a dtype": _call(mp_policy=fsdp2.MixedPrecisionPolicy(param_dtype="bf16")),  # type: ignore[arg-type]
    "Python type": _call(mp_policy=fsdp2.MixedPrecisionPolicy(output_dtype=float)),  # type: ignore[arg-type]
    "placement is no function": _call(shard_placement_fn="dim1"),
    "reshard type": _call(reshard_after_forward="always"),
    "reshard float": _call(reshard_after_forward=2.0),
    "reshard non-divisor": _call(reshard_after_forward=3),
    "reshard zero": _call(reshard_after_forward=0),
    "placement dim": _call(shard_placement_fn=lambda parameter: Shard(1)),
    "placement type": _call(shard_placement_fn=lambda parameter: Replicate()),
    "parameter class": _changed(_mark, _second_weight),
    "tensor class": _changed(_log, _second_weight),
    "sparse": _sparse,
    "final class": _final,
    "DTensor": _distribute,
    "override is no function": _call(mp_policy=_overridden(torch.float32)),
    "override returns no dtype": _call(mp_policy=_overridden(lambda parameter: "float32")),
    "override to a third dtype": _call(mp_policy=_overridden(lambda parameter: torch.float16)),
    "open grad_dtype": _changed(_allow_any_gradient, _reduce_in_float32),
    "again": _again,
    "tied across units": _tied_across_units,
    "ModuleList": _module_list,
}


def test_not_a_module() -> None:
    assert_expected_inline(
        refusal("no module"), """TypeError: fully_shard: expected an nn.Module or a list of them, found str."""
    )


def test_not_a_module_in_a_list() -> None:
    assert_expected_inline(
        refusal("no module in the list"),
        """TypeError: fully_shard: expected an nn.Module or a list of them, found NoneType.""",
    )


def test_empty_list() -> None:
    assert_expected_inline(
        refusal("empty list"), """ValueError: fully_shard: got an empty list of modules, expected at least one."""
    )


def test_mesh_of_the_wrong_type() -> None:
    assert_expected_inline(
        refusal("mesh type"),
        """\
TypeError: fully_shard: mesh must be a torch.distributed.device_mesh.DeviceMesh, not str. Build one
with init_device_mesh(device_type, shape).""",
    )


def test_mesh_of_three_axes() -> None:
    assert_expected_inline(
        refusal("three axes"),
        """\
ValueError: fully_shard: mesh has 3 axes (1, 1, 2), expected 1 (shard) or 2 (replicate, shard). Pass
a submesh, for example mesh["dp"], or name the data-parallel axes with dp_mesh_dims.""",
    )


def test_mixed_precision_policy_of_torch() -> None:
    assert_expected_inline(
        refusal("policy of torch"),
        """\
TypeError: fully_shard: mp_policy must be an fsdp2.MixedPrecisionPolicy, not
torch.distributed.fsdp.MixedPrecisionPolicy.""",
    )


def test_dtype_in_place_of_a_policy() -> None:
    assert_expected_inline(
        refusal("dtype as policy"),
        """TypeError: fully_shard: mp_policy must be an fsdp2.MixedPrecisionPolicy, not torch.dtype.""",
    )


def test_names_and_types_in_place_of_dtypes() -> None:
    assert_expected_inline(
        refusal("name of a dtype"),
        """\
TypeError: fully_shard: mp_policy.param_dtype must be a torch.dtype or None, not 'bf16', a
builtins.str. For example: MixedPrecisionPolicy(param_dtype=torch.bfloat16).""",
    )
    assert_expected_inline(
        refusal("Python type"),
        """\
TypeError: fully_shard: mp_policy.output_dtype must be a torch.dtype or None, not <class 'float'>, a
builtins.type. For example: MixedPrecisionPolicy(output_dtype=torch.bfloat16).""",
    )


def test_placement_is_no_function() -> None:
    assert_expected_inline(
        refusal("placement is no function"),
        """\
TypeError: fully_shard: shard_placement_fn must be a function from a parameter to Shard(dim), a
ParamPlacement or None, not 'dim1', a builtins.str. For example: lambda param: Shard(0).""",
    )


def test_offload_policy_of_the_wrong_type() -> None:
    assert_expected_inline(
        refusal("offload policy type"),
        """TypeError: fully_shard: offload_policy must be an fsdp2.OffloadPolicy, not builtins.bool.""",
    )


def test_ignored_params_of_the_wrong_type() -> None:
    assert_expected_inline(
        refusal("ignored dict"),
        """TypeError: fully_shard: ignored_params must be a set of parameters, not builtins.dict.""",
    )


def test_ignored_params_that_are_names() -> None:
    assert_expected_inline(
        refusal("ignored names"),
        """\
TypeError: fully_shard: ignored_params must be a set of parameters, but 'exit.weight' in it is a
builtins.str. For example: set(model.head.parameters()).""",
    )


def test_reshard_after_forward_of_the_wrong_type() -> None:
    assert_expected_inline(
        refusal("reshard type"),
        """TypeError: fully_shard: reshard_after_forward must be a bool, an int or None, not builtins.str.""",
    )


def test_reshard_after_forward_as_a_float() -> None:
    assert_expected_inline(
        refusal("reshard float"),
        """TypeError: fully_shard: reshard_after_forward must be a bool, an int or None, not builtins.float.""",
    )


def test_reshard_after_forward_that_does_not_divide_the_ranks() -> None:
    assert_expected_inline(
        refusal("reshard non-divisor"),
        """\
ValueError: fully_shard: reshard_after_forward=3 does not divide the 2 ranks of the shard axis. Pass
one of [1, 2], or a bool.""",
    )


def test_reshard_after_forward_of_no_rank() -> None:
    assert_expected_inline(
        refusal("reshard zero"),
        """\
ValueError: fully_shard: reshard_after_forward=0 does not divide the 2 ranks of the shard axis. Pass
one of [1, 2], or a bool.""",
    )


def test_placement_on_a_dim_that_a_parameter_lacks() -> None:
    assert_expected_inline(
        refusal("placement dim"),
        """\
ValueError: fully_shard: parameter 'entry.bias' has shape (32,), so it cannot be sharded on dim 1.
Return a dim in [-1, 0] from shard_placement_fn.""",
    )


def test_placement_that_is_no_shard() -> None:
    assert_expected_inline(
        refusal("placement type"),
        """\
TypeError: fully_shard: shard_placement_fn returned Replicate() for parameter 'entry.weight',
expected Shard(dim), ParamPlacement(Shard(dim), mesh) or None.""",
    )


def test_class_of_parameter_that_would_be_lost() -> None:
    assert_expected_inline(
        refusal("parameter class"),
        """\
ExtensionError: fully_shard: parameter 'blocks.1.linear.weight' is a _Marked. Sharding would lose
this class: compute would read an nn.Parameter. Replace the parameter by nn.Parameter(...) of its
values or of a tensor subclass with all-gather hooks, or list the parameter in ignored_params.""",
    )


def test_tensor_class_that_would_be_lost() -> None:
    assert_expected_inline(
        refusal("tensor class"),
        """\
ExtensionError: parameter 'blocks.1.linear.weight' is a _Logging without __torch_dispatch__. A
DTensor would lose this class and ignore its hooks. Make _Logging a wrapper subclass, or make the
parameter a plain tensor.""",
    )


def test_sparse_parameter() -> None:
    assert_expected_inline(
        refusal("sparse"),
        """\
ValueError: fully_shard: parameter 'blocks.1.linear.weight' is a torch.sparse_coo tensor. Only dense
values can be cut into shards. Make the parameter a dense tensor or a tensor subclass with
all-gather hooks, or list the parameter in ignored_params.""",
    )


def test_module_class_that_cannot_be_derived_from() -> None:
    assert_expected_inline(refusal("final class"), """TypeError: this class is final""")


def test_dtensor_parameter() -> None:
    assert_expected_inline(
        refusal("DTensor"),
        """\
ValueError: fully_shard: parameter 'exit.weight' is a DTensor on the mesh DeviceMesh((shard=2),
'cpu', stride=(1,)). This mesh cannot be joined with the mesh DeviceMesh((shard=2), 'cpu',
stride=(1,)) given to fully_shard: Cannot concatenate overlapping meshes: [DeviceMesh((shard=2),
'cpu', stride=(1,)), DeviceMesh((shard=2), 'cpu', stride=(1,))]. Use parts of one mesh with names,
without a common axis: mesh = init_device_mesh(..., mesh_dim_names=("dp", "tp")), then mesh["dp"]
and mesh["tp"].""",
    )


def test_override_is_no_function() -> None:
    assert_expected_inline(
        refusal("override is no function"),
        """\
TypeError: fully_shard: mp_policy.param_dtype_override_fn must be a function from a parameter to a
dtype or None, not torch.dtype.""",
    )


def test_override_returns_no_dtype() -> None:
    assert_expected_inline(
        refusal("override returns no dtype"),
        """\
TypeError: fully_shard: param_dtype_override_fn returned 'float32' for parameter 'entry.weight',
expected torch.float32 (to keep the dtype), or torch.bfloat16 or None (for the policy's dtype).""",
    )


def test_override_to_a_third_dtype() -> None:
    assert_expected_inline(
        refusal("override to a third dtype"),
        """\
ValueError: fully_shard: param_dtype_override_fn returned torch.float16 for parameter
'entry.weight', expected torch.float32 (to keep the dtype), or torch.bfloat16 or None (for the
policy's dtype). For another dtype, call fully_shard on the module that holds the parameter, with a
separate policy.""",
    )


def test_grad_dtype_that_leaves_the_reduction_open() -> None:
    assert_expected_inline(
        refusal("open grad_dtype"),
        """\
ValueError: parameter 'blocks.1.linear.weight' has grad_dtype=None, so its gradient may have any
dtype, and the dtype of the reduction is unknown. Set reduce_dtype in the MixedPrecisionPolicy, or
set grad_dtype to a dtype.""",
    )


def test_same_module_twice() -> None:
    assert_expected_inline(
        refusal("again"),
        """\
ValueError: fully_shard: this Stack was given to fully_shard before. Call fully_shard once per
module, on inner modules first.""",
    )


def test_tie_across_units() -> None:
    assert_expected_inline(
        refusal("tied across units"),
        """\
ValueError: fully_shard: parameter 'exit.weight' is tied to 'linear.weight' of a unit that is
already sharded. This call would break the tie. The parameter moves to the new unit only with
tied_weights=MOVE, and only if the old unit has not run and none of its parameters was written or
replaced. Otherwise, call fully_shard([a, b]) on the modules that share the parameter, to make one
unit.""",
    )


def test_container_without_forward() -> None:
    assert_expected_inline(
        refusal("ModuleList"),
        """\
ValueError: fully_shard: ModuleList has no forward, so its parameters would never be unsharded. Call
fully_shard on each inner module, or pass a list of the inner modules to make one unit.""",
    )


def _values_beside_meta(ctx: RankContext) -> None:
    model, call, *_ = _meta_among_real(ctx)
    expected = {name: p.detach().clone() for name, p in model.named_parameters() if not p.is_meta}
    try:
        call()
    except ValueError:
        return
    model.blocks[1].to_empty(device="cpu")
    for name, value in expected.items():
        parameter = model.get_parameter(name)
        assert not parameter.is_meta, f"{name} lost its values"
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), value)


def test_meta_parameter_does_not_cost_the_real_ones_of_its_group_their_values() -> None:
    """Either the mixture is refused, or the real parameters keep their values, as with torch."""
    same_on_all_ranks(_values_beside_meta)


def _place_of_warning(ctx: RankContext) -> str:
    with pytest.warns(UserWarning, match="reshard_after_forward=1 means one rank per shard") as warned:
        fully_shard(seeded(Stack), mesh=ctx.mesh_1d(), reshard_after_forward=1)
    return Path(warned[0].filename).name


def test_warning_about_one_rank_per_shard_shows_the_line_of_the_call() -> None:
    assert same_on_all_ranks(_place_of_warning) == Path(__file__).name
