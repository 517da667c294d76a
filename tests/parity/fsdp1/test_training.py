"""Plain training with the class, wrapped by hand: losses as with torch's class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from fsdp2 import _torch
from tests.parity.fsdp1.fronts import (
    FULL_SHARD,
    GRAD_OP,
    NO_SHARD,
    ON_TWO_RANKS,
    Front,
    as_torchs,
    with_ours,
    wrapped_mlp,
)


@pytest.mark.parametrize("strategy", [FULL_SHARD, GRAD_OP, NO_SHARD])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@as_torchs(2, 4, exact=ON_TWO_RANKS, both_modes=True)
def test_trains_as_torchs(front: Front, optimizer, strategy) -> Any:
    return front.train(wrapped_mlp(front, sharding_strategy=strategy), optimizer)


@as_torchs(2, both_modes=True)
def test_gradients_accumulate_with_and_without_communication(front: Front) -> Any:
    model = wrapped_mlp(front)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(3):
        with model.no_sync():
            model(front.batch(3, 8, seed=step)).square().mean().backward()
        model(front.batch(3, 8, seed=step + 7)).square().mean().backward()
        loss = model(front.batch(3, 8, seed=step + 9)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 1)
        losses.append(loss.detach())
    return losses


def after_no_sync(front: Front, zero_grad: str) -> torch.Tensor:
    """An output after a step whose first gradients, of ``no_sync``, ``zero_grad`` of the model or optimizer drops."""
    torch.manual_seed(0)
    model = wrapped_mlp(front)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        model(front.batch(3, 8)).square().mean().backward()
    if zero_grad:
        {"model": model, "optimizer": optimizer}[zero_grad].zero_grad()
    model(front.batch(3, 8, seed=1)).square().mean().backward()
    optimizer.step()
    return model(front.batch(3, 8, seed=2)).detach()


@as_torchs(2, both_modes=True)
def test_zero_grad_of_the_model_drops_what_no_sync_has_left(front: Front) -> Any:
    """The optimizer's finds it with torch's class only, as ``docs/migrating.md`` says."""
    finds_it = "" if front.is_ours else "model"
    found = [after_no_sync(front, who) for who in ("model", "optimizer", finds_it)]
    assert torch.equal(found[1], found[2])
    return found[0]


@as_torchs(2, both_modes=True)
def test_parameters_have_torchs_names(front: Front) -> Any:
    """Clients join names of modules, and look for the result among those of parameters. Flat ones have torch's mark."""
    model = wrapped_mlp(front)
    with front.cls.summon_full_params(model):
        inside = [name for name, _ in model.named_parameters()]
    (group,) = torch.optim.SGD(model.parameters()).param_groups
    marks = [front.use_orig_params or param._fsdp_flattened for param in group["params"]]
    return [name for name, _ in model.named_parameters()], inside, marks


def names_to_decay(module: nn.Module) -> list[str]:
    """As transformers' ``Trainer`` finds them: it walks modules, leaves out norms and biases, and then looks for the
    names among those of ``named_parameters``."""
    children = [(name, child) for name, child in module.named_children() if not isinstance(child, nn.LayerNorm)]
    inside = [f"{name}.{each}" for name, child in children for each in names_to_decay(child)]
    return [name for name in [*inside, *module._parameters] if "bias" not in name]


@pytest.mark.every_case
@pytest.mark.parametrize("checkpoints", ["none", "inside", "around", "later"])
@as_torchs(2, both_modes=True)
def test_clients_that_walk_modules_find_what_to_decay(front: Front, checkpoints: str) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 7)), nn.Linear(7, 4))
    model[1], model[3] = front.wrap(model[1]), front.wrap(model[3].requires_grad_(False))
    model[0] = front.wrap(checkpoint_wrapper(model[0]) if checkpoints == "inside" else model[0])
    model[0] = checkpoint_wrapper(model[0]) if checkpoints == "around" else model[0]
    model = front.wrap(model)
    if checkpoints == "later":
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    params, decayed = dict(model.named_parameters()), names_to_decay(model)
    groups = [[name for name in params if (name in decayed) == decays] for decays in (True, False)]
    given = [
        {"params": [params[name] for name in names], "weight_decay": decay}
        for names, decay in zip(groups, (0.5, 0.0), strict=True)
    ]
    found = [*groups, [param.requires_grad for param in params.values()], type(model[3].module)]
    return [*found, *front.train(model, torch.optim.AdamW(given, 1e-2))]


@with_ours(2)
def test_gradient_of_a_flat_parameter_lies_where_those_of_the_shards_do(front: Front) -> None:
    flat = front.wrap(nn.Linear(8, 8))._flat_param
    memory = torch.arange(100.0 + flat.numel())[100:]  # late in its storage
    places = [(param.sharded, part.data_ptr() - memory.data_ptr(), part.shape) for param, part in flat.parts(memory)]
    params = [param for param, _, _ in places]
    parts = [memory[start // 4 : start // 4 + shape.numel()].view(shape) for _, start, shape in places]
    _torch.set_grads(params, parts)
    assert torch.equal(flat.grad, memory)
    assert flat.grad.data_ptr() == memory.data_ptr()


@with_ours(2)
def test_data_of_a_flat_parameter_may_be_a_part_of_another_tensor(front: Front) -> None:
    flat = front.wrap(nn.Linear(8, 8))._flat_param
    values = torch.arange(100.0 + 2 * flat.numel())[100::2]
    flat.data = values
    assert torch.equal(flat.detach(), values)


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
@with_ours(2)
def test_hooks_that_a_flat_parameter_would_never_call_are_refused(front: Front, method: str) -> None:
    model = front.wrap(nn.Sequential(nn.Linear(8, 8), front.wrap(nn.Linear(8, 4))))
    front.train(model, num_steps=1)
    for index, flat in enumerate(model.parameters()):
        with pytest.raises(NotImplementedError, match=f"'{index}.weight', '{index}.bias'.* use_orig_params=True"):
            getattr(flat, method)(lambda _: None)
