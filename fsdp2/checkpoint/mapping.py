"""Rules for checkpoints whose tensors differ from the model's: stacked, concatenated, split, or transposed.

A rule is an equation between an expression of names in the model and an expression of keys in the files. It knows
neither the model nor the files: ``pieces`` applies it to them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

from fsdp2.extras import output
from fsdp2.extras.checked import checked

if TYPE_CHECKING:
    import torch

Shape: TypeAlias = tuple[int, ...]

_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
MAX_LISTED = 20


# What users write


@checked()
@dataclass(frozen=True)
class Stack:
    """Tensors of one shape, stacked along a new dim.

    Attributes:
        parts: names or expressions, in order; or a single one whose names contain the placeholder ``over``.
        over: a placeholder for the numbers 0, 1, ..., up to however many exist: ``Stack("experts.{e}.up", over="e")``.
        dim: the new dim.
    """

    parts: Expression | Sequence[Expression]
    over: str | None = None
    dim: int = 0

    def __post_init__(self) -> None:
        _set_parts(self)
        if self.over is not None:
            found = [name for name in names_in(self) if self.over not in placeholders(name)]
            if len(parts_of(self)) != 1 or found:
                raise ValueError(
                    f"Stack: expected one part with the placeholder '{{{self.over}}}' in its names, got "
                    f"{listed(names_in(self))}."
                )


@checked()
@dataclass(frozen=True)
class Concat:
    """Tensors concatenated along a dim.

    Attributes:
        parts: names or expressions, in order.
        dim: the dim to concatenate along; sizes may differ only there.
        sizes: proportions of the parts along ``dim``, such as numbers of heads: ``(8, 2, 2)``. Default: on the model's
            side of a rule, the sizes in the model; on the files' side, equal sizes.
    """

    parts: Sequence[Expression]
    dim: int = 0
    sizes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        _set_parts(self)
        if self.sizes is None:
            return
        object.__setattr__(self, "sizes", tuple(self.sizes))
        if len(self.sizes) != len(self.parts) or any(size < 0 for size in self.sizes):
            raise ValueError(f"Concat: sizes is {self.sizes}, expected {len(self.parts)} sizes.")


@checked()
@dataclass(frozen=True)
class Transpose:
    """A tensor with two of its dims swapped.

    Attributes:
        part: a name or an expression.
        dim0, dim1: the dims.
    """

    part: Expression
    dim0: int = -2
    dim1: int = -1

    def __post_init__(self) -> None:
        _check_expression(self.part, "Transpose")


Expression: TypeAlias = str | Stack | Concat | Transpose


@checked()
@dataclass(frozen=True)
class WeightRule:
    """States that the tensors ``model`` of a model are the tensors ``files`` of a checkpoint.

    Names may have placeholders, such as ``{layer}``. Each stands for part of a name without dots, the same on both
    sides; the rule applies to every match in the model. Tensors without a rule keep their names in the files.

    Attributes:
        model: a name in the state dict, or ``Stack``, ``Concat`` or ``Transpose`` of such names.
        files: a key of the files, or an expression of keys.
        dtype: the dtype in which floating-point tensors are saved. Default: the dtype used for all other tensors.
            Loading always casts to the dtypes of the model.
    """

    model: Expression
    files: Expression
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        sides = []
        for side in (self.model, self.files):
            _check_expression(side, "WeightRule")
            sides.append({name: placeholders(name) - overs for name, overs in names_and_overs(side)})
        wanted = next(iter(sides[0].values()))
        for name, found in [*sides[0].items(), *sides[1].items()]:
            if found != wanted:
                raise ValueError(
                    f"WeightRule: '{name}' has the placeholders {listed(found)}, and '{next(iter(sides[0]))}' "
                    f"{listed(wanted)}. Let all names of the rule have the same ones, besides those of Stack(over=)."
                )


class CheckpointMapping(Protocol):
    """An object that makes rules for given files, such as ``transformers_mapping(model)``. It is passed shapes by key
    and by name. All ranks must get the same rules."""

    def rules_to_load(self, files: Mapping[str, Shape], model: Mapping[str, Shape]) -> Sequence[WeightRule]:
        """The rules for loading a checkpoint with the tensors ``files``."""

    def rules_to_save(self, model: Mapping[str, Shape]) -> Sequence[WeightRule]:
        """The rules for writing a checkpoint; ``model`` contains each tied tensor once."""


MappingLike: TypeAlias = Sequence[WeightRule] | CheckpointMapping


def _set_parts(whole: Stack | Concat) -> None:
    kind, parts = type(whole).__name__, whole.parts
    if isinstance(parts, (str, Stack, Concat, Transpose)) and isinstance(whole, Stack):
        parts = (parts,)
    if isinstance(parts, str) or not isinstance(parts, Sequence) or not parts:
        raise TypeError(f"{kind}: parts is {parts!r}, expected a list of names or expressions.")
    for part in parts:
        _check_expression(part, kind)
    object.__setattr__(whole, "parts", tuple(parts))


def _check_expression(part: object, kind: str) -> None:
    if not isinstance(part, (str, Stack, Concat, Transpose)):
        raise TypeError(f"{kind}: {part!r} is no name, Stack, Concat or Transpose.")


def parts_of(whole: Stack | Concat | Transpose) -> tuple[Expression, ...]:
    """The parts of ``whole``."""
    parts = whole.part if isinstance(whole, Transpose) else whole.parts
    return parts if isinstance(parts, tuple) else (parts,)


# Names


def placeholders(name: str) -> frozenset[str]:
    """The placeholders in ``name``."""
    return frozenset(_PLACEHOLDER.findall(name))


def names_in(expression: Expression) -> list[str]:
    """All names of ``expression`` in order."""
    return [name for name, _ in names_and_overs(expression)]


def names_and_overs(
    expression: Expression, overs: frozenset[str] = frozenset()
) -> Iterator[tuple[str, frozenset[str]]]:
    """Each name, and the ``over`` placeholders of the stacks around it."""
    if isinstance(expression, str):
        yield expression, overs
        return
    if isinstance(expression, Stack) and expression.over is not None:
        overs |= {expression.over}
    for part in parts_of(expression):
        yield from names_and_overs(part, overs)


def renamed_in(expression: Expression, rename: Callable[[str], str]) -> Expression:
    """``expression`` with ``rename`` applied to its names."""
    if isinstance(expression, str):
        return rename(expression)
    if isinstance(expression, Transpose):
        return replace(expression, part=renamed_in(expression.part, rename))
    return replace(expression, parts=tuple(renamed_in(part, rename) for part in parts_of(expression)))


def bound(expression: Expression, values: Mapping[str, object]) -> Expression:
    """``expression`` with ``values`` substituted for some placeholders."""

    def value(found: re.Match[str]) -> str:
        return str(values.get(found[1], found[0]))

    return renamed_in(expression, lambda name: _PLACEHOLDER.sub(value, name))


def matcher(name: str) -> re.Pattern[str]:
    """Matches what ``name`` may stand for, with a group for each placeholder."""
    seen: set[str] = set()
    parts = []
    for index, part in enumerate(_PLACEHOLDER.split(name)):
        if index % 2 == 0:
            parts.append(re.escape(part))
        elif part in seen:
            parts.append(f"(?P={part})")
        else:
            seen.add(part)
            parts.append(f"(?P<{part}>[^.]+)")
    return re.compile("".join(parts))


def listed(names: Sequence[str] | frozenset[str]) -> str:
    """The first few of ``names``, formatted for error messages."""
    ordered = sorted(names) if isinstance(names, frozenset) else names
    return output.listed((f"'{name}'" for name in ordered), MAX_LISTED) or "none"
