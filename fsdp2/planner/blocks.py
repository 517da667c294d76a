"""Chooses the modules that become units: repeated blocks, and large embeddings and heads next to them. Also assigns
parameters to units, in the same way as ``fully_shard``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fsdp2.core import _torch

SMALLEST_SHARE = 0.05  # a container of blocks holds at least this share of the model's elements
LARGE_SHARE = 0.25  # with this share of the largest block's elements, another module is a unit


@dataclass(frozen=True)
class Stack:
    """Blocks that lie in one container. ``path`` is the container's path; "" is the model. ``names`` are those of its
    child blocks, in order. ``is_mapping``: it is an ``nn.ModuleDict``. ``is_whole``: it has no other children."""

    path: str
    names: tuple[str, ...]
    is_mapping: bool = False
    is_whole: bool = True

    @property
    def block_paths(self) -> tuple[str, ...]:
        return tuple(f"{self.path}.{name}" if self.path else name for name in self.names)


@dataclass(frozen=True)
class Units:
    """The modules that get a ``fully_shard`` call, besides the model: all blocks of ``stacks``, and modules by path.

    Attributes:
        tied: paths of large modules that share a parameter with another module; they stay with the model.
    """

    stacks: tuple[Stack, ...]
    large: tuple[str, ...]
    tied: tuple[str, ...] = ()

    @property
    def block_paths(self) -> tuple[str, ...]:
        return tuple(path for stack in self.stacks for path in stack.block_paths)

    def renamed(self, rename: Callable[[str], str]) -> Units:
        """The same units with renamed paths."""
        stacks = tuple(replace(stack, path=rename(stack.path)) for stack in self.stacks)
        return Units(stacks, tuple(map(rename, self.large)), tuple(map(rename, self.tied)))

    @property
    def paths(self) -> tuple[str, ...]:
        return (*self.block_paths, *self.large)


def params_of_units(
    model: nn.Module, units: Units, ignored: Collection[nn.Parameter] = ()
) -> dict[str, dict[str, nn.Parameter]]:
    """The parameters of each unit by their names in it; units by path in the order of modules, the model itself by "".
    Each parameter is listed once, however many modules hold it; if these belong to several units, the model has it.
    ``ignored`` parameters are in no unit."""
    left_out = set(map(id, ignored))
    owners: dict[int, str] = {}
    for path in units.paths:
        for param in model.get_submodule(path).parameters():
            owners[id(param)] = "" if id(param) in owners else path
    inside = {module for path in units.paths for module in model.get_submodule(path).modules()}
    for module in set(model.modules()) - inside:
        owners.update((id(param), "") for param in _own(module))
    return {
        path: {
            name: param
            for name, param in model.get_submodule(path).named_parameters()
            if owners[id(param)] == path and id(param) not in left_out
        }
        for path, _ in model.named_modules(remove_duplicate=False)
        if path in ("", *units.paths)
    }


def find_units(model: nn.Module) -> Units:
    """Find the units of ``model`` by its structure.

    Raises:
        ValueError: no module list of ``model`` holds blocks of equal structure.
    """
    stacks = tuple(_stacks(model, "", SMALLEST_SHARE * _numel(model), set()))
    if not stacks:
        containers = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(
            f"plan: found no repeated blocks in this {type(model).__name__}, expected an nn.ModuleList, "
            "nn.Sequential or nn.ModuleDict with at least two children of equal structure that hold a large part of "
            f"the parameters. It has modules of the classes {', '.join(containers)}. Keep the blocks in an "
            "nn.ModuleList, or call fsdp2.fully_shard by hand."
        )
    blocks = {model.get_submodule(path) for stack in stacks for path in stack.block_paths}
    enough = LARGE_SHARE * max(map(_numel, blocks))
    owners = Counter(id(param) for module in model.modules() for param in _own(module))
    found = list(_large(model, "", set(blocks), enough, owners))
    large, tied = (tuple(path for path, is_tied in found if is_tied == wanted) for wanted in (False, True))
    return Units(stacks, large, tied)


def structure(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules that compute the same, as far as classes and parameters tell."""
    params = tuple(
        (name, tuple(param.shape), param.dtype, param.requires_grad) for name, param in module.named_parameters()
    )
    return type(module), params


def _stacks(module: nn.Module, path: str, enough: float, seen: set[nn.Module]) -> Iterator[Stack]:
    """The outermost stacks; modules inside them are not searched. A module with several paths counts at the first."""
    children = {name: child for name, child in module.named_children() if _numel(child) and child not in seen}
    seen.update(children.values())
    if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)) and _numel(module) >= enough:
        containers = (nn.ModuleList, nn.ModuleDict)  # they have no forward of their own
        callable_ones = {name: child for name, child in children.items() if not isinstance(child, containers)}
        entries = list(module.values() if isinstance(module, nn.ModuleDict) else module)
        # A single block that occurs several times is repeated, too.
        counts = Counter(structure(child) for child in entries if child in callable_ones.values())
        repeated = {kind for (kind, _), count in counts.items() if count > 1}  # others of the class are blocks, too
        if repeated:
            names = tuple(name for name, child in callable_ones.items() if type(child) in repeated)
            yield Stack(path, names, isinstance(module, nn.ModuleDict), len(names) == len(entries))
            return
    for name, child in children.items():
        yield from _stacks(child, f"{path}.{name}" if path else name, enough, seen)


def _large(
    module: nn.Module, path: str, units: set[nn.Module], enough: float, owners: Counter[int]
) -> Iterator[tuple[str, bool]]:
    """Paths of large modules, and whether they are tied. ``units`` are those found so far; no large module contains
    one, and modules inside them are not searched. A module with several paths counts at the first."""
    if module in units:
        return
    own = _own(module)
    if sum(param.numel() for param in own) >= enough and units.isdisjoint(module.modules()):
        is_tied = any(owners[id(param)] > 1 for param in own)
        yield path, is_tied
        if not is_tied:
            units.add(module)
            return
    for name, child in module.named_children():
        yield from _large(child, f"{path}.{name}" if path else name, units, enough, owners)


def _own(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that ``module`` holds itself."""
    return [param for param in _torch.parameters_dict(module).values() if param is not None]


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())
