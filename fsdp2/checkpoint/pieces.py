"""Applies the rules of ``checkpoint_mapping`` to one model: which box of a model tensor is which box of a file tensor.

Both sides of a rule describe the same tensor. Each overlap of a tensor on one side with one on the other is a
``Piece``. Names and integers in, boxes out: no file, no process group.

Rule: pieces cover each tensor of both sides exactly once, so one equation serves both loading and saving.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from fsdp2.checkpoint.mapping import (
    Concat,
    Expression,
    MappingLike,
    Shape,
    Stack,
    Transpose,
    WeightRule,
    bound,
    listed,
    matcher,
    names_and_overs,
    names_in,
    parts_of,
    placeholders,
)

if TYPE_CHECKING:
    import torch

Box: TypeAlias = tuple[slice, ...]
_T = TypeVar("_T")


class Piece(NamedTuple):
    """A box of a tensor of the model that is a box of a tensor of the files.

    Attributes:
        name, box: of the model.
        key, key_box: of the files.
        dims: for each dim of ``name``, the corresponding dim of ``key``; None where ``key`` has no such dim, so the box
            is one entry wide. Dims of ``key`` that are not listed are one entry wide, too.
    """

    name: str
    box: Box
    key: str
    key_box: Box
    dims: tuple[int | None, ...]

    @property
    def key_order(self) -> tuple[int, ...]:
        """A permutation of the dims of ``key`` that brings them into the order of ``name``, unmatched ones last."""
        paired = [dim for dim in self.dims if dim is not None]
        return (*paired, *(dim for dim in range(len(self.key_box)) if dim not in paired))

    @property
    def order(self) -> tuple[int, ...]:
        """A permutation of the dims of ``name`` that brings them into the order of ``key``, unmatched ones last."""
        paired = [self.dims.index(dim) for dim in range(len(self.key_box)) if dim in self.dims]
        return (*paired, *(dim for dim, other in enumerate(self.dims) if other is None))


class Resolved(NamedTuple):
    """A rule applied to one model, with placeholders filled in: the shape of each key, and the pieces."""

    keys: dict[str, Shape]
    pieces: tuple[Piece, ...]
    dtype: torch.dtype | None

    @property
    def names(self) -> list[str]:
        """The tensors of the model, each once."""
        return list(dict.fromkeys(piece.name for piece in self.pieces))


def resolve(rules: Sequence[WeightRule], model: Mapping[str, Shape], caller: str) -> list[Resolved]:
    """Apply ``rules`` to a model with tensors of the shapes ``model``.

    Raises:
        ValueError: a rule matches no tensor, or some of the tensors that it needs are missing; shapes do not fit; two
            rules match the same tensor.
    """
    found: list[Resolved] = []
    claimed: set[str] = set()
    for rule in rules:
        try:
            for values in _values(rule, model):
                found.append(_resolve(rule, values, model))
                twice = claimed.intersection(found[-1].names)
                if twice:
                    raise ValueError(f"another rule is for {listed(frozenset(twice))}, too. Keep one of them.")
                claimed.update(found[-1].names)
        except ValueError as error:
            raise ValueError(f"{caller}: mapping: the rule for {listed(names_in(rule.model))}: {error}") from error
    return found


def whole_piece(name: str, key: str, shape: Shape) -> Piece:
    """The piece that states that the tensor ``name`` is the tensor ``key``."""
    box = tuple(slice(0, size) for size in shape)
    return Piece(name, box, key, box, tuple(range(len(shape))))


def _values(rule: WeightRule, model: Mapping[str, Shape]) -> list[dict[str, str]]:
    """The distinct placeholder values that occur in the model's tensor names."""
    found: dict[tuple[tuple[str, str], ...], None] = {}
    for name, overs in names_and_overs(rule.model):
        if not placeholders(name):
            found.update({(): None} if name in model else {})
            continue
        matches = map(matcher(name).fullmatch, model)
        groups = [match.groupdict() for match in matches if match]
        found.update({tuple((key, group[key]) for key in sorted(group) if key not in overs): None for group in groups})
    if not found:
        raise ValueError("the model has no such tensor. Correct the name, or leave the rule out.")
    return [dict(values) for values in found]


def _resolve(rule: WeightRule, values: Mapping[str, str], model: Mapping[str, Shape]) -> Resolved:
    ours = _counted(bound(rule.model, values), model)
    missing = [name for name in names_in(ours) if name not in model]
    if missing:
        raise ValueError(
            f"the model has no {listed(missing)}, which the rule needs beside what is there. Correct the rule."
        )
    if len(set(names_in(ours))) < len(names_in(ours)):
        raise ValueError(f"one of {listed(names_in(ours))} is there twice. A tensor has one place in a rule.")
    ours, shape = sized(ours, model)
    leaves, theirs = _leaves(ours, shape), _leaves(bound(rule.files, values), shape)
    pieces = [piece for leaf, other in itertools.product(leaves, theirs) if (piece := _piece(leaf, other)) is not None]
    return Resolved({leaf.name: leaf.shape for leaf in theirs}, tuple(pieces), rule.dtype)


def _counted(expression: Expression, model: Mapping[str, Shape]) -> Expression:
    """``expression`` with each stack expanded to as many parts as the model has, up to the highest number."""
    if isinstance(expression, str):
        return expression
    if isinstance(expression, Transpose):
        return replace(expression, part=_counted(expression.part, model))
    parts = parts_of(expression)
    if isinstance(expression, Stack) and expression.over is not None:
        over, (part,) = expression.over, parts
        matches = [match for name in names_in(part) for match in map(matcher(name).fullmatch, model) if match]
        numbers = [int(match[over]) for match in matches if match[over].isdecimal()]
        parts = tuple(bound(part, {over: number}) for number in range(max(numbers, default=0) + 1))
        expression = Stack(parts, dim=expression.dim)
    return replace(expression, parts=tuple(_counted(part, model) for part in parts))


# Shapes


def sized(expression: Expression, shapes: Mapping[str, Shape]) -> tuple[Expression, Shape]:
    """``expression`` with the sizes of its tensors filled in, and its shape."""
    if isinstance(expression, str):
        return expression, shapes[expression]
    done = [sized(part, shapes) for part in parts_of(expression)]
    parts, found = tuple(part for part, _ in done), [shape for _, shape in done]
    if isinstance(expression, Transpose):
        return replace(expression, part=parts[0]), _swapped(expression, found[0])
    if isinstance(expression, Stack):
        dim = _dim(expression, len(found[0]) + 1)
        _check_fit(expression, [(shape, shape) for shape in found])
        return replace(expression, parts=parts), (*found[0][:dim], len(found), *found[0][dim:])
    dim = _dim(expression, len(found[0]))
    _check_fit(expression, [((*shape[:dim], *shape[dim + 1 :]), shape) for shape in found])
    sizes = tuple(shape[dim] for shape in found)
    total = sum(sizes)
    if expression.sizes is not None and sizes != _split_sizes(expression, total):
        raise ValueError(f"Concat: the sizes are {sizes} along dim {dim}, not as {expression.sizes}. Correct sizes.")
    return replace(expression, parts=parts, sizes=sizes), (*found[0][:dim], total, *found[0][dim + 1 :])


def _split_sizes(concat: Concat, size: int) -> Shape:
    """How many of the ``size`` entries belong to each part."""
    shares = tuple(concat.sizes or (1,) * len(concat.parts))
    total = sum(shares) or 1
    if size % total:
        raise ValueError(
            f"Concat: {size} entries along dim {concat.dim} cannot be split as {shares}. Pass sizes=, such as the "
            "number of heads of each part."
        )
    return tuple(share * (size // total) for share in shares)


def _check_fit(whole: Stack | Concat, shapes: Sequence[tuple[Shape, Shape]]) -> None:
    """Check that the first shapes of the pairs ``shapes`` are equal; errors name the second ones."""
    for (compared, shape), name in zip(shapes, parts_of(whole), strict=True):
        if compared != shapes[0][0] or len(shape) != len(shapes[0][1]):
            first = names_in(parts_of(whole)[0])[0]
            raise ValueError(
                f"{type(whole).__name__}: '{names_in(name)[0]}' has shape {shape} and '{first}' {shapes[0][1]}, which "
                f"do not fit along dim {whole.dim}."
            )


def _swapped(transpose: Transpose, entries: Sequence[_T]) -> tuple[_T, ...]:
    """``entries``, one per dim, with two of them swapped."""
    first, second = (_normal("Transpose", dim, len(entries)) for dim in (transpose.dim0, transpose.dim1))
    swapped = list(entries)
    swapped[first], swapped[second] = entries[second], entries[first]
    return tuple(swapped)


def _dim(whole: Stack | Concat, ndim: int) -> int:
    return _normal(type(whole).__name__, whole.dim, ndim)


def _normal(kind: str, dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise ValueError(f"{kind}: a tensor of {ndim} dims has no dim {dim}.")
    return dim % ndim


# Boxes


class _Leaf(NamedTuple):
    """Where a tensor lies within the tensor of its rule: its own dim i runs along dim ``axes[i]`` of the rule's tensor,
    and ``box`` covers all dims of the rule's tensor."""

    name: str
    axes: tuple[int, ...]
    box: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> Shape:
        return tuple(stop - start for start, stop in (self.box[axis] for axis in self.axes))


def _leaves(expression: Expression, shape: Shape) -> list[_Leaf]:
    """The leaves of an expression of ``shape``."""
    found: list[_Leaf] = []

    def walk(part: Expression, axes: tuple[int, ...], box: tuple[tuple[int, int], ...]) -> None:
        if isinstance(part, str):
            found.append(_Leaf(part, axes, box))
            return
        if isinstance(part, Transpose):
            walk(part.part, _swapped(part, axes), box)
            return
        dim = _dim(part, len(axes))
        axis, inner = axes[dim], axes if isinstance(part, Concat) else (*axes[:dim], *axes[dim + 1 :])
        start, stop = box[axis]
        for each, size in _parts_with_sizes(part, stop - start):
            walk(each, inner, (*box[:axis], (start, start + size), *box[axis + 1 :]))
            start += size

    walk(expression, tuple(range(len(shape))), tuple((0, size) for size in shape))
    return found


def _parts_with_sizes(whole: Stack | Concat, size: int) -> list[tuple[Expression, int]]:
    """How many of the ``size`` entries along ``whole.dim`` each part has; with a part for each value of ``over``."""
    parts = parts_of(whole)
    if isinstance(whole, Concat):
        return list(zip(parts, _split_sizes(whole, size), strict=True))
    if whole.over is not None and size > 0:
        parts = tuple(bound(parts[0], {whole.over: number}) for number in range(size))
    if len(parts) != size:
        raise ValueError(f"Stack: {len(parts)} parts, but the tensor has {size} entries along dim {whole.dim}.")
    return [(part, 1) for part in parts]


def _piece(ours: _Leaf, theirs: _Leaf) -> Piece | None:
    """The overlap of the two leaves, if there is one."""
    common = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(ours.box, theirs.box, strict=True)]
    is_empty = math.prod(ours.shape) == 0  # empty tensors have keys, too
    if any(start > stop or (start == stop and not is_empty) for start, stop in common):
        return None
    boxes = [
        tuple(slice(common[axis][0] - leaf.box[axis][0], common[axis][1] - leaf.box[axis][0]) for axis in leaf.axes)
        for leaf in (ours, theirs)
    ]
    dims = tuple(theirs.axes.index(axis) if axis in theirs.axes else None for axis in ours.axes)
    return Piece(ours.name, boxes[0], theirs.name, boxes[1], dims)


# What one rank reads


class Run(NamedTuple):
    """Consecutive entries of a dim on one rank: ``length`` of them from ``entry`` on, stored from ``local`` on."""

    local: int
    entry: int
    length: int


class Read(NamedTuple):
    """The slice ``local`` of this rank's part of a tensor is the slice ``of_key`` of a tensor in the files."""

    local: Box
    of_key: Box


def runs(entries: Sequence[int]) -> list[Run]:
    """Group the ``entries`` of one dim, given in the order in which a rank holds them, into runs."""
    if len(entries) == 0:
        return []
    if isinstance(entries, range) and entries.step == 1:
        return [Run(0, entries.start, len(entries))]
    starts = [at for at, entry in enumerate(entries) if at == 0 or entry != entries[at - 1] + 1]
    ends = [*starts[1:], len(entries)]
    return [Run(start, entries[start], end - start) for start, end in zip(starts, ends, strict=True)]


def reads(piece: Piece, along: Sequence[Sequence[Run]]) -> Iterator[Read]:
    """What a rank that holds the entries ``along`` each dim of the model's tensor reads of ``piece``."""
    overlaps = []
    for box, of_dim in zip(piece.box, along, strict=True):
        cut = [(run, max(run.entry, box.start), min(run.entry + run.length, box.stop)) for run in of_dim]
        overlaps.append([each for each in cut if each[1] < each[2]])
    for chosen in itertools.product(*overlaps):
        local = tuple(slice(run.local + a - run.entry, run.local + b - run.entry) for run, a, b in chosen)
        of_key = list(piece.key_box)
        for dim, box, (_, a, b) in zip(piece.dims, piece.box, chosen, strict=True):
            if dim is not None:
                start = piece.key_box[dim].start + a - box.start
                of_key[dim] = slice(start, start + b - a)
        yield Read(local, tuple(of_key))


# What users pass


def resolved_to_load(
    mapping: MappingLike | None, files: Mapping[str, Shape], model: Mapping[str, Shape], caller: str
) -> list[Resolved]:
    """The rules of ``mapping`` for a checkpoint with the tensors ``files``; raises what :func:`resolve` raises."""
    rules = mapping.rules_to_load(files, model) if mapping and hasattr(mapping, "rules_to_load") else mapping
    return _resolved(rules, model, caller)


def resolved_to_save(
    mapping: MappingLike | None, first: Sequence[str], model: Mapping[str, Shape], caller: str
) -> list[Resolved]:
    """The rules of ``mapping`` for writing a checkpoint; raises what :func:`resolve` raises. ``first``: the names of
    ``model``, with only the first name of each tied tensor."""
    once = {name: model[name] for name in first}
    rules = mapping.rules_to_save(once) if mapping and hasattr(mapping, "rules_to_save") else mapping
    return _resolved(rules, model, caller)


def _resolved(rules: object, model: Mapping[str, Shape], caller: str) -> list[Resolved]:
    found = () if rules is None else rules
    if isinstance(found, (list, tuple)) and all(isinstance(rule, WeightRule) for rule in found):
        return resolve(found, model, caller)
    raise TypeError(
        f"{caller}: mapping is {rules!r}, expected a list of WeightRule, or what transformers_mapping(model) returns."
    )
