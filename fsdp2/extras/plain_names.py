"""Names of modules without the names of wrappers around them.

``torch.compile``, ``checkpoint_wrapper``, ``offload_wrapper``, ``FullyShardedDataParallel`` and
``DistributedDataParallel`` put a module inside another one, which shows in ``named_modules``. Rule: every name that
this package returns is the name in the model without wrappers, as in torch's ``get_model_state_dict``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

IN_COMPILED, IN_CHECKPOINT, IN_FSDP1 = "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"
WRAPPED = (IN_COMPILED, IN_CHECKPOINT, IN_FSDP1)  # the attributes in which wrappers keep their modules


def without(name: str, parts: tuple[str, ...] = WRAPPED) -> str:
    """``name`` without those of its parts that are in ``parts``."""
    return ".".join(part for part in name.split(".") if part not in parts)


def clean_name(name: str) -> str:
    """``name`` without those of ``FullyShardedDataParallel``."""
    return without(name, (IN_FSDP1,))


def saved_name(name: str) -> str:
    """The name that state dicts of ``FullyShardedDataParallel`` use, as with torch's class: ``name`` also without those
    of ``checkpoint_wrapper``, but with that of ``torch.compile``."""
    return without(name, (IN_FSDP1, IN_CHECKPOINT))


def joined_name(path: str, name: str) -> str:
    """The name of ``name`` in the module at ``path``, which is empty for the outermost module."""
    return f"{path}.{name}" if path else name


def is_left_out(module: object, child: str) -> bool:
    """Whether names leave out ``child``, the name of the module inside the wrapper ``module``."""
    return child in WRAPPED or (child == "module" and isinstance(module, DistributedDataParallel))


def plain_name(model: nn.Module, name: str) -> str:
    """``name``, from ``named_modules``, ``named_parameters`` or a state dict of ``model``, without wrappers."""
    kept: list[str] = []
    module: nn.Module | None = model
    for part in name.split("."):
        while part not in _children(module) and (inner := _inside_hidden(module)) is not None:
            module = inner
        if not is_left_out(module, part):
            kept.append(part)
        module = _children(module).get(part)
    return ".".join(kept)


def plain_named_modules(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """``model.named_modules`` with names without wrappers. A wrapper has the name of what it wraps, and comes first."""
    for name, module in model.named_modules(remove_duplicate=remove_duplicate):
        yield plain_name(model, name), module


def plain_paths(tops: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """The names without wrappers of all modules under ``tops``."""
    return {module: name for top in tops for name, module in plain_named_modules(top)}


def with_inside(module: nn.Module) -> Iterator[nn.Module]:
    """``module`` and, if it is a wrapper, the modules that it wraps: they all have the same name."""
    inner: nn.Module | None = module
    while inner is not None:
        yield inner
        inner = next((child for name, child in _children(inner).items() if is_left_out(inner, name)), None)


def is_checkpoint_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` was made by ``checkpoint_wrapper`` or ``offload_wrapper``."""
    return IN_CHECKPOINT in _children(module)


def inside_checkpoint(module: nn.Module) -> nn.Module:
    """The module inside a ``checkpoint_wrapper``; ``module`` itself if it is not one."""
    return _children(module).get(IN_CHECKPOINT, module)


def inside_compiled(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` has wrapped; ``module`` itself if it is not compiled."""
    return _children(module).get(IN_COMPILED, module)


def _inside_hidden(module: nn.Module | None) -> nn.Module | None:
    """What is inside a wrapper that leaves itself out of its own state dicts."""
    children = _children(module)
    return next((children[each] for each in (IN_CHECKPOINT, IN_FSDP1) if each in children), None)


def _children(module: nn.Module | None) -> Mapping[str, nn.Module]:
    return {} if module is None else dict(module.named_children())


collects_shards = ContextVar("collects_shards", default=False)  # whether ``bound_state`` runs


def bound_state(model: nn.Module) -> dict[str, Any]:
    """The state dict of ``model`` with the parameters and buffers themselves, under names without wrappers. Front ends
    whose state dicts normally hold other values check ``collects_shards``."""
    token = collects_shards.set(True)
    try:
        return {plain_name(model, name): value for name, value in model.state_dict(keep_vars=True).items()}
    finally:
        collects_shards.reset(token)
