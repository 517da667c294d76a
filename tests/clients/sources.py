"""Functions of clients whose dependencies are too many to install: each runs alone, from the client's own file.

`make clients` unpacks these packages, without their dependencies, into a folder that Python does not look into.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(os.environ.get("FSDP2_CLIENT_SOURCES") or Path(sys.prefix) / "client-sources")
needs_sources = pytest.mark.skipif(not FOLDER.is_dir(), reason="not installed: sources of clients; run `make clients`")


def functions_of(path: str, *names: str, **known: Any) -> dict[str, Any]:
    """The functions ``names`` of the file at ``path``, also those inside other functions, by their names.

    They find what the file imports from torch and from Python itself, each other, and ``known``, which stands for what
    the client's other files have.
    """
    tree = ast.parse((FOLDER / path).read_text(), path)
    wanted = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]
    found = {node.name: node for node in wanted}  # the last one of a name, as Python has it
    assert set(found) == set(names), f"{path} has no {set(names) - set(found)}"
    scope: dict[str, Any] = {"__name__": path, "torch": None}
    for node in _imports(tree):
        with contextlib.suppress(ImportError):  # another version of torch has it
            exec(compile(ast.Module([node], []), path, "exec"), scope)
    scope.update(known)
    for each in found.values():  # annotations stay text: they name what is not there
        exec(compile(ast.Module([each], []), path, "exec", flags=__future__.annotations.compiler_flag), scope)
    return {name: scope[name] for name in names}


def _imports(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """Those at the top of the file, of torch and of Python itself, also under a condition."""
    allowed = {"torch", *sys.stdlib_module_names} - {"__future__"}
    for node in tree.body:
        for each in ast.walk(node) if isinstance(node, ast.If | ast.Try) else (node,):
            if isinstance(each, ast.Import):
                modules = [alias.name for alias in each.names]
            elif isinstance(each, ast.ImportFrom):
                modules = [each.module or "."]
            else:
                continue
            if {module.split(".")[0] for module in modules} <= allowed:
                yield each
