"""Which modules a policy of ``torch.distributed.fsdp.wrap`` chooses, and how they are wrapped, or sharded without
wrappers."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fsdp2.core import FSDPModule, fully_shard, plans, unit_of
from fsdp2.extras.plain_names import plain_named_modules
from fsdp2.fsdp1.search import is_wrapper
from fsdp2.fsdp1.torch_names import PRIVATE_POLICIES, post_order_apply

Overrides = dict[nn.Module, dict[str, Any]]


def chosen_by(
    policy: Any,
    model: nn.Module,
    ignored_modules: Collection[nn.Module] = frozenset(),
    ignored_params: Collection[nn.Parameter] = frozenset(),
) -> Overrides:
    """Return the modules inside ``model`` that ``policy`` chooses, inner ones first, each with the options that the
    policy overrides. ``model`` itself is not among them. ``policy`` is a ``ModuleWrapPolicy``, a ``CustomPolicy``, or a
    function ``(module, recurse, nonwrapped_numel)``."""
    found: Overrides = {}

    def note(module: nn.Module, **overrides: Any) -> nn.Module:
        found[module] = overrides
        return module

    if isinstance(policy, PRIVATE_POLICIES["_Policy"]):
        found = policy._run_policy(model, set(ignored_modules), {})
    elif callable(policy):
        ask = PRIVATE_POLICIES["_recursive_wrap"]  # replaces each chosen module by what ``note`` returns
        ask(model, policy, note, ignored_modules, ignored_params, only_wrap_children=True)
    else:
        raise TypeError(
            f"the wrapping policy is a {type(policy).__name__}, expected a policy of torch.distributed.fsdp.wrap "
            "or a function (module, recurse, nonwrapped_numel)."
        )
    return {module: found[module] for module in inner_first(model) if module in found and module is not model}


def inner_first(model: nn.Module) -> list[nn.Module]:
    """All modules of ``model``, each listed once, after the modules inside it."""
    found: list[nn.Module] = []
    post_order_apply(model, found.append)
    return found


def check_nothing_is_wrapped(model: nn.Module) -> None:
    """Refuse to apply a policy to a model that is already partly sharded."""
    for name, module in plain_named_modules(model):
        if unit_of(module) is not None:
            raise ValueError(
                f"FullyShardedDataParallel: auto_wrap_policy expects a model without wrappers, but module '{name}', a "
                f"{type(module).__name__}, is sharded already. Wrap by the policy alone, or by hand alone."
            )


def add_full_precision(model: nn.Module, classes: Collection[type[nn.Module]], chosen: Overrides) -> Overrides:
    """Add all modules of ``classes`` to ``chosen``, without mixed precision, so that they compute in fp32. Their inputs
    are cast to fp32, and their outputs back to the dtype of the inputs."""
    kept = tuple(classes)
    found = [module for module in model.modules() if isinstance(module, kept) and module is not model]
    if not found:
        return chosen
    names = ", ".join(sorted({type(module).__name__ for module in found}))
    warnings.warn(
        f"FullyShardedDataParallel: modules of type {names} get a wrapper of their own that computes in full "
        "precision. To change this, pass MixedPrecision(_module_classes_to_ignore=...).",
        stacklevel=5,
    )
    for module in found:
        compute_in_fp32(module)
    added = {**chosen, **{module: {**chosen.get(module, {}), "mixed_precision": None} for module in found}}
    return {module: added[module] for module in inner_first(model) if module in added}


def compute_in_fp32(module: nn.Module) -> None:
    """Cast floating-point inputs of ``module`` to fp32, and its outputs back."""
    before: list[torch.dtype] = []  # dtypes of inputs; forwards of one module can nest

    def cast_inputs(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        dtypes = [arg.dtype for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()]
        before.append(dtypes[0] if dtypes else torch.float32)
        return plans.cast_floating(args, torch.float32)

    def cast_output(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return plans.cast_floating(output, before.pop())

    module.register_forward_pre_hook(cast_inputs, prepend=False)
    module.register_forward_hook(cast_output, prepend=False)


def replace_everywhere(model: nn.Module, wrapped: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules of ``model`` by their wrappers, in every parent. The wrappers keep the modules they wrap."""
    inside = set(wrapped.values())
    for parent in dict.fromkeys(model.modules()):
        if parent not in inside:
            for name, child in list(parent._modules.items()):
                if child is not None and child in wrapped:
                    setattr(parent, name, wrapped[child])


def modules_outside_units(model: nn.Module, ignored: Collection[nn.Module] = frozenset()) -> Iterator[nn.Module]:
    """The modules of ``model`` that no inner wrapper manages and that are not ignored, parents first."""
    waiting, seen = [model], {model}
    for module in waiting:
        yield module
        for child in module.children():
            is_managed = unit_of(child) is not None or is_wrapper(child)
            if child not in seen and not is_managed and child not in ignored:
                seen.add(child)
                waiting.append(child)


def shard_by_policy(model: nn.Module, policy: Any, **options: Any) -> FSDPModule:
    """Shard ``model`` as :func:`fsdp2.auto_shard` does when it is given a ``policy``."""
    params = frozenset(options.get("ignored_params") or ())
    chosen = chosen_by(policy, model, ignored_params=params)
    if not chosen:
        classes = ", ".join(sorted({type(module).__name__ for module in inner_first(model)} - {type(model).__name__}))
        raise ValueError(
            f"auto_shard: the policy chooses no module inside this {type(model).__name__}, which has modules of the "
            f"classes {classes or 'none'}. Choose one of them, or call fully_shard(model) for a single unit."
        )
    options = {"mesh": plans.default_mesh(), **options}
    for module, overrides in chosen.items():
        fully_shard(module, **{**options, **overrides})
    return fully_shard(model, **options)
