"""torch's distributed checkpoints: saved while training goes on, as safetensors, and read by the other runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from tests.clients.compare import client, files_in, parameters_of
from tests.harness.distributed import RankContext, distributed
from tests.harness.models import Block
from tests.harness.runtimes import oracle, subject
from tests.parity.setups import load_states, states_of

WIDTH = 9  # which two ranks do not divide
PRELOADED = ("torch.distributed.checkpoint.state_dict", "torch.distributed.checkpoint.hf_storage", "torch._dynamo")


def on_two_ranks(*packages: str) -> Any:
    return client(*packages, preload=PRELOADED)


def sharded(fully_shard: Callable[..., Any], mesh: DeviceMesh, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(Block(WIDTH), Block(WIDTH))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def by_the_client(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Sharded by whatever ``torch.distributed.fsdp`` names."""
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return sharded(fully_shard, init_device_mesh("cpu", (dist.get_world_size(),)), seed)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        inputs, target = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = F.mse_loss(model(inputs), target)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("consolidates", [True, False], ids=["one-file", "file-per-rank"])
@on_two_ranks("safetensors")
def test_safetensors_are_equal_and_are_read_back(rank: int, folder: Path, consolidates: bool) -> Any:
    model, optimizer = by_the_client(seed=0)
    train(model, optimizer, rank, range(2))
    saved = parameters_of(model)
    writer = dcp.HuggingFaceStorageWriter(
        str(folder / "saved"), save_distributed=True, enable_consolidation=consolidates
    )
    dcp.save(get_model_state_dict(model), storage_writer=writer)
    model, _ = by_the_client(seed=1)
    state = get_model_state_dict(model)
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder / "saved")))
    set_model_state_dict(model, state)
    loaded = parameters_of(model)
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    return loaded, files_in(folder)


@pytest.mark.parametrize("is_full", [False, True], ids=["sharded", "full"])
@pytest.mark.parametrize("is_read_by_torch", [False, True], ids=["torch-to-fsdp2", "fsdp2-to-torch"])
@distributed(2)
def test_each_runtime_goes_on_from_the_others_checkpoint(
    ctx: RankContext, tmp_path: Path, is_read_by_torch: bool, is_full: bool
) -> None:
    writer, reader = (subject(), oracle()) if is_read_by_torch else (oracle(), subject())
    model, optimizer = sharded(writer.fully_shard, ctx.mesh_1d(), seed=0)
    train(model, optimizer, ctx.rank, range(2))
    options = StateDictOptions(full_state_dict=is_full, cpu_offload=is_full)
    if is_full:
        model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
        if ctx.rank == 0:
            torch.save((model_state, optimizer_state), tmp_path / "whole.pt")
        dist.barrier()
    else:
        dcp.save(states_of(model, optimizer), checkpoint_id=tmp_path)
    expected = train(model, optimizer, ctx.rank, range(2, 4))
    goes_on, optimizer = sharded(reader.fully_shard, ctx.mesh_1d(), seed=1)
    if is_full:
        states = torch.load(tmp_path / "whole.pt")
        set_state_dict(goes_on, optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=options)
    else:
        load_states(goes_on, optimizer, tmp_path)
    found = train(goes_on, optimizer, ctx.rank, range(2, 4))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    theirs = parameters_of(model)
    assert all(torch.equal(param, theirs[name]) for name, param in parameters_of(goes_on).items())
