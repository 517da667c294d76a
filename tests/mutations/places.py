"""Find a place of a package by the name of its function and by its syntax, in whichever file and however written."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from textwrap import indent

_Nodes = Sequence[ast.expr] | Sequence[ast.stmt]
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Place:
    """From byte ``start`` to byte ``end`` of a file lies one expression, or some statements in a row."""

    path: Path
    start: int
    end: int
    is_expression: bool

    def replaced(self, after: str) -> bytes:
        """The file with ``after`` in this place; the rest stays byte for byte."""
        text = self.path.read_bytes()
        before_it = text[: self.start]
        column = len(before_it) - (before_it.rfind(b"\n") + 1)
        code = f"({after})" if self.is_expression else indent(after, " " * column).lstrip(" ")
        return before_it + code.encode() + text[self.end :]

    @contextmanager
    def mutated(self, after: str) -> Iterator[None]:
        text = self.path.read_bytes()
        self.path.write_bytes(self.replaced(after))
        try:
            yield
        finally:
            self.path.write_bytes(text)


class Package:
    """The functions and classes of the Python files in ``folder``, by their qualified names (``Class.method``)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._definitions: defaultdict[str, list[tuple[Path, _Definition]]] = defaultdict(list)
        for path in sorted(folder.rglob("*.py")):
            for name, definition in _definitions(ast.parse(path.read_bytes())):
                self._definitions[name].append((path, definition))

    def find(self, place: str, before: str, after: str) -> Place:
        """Where ``before`` is in the function or class that ``place`` names. ``before`` is an expression if ``after``
        is one, too, else statements in a row. It occurs there once, unless ``place`` ends with ``#1``, ``#2``, ...

        Raises:
            LookupError: it occurs more often, or not at all: the error tells what is like it.
        """
        name, _, number = place.partition("#")
        if name not in self._definitions:
            raise LookupError(f"{self.folder.name} has no {name}; like it: {_like(name, self._definitions)}")
        wanted = _parsed(before, after)
        some = [
            (path, nodes)
            for path, definition in self._definitions[name]
            for nodes in _runs(definition, len(wanted), is_expression=isinstance(wanted[0], ast.expr))
        ]
        found = [each for each in some if _dumped(each[1]) == _dumped(wanted)]
        if not found:
            like_it = _like(before, {_unparsed(nodes) for _, nodes in some})
            raise LookupError(f"{name} has no `{before}`; like it: {like_it}")
        if number:
            found = found[int(number) - 1 : int(number)]
        if len(found) != 1:
            lines = ", ".join(f"{path.relative_to(self.folder)}:{nodes[0].lineno}" for path, nodes in found)
            raise LookupError(f"{place} has `{before}` {len(found)} times: {lines or 'too few'}")
        path, nodes = found[0]
        return Place(path, *_bytes_of(nodes, path), isinstance(wanted[0], ast.expr))


def _definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, _Definition]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            yield prefix + child.name, child
            yield from _definitions(child, f"{prefix}{child.name}.")
        else:
            yield from _definitions(child, prefix)


def _parsed(before: str, after: str) -> _Nodes:
    found, instead = ast.parse(before).body, ast.parse(after).body
    if len(found) == len(instead) == 1 and isinstance(found[0], ast.Expr) and isinstance(instead[0], ast.Expr):
        return [found[0].value]
    return found


def _runs(definition: _Definition, length: int, *, is_expression: bool) -> Iterator[_Nodes]:
    """In the order of their places: expressions, or so many statements in a row."""
    for node in sorted(ast.walk(definition), key=_position):
        if is_expression and isinstance(node, ast.expr):
            yield [node]
        for _, field in ast.iter_fields(node):
            if not is_expression and isinstance(field, list) and field and isinstance(field[0], ast.stmt):
                yield from (field[at : at + length] for at in range(len(field) - length + 1))


def _position(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _dumped(nodes: _Nodes) -> list[str]:
    return [ast.dump(node) for node in nodes]


def _unparsed(nodes: _Nodes) -> str:
    return "\n".join(map(ast.unparse, nodes))


def _like(text: str, others: Iterable[str]) -> str:
    return ", ".join(f"`{other}`" for other in get_close_matches(text, sorted(others), n=3, cutoff=0.0))


def _bytes_of(nodes: _Nodes, path: Path) -> tuple[int, int]:
    lines = path.read_bytes().splitlines(keepends=True)
    first, last = nodes[0], nodes[-1]
    assert last.end_lineno is not None
    assert last.end_col_offset is not None
    start = sum(map(len, lines[: first.lineno - 1])) + first.col_offset
    return start, sum(map(len, lines[: last.end_lineno - 1])) + last.end_col_offset
