"""What trainers do besides a plain step: as with torch's class."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecision
from torch.utils.checkpoint import checkpoint

from tests.harness.models import DIM, Branches
from tests.harness.selection import long
from tests.parity.fsdp1.fronts import FULL_SHARD, GRAD_OP, NO_SHARD, Front, as_torchs, with_ours, wrapped_mlp

ORDERS = [(0, 1, 2), (0, 2), (1,), (0, 1, 2), (0, 1, 2)]


@as_torchs(2, both_modes=True)
def test_unused_parameters_of_a_unit(front: Front) -> Any:
    return front.train(front.wrap(Branches()), lr=0.1, shape=(3, DIM), choices=ORDERS)


@as_torchs(2, both_modes=True)
def test_unused_units(front: Front) -> Any:
    model = Branches()
    for index in (0, 1):
        model.blocks[index] = front.wrap(model.blocks[index])
    return front.train(front.wrap(model), lr=0.1, shape=(3, DIM), choices=ORDERS)


@as_torchs(2, both_modes=True)
def test_modules_around_wrappers_need_no_wrapper(front: Front) -> Any:
    return front.train(nn.Sequential(front.wrap(nn.Linear(8, 8)), front.wrap(nn.Linear(8, 4))))


@as_torchs(2, both_modes=True)
def test_gradients_can_be_scaled_and_read_before_the_step(front: Front) -> Any:
    model = wrapped_mlp(front)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(4):
        for part in range(2):
            loss = model(front.batch(3, 8, seed=2 * step + part)).square().mean()
            loss.backward()
        for param in (param for param in model.parameters() if param.grad is not None):
            param.grad.mul_(0.5)
            param.grad = param.grad * 0.5 if step == 2 else param.grad
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        losses.append(loss.detach())
    return losses


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@as_torchs(2, both_modes=True)
def test_activation_checkpointing(front: Front) -> Any:
    options = {"sharding_strategy": GRAD_OP}
    inside = front.wrap(checkpoint_wrapper(nn.Linear(8, 8)), **options)
    around = Checkpointed(front.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), **options))
    assert type(inside.module) is nn.Linear
    return front.train(front.wrap(nn.Sequential(inside, around, nn.Linear(8, 4)), **options))


@pytest.mark.parametrize("order", [1, -1])
@with_ours(2, both_modes=True)
def test_an_optimizer_copied_with_the_model_steps_the_copy(front: Front, order: int) -> None:
    """Torch's class cannot be copied in flat mode: ours must train as the original does, and alone."""
    model = wrapped_mlp(front)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    front.train(model, optimizer, num_steps=1)
    copied, its_optimizer = copy.deepcopy((model, optimizer)[::order])[::order]
    assert set(its_optimizer.param_groups[0]["params"]) == set(copied.parameters())
    assert [name for name, _ in copied.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert front.train(copied, its_optimizer) == front.train(model, optimizer)


@as_torchs(2, both_modes=True)
def test_dtype_conversion_reaches_the_shards(front: Front) -> Any:
    model = wrapped_mlp(front).to(torch.float64)
    assert {param.dtype for param in model.parameters()} == {torch.float64}
    return front.train(model, lr=0.1, num_steps=2, dtype=torch.float64)


@pytest.mark.parametrize("strategy", [FULL_SHARD, GRAD_OP, NO_SHARD])
@as_torchs(2, both_modes=True)
def test_parameters_are_shards_after_an_evaluation(front: Front, strategy) -> Any:
    """The root, or all units, stay unsharded after it."""
    model = wrapped_mlp(front, sharding_strategy=strategy)
    for i, param in enumerate(model.parameters()):
        param.tag = i

    def evaluate() -> torch.Tensor:
        with torch.no_grad():
            return model(front.batch(3, 8))

    evaluate()
    tags = [param.tag for param in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(front.batch(3, 8, seed=1)).square().mean().backward()
    evaluate()
    model.zero_grad()
    front.train(model, optimizer, num_steps=range(2, 3))
    return [tags, evaluate()]


@as_torchs(2)
def test_attributes_of_the_wrapped_module_are_the_wrappers_too(front: Front) -> Any:
    model = wrapped_mlp(front)
    model.module.note = "here"
    inner = front.cls.fsdp_modules(model)
    model(front.batch(3, 8))
    roots = front.cls.fsdp_modules(model, root_only=True)
    found = [model.note, model[1] is model.module[1], len(inner), inner[0] is model, roots == [model]]
    found += [model.check_is_root(), model[0].check_is_root(), hasattr(model, "no such attribute")]
    return [*found, model.rank, model.world_size, model.sharding_strategy.name]


@as_torchs(2, both_modes=True)
def test_hooks_on_a_wrapped_module_see_whole_parameters(front: Front) -> Any:
    """Those that ``docs/migrating.md`` names may see shards with ours."""
    seen: list[list[object]] = []

    def note(kind: str, module: nn.Module) -> None:
        is_whole = type(module.weight) in (torch.Tensor, nn.Parameter) and module.weight.shape == (8, 8)
        seen.append([kind, is_whole])

    def register(kind: str, **options: bool) -> None:
        getattr(inner, f"register_{kind}")(lambda module, *_: note(kind, module), **options)

    inner = nn.Linear(8, 8)
    register("forward_pre_hook", prepend=True)
    register("forward_hook")
    model = front.wrap(nn.Sequential(nn.Linear(8, 8), front.wrap(inner)))
    register("forward_pre_hook")
    register("forward_hook", prepend=True)
    register("full_backward_hook")
    if not front.is_ours:
        register("forward_pre_hook", prepend=True)
        register("forward_hook")
        register("full_backward_pre_hook")
    model(front.batch(3, 8)).sum().backward()
    assert all(is_whole for _, is_whole in seen)
    return len(seen) - 3 * (not front.is_ours)


@with_ours(2, both_modes=True)
def test_a_step_after_an_exception(front: Front) -> None:
    """Torch's class needs a reset by hand; ours starts the next step as if nothing had happened."""
    model = wrapped_mlp(front)
    expected = front.train(copy.deepcopy(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.ones(3, 5))
    assert front.train(model, optimizer) == expected


@pytest.mark.ci
@pytest.mark.parametrize("where", ["model", *long("blocks")])
@as_torchs(2)
def test_compiled(front: Front, where: str) -> Any:
    torch._dynamo.reset()
    model = wrapped_mlp(front, use_orig_params=True)
    if where == "model":
        model = torch.compile(model, backend="aot_eager")
    else:
        for i in (0, 2):
            model.module[i] = torch.compile(model.module[i], backend="aot_eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute")  # the compiler looks at it
        return front.train(model)


@as_torchs(2, both_modes=True)
def test_clients_upcast_flat_parameters(front: Front) -> Any:
    """As accelerate does for a model in low precision, before the first forward."""
    inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).bfloat16()
    model = front.wrap(inner, mixed_precision=MixedPrecision(torch.bfloat16))
    (module,) = front.cls.fsdp_modules(model)
    assert module._has_params
    param = module._flat_param
    param.data = param.data.to(torch.float32)
    module._handle._orig_param_dtype = torch.float32
    return [*front.train(model, lr=0.1), {str(each.dtype) for each in model.parameters()}, len(param._fqns)]
