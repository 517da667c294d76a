"""Communication of the user's own: memory that is used over and over, failures, and what the setters refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2 import fully_shard
from fsdp2.core.runtime.unit import unit_of
from tests.distributed.support import Scaled, Stack, batch, seeded, shard, sharded, step
from tests.harness.comms import CountingAllGather, CountingReduceScatter, direct_from
from tests.harness.compare import compare_values
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import golden_on_ranks
from tests.harness.messages import error_of, one_line


def _trained(model: Any, num_steps: int = 3) -> list[Tensor]:
    """Losses, and the shards of the last parameters and gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for index in range(num_steps):
        optimizer.zero_grad()
        seen.append(step(model, index))
        optimizer.step()
    seen += [parameter.to_local().clone() for parameter in model.parameters()]
    return seen + [parameter.grad.to_local().clone() for parameter in model.parameters()]


def _uneven() -> Any:
    return seeded(lambda: nn.Sequential(nn.Linear(32, 7), nn.Linear(7, 5), nn.Linear(5, 3)))


def _set_comms(model: Any, gather: Any, reduce: Any) -> None:
    for module in (*model.blocks, model):
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(reduce)


class _OneArena:
    """All messages of all units lie at the start of one buffer, whatever is in flight."""

    def __init__(self) -> None:
        super().__init__(is_async=True)
        self._arena = torch.empty(1 << 16, dtype=torch.uint8)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        (numel,) = size
        return self._arena[: numel * dtype.itemsize].view(dtype)


class _ArenaAllGather(_OneArena, CountingAllGather):
    pass


@distributed(2, 4)
def test_messages_in_flight_may_lie_in_the_same_memory(ctx: RankContext) -> None:
    """Prefetch lists put three gathers in flight, which all use one buffer."""

    def prefetching() -> Any:
        model = sharded(ctx, num_blocks=4)
        blocks = list(model.blocks)
        model.set_modules_to_forward_prefetch(blocks[:3])
        for block, *following in zip(blocks, blocks[1:], blocks[2:], strict=False):
            block.set_modules_to_forward_prefetch(following)
        for block, *before in zip(blocks[::-1], blocks[-2::-1], blocks[-3::-1], strict=False):
            block.set_modules_to_backward_prefetch(before)
        return model

    expected = _trained(prefetching())
    model = prefetching()
    gather = _ArenaAllGather()
    for module in (*model.blocks, model):
        module.set_custom_all_gather(gather)
    compare_values("one buffer for all gathers", _trained(model), expected)
    assert gather.messages


class _FailsOnce(CountingAllGather):
    has_failed = False

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        if not self.has_failed:
            self.has_failed = True
            raise OSError("the network is gone")
        return super().__call__(*args, **kwargs)


def _infer(model: Any) -> None:
    with torch.inference_mode():
        model(batch())
    model.reshard()  # the root's parameters stay unsharded, and the optimizer is to have the shards


def _prefetch_in_vain(model: Any) -> None:
    model.blocks[0].unshard(async_op=True)
    model.blocks[0].reshard()


def _fail(model: Any) -> None:
    with pytest.raises(OSError, match="the network is gone"):
        step(model)


BEFORE: dict[str, tuple[type[CountingAllGather], Callable[[Any], None]]] = {
    "inference": (CountingAllGather, _infer),
    "a prefetch in vain": (CountingAllGather, _prefetch_in_vain),
    "a failure": (_FailsOnce, _fail),
}


@pytest.mark.every_case
@pytest.mark.parametrize("before", BEFORE)
@distributed(2)
def test_memory_that_is_kept_serves_training_after(ctx: RankContext, before: str) -> None:
    model, (gather, run) = sharded(ctx), BEFORE[before]
    _set_comms(model, gather(persistent=True), CountingReduceScatter(persistent=True))
    run(model)
    compare_values(f"after {before}", _trained(model), _trained(sharded(ctx)))


@distributed(2)
def test_switching_the_reduction_while_hsdp_accumulates_keeps_every_gradient(ctx: RankContext) -> None:
    """Sums that wait for the all-reduce lie as the plan says that made them; a custom comm has another plan."""

    def model_and_step(custom: bool) -> list[Tensor]:
        model = fully_shard(_uneven(), mesh=ctx.mesh_2d(1, 2))
        model.set_requires_all_reduce(False)
        step(model)
        if custom:
            model.set_custom_reduce_scatter(CountingReduceScatter())
            model.set_all_reduce_hook(lambda reduced: None)
        model.set_requires_all_reduce(True)
        step(model)
        return [parameter.grad.to_local().clone() for parameter in model.parameters()]

    torch.testing.assert_close(model_and_step(True), model_and_step(False))


@distributed(2)
def test_hook_gets_one_buffer_with_zeros_between_the_gradients(ctx: RankContext) -> None:
    seen: list[Tensor] = []
    torch.use_deterministic_algorithms(True)  # new memory is full of NaN
    try:
        with direct_from(0):  # what travels on its own is aligned
            model = fully_shard(_uneven(), mesh=ctx.mesh_1d())
            model.set_all_reduce_hook(lambda reduced: seen.append(reduced.clone()))
            step(model)
    finally:
        torch.use_deterministic_algorithms(False)
    gradients = torch.cat([parameter.grad.to_local().flatten() for parameter in model.parameters()])
    (flat,) = seen
    assert flat.dim() == 1
    assert flat.numel() > gradients.numel()
    assert torch.equal(flat[flat != 0].sort().values, gradients[gradients != 0].sort().values)


class Setter(NamedTuple):
    """A call that is refused, after another one."""

    name: str
    args: tuple[Any, ...] = ()
    before: tuple[Any, ...] = ()
    placed: str = ""  # on HSDP, a parameter on another mesh, or with a wire for gradients
    options: dict[str, Any] = {}  # noqa: RUF012  # nobody writes it


def _nothing(reduced: Tensor) -> None:
    """A hook."""


SYMM_MEM, PROCESS_GROUP = "set_symm_mem_for_comm", "set_allocate_memory_from_process_group_for_comm"
ALL_GATHER, REDUCE_SCATTER = "set_custom_all_gather", "set_custom_reduce_scatter"
# Named by its numbers: builds of torch with CUDA make no new stream without a GPU.
STREAM = torch.Stream(stream_id=0, device_index=0, device_type=1)
CASES = {
    "number as all-gather": Setter(ALL_GATHER, (3,)),
    "None as reduce-scatter": Setter(REDUCE_SCATTER, (None,)),
    "class as all-gather": Setter(ALL_GATHER, (fsdp2.core.comms.AllGather,)),
    "text as hook": Setter("set_all_reduce_hook", ("sum",)),
    "hook with a stream on HSDP": Setter("set_all_reduce_hook", (_nothing,), placed="HSDP", options={"stream": STREAM}),
    "memory of the process group beside a custom all-gather": Setter(
        PROCESS_GROUP, (True,), before=(ALL_GATHER, CountingAllGather())
    ),
    "memory of the process group beside a custom reduce-scatter": Setter(
        PROCESS_GROUP, (False,), before=(REDUCE_SCATTER, CountingReduceScatter())
    ),
    "symmetric memory beside a custom all-gather": Setter(SYMM_MEM, before=(ALL_GATHER, CountingAllGather())),
    "symmetric memory beside that of the process group": Setter(SYMM_MEM, before=(PROCESS_GROUP, True)),
    "symmetric memory on the CPU": Setter(SYMM_MEM),
    "symmetric memory by another backend": Setter(SYMM_MEM, ("NVSHMEM",)),
    "all-gather of two groups": Setter(ALL_GATHER, (CountingAllGather(),), placed="two meshes"),
    "reduce-scatter of two groups": Setter(REDUCE_SCATTER, (CountingReduceScatter(),), placed="two meshes"),
    "reduce-scatter of a unit with a wire": Setter(REDUCE_SCATTER, (CountingReduceScatter(),), placed="wire"),
    "memory of the process group for a unit with a wire": Setter(PROCESS_GROUP, (True,), placed="wire"),
    "hook of two groups": Setter("set_all_reduce_hook", (_nothing,), placed="two meshes"),
}


@pytest.mark.parametrize("case", CASES)
@golden_on_ranks()
def test_setting_is_refused_and_the_model_trains_as_before(ctx: RankContext, case: str) -> str:
    setter = CASES[case]

    def place(param: nn.Parameter) -> fsdp2.ParamPlacement | None:
        is_other = setter.placed == "two meshes" and param is model.exit.weight
        return fsdp2.ParamPlacement(None, ctx.mesh_2d(2, 1)["shard"]) if is_other else None

    wire = torch.bfloat16 if setter.placed == "wire" else None
    policy = fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.float32, reduce_wire=wire)
    model = seeded(Stack)
    mesh = ctx.mesh_2d(2, 1) if setter.placed == "HSDP" else ctx.mesh_1d()
    fully_shard(model, mesh=mesh, shard_placement_fn=place, mp_policy=policy)
    if setter.before:
        name, value = setter.before
        getattr(model, name)(value)
    unit = unit_of(model)
    assert unit is not None
    options = [group.options for group in unit.groups]
    error = error_of(lambda: getattr(model, setter.name)(*setter.args, **setter.options))
    assert [group.options for group in unit.groups] == options
    step(model)
    return error


@pytest.mark.parametrize("replicas", [1, 2])
@distributed(2)
def test_unit_with_scalars_takes_comms_and_a_hook(ctx: RankContext, replicas: int) -> None:
    mesh = ctx.mesh_2d(replicas, ctx.world_size // replicas)
    (model, expected), shapes = (shard(ctx, seeded(Scaled), mesh=mesh) for _ in range(2)), []
    gather, reduce = CountingAllGather(), CountingReduceScatter()
    _set_comms(model, gather, reduce)
    model.set_all_reduce_hook(lambda reduced: shapes.append(tuple(reduced.shape)))
    compare_values("with a scalar", _trained(model, num_steps=1), _trained(expected, num_steps=1))
    assert len(shapes) == 2
    assert min(shapes) == (1,)
    assert bool(gather.messages) is bool(reduce.messages) is (replicas == 1)


class _TooSmall(CountingAllGather):
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(7, dtype=torch.float64)


@golden_on_ranks()
def test_allocate_that_returns_another_tensor(ctx: RankContext) -> str:
    model = sharded(ctx)
    _set_comms(model, _TooSmall(), CountingReduceScatter())
    error = error_of(lambda: step(model))
    model.reset_iter_state()
    _set_comms(model, CountingAllGather(), CountingReduceScatter())
    step(model)
    return error


class _Managed(dist.ProcessGroup):
    """As torchft's: averages over ``ranks``, which change, and says nothing of their number to a mesh."""

    def __init__(self, ranks: dist.ProcessGroup) -> None:
        super().__init__(0, 1)
        self._ranks = ranks

    def configure(self, ranks: dist.ProcessGroup) -> None:
        self._ranks = ranks

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "managed"

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> dist.Work:
        assert options.reduceOp == dist.ReduceOp.AVG
        dist.all_reduce(*tensors, group=self._ranks)
        (tensor,) = tensors
        tensor /= self._ranks.size()
        return self._ranks.barrier()

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name


def _with_managed(replicas: dist.ProcessGroup, shards: dist.ProcessGroup, ranks: Any) -> Any:
    """A mesh of ``ranks`` whose replicate axis has a managed group of ``replicas``, and this group."""
    managed = _Managed(replicas)
    name = f"managed_{id(managed)}"
    dist.Backend.register_backend(name, lambda *_: managed, devices=["cpu"])
    dist.new_group(ranks=[dist.get_rank()], backend=name, use_local_synchronization=True)
    groups: Any = [managed, shards]
    return DeviceMesh.from_group(
        groups, "cpu", mesh=torch.tensor(ranks), mesh_dim_names=("dp_replicate", "dp_shard")
    ), managed


@pytest.mark.parametrize("has_hook", [False, True])
@distributed(4)
def test_a_managed_group_averages_over_the_replicas_of_the_moment(ctx: RankContext, has_hook: bool) -> None:
    """A mean over two replicas, as HSDP takes it, and then over this replica alone. Scalars are averaged, too."""
    hsdp, alone = ctx.mesh_2d(2, 2), ctx.mesh_2d(4, 1)
    shards = hsdp.get_group(1)
    mesh, managed = _with_managed(hsdp.get_group(0), shards, [dist.get_process_group_ranks(shards)])
    model, expected = (shard(ctx, seeded(Scaled), mesh=each) for each in (mesh, hsdp))
    on_shards = shard(ctx, seeded(Scaled), mesh=hsdp["shard"])
    if has_hook:  # the user's hook comes after the mean
        for each in (model, expected, on_shards):
            for module in (*each.blocks, each):
                module.set_all_reduce_hook(lambda reduced: reduced.mul_(2))
    for reference, group in ((expected, hsdp.get_group(0)), (on_shards, alone.get_group(1))):
        managed.configure(group)
        for each in (model, reference):
            each.zero_grad()
            step(each, ctx.rank)
        found, wanted = ([param.grad.to_local() for param in each.parameters()] for each in (model, reference))
        compare_values(f"mean over {group.size()} replicas", found, wanted)


@distributed(2)
def test_a_managed_group_elsewhere_is_refused(ctx: RankContext) -> None:
    hsdp = ctx.mesh_2d(2, 1)
    mesh, _ = _with_managed(hsdp.get_group(0), hsdp.get_group(1), [[0], [1]])
    error = error_of(lambda: fully_shard(seeded(Stack), mesh=mesh))
    assert "axis 0 of the mesh with shape (2, 1) has a _Managed, whose ranks change" in one_line(error)
    assert "with size 1: DeviceMesh.from_group(" in one_line(error)
