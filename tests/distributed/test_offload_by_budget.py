"""``offload_by_budget``: what it chooses, what it moves, and that values stay those of the plain model.

On the CPU, shards "on the host" are copied at both ends of a plan, as on a device; the simulated device runs this file
again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

import fsdp2
from fsdp2.core.comm.offload import StagedOffloadPolicy
from fsdp2.core.runtime.unit import units_under
from fsdp2.memory import OffloadChoice
from fsdp2.optim import HostAdamW
from tests.distributed.support import BLOCK_NBYTES, DIM, ROOT_NBYTES, Stack, seeded, shard, sharded, shards, step, train
from tests.harness.compare import compare_values
from tests.harness.distributed import RankContext, distributed
from tests.harness.golden import golden_on_ranks
from tests.harness.messages import error_of
from tests.harness.selection import long

OPTIONS: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3}
POLICY = StagedOffloadPolicy()
PLENTY = 1 << 30
LAST = ("blocks.1", "blocks.2")


def chosen(model: nn.Module, device_nbytes: int, host_nbytes: Any = None, policy: Any = POLICY) -> OffloadChoice:
    return fsdp2.memory.offload_by_budget(model, device_nbytes, host_nbytes, offload_policy=policy)


def least(ctx: RankContext) -> int:
    """The smallest budget of ``Stack``, as the refusal of less says."""
    said = error_of(lambda: chosen(sharded(ctx), 1)).replace("\n", " ")
    return int(said.partition(" takes ")[2].partition(" bytes")[0])


def on_host(model: nn.Module) -> tuple[str, ...]:
    """The units whose shards are on the host now."""
    return tuple(name or "(root)" for name, unit in units_under(model) if all(g.home.is_staged for g in unit.groups))


def five_blocks(ctx: RankContext, seed: int = 0) -> Any:
    return shard(ctx, seeded(lambda: Stack(5), seed))


def mixed(ctx: RankContext, seed: int = 0) -> tuple[Any, OffloadChoice]:
    """A model with some parameters on the host, some states, and the rest on the device: the parameters of one unit
    have to leave, which makes room for the states of some units."""
    model = five_blocks(ctx, seed)
    nbytes = chosen(five_blocks(ctx), PLENTY).nbytes - (5 * BLOCK_NBYTES + ROOT_NBYTES) - 64
    choice = chosen(model, nbytes)
    assert choice.nbytes <= nbytes
    return model, choice


def plain_adamw(params: Any) -> optim.Optimizer:
    return optim.AdamW(params, fused=True, **OPTIONS)


def optimizers(choice: OffloadChoice, **options: Any) -> list[optim.Optimizer]:
    plain = [plain_adamw(choice.device_params)] if choice.device_params else []
    return [HostAdamW(choice.host_params, **OPTIONS, **options), *plain]


# What is chosen


@distributed(2)
def test_states_leave_first_and_from_the_last_units(ctx: RankContext) -> None:
    model = sharded(ctx)
    everything = chosen(model, PLENTY)
    assert everything.on_host == ()
    assert everything.on_device == ("(root)", "blocks.0", *LAST)
    assert (everything.host_nbytes, everything.link_nbytes) == (0, 0)
    states = BLOCK_NBYTES  # twice a half
    some = chosen(model, everything.nbytes - states - 1)
    assert some.on_host == LAST
    assert some.params_on_host == ()
    assert some.nbytes == everything.nbytes - 2 * states
    assert some.host_nbytes == 2 * 4 * BLOCK_NBYTES // 2  # states, and what travels: 16 bytes per parameter
    assert some.link_nbytes == 2 * BLOCK_NBYTES  # a gradient, and a shard that comes back
    assert set(some.host_params) == {*model.blocks[1].parameters(), *model.blocks[2].parameters()}
    assert len(some.device_params) == len(list(model.parameters())) - 4


@distributed(2)
def test_parameters_leave_where_the_link_costs_least_and_states_come_back(ctx: RankContext) -> None:
    """The root stays unsharded between the passes: it is gathered once, and copies what its states would copy."""
    model, choice = mixed(ctx)
    assert choice.params_on_host == ("(root)",) == on_host(model)
    by_name = {unit.name: unit for unit in choice.units}
    assert by_name["(root)"].link == ROOT_NBYTES
    assert 0 < len(choice.on_device) < 5
    model.set_reshard_after_forward(True, recurse=False)
    again = chosen(model, PLENTY)
    assert on_host(model) == again.on_host == ()
    last = chosen(model, least(ctx))
    assert "blocks.2" in last.params_on_host
    assert "blocks.2" in on_host(model)


@golden_on_ranks()
def test_choice_is_shown_as_a_table(ctx: RankContext) -> str:
    return str(mixed(ctx)[1])


@distributed(2)
def test_frozen_parameters_leave_last(ctx: RankContext) -> None:
    """They free half of what others do, and are copied in both passes."""
    model = seeded(Stack)
    model.blocks[2].requires_grad_(False)
    shard(ctx, model, reshard_after_forward=True)
    choice = chosen(model, least(ctx))
    assert "blocks.1" in choice.params_on_host
    costs = {unit.name: unit.link for unit in choice.units}
    assert costs["blocks.1"] == 3 * BLOCK_NBYTES // 2
    if "blocks.2" in choice.params_on_host:
        assert costs["blocks.2"] == BLOCK_NBYTES
        assert choice.params_on_host == ("(root)", "blocks.0", *LAST)


# What moves


@distributed(2)
def test_steps_are_those_of_adamw_wherever_things_live(ctx: RankContext) -> None:
    other = five_blocks(ctx)
    expected = train(other, plain_adamw(other.parameters()))
    for overlaps in (False, True):
        model, choice = mixed(ctx)
        assert choice.on_device
        compare_values("shards", train(model, *optimizers(choice, overlap_forward=overlaps)), expected)


@distributed(2)
def test_one_optimizer_clips_parameters_on_both_sides(ctx: RankContext) -> None:
    other = five_blocks(ctx)
    plain = plain_adamw(other.parameters())
    norms = []
    for seed in range(3):
        step(other, seed)
        norms.append(fsdp2.clip_grad_norm_(other.parameters(), 0.1).double().cpu())
        plain.step()
        plain.zero_grad()
    for clip_by in ("this step", "step before"):
        model, _ = mixed(ctx)
        host = HostAdamW(model.parameters(), max_norm=0.1, clip_by=clip_by, **OPTIONS)  # type: ignore[arg-type]
        step(model, 0)
        host.step()
        assert host.grad_norm is not None
        torch.testing.assert_close(host.grad_norm.cpu(), norms[0])
        train(model, host, steps=range(1, 3))
        if clip_by == "this step":
            torch.testing.assert_close(shards(model), shards(other))


@pytest.mark.parametrize("num_ranks", [2, *long(1)])
@distributed(2)
def test_what_was_all_on_the_host_moves_to_the_device_where_it_fits(ctx: RankContext, num_ranks: int) -> None:
    """Parameters, their flags and what is noted on them stay, and settings of units, too."""
    mesh = ctx.mesh_1d() if num_ranks == 2 else ctx.mesh_of_one()
    other = shard(ctx, seeded(Stack), mesh=mesh)
    model = shard(ctx, seeded(Stack), mesh=mesh, offload_policy=POLICY)
    assert on_host(model) == ("(root)", "blocks.0", *LAST)
    for each in (model, other):
        each.blocks[0].linear.bias.requires_grad_(False)
    model.blocks[1].set_reshard_after_forward(False)
    before, values = list(model.parameters()), shards(model)
    model.exit.weight.decays = True
    model(torch.ones(4, DIM)).sum()
    model.blocks[1].reshard()
    model.reshard()
    choice = chosen(model, PLENTY)
    assert on_host(model) == choice.on_host == ()
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert all(param.device == mesh_device(param) for param in before)
    assert model.exit.weight.decays
    compare_values("values", shards(model), values)
    expected = train(other, plain_adamw([param for param in other.parameters() if param.requires_grad]))
    compare_values("shards", train(model, plain_adamw(choice.device_params)), expected)
    assert not dict(units_under(model))["blocks.1"].config.stays_as_root


def mesh_device(param: Any) -> torch.device:
    return torch.empty(0, device=param.device_mesh.device_type).device


@distributed(2)
def test_model_on_the_meta_device_is_materialised_on_the_host_first(ctx: RankContext) -> None:
    other = sharded(ctx)
    model = shard(ctx, Stack().to("meta"), offload_policy=POLICY)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param, value in zip(model.parameters(), shards(other), strict=True):
            param.to_local().copy_(value)  # type: ignore[operator]
    choice = chosen(model, chosen(other, PLENTY).nbytes - BLOCK_NBYTES)
    assert choice.params_on_host == ()
    compare_values("shards", train(model, *optimizers(choice)), train(other, plain_adamw(other.parameters())))


# What is refused


def _stepped(model: Any) -> None:
    train(model, optim.AdamW(model.parameters(), **OPTIONS), steps=range(1))
    model.reshard()


NOT_MOVABLE: dict[str, Callable[[Any], object]] = {
    "stepped": _stepped,
    "stepped by a HostAdamW": lambda model: setattr(model, "optimizer", HostAdamW(model.parameters(), **OPTIONS)),
    "meta device": lambda model: model.to("meta"),
    "gradients": step,
    "hooks": lambda model: model.exit.weight.register_post_accumulate_grad_hook(lambda _: None),
    "unsharded": lambda model: model.unshard(),
}


@pytest.mark.parametrize("name", NOT_MOVABLE)
@golden_on_ranks()
def test_shards_that_cannot_move_are_refused(ctx: RankContext, name: str) -> str:
    model = sharded(ctx)
    NOT_MOVABLE[name](model)
    before = list(model.parameters())
    found = error_of(lambda: chosen(model, least(ctx)))
    assert on_host(model) == ()
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    chosen(model, PLENTY)  # nothing has to move
    return found


REFUSED: dict[str, Any] = {
    "too little for the device": lambda ctx: chosen(sharded(ctx), least(ctx) - 1),
    "too little for the host": lambda ctx: chosen(sharded(ctx), least(ctx), 1000),
    "device_nbytes that is no number": lambda ctx: chosen(sharded(ctx), math.nan),  # type: ignore[arg-type]
    "host_nbytes that is no size": lambda ctx: chosen(sharded(ctx), PLENTY, "a lot"),
    "no policy of offloading": lambda ctx: chosen(sharded(ctx), PLENTY, policy=fsdp2.OffloadPolicy()),
    "not sharded": lambda ctx: chosen(nn.Linear(2, 2), 1),
}


@pytest.mark.parametrize("name", REFUSED)
@golden_on_ranks()
def test_refused(ctx: RankContext, name: str) -> str:
    return error_of(lambda: REFUSED[name](ctx))
