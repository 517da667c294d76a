"""Imports go down only, and private torch stays behind one door.

``LAYERS`` is the picture of the design as data. A new room is entered here, or the first test fails.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fsdp2

LAYERS: list[set[str]] = [
    {"api", "_torch"},  # words; the door to private torch
    {"layout", "mesh", "specs", "precision", "nested", "extensions"}  # rules
    | {"schedule", "skipped", "states", "budget"},
    {"offload", "streams", "buffers", "comm", "custom_comm", "services"}  # devices
    | {"same_host", "host_meeting", "host_ranks", "remote_memory"},
    {"param", "plan", "footprint", "changes", "bindings", "freed", "direct_uses"},  # compiled, plain data
    {"all_gather", "packing", "reduce_scatter", "kept_gradients", "landing"}  # effects, on one group
    | {"extended", "shards", "gradients", "watch", "resting", "gathered", "group"}
    | {
        "units",
        "agreement",
        "presence",
        "reductions",
        "admission",
        "performer",
        "stalls",
        "passes",
        "runtime",
    },  # and on all groups of a root
    {
        "hooks",
        "inner_gradients",
        "copies",
        "ties",
        "controls",
        "communication",
        "module",
        "resolve",
        "fully_shard",
    },  # torch.nn surface
    {"trace", "memory", "clip", "scopes", "neighbours", "runs", "optim", "tensors", "testing"},  # companions
    {"__init__"},
]
LAYER_OF = {room: index for index, rooms in enumerate(LAYERS) for room in rooms}
PACKAGE = Path(fsdp2.__file__).parent


def _files(room: str) -> list[Path]:
    """A room is a file, or a folder of files with one subject."""
    file = PACKAGE / f"{room}.py"
    return [file] if file.exists() else sorted((PACKAGE / room).glob("*.py"))


ROOMS = sorted(
    {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
)
TREES = {
    room: ast.Module([node for file in _files(room) for node in ast.parse(file.read_text()).body], []) for room in ROOMS
}

# "rules: no stream, no process group"; of all rules, only the mesh knows groups. Others name types: of a mesh, of a
# placement, of what users implement.
WITHOUT_TORCH = {"layout", "schedule", "skipped", "budget"}
WITHOUT_DISTRIBUTED = (LAYERS[1] - {"mesh", "specs", "extensions"}) | {"streams", "buffers", "offload", "plan"}


def _imported_names(room: str) -> set[str]:
    """Every module and every name imported, as dotted paths."""
    found: set[str] = set()
    for node in ast.walk(TREES[room]):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{room}, line {node.lineno}: relative import"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _imported_rooms(room: str) -> set[str]:
    parts = [name.split(".") for name in _imported_names(room)]
    return {part[1] for part in parts if part[0] == "fsdp2" and len(part) > 1} - {room}


def _torch_chains(room: str) -> set[str]:
    """Dotted paths of all torch names that are imported, or read from an imported torch module."""
    bound: dict[str, str] = {}
    for node in ast.walk(TREES[room]):
        if isinstance(node, ast.Import):
            bound.update({alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names if alias.asname})
            bound.update(
                {alias.name.split(".")[0]: alias.name.split(".")[0] for alias in node.names if not alias.asname}
            )
        elif isinstance(node, ast.ImportFrom):
            bound.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    chains = set(bound.values())
    for node in ast.walk(TREES[room]):
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


def test_every_room_has_a_layer() -> None:
    assert set(ROOMS) == set(LAYER_OF)


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_from_its_own_or_lower_layers_only(room: str) -> None:
    upward = {other for other in _imported_rooms(room) & set(LAYER_OF) if LAYER_OF[other] > LAYER_OF[room]}
    assert upward == set()


def test_no_two_rooms_import_each_other_by_any_way_round() -> None:
    remaining = {room: _imported_rooms(room) & set(ROOMS) for room in ROOMS}
    while leaves := {room for room, imported in remaining.items() if not imported & set(remaining)}:
        for room in leaves:
            del remaining[room]
    assert remaining == {}, "these import each other in a circle, or are imported by such"


@pytest.mark.parametrize("room", ROOMS)
def test_torchs_own_fsdp_is_imported_nowhere(room: str) -> None:
    assert {name for name in _imported_names(room) if name.startswith("torch.distributed.fsdp")} == set()
    assert {chain for chain in _torch_chains(room) if chain.startswith("torch.distributed.fsdp")} == set()


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "_torch"])
def test_private_names_of_torch_are_used_behind_the_door_only(room: str) -> None:
    """Names reached from an imported torch module; attributes of tensors and modules are not looked at."""
    private = {chain for chain in _torch_chains(room) if any(_is_private(part) for part in chain.split("."))}
    assert private == set(), "move them to _torch"


@pytest.mark.parametrize("room", sorted(WITHOUT_TORCH))
def test_room_of_plain_values_knows_no_torch(room: str) -> None:
    assert {name for name in _imported_names(room) if name.split(".")[0] == "torch"} == set()


@pytest.mark.parametrize("room", sorted(WITHOUT_DISTRIBUTED))
def test_room_knows_no_process_group(room: str) -> None:
    assert {chain for chain in _torch_chains(room) if chain.startswith("torch.distributed")} == set()
