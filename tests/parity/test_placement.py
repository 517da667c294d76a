"""Where parameters lie: meshes, dims, groups of modules, experts on ranks of their own, and what is left alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_common as names_of_torch
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp2 import ExpertMeshes, ParamPlacement, clip_grad_norm_, expert_meshes, fully_shard, joined
from fsdp2.checkpoint import save_safetensors, stream_full_params
from fsdp2.core.runtime.unit import unit_of
from tests.harness.compare import Cases, as_torchs, compare, each_compared, hsdp, one_replica, trains_alike
from tests.harness.distributed import RankContext, distributed
from tests.harness.messages import error_of
from tests.harness.models import MLP, ParityModel, Transformer, Uneven
from tests.harness.runtimes import SUBJECT_IS_TORCH, Runtime, subject
from tests.harness.selection import long
from tests.harness.training import Case, Snapshot, Step, one_backward, shard_units_and_root, sharded, snapshot


def _last_dim_if_even(parameter: nn.Parameter) -> Shard | None:
    return Shard(-1) if parameter.shape[-1] % 4 == 0 else None


def _dim_1_of_matrices(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[0] != 33 else None


@pytest.mark.parametrize("placement_fn", [_last_dim_if_even, _dim_1_of_matrices])
@distributed(2, 4)
def test_shard_placement_fn_chooses_the_dim(ctx: RankContext, placement_fn) -> None:
    shard = sharded(shard_placement_fn=placement_fn)
    compare(Case(MLP, shard, gather_full=True), ctx.mesh_1d())
    compare(Case(Transformer, shard), ctx.mesh_1d())


@distributed(2)
def test_default_mesh_spans_all_ranks(ctx: RankContext) -> None:
    def shard(runtime, model: MLP, mesh) -> None:
        for unit in (*model.units(), model):
            runtime.fully_shard(unit)

    if torch.accelerator.is_available():
        return  # the default mesh is then one of GPUs, which these gloo ranks do not have
    compare(Case(MLP, shard), ctx.mesh_1d())


@pytest.mark.ci
@each_compared(4, mesh=hsdp, ci=("chosen dim",), long=("MLP", "Transformer"))
def test_hsdp_replicates_on_axis_0_and_shards_on_axis_1() -> Cases:
    whole = {model.__name__: Case(model, gather_full=True) for model in (Uneven, MLP, Transformer)}
    return {**whole, "chosen dim": Case(MLP, sharded(shard_placement_fn=_last_dim_if_even))}


@each_compared(2, 4)
def test_meshes_with_an_axis_of_one() -> Cases:
    return {
        "HSDP that only replicates": (lambda ctx: ctx.mesh_2d(ctx.world_size, 1), Case(MLP), Case(Uneven)),
        "HSDP that only shards": (one_replica, Case(MLP), Case(Uneven)),
        "one rank, without a partner": (RankContext.mesh_of_one, Case(MLP), Case(Uneven), Case(Transformer)),
    }


@distributed(2, 4)
def test_list_of_modules_makes_one_group(ctx: RankContext) -> None:
    def shard(runtime, model: Transformer, mesh) -> None:
        for block in model.blocks:
            runtime.fully_shard([block.attention_norm, block.attention], mesh=mesh)
            runtime.fully_shard([block.mlp_norm, block.mlp], mesh=mesh, reshard_after_forward=False)
        runtime.fully_shard([model.norm, model.output], mesh=mesh)
        runtime.fully_shard(model, mesh=mesh)

    compare(Case(Transformer, shard), ctx.mesh_1d())


@each_compared(2)
def test_groups_of_ones_own() -> Cases:
    both_ends = sharded(units=lambda model: [*model.blocks, [model.embedding, model.output], model])
    return {
        "list with both ends of a tie": Case(partial(Transformer, tied=True), both_ends),
        "nothing ignored by an empty list, as of axolotl": Case(MLP, sharded(ignored_params=[])),
    }


@distributed(2)
def test_ignored_parameters_stay_plain_and_local(ctx: RankContext) -> None:
    def shard(runtime, model: MLP, mesh) -> None:
        ignored = {model.entry.weight, model.blocks[1].up.bias, model.blocks[1].down.weight}
        shard_units_and_root(runtime, model, mesh, ignored_params=ignored)
        assert {parameter for parameter in model.parameters() if parameter in ignored} == ignored

    # Ignored parameters are not averaged, so ranks diverge and there is no one unsharded model to compare with.
    compare(Case(MLP, shard, unsharded=None), ctx.mesh_1d())


@trains_alike(2, 4, model=MLP, num_steps=1)
def test_class_is_both_the_original_and_fsdp_module(step: Step, model: ParityModel) -> list[Tensor]:
    step.note("names", [type(module).__name__ for module in model.modules()])
    step.note("original", [isinstance(model, MLP), isinstance(model.blocks[0], MLP)])
    fsdp = step.runtime and [isinstance(module, step.runtime.FSDPModule) for module in model.modules()]
    step.note("fsdp", fsdp)
    return one_backward(step, model)


# ``down`` plays the experts: sharded over one axis of the mesh, or replicated over it.


def with_experts(runtime: Runtime, model: MLP, mesh: Any, *, kind: str, by_torch: bool = True, **options: Any) -> None:
    """A program written for torch names a mesh through torch's own, private classes; ``ParamPlacement`` has a
    DeviceMesh."""
    if by_torch or runtime.name != "fsdp2":
        infos: dict[str, Any] = {
            "shard": names_of_torch.FSDPMeshInfo(mesh["shard"], shard_mesh_dim=0),
            "hsdp": names_of_torch.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0),
        }
        placement: Any = names_of_torch.ShardPlacementResult(Shard(1), infos[kind])
    else:
        placement = ParamPlacement(Shard(1), mesh if kind == "hsdp" else mesh[kind])
    experts = {block.down.weight: placement for block in model.blocks}
    shard_units_and_root(runtime, model, mesh._flatten("everybody"), shard_placement_fn=experts.get, **options)


def same_data_for_all(step: Step, model: MLP) -> list[Tensor]:
    """Experts are averaged over their own ranks only: with the same data everywhere, that is the global average."""
    step.rank = 0
    return one_backward(step, model)


@pytest.mark.parametrize("by_torch", [True, False])
@pytest.mark.parametrize("kind", ["shard", "hsdp"])
@pytest.mark.parametrize("reshard", [True, *long(False, 2)])
@distributed(4)
def test_experts_are_sharded_over_a_mesh_of_their_own(ctx: RankContext, by_torch: bool, kind: str, reshard) -> None:
    """An int suits the dense parameters: the experts' two ranks are no more than it asks for."""
    case = Case(
        MLP,
        partial(with_experts, kind=kind, by_torch=by_torch, reshard_after_forward=reshard),
        same_data_for_all,
        longest_axis=4,
    )
    compare(case, ctx.mesh_2d(2, 2))


@pytest.mark.skipif(SUBJECT_IS_TORCH, reason="looks at fsdp2's own groups")
@distributed(4)
def test_experts_are_one_group_and_the_rest_another(ctx: RankContext) -> None:
    mesh = ctx.mesh_2d(2, 2)
    torch.manual_seed(0)
    model = MLP()
    with_experts(subject(), model, mesh, kind="shard", by_torch=False)
    unit = unit_of(model.blocks[0])
    assert unit is not None
    names = [[param.name for param in group.params] for group in unit.groups]
    assert names == [["up.weight", "up.bias", "down.bias"], ["down.weight"]]


@as_torchs(4)
def test_experts_may_lie_on_a_full_mesh_of_their_own(ctx: RankContext, runtime: Runtime) -> dict[str, Snapshot]:
    """As torchtitan's experts do: DTensors on a mesh with all axes, of which torch's classes name one to shard over."""
    dense, sparse = ctx.mesh(dp=2, tp=2), ctx.mesh(experts_dp=2, ep=2)
    model = nn.Linear(6, 8)
    experts = nn.Parameter(distribute_tensor(model.weight.detach(), sparse, [Replicate(), Shard(0)]))
    model.weight = experts
    model.bias = nn.Parameter(distribute_tensor(model.bias.detach(), dense, [Replicate(), Shard(0)]))
    infos: Any = _get_mesh_info(sparse, runtime.DataParallelMeshDims(shard="experts_dp"))

    def place(param: nn.Parameter) -> Any:
        return names_of_torch.ShardPlacementResult(Shard(1), infos) if param is experts else None

    dims = runtime.DataParallelMeshDims(shard="dp")
    runtime.fully_shard(model, mesh=dense, dp_mesh_dims=dims, shard_placement_fn=place)
    return {name: snapshot(param, with_full=True) for name, param in model.named_parameters()}


@distributed(2)
def test_a_dtensor_keeps_the_mesh_that_was_given_for_it(ctx: RankContext) -> None:
    """Another mesh has the same ranks, as with one rank per expert, and cannot be joined with that of the DTensor."""
    mesh = ctx.mesh(expert=1, dp=2)
    for everybody in (None, mesh["expert", "dp"]._flatten("everybody")):
        linear = nn.Linear(4, 4)
        original = linear.weight.detach()
        linear.weight = nn.Parameter(distribute_tensor(original, mesh["expert"], [Shard(0)]))
        placed = {linear.weight: ParamPlacement(Shard(0), mesh["dp"])}
        fully_shard(linear, mesh=everybody, shard_placement_fn=placed.get)
        weight = linear.weight
        assert isinstance(weight, DTensor)
        assert weight.device_mesh.mesh_dim_names == ("dp", "expert")
        assert weight.to_local().shape == (2, 4)
        assert torch.equal(weight.full_tensor(), original)


DIM, NUM_EXPERTS, NUM_TOKENS = 6, 4, 8  # tokens of a rank


class Exchange(torch.autograd.Function):
    """An all-to-all of equal parts. Its backward is the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Exchange.apply(grad.contiguous(), ctx.group), None


class Experts(nn.Module):
    """Those that this rank holds. ``x``: ``[experts here, tokens, DIM]``."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, DIM, DIM) / DIM)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


class Moe(nn.Module):
    """Token i of a rank goes to expert i modulo the number of experts; the gate is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.gate = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)
        self.experts = Experts(NUM_EXPERTS)
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        by_expert = x.view(-1, NUM_EXPERTS, DIM).transpose(0, 1)  # [experts, tokens, DIM]
        if self.group is None:
            y = self.experts(by_expert)
        else:
            size = self.group.size()
            here = Exchange.apply(by_expert.contiguous(), self.group)
            here = here.view(size, NUM_EXPERTS // size, -1, DIM).transpose(0, 1).flatten(1, 2)
            back = self.experts(here).view(NUM_EXPERTS // size, size, -1, DIM).transpose(0, 1).contiguous()
            y = Exchange.apply(back, self.group).view(NUM_EXPERTS, -1, DIM)
        return x + torch.sigmoid(self.gate(x)) * y.transpose(0, 1).reshape(-1, DIM)


def seeded() -> Any:
    torch.manual_seed(0)
    return Moe()


def tokens(rank: int) -> Tensor:
    return torch.randn(NUM_TOKENS, DIM, generator=torch.Generator().manual_seed(rank))


def exchanging(ctx: RankContext, meshes: ExpertMeshes) -> Any:
    model = seeded().to(ctx.device_type)
    model.group = meshes.experts.get_group()
    size, rank = meshes.experts.size(), meshes.experts.get_local_rank()
    model.experts.weight = nn.Parameter(model.experts.weight.detach().chunk(size)[rank].clone())
    meshes.shard_experts(model.experts)
    return fully_shard(model, mesh=meshes.dense)


def meshes_of(ctx: RankContext, shape: tuple[int, ...]) -> ExpertMeshes:
    names = ("replicas", "shards", "experts")[-len(shape) :]
    mesh = ctx.mesh(**dict(zip(names, shape, strict=True)))
    return expert_meshes(mesh, experts="experts", shard="shards", replicate="replicas" if len(shape) == 3 else None)


@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (2, 1, 2)], ids=str)
@distributed(4)
def test_gradients_are_those_of_the_unsharded_model(ctx: RankContext, shape: tuple[int, ...]) -> None:
    meshes = meshes_of(ctx, shape)
    model, reference = exchanging(ctx, meshes), seeded()
    meshes.check(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, foreach=False) for each in (model, reference)]
    for step in range(2):
        model(tokens(step * 4 + ctx.rank).to(ctx.device_type)).square().mean().backward()
        reference(torch.cat([tokens(step * 4 + rank) for rank in range(4)])).square().mean().backward()
        for name, param in model.named_parameters():
            expected = reference.get_parameter(name).grad
            if name.startswith("experts"):
                expected = expected.chunk(meshes.experts.size())[meshes.experts.get_local_rank()]
            assert isinstance(param, DTensor)
            found = param.grad.full_tensor()  # type: ignore[union-attr]
            torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=1e-5, atol=1e-6, msg=lambda t, n=name: n + t)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@distributed(4)
def test_experts_learn_from_the_batches_that_are_real(ctx: RankContext) -> None:
    """Rank r has r + 1 batches. A rank whose batches have ended holds experts that others send tokens to, and sends
    its own tokens to theirs."""
    model, reference = exchanging(ctx, meshes_of(ctx, (2, 2))), seeded()
    for step, (batch, is_real) in enumerate(joined([tokens(4 * n + ctx.rank) for n in range(ctx.rank + 1)], model)):
        loss = model(batch.to(ctx.device_type)).square().mean()
        (loss if is_real else loss * float("nan")).backward()
        reference(torch.cat([tokens(4 * step + rank) for rank in range(step, 4)])).square().mean().backward()
    expected = reference.experts.weight.grad.chunk(2)[model.group.rank()]
    found = model.experts.weight.grad.full_tensor()
    torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=1e-5, atol=1e-6)
    found = model.entry.weight.grad.full_tensor()
    torch.testing.assert_close(found.cpu(), reference.entry.weight.grad.cpu(), rtol=1e-5, atol=1e-6)


@distributed(4)
def test_norm_has_the_experts_of_all_ranks_and_no_file_or_stream_takes_them_for_one(ctx: RankContext) -> None:
    """They have the same names on ranks that hold other ones."""
    meshes = meshes_of(ctx, (2, 2))
    model, reference = exchanging(ctx, meshes), seeded()
    model(tokens(ctx.rank).to(ctx.device_type)).square().mean().backward()
    reference(torch.cat([tokens(rank) for rank in range(4)])).square().mean().backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    norm = clip_grad_norm_(model.parameters(), 0.01)
    torch.testing.assert_close(norm.cpu(), expected.cpu(), rtol=1e-5, atol=0)
    mine = reference.experts.weight.grad.chunk(2)[meshes.experts.get_local_rank()]
    torch.testing.assert_close(model.experts.weight.grad.full_tensor().cpu(), mine.cpu(), rtol=1e-5, atol=1e-8)
    for use in (stream_full_params, lambda model: save_safetensors(model, "unused")):
        assert "'experts.weight' is of experts that differ between ranks" in error_of(lambda use=use: use(model))


def _refusal(meshes: ExpertMeshes, model: nn.Module) -> str:
    return error_of(lambda: meshes.check(model)).replace("\n", " ")


@distributed(4)
def test_what_is_on_other_ranks_or_divided_by_another_number_is_found(ctx: RankContext) -> None:
    meshes = meshes_of(ctx, (2, 2))
    model = seeded().to(ctx.device_type)
    fully_shard(model.experts, mesh=meshes.shards)  # as people write it
    fully_shard(model, mesh=meshes.dense)
    assert _refusal(meshes, model) == (
        "ValueError: ExpertMeshes.check: unit 'experts', with 'weight', divides gradients by 2, expected 4: they come "
        "from tokens of so many ranks. Call set_gradient_divide_factor(4) on it, or meshes.shard_experts."
    )
    model.experts.set_gradient_divide_factor(4)
    meshes.check(model)
    elsewhere = fully_shard(nn.Linear(4, 4).to(ctx.device_type), mesh=meshes.experts)
    if ctx.rank == 0:
        assert _refusal(meshes, elsewhere) == (
            "ValueError: ExpertMeshes.check: unit '(root)', with 'weight', 'bias', is sharded over the ranks [0, 1], "
            "expected [0, 1, 2, 3] (dense) or [0, 2] (experts). Pass mesh=meshes.dense to fully_shard, or call "
            "meshes.shard_experts."
        )
    assert "experts is 'experts', shard 'dp' and replicate None" in error_of(
        lambda: expert_meshes(ctx.mesh(shards=2, experts=2), experts="experts", shard="dp")
    )
    assert "got a mesh" in error_of(lambda: meshes.shard_experts(nn.Linear(4, 4), mesh=meshes.dense))
