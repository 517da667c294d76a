"""What a plan says of parameters, gradients and optimizer states is what ranks hold, and what ``memory_plan`` says,
however often the forward calls each unit. The models are those of ``tests/unit/planner/models.py``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.planner.blocks import find_units
from fsdp2.planner.machines import H100
from fsdp2.planner.observe import observe
from fsdp2.planner.scenario import Choice, Precision, Scenario, accelerator, simulate
from fsdp2.planner.work import Checkpointing
from fsdp2.planner.workload import Workload
from fsdp2.report import trace
from tests.distributed.support import seeded, shard_each
from tests.harness.distributed import RankContext, distributed
from tests.harness.selection import long
from tests.unit.planner.models import MODELS, inputs_of, square


def _sharded_as_planned(
    ctx: RankContext, name: str, precision: str = "bf16", ignores: str | None = None
) -> tuple[Any, Scenario]:
    """The model of this name, sharded, and what was planned for it. What has ``ignores`` in its name stays whole."""
    model = seeded(MODELS[name])
    ignored = {param for key, param in model.named_parameters() if ignores and ignores in key}
    units, workload = find_units(model), Workload(2, 32, precision=precision, inputs=inputs_of(name), loss=square)
    work = observe(model, units, workload, ignored)
    scenario = Scenario(
        H100,
        work.units(Checkpointing.NONE),
        tokens=64,
        num_gpus=2,
        choice=Choice(),
        root=work.root,
        members=work.members,
        ignored=work.ignored,
        buffers_nbytes=work.buffers_nbytes,
        precision=Precision(precision),
    )
    options = {"mesh": ctx.mesh_1d(), "mp_policy": scenario.precision.policy, "ignored_params": ignored}
    shard_each(*map(model.get_submodule, units.paths), model, **options)
    return model, scenario


def _labels(scenario: Scenario) -> list[str]:
    return ["(root)", *(unit.name for unit in scenario.distinct)]


def _local_nbytes(*tensors: Any) -> int:
    found = [each.to_local() if isinstance(each, DTensor) else each for each in tensors if each is not None]
    return sum(each.nbytes for each in found)


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    params = list(model.parameters())
    states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    return {
        "parameters": _local_nbytes(*params),
        "gradients": _local_nbytes(*(param.grad for param in params)),
        "states": _local_nbytes(*states),
        "buffers": _local_nbytes(*model.buffers()),
    }


def _names(*short: str, without: Collection[str] = ()) -> list[Any]:
    return [*short, *long(*(name for name in MODELS if name not in (*short, *without)))]


@pytest.mark.parametrize("options", [{}, *long({"precision": "fp32"}, {"precision": "fp32", "ignores": "norm"})])
@pytest.mark.parametrize("name", _names("looped", "skipping", "tied blocks"))
@distributed(2)
def test_what_is_planned_is_what_memory_plan_says_and_what_is_held(
    ctx: RankContext, name: str, options: dict[str, Any]
) -> None:
    """In four steps of accumulation, each model uses all that it ever uses; the rest gets zeros. The first rank has the
    largest shards."""
    model, scenario = _sharded_as_planned(ctx, name, **options)
    model.set_reduce_scatter_unused_params(True)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)  # takes DTensors and whole parameters in one step
    for _ in range(4):
        square(model(*inputs_of(name)())).backward()
    optimizer.step()
    found, held = simulate(scenario), _held(model, optimizer)
    planned = {
        "parameters": found.params_nbytes,
        "gradients": found.grads_nbytes,
        "states": found.optimizer_nbytes,
        "buffers": found.buffers_nbytes,
    }
    assert planned == held or ctx.rank > 0
    groups = zip(_labels(scenario), accelerator(scenario).groups, strict=True)
    of_units = {
        label: (group.shards_nbytes, group.nbytes.unsharded, group.nbytes.gradients) for label, group in groups if group
    }
    sizes = {
        unit.name: (unit.shards, unit.bytes.unsharded, unit.bytes.gradients)
        for unit in fsdp2.memory.memory_plan(model).units
    }
    assert of_units == {name: each for name, each in sizes.items() if any(each)} or ctx.rank > 0


@pytest.mark.parametrize("name", _names("encoder and decoder", without=("skipping", "first block later")))
@distributed(2)
def test_the_plan_gathers_and_reduces_as_the_runtime_does(ctx: RankContext, name: str) -> None:
    """Each call gathers, a unit is reduced once, what nothing trains has no backward, and a step leaves no memory."""
    model, scenario = _sharded_as_planned(ctx, name)
    device, labels = accelerator(scenario), _labels(scenario)
    for _ in range(2):
        device.step()
        square(model(*inputs_of(name)())).backward()
    first = len(device.performed)
    device.step()
    with trace.record(model) as recorded:
        square(model(*inputs_of(name)())).backward()
    planned = [f"{action.value} {labels[unit]}" for action, unit in device.performed[first:]]
    assert _comparable(planned) == _comparable(recorded.actions())
    assert device.memory.held == 0


def _comparable(actions: Sequence[str]) -> list[str]:
    """Of two gathers that one event starts, either may be called a prefetch; and what lands at the end may have landed
    before."""
    return [action.replace("prefetch", "unshard") for action in actions if not action.startswith("land")]
