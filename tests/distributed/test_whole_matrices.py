"""``whole_matrices`` on ranks: what the function is given, what comes back, and that a failure changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fsdp2.checkpoint import reshard_to
from fsdp2.optim import MatrixRule, Muon, muon_groups, whole_matrices
from fsdp2.optim.matrices import Matrix
from tests.distributed.changes import whole
from tests.distributed.support import NewMemory, seeded, shard_units
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import texts_beside
from tests.harness.messages import error_of
from tests.harness.models import MLP
from tests.parity.setups import load_states, states_of, train_steps

TEXTS = texts_beside(__file__)
SHAPES = {"a": (8, 6), "b": (7, 3), "c": (2, 9), "d": (5, 4, 3), "e": (1, 4)}


def values_of(name: str) -> Tensor:
    shape = SHAPES[name]
    return torch.randn(shape, generator=torch.Generator().manual_seed(ord(name)), device="cpu")


def placed(ctx: RankContext, mesh: DeviceMesh, placements: Sequence[Any]) -> dict[str, DTensor]:
    return {
        name: distribute_tensor(values_of(name).to(ctx.device_type), mesh, placements, src_data_rank=None)
        for name in SHAPES
    }


def rule(name: str, _: Tensor) -> MatrixRule | None:
    return MatrixRule.batch() if name == "d" else None


def parts(name: str) -> list[Tensor]:
    return list(values_of(name)) if name == "d" else [values_of(name)]


MESHES: dict[str, Callable[[RankContext], tuple[DeviceMesh, list[Any]]]] = {
    "rows": lambda ctx: (ctx.mesh_1d(), [Shard(0)]),
    "columns": lambda ctx: (ctx.mesh_1d(), [Shard(1)]),
    "copies": lambda ctx: (ctx.mesh_1d(), [Replicate()]),
    "alone": lambda ctx: (ctx.mesh_of_one(), [Shard(0)]),
}
MESHES_OF_4: dict[str, Callable[[RankContext], tuple[DeviceMesh, list[Any]]]] = {
    "copies of rows": lambda ctx: (ctx.mesh_2d(2, 2), [Replicate(), Shard(0)]),
    "rows of copies": lambda ctx: (ctx.mesh_2d(2, 2), [Shard(0), Replicate()]),
    "rows and columns": lambda ctx: (ctx.mesh_2d(2, 2), [Shard(0), Shard(1)]),
    "rows twice": lambda ctx: (ctx.mesh(rows=2, rows_of_rows=2), [Shard(0), Shard(0)]),
}


def check(ctx: RankContext, mesh: DeviceMesh, placements: list[Any], **options: Any) -> None:
    tensors = placed(ctx, mesh, placements)
    plan = whole_matrices(tensors, rule=rule, **options)
    seen: list[str] = []

    def fn(whole: Tensor, matrix: Matrix) -> Tensor:
        seen.append(matrix.name)
        name, _, index = matrix.name.removesuffix("]").partition("[")
        assert torch.equal(whole.cpu(), parts(name)[int(index or 0)])
        assert [*tensors][matrix.tensor] == name
        return whole.cumsum(0)

    results = plan.run(fn, list(tensors.values()))
    for name, result in zip(SHAPES, results, strict=True):
        expected = values_of(name).cumsum(-2)
        torch.testing.assert_close(result.full_tensor().cpu(), expected, rtol=1e-6, atol=1e-6)
        assert result.placements == tensors[name].placements
    assert sorted(seen) == sorted(name for name, owner in plan.owners.items() if owner == ctx.rank)


@pytest.mark.parametrize("bucket_nbytes", [1, 1 << 20], ids=["one by one", "together"])
@pytest.mark.parametrize("mesh", MESHES)
@distributed(2, 3)
def test_each_matrix_is_whole_once_and_comes_back(ctx: RankContext, mesh: str, bucket_nbytes: int) -> None:
    check(ctx, *MESHES[mesh](ctx), bucket_nbytes=bucket_nbytes)


@pytest.mark.every_case
@pytest.mark.parametrize("copies", ["share", "each"])
@pytest.mark.parametrize("mesh", MESHES_OF_4)
@distributed(4)
def test_each_matrix_is_whole_on_two_axes(ctx: RankContext, mesh: str, copies: str) -> None:
    check(ctx, *MESHES_OF_4[mesh](ctx), copies=copies)


@distributed(2)
def test_equal_matrices_come_together(ctx: RankContext) -> None:
    tensors = [torch.full((4, 6), float(i), device=ctx.device_type) for i in range(6)]
    sharded = [distribute_tensor(each, ctx.mesh_1d(), [Shard(0)]) for each in tensors]
    shapes: list[tuple[int, ...]] = []

    def fn(batch: Tensor, matrices: Sequence[Matrix]) -> Tensor:
        shapes.append(tuple(batch.shape))
        assert [float(each[0, 0]) for each in batch] == [float(matrix.tensor) for matrix in matrices]
        return batch + 1

    results = whole_matrices(sharded).run_batched(fn, sharded)
    assert shapes == [(3, 4, 6)]
    assert [float(each.full_tensor()[0, 0]) for each in results] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


@distributed(2)
def test_matrices_travel_in_the_dtype_that_is_asked_for(ctx: RankContext) -> None:
    tensor = distribute_tensor(torch.randn(4, 4, device=ctx.device_type), ctx.mesh_1d(), [Shard(0)])
    plan = whole_matrices([tensor], dtype=torch.bfloat16)
    dtypes = []

    def fn(whole: Tensor, _: Matrix) -> Tensor:
        dtypes.append(whole.dtype)
        return whole.float()

    (result,) = plan.run(fn, [tensor])
    assert dtypes in ([], [torch.bfloat16])
    assert result.dtype is torch.bfloat16
    assert torch.equal(result.full_tensor(), tensor.full_tensor().bfloat16())


@distributed(2)
def test_a_matrix_knows_the_position_of_its_tensor_among_all_dtypes(ctx: RankContext) -> None:
    kinds = [(4, torch.float32), (6, torch.float16), (8, torch.float32)]
    tensors = [
        distribute_tensor(torch.zeros(rows, 4, dtype=dtype, device=ctx.device_type), ctx.mesh_1d(), [Shard(0)])
        for rows, dtype in kinds
    ]

    def fn(whole: Tensor, matrix: Matrix) -> Tensor:
        assert (whole.size(0), whole.dtype) == kinds[matrix.tensor]
        return whole

    assert len(whole_matrices(tensors).run(fn, tensors)) == 3


@distributed(2)
def test_a_run_takes_no_more_memory_than_the_plan_says(ctx: RankContext) -> None:
    shapes = [(64, 64), (64, 32), (48, 64), (64, 64), (16, 64), (64, 64), (80, 64)]
    tensors = [distribute_tensor(torch.randn(each, device="cpu"), ctx.mesh_1d(), [Shard(0)]) for each in shapes]
    for bucket_nbytes in (1, 1 << 15, 1 << 20):
        plan = whole_matrices(tensors, bucket_nbytes=bucket_nbytes)
        with NewMemory() as held:
            plan.run_batched(lambda batch, _: batch + 1, tensors)
        (domain,) = plan.domains
        # gloo's threads drop a message a moment after they have told that it was sent.
        slack = 4096 + 2 * max(max(*each.shards, *each.returned) for each in domain.plan.traffic)
        assert held.peak <= plan.temporary_nbytes + plan.kept_nbytes + slack, (held.peak, str(plan))
        if bucket_nbytes == 1:  # two matrices of 16 KiB, one of them with its result and on its way back
            assert plan.temporary_nbytes <= 2 * 3 * 64 * 80 * 4


# Bad input


def _whole(ctx: RankContext, shape: tuple[int, ...], placement: Any = None) -> DTensor:
    value = torch.ones(shape, device=ctx.device_type)
    return DTensor.from_local(value, ctx.mesh_1d(), [placement or Shard(0)], run_check=False)


def _of_nine_rows(ctx: RankContext) -> DTensor:
    """A shard of another size on rank 1."""
    local, whole = torch.ones(4 - ctx.rank, 4, device=ctx.device_type), {"shape": torch.Size((9, 4)), "stride": (4, 1)}
    return DTensor.from_local(local, ctx.mesh_1d(), [Shard(0)], run_check=False, **whole)


REFUSED: dict[str, Callable[[RankContext], Any]] = {
    "no matrix": lambda ctx: whole_matrices({"norm.weight": _whole(ctx, (4,))}),
    "a rule that does not fit": lambda ctx: whole_matrices(
        {"qkv": _whole(ctx, (4, 3))}, rule=lambda *_: MatrixRule.rows(4, 2)
    ),
    "a plain tensor": lambda ctx: whole_matrices({"router": torch.ones(4, 4)}),
    "a pending sum": lambda ctx: whole_matrices({"w": _whole(ctx, (4, 4), Partial())}),
    "no bytes": lambda ctx: whole_matrices({"w": _whole(ctx, (4, 4))}, bucket_nbytes=0),
    "an unknown word": lambda ctx: whole_matrices({"w": _whole(ctx, (4, 4))}, copies="shared"),  # type: ignore[arg-type]
    "other tensors on rank 1": lambda ctx: whole_matrices({f"w{ctx.rank}": _whole(ctx, (4, 4))}),
    "a shard of another size on rank 1": lambda ctx: whole_matrices({"w": _of_nine_rows(ctx)}),
    "too few tensors": lambda ctx: whole_matrices({"w": _whole(ctx, (4, 4))}).run(lambda whole, _: whole, []),
    "Muon: negative": lambda ctx: Muon([_whole(ctx, (4, 4))], lr=-1.0),
    "Muon: an unknown word": lambda ctx: Muon([_whole(ctx, (4, 4))], adjust_lr_fn="rms"),
    "Muon: too many steps": lambda ctx: Muon([_whole(ctx, (4, 4))], ns_steps=100),
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", REFUSED)
@distributed(2)
def test_bad_input_is_refused_on_all_ranks(ctx: RankContext, case: str) -> None:
    TEXTS.check(case, error_of(lambda: REFUSED[case](ctx)), among=[*REFUSED, *FAILURES])


FAILURES: dict[str, Callable[[Tensor, Matrix], Any]] = {
    "it raises": lambda whole, matrix: 1 / 0,
    "another shape": lambda whole, matrix: whole.T,
    "no tensor": lambda whole, matrix: None,
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", FAILURES)
@distributed(2)
def test_all_ranks_hear_of_a_failure_on_one(ctx: RankContext, case: str) -> None:
    tensors = placed(ctx, ctx.mesh_1d(), [Shard(0)])
    plan = whole_matrices(tensors, rule=rule, bucket_nbytes=1)

    def fn(whole: Tensor, matrix: Matrix) -> Tensor:
        return FAILURES[case](whole, matrix) if matrix.name == "b" else whole

    found = error_of(lambda: plan.run(fn, list(tensors.values())))
    TEXTS.check(case, found.replace(f"owner is rank {plan.owners['b']}", "owner is rank OWNER"))
    results = plan.run(lambda whole, _: whole, list(tensors.values()))  # and the plan goes on
    assert all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in zip(results, tensors.values(), strict=True))


@distributed(2)
def test_all_ranks_hear_of_a_tensor_that_is_placed_otherwise_on_one(ctx: RankContext) -> None:
    plan = whole_matrices({"w": _whole(ctx, (4, 4))})
    given = _whole(ctx, (4, 4)) if ctx.rank == 0 else _whole(ctx, (8, 2), Shard(1))
    found = error_of(lambda: plan.run(lambda whole, _: whole, [given])).replace("\n", " ")
    text = "whole_matrices: what is given for 'w' is not placed as planned: expected a DTensor of shape (8, 4) with"
    assert found.startswith(f"RuntimeError: on rank 1: {text}" if ctx.rank == 0 else f"ValueError: {text}")


# Meshes of two tensors.
OVERLAPPING: dict[str, Callable[[RankContext], dict[str, DeviceMesh]]] = {
    # each rank shares no mesh with one of the others
    "axes": lambda ctx: {"a": ctx.mesh_2d(2, 2)["replicate"], "b": ctx.mesh_2d(2, 2)["shard"]},
    "some ranks": lambda ctx: {"a": DeviceMesh(ctx.device_type, [0, 1]), "b": ctx.mesh_1d()},
    "three of four": lambda ctx: {n: DeviceMesh(ctx.device_type, r) for n, r in (("a", [2, 3]), ("b", [0, 1, 2]))},
    # ranks 2 and 3 have copies, and owners of their own
    "copies": lambda ctx: dict.fromkeys("ab", ctx.mesh_2d(2, 2)),
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", OVERLAPPING)
@distributed(4)
def test_ranks_that_do_not_wait_for_the_one_that_fails_hear_of_it(ctx: RankContext, case: str) -> None:
    """Owners up to rank ``last`` fail."""
    last, tensors = 2 if case == "three of four" else 1, {}
    for name, mesh in OVERLAPPING[case](ctx).items():
        if mesh.get_coordinate() is not None:
            placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
            tensors[name] = distribute_tensor(torch.ones(4, 4, device=ctx.device_type), mesh, placements)
    plan = whole_matrices(tensors, copies="each")

    for name in ("a", "b"):

        def fn(whole: Tensor, matrix: Matrix, name: str = name) -> Tensor:
            return whole.no_such_method() if ctx.rank <= last and matrix.name == name else whole

        found = error_of(lambda fn=fn: plan.run(fn, list(tensors.values())))  # type: ignore[misc]
        assert f"the function failed on '{name}', whose owner is rank" in found
    assert len(plan.run(lambda whole, _: whole, list(tensors.values()))) == len(tensors)


# Muon


def _mlp(ctx: RankContext, mesh: DeviceMesh | None = None) -> Any:
    return shard_units(seeded(MLP), mesh=mesh or ctx.mesh_1d())


def _made(ctx: RankContext, num_steps: int = 0, mesh: DeviceMesh | None = None) -> tuple[Any, Muon]:
    """A model and its optimizer."""
    model = _mlp(ctx, mesh)
    optimizer = Muon(muon_groups(model, verbose=False), lr=0.05)
    _step(ctx, model, optimizer, range(num_steps))
    return model, optimizer


def _step(ctx: RankContext, model: Any, optimizer: Any, seeds: Any = range(2)) -> list[Tensor]:
    return train_steps(ctx, model, optimizer, seeds, alike=True)


def _values(model: nn.Module, optimizer: optim.Optimizer) -> list[Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [
        (each.to_local() if isinstance(each, DTensor) else each).detach().clone()
        for each in [*model.parameters(), *states]
    ]


@distributed(2)
def test_a_step_that_fails_on_one_rank_changes_nothing(ctx: RankContext) -> None:
    model, optimizer = _made(ctx, 2)
    before = _values(model, optimizer)
    patch = pytest.MonkeyPatch()
    if ctx.rank == 1:
        patch.setattr("fsdp2.optim.muon.optimizer.newton_schulz", lambda batch, *_: batch.no_such_method())
    assert "whose owner is rank 1: AttributeError" in error_of(lambda: _step(ctx, model, optimizer))
    patch.undo()
    optimizer.zero_grad()
    assert all(map(torch.equal, _values(model, optimizer), before))
    _step(ctx, model, optimizer)


@distributed(2)
def test_a_gradient_on_one_rank_only_is_zero_on_the_other_and_none_leaves_parameters_alone(ctx: RankContext) -> None:
    """The messages are the same; all ranks step the parameter that has one, and no other."""
    values = []
    for is_missing in (True, False):
        model, optimizer = _made(ctx)
        before = whole(model)
        name, param = next((name, param) for name, param in model.named_parameters() if param.ndim == 2)
        grad = torch.ones_like(param)
        if ctx.rank == 1:
            grad.to_local().zero_()
        param.grad = None if is_missing and ctx.rank == 1 else grad
        optimizer.step()
        values.append(_values(model, optimizer))
        assert [each for each, value in whole(model).items() if not torch.equal(value, before[each])] == [name]
        assert {*optimizer.state} == {param}
    assert all(map(torch.equal, *values))


@pytest.mark.parametrize("overlaps", [False, True])
@distributed(2)
def test_a_gradient_that_is_placed_otherwise_on_one_rank_is_refused_on_all(ctx: RankContext, overlaps: bool) -> None:
    model, optimizer = _made(ctx)
    param = next(param for param in model.parameters() if param.ndim == 2)
    whole = torch.ones(param.shape, device=ctx.device_type)
    if ctx.rank == 1:
        param.grad = distribute_tensor(whole, ctx.mesh_1d(), [Shard(1)], src_data_rank=None)
    if overlaps:
        with optimizer.overlap_backward():
            early = optimizer._early
            assert early is not None
            for position in range(optimizer.plan.num_tensors):
                early.land(position)
    kind = "ValueError: Muon" if ctx.rank == 1 else "RuntimeError: on rank 1: Muon"
    found = error_of(optimizer.step).replace("\n", " ")
    assert found.startswith(f"{kind}: the gradient of a parameter of shape")
    assert "placements (Shard(dim=1),), expected" in found


@distributed(2)
def test_groups_have_options_of_their_own(ctx: RankContext) -> None:
    model = _mlp(ctx)
    names = [name for name, param in model.named_parameters() if param.ndim == 2]
    params = dict(model.named_parameters())
    groups = [
        {"params": [params[names[0]]], "ns_steps": 1, "lr": 0.0, "weight_decay": 0.0},
        {"params": [params[name] for name in names[1:]], "ns_steps": 3, "lr": 0.1},
    ]
    optimizer = Muon(groups)
    before = [params[name].full_tensor().clone() for name in names]
    _step(ctx, model, optimizer, range(1))
    changed = [not torch.equal(params[name].full_tensor(), old) for name, old in zip(names, before, strict=True)]
    assert changed == [False, *[True] * (len(names) - 1)]
    assert len(optimizer.plan.owners) == len(names)


@distributed(2)
def test_a_scheduler_and_hooks_work_as_with_any_optimizer(ctx: RankContext) -> None:
    _, optimizer = _made(ctx)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("behind"))
    assert float(optimizer.step(lambda: torch.tensor(3.0))) == 3.0
    scheduler.step()
    assert calls == ["before", "behind"]
    assert optimizer.param_groups[0]["lr"] == 0.025


@distributed(2)
def test_a_model_that_moves_to_another_mesh_is_planned_anew(ctx: RankContext) -> None:
    moved, stays = _made(ctx, 2), _made(ctx, 2)
    reshard_to(*moved, DeviceMesh(ctx.device_type, [[0], [1]]))
    torch.testing.assert_close(_step(ctx, *moved), _step(ctx, *stays), rtol=1e-3, atol=1e-4)


# Checkpoints


@pytest.mark.ci
@pytest.mark.every_case
@pytest.mark.parametrize("ranks", [(2, 4), (4, 2)], ids=["2 to 4", "4 to 2"])
@distributed(4)
def test_training_goes_on_from_a_checkpoint_of_another_number_of_ranks(
    ctx: RankContext, ranks: tuple[int, int], tmp_path: Path
) -> None:
    """Of two ranks, both halves do the same."""
    first, second = (ctx.mesh_1d() if number == 4 else ctx.mesh_2d(2, 2)["shard"] for number in ranks)
    saved, loaded = _made(ctx, 2, first), _made(ctx, 0, second)
    dcp.save(states_of(*saved), checkpoint_id=tmp_path)
    with torch.no_grad():
        for param in loaded[0].parameters():
            param.zero_()
    load_states(*loaded, tmp_path)
    found, expected = (_step(ctx, *each, range(2, 4)) for each in (loaded, saved))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)  # bf16, of gradients that differ by rounding


@distributed(2)
def test_states_lie_as_those_of_a_sharded_optimizer(ctx: RankContext) -> None:
    model, optimizer = _made(ctx, 2)
    states = get_optimizer_state_dict(model, optimizer)
    for name, param in model.named_parameters():
        state: Any = states["state"][name]
        if param.ndim == 2 and not name.startswith("exit"):
            assert {*state} == {"momentum_buffer"}, name
        for value in state.values():
            assert not isinstance(value, DTensor) or value.placements == param.placements


@distributed(2)
def test_state_dict_of_another_optimizer_is_refused(ctx: RankContext) -> None:
    model = _mlp(ctx)
    matrices = [param for param in model.parameters() if param.ndim == 2]
    optimizer = Muon(matrices)
    _step(ctx, model, optimizer)
    before = _values(model, optimizer)
    for make in (optim.AdamW, partial(optim.SGD, lr=0.1, momentum=0.9)):
        other = make(matrices)
        _step(ctx, model, other)
        text = error_of(lambda other=other: optimizer.load_state_dict(other.state_dict()))  # type: ignore[misc]
        assert text.startswith("ValueError: Muon: the state dict is of another optimizer. Param group 0 has"), text
    states = [value.to_local() for state in optimizer.state.values() for value in state.values()]
    assert all(map(torch.equal, states, before[-len(states) :]))


@pytest.mark.ci
@distributed(2)
def test_state_dict_of_torchs_muon_is_taken(ctx: RankContext) -> None:
    model = _mlp(ctx)
    matrices = [param for param in model.parameters() if param.ndim == 2]
    theirs = optim.Muon(matrices, lr=0.3)
    _step(ctx, model, theirs)
    ours = Muon(matrices)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.3
    for param in matrices:
        mine, its = (each.state[param]["momentum_buffer"].to_local() for each in (ours, theirs))
        assert torch.equal(mine, its)
    _step(ctx, model, ours)
