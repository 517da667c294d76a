"""What may have happened before a user changes a sharded model, and that gradients and the next step are right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp2 import FSDPModule
from tests.distributed.support import Stack, batch, seeded, step


def evaluate(model: Any) -> None:
    with torch.no_grad():
        model(batch())


def step_and_zero(model: Any) -> None:
    step(model)
    model.zero_grad()


def reshard_all(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def evaluate_and_reshard(model: Any) -> None:
    """What stays unsharded after an evaluation is nothing to freeze, or to build an optimizer of."""
    evaluate(model)
    reshard_all(model)


def alike(param: DTensor, value: Tensor) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(value, param.device_mesh, param.placements))


def assert_gradients(model: nn.Module | Sequence[Tensor], *references: nn.Module, atol: float = 1e-6) -> None:
    """Parameter by parameter, the mean over ``references``, one for each rank; none where none of them has any.

    ``model`` may be its sharded parameters, which need not be bound after an exception.
    """
    named = model.named_parameters() if isinstance(model, nn.Module) else enumerate(model)
    for (name, parameter), *others in zip(named, *(each.parameters() for each in references), strict=True):
        grads = [other.grad for other in others if other.grad is not None]
        assert (parameter.grad is None) is (not grads), name
        if isinstance(parameter.grad, Tensor):
            assert isinstance(parameter.grad, DTensor), name
            found, expected = parameter.grad.full_tensor().cpu(), torch.stack(grads).cpu().sum(0) / len(references)
            assert torch.allclose(found, expected, atol=atol), (name, found, expected)


def stepped(*seeds: int, num_blocks: int = 3) -> Stack:
    """Unsharded, with the gradients of a step for each of ``seeds``."""
    model: Stack = seeded(lambda: Stack(num_blocks))
    for seed in seeds:
        step(model, seed)
    return model


@torch.no_grad()
def double(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        parameter.mul_(2)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters, gathered where they are shards."""
    found = {name: value.detach() for name, value in model.named_parameters()}
    return {name: (each.full_tensor() if isinstance(each, DTensor) else each).clone() for name, each in found.items()}


def step_and_zero_all(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def assert_step_is_that_of(model: nn.Module, reference: nn.Module, *, seed: int = 0) -> None:
    """The next step of both, loss and gradients, parameter by parameter. There is no gradient before and none after."""
    assert torch.allclose(step(model, seed), step(reference, seed), atol=1e-6)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert_gradients(model, reference)
    for each in (model, reference):
        each.zero_grad()


def assert_trains_as_stack(model: nn.Module) -> None:
    """As an unsharded ``Stack`` with seed 0. The second step prefetches along the order that the first has recorded."""
    for seed in (1, 2):
        assert_step_is_that_of(model, seeded(Stack), seed=seed)


GATHERS: dict[str, Callable[[Any], Any]] = {
    "step": step,
    "evaluation": evaluate,
    "unshard": lambda model: [model.unshard(), *(block.unshard() for block in model.blocks)],
    "unshard async": lambda model: [block.unshard(async_op=True) for block in model.blocks],
}
USES: dict[str, Callable[[Any], Any]] = {
    "no use": lambda model: None,
    "step": step_and_zero,
    "evaluation": evaluate,
    "evaluation, reshard": evaluate_and_reshard,
    "unshard": lambda model: model.unshard(async_op=True),
}
