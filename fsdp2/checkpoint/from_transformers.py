"""Rules for checkpoints of transformers 5, derived from its own conversion tables.

transformers renames keys and converts tensors in steps: ``MergeModulelist``, ``Concatenate``, ``Transpose``, ``Chunk``,
``Split``. This file applies the same steps to names instead of tensors. Any other step in a table is refused, and the
error names it.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from fsdp2.checkpoint.mapping import (
    CheckpointMapping,
    Concat,
    Expression,
    Shape,
    Stack,
    Transpose,
    WeightRule,
    listed,
    renamed_in,
)
from fsdp2.extras.units import own_class

_CALLER = "transformers_mapping"
_SOME_NUMBER = "1357908642"  # in place of ``{i}`` while transformers renames a key, since its patterns expect a number


def transformers_mapping(model: nn.Module) -> CheckpointMapping:
    """The ``mapping`` for ``load_safetensors`` and ``save_safetensors`` with a model of transformers 5: files are read
    as ``from_pretrained`` reads them, and written as ``save_pretrained`` writes them.

    Reads only transformers' tables. Needs the whole model, sharded or not, which may be on the meta device.

    Raises:
        ImportError: transformers is not installed, or is older than 5.
        TypeError: ``model`` is not a transformers model.
        ValueError: the model is quantised. When files are loaded or saved: no rule can express a step in a table.
    """
    try:
        core = import_module("transformers.core_model_loading")
        tables = import_module("transformers.conversion_mapping")
        base = import_module("transformers").PreTrainedModel
    except ImportError as error:
        raise ImportError(f"{_CALLER} needs transformers 5. Run: pip install 'transformers>=5'") from error
    if not isinstance(model, base):
        raise TypeError(
            f"{_CALLER}: {type(model).__name__} is no model of transformers. Pass the model itself, not what wraps it; "
            "for other models, pass a list of WeightRule as mapping."
        )
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(f"{_CALLER}: the model is quantised. Load it by from_pretrained.")
    plain = _unsharded(model)
    to_load = tables.get_model_conversion_mapping(plain)
    to_save = getattr(model, "_weight_conversions", None)  # what from_pretrained has used
    if to_save is None:
        found = tables.get_model_conversion_mapping(plain, add_legacy=False)
        to_save = [each for each in found if not isinstance(each, core.PrefixChange)]
    return TransformersMapping(core, to_load, to_save, str(model.base_model_prefix))


def _unsharded(model: Any) -> Any:
    """``model``, or a model with the classes from before ``fully_shard``, by which the tables are looked up."""
    classes = {name: own_class(module) for name, module in model.named_modules()}
    if all(type(module) is classes[name] for name, module in model.named_modules()):
        return model
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return classes[""](copy.deepcopy(model.config))


class _Value(NamedTuple):
    """A tensor during conversion; its shape is only known when files are loaded."""

    expression: Expression
    shape: Shape | None


_Found: TypeAlias = dict[
    str, list[str]
]  # the names or keys that a converter applies to, by the pattern that they match


class TransformersMapping:
    """The tables of one model. ``core`` is the module that defines the classes that the tables consist of."""

    def __init__(self, core: Any, to_load: Sequence[Any], to_save: Sequence[Any], prefix: str) -> None:
        self._core, self._to_load, self._to_save, self._prefix = core, to_load, to_save, prefix

    def rules_to_load(self, files: Mapping[str, Shape], model: Mapping[str, Shape]) -> Sequence[WeightRule]:
        transforms = copy.deepcopy(list(self._to_load))  # matching changes them
        converters = [each for each in transforms if isinstance(each, self._core.WeightConverter)]
        renamings = [each for each in transforms if not isinstance(each, self._core.WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        rules: list[WeightRule] = []
        collected: dict[str, tuple[Any, _Found]] = {}
        for key in sorted(files, key=self._core.dot_natural_key):
            name, pattern = self._core.rename_source_key(key, renamings, converters, self._prefix, model)
            if name not in model and key in model:
                name, pattern = self._core.rename_source_key(key, [], [], self._prefix, model)
            if name in model and pattern is not None:
                _, found = collected.setdefault(name, (by_pattern[pattern], {}))
                found.setdefault(pattern, []).append(key)
            elif name in model and name != key:
                rules.append(WeightRule(name, key))
        for name, (converter, found) in collected.items():
            targets = _replaced(name, converter.target_patterns) if len(converter.target_patterns) > 1 else [name]
            patterns = [pattern for pattern in converter.source_patterns if pattern in found]
            values = {pattern: [_Value(key, files[key]) for key in found[pattern]] for pattern in patterns}
            rules.append(_rule(converter, values, targets, model))
        return rules

    def rules_to_save(self, model: Mapping[str, Shape]) -> Sequence[WeightRule]:
        forwards = copy.deepcopy(list(self._to_save))[::-1]
        pairs = [(each, each.reverse_transform()) for each in forwards]
        converters = [pair for pair in pairs if isinstance(pair[0], self._core.WeightConverter)]
        renamings = [back for each, back in pairs if not isinstance(each, self._core.WeightConverter)]

        def renamed(key: str) -> str:
            new: str = self._core.apply_renamings(key.replace("{i}", _SOME_NUMBER), renamings)
            return new.replace(_SOME_NUMBER, "{i}")

        rules: list[WeightRule] = []
        collected: dict[str, tuple[Any, Any, _Found]] = {}
        for name in sorted(model, key=self._core.dot_natural_key):
            for forward, back in converters:
                key, pattern = back.rename_source_key(name)
                if pattern is not None:
                    *_, found = collected.setdefault(key, (forward, back, {}))
                    found.setdefault(pattern, []).append(name)
                    break
            else:
                key = renamed(name)
                rules += [WeightRule(name, key)] if key != name else []
        for key, (forward, back, found) in collected.items():
            rule = _rule_to_save(key, forward, back, found, model)
            rules.append(WeightRule(rule.model, renamed_in(rule.files, renamed)))
        return rules


def _rule_to_save(key: str, forward: Any, back: Any, found: _Found, model: Mapping[str, Shape]) -> WeightRule:
    absent = [pattern for pattern in back.source_patterns if pattern not in found]
    if absent:
        raise ValueError(
            f"{_CALLER}: the model has nothing for {listed(absent)}, of which '{key}' of the files is made, too. "
            "Pass a list of WeightRule as mapping."
        )
    keys = [key]
    if len(back.target_patterns) > 1 or "*" in back.target_patterns[0]:
        keys = _replaced(key, back.target_patterns)
    values = {pattern: [_Value(each, None)] for pattern, each in zip(forward.source_patterns, keys, strict=True)}
    return _rule(forward, values, [found[pattern][0] for pattern in back.source_patterns], model)


def _replaced(name: str, patterns: Sequence[str]) -> list[str]:
    """``name``, which contains the first of ``patterns``, with each of them instead; ``*`` becomes a placeholder."""
    before, found, behind = name.partition(patterns[0])
    if not found:
        raise ValueError(f"{_CALLER}: '{name}' does not show which part of it is one of {listed(patterns)}.")
    return [f"{before}{pattern.replace('*', '{i}')}{behind}" for pattern in patterns]


def _rule(
    converter: Any, values: Mapping[str, list[_Value]], targets: Sequence[str], model: Mapping[str, Shape]
) -> WeightRule:
    """What ``converter`` makes of ``values``: all ``targets``."""
    *steps, last = converter.operations
    if type(last).__name__ in ("Chunk", "Split") and len(targets) > 1:
        done = _done(steps, values, targets[0], None)
        return WeightRule(Concat(targets, dim=last.dim), done.expression)
    if len(targets) > 1:
        raise _unknown(last, targets[0])
    return WeightRule(targets[0], _done(converter.operations, values, targets[0], model[targets[0]]).expression)


def _done(steps: Sequence[Any], values: Mapping[str, list[_Value]], name: str, shape: Shape | None) -> _Value:
    """The one value that ``steps`` make of ``values``. Some steps need ``shape``, that of the result ``name``."""
    for step in steps:
        kind, together = type(step).__name__, list(itertools.chain.from_iterable(values.values()))
        has_template = any(isinstance(each.expression, str) and "{i}" in each.expression for each in together)
        if kind == "MergeModulelist":
            values = {pattern: [_stacked(each, step.dim)] for pattern, each in values.items()}
        elif kind == "Concatenate" and not has_template:
            values = {"": [_concatenated(together, step.dim)]}
        elif kind == "Transpose" and len(together) == 1 and not (_checks(step) and together[0].shape is None):
            if not (_checks(step) and together[0].shape == shape):
                values = {"": [_transposed(together[0], step)]}
        else:
            raise _unknown(step, name)
    together = list(itertools.chain.from_iterable(values.values()))
    if len(together) != 1:
        raise ValueError(
            f"{_CALLER}: '{name}' would be made of one tensor, but the files have "
            f"{listed([str(value.expression) for value in together])}."
        )
    return together[0]


def _checks(transpose: Any) -> bool:
    """Whether ``transpose`` checks shapes, and leaves a tensor alone that already has the right one."""
    return bool(getattr(transpose, "check_dims", False))


def _unknown(step: Any, name: str) -> ValueError:
    return ValueError(
        f"{_CALLER}: transformers makes '{name}' by {step!r}, which there is no rule for. Use from_pretrained or "
        "save_pretrained, or pass a list of WeightRule as mapping."
    )


def _stacked(values: Sequence[_Value], dim: int) -> _Value:
    names = [value.expression for value in values]
    shape = values[0].shape
    if shape is not None:
        at = dim % (len(shape) + 1)
        shape = (*shape[:at], len(values), *shape[at:])
    template = names[0] if len(names) == 1 else _template([name for name in names if isinstance(name, str)])
    if isinstance(template, str) and "{i}" in template:
        return _Value(Stack(template, over="i", dim=dim), shape)
    return _Value(Stack(names, dim=dim), shape)


def _template(keys: Sequence[str]) -> str | None:
    """A template for ``keys`` if they differ in one number only, so that a rule knows the names of absent ones."""
    parts = [re.split(r"(\d+)", key) for key in keys]
    if len({len(each) for each in parts}) != 1:
        return None
    differing = [at for at, each in enumerate(zip(*parts, strict=True)) if len(set(each)) > 1]
    if len(differing) != 1 or differing[0] % 2 == 0:
        return None
    (at,) = differing
    return "".join([*parts[0][:at], "{i}", *parts[0][at + 1 :]])


def _concatenated(values: Sequence[_Value], dim: int) -> _Value:
    parts = [value.expression for value in values]
    shapes = [value.shape for value in values if value.shape is not None]
    if len(shapes) < len(values):
        return _Value(Concat(parts, dim=dim), None)
    at, sizes = dim % len(shapes[0]), [shape[dim] for shape in shapes]
    whole = (*shapes[0][:at], sum(sizes), *shapes[0][at + 1 :])
    return _Value(Concat(parts, dim=dim, sizes=sizes), whole)


def _transposed(value: _Value, step: Any) -> _Value:
    shape = value.shape
    if shape is not None:
        order = list(range(len(shape)))
        order[step.dim0], order[step.dim1] = order[step.dim1], order[step.dim0]
        shape = tuple(shape[dim] for dim in order)
    return _Value(Transpose(value.expression, step.dim0, step.dim1), shape)
