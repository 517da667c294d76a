"""The setters that control a step: when parameters are unsharded, what backward reduces, how much is in flight."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.harness.compare import Cases, each_compared, hsdp, trains_alike
from tests.harness.models import MLP, Branches, ParityModel, PartlyUsed, Transformer, Uneven, frozen
from tests.harness.runtimes import Runtime
from tests.harness.training import (
    BY_TURNS,
    Case,
    Step,
    accumulate,
    one_backward,
    sgd,
    shard_units_and_root,
    sharded,
    snapshot,
)


def _registered(model: nn.Module) -> dict[str, object]:
    """What the modules hold now: sharded, unsharded, or sharded on the post-forward mesh."""
    held: dict[str, object] = {}
    for name, parameter in model.named_parameters():
        placements = str(parameter.placements) if isinstance(parameter, DTensor) else None
        held[name] = (placements, snapshot(parameter).spec.local_shape)
    return held


def _step_with_notes(step: Step, model: Any) -> list[Tensor]:
    loss = step.loss(model)
    step.note("after forward", _registered(model))
    loss.backward()
    step.note("after backward", _registered(model))
    return [loss]


@each_compared(2, 4, ci=("False", "None"))
def test_reshard_after_forward() -> Cases:
    return {str(to): Case(MLP, sharded(reshard_after_forward=to), _step_with_notes) for to in (True, False, None)}


@trains_alike(4, model=Uneven, shard=sharded(reshard_after_forward=2))
def test_reshard_after_forward_to_two_ranks(step: Step, model: Any) -> list[Tensor]:
    return _step_with_notes(step, model)


def _stays(model: Any) -> None:
    """With torch's runtime, any number means True."""
    model.set_reshard_after_backward(2)


def _micro_batches(step: Step, model: Any) -> list[Tensor]:
    """Also a forward without gradients, and parameters that are written by hand behind the step before."""
    if step.index == 2:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    with torch.no_grad():
        step.note("evaluated", step.loss(model))
    return accumulate(step, model)


def _written_between_micro_batches(step: Step, model: Any) -> list[Tensor]:
    def write(micro: int) -> None:
        with torch.no_grad():
            next(model.parameters()).add_(0.01)

    return accumulate(step, model, (), num=2, before=write)


@each_compared(4, ci=("written", "frozen by turns", "mixed precision"))
def test_shards_on_two_ranks_stay_until_the_parameters_change() -> Cases:
    shard = sharded(reshard_after_forward=2, then=_stays)
    in_bf16 = sharded(reshard_after_forward=2, then=_stays, policy={"param_dtype": torch.bfloat16})
    return {
        "micro-batches": Case(Uneven, shard, _micro_batches, num_steps=3),
        "written": Case(MLP, shard, _written_between_micro_batches),
        "frozen by turns": BY_TURNS["frozen by turns"](shard, num_steps=2),
        "mixed precision": Case(MLP, in_bf16, _micro_batches, sgd, reduce_dtype=torch.bfloat16, unsharded=None),
    }


@trains_alike(2, model=MLP, shard=sharded(reshard_after_forward=False))
def test_reshard_by_hand_before_and_after_forward(step: Step, model: MLP) -> list[Tensor]:
    step.control(model.blocks[0]).unshard()
    step.control(model.blocks[0]).reshard()
    step.note("resharded", _registered(model))
    loss = step.loss(model)
    for module in (model, *model.units()):
        step.control(module).reshard()
    step.note("after forward", _registered(model))
    loss.backward()
    step.control(model).reshard()  # of a sharded module: nothing to do
    return [loss]


@trains_alike(2, model=MLP, unsharded=None)
def test_parameters_can_be_changed_while_unsharded_only_for_one_use(step: Step, model: MLP) -> list[Tensor]:
    step.control(model.blocks[0]).unshard()
    with torch.no_grad():
        model.blocks[0].up.bias.add_(1.0)  # the shards do not follow
    with torch.no_grad():
        changed = step.loss(model)
    step.note("loss of changed", changed)
    step.control(model.blocks[0]).reshard()
    return _step_with_notes(step, model)


# unshard_in_backward


def _shard_embedding_alone(runtime: Runtime, model: Any, mesh: DeviceMesh, **kwargs: Any) -> None:
    runtime.fully_shard(model.embedding, mesh=mesh, **kwargs)
    shard_units_and_root(runtime, model, mesh, **kwargs)
    model.embedding.set_unshard_in_backward(False)


def _embedding(model: Any) -> str:
    return type(model.embedding.weight).__name__


@each_compared(2, 4, ci=("kept",))
def test_embedding_that_backward_does_not_gather() -> Cases:
    return {
        "resharded": Case(Transformer, partial(_shard_embedding_alone, reshard_after_forward=True)),
        "kept": Case(Transformer, partial(_shard_embedding_alone, reshard_after_forward=False)),
        "accumulation": Case(Transformer, _shard_embedding_alone, partial(accumulate, note=_embedding)),
    }


# reduce_scatter_max_input_buffers


def _with_buffers(num: int) -> Any:
    return sharded(then=lambda model: model.set_reduce_scatter_max_input_buffers(num))


_used_twice = partial(Branches, (0, 1, 0, 2))  # two reductions of one group in one backward


@each_compared(2, ci=("2", "3", "99"))
def test_any_number_of_reductions_in_flight() -> Cases:
    """Also if it differs between units. Backwards that are not the last leave reductions in flight for the next."""
    differ = sharded(then=lambda model: model.blocks[1].set_reduce_scatter_max_input_buffers(3, recurse=False))
    step = partial(accumulate, switch="set_is_last_backward")
    return {
        **{str(num): Case(lambda: MLP(num_blocks=5), _with_buffers(num)) for num in (1, 2, 3, 99)},
        "differs between units": Case(MLP, differ),
        "two of one unit": Case(_used_twice, _with_buffers(4)),
        "backwards that are not the last": (Case(MLP, _with_buffers(3), step), Case(_used_twice, step=step)),
    }


# reduce_scatter_unused_params


def _with_unused(model: ParityModel) -> None:
    model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]


WITH_UNUSED = sharded(then=_with_unused)


def _zeros_for_unused(step: Step, model: nn.Module) -> None:
    """What the option does for a sharded model."""
    if step.runtime is None:
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def _other_parameters_on_each_rank(step: Step, model: PartlyUsed) -> list[Tensor]:
    loss = step.loss(model, use_side=(step.index + step.rank) % 2 == 0)
    loss.backward()
    _zeros_for_unused(step, model)
    return [loss]


@each_compared(2)
def test_ranks_that_use_other_parameters_get_zeros_not_none() -> Cases:
    other = partial(Case, shard=WITH_UNUSED, step=_other_parameters_on_each_rank)
    with_frozen = other(frozen(PartlyUsed, "blocks.1.side"))
    return {"fsdp": (other(PartlyUsed), with_frozen), "hsdp": (hsdp, other(PartlyUsed))}


@trains_alike(2, model=PartlyUsed, shard=sharded(then=lambda model: _with_unused(model.blocks[1])))
def test_parameters_that_no_rank_uses_get_zeros(step: Step, model: PartlyUsed) -> list[Tensor]:
    """Those of one unit."""
    loss = step.loss(model, use_side=False)
    loss.backward()
    _zeros_for_unused(step, model.get_submodule("blocks.1.side"))
    step.note("gradient of an unused parameter", snapshot(model.blocks[1].side.weight.grad))
    return [loss]


# How a forward begins, and on which stream it gathers


@trains_alike(2, model=MLP)
def test_post_optim_event(step: Step, model: ParityModel) -> list[Tensor]:
    step.control(model).set_post_optim_event(torch.cpu.current_stream().record_event())
    return one_backward(step, model)


@trains_alike(2, model=MLP)
def test_unshard_async_op_switched_between_steps(step: Step, model: ParityModel) -> list[Tensor]:
    step.control(model)._set_unshard_async_op(step.index != 1)
    if step.runtime is not None:
        for unit in model.units():
            unit.unshard(async_op=True)  # type: ignore[operator]
    return one_backward(step, model)
