"""LoRA adapters of peft, merged while their model is streamed: the trainer's model stays as it is.

Reads attributes of peft's layers and imports nothing of peft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp2.extras.state import bound_state
from fsdp2.runtime.torch_names import plain_named_modules

_PEFT_PREFIX = "base_model.model."


class MergedLora(NamedTuple):
    """Arguments for :func:`stream_full_params`, as :func:`merge_lora` returns them."""

    transform: Mapping[str | tuple[str, ...], Callable[..., Mapping[str, torch.Tensor]]]
    rename: Mapping[str, str]


def merge_lora(model: nn.Module, dtype: torch.dtype | None = None) -> MergedLora:
    """Arguments with which ``stream_full_params`` hands out peft's ``model`` as ``merge_and_unload`` would leave it.

    The base model's names, each weight with its active LoRA adapters added: ``W + scaling * B A``, in fp32 where they
    are in half precision. Other adapters are left out. Of ``modules_to_save``, the active copy counts. Names and
    scalings are read once: call it again after ``set_adapter``. Where the base model ties a weight that is adapted,
    or has an active copy, its other names get the values that the trainer computes with: those without the adapter.

    Args:
        model: a ``PeftModel``, sharded or not.
        dtype: of the merged weights. Default: that of the base weight.

    Raises:
        ValueError: there is no LoRA layer; a layer is adapted in another way (DoRA, embeddings, trainable tokens,
            convolutions, biases).

    Source: Hu et al., "LoRA", arXiv 2106.09685; the attributes ``scaling`` and ``active_adapters`` of peft.
    """
    modules = dict(plain_named_modules(model, remove_duplicate=False))
    layers = {name: each for name, each in modules.items() if hasattr(each, "base_layer") and hasattr(each, "lora_A")}
    if not layers:
        raise ValueError(
            f"merge_lora: no module of this {type(model).__name__} is a LoRA layer of peft. Stream it without, or pass "
            "the model that get_peft_model returned."
        )
    for name, each in modules.items():
        if hasattr(each, "base_layer") and hasattr(each, "adapter_layer_names") and name not in layers:
            raise _refused(name, f"is a {type(each).__name__}")
    transform: dict[str | tuple[str, ...], Any] = {}
    state = bound_state(model)
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
    """``transform``, for tensors that have several names in ``state``: a stream has them once. Each is taken once, and
    goes out as it is, too, under a name that nothing takes."""
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
    """What becomes of the tensors of the LoRA ``layer``. Takes ``base_layer`` out of the names."""
    active = [each for each in layer.active_adapters if each not in layer.merged_adapters]
    _check_layer(name, layer, active)
    for key in [key for key in rename if key.startswith(f"{name}.base_layer.")]:
        rename[key] = key.replace(f"{name}.base_layer.", f"{name}.", 1).removeprefix(_PEFT_PREFIX)
    merged = [each for each in active if each in layer.lora_A]
    pairs = [f"{name}.lora_{side}.{each}.weight" for each in merged for side in "AB"]
    base = f"{name}.base_layer.weight"
    if merged:
        scalings = [layer.scaling[each] for each in merged]
        is_transposed = bool(getattr(layer, "fan_in_fan_out", False))
        yield (base, *pairs), partial(_merged, name=base, scalings=scalings, is_transposed=is_transposed, dtype=dtype)
    for key in rename:
        if key.startswith(f"{name}.lora_") and key not in pairs:
            yield key, _nothing


def _check_layer(name: str, layer: Any, active: Sequence[str]) -> None:
    base = layer.base_layer
    found = None
    if hasattr(layer, "parameter_name") or getattr(base, "weight", torch.empty(0)).ndim != 2:
        found = f"adapts a {type(base).__name__}"
    for adapter in active:
        if adapter in getattr(layer, "lora_variant", {}):
            found = f"has the variant {type(layer.lora_variant[adapter]).__name__} in '{adapter}'"
        elif adapter in layer.lora_embedding_A:
            found = "adapts an embedding"
        elif layer.lora_bias.get(adapter):
            found = f"has a bias in '{adapter}'"
    if found is not None:
        raise _refused(name, found)


def _refused(name: str, found: str) -> ValueError:
    return ValueError(
        f"merge_lora: '{name}' {found}, expected plain LoRA of a linear layer. Pass transform=... with a function that "
        "merges its tensors."
    )


def _of_copies(name: str, module: Any, rename: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Of the copies of a whole module, the active one takes the name of the original one."""
    active = next((each for each in module.active_adapters if each in module.modules_to_save), None)
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
    """What ``function`` makes, and those ``given`` that have another name, too."""
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
