"""``AdamW8bit``: the same bits on every mesh, what it communicates, and checkpoints that move, also to AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree as pytree

from fsdp2.core import comms
from fsdp2.optim import AdamW8bit
from tests.harness.distributed import RankContext, distributed
from tests.harness.messages import error_of

SIZE = 16  # of blocks
# Blocks along the last dim, with a short one at the end; along dim 0, since rows are short; along the middle; and what
# is not quantised.
SHAPES = {"matrix": (24, 40), "thin": (70, 5), "middle": (6, 20, 3), "vector": (300,), "small": (4, 40)}
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
Place = Callable[[RankContext], tuple[DeviceMesh, list[Any]]]
MESHES: dict[str, Place] = {
    "rows": lambda ctx: (ctx.mesh_1d(), [Shard(0)]),
    "columns": lambda ctx: (ctx.mesh_1d(), [Shard(1)]),
    "copies": lambda ctx: (ctx.mesh_1d(), [Replicate()]),
}
MESHES_OF_4: dict[str, Place] = {
    "copies of rows": lambda ctx: (ctx.mesh_2d(2, 2), [Replicate(), Shard(0)]),
    "copies of columns": lambda ctx: (ctx.mesh_2d(2, 2), [Replicate(), Shard(1)]),
    "rows and columns": lambda ctx: (ctx.mesh_2d(2, 2), [Shard(0), Shard(1)]),
    "rows of rows": lambda ctx: (ctx.mesh_2d(2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    "columns twice": lambda ctx: (ctx.mesh_2d(2, 2), [Shard(1), Shard(1)]),
}


def _values(name: str, seed: int, low: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + len(name))
    shape = SHAPES[name]
    values = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).pow(4)
    return values.to(low) if name == "middle" else values


def _placed(value: Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> Tensor:
    kept = [Replicate() if isinstance(p, Shard) and p.dim >= value.dim() else p for p in placements]
    return distribute_tensor(value.to(mesh.device_type), mesh, kept, src_data_rank=None)


class Run:
    """Parameters that get the same gradients wherever they lie, and their optimizer. ``low`` is the dtype of one."""

    def __init__(
        self, where: tuple[DeviceMesh, list[Any]] | None, low: torch.dtype = torch.bfloat16, is_plain: bool = False
    ) -> None:
        self.put: Callable[[Tensor], Tensor] = (lambda value: _placed(value, *where)) if where else torch.clone
        self.model, self.low = nn.Module(), low
        for name in SHAPES:
            self.model.register_parameter(name, nn.Parameter(self.put(_values(name, 0, low))))
        params = self.model.parameters()
        self.optimizer = optim.AdamW(params, **OPTIONS) if is_plain else AdamW8bit(params, **OPTIONS, block_size=SIZE)

    def train(self, seeds: Iterable[int]) -> None:
        for seed in seeds:
            for name, param in self.model.named_parameters():
                param.grad = self.put(_values(name, seed, self.low)) if name != "middle" or seed % 2 else None
            self.optimizer.step()

    def whole(self) -> Any:
        """Parameters and states as whole tensors on the host."""
        found = [dict(self.model.named_parameters()), self.optimizer.state_dict()["state"]]
        return pytree.tree_map_only(Tensor, _whole, found)


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu().clone()


def _assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("mesh", MESHES)
@distributed(3, 2, 4)
def test_every_mesh_gives_the_same_bits(ctx: RankContext, mesh: str) -> None:
    _check_bits(MESHES[mesh](ctx))


@pytest.mark.parametrize("mesh", MESHES_OF_4)
@distributed(4)
def test_every_mesh_of_two_axes_gives_the_same_bits(ctx: RankContext, mesh: str) -> None:
    _check_bits(MESHES_OF_4[mesh](ctx))


def _check_bits(where: tuple[DeviceMesh, list[Any]]) -> None:
    runs = Run(where), Run(None)
    for run in runs:
        run.train(range(1, 8))
    _assert_same(runs[0].whole(), runs[1].whole())


@pytest.mark.parametrize(("mesh", "num_messages"), [("copies of rows", 0), ("rows of rows", 2), ("columns twice", 2)])
@distributed(4)
def test_only_cut_blocks_communicate(ctx: RankContext, mesh: str, num_messages: int) -> None:
    """One message per axis for all parameters. Rows cut only the blocks of "thin", which run along dim 0."""
    run = Run(MESHES_OF_4[mesh](ctx))
    if mesh == "copies of rows":
        run.model.thin.grad = None
        run.optimizer.param_groups[0]["params"] = [p for name, p in run.model.named_parameters() if name != "thin"]
    with mock.patch.object(comms, "all_reduce", wraps=comms.all_reduce) as sent:
        run.train([1])
    assert sent.call_count == num_messages


@distributed(2)
def test_what_is_refused_changes_nothing(ctx: RankContext) -> None:
    run = Run(MESHES["rows"](ctx))
    run.train([1])
    before = run.whole()
    optimizer, param = run.optimizer, run.model.matrix
    saved = optimizer.state_dict()
    moved = distribute_tensor(torch.ones(24, 40, device=ctx.device_type), ctx.mesh_1d(), [Shard(1)])
    param.grad = moved
    said = [error_of(optimizer.step)]
    for key, value in {"max_exp_avg_sq": moved, "exp_avg": moved}.items():
        state = {**saved["state"], 0: {**saved["state"][0], key: value}}
        said.append(error_of(lambda: optimizer.load_state_dict({**saved, "state": state})))  # noqa: B023
    groups = [{**saved["param_groups"][0], "amsgrad": True}]
    said.append(error_of(lambda: optimizer.load_state_dict({**saved, "param_groups": groups})))
    optimizer.state[param]["exp_avg_scale"] = torch.zeros(1)
    param.grad = param.detach()
    said.append(error_of(optimizer.step))
    optimizer.load_state_dict(saved)
    _assert_same(run.whole(), before)
    wanted = ("gradient of parameter 0", "'max_exp_avg_sq'", "(Shard(dim=1),)", "amsgrad=True", "another mesh")
    for text, expected in zip(said, wanted, strict=True):
        assert expected in text, text


# Checkpoints


@pytest.mark.long
@pytest.mark.parametrize("through_adamw", [True, False])
@distributed(4)
def test_a_checkpoint_moves_to_other_meshes_and_to_adamw_and_back(
    ctx: RankContext, through_adamw: bool, tmp_path: Path
) -> None:
    """Each run loads what the one before has saved, and saves the same bits; the last one trains on like the first."""
    low = torch.float32 if through_adamw else torch.bfloat16  # to which AdamW would round
    run = first = Run(MESHES["rows"](ctx), low)
    first.train(range(1, 4))
    params, states = first.whole()
    for number, place in enumerate([*MESHES_OF_4.values(), *MESHES.values()]):
        _save(run, tmp_path / str(number))
        run = Run(place(ctx), low, is_plain=through_adamw and number % 2 == 0)
        run.train([9])
        _load(run, tmp_path / str(number))
        _assert_same(run.whole()[1], states)
    _save(run, tmp_path / "last")
    last = Run(MESHES["columns"](ctx), low)
    _load(last, tmp_path / "last")
    last.model.load_state_dict({name: last.put(value) for name, value in params.items()})
    for each in (first, last):
        each.train(range(4, 7))
    _assert_same(last.whole(), first.whole())


def _save(run: Run, path: Path) -> None:
    dcp.save(get_optimizer_state_dict(run.model, run.optimizer), checkpoint_id=path)


def _load(run: Run, path: Path) -> None:
    states = get_optimizer_state_dict(run.model, run.optimizer)
    dcp.load(states, checkpoint_id=path)
    set_optimizer_state_dict(run.model, run.optimizer, states)
