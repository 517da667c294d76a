"""The door between the user's code and the runtime: whatever surrounds an entry, values are those of the plain model in
the same surroundings, and what only watches still sees the runtime."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import allow_mutation_on_saved_tensors, save_on_cpu, saved_tensors_hooks
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.logging_tensor import LoggingTensorMode, capture_logs
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from torch.utils.flop_counter import FlopCounterMode

import fsdp2
from fsdp2 import FSDPModule, GradientReductionHandle, MixedPrecisionPolicy, UnshardHandle
from tests.distributed.changes import assert_gradients
from tests.distributed.compile_support import start_compiling
from tests.distributed.support import DIM, Block, Stack, batch, seeded, shard, sharded, step
from tests.harness.distributed import RankContext, distributed
from tests.harness.extensions import Aliasing, wrap
from tests.harness.selection import long

Around = Callable[[], AbstractContextManager[Any]]


class _Replaced(TorchFunctionMode):
    """Replaces the result of every function that makes a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_made = isinstance(result, Tensor) and func in (torch.zeros, torch.empty, torch.ones, torch.Tensor.copy_)
        return torch.full_like(result, 7.0) if is_made else result


class _Skipping(TorchDispatchMode):
    """Leaves out every copy."""

    replaces_results = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if "copy" in str(func) else func(*args, **(kwargs or {}))


AROUND: dict[str, Around] = {
    "mutation of saved tensors": allow_mutation_on_saved_tensors,
    "a mode that skips copies": _Skipping,
    "a mode that replaces functions": _Replaced,
    "the meta device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "saved tensors on the host": save_on_cpu,
    "saved tensors halved": lambda: saved_tensors_hooks(lambda each: each / 2, lambda each: each * 2),
    "anomaly detection": partial(torch.autograd.set_detect_anomaly, True),
    "a watching mode": LoggingTensorMode,
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
}


def _forward(model: Any, around: Around) -> None:
    x = batch()
    with around():
        loss = model(x).float().square().mean()
    loss.backward()


def _backward(model: Any, around: Around) -> None:
    loss = model(batch()).square().mean()
    with around():
        loss.backward()


def _both(model: Any, around: Around) -> None:
    x = batch()
    with around():
        model(x).float().square().mean().backward()


def _evaluation(model: Any, around: Around) -> None:
    x = batch()
    with torch.no_grad(), around():
        model(x)
    step(model)


def _methods(model: Any, around: Around) -> None:
    if isinstance(model, FSDPModule):
        with around():
            model.unshard()
            model.reshard()
            handle = model.blocks[0].unshard(async_op=True)
            handle.wait()
    step(model)


def _state_dicts(model: Any, around: Around) -> None:
    with around():
        state = model.state_dict()
    model.load_state_dict(state)
    step(model)


def _end_of_step(model: Any, around: Around) -> None:
    """The user ends it."""
    is_sharded = isinstance(model, FSDPModule)
    if is_sharded:
        model.set_manual_backward_finalization(True)
        model.set_requires_gradient_sync(False)
    step(model)
    with around():
        if is_sharded:
            model.set_requires_gradient_sync(True)
            model.finalize_backward(async_op=True).wait()


PLACES = (_forward, _backward, _both, _evaluation, _methods, _state_dicts, _end_of_step)
NOT_AT = {  # where the plain model does not train either
    "inference": (_forward, _backward, _both, _state_dicts),  # no DTensor can be detached there
    "no gradients": (_forward, _backward, _both),
    "mutation of saved tensors": (_forward, _backward),
}
CASES = [(place, name) for place in PLACES for name in AROUND if place not in NOT_AT.get(name, ())]


@pytest.mark.parametrize(("place", "name"), CASES, ids=lambda each: getattr(each, "__name__", each))
@distributed(2)
def test_values_are_those_of_the_plain_model(ctx: RankContext, place: Callable[..., None], name: str) -> None:
    """In the first step, which binds everything, and in another one. Blocks have all-gather hooks, too."""
    for has_hooks in (False, True):
        model, plain = seeded(Stack), seeded(Stack)
        for block in model.blocks if has_hooks else ():
            wrap(block, Aliasing)
        shard(ctx, model)
        for _ in range(2):
            place(model, AROUND[name])
            place(plain, nullcontext if name == "a mode that skips copies" else AROUND[name])  # autograd copies, too
            assert_gradients(model, plain, atol=1e-5)


# Checkpoints that keep results

VIEWS = ("view", "aten.t.", "detach")


class _Keeping(TorchDispatchMode):
    """A user's own selective checkpointing: what is computed in forward is handed out again."""

    replaces_results = True

    def __init__(self, results: list[Any], is_first: bool) -> None:
        super().__init__()
        self._results, self._is_first = results, is_first

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in VIEWS):
            return func(*args, **(kwargs or {}))
        if not self._is_first:
            return self._results.pop(0).detach()
        result = func(*args, **(kwargs or {}))
        self._results.append(result.detach())
        return result


def _own_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    results: list[Any] = []
    return _Keeping(results, True), _Keeping(results, False)


def _keeps_but_views(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_view = any(name in str(func) for name in VIEWS)
    return CheckpointPolicy.PREFER_RECOMPUTE if is_view else CheckpointPolicy.MUST_SAVE


def _keeps_products_and_views(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = any(name in str(func) for name in ("view", "mm"))
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


CONTEXTS: dict[str, Callable[[], Any]] = {
    "products and views": partial(create_selective_checkpoint_contexts, _keeps_products_and_views),
    "all but views": partial(create_selective_checkpoint_contexts, _keeps_but_views),
    "a mode of the user": _own_contexts,
}


class _Checkpointed(nn.Module):
    """``size`` units in each checkpoint; inputs have three axes, so that products are of views."""

    def __init__(self, size: int, contexts: Callable[[], Any]) -> None:
        super().__init__()
        self.entry, self.blocks = nn.Linear(DIM, DIM), nn.ModuleList(Block() for _ in range(4))
        self._size, self._contexts = size, contexts

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x.view(2, 2, DIM))
        for first in range(0, len(self.blocks), self._size):
            blocks = nn.Sequential(*self.blocks[first : first + self._size])
            x = checkpoint(blocks, x, use_reentrant=False, context_fn=self._contexts)
        return x


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=["resharded", "kept"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", list(CONTEXTS))
@distributed(2)
def test_selective_checkpointing_around_units(ctx: RankContext, name: str, size: int, options: dict[str, Any]) -> None:
    make = partial(_Checkpointed, size, CONTEXTS[name])
    plain, model = seeded(make), shard(ctx, seeded(make), **options)
    for seed in range(2):
        for each in (model, plain):
            each.zero_grad()
            step(each, seed)
        assert_gradients(model, plain)


def _cast_as_units_do(module: nn.Module, dtype: torch.dtype) -> None:
    """Inputs to fp32, and outputs to ``dtype``."""
    module.register_forward_pre_hook(lambda _, args: tuple(each.float() for each in args))
    module.register_forward_hook(lambda _, __, output: output.to(dtype))


@pytest.mark.parametrize("size", [1, *long(2)])
@pytest.mark.parametrize("name", ["all but views", "products and views", *long("a mode of the user")])
@distributed(2)
def test_output_dtype_under_selective_checkpointing(ctx: RankContext, name: str, size: int) -> None:
    """The cast of an output is part of what is checkpointed: a policy sees it in forward and in the recomputation."""
    make = partial(_Checkpointed, size, CONTEXTS[name])
    plain, model = seeded(make), seeded(make)
    for each in (*plain.blocks, plain):
        _cast_as_units_do(each, torch.bfloat16)
    shard(ctx, model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16))
    for seed in range(2):
        for each in (model, plain):
            each.zero_grad()
            with set_checkpoint_early_stop(False):  # else the last cast is not computed again
                loss = each(batch(seed)).float().square().mean()
            loss.backward()
        assert_gradients(model, plain)


# Hooks of the user that run when gradients land


class _Products:
    """A user's hook, as a registered one and as an all-reduce hook: dtypes of products that it computes."""

    def __init__(self) -> None:
        self.dtypes: list[torch.dtype] = []

    def __call__(self, tensor: Tensor) -> None:
        grad = tensor if tensor.grad is None else tensor.grad
        local = (grad.to_local() if isinstance(grad, DTensor) else grad).detach().reshape(1, -1)
        self.dtypes.append((local @ local.T).dtype)


class _Left(TorchDispatchMode):
    """The door leaves it; it does nothing."""

    replaces_results = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("also", [_Left, nullcontext])
@pytest.mark.parametrize("place", [_forward, _backward])
@distributed(2)
def test_hooks_at_the_landing_compute_in_the_autocast_of_the_user(
    ctx: RankContext, place: Callable[..., None], also: Around
) -> None:
    """As in the plain model: in that around ``backward()``, also where the door leaves something else."""
    plain, model = seeded(Stack), sharded(ctx, mesh=ctx.mesh_2d(1, 2))
    seen, expected, of_sums = _Products(), _Products(), _Products()
    for each, hook in ((model, seen), (plain, expected)):
        for param in each.parameters():
            param.register_post_accumulate_grad_hook(hook)
    model.set_all_reduce_hook(of_sums)
    for each in (model, plain):
        with also():
            place(each, AROUND["autocast"])
    assert set(seen.dtypes) == set(expected.dtypes) == set(of_sums.dtypes)
    assert len(seen.dtypes) == len(expected.dtypes)
    assert expected.dtypes[0] is (torch.bfloat16 if place is _backward else torch.float32)


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=["resharded", "kept"])
@pytest.mark.parametrize("is_first", [False, True])
@distributed(2)
def test_a_forward_under_fake_tensors_leaves_a_model_whose_values_are_real(
    ctx: RankContext, is_first: bool, options: dict[str, Any]
) -> None:
    """As of the plain model, outputs are fake. What the forward has gathered, the next one may find."""
    model, plain = sharded(ctx, **options), seeded(Stack)
    for each in (model, plain):
        if not is_first:
            step(each)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert isinstance(each(batch()), FakeTensor)
        step(each, 1)
    assert_gradients(model, plain)


# What watches


def _seen_by_logging(run: Callable[[], object]) -> str:
    with capture_logs() as logs, LoggingTensorMode():
        run()
    return "\n".join(logs)


def _seen_by_debug_mode(run: Callable[[], object]) -> str:
    with DebugMode() as mode:
        run()
    return str(mode.debug_string())


WATCHERS = {"logging": _seen_by_logging, "debug mode": _seen_by_debug_mode}


@pytest.mark.parametrize("name", list(WATCHERS))
@pytest.mark.parametrize("also", [None, "the meta device", "a mode that skips copies", "autocast"])
@distributed(2)
def test_what_watches_sees_the_runtime(ctx: RankContext, name: str, also: str | None) -> None:
    """Also where the door leaves something else."""
    model = sharded(ctx)
    step(model)

    x = batch()

    def run() -> None:
        with nullcontext() if also is None else AROUND[also]():
            model(x)

    assert "c10d" in WATCHERS[name](run)


@distributed(2)
def test_counters_of_operations_and_memory_work_around_a_step(ctx: RankContext) -> None:
    model, plain = sharded(ctx), seeded(Stack)
    step(model)
    counts = []
    for each in (model, plain):
        with FlopCounterMode(display=False) as counter:
            step(each)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        step(model)
    assert tracker.get_tracker_snapshot("peak")


# Graphs that the compiler records


def _read_whole(model: Any) -> None:
    with fsdp2.unsharded(model), torch.no_grad():
        for param in model.parameters():
            param.mul_(1.0)


CALLS: dict[str, Callable[[Any], object]] = {
    "unshard": lambda model: model.unshard(),
    "unshard, then wait": lambda model: model.unshard(async_op=True).wait(),
    "reshard": lambda model: model.reshard(),
    "set_is_last_backward": lambda model: model.set_is_last_backward(True),
    "set_requires_gradient_sync": lambda model: model.set_requires_gradient_sync(True),
    "set_reshard_after_forward": lambda model: model.set_reshard_after_forward(True),
    "set_modules_to_forward_prefetch": lambda model: model.set_modules_to_forward_prefetch([model.blocks[0]]),
    "reset_iter_state": lambda model: model.reset_iter_state(),
    "state_dict": lambda model: model.state_dict(),
    "unsharded": _read_whole,
    "clip_grad_norm_": lambda model: fsdp2.clip_grad_norm_(model.parameters(), 1e6),
    "stream_full_params": lambda model: [float(each.sum()) for _, each in fsdp2.checkpoint.stream_full_params(model)],
    "evaluation": lambda model: model.eval()(batch()).sum().item(),
    "backward": lambda model: step(model),
    "two backwards": lambda model: (step(model), step(model)),
}


@pytest.mark.parametrize("name", list(CALLS))
@distributed(2)
def test_methods_and_steps_inside_of_compiled_functions(ctx: RankContext, name: str) -> None:
    start_compiling()
    model, plain = sharded(ctx), seeded(Stack)
    compiled = torch.compile(CALLS[name], backend="eager")
    for _ in range(2):
        compiled(model)
        if name.endswith(("backward", "backwards")) and not name.startswith("set_"):
            CALLS[name](plain)
        step(model.train())
        step(plain)
        assert_gradients(model, plain, atol=1e-5)


def test_every_public_method_is_an_entry() -> None:
    for cls in (FSDPModule, UnshardHandle, GradientReductionHandle):
        methods = {name: each for name, each in vars(cls).items() if inspect.isfunction(each) and name[0] != "_"}
        inside = [name for name, each in methods.items() if not getattr(each, "_torchdynamo_disable", False)]
        assert methods
        assert not inside
