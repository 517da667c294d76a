"""Imports go down the list of folders only, private torch stays behind one door, and tests mirror the package."""

from __future__ import annotations

import ast
import copy
import functools
import re
from pathlib import Path

import pytest
import torch.distributed.fsdp

import fsdp2

# From the top to the bottom. A folder imports from folders below it; its own files import each other without circles.
FOLDERS: list[set[str]] = [
    {"__main__", "installation"},
    {"report"},
    {"planner"},
    {"fsdp1"},
    {"memory"},
    {"checkpoint"},
    {"optim", "testing"},
    {"tensors"},
    {"extras"},
    {"core", "core/comms", "core/plans", "core/schedules"},
    {"core/api"},
    {"core/runtime"},
    {"core/group"},
    {"core/comm"},
    {"core/schedule"},
    {"core/plan"},
    {"core/marks", "core/seams", "core/trees", "core/types", "core/_torch"},
]
LEVEL_OF = {folder: level for level, folders in enumerate(FOLDERS) for folder in folders}
PACKAGE = Path(fsdp2.__file__).parent


def _module_name(path: Path) -> str:
    """Dotted, from the package on: ``group.all_gather``; of a folder's ``__init__.py`` the folder's."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name: path for path in sorted(PACKAGE.rglob("*.py")) if (name := _module_name(path))}


def _folder(module: str) -> str:
    """A room, or a folder of the core."""
    parts = module.split(".")
    return "/".join(parts[: 1 + (parts[0] == "core")])


KNOWS_NO_TORCH = {name for name in MODULES if _folder(name) == "core/schedule"} | {"core.plan.layout"}
# Types of meshes and placements are words; process groups are not.
_OF_PLANS = {name for name in MODULES if _folder(name) == "core/plan"}
KNOWS_NO_PROCESS_GROUP = _OF_PLANS - {"core.plan.mesh", "core.plan.placements"}
DOORS = {"_torch", "torch_names"}  # the core's, and those of folders above it


@functools.cache  # the whole package takes a second: only the process that runs these tests spends it
def _tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def _imported_names(tree: ast.AST) -> set[str]:
    """Every module and every name imported, as dotted paths."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


class _WithoutTypes(ast.NodeTransformer):
    """Takes out ``if TYPE_CHECKING:``. Its imports name types of annotations, and never run."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        is_for_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return None if is_for_types else self.generic_visit(node)


def _imported_modules(module: str, tree: ast.AST | None = None) -> set[str]:
    """The modules of this package that ``module`` imports, or that ``tree``, a part of it, imports."""
    found = set()
    for name in _imported_names(tree or _tree(module)):
        parts = name.split(".")
        if parts[0] != "fsdp2":
            continue
        candidates = [".".join(parts[1:stop]) for stop in range(len(parts), 1, -1)]
        found.update([each for each in candidates if each in MODULES][:1])
    return found - {module}


def _torch_chains(module: str) -> set[str]:
    """Dotted paths of all torch names that are imported, or read from an imported torch module."""
    tree = _tree(module)
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                bound[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            bound.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    chains = set(bound.values())
    for node in ast.walk(tree):
        attributes: list[str] = []
        value: ast.expr | None = node if isinstance(node, ast.Attribute) else None
        while isinstance(value, ast.Attribute):
            attributes.append(value.attr)
            value = value.value
        if attributes and isinstance(value, ast.Name) and value.id in bound:
            chains.add(".".join([bound[value.id], *reversed(attributes)]))
    return {chain for chain in chains if chain.split(".")[0] == "torch"}


def _is_private(name: str) -> bool:
    """Names of a protocol, such as ``__torch_function__``, are for everyone."""
    return name.startswith("_") and not name.endswith("__")


def test_modules_import_from_their_own_or_lower_folders_only() -> None:
    assert {_folder(module) for module in MODULES} == set(LEVEL_OF)
    seams = {"core.seams": _WithoutTypes().visit(copy.deepcopy(_tree("core.seams")))}  # names types of all floors
    imports = [(module, other) for module in MODULES for other in _imported_modules(module, seams.get(module))]
    assert [each for each in imports if LEVEL_OF[_folder(each[1])] < LEVEL_OF[_folder(each[0])]] == []


@pytest.mark.ci
def test_no_two_modules_import_each_other_by_any_way_round() -> None:
    running = {module: _WithoutTypes().visit(copy.deepcopy(_tree(module))) for module in MODULES}
    remaining = {module: _imported_modules(module, tree) for module, tree in running.items()}
    while leaves := {module for module, imported in remaining.items() if not imported & set(remaining)}:
        for module in leaves:
            del remaining[module]
    assert remaining == {}, "these import each other in a circle, or are imported by such"


@pytest.mark.parametrize("module", MODULES)
def test_torchs_own_fsdp_is_imported_nowhere(module: str) -> None:
    """FSDP1's front takes over settings and policies, which are plain data and functions of modules."""
    theirs = _imported_names(_tree(module)) | _torch_chains(module)
    theirs = {name for name in theirs if name.startswith("torch.distributed.fsdp")}
    if _folder(module) == "fsdp1":
        runtime = {"FullyShardedDataParallel", "FlatParameter", *torch.distributed.fsdp._fully_shard.__all__}
        theirs = {name for name in theirs if runtime & set(name.split("."))}
    assert theirs == set()


@pytest.mark.parametrize("module", [each for each in MODULES if each.split(".")[-1] not in DOORS])
def test_private_names_of_torch_are_used_behind_the_door_only(module: str) -> None:
    """Names reached from an imported torch module; attributes of tensors and modules are not looked at."""
    private = {chain for chain in _torch_chains(module) if any(_is_private(part) for part in chain.split("."))}
    assert private == set(), "move them to _torch, or to torch_names of the folder"


@pytest.mark.parametrize("module", sorted(KNOWS_NO_TORCH | KNOWS_NO_PROCESS_GROUP))
def test_module_of_plain_values_knows_no_torch_and_plans_no_process_group(module: str) -> None:
    known = _imported_names(_tree(module)) | _torch_chains(module)
    what = "torch" if module in KNOWS_NO_TORCH else "torch.distributed"
    assert {name for name in known if name == what or name.startswith(f"{what}.")} == set()


def _past_the_face(module: str) -> set[str]:
    """What ``module``, in a room above the core, takes from the core other than the names of its face."""
    nodes = [node for node in ast.walk(_tree(module)) if isinstance(node, ast.ImportFrom)]
    taken = {(node.module or "", alias.name) for node in nodes for alias in node.names}
    of_core = {(of, name) for of, name in taken if of.split(".")[:2] == ["fsdp2", "core"]}
    return {f"{of}.{name}" for of, name in of_core if of != "fsdp2.core" or name not in fsdp2.core.__all__}


def test_the_face_of_the_core_is_small_and_has_a_page() -> None:
    names = fsdp2.core.__all__
    assert len(names) <= 45
    page = (PACKAGE.parent / "docs" / "advanced" / "core.md").read_text()
    rows = [line.split("|") for line in page.partition("## The names")[2].splitlines() if line.startswith("| `")]
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row[1])) == sorted(names)
    for _, of_row, _, example, _ in rows[: len(rows)]:
        if (PACKAGE / example.strip(" `")).is_file():
            text = (PACKAGE / example.strip(" `")).read_text()
            assert any(re.search(rf"\b{name}\b", text) for name in re.findall(r"`(\w+)`", of_row)), example


@pytest.mark.parametrize("module", [each for each in MODULES if not _folder(each).startswith("core")])
def test_rooms_use_the_face_of_the_core_only(module: str) -> None:
    assert _past_the_face(module) == set()


def test_unit_tests_of_a_room_are_named_after_its_files() -> None:
    """So that "what tests ``gradients.py``?" has one answer. Tests of the whole package are at the top."""
    folder = Path(__file__).parent
    files = {path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.*")}
    tests = {path.relative_to(folder).with_suffix("") for path in folder.glob("*/**/test_*.py")}
    assert {test for test in tests if test.with_name(test.name.removeprefix("test_")) not in files} == set()
