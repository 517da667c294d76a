"""Each row of the table for FSDP1: the old program runs under the wrapper class, the new one under fsdp2."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

import fsdp2
from tests.docs.migrating.rows import (
    Rows,
    actions,
    adamw,
    backward,
    by_fsdp2,
    close,
    forward,
    gathers,
    gradients,
    model,
    parameters,
    sgd,
    train,
    wrap,
)
from tests.harness.distributed import RankContext
from tests.harness.models import MLP, Block
from tests.harness.pool import shared_pool

ROWS = Rows("From FSDP1", omits_some=True)


@pytest.mark.parametrize("cell", ROWS)
def test_row(cell: str) -> None:
    ROWS.run(cell)


@pytest.mark.parametrize("cell", ROWS)
def test_row_works_as_it_is(cell: str) -> None:
    """The old program with our class in the place of torch's, beside ``fully_shard``."""
    _, world_size = ROWS[cell]
    shared_pool(world_size).run(_with_our_class, cell=cell)


def _with_our_class(ctx: RankContext, cell: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(globals(), "FullyShardedDataParallel", fsdp2.FullyShardedDataParallel)
        warnings.filterwarnings("ignore", message=".* BACKWARD_POST does the same")
        ROWS[cell][0](ctx)


def test_every_row_is_tried() -> None:
    ROWS.check()


def _old(whole: nn.Module | None = None, **options: Any) -> Any:
    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(
        whole or model(), auto_wrap_policy=policy, **{"use_orig_params": True, "device_id": _CPU, **options}
    )


_CPU = torch.device("cpu")


def _name(old: str) -> str:
    return old.replace("_fsdp_wrapped_module.", "")


def _summoned(old: Any) -> list[Any]:
    """Its last gradients and its parameters, whole, under the names of the model inside."""
    with FullyShardedDataParallel.summon_full_params(old, with_grads=True):
        named = [(_name(name), parameter) for name, parameter in old.named_parameters()]
        grads = {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}
        return [grads, {name: parameter.detach().clone() for name, parameter in named}]


def _trained_old(ctx: RankContext, old: Any, step: Any = backward, make_optimizer: Any = sgd) -> list[Any]:
    optimizer = make_optimizer(old)
    losses, last = [], None
    for index in range(2):
        losses.append(step(ctx, old, index))
        last = _summoned(old)[0]
        optimizer.step()
        optimizer.zero_grad()
    return [losses, last, _summoned(old)[1]]


@ROWS("`FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))`")
def wrapping(ctx: RankContext) -> None:
    new = model()
    for candidate in new.modules():
        if isinstance(candidate, Block):
            fsdp2.fully_shard(candidate, mesh=ctx.mesh_1d())
    fsdp2.fully_shard(new, mesh=ctx.mesh_1d())
    close(train(ctx, new), _trained_old(ctx, _old()))


@ROWS("`sharding_strategy=FULL_SHARD`")
def full_shard(ctx: RankContext) -> None:
    new = by_fsdp2(ctx)
    close(train(ctx, new), _trained_old(ctx, _old(sharding_strategy=ShardingStrategy.FULL_SHARD)))
    found = gathers(new, lambda: backward(ctx, new))
    assert sorted(found) == ["(root)", *2 * ["blocks.0"], *2 * ["blocks.1"]]


@ROWS("`sharding_strategy=SHARD_GRAD_OP`")
def shard_grad_op(ctx: RankContext) -> None:
    new = by_fsdp2(ctx, reshard_after_forward=False)
    close(train(ctx, new), _trained_old(ctx, _old(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)))
    assert gathers(new, lambda: backward(ctx, new)) == ["(root)", "blocks.0", "blocks.1"]


@ROWS("`sharding_strategy=HYBRID_SHARD`", world_size=4)
def hybrid_shard(ctx: RankContext) -> None:
    mesh = ctx.mesh_2d(2, 2)
    expected = _trained_old(ctx, _old(sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh))
    close(train(ctx, wrap(fsdp2, mesh)), expected)


@ROWS("`sharding_strategy=NO_SHARD`")
def no_shard(ctx: RankContext) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        expected = _trained_old(ctx, _old(sharding_strategy=ShardingStrategy.NO_SHARD))
    close(train(ctx, wrap(fsdp2, ctx.mesh_2d(2, 1))), expected)


@ROWS("`process_group=`, `device_mesh=`")
def process_group(ctx: RankContext) -> None:
    expected = _trained_old(ctx, _old(process_group=ctx.mesh_1d().get_group()))
    close(train(ctx, by_fsdp2(ctx)), expected)


@ROWS("`mixed_precision=MixedPrecision(param_dtype, reduce_dtype)`")
def mixed_precision(ctx: RankContext) -> None:
    old = _old(mixed_precision=MixedPrecision(torch.bfloat16, torch.float32))
    new = by_fsdp2(ctx, mp_policy=fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    expected, found = _trained_old(ctx, old), train(ctx, new)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-3)


@ROWS("`MixedPrecision(cast_forward_inputs, cast_root_forward_inputs)`")
def cast_forward_inputs(ctx: RankContext) -> None:
    """FSDP1 casts at the root alone by default; both are said per unit here."""
    seen: list[torch.dtype] = []
    whole = model()
    whole.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
    root = fsdp2.MixedPrecisionPolicy(torch.bfloat16)
    for block in whole.blocks:
        fsdp2.fully_shard(block, mesh=ctx.mesh_1d(), mp_policy=policy)
    fsdp2.fully_shard(whole, mesh=ctx.mesh_1d(), mp_policy=root)
    old = _old(mixed_precision=MixedPrecision(torch.bfloat16))
    torch.testing.assert_close(forward(ctx, whole), forward(ctx, old), rtol=2e-2, atol=2e-3)
    assert seen == [torch.bfloat16]


@ROWS("`keep_low_precision_grads=True`")
def keep_low_precision_grads(ctx: RankContext) -> None:
    old = _old(mixed_precision=MixedPrecision(torch.bfloat16, keep_low_precision_grads=True))
    whole = model()
    for parameter in whole.parameters():
        parameter.grad_dtype = torch.bfloat16
    new = by_fsdp2(ctx, whole, mp_policy=fsdp2.MixedPrecisionPolicy(torch.bfloat16))
    for module in (old, new):
        backward(ctx, module)
        assert {p.grad.dtype for p in module.parameters() if p.grad is not None} == {torch.bfloat16}


@ROWS("`backward_prefetch`, `forward_prefetch`, `limit_all_gathers`")
def prefetch(ctx: RankContext) -> None:
    old = _old(backward_prefetch=BackwardPrefetch.BACKWARD_POST, forward_prefetch=True, limit_all_gathers=False)
    new = by_fsdp2(ctx)
    close(train(ctx, new), _trained_old(ctx, old))
    starts = [action for action in actions(new, lambda: backward(ctx, new)) if action.startswith(("unsh", "pref"))]
    ahead = ["prefetch blocks.0", "prefetch blocks.1"]
    assert starts == ["unshard (root)", *ahead, *reversed(ahead)]


@ROWS("`cpu_offload=CPUOffload(offload_params=True)`")
def cpu_offload(ctx: RankContext) -> None:
    """FSDP1's offloading wants an accelerator to pin memory for; without one, nothing is left to differ."""
    new = by_fsdp2(ctx, offload_policy=fsdp2.CPUOffloadPolicy())
    close(train(ctx, new), _trained_old(ctx, _old()))
    assert {parameter.device.type for parameter in new.parameters()} == {"cpu"}


@ROWS("`ignored_states=`, `ignored_modules=`")
def ignored(ctx: RankContext) -> None:
    old_model, new_model = model(), model()
    old = _old(old_model, ignored_states=[*old_model.exit.parameters()])
    new = by_fsdp2(ctx, new_model, ignored_params=set(new_model.exit.parameters()))
    backward(ctx, old)
    backward(ctx, new)
    assert not isinstance(new.exit.weight, DTensor)
    close(new.exit.weight.grad, old_model.exit.weight.grad)  # of this rank alone


@ROWS("`with model.no_sync():`")
def no_sync(ctx: RankContext) -> None:
    def old_step(ctx: RankContext, old: Any, index: int) -> Tensor:
        with old.no_sync():
            backward(ctx, old, 10 * index)
        return backward(ctx, old, 10 * index + 1)

    def new_step(ctx: RankContext, new: Any, index: int) -> Tensor:
        with fsdp2.no_sync(new):
            backward(ctx, new, 10 * index)
        return backward(ctx, new, 10 * index + 1)

    close(train(ctx, by_fsdp2(ctx), new_step), _trained_old(ctx, _old(), old_step))


@ROWS("`with FSDP.summon_full_params(model):`")
def summon_full_params(ctx: RankContext) -> None:
    old, new = _old(), by_fsdp2(ctx)
    with fsdp2.unsharded(new), FullyShardedDataParallel.summon_full_params(old), torch.no_grad():
        for parameters_ in (dict(old.named_parameters()).values(), dict(new.named_parameters()).values()):
            for index, parameter in enumerate(parameters_):
                parameter.mul_(index)
    close(parameters(new), _summoned(old)[1])


@ROWS("`model.clip_grad_norm_(max_norm)`")
def clip_grad_norm(ctx: RankContext) -> None:
    norms = []

    def old_step(ctx: RankContext, old: Any, index: int) -> Tensor:
        loss = backward(ctx, old, index)
        norms.append(old.clip_grad_norm_(0.1))
        return loss

    def new_step(ctx: RankContext, new: Any, index: int) -> Tensor:
        loss = backward(ctx, new, index)
        norms.append(fsdp2.clip_grad_norm_(new.parameters(), 0.1))
        return loss

    expected = _trained_old(ctx, _old(), old_step)
    close(train(ctx, by_fsdp2(ctx), new_step), expected)
    close(norms[2:], norms[:2])


@ROWS("`use_orig_params=True`")
def use_orig_params(ctx: RankContext) -> None:
    old, new = dict(_old().named_parameters()), dict(by_fsdp2(ctx).named_parameters())
    assert [_name(name) for name in old] == list(new)
    assert all(isinstance(parameter, DTensor) for parameter in new.values())


@ROWS("`use_orig_params=False`, for optimizers that step one flat parameter per unit")
def flat_parameters(ctx: RankContext) -> None:
    old, losses = _old(use_orig_params=False), []
    optimizer = sgd(old)
    assert len(optimizer.param_groups[0]["params"]) == 3  # of two blocks and the root
    for index in range(2):
        losses.append(backward(ctx, old, index))
        optimizer.step()
        optimizer.zero_grad()
    with FullyShardedDataParallel.summon_full_params(old):
        values = {_name(name): parameter.detach().clone() for name, parameter in old.named_parameters()}

    new = by_fsdp2(ctx)
    found = train(ctx, new, make_optimizer=lambda module: fsdp2.flatten_optimizer(sgd(module)))
    close([found[0], found[2]], [losses, values])


@ROWS("`sync_module_states=True`")
def sync_module_states(ctx: RankContext) -> None:
    """FSDP1's wants an accelerator; what rank 0 has is what it is compared with."""
    new = by_fsdp2(ctx)
    with torch.no_grad():
        new.exit.bias.to_local().fill_(float(ctx.rank))
    values = model().state_dict() if ctx.rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(new, values, options=options)
    close(parameters(new), dict(model().named_parameters()))


@ROWS("`param_init_fn`, meta device")
def meta_device(ctx: RankContext) -> None:
    def init(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter.to_local() if isinstance(parameter, DTensor) else parameter, 0.25)

    def materialise(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        init(module)

    with torch.device("meta"):
        old_model, new_model = MLP(2), MLP(2)
    old = _old(old_model, param_init_fn=materialise)
    new = by_fsdp2(ctx, new_model)
    new.to_empty(device="cpu")
    new.apply(init)
    close(train(ctx, new), _trained_old(ctx, old))


WHOLE = StateDictOptions(full_state_dict=True)


@ROWS("`FSDP.state_dict_type(model, FULL_STATE_DICT)`")
def full_state_dict(ctx: RankContext) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with FullyShardedDataParallel.state_dict_type(
            old := _old(), StateDictType.FULL_STATE_DICT, FullStateDictConfig()
        ):
            expected = dict(old.state_dict())
    new = by_fsdp2(ctx)
    close(get_model_state_dict(new, options=WHOLE), expected)
    with torch.no_grad():
        new.exit.weight.zero_()
    set_model_state_dict(new, dict(expected), options=WHOLE)
    close(parameters(new), expected)


@ROWS("`FSDP.state_dict_type(model, SHARDED_STATE_DICT)`")
def sharded_state_dict(ctx: RankContext) -> None:
    old = _old(device_mesh=ctx.mesh_1d())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with FullyShardedDataParallel.state_dict_type(old, StateDictType.SHARDED_STATE_DICT):
            expected = {name: value.full_tensor() for name, value in old.state_dict().items()}
    found = by_fsdp2(ctx).state_dict()
    close({name: value.full_tensor() for name, value in found.items()}, expected)


@ROWS("`FSDP.optim_state_dict(model, optimizer)`")
def optim_state_dict(ctx: RankContext) -> None:
    """Of FSDP1's, the names alone: on the CPU it returns the values of ``exp_avg_sq`` under ``exp_avg``."""
    old, new = _old(), by_fsdp2(ctx)
    old_adamw, new_adamw = adamw(old), adamw(new)
    for module, optimizer in ((old, old_adamw), (new, new_adamw)):
        backward(ctx, module)
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with FullyShardedDataParallel.state_dict_type(old, StateDictType.FULL_STATE_DICT):
            names = FullyShardedDataParallel.optim_state_dict(old, old_adamw)["state"].keys()
    found: Any = get_optimizer_state_dict(new, new_adamw, options=WHOLE)["state"]
    assert found.keys() == names
    for name, gradient in gradients(new).items():
        close(found[name]["exp_avg"], 0.1 * gradient)


@ROWS("`apply_activation_checkpointing(model, ...)`")
def activation_checkpointing(ctx: RankContext) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    def checkpointed(module: Any) -> Any:
        apply_activation_checkpointing(module, check_fn=lambda candidate: isinstance(candidate, Block))
        return module

    old = checkpointed(_old())
    whole = checkpointed(model())
    new = by_fsdp2(ctx, whole)
    backward(ctx, old)
    backward(ctx, new)
    expected = {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in _summoned(old)[0].items()}
    found = {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in new.named_parameters()}
    close({name: grad.full_tensor() for name, grad in found.items()}, expected)
    assert all(isinstance(block, fsdp2.FSDPModule) for block in new.blocks)
