"""``reshard_to``: after a move, a model trains bit for bit as one that was loaded from a checkpoint on the new mesh."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2
from fsdp2 import MixedPrecisionPolicy
from fsdp2.checkpoint import reshard_to
from fsdp2.core.comm.offload import StagedOffloadPolicy
from fsdp2.core.trees import find_tensors
from fsdp2.report import trace
from fsdp2.tensors import BFloat16AllGatherTensor, wrap_parameters
from tests.distributed.support import seeded, shard_each, shard_units
from tests.harness.compare import compare_values
from tests.harness.distributed import RankContext, distributed
from tests.harness.messages import error_of
from tests.harness.models import MLP, Transformer
from tests.harness.selection import long
from tests.harness.training import Step, one_backward
from tests.parity.setups import load_states, states_of, train_steps

Ranks = list[int] | list[list[int]]

MOVES: dict[str, tuple[Ranks, Ranks]] = {
    "4 to 2": ([0, 1, 2, 3], [0, 1]),
    "2 to 4": ([0, 1], [0, 1, 2, 3]),
    "2 to 3": ([0, 1], [0, 1, 2]),
    "3 to 4": ([0, 1, 2], [0, 1, 2, 3]),
    "other ranks": ([0, 1], [2, 3]),
    "FSDP to HSDP": ([0, 1, 2, 3], [[0, 1], [2, 3]]),
    "HSDP to FSDP": ([[0, 1], [2, 3]], [0, 1, 2, 3]),
    "HSDP to fewer": ([[0, 1], [2, 3]], [1, 2, 3]),
    "one to three": ([2], [0, 1, 2]),
}


class Parts(nn.Module):
    """Sizes that no number of ranks divides, a scalar, a tie, a frozen and an ignored parameter, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.blocks[1].weight = self.blocks[0].weight
        self.norm = nn.BatchNorm1d(7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(3, 7), requires_grad=False)
        self.ignored = nn.Parameter(torch.randn(7))
        self.register_buffer("table", torch.randn(7), persistent=False)

    def batch(self, generator: torch.Generator) -> tuple[Tensor]:
        return (torch.randn(4, 5, generator=generator),)

    def loss(self, output: Tensor, batch: tuple[Any, ...]) -> Tensor:
        return output.square().mean()

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.scale
        return self.norm(x) @ self.frozen.T + (x * self.ignored * self.table).sum(1, keepdim=True)


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _parts(mesh: DeviceMesh) -> Any:
    model = Parts()
    return shard_each(model.entry, model, mesh=mesh, ignored_params={model.ignored})


def _wired(mesh: DeviceMesh) -> Any:
    model = Transformer()
    wrap_parameters(model, BFloat16AllGatherTensor)
    return shard_units(model, mesh=mesh)


MODELS: dict[str, Callable[[DeviceMesh], Any]] = {
    "parts": _parts,
    "untied": lambda mesh: shard_units(Transformer(), mesh=mesh),
    "transformer": lambda mesh: shard_units(Transformer(tied=True), mesh=mesh),
    "wire format": _wired,
    "mixed precision": lambda mesh: shard_units(MLP(), mesh=mesh, mp_policy=MIXED),
    "dim 1": lambda mesh: shard_units(MLP(), mesh=mesh, shard_placement_fn=lambda param: Shard(param.dim() - 1)),
    "offloaded": lambda mesh: shard_units(MLP(), mesh=mesh, offload_policy=StagedOffloadPolicy()),
}


def _foreach(model: nn.Module) -> bool | None:
    """torch's optimizers take foreach on a device, and DTensor's does not mix with plain tensors."""
    return False if isinstance(model, Parts) else None


def _adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=0.01, foreach=_foreach(model))


def _groups(model: nn.Module) -> optim.Optimizer:
    params = list(model.parameters())
    groups = [{"params": params[::2], "lr": 0.1, "momentum": 0.9}, {"params": params[1::2], "lr": 0.01}]
    return optim.SGD(groups, momentum=0.5, nesterov=True, foreach=_foreach(model))


def _flat(model: nn.Module) -> optim.Optimizer:
    return fsdp2.optim.flatten_optimizer(_adamw(model))


def _in_bytes(model: nn.Module) -> optim.Optimizer:
    return fsdp2.optim.AdamW8bit(model.parameters(), lr=0.01, block_size=16)


OPTIMIZERS = {"AdamW": _adamw, "SGD": _groups, "flat": _flat, "8 bit": _in_bytes}


@dataclass
class Job:
    """A model with its optimizer on some of the ranks."""

    model: Any
    optimizer: optim.Optimizer

    def train(self, ctx: RankContext, steps: range) -> list[Tensor]:
        return train_steps(ctx, self.model, self.optimizer, steps)

    def tensors(self) -> dict[str, Tensor]:
        """What this rank has of everything that training changes."""
        found: dict[str, Any] = {**self.model.state_dict()}
        for name, param in self.model.named_parameters():
            found[f"{name}.grad"] = param.grad
            found.update({f"{name}.{entry}": value for entry, value in self.optimizer.state.get(param, {}).items()})
        return {name: _local(value) for name, value in found.items() if isinstance(value, Tensor)}


_compare = functools.partial(compare_values, "moved")


def _local(value: Tensor) -> Tensor:
    local = value.detach()
    local = local.to_local() if isinstance(local, DTensor) else local
    return torch.empty(local.shape, dtype=local.dtype).copy_(local)  # of a subclass, the values


def _job(ctx: RankContext, ranks: Ranks, build: str, optimizer: str, seed: int = 0) -> Job:
    model = seeded(lambda: MODELS[build](DeviceMesh(ctx.device_type, ranks)), seed)
    return Job(model, OPTIMIZERS[optimizer](model))


def _flattened(ranks: Ranks) -> list[int]:
    return torch.tensor(ranks).flatten().tolist()


def _loaded_from_checkpoint(
    ctx: RankContext, job: Job, old: Ranks, new: Ranks, build: str, optimizer: str, folder: Path
) -> Job:
    """``job``, which is on ``old``, saved and loaded into another model on ``new``."""
    groups = [dist.new_group(sorted(_flattened(ranks))) for ranks in (old, new)]
    if ctx.rank in _flattened(old):
        dcp.save(states_of(job.model, job.optimizer), checkpoint_id=folder, process_group=groups[0])
    dist.barrier()
    other = _job(ctx, new, build, optimizer, seed=7)
    if ctx.rank in _flattened(new):
        load_states(other.model, other.optimizer, folder, process_group=groups[1])
    return other


def _read_plain(job: Job) -> dict[str, Any]:
    """Buffers, the ignored parameter and its states: nothing makes them equal on all ranks."""
    plain = {"ignored": job.model.ignored.detach(), **dict(job.model.named_buffers())}
    return copy.deepcopy({"plain": plain, "states": job.optimizer.state.get(job.model.ignored, {})})


def _write_plain(job: Job, found: dict[str, Any]) -> None:
    own = {"ignored": job.model.ignored.data, **dict(job.model.named_buffers())}
    for name, value in found["plain"].items():
        own[name].copy_(value)
    job.optimizer.state[job.model.ignored] = found["states"]


CASES = [
    ("2 to 3", "parts", "AdamW"),
    ("4 to 2", "transformer", "AdamW"),
    ("HSDP to fewer", "parts", "SGD"),
    *[(move, "parts", "AdamW") for move in MOVES if move != "2 to 3"],
    *[("2 to 3", build, "AdamW") for build in MODELS if build != "parts"],
    *[("FSDP to HSDP", build, "SGD") for build in MODELS if build != "wire format"],
    *[("HSDP to FSDP", build, "flat") for build in ("parts", "mixed precision", "offloaded")],
    ("4 to 2", "mixed precision", "flat"),
    ("2 to 4", "wire format", "AdamW"),
    ("2 to 3", "transformer", "8 bit"),
]


@pytest.mark.ci
@pytest.mark.parametrize("case", [*CASES[:1], *long(*CASES[1:])], ids=lambda case: ", ".join(case))
@distributed(4)
def test_moved_model_trains_as_one_loaded_from_a_checkpoint(ctx: RankContext, case: Any, tmp_path: Path) -> None:
    move, build, optimizer = case
    old, new = MOVES[move]
    job = _job(ctx, old, build, optimizer)
    if ctx.rank in _flattened(old):
        job.train(ctx, range(2))
        job.optimizer.param_groups[0]["lr"] = 0.03
    loaded = _loaded_from_checkpoint(ctx, job, old, new, build, optimizer, tmp_path)
    mine = _read_plain(job) if build == "parts" else None
    told = [copy.deepcopy(mine)]
    dist.broadcast_object_list(told, src=_flattened(old)[0])
    params, group = list(job.model.parameters()), job.optimizer.param_groups[0]

    takes_part = reshard_to(job.model, job.optimizer, DeviceMesh(ctx.device_type, new))

    assert takes_part is (ctx.rank in _flattened(new))
    assert all(a is b for a, b in zip(job.model.parameters(), params, strict=True))
    assert job.optimizer.param_groups[0] is group
    if not takes_part:
        assert not job.optimizer.state
        assert sum(_local(each).numel() for each in params if isinstance(each, DTensor) and each.dim()) == 0
        return
    if mine is not None:
        _write_plain(loaded, mine if ctx.rank in _flattened(old) else told[0])
    groups = [[{**group, "params": None} for group in each.optimizer.param_groups] for each in (job, loaded)]
    assert groups[0] == groups[1]
    _compare([job.tensors(), *job.train(ctx, range(2, 4))], [loaded.tensors(), *loaded.train(ctx, range(2, 4))])
    _compare(job.tensors(), loaded.tensors())


@pytest.mark.ci
@distributed(4)
def test_gradients_move_too(ctx: RankContext) -> None:
    """Between backward and step: the step after the move does what the step before it would have done."""
    old, new = MOVES["FSDP to HSDP"]
    job, same = (_job(ctx, old, "transformer", "AdamW") for _ in range(2))
    for each in (job, same):
        each.train(ctx, range(2))
        one_backward(Step(2, ctx.rank, None), each.model)
    same.optimizer.step()
    for each in (job, same):
        reshard_to(each.model, each.optimizer, DeviceMesh(ctx.device_type, new))
    job.optimizer.step()
    _compare(job.tensors(), same.tensors())


@pytest.mark.ci
@distributed(4)
def test_moving_back_and_forth_changes_no_bit(ctx: RankContext) -> None:
    job = _job(ctx, [0, 1, 2, 3], "parts", "AdamW")
    job.train(ctx, range(2))
    before = copy.deepcopy(job.tensors())
    lrs = optim.lr_scheduler.StepLR(job.optimizer, 1)
    for ranks in ([1], [[0, 2], [1, 3]], [2, 3], [0, 1, 2, 3]):
        reshard_to(job.model, job.optimizer, DeviceMesh(ctx.device_type, ranks))
    for name in before:  # rank 1 has told the others what nothing makes equal
        if name.startswith(("norm.running", "ignored")):
            before[name] = job.tensors()[name]
    _compare(job.tensors(), before)
    job.train(ctx, range(2, 3))
    lrs.step()
    assert job.optimizer.param_groups[0]["lr"] == 0.001


@pytest.mark.ci
@distributed(4)
def test_rank_without_shards_names_itself_when_its_model_runs_and_runs_when_it_has_joined(ctx: RankContext) -> None:
    job = _job(ctx, [0, 1], "transformer", "AdamW")
    if ctx.rank == 3:
        assert error_of(lambda: job.train(ctx, range(1))) == (
            "ScheduleError: rank 3 is not in the mesh of unit 'FSDPTransformer', which has the ranks [0, 1]: its\n"
            "shards are empty. Run the model only on ranks where fsdp2.checkpoint.reshard_to returned True, or\n"
            "bring this rank in: call it on all ranks with a mesh that has it."
        )
    if ctx.rank < 2:
        job.train(ctx, range(2))
    assert sum(each.to_local().numel() for each in job.model.parameters()) == 0 or ctx.rank < 2
    reshard_to(job.model, job.optimizer, DeviceMesh(ctx.device_type, [0, 1, 2, 3]))
    job.train(ctx, range(2))


@pytest.mark.ci
@distributed(4)
def test_joining_rank_may_have_built_its_model_on_the_meta_device(ctx: RankContext) -> None:
    torch.manual_seed(0)
    with torch.device("cpu" if ctx.rank < 2 else "meta"):
        model = Transformer()
        model.register_buffer("table", torch.full((3,), 2.0), persistent=False)
    shard_units(model, mesh=DeviceMesh(ctx.device_type, [0, 1]))
    job, alike = Job(model, _adamw(model)), _job(ctx, [0, 1, 2, 3], "untied", "AdamW")
    reshard_to(job.model, job.optimizer, DeviceMesh(ctx.device_type, [0, 1, 2, 3]))
    assert torch.equal(job.model.table.cpu(), torch.full((3,), 2.0))
    _compare(job.train(ctx, range(3)), alike.train(ctx, range(3)))


@pytest.mark.long
@distributed(4)
def test_settings_stay(ctx: RankContext) -> None:
    def made() -> Job:
        mesh = DeviceMesh(ctx.device_type, [0, 1, 2, 3])
        model = shard_units(seeded(lambda: MLP(4)), mesh=mesh, reshard_after_forward=2)
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[2], model.blocks[3]])
        model.blocks[1].set_gradient_divide_factor(3.0)
        model.blocks[2].set_reshard_after_backward(False)
        model.set_separate_reduce_scatter_group(True)
        model.set_manual_backward_finalization(True)
        model.set_reduce_scatter_max_input_buffers(2)
        return Job(model, _adamw(model))

    def run(job: Job) -> tuple[str, list[Tensor]]:
        losses = []
        with trace.record(job.model) as recorded:
            for index in range(2):
                losses += one_backward(Step(index, ctx.rank, None), job.model)
                job.model.finalize_backward()
                job.optimizer.step()
                job.optimizer.zero_grad()
        return str(recorded), [loss.detach() for loss in losses]

    job, alike = made(), made()
    for each in (job, alike):
        run(each)
        each.model.blocks[2].reshard()
    for ranks in MOVES["FSDP to HSDP"][::-1]:
        reshard_to(job.model, job.optimizer, DeviceMesh(ctx.device_type, ranks))
    _compare(run(job)[1], run(alike)[1])  # records the order of units anew
    _compare(run(job), run(alike))


class _Memory(TorchDispatchMode):
    """The memory of tensors that operations have seen, as long as they live; ``peak``: the most at any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._seen: dict[int, tuple[StorageWeakRef, int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.see([args, kwargs, result])
        self.peak = max(self.peak, self.now())
        return result

    def see(self, values: Any) -> None:
        for tensor in find_tensors(values, []):
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            self._seen[storage._cdata] = StorageWeakRef(storage), storage.data_ptr(), storage.nbytes()

    def now(self) -> int:
        """Parts of one memory, each with a storage of its own, count once."""
        self._seen = {key: each for key, each in self._seen.items() if not each[0].expired()}
        total = end = 0
        for start, size in sorted((start, size) for _, start, size in self._seen.values()):
            total += max(start + size - max(start, end), 0)
            end = max(end, start + size)
        return total


@pytest.mark.long
@pytest.mark.parametrize("move", ["4 to 2", "2 to 4"])
@distributed(4)
def test_a_rank_holds_shards_and_states_of_one_unit_twice_at_most(ctx: RankContext, move: str) -> None:
    old, new = MOVES[move]
    model = shard_units(seeded(lambda: MLP(num_blocks=6, dim=64)), mesh=DeviceMesh(ctx.device_type, old))
    job = Job(model, _adamw(model))
    if ctx.rank in _flattened(old):
        job.train(ctx, range(1))
    memory = _Memory()

    def held() -> int:
        memory.see([list(model.parameters()), *map(dict, job.optimizer.state.values())])
        return memory.now()

    before = held()
    with memory:
        reshard_to(model, job.optimizer, DeviceMesh(ctx.device_type, new))
    after = held()
    # With 2 ranks, a block has half of its parameters here, and two states of the same size.
    unit_nbytes = 3 * sum(param.numel() for param in model.blocks[0].parameters()) * 4 // 2
    slack = 16 * 1024  # the steps of optimizers, and the ends of pieces
    assert max(before, after) < memory.peak <= max(before, after) + 2 * unit_nbytes + slack
