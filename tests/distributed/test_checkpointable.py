"""Plain parameters that say which part of a global tensor they are: training, checkpoints, and what is refused.

The oracle is the model that is not cut at all. A torch without ``CheckpointableTensor`` gets a stand-in for what
``torch.distributed.checkpoint`` makes of its attributes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_state_dict as set_states
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from fsdp2 import fully_shard
from fsdp2.checkpoint import from_checkpointable, reshard_to, to_checkpointable
from fsdp2.extras.local_parts import geometry_of
from fsdp2.tensors import BFloat16AllGatherTensor
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import golden_on_ranks
from tests.harness.messages import error_of
from tests.harness.pool import shared_pool
from tests.parity.setups import states_of, whole as whole_of

HAS_PROTOCOL = hasattr(dcp, "CheckpointableTensor")
FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
SHAPES = {"rows": (7, 4), "columns": (6, 8), "fused": (8, 4), "alone": (), "shared": (5,)}
CUT = ("rows", "columns", "fused")


class Whole(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))

    def forward(self) -> Tensor:
        return torch.stack([(param * param.sin()).sum() for param in self.parameters()]).sum()


class Part(Whole):
    """What one of two ranks of a tensor parallel library has of it, as plain tensors."""

    def __init__(self, rank: int, seed: int = 0) -> None:
        super().__init__(seed)
        self.rows = _part(self.rows, (4 - rank, 4), [((4 * rank, 0), (0, 0), (4 - rank, 4))])
        self.columns = _part(self.columns, (6, 4), [((0, 4 * rank), (0, 0), (6, 4))])
        # two fused matrices, of which each rank has half, with padding between
        halves = [((2 * rank, 0), (0, 0), (2, 4)), ((4 + 2 * rank, 0), (3, 0), (2, 4))]
        self.fused = _part(self.fused, (5, 4), halves)
        self.alone = _part(self.alone, (), [((), (), ())])


def _part(whole: Tensor, shape: tuple[int, ...], boxes: list[Any]) -> nn.Parameter:
    local = torch.zeros(shape, dtype=whole.dtype)
    for there, here, size in boxes:
        local[_slices(here, size)] = whole.detach()[_slices(there, size)]
    made = nn.Parameter(local)
    for name, value in zip(FIELDS, (tuple(whole.shape), *zip(*boxes, strict=True)), strict=True):
        setattr(made, name, value)
    return made


def _slices(offset: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, start + n) for start, n in zip(offset, size, strict=True))


def _sharded(ctx: RankContext, layout: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """``layout``: "whole"; "fsdp", of whole parameters; "local" parts that are not sharded; "tp", with parts sharded
    over the other axis."""
    mesh = init_device_mesh("cpu", (ctx.world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    in_parts = layout in ("local", "tp")
    model = Part(mesh["tp"].get_local_rank(), seed) if in_parts else Whole(seed)
    if layout in ("tp", "fsdp"):
        over = mesh["dp"] if in_parts else init_device_mesh("cpu", (ctx.world_size,))
        fully_shard(model, mesh=over, shard_placement_fn=lambda param: Shard(1) if param.shape == (6, 4) else None)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model().backward()
    optimizer.step()
    optimizer.zero_grad()


def _parts(states: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """The tensors of the model, and those of the optimizer by their kind."""
    of_optimizer = states["optimizer"]["state"].items()
    moments = {key: {name: each[key] for name, each in of_optimizer} for key in ("exp_avg", "exp_avg_sq")}
    return {"model": states["model"], **moments}


def _readable(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` for this torch's checkpoints."""
    if not HAS_PROTOCOL:
        for tensor in _tensors(state):
            if hasattr(tensor, FIELDS[0]):
                _stand_in(tensor)
    return state


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, Tensor):
        yield value


def _stand_in(tensor: Any) -> None:
    shape, data = torch.Size(tensor.global_shape), tensor.detach()
    columns = (tensor.global_offsets, tensor.local_offsets, tensor.local_sizes)
    boxes = {torch.Size(there): (here, torch.Size(size)) for there, here, size in zip(*columns, strict=True)}
    chunks = [ChunkStorageMetadata(there, size) for there, (_, size) in boxes.items()]

    def write_items(name: str, _: object) -> list[WriteItem]:
        about = TensorProperties.create_from_tensor(data)
        return [
            WriteItem(MetadataIndex(name, each.offsets), WriteItemType.SHARD, None, TensorWriteData(each, about, shape))
            for each in chunks
        ]

    tensor.__create_write_items__, tensor.__create_chunk_list__ = write_items, lambda: chunks
    tensor.__get_tensor_shard__ = lambda index: data[_slices(*boxes[index.offset])]
    tensor.size = lambda: shape


def _gathered(state: dict[str, Any], *, once: bool = True) -> dict[str, Tensor]:
    """The global tensors of the parameters in ``state``: each rank's boxes, by their attributes."""
    mine = {
        name: (tensor.detach().clone(), *(getattr(tensor, each) for each in FIELDS))
        for name, tensor in state.items()
        if hasattr(tensor, FIELDS[0])
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found = {}
    for name, (_, shape, *_) in mine.items():
        found[name], times = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape)
        for values, _, *boxes in (each[name] for each in everyone):
            for there, here, size in zip(*boxes, strict=True):
                found[name][_slices(there, size)] = values[_slices(here, size)]
                times[_slices(there, size)] += 1
        assert times.eq(1).all() or not once, f"{name}: entries are on {times} ranks"
    return found


@pytest.mark.ci
@distributed(4)
def test_training_is_that_of_the_whole_model_and_each_entry_lies_on_one_rank(ctx: RankContext) -> None:
    (model, optimizer), (whole, its) = _sharded(ctx, "tp"), _sharded(ctx, "whole")
    for _ in range(2):
        _step(model, optimizer)
        _step(whole, its)
    expected = _parts(states_of(whole, its))
    for key, found in _parts(to_checkpointable(model, states_of(model, optimizer))).items():
        torch.testing.assert_close(_gathered(found), {name: expected[key][name] for name in CUT})


@distributed(4)
def test_unsharded_parameters_and_copies_have_the_attributes(ctx: RankContext) -> None:
    model, _ = _sharded(ctx, "tp")
    expected = [getattr(Part(ctx.rank % 2).fused, name) for name in FIELDS]
    seen: list[Any] = []
    model.register_forward_hook(lambda module, *_: seen.append([getattr(module.fused, name) for name in FIELDS]))
    for each in (model, copy.deepcopy(model)):
        each()
    assert seen == [expected, expected]


@distributed(4)
def test_geometry_moves_with_the_shards(ctx: RankContext) -> None:
    model = Part(0)  # all ranks hold the same part
    fully_shard(model, mesh=DeviceMesh(ctx.device_type, [0, 1]))
    reshard_to(model, [], DeviceMesh(ctx.device_type, [0, 1, 2, 3]))
    found = to_checkpointable(model, model.state_dict())["rows"]
    assert (found.global_offsets, found.local_sizes) == (((ctx.rank, 0),), ((1, 4),))


def _save(ctx: RankContext, layout: str, path: Path) -> dict[str, Any]:
    model, optimizer = _sharded(ctx, layout)
    _step(model, optimizer)
    dcp.save(_readable(to_checkpointable(model, states_of(model, optimizer))), checkpoint_id=path)
    whole, its = _sharded(ctx, "whole")
    _step(whole, its)
    return _parts(states_of(whole, its))


def _load(ctx: RankContext, layout: str, path: Path) -> dict[str, Any]:
    """Returns the global tensors after loading into other values."""
    model, optimizer = _sharded(ctx, layout, seed=1)
    _step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    model.zero_grad()
    if layout == "tp":
        model.reshard()
    state = to_checkpointable(model, states_of(model, optimizer))
    dcp.load(_readable(state), checkpoint_id=path)
    state = from_checkpointable(model, state)
    set_states(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 0.1
    return {
        key: {**whole_of(each), **_gathered(each, once=layout == "tp")}
        for key, each in _parts(to_checkpointable(model, states_of(model, optimizer))).items()
    }


ELSEWHERE = [("fsdp", "tp"), ("tp", "fsdp"), ("tp", "tp"), ("local", "tp"), ("tp", "local")]


@pytest.mark.parametrize(
    ("saver", "loader"), [("tp", "whole"), *(pytest.param(*case, marks=pytest.mark.ci) for case in ELSEWHERE)]
)
def test_checkpoint_is_loaded_in_another_layout(saver: str, loader: str, tmp_path: Path) -> None:
    expected = shared_pool(4).run(_save, layout=saver, path=tmp_path)[0]
    loaded = shared_pool(2 if loader == "fsdp" else 4).run(_load, layout=loader, path=tmp_path)
    for found in loaded:
        torch.testing.assert_close(found, expected)


def _save_asynchronously(ctx: RankContext, path: Path) -> None:
    model, optimizer = _sharded(ctx, "tp")
    _step(model, optimizer)
    group = dist.new_group(backend="gloo")
    state = to_checkpointable(model, states_of(model, optimizer))
    future = dcp.async_save(state, checkpoint_id=path, process_group=group)
    _step(model, optimizer)
    future.result()
    dist.destroy_process_group(group)


@pytest.mark.skipif(not HAS_PROTOCOL, reason="this torch has no CheckpointableTensor")
def test_asynchronous_save_keeps_the_geometry(tmp_path: Path) -> None:
    shared_pool(4).run(_save_asynchronously, path=tmp_path)
    expected = shared_pool(4).run(_save, layout="tp", path=tmp_path / "other")[0]["model"]
    torch.testing.assert_close(shared_pool(4).run(_load, layout="whole", path=tmp_path)[0]["model"], expected)


# What is refused


@pytest.mark.skipif(HAS_PROTOCOL, reason="this torch reads the geometry")
@distributed(2)
def test_torch_without_the_protocol_refuses_to_save_on_all_ranks(ctx: RankContext, tmp_path: Path) -> None:
    model, _ = _sharded(ctx, "tp")
    state = to_checkpointable(model, model.state_dict())
    with pytest.raises(CheckpointException, match="of this torch has no CheckpointableTensor"):
        dcp.save(state, checkpoint_id=tmp_path / "out")


def _of_a_class(model: Any) -> None:
    before = model.rows
    model.rows = nn.Parameter(BFloat16AllGatherTensor(before.detach()))
    for name in FIELDS:
        setattr(model.rows, name, getattr(before, name))


GEOMETRIES: dict[str, Callable[[Any], object]] = {
    "outside": lambda model: setattr(model.rows, "global_offsets", ((4, 0),)),
    "too few": lambda model: setattr(model.rows, "local_sizes", ()),
    "other dims": lambda model: setattr(model.rows, "global_shape", (7,)),
    "no numbers": lambda model: setattr(model.rows, "local_offsets", 0),
    "of a class": _of_a_class,
}


@pytest.mark.parametrize("change", GEOMETRIES)
@golden_on_ranks(2)
def test_geometry_that_does_not_fit_is_refused(ctx: RankContext, change: str) -> str:
    model = Part(0)
    GEOMETRIES[change](model)
    before = dict(model.named_parameters())
    found = error_of(lambda: fully_shard(model, mesh=init_device_mesh("cpu", (2,))))
    assert type(model) is Part
    assert all(param is before[name] for name, param in model.named_parameters())
    return found


FULL = StateDictOptions(full_state_dict=True)
STATES: dict[str, Callable[[Any], Any]] = {
    "full state": lambda model: {"model": get_model_state_dict(model, options=FULL)},
    "other shape": lambda model: {"state": {"rows": {"row_factor": model.rows.detach()[:, :1]}}},
    "of a part": lambda model: {"inner": {f"its_{name}": value for name, value in model.state_dict().items()}},
}


@pytest.mark.parametrize("state", STATES)
@golden_on_ranks(2)
def test_states_without_a_known_place_are_refused(ctx: RankContext, state: str) -> str:
    model: Any = Part(0)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    found = STATES[state](model)
    return error_of(lambda: to_checkpointable(model, found))


@golden_on_ranks(2)
def test_ranks_with_other_geometries_raise_in_the_first_forward(ctx: RankContext) -> str:
    model = Part(0)
    model.columns = Part(ctx.rank).columns
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return error_of(model)


def test_attributes_that_are_not_complete_are_ignored() -> None:
    param = nn.Parameter(torch.zeros(2))
    param.global_shape = (4,)  # type: ignore[attr-defined]
    assert geometry_of("weight", param) is None
