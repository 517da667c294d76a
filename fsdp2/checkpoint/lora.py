"""Merges LoRA adapters of peft while the model is streamed, and leaves the trainer's model unchanged.

Reads attributes of peft's layers and imports nothing from peft. Rule: anything that was not compared with peft's own
merge is refused, in any version: classes of peft, tensors and options of an adapter are all checked by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp2.checkpoint.mapping import listed
from fsdp2.extras.checked import checked
from fsdp2.extras.plain_names import bound_state, plain_named_modules
from fsdp2.extras.units import own_class

_PEFT_PREFIX = "base_model.model."
# Classes that were compared with peft 0.10 to 0.21: layers, and the modules around them.
_LAYERS = {"peft.tuners.lora.layer.Linear", "peft.tuners.lora.bnb.Linear4bit"}
_AROUND = {"peft.tuners.lora.model.LoraModel", "peft.utils.other.ModulesToSaveWrapper"}
_MODELS = "peft.peft_model.PeftModel"  # and those for a task, whose names begin like this
# The options of an adapter that the merge supports or that do not affect it. All others must be off.
_OPTIONS = {"r", "lora_alpha", "scaling", "lora_dropout", "use_rslora"}


class MergedLora(NamedTuple):
    """Arguments for :func:`stream_full_params`, as :func:`merge_lora` returns them."""

    transform: Mapping[str | tuple[str, ...], Callable[..., Mapping[str, torch.Tensor]]]
    rename: Mapping[str, str]


@checked()
def merge_lora(model: nn.Module, dtype: torch.dtype | None = None) -> MergedLora:
    """Arguments with which ``stream_full_params`` yields peft's ``model`` as ``merge_and_unload`` would leave it.

    The stream has the base model's names, and each weight includes its active LoRA adapters: ``W + scaling * B A``,
    computed in fp32 for half precision. Other adapters are left out. For ``modules_to_save``, the active copy is used.
    Names and scalings are read once: call this again after ``set_adapter``. If the base model ties a weight that is
    adapted or has an active copy, its other names get the values that the trainer computes with: without the adapter.

    Args:
        model: a ``PeftModel``, sharded or not.
        dtype: the dtype of the merged weights. Default: that of the base weight.

    Raises:
        ValueError: there is no LoRA layer; a layer is adapted in another way (DoRA and other variants, embeddings,
            trainable tokens, convolutions, biases, methods other than LoRA), or is of an untested class.

    Source: Hu et al., "LoRA", arXiv 2106.09685; the attributes ``scaling`` and ``active_adapters`` of peft.
    """
    modules = dict(plain_named_modules(model, remove_duplicate=False))
    layers = {name: each for name, each in modules.items() if hasattr(each, "base_layer") and hasattr(each, "lora_A")}
    if not layers:
        raise ValueError(
            f"merge_lora: no module of this {type(model).__name__} is a LoRA layer of peft. Stream it without, or pass "
            "the model that get_peft_model returned."
        )
    state = bound_state(model)
    _check_classes(modules, layers)
    for name, layer in layers.items():
        _check_layer(name, layer, state)
    transform: dict[str | tuple[str, ...], Any] = {}
    rename = {name: name.removeprefix(_PEFT_PREFIX) for name in state}
    for name, layer in layers.items():
        transform.update(_of_layer(name, layer, rename, dtype))
    for name, module in modules.items():
        if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
            transform.update(_of_copies(name, module, rename))
    return MergedLora(dict(_with_ties(transform, state)), rename)


def _with_ties(
    transform: Mapping[str | tuple[str, ...], Any], state: Mapping[str, Any]
) -> Iterator[tuple[str | tuple[str, ...], Any]]:
    """``transform``, adapted to tensors with several names in ``state``, which a stream yields once. Each tensor is
    taken once, and is also handed out unchanged under a name that no function takes."""
    names_of: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names_of.setdefault(id(tensor), []).append(name)
    by_names = [((key,) if isinstance(key, str) else key, function) for key, function in transform.items()]
    taken = {name for names, _ in by_names for name in names}
    done: set[int] = set()
    for names, function in sorted(by_names, key=lambda each: each[1] is _nothing):
        tensors = {id(state[name]) for name in names}
        if tensors <= done:
            continue
        done |= tensors
        others = [next((each for each in names_of[id(state[name])] if each not in taken), None) for name in names]
        yield names, partial(_beside, function=function, others=others) if any(others) else function


def _of_layer(
    name: str, layer: Any, rename: dict[str, str], dtype: torch.dtype | None
) -> Iterator[tuple[str | tuple[str, ...], Any]]:
    """The transforms for the tensors of the LoRA ``layer``. Adds names without ``base_layer`` to ``rename``."""
    for key in [key for key in rename if key.startswith(f"{name}.base_layer.")]:
        rename[key] = key.replace(f"{name}.base_layer.", f"{name}.", 1).removeprefix(_PEFT_PREFIX)
    merged = _merged_now(layer)
    pairs = [f"{name}.lora_{side}.{each}.weight" for each in merged for side in "AB"]
    base = f"{name}.base_layer.weight"
    if merged:
        scalings = [layer.scaling[each] for each in merged]
        is_transposed = bool(layer.fan_in_fan_out)
        yield (base, *pairs), partial(_merged, name=base, scalings=scalings, is_transposed=is_transposed, dtype=dtype)
    for key in rename:
        if key.startswith(f"{name}.lora_") and key not in pairs:
            yield key, _nothing


def _merged_now(layer: Any) -> list[str]:
    """The adapters that have to be added to the base weight; others are already merged into it."""
    active = [each for each in layer.active_adapters if each not in layer.merged_adapters]
    return [each for each in active if each in layer.r]


def _check_classes(modules: Mapping[str, nn.Module], layers: Mapping[str, nn.Module]) -> None:
    """Refuse modules of peft that do something other than LoRA, or that choose adapters as X-LoRA does."""
    inside = tuple(f"{name}." for name in layers)
    for name, each in modules.items():
        cls = own_class(each)
        kind = f"{cls.__module__}.{cls.__qualname__}"
        is_tried = not kind.startswith("peft.") or kind in _AROUND or kind.startswith(_MODELS)
        if name in layers:
            is_tried = kind in _LAYERS
        if not is_tried and not name.startswith(inside):
            raise _refused(name or "the model", f"is a {kind}")


def _check_layer(name: str, layer: Any, state: Mapping[str, Any]) -> None:
    """Refuse adapters of ``layer`` that consist of more than two matrices."""
    if f"{name}.base_layer.weight" not in state:
        raise _refused(name, f"adapts a {type(layer.base_layer).__name__}")
    own = [key.removeprefix(f"{name}.").split(".") for key in state if key.startswith(f"{name}.")]
    for adapter in _merged_now(layer):
        variant = getattr(layer, "lora_variant", {}).get(adapter)
        if variant is not None:
            raise _refused(name, f"has the variant {type(variant).__name__} in '{adapter}'")
        for option in {*layer.other_param_names, "use_dora", "lora_bias"} - _OPTIONS:
            if getattr(layer, option, {}).get(adapter):
                raise _refused(name, f"has {option} in '{adapter}'")
        found = {".".join(path) for path in own if path[1:2] == [adapter]}
        expected = {f"lora_{side}.{adapter}.weight" for side in "AB"}
        if found != expected:
            raise _refused(name, f"has the tensors {listed(sorted(found))}", f"only {listed(sorted(expected))} as in ")
        down, up = (state[f"{name}.lora_{side}.{adapter}.weight"].shape for side in "AB")
        added, expected_shape = (up[0], down[1]), (layer.out_features, layer.in_features)
        if added != expected_shape:
            raise _refused(name, f"has a product of shape {added} in '{adapter}'", f"{expected_shape} as in ")


def _refused(name: str, found: str, expected: str = "") -> ValueError:
    return ValueError(
        f"merge_lora: '{name}' {found}, expected {expected}plain LoRA of a linear layer. Pass transform=... with a "
        "function that merges its tensors."
    )


def _of_copies(name: str, module: Any, rename: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Among the copies of a whole module, give the active one the name of the original."""
    chosen = module.active_adapters if hasattr(module, "active_adapters") else [module.active_adapter]  # before 0.15
    active = next((each for each in chosen if each in module.modules_to_save), None)
    kept = f"{name}.original_module." if active is None else f"{name}.modules_to_save.{active}."
    for key in list(rename):
        if key.startswith(kept):
            rename[key] = key.replace(kept, f"{name}.", 1).removeprefix(_PEFT_PREFIX)
        elif key.startswith((f"{name}.original_module.", f"{name}.modules_to_save.")):
            yield key, _nothing


def _nothing(*_: torch.Tensor) -> dict[str, torch.Tensor]:
    return {}


def _beside(
    *given: torch.Tensor, function: Callable[..., Mapping[str, torch.Tensor]], others: Sequence[str | None]
) -> dict[str, torch.Tensor]:
    """What ``function`` makes, plus those ``given`` tensors that have another name."""
    kept = {name: tensor for name, tensor in zip(others, given, strict=True) if name is not None}
    return {**function(*given), **kept}


def _merged(
    base: torch.Tensor,
    *pairs: torch.Tensor,
    name: str,
    scalings: Sequence[float],
    is_transposed: bool,
    dtype: torch.dtype | None,
) -> dict[str, torch.Tensor]:
    compute = torch.promote_types(base.dtype, torch.float32)
    merged = base.to(compute, copy=True)
    for down, up, scaling in zip(pairs[::2], pairs[1::2], scalings, strict=True):
        update = up.to(compute) @ down.to(compute)
        merged += (update.T if is_transposed else update) * scaling
    return {name: merged.to(dtype or base.dtype)}
