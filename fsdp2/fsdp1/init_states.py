"""Prepares parameters and buffers for sharding: materialises them, moves them, and makes them equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2.core import ParallelMesh, _torch
from fsdp2.extras.plain_names import saved_name
from fsdp2.fsdp1.auto_wrap import modules_outside_units
from fsdp2.fsdp1.search import wrappers_in
from fsdp2.fsdp1.settings import Ignored, Settings, wrong_type


def own_states(module: nn.Module) -> list[Tensor]:
    """The parameters and buffers of ``module`` itself."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _own_params(module: nn.Module, ignored: Ignored) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """The parameters that the wrapper of ``module`` manages, with their owners, and their names there."""
    for each in modules_outside_units(module, ignored.modules):
        for name, param in each.named_parameters(recurse=False):
            if param not in ignored.params:
                yield each, name, param


def check_materialise(module: nn.Module, ignored: Ignored, param_init_fn: object) -> None:
    """Check that :func:`materialise` can do its work."""
    if param_init_fn is not None and not callable(param_init_fn):
        raise ValueError(wrong_type("param_init_fn", param_init_fn, "a function of a module", "Pass one, or None."))
    for each in _to_materialise(module, ignored) if param_init_fn is None else ():
        if own_states(each) and not callable(getattr(each, "reset_parameters", None)):
            raise AttributeError(
                f"FullyShardedDataParallel: the model is on the meta device, and {type(each).__name__} has no "
                "reset_parameters(). Add this method, or pass param_init_fn."
            )


def _to_materialise(module: nn.Module, ignored: Ignored) -> list[nn.Module]:
    """The modules outside other wrappers, if any of them has a parameter or buffer on the meta device."""
    modules = list(modules_outside_units(module, ignored.modules))
    states = (state for each in modules for state in own_states(each))
    return modules if any(state.is_meta and state not in ignored.params for state in states) else []


def materialise(
    module: nn.Module, ignored: Ignored, param_init_fn: Callable[[nn.Module], None] | None, device: torch.device
) -> None:
    """Give values to parameters and buffers on the meta device, by calling ``param_init_fn`` for each module outside
    other wrappers, or else ``reset_parameters`` of the modules that have any."""
    modules = _to_materialise(module, ignored)
    if param_init_fn is not None:
        for each in modules:
            param_init_fn(each)
    else:
        with torch.no_grad():
            for each in modules:
                if own_states(each):
                    each.to_empty(device=device, recurse=False)
                    each.reset_parameters()  # type: ignore[operator]
    for owner, name, param in _own_params(module, ignored):
        if param.is_meta:
            raise RuntimeError(
                f"FullyShardedDataParallel: parameter '{name}' of a {type(owner).__name__} is still on the meta "
                "device after param_init_fn. param_init_fn must give values to the module's own parameters."
            )


def broadcast(module: nn.Module, ignored: Ignored, settings: Settings) -> None:
    """Copy the parameters that are sharded here, and all buffers, from the first rank to all ranks that shard or
    replicate them. Collective. As with torch's class, this includes buffers of ignored modules, and those of inner
    wrappers that have not broadcast them already."""
    sent = {buffer for inner in wrappers_in(module) if inner._sends_states for buffer in inner.buffers()}
    states: Iterable[Tensor] = chain(
        (param for _, _, param in _own_params(module, ignored)),
        (buffer for buffer in module.buffers() if buffer not in sent),
    )
    parallel = settings.parallel
    with torch.no_grad():
        for state in dict.fromkeys(states):
            for leaf in _torch.leaves(_torch.local_of(state) if isinstance(state, DTensor) else state):
                _broadcast_leaf(leaf, parallel)


def _broadcast_leaf(leaf: Tensor, parallel: ParallelMesh) -> None:
    """Copy ``leaf`` from the first rank. For a DTensor, this copies the part that model axes leave to this rank."""
    if leaf.is_meta:  # it belongs to an ignored module, which may have values on other ranks
        travelling = torch.empty_like(leaf, device=parallel.device)
    else:
        travelling = leaf.detach().to(parallel.device).contiguous()
    for axis in (parallel.replicate, parallel.shard):
        if axis.group is not None and axis.size > 1:
            dist.broadcast(travelling, group=axis.group, group_src=0)
    if travelling is not leaf:
        leaf.copy_(travelling)


def check_flat(module: nn.Module, ignored: Ignored) -> None:
    """Refuse parameters that cannot form one flat parameter."""
    named = {param: f"{type(owner).__name__}.{name}" for owner, name, param in _own_params(module, ignored)}
    for what, value_of in (("dtype", lambda p: p.dtype), ("requires_grad", lambda p: p.requires_grad)):
        first: dict[object, str] = {}
        for param, name in named.items():
            first.setdefault(value_of(param), name)
        if len(first) > 1:
            (a, name_a), (b, name_b) = list(first.items())[:2]
            raise ValueError(
                f"FullyShardedDataParallel: {name_a} has {what}={a} and {name_b} has {what}={b}. One flat parameter "
                f"expects one {what}. Pass use_orig_params=True, or wrap these modules separately."
            )
    for param, name in named.items():
        if not param.shape:
            raise ValueError(
                f"FullyShardedDataParallel: {name} is a scalar, which a flat parameter cannot hold. Make it a tensor "
                "of one element, or pass use_orig_params=True."
            )


def keep_low_precision(module: nn.Module, ignored: Ignored) -> None:
    """Let gradients keep the reduce dtype (``keep_low_precision_grads``). Any dtype is allowed, so that users may
    upcast them before the optimizer's step."""
    for _, _, param in _own_params(module, ignored):
        if param.is_floating_point():
            _torch.set_grad_dtype(param, None)


def cast_buffers(module: nn.Module, ignored: Ignored, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Cast the floating-point buffers of ``module`` outside other wrappers. Returns their former dtypes by name."""
    before = {name: buffer.dtype for name, _, _, buffer in _own_buffers(module, ignored)}
    set_buffer_dtypes(module, ignored, before, dtype)
    return before


def set_buffer_dtypes(
    module: nn.Module, ignored: Ignored, original: dict[str, torch.dtype], dtype: torch.dtype | None
) -> None:
    """Cast the buffers named in ``original`` to ``dtype``. None restores the dtypes that ``original`` lists."""
    for name, owner, short, buffer in list(_own_buffers(module, ignored)):
        if name in original:
            owner._buffers[short] = buffer.to(original[name] if dtype is None else dtype)


def _own_buffers(module: nn.Module, ignored: Ignored) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """The floating-point buffers of ``module`` outside other wrappers: the name, the owner, and the name there."""
    names = {each: f"{name}." if name else "" for name, each in module.named_modules()}
    for each in modules_outside_units(module, ignored.modules):
        for short, buffer in each.named_buffers(recurse=False):
            if buffer.is_floating_point():
                yield saved_name(f"{names[each]}{short}"), each, short, buffer
