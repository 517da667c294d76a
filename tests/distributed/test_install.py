"""A model of one runtime given to the other, and torch's own users of ``fully_shard``, while fsdp2 is installed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed import _composable_state
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import _runtime_utils, _traversal_utils
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state

import fsdp2
from fsdp2.core.runtime.hooks import ModuleHooks
from tests.harness.distributed import RankContext, distributed
from tests.harness.runtimes import quietly_installed

torchs_fully_shard: Callable[..., Any] = theirs.fully_shard
TorchsModule = theirs.FSDPModule
CPU = torch.device("cpu")


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


@distributed(2)
def test_a_client_reads_the_precision_of_a_module_by_torchs_private_names(ctx: RankContext) -> None:
    def dtypes(fully_shard: Callable[..., Any], policy: Any) -> Any:
        head = fully_shard(nn.Linear(4, 4), mesh=ctx.mesh_1d(), mp_policy=policy(param_dtype=torch.bfloat16))
        head(torch.ones(2, 4))
        state = head._get_fsdp_state()
        assert fully_shard.state(head) == state  # type: ignore[attr-defined]
        return state._mp_policy.param_dtype, [inner._mp_policy.reduce_dtype for inner in state._state_ctx.all_states]

    expected = dtypes(theirs.fully_shard, theirs.MixedPrecisionPolicy)
    with quietly_installed():
        assert dtypes(theirs.fully_shard, theirs.MixedPrecisionPolicy) == expected


@distributed(2)
def test_torchs_registry_knows_our_modules_while_installed(ctx: RankContext) -> None:
    def known(fully_shard: Callable[..., Any]) -> list[bool]:
        model = _model()
        for unit in (model[0], model):
            fully_shard(unit, mesh=ctx.mesh_1d())
        state = fully_shard.state(model[0])  # type: ignore[attr-defined]
        assert (
            _get_module_fsdp_state(model[0])
            is _composable_state._get_module_state(model[0])
            is state
            is model[0]._get_fsdp_state()
        )
        assert _composable_state._get_module_state(model[1]) is None
        hooks = [*model[0]._forward_pre_hooks.values(), *model[0]._forward_hooks.values()]
        assert {hook.__module__ for hook in hooks} == {FSDPState.__module__}
        return [module in _composable_state._module_state_mapping for module in (model, *model)]

    expected = known(torchs_fully_shard)
    sharded = fsdp2.fully_shard(_model(), mesh=ctx.mesh_1d())
    with quietly_installed():
        assert known(theirs.fully_shard) == expected == [True, True, False]
        assert _get_module_fsdp_state(copy.deepcopy(sharded)) is not None
        sharded(torch.ones(2, 4))
        assert _get_module_fsdp_state(sharded) is not None, "it was sharded before, and runs now"
        wrapped, _ = _wrapped(0)
        inner = wrapped.module[1]
        assert [_composable_state._get_module_state(each) for each in (wrapped, inner, inner.module)] == [
            wrapped,
            inner,
            None,
        ]
        assert _traversal_utils._get_fsdp_states_with_modules(wrapped) == ([wrapped, inner], [wrapped, inner])
        assert _traversal_utils._get_fsdp_handles(wrapped) == wrapped._all_handles == [wrapped._handle, inner._handle]
        assert wrapped._is_root is None
        assert _runtime_utils._lazy_init(wrapped, wrapped) is wrapped
        assert [each._is_root for each in (wrapped, inner)] == [True, False]
    assert sharded not in _composable_state._module_state_mapping
    assert _composable_state._get_module_state(wrapped) is None
    assert ModuleHooks.pre_forward.__module__ == ModuleHooks.__module__


@distributed(2)
def test_a_patch_of_a_class_that_we_do_not_use_is_warned_of_once(ctx: RankContext) -> None:
    def trained(model: nn.Module) -> list[str]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                model(torch.ones(2, 4)).sum().backward()
        return [str(each.message) for each in seen if "of torch since" in str(each.message)]

    before = FSDPParamGroup.unshard
    with quietly_installed():
        model = theirs.fully_shard(_model(), mesh=ctx.mesh_1d())
        assert trained(model) == []
        FSDPParamGroup.unshard = lambda self, async_op=False: None  # type: ignore[method-assign]
        FSDPParam.of_a_client = 1  # type: ignore[attr-defined]
        try:
            first, second = sorted(trained(model))
            assert "FSDPParam.of_a_client" in first
            assert "FSDPParamGroup.unshard" in second
            assert "set_all_reduce_hook" in second
            assert trained(theirs.fully_shard(_model(), mesh=ctx.mesh_1d())) == []
        finally:
            FSDPParamGroup.unshard = before  # type: ignore[method-assign]
            del FSDPParam.of_a_client  # type: ignore[attr-defined]


@distributed(2)
def test_torchs_fully_shard_refuses_our_module_and_leaves_no_trace(ctx: RankContext) -> None:
    model = _model()
    fsdp2.fully_shard(model[1], mesh=ctx.mesh_1d())
    before = dict(model.named_parameters())
    with quietly_installed():
        for refuse in (torchs_fully_shard, replicate_with_fsdp.replicate):
            message = rf"{refuse.__name__} of torch\.distributed: module '1', a FSDPLinear.* fsdp2\.fully_shard before"
            with pytest.raises(ValueError, match=message):
                refuse(model, mesh=ctx.mesh_1d())
            assert model.__dict__.get(REGISTRY_KEY, {}) == {}
            assert dict(model.named_parameters()) == before
        fsdp2.fully_shard(model, mesh=ctx.mesh_1d())  # the refused call left nothing behind


@distributed(2)
def test_torchs_runtime_and_replicate_still_work_by_their_old_names(ctx: RankContext) -> None:
    def gradients() -> list[torch.Tensor]:
        model = _model()
        for layer in (*model, model):
            torchs_fully_shard(layer, mesh=ctx.mesh_1d())
        assert isinstance(model, TorchsModule)
        model.set_requires_gradient_sync(True)  # visits all modules of torch's class
        model(torch.ones(2, 4) * (ctx.rank + 1)).sum().backward()
        return [param.grad.to_local() for param in model.parameters()]

    expected = gradients()
    with quietly_installed():
        assert all(map(torch.equal, gradients(), expected))
        model = replicate_with_fsdp.replicate(_model(), mesh=ctx.mesh_1d())
        assert isinstance(model, replicate_with_fsdp.ReplicateModule)
        model(torch.ones(2, 4) * (ctx.rank + 1)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def _wrapped(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    inner = theirs.FullyShardedDataParallel(nn.Linear(4, 4), device_id=CPU)
    model = theirs.FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4), inner), device_id=CPU)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _trained(ctx: RankContext, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The losses of two steps."""
    losses = []
    for step in range(2):
        losses.append(model(torch.ones(3, 4) * (step - ctx.rank)).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("is_full", [False, True])
@distributed(2)
def test_torchs_checkpoint_helpers_take_our_wrappers_of_flat_parameters(ctx: RankContext, is_full: bool) -> None:
    """``tests/parity/fsdp1`` has those of the original parameters."""
    options = StateDictOptions(full_state_dict=is_full)
    with quietly_installed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's helpers use what torch has deprecated
        model, optimizer = _wrapped(0)
        _trained(ctx, model, optimizer)
        of_model, of_optimizer = copy.deepcopy(get_state_dict(model, optimizer, options=options))
        assert all(type(value) is torch.Tensor for value in of_model.values()) is is_full
        expected = _trained(ctx, model, optimizer)
        model, optimizer = _wrapped(1)
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer, options=options)
        assert all(map(torch.equal, _trained(ctx, model, optimizer), expected))
